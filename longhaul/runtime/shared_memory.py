"""Anonymous shared memory, and wake-up pipes between the processes that map it.

One process creates a block and passes its descriptor to its children; the system frees it when the last of them ends,
in any way. A `Plan` gives the position of each named array in a block. It has no lock: a dead process cannot hold one.
Order comes only from words of 8 bytes with one writer each, written after the data that they announce (stores are seen
in order on x86-64; elsewhere the system calls of a `Wakeup` order them).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import select
import sys
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

LINE = 64
"""Bytes of a cache line; each array starts a new one, so that two writers never share it."""

HUGE = 2 << 20
"""Bytes of a huge page."""

MAP_FIXED, MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_WRITE, MADV_COLLAPSE = 0x10, 4, 14, 23, 25
"""Numbers of Linux that `mmap` does not name everywhere."""


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
    """Plan of arrays one after the other, each at the start of a cache line. ValueError for a repeated name."""
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


@functools.cache
def _system() -> Any:
    """Functions of Linux's C library."""
    system = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    system.mmap.argtypes, system.mmap.restype = (pointer, size, number, number, number, ctypes.c_long), pointer
    system.munmap.argtypes = (pointer, size)
    system.madvise.argtypes = (pointer, size, number)
    return system


def mapped(descriptor: int, size: int) -> Any:
    """Buffer of `size` bytes of a block, at an address where Linux can map huge pages; unmapped with its last view."""
    if size < HUGE or not sys.platform.startswith("linux"):
        return mmap.mmap(descriptor, size)
    system, length = _system(), -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = system.mmap(None, length + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if room == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    begin = -(-room // HUGE) * HUGE
    for start, end in ((room, begin), (begin + length, room + length + HUGE)):
        if start < end:
            system.munmap(start, end - start)
    kind = mmap.PROT_READ | mmap.PROT_WRITE
    if system.mmap(begin, length, kind, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0) != begin:
        error = ctypes.get_errno()
        system.munmap(begin, length)
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_ubyte * size).from_address(begin)
    weakref.finalize(memory, system.munmap, begin, length).atexit = False
    return memory


def allocate(memory: Any) -> None:
    """Allocates what `mapped` returned, in huge pages where the system has them; else it comes with its first touch.

    Linux collapses pages on request since 6.1, whatever its settings for shared memory are, where one of them is there.
    """
    if isinstance(memory, ctypes.Array):
        place, size = ctypes.addressof(memory), len(memory)
        _system().madvise(place, size, MADV_HUGEPAGE)
        for begin in range(0, size, HUGE):
            memory[begin] = 0
        _system().madvise(place, size, MADV_COLLAPSE)


def populate(memory: Any, begin: int, end: int) -> None:
    """Maps pages of what `mapped` returned at once, before they are written; `begin` is a multiple of HUGE."""
    if isinstance(memory, ctypes.Array):
        _system().madvise(ctypes.addressof(memory) + begin, end - begin, MADV_POPULATE_WRITE)


def forget(memory: Any, begin: int, end: int) -> None:
    """Unmaps pages of what `mapped` returned from this process until it touches them again; their bytes stay.

    `begin` is a multiple of HUGE.
    """
    if isinstance(memory, ctypes.Array):
        _system().madvise(ctypes.addressof(memory) + begin, end - begin, MADV_DONTNEED)


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
        """Wake-up of the waiting side; nothing if the pipe is full or the other side is gone."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.writes, b"!")

    def wait(self, seconds: float) -> bool:
        """Sleep until woken, or for `seconds`; -> False if no process is left to wake it."""
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
