"""Copy of arrays on CPU devices in reused memory, which a save reads while training goes on.

On the CPU, saved and trained arrays share memory. A buffer under read cannot be donated, so XLA would copy it in the
next update into fresh pages, which takes about four times as long as copying into existing pages, and training waits.
On other devices Orbax itself copies before it returns, and nothing is done here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

LEAST = 1 << 20
"""Bytes of the smallest array that is worth a copy."""

ALIGNED = 64
"""Alignment in bytes that JAX needs to use memory without a copy."""


class Staging:
    """Memory for one copy of some arrays; each copy overwrites the one before."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], np.ndarray] = {}

    def copy(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays by name, the large ones of CPU devices as copies with the same shardings."""
        large = [name for name, array in arrays.items() if _is_large(array)]
        memory: dict[tuple[Any, ...], np.ndarray] = {}
        work: list[tuple[np.ndarray, np.ndarray]] = []
        for name in large:
            for shard in arrays[name].addressable_shards:
                key = _key(name, shard)
                if key not in memory:  # devices that hold the same part share its copy
                    source = np.asarray(shard.data)
                    memory[key] = self._place(key, source)
                    work.append((memory[key], source))
        self._memory = memory
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(lambda pair: np.copyto(*pair), work))
        return dict(arrays) | {name: _like(arrays[name], name, memory) for name in large}

    def _place(self, key: tuple[Any, ...], source: np.ndarray) -> np.ndarray:
        """Memory for a copy of `source`: the previous copy's if it fits."""
        before = self._memory.get(key)
        if before is not None and (before.shape, before.dtype) == (source.shape, source.dtype):
            return before
        space = np.empty(source.nbytes + ALIGNED, np.uint8)
        start = -space.ctypes.data % ALIGNED
        return space[start : start + source.nbytes].view(source.dtype).reshape(source.shape)


def _is_large(array: Any) -> bool:
    """True for a large array of CPU devices with a dtype that NumPy lays out alike."""
    if not isinstance(array, jax.Array) or array.nbytes < LEAST or array.is_deleted():
        return False
    on_cpu = all(shard.device.platform == "cpu" for shard in array.addressable_shards)
    return on_cpu and array.dtype.kind in "fiub"


def _key(name: str, shard: Any) -> tuple[Any, ...]:
    return name, *((part.start, part.stop) for part in shard.index)


def _like(array: jax.Array, name: str, memory: Mapping[tuple[Any, ...], np.ndarray]) -> jax.Array:
    """An array with the sharding of `array` whose parts lie in `memory`."""
    parts = [
        jax.device_put(memory[_key(name, shard)], shard.device, may_alias=True) for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
