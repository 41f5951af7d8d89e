"""Tensors into an image and back out of doubt: gathered with their digests in one pass, verified as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from longhaul.sync.manifest import Manifest, Tensor, hasher, layout

CHUNK = 1 << 22
"""Bytes that are copied, and then digested while the processor's cache still has them, or most."""


def describe(tensors: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], int]:
    """The layout of arrays by name, in their order. ValueError for what is none."""
    try:
        return layout((name, tuple(each.shape), str(each.dtype)) for name, each in tensors.items())
    except AttributeError as error:
        raise ValueError(f"tensors are arrays by name, with shape and dtype: {error}") from error


def gather(
    tensors: Mapping[str, Any], planned: Sequence[Tensor], image: np.ndarray, pool: ThreadPoolExecutor, parts: int
) -> tuple[Tensor, ...]:
    """Copies arrays into `image`, as `planned`, in `parts` threads; -> the same with their digests."""

    def one(tensor: Tensor) -> Tensor:
        source = np.asarray(tensors[tensor.name])
        into = image[tensor.offset : tensor.end]
        running = hasher()()
        if source.flags.c_contiguous:
            given = source.reshape(-1).view(np.uint8) if source.size else np.empty(0, np.uint8)
            for begin in range(0, len(into), CHUNK):
                piece = into[begin : begin + CHUNK]
                piece[:] = given[begin : begin + CHUNK]
                running.update(piece)
        else:
            into.view(source.dtype).reshape(tensor.shape)[...] = source
            running.update(into)
        return tensor._replace(digest=running.digest())

    done = {tensor.name: tensor for tensor in _shared_out(planned, one, pool, parts)}
    return tuple(done[tensor.name] for tensor in planned)


def verify(manifest: Manifest, image: np.ndarray, pool: ThreadPoolExecutor, parts: int) -> list[str]:
    """The names of the tensors whose bytes are not what the manifest says; in `parts` threads."""

    def one(tensor: Tensor) -> str:
        same = hasher()(image[tensor.offset : tensor.end]).digest() == tensor.digest
        return "" if same else tensor.name

    return [name for name in _shared_out(manifest.tensors, one, pool, parts) if name]


def _shared_out(
    tensors: Sequence[Tensor], work: Callable[[Tensor], Any], pool: ThreadPoolExecutor, parts: int
) -> list[Any]:
    """`work` of each, the largest first, each to the thread that has least."""
    heaps: list[list[Tensor]] = [[] for _ in range(max(1, parts))]
    loads = [0] * len(heaps)
    for tensor in sorted(tensors, key=lambda each: -each.nbytes):
        least = loads.index(min(loads))
        heaps[least].append(tensor)
        loads[least] += tensor.nbytes + 4096
    if len(heaps) == 1:
        return [work(tensor) for tensor in heaps[0]]
    batches = pool.map(lambda heap: [work(tensor) for tensor in heap], heaps)
    return [found for batch in batches for found in batch]


class Arrival:
    """Verifies an image while it arrives from its beginning on, in one thread."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = sorted(manifest.tensors, key=lambda each: each.offset)
        self._next, self._upto = 0, 0
        self._running = hasher()()
        self.damaged: list[str] = []

    def __call__(self, image: np.ndarray, count: int) -> None:
        """The first `count` bytes are in place, and will not change."""
        while self._next < len(self._tensors):
            tensor = self._tensors[self._next]
            begin = max(self._upto, tensor.offset)
            if begin < min(count, tensor.end):
                self._running.update(image[begin : min(count, tensor.end)])
            if count < tensor.end:
                break
            if self._running.digest() != tensor.digest:
                self.damaged.append(tensor.name)
            self._running.reset()
            self._next += 1
        self._upto = count

    @property
    def complete(self) -> bool:
        return self._next == len(self._tensors)
