"""Numba kernel of xxh3-128 over memory that is copied past the caches: read once, digested in registers, written.

A usual copy with a digest beside it takes four passes over memory: the source is read, the target is read to be owned
and written, and one of them is read again. Here a cache line is loaded, enters the digest in registers, and is written
by a non-temporal store that reads nothing, while later lines are prefetched. The digest is that of the library (Collet,
xxHash; after its specification), for data of 241 bytes or more.

Kept because a copy takes more than 15 % less (128 MiB, 2 cores, medians of 9 in turn, 2026-11-23): 6.0 ms of CPU time,
9.2 by the library in pieces that fit in a cache, 8.8 by the library beside non-temporal stores. A digest without a copy
takes 4.0 ms here and by the library, which does it. Over TCP it changed nothing, and is not used.

Rows that lie beside one another go in step, so that memory is read in order (96 MiB, two threads of a core that others
shared, medians of 7 in turn, 2026-11-27): halves of 1,024 bytes by 9.2 GB a CPU-second, one half after the other by
6.4; copies of 4,096 bytes for two replicas by 14.5 and 11.0. What is contiguous takes 9.0.
"""

# mypy: disable-error-code="no-untyped-def, call-arg"
# mypy: warn-unreachable=False

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

STRIPE = 64
"""Bytes that enter all sums at once: a cache line."""

STRIPES = 16
"""Stripes of a block, after which the sums are scrambled."""

BLOCK = STRIPE * STRIPES

AHEAD = 16384
"""Bytes by which cache lines are prefetched: the processor itself does not prefetch across pages."""

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""Default secret of the specification."""

KEY = np.frombuffer(SECRET, np.uint8)

P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

BUNDLE = 16
"""Rows that go in step, at most."""

START = np.array([P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1], np.uint64)
"""Initial values of the eight sums."""

LENGTH = len(SECRET)
HALF = np.uint64(0xFFFFFFFF)
S32, S37 = np.uint64(32), np.uint64(37)
AVALANCHE = np.uint64(0x165667919E3779F9)
LOW, HIGH = np.uint64(P64_1), np.uint64(P64_2)

jit = njit(cache=True, nogil=True, boundscheck=False)

I8, I32, I64 = (ir.IntType(width) for width in (8, 32, 64))

LINE = ir.VectorType(I64, 8)


def pour_rows(rows: np.ndarray, ends: np.ndarray | None = None) -> np.ndarray:
    """Digests, uint8 [n, 16], of rows, int64 [n, 6] (`digest.Row`), whose runs are copied past the caches.

    `ends`, int64, are the ends of bundles of BUNDLE rows at most, which have one source step, length and number of
    runs; by default each row is one. Nothing is checked: each address must be in memory that is held.
    """
    words = np.empty((len(rows), 2), np.uint64)
    called(_pour_rows, rows, np.arange(1, len(rows) + 1) if ends is None else ends, words)
    return words.astype(">u8").view(np.uint8)


def copied(source: np.ndarray, target: np.ndarray) -> bytes:
    """Digest of `source`, uint8 [n], contiguous, 241 bytes or more, which is copied past the caches to `target`.

    `target` is aligned to cache lines.
    """
    source, sums, words = read_only(source), START.copy(), np.empty(2, np.uint64)
    whole = (source.size - 1) // BLOCK * BLOCK
    called(_pour, source.ctypes.data, target.ctypes.data, whole, sums)
    target[whole:] = source[whole:]
    called(_finish, source, sums, words)
    return words.astype(">u8").tobytes()


def called(kernel: Any, *given: Any) -> Any:
    """Result of a compiled loop. Where it had to be compiled, as in no cache, garbage is collected at once.

    Numba tries types by raising and catching errors, which hold the frames of all callers: images, and maps of files,
    would count as read until the next collection, which a thread that waits for them may never reach.
    """
    known = len(kernel.stats.cache_misses)
    result = kernel(*given)
    if len(kernel.stats.cache_misses) > known:
        gc.collect()
    return result


def read_only(data: np.ndarray) -> np.ndarray:
    """View that can't be written: kernels are compiled for one kind of array alone."""
    view = data[:]
    view.flags.writeable = False
    return view


