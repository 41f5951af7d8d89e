"""xxh3-128 of bytes where they lie, taken while they are in a cache: as they arrive, or on their way into an image.

What is in a cache goes through the library, a piece at a time. What is not, and is large, is fetched ahead of its use
(`streams`), where numba is installed, and may be copied past the caches in the same pass. Both find the same digest.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import numpy as np

from longhaul.weight_sync.delta.backend import NO_FEED, Feed, library, read_only

LEAST = 64 << 10
"""Bytes of a tensor from which it is worth leaving the library while it is copied: below, the call costs more than it
saves."""

LARGE = 2 << 20
"""The same where it is only read: then it is also worth the second that loading numba takes."""

PIECE = 1 << 18
"""Bytes that are copied and digested together otherwise, while the second of the processor's caches has them."""


def digest(data: np.ndarray) -> bytes:
    """Of uint8 [n], contiguous and no longer in a cache: 16 bytes."""
    if data.size >= LARGE and (kernels := _streams()) is not None:
        return Streamed(data, kernels).end()
    return library("xxhash").xxh3_128_digest(data)


class Running:
    """A running digest of an array, uint8 [n]: of as much of it as is in place, and will not change."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._done, self._running = data, 0, library("xxhash").xxh3_128()

    def upto(self, count: int) -> None:
        """The first `count` bytes are in place."""
        if count > self._done:
            self._running.update(self._data[self._done : count])
            self._done = count

    def end(self) -> bytes:
        """The digest, when all is in place."""
        self.upto(self._data.size)
        return self._running.digest()

    def feed(self, begin: int, end: int) -> Feed:
        """Nothing: it reads what is made itself."""
        return NO_FEED


class Streamed:
    """A running digest by compiled loops, of 241 bytes or more: the specification has other ways for less."""

    def __init__(self, data: np.ndarray, kernels: Any) -> None:
        self._data, self._target = read_only(data), data
        self._kernels, self._sums = kernels, kernels.START.copy()
        self._done, self._whole = 0, (data.size - 1) // kernels.BLOCK * kernels.BLOCK

    def feed(self, begin: int, end: int) -> Feed:
        """Who calls it makes the bytes from `begin` to `end`, and leaves to `upto` what is no whole block."""
        if begin != self._done:
            return NO_FEED
        self._done = max(begin, self._blocks(end))
        return Feed(self._done - begin, self._sums)

    def upto(self, count: int) -> None:
        """The first `count` bytes are in place."""
        if (ready := self._blocks(count)) > self._done:
            self._kernels.called(self._kernels.scan, self._data, self._done, ready, self._sums)
            self._done = ready

    def pour(self, target: np.ndarray) -> None:
        """All of it, on its way to `target`, past the caches."""
        self._kernels.called(self._kernels.pour, self._data, target, self._whole, self._sums)
        target[self._whole :] = self._data[self._whole :]
        self._done = self._whole

    def draw(self, source: np.ndarray, begin: int, end: int) -> int:
        """Takes what comes next out of uint8 source[begin:end], which is in a cache, to its place past the caches:
        whole blocks, or all that is left.

        -> how many bytes; 0 where more must come first.
        """
        done = self._done
        count = self._blocks(done + end - begin) - done
        if count > 0:
            self._kernels.called(self._kernels.carry, source, begin, self._target, done, count, self._sums)
            self._done = done + count
            return count
        left = self._data.size - done
        if done < self._whole or end - begin < left:
            return 0
        self._target[done:] = source[begin : begin + left]
        return left

    def _blocks(self, count: int) -> int:
        return min(count // self._kernels.BLOCK * self._kernels.BLOCK, self._whole)

    def end(self) -> bytes:
        """The digest, when all is in place."""
        self.upto(self._data.size)
        found = np.empty(2, np.uint64)
        self._kernels.called(self._kernels.finish, self._data, self._sums, found)
        return found.astype(">u8").tobytes()


def of_drawn(data: np.ndarray) -> Running | Streamed:
    """Of what comes piece by piece and is to go past the caches; uint8 [n], contiguous."""
    aligned = data.size >= LEAST and not data.ctypes.data % 64
    kernels = _streams() if aligned else None
    return Running(data) if kernels is None else Streamed(data, kernels)


def of_made(data: np.ndarray) -> Running | Streamed:
    """Of what compiled loops will make from its beginning on; uint8 [n], contiguous."""
    kernels = _streams() if data.size >= LARGE else None
    return Running(data) if kernels is None else Streamed(data, kernels)


def poured(source: np.ndarray, target: np.ndarray, past: bool) -> bytes:
    """Copies uint8 [n] to `target`, both contiguous; -> the digest of what was read.

    `past` is whether it goes past the caches; else it is soon wanted again, or fits in them.
    """
    if past and source.size >= LEAST and (kernels := _streams()) is not None and not target.ctypes.data % 64:
        streamed = Streamed(source, kernels)
        streamed.pour(target)
        return streamed.end()
    found = Running(source)
    for begin in range(0, source.size, PIECE):
        end = min(begin + PIECE, source.size)
        found.upto(end)
        target[begin:end] = source[begin:end]
    return found.end()


@functools.cache
def _streams() -> Any:
    """None where numba is not installed, or the machine counts bytes from the other end."""
    if sys.byteorder != "little" or not importlib.util.find_spec("numba"):
        return None
    from longhaul.weight_sync.digest import xxh3_kernels

    return xxh3_kernels
