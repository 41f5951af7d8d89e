"""The loops of the delta codec as numba kernels: 64 elements at a time, as bit masks, without Python's lock.

They compute exactly what `longhaul.weight_sync.delta.numpy_kernels` does in NumPy, many times faster: comparing 64
elements takes a
handful of vector instructions, and only elements that changed are looked at singly, without branches on their values.
LLVM's vector types are portable: they become AVX-512, AVX2 or NEON, whatever the machine has. Compiled programs are
kept beside this file, or in NUMBA_CACHE_DIR. One of four files that import numba; others import it inside a function.
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
from numba.extending import intrinsic, register_jitable

from longhaul.weight_sync.delta import numpy_kernels
from longhaul.weight_sync.digest.xxh3_kernels import BLOCK, scan_block

LANES = 64
"""Elements of a chunk: the bits of a mask."""

CLASSES = 4
"""Classes of exponents, whether all are used or not."""

BATCH = 64
"""Chunks whose classes are found before any of them is changed; all their counts are compared at once."""

ROW = BATCH + 1

ONE, ZERO, ALL = np.uint64(1), np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)

AHEAD = 32 * LANES
"""Elements that lines are fetched before they are needed: across pages, where the processor itself does not."""

NEVER = 1 << 62
"""A rank that no element of a block has."""

BMI2 = bool(llvm.get_host_cpu_features().get("bmi2"))
"""Whether the processor deposits bits in one instruction; part of what numba keys its cache by."""

jit = njit(cache=True, nogil=True, boundscheck=False)

I1, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """A scalar in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(builder.insert_element(undefined, value, I32(0)), undefined, zeros)


def _load(context: Any, builder: Any, kind: Any, array: Any, start: Any, lanes: int = LANES) -> Any:
    """`lanes` elements of a contiguous array from `start` on as a vector; the caller keeps them inside."""
    struct = context.make_array(kind)(context, builder, array)
    vector = ir.VectorType(ir.IntType(kind.dtype.bitwidth), lanes)
    pointer = builder.bitcast(builder.gep(struct.data, [start]), ir.PointerType(vector))
    loaded = builder.load(pointer, typ=vector)
    loaded.align = kind.dtype.bitwidth // 8
    return loaded


def _store(context: Any, builder: Any, kind: Any, array: Any, start: Any, chunk: Any) -> None:
    """`_load`'s way back."""
    struct = context.make_array(kind)(context, builder, array)
    pointer = builder.bitcast(builder.gep(struct.data, [start]), ir.PointerType(chunk.type))
    builder.store(chunk, pointer).align = kind.dtype.bitwidth // 8


@intrinsic
def differing(typing: Any, one: Any, other: Any, start: Any) -> Any:
    """uint64: bit i says whether one[start + i] != other[start + i]."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = (_load(context, builder, signature.args[i], arguments[i], arguments[2]) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), I64)

    return types.uint64(one, other, types.int64), build


@intrinsic
def copy(typing: Any, source: Any, target: Any, start: Any) -> Any:
    """LANES elements from `start` on, to the same place."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        chunk = _load(context, builder, signature.args[0], arguments[0], arguments[2])
        _store(context, builder, signature.args[1], arguments[1], arguments[2], chunk)
        return context.get_dummy_value()

    return types.void(source, target, types.int64), build