# ---------------------------------------------------------------------------------------------------------------- loops


@jit
def _pour_rows(rows, ends, words):
    """Copies rows, int64 [n, 6], past the caches; their digests are uint64 [n, 2], the higher half first.

    The rows up to each of the `ends` are alike but for their addresses and target steps. They go in step, run by run.
    The sums of all are in one array: a view of a part of it would be counted, and each count waits for all stores.
    """
    sums = np.empty(8 * BUNDLE, np.uint64)
    begin = 0
    for end in ends:
        step, length, count = rows[begin, 1], rows[begin, 4], rows[begin, 5]
        # AHEAD bytes of the runs further on, wherever they are: what lies between them is none of theirs.
        further = AHEAD if step == length else max(1, AHEAD // length) * step
        for i in range(8 * (end - begin)):
            sums[i] = START[i % 8]
        after = 0
        for run in range(count):
            before = after
            for i in range(begin, end):
                own, stripe = 8 * (i - begin), before
                source, target = rows[i, 0] + run * step, rows[i, 2] + run * rows[i, 3]
                last = source + length
                if run == count - 1:
                    last -= STRIPE  # the last stripe has a key of its own
                while source < last:
                    if stripe == 0 and last - source >= BLOCK:
                        _pour_block(source, target, further, sums, own)
                        source += BLOCK
                        target += BLOCK
                    else:
                        _pour_stripe(source, target, further, sums, own, KEY, 8 * stripe)
                        source += STRIPE
                        target += STRIPE
                        stripe += 1
                        if stripe == STRIPES:
                            _scramble(sums, own)
                            stripe = 0
                if run == count - 1:
                    _pour_stripe(source, target, further, sums, own, KEY, LENGTH - STRIPE - 7)
                    size = np.uint64(length * count)
                    words[i, 0] = _merged(sums[own : own + 8], LENGTH - STRIPE - 11, ~(size * HIGH))
                    words[i, 1] = _merged(sums[own : own + 8], 11, size * LOW)
                after = stripe
        begin = end
    _fence()


@jit
def _pour(source, target, count, sums):
    """Copies `count` bytes, whole blocks, from an address to another, of a cache line; adds them to the sums."""
    for place in range(0, count, BLOCK):
        _pour_block(source + place, target + place, AHEAD, sums, 0)
    _fence()


@jit
def _finish(data, sums, words):
    """Digest of data of 241 bytes or more as uint64 [2], the higher half first, when all whole blocks are in the sums.

    A block that ends with the data counts as not yet whole. Shorter data has other rules in the specification.
    """
    size = data.size
    begin = (size - 1) // BLOCK * BLOCK
    for i in range((size - 1 - begin) // STRIPE):
        _last(data, begin + i * STRIPE, sums, 8 * i)
    _last(data, size - STRIPE, sums, LENGTH - STRIPE - 7)
    words[0] = _merged(sums, LENGTH - STRIPE - 11, ~(np.uint64(size) * HIGH))
    words[1] = _merged(sums, 11, np.uint64(size) * LOW)


@jit
def _last(data, at, sums, key):
    """Adds a stripe that begins anywhere; `key` is its place in the secret."""
    for i in range(8):
        word = _word(data, at + 8 * i)
        keyed = word ^ _word(KEY, key + 8 * i)
        sums[i ^ 1] += word
        sums[i] += (keyed & HALF) * (keyed >> S32)


@jit
def _merged(sums, begin, start):
    """One word from all sums: the products of pairs, both halves of each folded together."""
    for i in range(4):
        a = sums[2 * i] ^ _word(KEY, begin + 16 * i)
        b = sums[2 * i + 1] ^ _word(KEY, begin + 16 * i + 8)
        low, high, mixed = (a & HALF) * (b & HALF), (a >> S32) * (b >> S32), (a >> S32) * (b & HALF)
        cross = (low >> S32) + (mixed & HALF) + (a & HALF) * (b >> S32)
        start += ((cross << S32) | (low & HALF)) ^ ((mixed >> S32) + (cross >> S32) + high)
    start = (start ^ (start >> S37)) * AVALANCHE
    return start ^ (start >> S32)


@jit
def _word(data, at):
    """Little-endian number of eight bytes."""
    number = np.uint64(0)
    for i in range(8):
        number |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return number


# ---------------------------------------------------------------------------- intrinsics: a block, or a stripe, at once


@intrinsic
def _pour_block(typing: Any, source: Any, target: Any, ahead: Any, sums: Any, first: Any) -> Any:
    """Adds the block at the address `source` to eight sums from `first` on, and copies it to the address `target` of a
    cache line.

    The lines `ahead` bytes further on are prefetched.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        begin, to, ahead, sums, first = arguments
        held = _at(context, builder, signature.args[3], sums, first, LINE)
        now = builder.load(held, typ=LINE)
        now.align = 8
        for i in range(STRIPES):
            at = builder.add(begin, I64(i * STRIPE))
            line = _copied_line(builder, at, builder.add(to, I64(i * STRIPE)), ahead)
            now = _added(builder, now, line, _words(8 * i))
        builder.store(_scrambled(builder, now), held).align = 8
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, sums, types.int64), build


@intrinsic
def _pour_stripe(typing: Any, source: Any, target: Any, ahead: Any, sums: Any, first: Any, key: Any, place: Any) -> Any:
    """Does the same as `_pour_block` with one stripe, whose words of the secret begin at byte `place` of `key`;
    scrambles nothing."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, to, ahead, sums, first, key, place = arguments
        held = _at(context, builder, signature.args[3], sums, first, LINE)
        secret = builder.load(_at(context, builder, signature.args[5], key, place, LINE), typ=LINE)
        now = builder.load(held, typ=LINE)
        secret.align, now.align = 1, 8
        builder.store(_added(builder, now, _copied_line(builder, at, to, ahead), secret), held).align = 8
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, sums, types.int64, key, types.int64), build


@intrinsic
def _scramble(typing: Any, sums: Any, first: Any) -> Any:
    """Scrambles the sums, as at the end of a block."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        held = _at(context, builder, signature.args[0], *arguments, LINE)
        now = builder.load(held, typ=LINE)
        now.align = 8
        builder.store(_scrambled(builder, now), held).align = 8
        return context.get_dummy_value()

    return types.void(sums, types.int64), build


@intrinsic
def _fence(typing: Any) -> Any:
    """Memory fence: non-temporal stores have no order of their own."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


def _copied_line(builder: Any, source: Any, target: Any, ahead: Any) -> Any:
    """Code that copies a line past the caches, and prefetches a later one; its eight words."""
    fetch = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [ir.PointerType(I8)], fetch)
    further = builder.inttoptr(builder.add(source, ahead), ir.PointerType(I8))
    builder.call(fetch, [further, I32(0), I32(2), I32(1)])
    line = builder.load(_line_at(builder, source), typ=LINE)
    line.align = 1
    stored = builder.store(line, _line_at(builder, target))
    stored.align = STRIPE
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
    return line


