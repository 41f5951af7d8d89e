"""Anonymous shared memory, and wake-up pipes between the processes that map it.

One process creates a block and passes its descriptor to its children; the system frees it when the last of them ends,
in any way. A `Plan` gives the position of each named array in a block. It has no lock: a dead process cannot hold one.
Order comes only from words of 8 bytes with one writer each, written after the data that they announce (stores are seen
in order on x86-64; elsewhere the system calls of a `Wakeup` order them).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

LINE = 64
"""Bytes of a cache line; each array starts a new one, so that two writers never share it."""


class Leaf(NamedTuple):
    """Shape and dtype of an array, as plain data that can be sent."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Region(NamedTuple):
    offset: int
    leaf: Leaf


class Plan(NamedTuple):
    """Positions of arrays in a block of `size` bytes."""

    regions: dict[str, Region]
    size: int


def plan(named: Iterable[tuple[str, Leaf]]) -> Plan:
    """Plan of arrays one after the other, each at the start of a cache line."""
    regions: dict[str, Region] = {}
    size = 0
    for name, leaf in named:
        if name in regions:
            raise ValueError(f"two arrays are named {name}")
        regions[name] = Region(size, leaf)
        size += -(-leaf.nbytes // LINE) * LINE
    return Plan(regions, max(size, LINE))


def create(size: int) -> int:
    """Descriptor of `size` zero bytes without a path."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("longhaul", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def arrays(descriptor: int, planned: Plan) -> dict[str, np.ndarray]:
    """Arrays of a block, which stays mapped as long as one of them is referenced."""
    block = mmap.mmap(descriptor, planned.size)
    views = {}
    for name, (offset, leaf) in planned.regions.items():
        count = math.prod(leaf.shape)
        flat = np.frombuffer(block, leaf.dtype, count, offset) if count else np.empty(0, leaf.dtype)
        views[name] = flat.reshape(leaf.shape)
    return views


class Wakeup:
    """Pipe by which any number of processes or threads wake a waiting one; wake-ups before it looks count as one.

    `reads` and `writes` are the ends; -1 for an end in another process. A pipe reports at once that its other end is
    gone, so that nobody waits for a dead process.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes
        self._poll = select.poll()
        if reads >= 0:
            os.set_blocking(reads, False)
            self._poll.register(reads, select.POLLIN)
        if writes >= 0:
            os.set_blocking(writes, False)

    def wake(self) -> None:
        """Wake the waiting side; does nothing if the pipe is full or the other side is gone."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.writes, b"!")

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, or for `seconds`; -> False if nobody is left to wake it."""
        if not self._poll.poll(seconds * 1000.0):
            return True
        try:
            return bool(os.read(self.reads, 4096))
        except BlockingIOError:  # another reader was faster
            return True

    def close(self) -> None:
        for end in (self.reads, self.writes):
            if end >= 0:
                os.close(end)
        self.reads = self.writes = -1


def wakeup() -> Wakeup:
    """Pipe with both ends."""
    return Wakeup(*os.pipe())