@intrinsic
def fetch(typing: Any, array: Any, start: Any) -> Any:
    """Asks for the lines of LANES elements from `start` on, which may lie behind the array: nothing is read."""

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
    """Four uint64: the masks of the classes of the LANES elements from `start` on.

    An exponent is the eight bits below the sign. Class k holds those above byte k - 1 of the uint64 `bounds` and not
    above byte k.
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
    """int64: how many bits of the BATCH uint64 `masks` from `start` on are set; of the first one, the first two ... so
    many to int16 `counts` from `where` on."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        masks, start, counts, where = arguments
        loaded = _load(context, builder, signature.args[0], masks, start, BATCH)
        count = ir.FunctionType(loaded.type, [loaded.type])
        count = cgutils.get_or_insert_function(builder.module, count, f"llvm.ctpop.v{BATCH}i64")
        found = builder.trunc(builder.call(count, [loaded]), ir.VectorType(I16, BATCH))
        zeros, step = ir.Constant(found.type, None), 1
        while step < BATCH:  # sums of twice as many each time
            order = [BATCH + i if i < step else i - step for i in range(BATCH)]
            moved = builder.shuffle_vector(found, zeros, ir.Constant(ir.VectorType(I32, BATCH), order))
            found, step = builder.add(found, moved), 2 * step
        _store(context, builder, signature.args[2], counts, where, found)
        return builder.zext(builder.extract_element(found, I32(BATCH - 1)), I64)

    return types.int64(masks, types.int64, counts, types.int64), build


