"""Gaps and steps of a delta as the streams that travel, and back: numba kernels, one element after the other.

They compute exactly what `longhaul.weight_sync.delta.numpy_kernels` does in NumPy. One of four files that import
numba; others import it
inside a function.
"""

# mypy: disable-error-code="no-untyped-def, operator"

from __future__ import annotations

import numpy as np
from numba import njit

from longhaul.weight_sync.delta.numpy_kernels import CLASSES

jit = njit(cache=True, nogil=True, boundscheck=False)


@jit
def pack_gaps(gaps, low, highs, lows, rest):
    """Splits gaps into `low` raw bits (`lows`, uint8, from the lowest bit on) and what is above (`highs`, uint8).

    Where that is 255 or more, the whole gap goes to `rest` (uint32). -> how many did.
    """
    held, filled, at, extra = np.uint64(0), 0, 0, 0
    for i in range(gaps.size):
        gap = np.int64(gaps[i])
        high = gap >> low
        if high >= 255:
            rest[extra] = gap
            extra += 1
            high = 255
        highs[i] = high
        held |= np.uint64(gap & ((1 << low) - 1)) << np.uint64(filled)
        filled += low
        while filled >= 8:
            lows[at] = held & np.uint64(255)
            held >>= np.uint64(8)
            filled -= 8
            at += 1
    if filled > 0:
        lows[at] = held & np.uint64(255)
    return extra


@jit
def unpack_gaps(highs, low, lows, rest, gaps):
    """Undoes `pack_gaps`; -> how many of `rest` were used, -1 where there are too few. `lows` must be long enough."""
    held, filled, at, extra = np.uint64(0), 0, 0, 0
    for i in range(highs.size):
        if filled < low:  # rarely, so that it is foreseen: four bytes at once
            for j in range(at, min(at + 4, lows.size)):
                held |= np.uint64(lows[j]) << np.uint64(filled)
                filled += 8
            at += 4
        gap = (np.int64(highs[i]) << low) | (np.int64(held) & ((1 << low) - 1))
        held >>= np.uint64(low)
        filled -= low
        if highs[i] == 255:
            if extra >= rest.size:
                return -1
            gap = np.int64(rest[extra])
            extra += 1
        gaps[i] = gap
    return extra


@jit
def pack_steps(steps, halves, bytes_, rest):
    """Splits steps into half bytes, two a byte of `halves` (zero before); 15 goes on in `bytes_`, and 255 in `rest`.

    -> how many of the latter two were written.
    """
    more = whole = 0
    for i in range(steps.size):
        step = np.int64(steps[i])
        half = min(step, 15)
        halves[i >> 1] |= half << (4 * (i & 1))
        if half == 15:
            byte = min(step - 15, 255)
            bytes_[more] = byte
            more += 1
            if byte == 255:
                rest[whole] = step
                whole += 1
    return more, whole


@jit
def unpack_steps(halves, bytes_, rest, steps):
    """Undoes `pack_steps`; -> how many of `bytes_` and `rest` were used: both -1 where there are too few."""
    more = whole = 0
    for i in range(steps.size):
        step = np.int64(halves[i >> 1] >> (4 * (i & 1))) & 15
        if step == 15:
            if more >= bytes_.size:
                return -1, -1
            step += np.int64(bytes_[more])
            more += 1
            if step == 15 + 255:
                if whole >= rest.size:
                    return -1, -1
                step = np.int64(rest[whole])
                whole += 1
        steps[i] = step
    return more, whole


@jit
def unpack(lows, highs, bits, halves, more, rest, whole, gaps, steps):
    """All classes' gaps and steps; -> how many of `more`, `rest` and `whole` were left, -1 where there are too few."""
    at = used = taken = words = 0
    for k in range(CLASSES):
        end = at + highs[k].size
        extra = unpack_gaps(highs[k], lows[k], bits[k], rest[used:], gaps[at:end])
        some, large = unpack_steps(halves[k], more[taken:], whole[words:], steps[at:end])
        if min(extra, some) < 0:
            return -1
        at, used, taken, words = end, used + extra, taken + some, words + large
    return more.size - taken + rest.size - used + whole.size - words
