"""xxh3-128 of bytes where they lie, taken while they are in a cache: as they arrive, or on their way into an image.

All goes through the library, a piece that fits in a cache at a time; but what is too large for the caches is copied
past them and digested in registers in the same pass (`streams`), where numba is installed. Both find the same digest.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

import numpy as np

from longhaul.sync.loops import library

LEAST = 64 << 10
"""Bytes of a tensor from which it is worth leaving the library: below, the call costs more than it saves."""

PIECE = 1 << 18
"""Bytes that are copied and digested together otherwise, while the second of the processor's caches has them."""


def digest(data: np.ndarray) -> bytes:
    """Of uint8 [n], contiguous: 16 bytes."""
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


def poured(source: np.ndarray, target: np.ndarray, past: bool) -> bytes:
    """Copies uint8 [n] to `target`, both contiguous; -> the digest of what was read.

    `past` is whether it goes past the caches; else it is soon wanted again, or fits in them.
    """
    if past and (kernels := _streams()) is not None and source.size >= LEAST and not target.ctypes.data % 64:
        return _streamed(kernels, source, target)
    running = Running(source)
    for begin in range(0, source.size, PIECE):
        end = min(begin + PIECE, source.size)
        running.upto(end)
        target[begin:end] = source[begin:end]
    return running.end()


def _streamed(kernels: Any, source: np.ndarray, target: np.ndarray) -> bytes:
    given = source[:]
    given.flags.writeable = False  # one kind of array for the compiled loop, whatever is given
    whole = (given.size - 1) // kernels.BLOCK * kernels.BLOCK
    sums, found = kernels.START.copy(), np.empty(2, np.uint64)
    kernels.pour(given, target, whole, sums)
    target[whole:] = given[whole:]
    kernels.finish(given, sums, found)
    return found.astype(">u8").tobytes()


@functools.cache
def _streams() -> Any:
    """None where numba is not installed, or the machine counts bytes from the other end."""
    if sys.byteorder != "little" or not importlib.util.find_spec("numba"):
        return None
    from longhaul.sync import streams

    return streams
