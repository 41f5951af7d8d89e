"""Digests of memory, xxh3-128: of arrays, of arrays while they fill, and of arrays while they are copied.

Memory that is in a cache goes through the library, a piece at a time. Large memory that is not goes through
`xxh3_kernels`, where numba is installed: the same digest with fewer passes over memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

import numpy as np

LEAST = 64 << 10
"""Bytes of a tensor from which the compiled copy is used: below, its call costs more than it saves."""

LARGE = 2 << 20
"""Bytes of a tensor from which the compiled digest is used: smaller versions are not worth the second to load numba."""

PIECE = 1 << 18
"""Bytes that are copied and digested together by the library: they fit in the second-level cache."""


def library(name: str) -> Any:
    """Library of the extra `sync`. ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"longhaul.weight_sync needs {name}: pip install 'longhaul-rl[sync]'") from None


def digest(data: np.ndarray) -> bytes:
    """Digest, 16 bytes, of uint8 [n], contiguous and no longer in a cache."""
    if data.size >= LARGE and (kernels := _kernels()) is not None:
        return kernels.digest(data)
    return library("xxhash").xxh3_128_digest(data)


class Running:
    """Running digest of an array, uint8 [n], that fills from its beginning on."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._done, self._running = data, 0, library("xxhash").xxh3_128()

    def upto(self, count: int) -> None:
        """Takes the bytes up to `count`, which are in place and will not change."""
        if count > self._done:
            self._running.update(self._data[self._done : count])
            self._done = count

    def end(self) -> bytes:
        """Digest of the whole array, once all of it is in place."""
        self.upto(self._data.size)
        return self._running.digest()


def poured(source: np.ndarray, target: np.ndarray, past: bool) -> bytes:
    """Digest of `source`, uint8 [n], which is copied to `target` on the way; both are contiguous.

    `past`: written past the caches, for a target that does not fit in them, or is not read again soon.
    """
    if past and source.size >= LEAST and (kernels := _kernels()) is not None and not target.ctypes.data % 64:
        return kernels.poured(source, target)
    running = Running(source)
    for begin in range(0, source.size, PIECE):
        end = min(begin + PIECE, source.size)
        running.upto(end)
        target[begin:end] = source[begin:end]
    return running.end()


@functools.cache
def _kernels() -> Any:
    """Module of the compiled loops; None where numba is not installed, or the machine is big-endian."""
    if sys.byteorder != "little" or not importlib.util.find_spec("numba"):
        return None
    from longhaul.weight_sync.digest import xxh3_kernels

    return xxh3_kernels
