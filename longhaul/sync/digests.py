"""xxh3-128 of bytes where they lie, taken while they are in a cache: as they arrive, or on their way into an image.

Small ones go through the library, a piece that fits in a cache at a time. Large ones go through wide registers
(`streams`), where numba is installed: read ahead of their use, and what is too large for the caches is copied past them
in the same pass. Both find the same digest.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any, Protocol

import numpy as np

from longhaul.sync.loops import library

LEAST = 64 << 10
"""Bytes of a tensor from which it is worth leaving the library while it is copied: below, the call costs more than it
saves."""

LARGE = 2 << 20
"""The same where it is only read: then it is also worth the second that loading numba takes."""

PIECE = 1 << 18
"""Bytes that are copied and digested together otherwise, while the second of the processor's caches has them."""


class Running(Protocol):
    """A running digest of an array: of as much of it as is in place, and will not change."""

    def upto(self, count: int) -> None:
        """The first `count` bytes are in place."""

    def end(self) -> bytes:
        """The digest, when all is in place."""


def digest(data: np.ndarray) -> bytes:
    """Of uint8 [n], contiguous: 16 bytes."""
    return running(data).end()


def running(data: np.ndarray) -> Running:
    """A digest of uint8 [n], contiguous, of which nothing need be in place yet."""
    kernels = _streams() if data.size >= LARGE else None
    return _ByLibrary(data) if kernels is None else _ByStreams(data, kernels)


class _ByLibrary:
    """Whatever its length."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._done, self._running = data, 0, library("xxhash").xxh3_128()

    def upto(self, count: int) -> None:
        if count > self._done:
            self._running.update(self._data[self._done : count])
            self._done = count

    def end(self) -> bytes:
        self.upto(self._data.size)
        return self._running.digest()


class _ByStreams:
    """Of 241 bytes or more: the specification has other ways for less."""

    def __init__(self, data: np.ndarray, kernels: Any) -> None:
        self._kernels, self._data = kernels, _reading(data)
        self._done, self._whole = 0, (data.size - 1) // kernels.BLOCK * kernels.BLOCK
        self._sums = kernels.START.copy()

    def upto(self, count: int) -> None:
        ready = min(count // self._kernels.BLOCK * self._kernels.BLOCK, self._whole)
        if ready > self._done:
            self._kernels.scan(self._data, self._done, ready, self._sums)
            self._done = ready

    def pour(self, target: np.ndarray) -> None:
        """All of it, on its way to `target`, past the caches."""
        self._kernels.pour(self._data, target, self._whole, self._sums)
        target[self._whole :] = self._data[self._whole :]
        self._done = self._whole

    def end(self) -> bytes:
        self.upto(self._data.size)
        found = np.empty(2, np.uint64)
        self._kernels.finish(self._data, self._sums, found)
        return found.astype(">u8").tobytes()


def poured(source: np.ndarray, target: np.ndarray, past: bool) -> bytes:
    """Copies uint8 [n] to `target`, both contiguous; -> the digest of what was read.

    `past` is whether it goes past the caches; else it is soon wanted again, or fits in them.
    """
    if past and source.size >= LEAST and (kernels := _streams()) is not None and not target.ctypes.data % 64:
        streamed = _ByStreams(source, kernels)
        streamed.pour(target)
        return streamed.end()
    found = _ByLibrary(source)
    for begin in range(0, source.size, PIECE):
        end = min(begin + PIECE, source.size)
        found.upto(end)
        target[begin:end] = source[begin:end]
    return found.end()


def _reading(data: np.ndarray) -> np.ndarray:
    """One kind of array for the compiled loops, whatever is given: a view that can't be written."""
    given = data[:]
    given.flags.writeable = False
    return given


@functools.cache
def _streams() -> Any:
    """None where numba is not installed, or the machine counts bytes from the other end."""
    if sys.byteorder != "little" or not importlib.util.find_spec("numba"):
        return None
    from longhaul.sync import streams

    return streams
