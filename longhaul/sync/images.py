"""Tensors into an image and back out of doubt: gathered with their digests in one pass, verified as they arrive."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from longhaul.sync.manifest import Manifest, Tensor, hasher, layout

CHUNK = 1 << 18
"""Bytes that are digested and copied together, while the second of the processor's caches has them."""

LARGE = 64 << 20
"""Bytes of an image from which it is written past the caches, which it would not fit in (`streams`)."""

Pour = Callable[[np.ndarray, np.ndarray, int, int, int], None]
"""`streams.pour`."""


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
    pour = _pour() if len(image) >= LARGE else None

    def one(tensor: Tensor) -> Tensor:
        source = np.asarray(tensors[tensor.name])
        into = image[tensor.offset : tensor.end]
        running = hasher()()
        if source.flags.c_contiguous:
            given = source.reshape(-1).view(np.uint8) if source.size else np.empty(0, np.uint8)
            _copied(given, into, running, pour)
        else:
            into.view(source.dtype).reshape(tensor.shape)[...] = source
            running.update(into)
        return tensor._replace(digest=running.digest())

    done = {tensor.name: tensor for tensor in _shared_out(planned, one, pool, parts)}
    return tuple(done[tensor.name] for tensor in planned)


def _copied(given: np.ndarray, into: np.ndarray, running: Any, pour: Pour | None) -> None:
    """Copies bytes, and digests what is given: so that the digest also tells of a copy that went wrong."""
    whole = 0
    if pour is not None and not given.ctypes.data % 8 and not into.ctypes.data % 64:
        whole = len(given) // 64 * 64
        source, target = given[:whole].view(np.uint64), into[:whole].view(np.uint64)
        source.flags.writeable = False  # one kind of array for the compiled copy, whatever is given
    for begin in range(0, len(given), CHUNK):
        end = min(begin + CHUNK, len(given))
        running.update(given[begin:end])
        if end <= whole:
            assert pour is not None
            pour(source, target, begin // 8, end // 8, CHUNK // 8)
        else:
            into[begin:end] = given[begin:end]


@functools.cache
def _pour() -> Pour | None:
    """None where numba is not installed: then what is large is copied as what is small."""
    if not importlib.util.find_spec("numba"):
        return None
    from longhaul.sync import streams

    pour: Pour = streams.pour
    return pour


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
