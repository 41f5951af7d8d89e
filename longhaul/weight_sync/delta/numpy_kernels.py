"""The delta codec's loops in plain NumPy: what `longhaul.weight_sync.delta.numba_kernels` is tested against, and what
runs without numba.

Elements are bit patterns (uint8, uint16, uint32). A pattern's *exponent* is the eight bits below its sign, which of
bf16 and fp32 is the exponent indeed; its *key* is a signed integer that grows with the number, one unit in the last
place a unit, and is a bijection of all patterns, NaNs and both zeros too. How likely an element changes follows from
its exponent: an update of one size moves a small number by many units in the last place, and a large one by none. So
elements are counted by classes of exponents that sender and receiver both know from the base: a change is told as the
number of members of its class since the one before (its *gap*), and by how many units it moves (its *step*).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Patterns = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]

CLASSES = 4


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


def changes(
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


def patch(
    base: Patterns,
    out: Patterns,
    bounds: NDArray[np.uint8],
    counts: NDArray[np.int64],
    gaps: NDArray[np.uint32],
    steps: NDArray[np.uint32],
) -> bool:
    """Undoes `changes`: `out`, which may be `base` itself, becomes what was new. False where the gaps lead outside."""
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


def merge(members: NDArray[np.int64], changed: NDArray[np.int64], worth: float) -> NDArray[np.uint8]:
    """Bounds of the classes that make positions cheapest: of neighbours, those that lose least are merged.

    `members` and `changed` are [256] by exponent. There are CLASSES classes at most, and each saves at least `worth`
    bits. -> uint8 [CLASSES - 1], ascending; 255 for those that are not used. Plain loops: numba compiles this, too.
    """
    last, of, hit = np.zeros(256, np.int64), np.zeros(256), np.zeros(256)
    cost, count = np.zeros(256), 0
    for i in range(256):
        if members[i] > 0:
            last[count], of[count], hit[count] = i, members[i], changed[i]
            cost[count] = _bits(of[count], hit[count])
            count += 1
    while count > 1:
        best, least = 0, np.inf
        for i in range(count - 1):
            more = _bits(of[i] + of[i + 1], hit[i] + hit[i + 1]) - cost[i] - cost[i + 1]
            if more < least:
                best, least = i, more
        if count <= CLASSES and least > worth:
            break
        last[best] = last[best + 1]
        of[best], hit[best] = of[best] + of[best + 1], hit[best] + hit[best + 1]
        cost[best] = _bits(of[best], hit[best])
        count -= 1
        for i in range(best + 1, count):
            last[i], of[i], hit[i], cost[i] = last[i + 1], of[i + 1], hit[i + 1], cost[i + 1]
    bounds = np.full(CLASSES - 1, 255, np.uint8)
    for i in range(count - 1):
        bounds[i] = last[i]
    return bounds


def _bits(of: float, hit: float) -> float:
    """The entropy of which `hit` of `of` elements changed."""
    if hit <= 0.0 or hit >= of:
        return 0.0
    return float(of * np.log2(of) - hit * np.log2(hit) - (of - hit) * np.log2(of - hit))
