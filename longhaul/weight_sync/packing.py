"""Packing of tensors into one image, a flat block of memory, with their digests in one pass, and its verification."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from longhaul.weight_sync.digest import Running, copied, digest
from longhaul.weight_sync.manifest import Manifest, Tensor, layout

LARGE = 64 << 20
"""Bytes of an image from which it is written past the caches: it would not fit in them."""


def describe(tensors: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], int]:
    """Layout of arrays by name, in their order: tensors and the image's bytes. ValueError for what is no array."""
    try:
        return _laid_out(tuple((name, tuple(each.shape), _named(each.dtype)) for name, each in tensors.items()))
    except AttributeError as error:
        raise ValueError(f"tensors are arrays by name, with shape and dtype: {error}") from error


_named = functools.lru_cache(maxsize=64)(str)  # names of dtypes

_laid_out = functools.lru_cache(maxsize=2)(layout)  # every version has the same form


def gather(
    tensors: Mapping[str, Any], planned: Sequence[Tensor], image: np.ndarray, pool: ThreadPoolExecutor, parts: int
) -> tuple[Tensor, ...]:
    """Copies arrays into `image` as planned, in `parts` threads; returns the tensors with their digests.

    Digests are those of the given arrays, so that they also reveal a copy that went wrong.
    """

    def one(tensor: Tensor) -> Tensor:
        source = np.asarray(tensors[tensor.name])
        into = image[tensor.offset : tensor.end]
        if not source.flags.c_contiguous:
            into.view(source.dtype).reshape(tensor.shape)[...] = source
            return tensor._replace(digest=digest(into))
        given = source.reshape(-1).view(np.uint8) if source.size else np.empty(0, np.uint8)
        return tensor._replace(digest=copied(given, into, past=len(image) >= LARGE))

    done = {tensor.name: tensor for tensor in _divided(planned, one, pool, parts)}
    return tuple(done[tensor.name] for tensor in planned)


def verify(manifest: Manifest, image: np.ndarray, pool: ThreadPoolExecutor, parts: int) -> list[str]:
    """Names of the tensors whose bytes do not match their digests; in `parts` threads."""

    def one(tensor: Tensor) -> str:
        return "" if digest(image[tensor.offset : tensor.end]) == tensor.digest else tensor.name

    return [name for name in _divided(manifest.tensors, one, pool, parts) if name]


def _divided(
    tensors: Sequence[Tensor], work: Callable[[Tensor], Any], pool: ThreadPoolExecutor, parts: int
) -> list[Any]:
    """Results of `work` on each tensor, the largest first, each in the thread that has least to do."""
    heaps: list[list[Tensor]] = [[] for _ in range(max(1, parts))]
    loads = [0] * len(heaps)
    for tensor in sorted(tensors, key=lambda each: -each.nbytes):
        least = loads.index(min(loads))
        heaps[least].append(tensor)
        loads[least] += tensor.nbytes + 4096
    if len(heaps) == 1:
        return [work(tensor) for tensor in heaps[0]]
    batches = pool.map(lambda heap: [work(tensor) for tensor in heap], heaps)
    return [result for batch in batches for result in batch]


class Arrival:
    """Verification of an image that arrives from its beginning on, in one thread."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = sorted(manifest.tensors, key=lambda each: each.offset)
        self._next = 0
        self._running: Running | None = None  # of the next tensor, while it arrives
        self.damaged: list[str] = []

    def arrived(self, image: np.ndarray, count: int) -> None:
        """Digests up to byte `count`; the bytes before it are in place and will not change."""
        while self._next < len(self._tensors):
            tensor = self._tensors[self._next]
            if self._running is None:
                self._running = Running(image[tensor.offset : tensor.end])
            if count < tensor.end:
                self._running.upto(max(0, count - tensor.offset))
                break
            if self._running.end() != tensor.digest:
                self.damaged.append(tensor.name)
            self._running = None
            self._next += 1

    def verified(self) -> None:
        """Marks all of it as verified: that was done while the image was made."""
        self._next = len(self._tensors)

    @property
    def complete(self) -> bool:
        return self._next == len(self._tensors)
