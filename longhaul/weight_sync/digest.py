"""Digests of memory, xxh3-128 (Collet, xxHash): of arrays, of arrays while they fill, and while they are copied."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any, NamedTuple

import numpy as np

LEAST = 64 << 10
"""Bytes of a tensor from which the compiled copy is used: below, its call costs more than it saves."""

PIECE = 1 << 18
"""Bytes that are copied and digested together by the library: they fit in the second-level cache."""


class Row(NamedTuple):
    """Runs of bytes that a compiled loop copies and digests as one piece, in order (`xxh3_kernels.pour_rows`).

    The length, the targets and their step are multiples of a cache line.
    """

    source: int  # address of the first run
    source_step: int  # bytes from the beginning of one to that of the next
    target: int
    target_step: int
    length: int
    runs: int


LEAST_ROW = 256
"""Bytes of a row, at least: shorter data has other rules in xxh3's specification."""


def library(name: str) -> Any:
    """Library of the extra `sync`. ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"longhaul.weight_sync needs {name}: pip install 'longhaul-rl[sync]'") from None


def hasher() -> Any:
    """Class of running xxh3-128 digests. ValueError where the library is not installed."""
    return library("xxhash").xxh3_128


def digest(data: Any) -> bytes:
    """Digest, 16 bytes, of contiguous bytes: an array's, or a buffer's. It detects damage, not malice."""
    return library("xxhash").xxh3_128_digest(data)


class Running:
    """Running digest of an array, uint8 [n], that fills from its beginning on."""

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._done, self._running = data, 0, hasher()()

    def upto(self, count: int) -> None:
        """Takes the bytes up to `count`, which are in place and will not change."""
        if count > self._done:
            self._running.update(self._data[self._done : count])
            self._done = count

    def end(self) -> bytes:
        """Digest of the whole array, once all of it is in place."""
        self.upto(self._data.size)
        return self._running.digest()


def copied(source: np.ndarray, target: np.ndarray, past: bool = False) -> bytes:
    """Digest of `source`, uint8 [n], which is copied to `target` on the way; both are contiguous.

    `past`: written past the caches where numba is installed, for a target that does not fit in them, or is not read
    again soon.
    """
    if past and source.size >= LEAST and (loops := compiled()) is not None and not target.ctypes.data % 64:
        return loops.copied(source, target)
    running = Running(source)
    for begin in range(0, source.size, PIECE):
        end = min(begin + PIECE, source.size)
        running.upto(end)
        target[begin:end] = source[begin:end]
    return running.end()


@functools.cache
def compiled() -> Any:
    """Module of the compiled loops; None where numba is not installed, or the machine is big-endian."""
    if sys.byteorder != "little" or not importlib.util.find_spec("numba"):
        return None
    from longhaul.weight_sync import xxh3_kernels

    return xxh3_kernels
