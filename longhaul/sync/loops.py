"""The delta codec's loops behind one set of functions: by numba where it is installed, else by NumPy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longhaul.sync import reference
from longhaul.sync.reference import CLASSES, Patterns

U8: TypeAlias = NDArray[np.uint8]
U32: TypeAlias = NDArray[np.uint32]
I64: TypeAlias = NDArray[np.int64]

LEAST = 64
"""Elements that a block must have: the codec pads shorter ones with zeros."""

SAMPLE = 1 << 14
"""Elements that bounds are chosen by; more would say the same."""

WORTH = 500.0
"""Bits that a class of exponents must save: what it costs to tell of it."""


class Changes(NamedTuple):
    """What a block changes, class after class."""

    bounds: U8  # [CLASSES - 1]
    counts: I64  # [CLASSES] changes of each class
    gaps: U32  # members of the class since the change before
    steps: U32  # less one


NONE = Changes(*(np.full(CLASSES - 1, 255, np.uint8), np.zeros(CLASSES, np.int64)), *2 * [np.zeros(0, np.uint32)])
"""Of a block that is as it was."""


class Loops(Protocol):
    """What `codec` needs; `reference` says what each does."""

    def changes(self, base: Patterns, new: Patterns) -> Changes: ...

    def patch(self, base: Patterns, out: Patterns, found: Changes) -> bool: ...

    def pack_gaps(self, gaps: U32, low: int) -> tuple[U8, U8, U32]: ...

    def unpack_gaps(self, highs: U8, low: int, lows: U8, rest: U32) -> tuple[U32, int]: ...

    def pack_steps(self, steps: U32) -> tuple[U8, U8, U32]: ...

    def unpack_steps(self, halves: U8, count: int, bytes_: U8, rest: U32) -> tuple[U32, int, int]: ...


class Plain:
    """By NumPy."""

    pack_gaps = staticmethod(reference.pack_gaps)
    unpack_gaps = staticmethod(reference.unpack_gaps)
    pack_steps = staticmethod(reference.pack_steps)
    unpack_steps = staticmethod(reference.unpack_steps)

    def changes(self, base: Patterns, new: Patterns) -> Changes:
        members, changed = reference.survey(base, new)
        bounds = reference.merge(members, changed, WORTH)
        return Changes(bounds, *reference.changes(base, new, bounds))

    def patch(self, base: Patterns, out: Patterns, found: Changes) -> bool:
        return reference.patch(base, out, found.bounds, found.counts, found.gaps, found.steps)


class Compiled:
    """By numba."""

    def __init__(self) -> None:
        from longhaul.sync import kernels

        self.kernels: Any = kernels

    def changes(self, base: Patterns, new: Patterns) -> Changes:
        kernels, size = self.kernels, base.size
        differs = np.empty(-(-size // LEAST), np.uint64)
        members, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
        every = max(1, size // SAMPLE)
        total = kernels.survey(base, new, every, differs, members, changed)
        if not total:
            return NONE
        bounds = kernels.merge(members, changed, WORTH / every)
        table = np.searchsorted(bounds, np.arange(256), side="left").astype(np.uint8)
        starts = np.arange(CLASSES) * total  # room for all changes in each class: which are whose is seen on the way
        ends, gaps, steps = starts.copy(), np.empty(CLASSES * total, np.uint32), np.empty(CLASSES * total, np.uint32)
        kernels.emit(base, new, differs, _packed(bounds), table, ends, gaps, steps)
        spans = [slice(start, end) for start, end in zip(starts, ends)]
        joined = [np.concatenate([array[span] for span in spans]) for array in (gaps, steps)]
        return Changes(bounds, ends - starts, *joined)

    def patch(self, base: Patterns, out: Patterns, found: Changes) -> bool:
        ends = np.cumsum(found.counts)
        cursors = ends - found.counts
        return bool(self.kernels.patch(base, out, _packed(found.bounds), cursors, ends, found.gaps, found.steps))

    def pack_gaps(self, gaps: U32, low: int) -> tuple[U8, U8, U32]:
        highs, lows = np.empty(gaps.size, np.uint8), np.empty(-(-gaps.size * low // 8), np.uint8)
        rest = np.empty(gaps.size, np.uint32)
        return highs, lows, rest[: self.kernels.pack_gaps(gaps, low, highs, lows, rest)]

    def unpack_gaps(self, highs: U8, low: int, lows: U8, rest: U32) -> tuple[U32, int]:
        gaps = np.empty(highs.size, np.uint32)
        return gaps, int(self.kernels.unpack_gaps(highs, low, lows, rest, gaps))

    def pack_steps(self, steps: U32) -> tuple[U8, U8, U32]:
        halves, bytes_ = np.zeros(-(-steps.size // 2), np.uint8), np.empty(steps.size, np.uint8)
        rest = np.empty(steps.size, np.uint32)
        more, whole = self.kernels.pack_steps(steps, halves, bytes_, rest)
        return halves, bytes_[:more], rest[:whole]

    def unpack_steps(self, halves: U8, count: int, bytes_: U8, rest: U32) -> tuple[U32, int, int]:
        steps = np.empty(count, np.uint32)
        more, whole = self.kernels.unpack_steps(halves, bytes_, rest, steps)
        return steps, int(more), int(whole)


def _packed(bounds: U8) -> np.uint64:
    return np.uint64(int.from_bytes(bounds.tobytes(), "little"))


def library(name: str) -> Any:
    """A library of the extra `sync`; ValueError where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"longhaul.sync needs {name}: pip install 'longhaul[sync]'") from None


@functools.cache
def best() -> Loops:
    """`Compiled` where numba is installed, else `Plain`: the same bytes, several times slower."""
    return Compiled() if importlib.util.find_spec("numba") else Plain()
