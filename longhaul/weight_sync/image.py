"""Tensors into an image and back out of doubt: gathered with their digests in one pass, verified as they arrive."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.manifest import LINE, Manifest, Tensor, layout

LARGE = 64 << 20
"""Bytes of an image from which it is written past the caches, which it would not fit in."""


def describe(tensors: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], int]:
    """The layout of arrays by name, in their order. ValueError for what is none."""
    try:
        return _laid_out(tuple((name, tuple(each.shape), _named(each.dtype)) for name, each in tensors.items()))
    except AttributeError as error:
        raise ValueError(f"tensors are arrays by name, with shape and dtype: {error}") from error


_named = functools.lru_cache(maxsize=64)(str)  # of dtypes

_laid_out = functools.lru_cache(maxsize=2)(layout)  # every version has the same form


def gather(
    tensors: Mapping[str, Any], planned: Sequence[Tensor], image: np.ndarray, pool: ThreadPoolExecutor, parts: int
) -> tuple[Tensor, ...]:
    """Copies arrays into `image`, as `planned`, in `parts` threads; -> the same with their digests.

    What is given is digested, so that the digest also tells of a copy that went wrong.
    """

    def one(tensor: Tensor) -> Tensor:
        source = np.asarray(tensors[tensor.name])
        into = image[tensor.offset : tensor.end]
        if not source.flags.c_contiguous:
            into.view(source.dtype).reshape(tensor.shape)[...] = source
            return tensor._replace(digest=digest.digest(into))
        given = source.reshape(-1).view(np.uint8) if source.size else np.empty(0, np.uint8)
        return tensor._replace(digest=digest.poured(given, into, past=len(image) >= LARGE))

    done = {tensor.name: tensor for tensor in _shared_out(planned, one, pool, parts)}
    return tuple(done[tensor.name] for tensor in planned)


def verify(manifest: Manifest, image: np.ndarray, pool: ThreadPoolExecutor, parts: int) -> list[str]:
    """The names of the tensors whose bytes are not what the manifest says; in `parts` threads."""

    def one(tensor: Tensor) -> str:
        return tensor.name if is_damaged(tensor, image) else ""

    return [name for name in _shared_out(manifest.tensors, one, pool, parts) if name]


def is_damaged(tensor: Tensor, image: np.ndarray) -> bool:
    """Whether the bytes of a tensor are not what its digest says."""
    return digest.digest(image[tensor.offset : tensor.end]) != tensor.digest


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


class _Pulled(NamedTuple):
    """What a compiled loop knows of an image that comes (`intake`)."""

    names: list[str]  # of the tensors that it digests
    places: np.ndarray  # int64 [n, 2], where they begin and end
    sums: np.ndarray  # uint64 [8]
    found: np.ndarray  # uint64 [n, 2], their digests
    state: np.ndarray  # int64 [3]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Pulled:
        intake = _intake()
        large = [each for each in tensors if each.nbytes >= intake.SHORTEST]
        places = np.array([(each.offset, each.end) for each in large], np.int64).reshape(-1, 2)
        found = np.zeros((len(large), 2), np.uint64)
        return cls([each.name for each in large], places, intake.START.copy(), found, np.zeros(3, np.int64))


def pulls(image: np.ndarray) -> bool:
    """Whether there is a compiled loop that brings what comes into `image`, uint8."""
    return not image.ctypes.data % LINE and _intake() is not None


@functools.cache
def _intake() -> Any:
    """None where numba is not installed, or the system is another than what its calls are written for."""
    if sys.platform != "linux" or sys.byteorder != "little" or not importlib.util.find_spec("numba"):
        return None
    from longhaul.weight_sync.digest import recv_kernel

    return recv_kernel


class Arrival:
    """Verifies an image while it arrives from its beginning on, in one thread. `at` is how many bytes were drawn."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = sorted(manifest.tensors, key=lambda each: each.offset)
        self._next, self._end, self.at = 0, 0, 0  # `_end` is of the next tensor, while it comes
        self._running: digest.Running | digest.Streamed | None = None  # of the next tensor
        self._pulled: _Pulled | None = None
        self.damaged: list[str] = []

    def __call__(self, image: np.ndarray, count: int) -> None:
        """The first `count` bytes are in place, and will not change."""
        while self._next < len(self._tensors):
            tensor = self._tensors[self._next]
            if self._running is None:
                self._running = digest.Running(image[tensor.offset : tensor.end])
            if count < tensor.end:
                self._running.upto(max(0, count - tensor.offset))
                break
            self._ended(tensor, self._running.end())

    def draw(self, image: np.ndarray, buffer: np.ndarray, held: int) -> int:
        """Brings what comes next, the first `held` bytes of `buffer`, to its place in `image`, past the caches, and
        digests it on its way; -> how many it took. What it left, a few lines at most, comes again before what follows.

        What has no bytes is not digested before `(image, size)` at the end.
        """
        used = 0
        while used < held:
            tensor = self._tensors[self._next] if self._next < len(self._tensors) else None
            begin = len(image) if tensor is None else tensor.offset
            if tensor is None or self.at < begin:  # between tensors
                count = min(held - used, begin - self.at)
                image[self.at : self.at + count] = buffer[used : used + count]
            else:
                count = self._drawn(tensor, image, buffer, used, held)
                if count == 0 and self._next < len(self._tensors) and self._tensors[self._next] is tensor:
                    break
            used, self.at = used + count, self.at + count
        return used

    def pull(self, image: np.ndarray, buffer: np.ndarray, descriptor: int, stop: float, once: bool) -> int:
        """Receives `image` itself, and does with it what `draw` does; only where `pulls(image)`. -> 0 when all is in
        place; above 0 when it is the time `stop`, or `once` a buffer was taken: call it again. Below 0 it is -errno."""
        if self._pulled is None:
            self._pulled = _Pulled.of(self._tensors)
        pulled, intake = self._pulled, _intake()
        why = intake.pulled(descriptor, buffer, image, *pulled[1:], stop, once)
        self.at = int(pulled.state[intake.AT])
        if why == intake.DONE:
            found = dict(zip(pulled.names, pulled.found.astype(">u8")))
            for tensor in self._tensors:
                whole = found.get(tensor.name)
                mine = digest.digest(image[tensor.offset : tensor.end]) if whole is None else whole.tobytes()
                self._ended(tensor, mine)
        return why

    def _drawn(self, tensor: Tensor, image: np.ndarray, buffer: np.ndarray, used: int, held: int) -> int:
        """Of a tensor, as many bytes as it could take."""
        if self._running is None:
            self._running, self._end = digest.of_drawn(image[tensor.offset : tensor.end]), tensor.end
        if isinstance(self._running, digest.Streamed):
            count = self._running.draw(buffer, used, held)
        else:
            count = min(held - used, self._end - self.at)
            image[self.at : self.at + count] = buffer[used : used + count]
            self._running.upto(self.at + count - tensor.offset)
        if self.at + count == self._end:
            self._ended(tensor, self._running.end())
        return count

    def _ended(self, tensor: Tensor, found: bytes) -> None:
        if found != tensor.digest:
            self.damaged.append(tensor.name)
        self._running = None
        self._next += 1

    def made(self) -> None:
        """All of it is in place, and was verified in the making."""
        self._next = len(self._tensors)

    @property
    def complete(self) -> bool:
        return self._next == len(self._tensors)