def _added(builder: Any, sums: Any, line: Any, secret: Any) -> Any:
    """Code of sums with a line: each adds its neighbour's word, and the product of its own keyed word's halves."""
    neighbours = ir.Constant(ir.VectorType(I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
    key = builder.xor(line, secret)
    product = builder.mul(builder.and_(key, _all(0xFFFFFFFF)), builder.lshr(key, _all(32)))
    return builder.add(builder.add(sums, builder.shuffle_vector(line, line, neighbours)), product)


def _scrambled(builder: Any, sums: Any) -> Any:
    mixed = builder.xor(builder.xor(sums, builder.lshr(sums, _all(47))), _words(len(SECRET) - STRIPE))
    return builder.mul(mixed, _all(P32_1))


def _words(begin: int) -> Any:
    """Eight words of the secret from byte `begin` on."""
    return ir.Constant(LINE, np.frombuffer(SECRET, "<i8", 8, begin).tolist())


def _all(value: int) -> Any:
    return ir.Constant(LINE, [value] * 8)


def _at(context: Any, builder: Any, kind: Any, array: Any, place: Any, element: Any) -> Any:
    struct = context.make_array(kind)(context, builder, array)
    return builder.bitcast(builder.gep(struct.data, [place]), ir.PointerType(element))


def _line_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(LINE))
