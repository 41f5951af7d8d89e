"""Numba kernels of the delta codec: changes found, applied, and packed into the streams that travel.

A pattern is an element's bits (uint8, uint16, uint32). Its *exponent* is the eight bits below the sign, which for bf16
and fp32 is the exponent indeed. Its *key* is a signed integer that grows with the number, one per unit in the last
place; keys are a bijection of all patterns, NaNs and both zeros included. How likely an element changes follows from
its exponent: an update of one size moves a small number by many units in the last place, and a large one by none.
Elements are therefore counted by classes of exponents, which sender and receiver both know from the base. A change is
the number of members of its class since the change before (its *gap*), and the units that it moves by (its *step*).
Where all elements are of one class, the third grows by one unit and the sixth falls by one: gaps 2, 2; steps +1, -1.

Kernels handle 64 elements at a time as bit masks, without Python's lock; only elements that changed are looked at
singly, without branches on their values. LLVM's vector types become AVX-512, AVX2 or NEON. Compiled code is cached
beside this file, or in NUMBA_CACHE_DIR. `tests/helpers/delta_oracle.py` does the same in plain NumPy, and tests compare
the two. Files that use numba at import time are imported inside functions only: numba takes a second to load.
"""

# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated, operator"
# mypy: warn-unreachable=False
# (numba's compiled functions are not what Python's annotations could say)

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from longhaul.weight_sync.delta.block_codec import CLASSES, Changes, Patterns, Streams
from longhaul.weight_sync.xxh3_kernels import called, read_only

LANES = 64
"""Elements of a chunk: one bit each of a 64-bit mask."""

BATCH = 64
"""Chunks of a batch: their classes are found before any is changed, and their counts compared at once."""

ROW = BATCH + 1
"""Counts of a class in a batch: of the members before each chunk, and of all."""

ONE, ZERO = np.uint64(1), np.uint64(0)

AHEAD = 32 * LANES
"""Elements by which cache lines are prefetched: the processor itself does not prefetch across pages."""

NEVER = 1 << 62
"""Rank beyond every element of a block."""

BMI2 = bool(llvm.get_host_cpu_features().get("bmi2"))
"""True where the processor has PDEP. Numba keys its cache by the processor's features, this one included."""

SAMPLE = 1 << 14
"""Elements of a block from which the bounds of classes are chosen; more give the same bounds."""

WORTH = 500.0
"""Bits that a class of exponents must save: about the bits that its own streams and counts take."""

jit = njit(cache=True, nogil=True, boundscheck=False)

I1, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))


# ------------------------------------------------------------------------------------------------- what the codec calls


