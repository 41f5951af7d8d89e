"""Lossless deltas of parameters: what changed from one version of a tensor to the next, bit for bit, as few bytes.

At the learning rates of fine-tuning an update moves few elements of a bf16 tensor, most of them by one unit in the last
place (PULSE, arXiv 2602.03839, sends positions and new values). Where we differ: units in the last place are sent
instead of values, and positions are coded by the exponent that both sides know, because small numbers change often and
large ones hardly (`reference`). A delta says which base it needs and what must come out (xxh3-128), so that it can't be
applied to another base, nor twice, nor half unnoticed. Any dtype goes; fp32 masters change everywhere and gain nothing.

A frame is: 4 bytes "LHD1", the elements' width, 3 bytes zero, bytes of the tensor (u64), digest of the base (16; zeros
for none), digest of what it becomes (16), then a u32 length for each block of BLOCK elements, then the blocks
(`codec`), then xxh3-64 of all before (8). All numbers are little-endian.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 and the float8s by name)
import numpy as np

from longhaul.weight_sync.delta import backend, block_codec
from longhaul.weight_sync.delta.backend import Loops, library
from longhaul.weight_sync.delta.numpy_kernels import Patterns
from longhaul.weight_sync.digest import digest as digests

Buffer = Any
"""Whatever has contiguous bytes: bytes, memoryview, a NumPy array of any dtype."""

MAGIC = b"LHD1"

HEAD = struct.Struct("<4sB3xQ16s16s")

SEAL = 8
"""Bytes of a frame's checksum."""

NOTHING = bytes(16)
"""The digest of no base."""

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Delta(NamedTuple):
    """What a frame says of itself."""

    width: int  # bytes of an element
    nbytes: int  # of the tensor
    base: bytes  # xxh3-128 of the bytes it needs; zeros where it needs none
    target: bytes  # and of those it makes
    blocks: tuple[memoryview, ...]


def digest(data: Buffer) -> bytes:
    """xxh3-128 of the bytes of `data`: 16 bytes. It finds damage, not malice."""
    return digests.digest(np.frombuffer(_bytes(data), np.uint8))


def encode(
    base: Buffer | None,
    new: Buffer,
    dtype: Any,
    *,
    known: bytes | None = None,
    pool: Executor | None = None,
    by: Loops | None = None,
) -> bytes:
    """The frame that makes of `base` the bytes of `new`, both elements of `dtype`; with no base, `new` itself.

    `known` is the base's digest, where the caller has it from the version before: it is not computed again then. `pool`
    encodes blocks beside each other (threads do: the work leaves Python's lock). Raises ValueError where base and new
    differ in size, or are no whole number of elements.
    """
    width = width_of(dtype)
    after = patterns(new, width)
    before = None if base is None else patterns(base, width)
    if before is not None and before.size != after.size:
        raise ValueError(f"the base has {before.nbytes} bytes, what is new {after.nbytes}; they must be of one shape")
    work = [
        functools.partial(block_codec.encode, None if before is None else before[s], after[s], by)
        for s in _spans(after)
    ]
    unknown = [] if before is None or known else [before]
    running = [digests.Running(each.view(np.uint8)) for each in (after, *unknown)]
    blocks, (made, *needed) = _done(work, after, running, pool)
    base_digest = NOTHING if before is None else known or needed[0]
    lengths = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
    return seal(b"".join([HEAD.pack(MAGIC, width, after.nbytes, base_digest, made), lengths, *blocks]))


def seal(data: Buffer) -> bytes:
    """`data` with its checksum behind it."""
    return bytes(data) + library("xxhash").xxh3_64_digest(data)


