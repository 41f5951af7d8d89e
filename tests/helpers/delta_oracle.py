"""Oracle of the delta codec: plain NumPy with the functions of `longhaul.weight_sync.delta.numba_kernels`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from longhaul.weight_sync.delta import block_codec, numba_kernels
from longhaul.weight_sync.delta.block_codec import CLASSES, Changes, Patterns, Streams

LOOPS = (sys.modules[__name__], numba_kernels)
"""Both kinds of loops, the oracle first."""


@contextmanager
def loops(which: ModuleType) -> Iterator[None]:
    """Within it the codec uses these loops."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(block_codec, "kernels", lambda: which)
        yield


def exponents(patterns: Patterns) -> NDArray[np.int64]:
    """The eight bits below the sign."""
    return ((patterns.astype(np.int64) << 1) >> (patterns.itemsize * 8 - 8)) & 255


def keys(patterns: Patterns) -> NDArray[np.int64]:
    """Modulo the width, in [0, 2^bits): of negative patterns, all bits but the sign are flipped."""
    wide, sign = patterns.astype(np.int64), 1 << (patterns.itemsize * 8 - 1)
    return np.where(wide & sign, wide ^ (sign - 1), wide)


def classes(patterns: Patterns, bounds: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Of every element: how many of the three ascending `bounds` lie below its exponent."""
    return np.searchsorted(bounds, exponents(patterns), side="left")


def survey(base: Patterns, new: Patterns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """-> (elements, elements that differ) by exponent, [256]."""
    found = exponents(base)
    return np.bincount(found, minlength=256), np.bincount(found[base != new], minlength=256)


def _changes(
    base: Patterns, new: Patterns, bounds: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]:
    """-> (changes of each class, their gaps, their steps less one), class after class.

    A step is the zigzag (0, -1, 1, -2 ... -> 0, 1, 2, 3 ...) of the keys' difference modulo the width.
    """
    sign, full = 1 << (base.itemsize * 8 - 1), (1 << (base.itemsize * 8)) - 1
    of, differs = classes(base, bounds), base != new
    moved = (((keys(new) - keys(base)) & full) ^ sign) - sign
    steps = (((moved << 1) ^ (moved >> 63)) & full) - 1
    counts, gaps, found = np.zeros(CLASSES, np.int64), [], []
    for k in range(CLASSES):
        members = np.flatnonzero(of == k)
        ranks = np.flatnonzero(differs[members])
        counts[k] = ranks.size
        gaps.append(np.diff(ranks, prepend=-1) - 1)
        found.append(steps[members[ranks]])
    return counts, np.concatenate(gaps).astype(np.uint32), np.concatenate(found).astype(np.uint32)


def _patch(
    base: Patterns,
    out: Patterns,
    bounds: NDArray[np.uint8],
    counts: NDArray[np.int64],
    gaps: NDArray[np.uint32],
    steps: NDArray[np.uint32],
) -> bool:
    """Undoes `_changes`: `out`, which may be `base` itself, becomes what was new. False where the gaps lead outside."""
    full, of, now, at = (1 << (out.itemsize * 8)) - 1, classes(base, bounds), base.copy(), 0
    for k in range(CLASSES):
        members = np.flatnonzero(of == k)
        mine, at = slice(at, at + int(counts[k])), at + int(counts[k])
        ranks = np.cumsum(gaps[mine].astype(np.int64) + 1) - 1
        if ranks.size and ranks[-1] >= members.size:
            return False
        zigzag = steps[mine].astype(np.int64) + 1
        places = members[ranks]
        moved: Any = ((keys(now[places]) + ((zigzag >> 1) ^ -(zigzag & 1))) & full).astype(now.dtype)
        now[places] = keys(moved).astype(now.dtype)  # the flip undoes itself
    out[:] = now
    return True


def pack_gaps(gaps: NDArray[np.uint32], low: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint32]]:
    """-> (what is above `low` bits, 255 for all that is more; the low bits packed; the gaps that were more, whole)."""
    highs = np.minimum(gaps >> low, 255).astype(np.uint8)
    bits = ((gaps[:, None] >> np.arange(low, dtype=np.uint32)) & 1).astype(np.uint8)
    return highs, np.packbits(bits.reshape(-1), bitorder="little"), gaps[highs == 255]


def unpack_gaps(
    highs: NDArray[np.uint8], low: int, lows: NDArray[np.uint8], rest: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], int]:
    """Undoes `pack_gaps`; -> (gaps, how many of `rest` were used: -1 where there are too few)."""
    bits = np.unpackbits(lows, count=highs.size * low, bitorder="little").reshape(highs.size, low).astype(np.uint32)
    lower = (bits << np.arange(low, dtype=np.uint32)).sum(1, dtype=np.uint32)
    gaps = (highs.astype(np.uint32) << np.uint32(low)) | lower
    whole = highs == 255
    used = int(whole.sum())
    if used > rest.size:
        return gaps, -1
    gaps[whole] = rest[:used]
    return gaps, used


def pack_steps(
    steps: NDArray[np.uint32],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint32]]:
    """-> (half bytes, two a byte; 15 goes on in the bytes; 255 goes on in whole steps)."""
    halves = np.minimum(steps, 15).astype(np.uint8)
    more = steps[halves == 15] - np.uint32(15)
    padded = np.append(halves, np.zeros(halves.size % 2, np.uint8)).reshape(-1, 2)
    bytes_ = np.minimum(more, 255).astype(np.uint8)
    return padded[:, 0] | (padded[:, 1] << np.uint8(4)), bytes_, more[bytes_ == 255] + np.uint32(15)


def unpack_steps(
    halves: NDArray[np.uint8], count: int, bytes_: NDArray[np.uint8], rest: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], int, int]:
    """Undoes `pack_steps`; -> (`count` steps, bytes used, whole steps used: both -1 where there are too few)."""
    steps = np.stack([halves & 15, halves >> 4], 1).reshape(-1)[:count].astype(np.uint32)
    more = np.flatnonzero(steps == 15)
    if more.size > bytes_.size:
        return steps, -1, -1
    steps[more] += bytes_[: more.size]
    whole = more[bytes_[: more.size] == 255]
    if whole.size > rest.size:
        return steps, -1, -1
    steps[whole] = rest[: whole.size]
    return steps, more.size, whole.size


def changes(base: Patterns, new: Patterns) -> Changes:
    bounds = numba_kernels.merge(*survey(base, new), numba_kernels.WORTH)
    return Changes(bounds, *_changes(base, new, bounds))


def patch(base: Patterns, out: Patterns, found: Changes) -> bool:
    return _patch(base, out, found.bounds, found.counts, found.gaps, found.steps)


def unpack(found: Streams) -> tuple[NDArray[np.uint32], NDArray[np.uint32], int]:
    gaps, steps = [], []
    more, rest, whole = found.more, found.rest, found.whole
    for low, highs, bits, halves in zip(found.lows, found.highs, found.bits, found.halves, strict=True):
        some, used = unpack_gaps(highs, low, bits, rest)
        gaps.append(some)
        some, taken, words = unpack_steps(halves, highs.size, more, whole)
        steps.append(some)
        if min(used, taken) < 0:
            return gaps[0], steps[0], -1
        rest, more, whole = rest[used:], more[taken:], whole[words:]
    return np.concatenate(gaps), np.concatenate(steps), rest.size + more.size + whole.size
