"""The delta codec's loops behind one set of functions: by numba where it is installed, else by NumPy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longhaul.weight_sync.delta import numpy_kernels
from longhaul.weight_sync.delta.numpy_kernels import CLASSES, Patterns

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


class Streams(NamedTuple):
    """Changes as they travel: of each class, and `more`, `rest` and `whole` of all."""

    lows: tuple[int, ...]  # [CLASSES] bits of a gap that stay as they are
    highs: tuple[U8, ...]  # what is above them
    bits: tuple[U8, ...]
    halves: tuple[U8, ...]  # steps, two a byte
    more: U8  # of steps of 15 and more
    rest: U32  # gaps that are too large for a byte
    whole: U32  # steps that are too large for both


NONE = Changes(*(np.full(CLASSES - 1, 255, np.uint8), np.zeros(CLASSES, np.int64)), *2 * [np.zeros(0, np.uint32)])
"""Of a block that is as it was."""


class Feed(NamedTuple):
    """For a loop that makes bytes: the first `size` of them go into `sums` (uint64 [8]) as soon as they are made."""

    size: int
    sums: np.ndarray


NO_FEED = Feed(0, np.zeros(8, np.uint64))
"""For a digest that is found otherwise."""


class Loops(Protocol):
    """What `codec` needs; `reference` says what each does."""

    feeds: bool  # whether `patch` feeds a digest

    def changes(self, base: Patterns, new: Patterns) -> Changes: ...

    def patch(self, base: Patterns, out: Patterns, found: Changes, feed: Feed = NO_FEED) -> bool: ...

    def pack_gaps(self, gaps: U32, low: int) -> tuple[U8, U8, U32]: ...

    def pack_steps(self, steps: U32) -> tuple[U8, U8, U32]: ...

    def unpack(self, found: Streams) -> tuple[U32, U32, int]:
        """-> gaps, steps, and how many of the last three streams were not used: below 0 where they were too short."""


class Plain:
    """By NumPy."""

    feeds = False

    pack_gaps = staticmethod(numpy_kernels.pack_gaps)
    pack_steps = staticmethod(numpy_kernels.pack_steps)

    def changes(self, base: Patterns, new: Patterns) -> Changes:
        members, changed = numpy_kernels.survey(base, new)
        bounds = numpy_kernels.merge(members, changed, WORTH)
        return Changes(bounds, *numpy_kernels.changes(base, new, bounds))

    def patch(self, base: Patterns, out: Patterns, found: Changes, feed: Feed = NO_FEED) -> bool:
        return numpy_kernels.patch(base, out, found.bounds, found.counts, found.gaps, found.steps)

    def unpack(self, found: Streams) -> tuple[U32, U32, int]:
        gaps, steps = [], []
        more, rest, whole = found.more, found.rest, found.whole
        for low, highs, bits, halves in zip(found.lows, found.highs, found.bits, found.halves, strict=True):
            some, used = numpy_kernels.unpack_gaps(highs, low, bits, rest)
            gaps.append(some)
            some, taken, words = numpy_kernels.unpack_steps(halves, highs.size, more, whole)
            steps.append(some)
            if min(used, taken) < 0:
                return gaps[0], steps[0], -1
            rest, more, whole = rest[used:], more[taken:], whole[words:]
        return np.concatenate(gaps), np.concatenate(steps), rest.size + more.size + whole.size


class Compiled:
    """By numba."""

    feeds = True

    def __init__(self) -> None:
        from longhaul.weight_sync.delta import numba_kernels, packing
        from longhaul.weight_sync.digest import xxh3_kernels

        self.kernels: Any = numba_kernels
        self.packing: Any = packing
        self.called = xxh3_kernels.called

    def changes(self, base: Patterns, new: Patterns) -> Changes:
        kernels, size = self.kernels, base.size
        differs = np.empty(-(-size // LEAST), np.uint64)
        members, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
        every = max(1, size // SAMPLE)
        total = self.called(kernels.survey, base, new, every, differs, members, changed)
        if not total:
            return NONE
        bounds = self.called(kernels.merge, members, changed, WORTH / every)
        table = np.searchsorted(bounds, np.arange(256), side="left").astype(np.uint8)
        starts = np.arange(CLASSES) * total  # room for all changes in each class: which are whose is seen on the way
        ends, gaps, steps = starts.copy(), np.empty(CLASSES * total, np.uint32), np.empty(CLASSES * total, np.uint32)
        self.called(kernels.emit, base, new, differs, _packed(bounds), table, ends, gaps, steps)
        spans = [slice(start, end) for start, end in zip(starts, ends)]
        joined = [np.concatenate([array[span] for span in spans]) for array in (gaps, steps)]
        return Changes(bounds, ends - starts, *joined)

    def patch(self, base: Patterns, out: Patterns, found: Changes, feed: Feed = NO_FEED) -> bool:
        apart = base.ctypes.data != out.ctypes.data
        given = read_only(base), out, _packed(found.bounds), *found[1:], *feed, apart
        return bool(self.called(self.kernels.patch, *given))

    def pack_gaps(self, gaps: U32, low: int) -> tuple[U8, U8, U32]:
        highs, lows = np.empty(gaps.size, np.uint8), np.empty(-(-gaps.size * low // 8), np.uint8)
        rest = np.empty(gaps.size, np.uint32)
        return highs, lows, rest[: self.called(self.packing.pack_gaps, gaps, low, highs, lows, rest)]

    def pack_steps(self, steps: U32) -> tuple[U8, U8, U32]:
        halves, bytes_ = np.zeros(-(-steps.size // 2), np.uint8), np.empty(steps.size, np.uint8)
        rest = np.empty(steps.size, np.uint32)
        more, whole = self.called(self.packing.pack_steps, steps, halves, bytes_, rest)
        return halves, bytes_[:more], rest[:whole]

    def unpack(self, found: Streams) -> tuple[U32, U32, int]:
        count = sum(highs.size for highs in found.highs)
        gaps, steps = np.empty(count, np.uint32), np.empty(count, np.uint32)
        return gaps, steps, int(self.called(self.packing.unpack, *found, gaps, steps))


def _packed(bounds: U8) -> np.uint64:
    return np.uint64(int.from_bytes(bounds.tobytes(), "little"))


def read_only(data: np.ndarray) -> np.ndarray:
    """A view that can't be written: one kind of array for compiled loops, whatever is given."""
    view = data[:]
    view.flags.writeable = False
    return view


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