def read(frame: Buffer) -> Delta:
    """What a frame says of itself; ValueError where it was damaged or cut off. Its blocks are not looked into."""
    data = _bytes(frame)
    if len(data) < HEAD.size + SEAL:
        raise ValueError(f"the delta is cut off: {len(data)} bytes, and its head alone has {HEAD.size}")
    magic, width, nbytes, base, target = HEAD.unpack_from(data)
    if library("xxhash").xxh3_64_digest(data[:-SEAL]) != data[-SEAL:]:
        raise ValueError(f"the delta is damaged or cut off: its {len(data)} bytes have another checksum than it says")
    data = data[:-SEAL]
    if magic != MAGIC or width not in WIDTHS or nbytes % width or any(data[5:8]):
        raise ValueError("these bytes are no delta")
    count = -(-nbytes // (width * block_codec.BLOCK))
    rest = data[HEAD.size :]
    if 4 * count > len(rest):
        raise ValueError("the delta is cut off: its table of blocks is not all there")
    lengths, rest = struct.unpack_from(f"<{count}I", rest), rest[4 * count :]
    if sum(lengths) != len(rest):
        raise ValueError(f"the delta is damaged: {len(rest)} bytes of blocks, and it says {sum(lengths)}")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return Delta(width, nbytes, base, target, tuple(rest[end - n : end] for end, n in zip(ends, lengths)))


def decode(
    base: Buffer | None,
    frame: Buffer,
    out: Buffer,
    *,
    known: bytes | None = None,
    pool: Executor | None = None,
    by: Loops | None = None,
) -> None:
    """Writes what `frame` makes of `base` to `out`, a writable buffer of as many bytes: `base`'s own, or another.

    `known` and `pool` as in `encode`. Without `known`, and with `out` elsewhere, the base is not digested beforehand:
    the digest of what comes out proves it, too. Raises ValueError, with `out` untouched, where the frame is cut off,
    needs a base that is not the `known` one or not of this size, or would be applied in place to another; and, with
    `out` worthless, where the base turns out to be another, or the frame to be damaged further in (so `out` should not
    be what serves). Never writes outside of `out`, and never returns with other bytes in it than were encoded.
    """
    head = read(frame)
    now = _writable(out, head)
    if head.base == NOTHING:
        _made(head, patterns(out, head.width), now, by or backend.best(), pool)
        return
    before = _base(head, base, known)
    if not known and np.may_share_memory(before, now):
        known = digest(before)
        _check(head, known)
    try:
        _made(head, before, now, by or backend.best(), pool)
    except ValueError:
        if not known:
            _check(head, digest(before))  # a better reason, where it is one
        raise


def _made(head: Delta, before: Patterns, now: Patterns, by: Loops, pool: Executor | None) -> None:
    """Makes `now` of what was before; ValueError where that is not what should come out."""
    raw = now.view(np.uint8)
    running = digests.of_made(raw) if by.feeds and pool is None else digests.Running(raw)
    work = []
    for span, block in zip(_spans(now), head.blocks):
        feed = functools.partial(running.feed, span.start * head.width, span.stop * head.width)
        work.append(functools.partial(block_codec.decode, before[span], now[span], block, by, feed))
    if (made := _done(work, now, [running], pool)[1][0]) != head.target:
        raise ValueError(f"the delta is damaged: it makes {made.hex()} and should make {head.target.hex()}")


def apply(staging: Buffer, frame: Buffer, **options: Any) -> None:
    """`decode` in place: `staging` holds the base, and what the frame makes of it afterwards."""
    decode(staging, frame, staging, **options)


def _base(head: Delta, base: Buffer | None, known: bytes | None) -> Patterns:
    """The base as patterns; ValueError where it can't be the one that the frame needs."""
    needs = f"the delta needs the base {head.base.hex()} of {head.nbytes} bytes"
    if base is None:
        raise ValueError(f"{needs}; there is none")
    if (size := _bytes(base).nbytes) != head.nbytes:
        raise ValueError(f"{needs}; here are {size}")
    if known:
        _check(head, known)
    return patterns(base, head.width)


def _check(head: Delta, found: bytes) -> None:
    """ValueError where the digest that was found is not that of the base that the frame needs."""
    if found != head.base:
        raise ValueError(f"the delta needs the base {head.base.hex()} of {head.nbytes} bytes; here is {found.hex()}")


def _writable(out: Buffer, head: Delta) -> Patterns:
    """The buffer as patterns to write to; ValueError where it can't take them."""
    given = _bytes(out)
    if given.nbytes != head.nbytes:
        raise ValueError(f"the delta makes {head.nbytes} bytes; there is room for {given.nbytes}")
    if given.readonly:
        raise ValueError("the buffer to write to is read-only")
    now = np.frombuffer(given, WIDTHS[head.width])
    if not now.flags.aligned:
        raise ValueError(f"the buffer to write to is not aligned to elements of {head.width} bytes")
    return now


def width_of(dtype: Any) -> int:
    """Bytes of the bit patterns that elements of `dtype` are compared by; wider ones in pieces of four."""
    size = np.dtype(dtype).itemsize
    return size if size in WIDTHS else 4 if size % 4 == 0 else 1


def patterns(data: Buffer, width: int) -> Patterns:
    """The bytes of `data` as read-only unsigned integers of `width` bytes; a copy only where they are not aligned."""
    given = _bytes(data)
    if given.nbytes % width:
        raise ValueError(f"{given.nbytes} bytes are no whole number of elements of {width} bytes")
    found = np.frombuffer(given, WIDTHS[width])
    if not found.flags.aligned:
        found = found.copy()
    found.flags.writeable = False  # one kind of array for the compiled loops, whatever is given
    return found


def _bytes(data: Buffer) -> memoryview:
    """Its bytes, without a copy."""
    if sys.byteorder != "little":
        raise RuntimeError("deltas are written for little-endian machines")
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("a delta's arrays must be contiguous; take numpy.ascontiguousarray")
        return data.reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def _spans(of: Patterns) -> list[slice]:
    return [slice(at, min(at + block_codec.BLOCK, of.size)) for at in range(0, of.size, block_codec.BLOCK)]


def _done(
    work: Sequence[Callable[[], Any]],
    of: Patterns,
    running: Sequence[digests.Running | digests.Streamed],
    pool: Executor | None,
) -> tuple[list[Any], list[bytes]]:
    """Does the work of each block `of` a tensor; -> (results, the digests afterwards).

    Without a pool a block is digested while it is still in the cache.
    """
    if pool is not None and len(work) > 1:
        return list(pool.map(lambda call: call(), work)), [each.end() for each in running]

    results = []
    for call, span in zip(work, _spans(of)):
        results.append(call())
        for each in running:
            each.upto(span.stop * of.itemsize)
    return results, [each.end() for each in running]
