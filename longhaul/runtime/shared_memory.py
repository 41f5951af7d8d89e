"""Shared memory without a name: what one process maps and hands to its children, and the system takes back when the
last of them ends, however that ends.

A `Plan` says where named arrays lie in one block. There is no lock in it: a process that dies can't hold what another
one waits for. Words of 8 bytes that only one process writes, written after what they tell of, are the only order
(stores are seen in order on x86-64; elsewhere the doorbells' system calls see to it).
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

LINE = 64
"""Bytes of a cache line: no two arrays share one."""


class Leaf(NamedTuple):
    """Shape and dtype of an array, in words that can be sent."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Region(NamedTuple):
    offset: int
    leaf: Leaf


class Plan(NamedTuple):
    """Where arrays lie in a block of `size` bytes."""

    regions: dict[str, Region]
    size: int


def plan(named: Iterable[tuple[str, Leaf]]) -> Plan:
    """The arrays one after the other, each at the beginning of a line."""
    regions: dict[str, Region] = {}
    size = 0
    for name, leaf in named:
        if name in regions:
            raise ValueError(f"two arrays are named {name}")
        regions[name] = Region(size, leaf)
        size += -(-leaf.nbytes // LINE) * LINE
    return Plan(regions, max(size, LINE))


def create(size: int) -> int:
    """The descriptor of `size` bytes of zeros, which no path leads to."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("longhaul", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def arrays(descriptor: int, planned: Plan) -> dict[str, np.ndarray]:
    """The arrays of a block, which stays mapped as long as one of them is held."""
    block = mmap.mmap(descriptor, planned.size)
    found = {}
    for name, (offset, leaf) in planned.regions.items():
        count = math.prod(leaf.shape)
        flat = np.frombuffer(block, leaf.dtype, count, offset) if count else np.empty(0, leaf.dtype)
        found[name] = flat.reshape(leaf.shape)
    return found