@intrinsic
def reached(typing: Any, counts: Any, start: Any, rank: Any) -> Any:
    """int64: how many of the BATCH int16 `counts` from `start` on are not above `rank`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row = _load(context, builder, signature.args[0], arguments[0], arguments[1], BATCH)
        rank = _splat(builder, builder.trunc(arguments[2], I16), BATCH)
        return builder.ctpop(builder.bitcast(builder.icmp_signed("<=", row, rank), I64))

    return types.int64(counts, types.int64, types.int64), build


@intrinsic
def ones(typing: Any, mask: Any) -> Any:
    """int64: how many bits of a uint64 are set."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def lowest(typing: Any, mask: Any) -> Any:
    """int64: the place of the lowest bit that is set; 64 for none."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.cttz(arguments[0], I1(0))


@intrinsic
def _deposit(typing: Any, bits: Any, mask: Any) -> Any:
    """uint64: the low bits of `bits` at the places that are set in `mask` (x86's PDEP)."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pdep = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", fnty=ir.FunctionType(I64, [I64, I64]))
        return builder.call(pdep, arguments)

    return types.uint64(types.uint64, types.uint64), build


@jit
def place(mask, rank):
    """The place of the bit of `mask` that has `rank` set bits below it; there must be one."""
    if BMI2:
        return lowest(_deposit(ONE << np.uint64(rank), mask))
    for _ in range(rank):
        mask &= mask - ONE
    return lowest(mask)


@jit
def ordered(pattern, sign):
    """A bit pattern as a key that grows with the number, and back: of a negative one all bits but the sign flip."""
    return pattern ^ (-((pattern & sign) != 0) & (sign - 1))


@jit
def survey(base, new, every, differs, members, changed):
    """What differs, and how that depends on the base's exponent; of at least LANES elements. -> how many differ.

    Fills `differs` (uint64, a mask a chunk), `members` and `changed` (int64 [256]: elements, and those that differ, by
    exponent, the eight bits below the sign; of every `every`-th chunk).
    """
    size, shift, total = base.size, base.itemsize * 8 - 8, 0
    for i in range((size + LANES - 1) // LANES):
        at = min(i * LANES, size - LANES)  # the last chunk begins earlier rather than end outside
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
def emit(base, new, differs, bounds, table, ends, gaps, steps):
    """Of every element that differs, by class: members of its class since the one before, and its step less one.

    `differs` are the masks of `survey`, `bounds` those of `classes`, and `table` (uint8 [256]) has the class of an
    exponent. Class k's go to `gaps` and `steps` (uint32) from ends[k] (int64) on, which is moved behind them. A step is
    the zigzag of the keys' difference, modulo the width.
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
            # Into the width, then as a signed number, then 0, -1, 1, -2 ... -> 0, 1, 2, 3 ...
            step = (ordered(np.int64(new[j]), sign) - ordered(pattern, sign)) & full
            step = (step ^ sign) - sign
            steps[c] = (((step << 1) ^ (step >> 63)) & full) - 1
            hits ^= bit
        for k in range(CLASSES):
            seen[k] += ones(masks[k])


@jit
def _ending(base, here, full, masks, bounds, out, apart):
    """What `patch` does with a batch of fewer than BATCH chunks behind the `full` ones: what is left of the base from
    `here` on, fewer elements than a chunk, if any."""
    for k in range(CLASSES):
        masks[k * BATCH + full : (k + 1) * BATCH] = ZERO
    if here < base.size:
        at = base.size - LANES  # the last chunk begins earlier rather than end outside
        skip = np.uint64(here - at)
        m0, m1, m2, m3 = classes(base, at, bounds)
        masks[full], masks[BATCH + full] = m0 >> skip, m1 >> skip
        masks[2 * BATCH + full], masks[3 * BATCH + full] = m2 >> skip, m3 >> skip
        if apart:
            out[here:] = base[here:]


@jit
def patch(base, out, bounds, counts, gaps, steps, feed, sums, apart):
    """Undoes `emit`: `out` becomes what was new. False where the gaps lead outside.

    `counts` (int64) are of each class's `gaps` and `steps`; the caller has checked that they are all of these. Nothing
    outside `out` is written, whatever the gaps are. Of a batch of chunks the members of each class are counted first;
    then a change's chunk follows from one comparison with all counts, without a branch that could be mispredicted.

    `apart` is whether `out` is another memory than `base`: else only what changes is written. What is made goes into
    the digest's `sums` while it is in the nearest cache: the first `feed` bytes, whole blocks.
    """
    size, bits, fed, raw = out.size, out.itemsize * 8, 0, out.view(np.uint8)
    sign = np.int64(1 << (bits - 1))
    # Of each class the masks of a batch's chunks, and how many members there are before each chunk, and in all.
    masks, seen = np.empty(CLASSES * BATCH, np.uint64), np.zeros(CLASSES * ROW, np.int16)
    coming, totals = np.empty(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    ends = counts.cumsum()
    cursors = ends - counts
    for k in range(CLASSES):
        coming[k] = np.int64(gaps[cursors[k]]) if cursors[k] < ends[k] else NEVER
    for start in range(0, size, BATCH * LANES):
        until = min(start + BATCH * LANES, size)
        full = (until - start) // LANES
        for i in range(full):
            here = start + i * LANES
            fetch(base, here + AHEAD)
            m0, m1, m2, m3 = classes(base, here, bounds)
            if apart:
                fetch(out, here + AHEAD)
                copy(base, out, here)
            masks[i], masks[BATCH + i], masks[2 * BATCH + i], masks[3 * BATCH + i] = m0, m1, m2, m3
        if full < BATCH:
            _ending(base, start + full * LANES, full, masks, bounds, out, apart)
        for k in range(CLASSES):
            if coming[k] != NEVER:
                totals[k] = tally(masks, k * BATCH, seen, k * ROW + 1)
        for k in range(CLASSES):
            c, end, rank, total = cursors[k], ends[k], coming[k], totals[k]
            while rank < total:
                i = reached(seen, k * ROW + 1, rank)
                before = np.int64(seen[np.uint64(k * ROW + i)])
                j = np.uint64(start + i * LANES + place(masks[np.uint64(k * BATCH + i)], rank - before))
                step = np.int64(steps[np.uint64(c)]) + 1
                step = (step >> 1) ^ -(step & 1)
                # As `ordered` twice, with the sign as a number: no branch, and no constant.
                key = np.int64(out[j])
                key = (key ^ (-(key >> (bits - 1)) & (sign - 1))) + step
                out[j] = key ^ (-((key >> (bits - 1)) & 1) & (sign - 1))
                c += 1
                rank = rank + 1 + np.int64(gaps[np.uint64(c)]) if c < end else NEVER
            cursors[k], coming[k] = c, rank if rank == NEVER else rank - total
        while fed + BLOCK <= min(until * out.itemsize, feed):
            scan_block(raw, fed, sums)
            fed += BLOCK
    return (cursors == ends).all()


register_jitable(numpy_kernels._bits)  # so that `merge` may call it as it is

merge = jit(numpy_kernels.merge)
"""As it stands there."""