def changes(base: Patterns, new: Patterns) -> Changes:
    """Changes from `base` to `new`, both of the same size, `block_codec.LEAST` elements or more."""
    base, new, size = read_only(base), read_only(new), base.size
    differs = np.empty(-(-size // LANES), np.uint64)
    members, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
    every = max(1, size // SAMPLE)
    total = called(_survey, base, new, every, differs, members, changed)
    if not total:
        none = np.zeros(0, np.uint32)
        return Changes(np.full(CLASSES - 1, 255, np.uint8), np.zeros(CLASSES, np.int64), none, none)
    bounds = called(merge, members, changed, WORTH / every)
    table = np.searchsorted(bounds, np.arange(256), side="left").astype(np.uint8)
    starts = np.arange(CLASSES) * total  # each class has room for all changes: how they divide is seen on the way
    ends, gaps, steps = starts.copy(), np.empty(CLASSES * total, np.uint32), np.empty(CLASSES * total, np.uint32)
    called(_emit, base, new, differs, _packed(bounds), table, ends, gaps, steps)
    spans = [slice(start, end) for start, end in zip(starts, ends)]
    joined = [np.concatenate([array[span] for span in spans]) for array in (gaps, steps)]
    return Changes(bounds, ends - starts, *joined)


def patch(base: Patterns, out: Patterns, change: Changes) -> bool:
    """Makes `out`, which may be `base` itself, what the changes lead to. False where their gaps lead outside."""
    apart = base.ctypes.data != out.ctypes.data
    return bool(called(_patch, read_only(base), out, _packed(change.bounds), *change[1:], apart))


def pack_gaps(gaps: NDArray[np.uint32], low: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint32]]:
    """(parts above the `low` bits, the low bits packed, the gaps whose upper part is 255 or more)."""
    highs, lows = np.empty(gaps.size, np.uint8), np.empty(-(-gaps.size * low // 8), np.uint8)
    rest = np.empty(gaps.size, np.uint32)
    return highs, lows, rest[: called(_pack_gaps, gaps, low, highs, lows, rest)]


def pack_steps(steps: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint32]]:
    """(half bytes, two in a byte; bytes of steps of 15 and more; steps too large for both)."""
    halves, bytes_ = np.zeros(-(-steps.size // 2), np.uint8), np.empty(steps.size, np.uint8)
    rest = np.empty(steps.size, np.uint32)
    more, whole = called(_pack_steps, steps, halves, bytes_, rest)
    return halves, bytes_[:more], rest[:whole]


def unpack(streams: Streams) -> tuple[NDArray[np.uint32], NDArray[np.uint32], int]:
    """(gaps, steps, elements of the last three streams that are left: below 0 where they are too short)."""
    count = sum(highs.size for highs in streams.highs)
    gaps, steps = np.empty(count, np.uint32), np.empty(count, np.uint32)
    return gaps, steps, int(called(_unpack, *streams, gaps, steps))


def _packed(bounds: NDArray[np.uint8]) -> np.uint64:
    return np.uint64(int.from_bytes(bounds.tobytes(), "little"))


# ------------------------------------------------------------------------------------------ changes: found, and applied


@jit
def _survey(base, new, every, differs, members, changed):
    """Number of elements that differ, of at least LANES.

    Fills `differs` (uint64, one mask per chunk), and from every `every`-th chunk `members` and `changed` (int64 [256]:
    elements, and elements that differ, by the base's exponent).
    """
    size, shift, total = base.size, base.itemsize * 8 - 8, 0
    for i in range((size + LANES - 1) // LANES):
        at = min(i * LANES, size - LANES)  # the last chunk overlaps the one before, to stay inside
        skip = i * LANES - at
        mask = differing(base, new, at) >> np.uint64(skip)
        differs[i] = mask
        total += ones(mask)
        if i % every == 0:
            for j in range(at + skip, at + LANES):
                exponent = ((np.int64(base[j]) << 1) >> shift) & 255
                members[exponent] += 1
                changed[exponent] += base[j] != new[j]
    return total


@jit
def _emit(base, new, differs, bounds, table, ends, gaps, steps):
    """Writes the gap and the step less one of every element that differs, class by class.

    `differs` are the masks of `_survey`, `bounds` those of `classes`; `table` (uint8 [256]) maps an exponent to its
    class. Class k's changes go to `gaps` and `steps` (uint32) from ends[k] (int64) on, and ends[k] moves behind them. A
    step is the zigzag (0, -1, 1, -2 ... -> 0, 1, 2, 3 ...) of the keys' difference modulo the width.
    """
    size, bits = base.size, base.itemsize * 8
    sign, full, shift = np.int64(1 << (bits - 1)), np.int64((1 << bits) - 1), bits - 8
    masks, seen, last = np.zeros(CLASSES, np.uint64), np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    for i in range((size + LANES - 1) // LANES):
        at = min(i * LANES, size - LANES)
        skip = np.uint64(i * LANES - at)
        m0, m1, m2, m3 = classes(base, at, bounds)
        masks[0], masks[1], masks[2], masks[3] = m0 >> skip, m1 >> skip, m2 >> skip, m3 >> skip
        hits = differs[i]
        while hits != ZERO:
            bit = hits & (~hits + ONE)
            j = i * LANES + lowest(hits)
            pattern = np.int64(base[j])
            k = table[((pattern << 1) >> shift) & 255]
            rank = seen[k] + ones(masks[k] & (bit - ONE))
            c = ends[k]
            ends[k] = c + 1
            gaps[c] = rank - last[k]
            last[k] = rank + 1
            # Modulo the width, then as a signed number, then as a zigzag.
            step = (ordered(np.int64(new[j]), sign) - ordered(pattern, sign)) & full
            step = (step ^ sign) - sign
            steps[c] = (((step << 1) ^ (step >> 63)) & full) - 1
            hits ^= bit
        for k in range(CLASSES):
            seen[k] += ones(masks[k])


@jit
def _patch(base, out, bounds, counts, gaps, steps, apart):
    """Inverse of `_emit`: makes `out` the new elements. False where the gaps lead outside.

    `counts` (int64) are the numbers of `gaps` and `steps` of each class; the caller has checked that they add up.
    Nothing outside `out` is written, whatever the gaps are. The members of each class in a batch of chunks are found
    before any of its elements is changed; the chunk of a change then follows from one comparison with all counts,
    without a branch that could be mispredicted. `apart` is false where `out` is `base`: then only changes are written.
    """
    bits = out.itemsize * 8
    sign = np.int64(1 << (bits - 1))
    # For each class: the masks of a batch's chunks, and the number of members before each chunk and in all.
    masks, seen = np.empty(CLASSES * BATCH, np.uint64), np.zeros(CLASSES * ROW, np.int16)
    # For each class: its next change, the end of its changes, and the rank in the batch of the member that changes.
    cursors, ends, ranks = np.empty(CLASSES, np.int64), np.empty(CLASSES, np.int64), np.empty(CLASSES, np.int64)
    end = np.int64(0)
    for k in range(CLASSES):
        cursors[k], end = end, end + counts[k]
        ends[k] = end
        ranks[k] = np.int64(gaps[cursors[k]]) if cursors[k] < ends[k] else NEVER
    for start in range(0, out.size, BATCH * LANES):
        _classify(base, out, start, bounds, masks, apart)
        for k in range(CLASSES):
            if ranks[k] == NEVER:
                continue
            total, c, end, rank = tally(masks, k * BATCH, seen, k * ROW + 1), cursors[k], ends[k], ranks[k]
            while rank < total:
                i = reached(seen, k * ROW + 1, rank)
                before = np.int64(seen[np.uint64(k * ROW + i)])
                j = np.uint64(start + i * LANES + place(masks[np.uint64(k * BATCH + i)], rank - before))
                step = np.int64(steps[np.uint64(c)]) + 1
                step = (step >> 1) ^ -(step & 1)
                # `ordered` twice, with the sign as a number: no branch, and no constant.
                key = np.int64(out[j])
                key = (key ^ (-(key >> (bits - 1)) & (sign - 1))) + step
                out[j] = key ^ (-((key >> (bits - 1)) & 1) & (sign - 1))
                c += 1
                rank = rank + 1 + np.int64(gaps[np.uint64(c)]) if c < end else NEVER
            cursors[k], ranks[k] = c, rank if rank == NEVER else rank - total
    used = True
    for k in range(CLASSES):
        used = used and cursors[k] == ends[k]
    return used


@jit
def _classify(base, out, start, bounds, masks, apart):
    """Puts in `masks` (uint64 [CLASSES * BATCH]) those of the batch of chunks from element `start` on; where `out` is
    `apart`, it gets a copy of them."""
    full = (min(start + BATCH * LANES, base.size) - start) // LANES
    for i in range(full):
        here = start + i * LANES
        fetch(base, here + AHEAD)
        m0, m1, m2, m3 = classes(base, here, bounds)
        if apart:
            fetch(out, here + AHEAD)
            copy(base, out, here)
        masks[i], masks[BATCH + i], masks[2 * BATCH + i], masks[3 * BATCH + i] = m0, m1, m2, m3
    if full == BATCH:
        return
    for k in range(CLASSES):
        masks[k * BATCH + full : (k + 1) * BATCH] = ZERO
    here = start + full * LANES
    if here < base.size:
        at = base.size - LANES  # the last chunk overlaps the one before, to stay inside
        skip = np.uint64(here - at)
        m0, m1, m2, m3 = classes(base, at, bounds)
        masks[full], masks[BATCH + full] = m0 >> skip, m1 >> skip
        masks[2 * BATCH + full], masks[3 * BATCH + full] = m2 >> skip, m3 >> skip
        if apart:
            for i in range(here, base.size):
                out[i] = base[i]


@jit
def place(mask, rank):
    """Place of the bit of `mask` that has `rank` set bits below it; there must be one."""
    if BMI2:
        return lowest(_deposit(ONE << np.uint64(rank), mask))
    for _ in range(rank):
        mask &= mask - ONE
    return lowest(mask)


@jit
def ordered(pattern, sign):
    """Key of a bit pattern, and back: of a negative number all bits but the sign are flipped."""
    return pattern ^ (-((pattern & sign) != 0) & (sign - 1))


# ------------------------------------------------------------------------------------------------- classes of exponents


@jit
def merge(members, changed, worth):
    """Ascending bounds of the classes that make positions cheapest, uint8 [CLASSES - 1]; 255 where unused.

    Begins with one class an exponent, and merges the neighbours that lose least, until there are at most CLASSES and
    each saves at least `worth` bits. `members` and `changed` are [256] by exponent.
    """
    last, of, hit = np.zeros(256, np.int64), np.zeros(256), np.zeros(256)
    cost, count = np.zeros(256), 0
    for i in range(256):
        if members[i] > 0:
            last[count], of[count], hit[count] = i, members[i], changed[i]
            cost[count] = _entropy(of[count], hit[count])
            count += 1
    while count > 1:
        best, least = 0, np.inf
        for i in range(count - 1):
            more = _entropy(of[i] + of[i + 1], hit[i] + hit[i + 1]) - cost[i] - cost[i + 1]
            if more < least:
                best, least = i, more
        if count <= CLASSES and least > worth:
            break
        last[best] = last[best + 1]
        of[best], hit[best] = of[best] + of[best + 1], hit[best] + hit[best + 1]
        cost[best] = _entropy(of[best], hit[best])
        count -= 1
        for i in range(best + 1, count):
            last[i], of[i], hit[i], cost[i] = last[i + 1], of[i + 1], hit[i + 1], cost[i + 1]
    bounds = np.full(CLASSES - 1, 255, np.uint8)
    for i in range(count - 1):
        bounds[i] = last[i]
    return bounds


@jit
def _entropy(of, hit):
    """Entropy, in bits, of which `hit` of `of` elements changed."""
    if hit <= 0.0 or hit >= of:
        return 0.0
    return float(of * np.log2(of) - hit * np.log2(hit) - (of - hit) * np.log2(of - hit))


# -------------------------------------------------------------------------------------------------------------- streams


@jit
def _pack_gaps(gaps, low, highs, lows, rest):
    """Splits gaps into `low` raw bits (`lows`, uint8, lowest bit first) and the part above them (`highs`, uint8).

    Where that part is 255 or more, the whole gap goes to `rest` (uint32). Returns the number of these.
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
def _pack_steps(steps, halves, bytes_, rest):
    """Splits steps into half bytes, two in a byte of `halves` (zeros before); 15 continues in `bytes_`, 255 in `rest`.

    Returns the numbers of the latter two.
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
def _unpack(lows, highs, bits, halves, more, rest, whole, gaps, steps):
    """Gaps and steps of all classes; returns how many of `more`, `rest` and `whole` are left, -1 if too few."""
    at = used = taken = words = 0
    for k in range(CLASSES):
        end = at + highs[k].size
        extra = _unpack_gaps(highs[k], lows[k], bits[k], rest[used:], gaps[at:end])
        some, large = _unpack_steps(halves[k], more[taken:], whole[words:], steps[at:end])
        if min(extra, some) < 0:
            return -1
        at, used, taken, words = end, used + extra, taken + some, words + large
    return more.size - taken + rest.size - used + whole.size - words


@jit
def _unpack_gaps(highs, low, lows, rest, gaps):
    """Inverse of `_pack_gaps`; returns the number of `rest` used, -1 if too few. `lows` must be long enough."""
    held, filled, at, extra = np.uint64(0), 0, 0, 0
    for i in range(highs.size):
        if filled < low:  # rare, hence well predicted: four bytes at once
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
def _unpack_steps(halves, bytes_, rest, steps):
    """Inverse of `_pack_steps`; returns the numbers of `bytes_` and `rest` used, both -1 if too few."""
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


# -------------------------------------------------------- intrinsics: a chunk of elements, or a batch of masks, at once


@intrinsic
def differing(typing: Any, one: Any, other: Any, start: Any) -> Any:
    """uint64: bit i is set where one[start + i] != other[start + i]."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = (_load(context, builder, signature.args[i], arguments[i], arguments[2]) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), I64)

    return types.uint64(one, other, types.int64), build


@intrinsic
def copy(typing: Any, source: Any, target: Any, start: Any) -> Any:
    """Copy of LANES elements from `start` on, to the same place of `target`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        chunk = _load(context, builder, signature.args[0], arguments[0], arguments[2])
        _store(context, builder, signature.args[1], arguments[1], arguments[2], chunk)
        return context.get_dummy_value()

    return types.void(source, target, types.int64), build


@intrinsic
def fetch(typing: Any, array: Any, start: Any) -> Any:
    """Prefetch of the cache lines of LANES elements from `start` on, which may lie behind the array."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        struct = context.make_array(kind)(context, builder, arguments[0])
        prefetch = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [ir.PointerType(I8)], prefetch)
        for line in range(0, LANES, 64 * 8 // kind.dtype.bitwidth):
            place = builder.gep(struct.data, [builder.add(arguments[1], I64(line))])
            builder.call(prefetch, [builder.bitcast(place, ir.PointerType(I8)), I32(0), I32(3), I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), build


@intrinsic
def classes(typing: Any, array: Any, start: Any, bounds: Any) -> Any:
    """Four uint64: masks of the classes of the LANES elements from `start` on.

    Class k holds the exponents above byte k - 1 of the uint64 `bounds` and not above byte k.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, bounds = arguments
        patterns = _load(context, builder, signature.args[0], array, start)
        vector, width = patterns.type, signature.args[0].dtype.bitwidth
        exponents = builder.shl(patterns, ir.Constant(vector, [1] * LANES))
        if width > 8:
            exponents = builder.lshr(exponents, ir.Constant(vector, [width - 8] * LANES))
            exponents = builder.trunc(exponents, ir.VectorType(I8, LANES))
        found, above = [], I64(-1)
        for k in range(CLASSES - 1):
            bound = builder.trunc(builder.lshr(bounds, I64(8 * k)), I8)
            over = builder.bitcast(builder.icmp_unsigned(">", exponents, _splat(builder, bound, LANES)), I64)
            found.append(builder.xor(above, over))
            above = over
        return context.make_tuple(builder, signature.return_type, [*found, above])

    return types.UniTuple(types.uint64, CLASSES)(array, types.int64, types.uint64), build


@intrinsic
def tally(typing: Any, masks: Any, start: Any, counts: Any, where: Any) -> Any:
    """int64: number of set bits in the BATCH uint64 `masks` from `start` on.

    Writes the running sums (of the first mask, the first two, ...) to int16 `counts` from `where` on.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        masks, start, counts, where = arguments
        loaded = _load(context, builder, signature.args[0], masks, start, BATCH)
        count = ir.FunctionType(loaded.type, [loaded.type])
        count = cgutils.get_or_insert_function(builder.module, count, f"llvm.ctpop.v{BATCH}i64")
        sums = builder.trunc(builder.call(count, [loaded]), ir.VectorType(I16, BATCH))
        zeros, step = ir.Constant(sums.type, None), 1
        while step < BATCH:  # each round sums twice as many
            order = [BATCH + i if i < step else i - step for i in range(BATCH)]
            moved = builder.shuffle_vector(sums, zeros, ir.Constant(ir.VectorType(I32, BATCH), order))
            sums, step = builder.add(sums, moved), 2 * step
        _store(context, builder, signature.args[2], counts, where, sums)
        return builder.zext(builder.extract_element(sums, I32(BATCH - 1)), I64)

    return types.int64(masks, types.int64, counts, types.int64), build


@intrinsic
def reached(typing: Any, counts: Any, start: Any, rank: Any) -> Any:
    """int64: number of the BATCH int16 `counts` from `start` on that are not above `rank`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row = _load(context, builder, signature.args[0], arguments[0], arguments[1], BATCH)
        rank = _splat(builder, builder.trunc(arguments[2], I16), BATCH)
        return builder.ctpop(builder.bitcast(builder.icmp_signed("<=", row, rank), I64))

    return types.int64(counts, types.int64, types.int64), build


@intrinsic
def ones(typing: Any, mask: Any) -> Any:
    """int64: number of set bits of a uint64."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def lowest(typing: Any, mask: Any) -> Any:
    """int64: place of the lowest set bit; 64 if there is none."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.cttz(arguments[0], I1(0))


@intrinsic
def _deposit(typing: Any, bits: Any, mask: Any) -> Any:
    """uint64: the low bits of `bits`, deposited at the set places of `mask` (x86's PDEP)."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pdep = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", fnty=ir.FunctionType(I64, [I64, I64]))
        return builder.call(pdep, arguments)

    return types.uint64(types.uint64, types.uint64), build


def _load(context: Any, builder: Any, kind: Any, array: Any, start: Any, lanes: int = LANES) -> Any:
    """Vector of `lanes` elements of a contiguous array from `start` on; bounds are the caller's to keep."""
    struct = context.make_array(kind)(context, builder, array)
    vector = ir.VectorType(ir.IntType(kind.dtype.bitwidth), lanes)
    pointer = builder.bitcast(builder.gep(struct.data, [start]), ir.PointerType(vector))
    loaded = builder.load(pointer, typ=vector)
    loaded.align = kind.dtype.bitwidth // 8
    return loaded


def _store(context: Any, builder: Any, kind: Any, array: Any, start: Any, chunk: Any) -> None:
    """Inverse of `_load`."""
    struct = context.make_array(kind)(context, builder, array)
    pointer = builder.bitcast(builder.gep(struct.data, [start]), ir.PointerType(chunk.type))
    builder.store(chunk, pointer).align = kind.dtype.bitwidth // 8


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """Scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(builder.insert_element(undefined, value, I32(0)), undefined, zeros)
