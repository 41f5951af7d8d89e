"""An image out of a socket by one compiled loop: received into a cache, digested and written past it, without a lock.

Between two pieces of a stream Python takes as long as a core takes to copy 100 kB, and two streams of one process take
turns at its lock. Here the loop calls the system itself, and comes back to Python only when all is there, time has
passed, or something is wrong. What it does with each piece is what `images.Arrival.draw` does: that is for where this
is not (no numba, or another system than Linux). One of four files that import numba; others import it inside a
function.
"""

# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# mypy: warn-unreachable=False

from __future__ import annotations

import errno
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from longhaul.weight_sync.digest.xxh3_kernels import BLOCK, START, called, carry_block, fence, finish

SHORTEST = 241
"""Bytes of a tensor that is digested here; the specification has other ways for less."""

AT, HELD, NEXT = range(3)
"""Places in a state: bytes that are in the image, bytes of the buffer that are not, and the tensor that comes."""

DONE, MORE, CLOSED = 0, 1, -errno.ECONNRESET
"""Why the loop came back: all is there; it is time; the stream has ended. Below zero, what the system said (-errno)."""

CLOCK_MONOTONIC = 1

I32, I64 = ir.IntType(32), ir.IntType(64)

jit = njit(cache=True, nogil=True, boundscheck=False)


def _declared(builder: Any, name: str, result: Any, *given: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, given), name)


@intrinsic
def received(typing: Any, descriptor: Any, buffer: Any, begin: Any, count: Any) -> Any:
    """int64: how many bytes, `count` at most, came into a uint8 buffer from `begin` on; 0 at the stream's end, -errno
    where there were none."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        descriptor, buffer, begin, count = arguments
        struct = context.make_array(signature.args[1])(context, builder, buffer)
        place = builder.bitcast(builder.gep(struct.data, [begin]), cgutils.voidptr_t)
        call = _declared(builder, "recv", I64, I32, cgutils.voidptr_t, I64, I32)
        got = builder.call(call, [builder.trunc(descriptor, I32), place, count, I32(0)])
        where = builder.call(_declared(builder, "__errno_location", ir.PointerType(I32)), [])
        error = builder.neg(builder.sext(builder.load(where, typ=I32), I64))
        return builder.select(builder.icmp_signed("<", got, I64(0)), error, got)

    return types.int64(types.int64, buffer, types.int64, types.int64), build


@intrinsic
def clock(typing: Any) -> Any:
    """float64: seconds, of `time.monotonic`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        spec = ir.ArrayType(I64, 2)
        held = cgutils.alloca_once(builder, spec)
        call = _declared(builder, "clock_gettime", I32, I32, cgutils.voidptr_t)
        builder.call(call, [I32(CLOCK_MONOTONIC), builder.bitcast(held, cgutils.voidptr_t)])
        whole, nano = (
            builder.sitofp(builder.extract_value(builder.load(held, typ=spec), i), ir.DoubleType()) for i in range(2)
        )
        return builder.fadd(whole, builder.fmul(nano, ir.Constant(ir.DoubleType(), 1e-9)))

    return types.float64(), build


@jit
def settle(buffer, held, image, places, sums, found, state):
    """Brings what comes next, buffer[:held], to its place in `image`, both uint8; -> how many bytes it took.

    `places` (int64 [n, 2]) says where the tensors that are digested begin and end, in order, each at a cache line;
    `sums` (uint64 [8]) are of the one that comes, and `found` (uint64 [n, 2]) gets the digests. A tensor's blocks are
    taken whole: what is left is less than one, and comes again in front of what follows.
    """
    at, n, used, size = state[AT], state[NEXT], 0, image.size
    while used < held:
        count = min(held - used, size - at)
        if n < len(places):
            begin, end = places[n, 0], places[n, 1]
            whole = begin + (end - begin - 1) // BLOCK * BLOCK
            if begin <= at < whole:
                count = min(count, whole - at) // BLOCK * BLOCK
                if count == 0:
                    break
                for i in range(0, count, BLOCK):
                    carry_block(buffer, used + i, sums, image, at + i)
                used, at = used + count, at + count
                continue
            count = min(count, (begin if at < begin else end) - at)
            image[at : at + count] = buffer[used : used + count]
            if at + count == end:
                finish(image[begin:end], sums, found[n])
                sums[:] = START
                n += 1
        else:
            image[at : at + count] = buffer[used : used + count]
        used, at = used + count, at + count
    fence()
    state[AT], state[NEXT] = at, n
    return used


@jit
def pull(descriptor, buffer, image, places, sums, found, state, stop, once):
    """Receives an image by way of `buffer` until all is in place, or until `stop` (of `clock`); -> why it came back.

    `once` is whether it comes back as well whenever a buffer is settled. The socket blocks, and has a time limit.
    """
    size = image.size
    while state[AT] < size:
        held = state[HELD]
        room = min(buffer.size - held, size - state[AT] - held)
        got = received(descriptor, buffer, held, room)
        if got <= 0:
            return CLOSED if got == 0 else got
        held += got
        state[HELD] = held
        if got == room:
            used = settle(buffer, held, image, places, sums, found, state)
            state[HELD] = held - used
            for i in range(held - used):
                buffer[i] = buffer[used + i]
            if once and state[AT] < size:
                return MORE
        if clock() >= stop and state[AT] < size:
            return MORE
    return DONE


def pulled(*given: Any) -> int:
    """`pull` of numpy's arrays."""
    return int(called(pull, *given))
