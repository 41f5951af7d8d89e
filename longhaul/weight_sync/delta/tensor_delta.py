"""Lossless deltas of tensors: the change from one version to the next, bit for bit, in as few bytes as possible.

At the learning rates of fine-tuning, an update moves few elements of a bf16 tensor, most of them by one unit in the
last place (PULSE, arXiv 2602.03839, sends positions and new values). Where we differ: units in the last place are sent
instead of values, and positions are coded by the exponent that both sides know, because small numbers change often and
large ones hardly ever (`numba_kernels`). A delta names the digests of its base and of its result (xxh3-128): it can't
be applied to another base, twice, or half without an error. Any dtype works; fp32 masters change everywhere and gain
nothing.

A frame is: 4 bytes "LHD1", the width of an element, 3 zero bytes, bytes of the tensor (u64), digest of the base (16;
zeros for none), digest of the result (16), one u32 length for each block of BLOCK elements, the blocks (`block_codec`),
and the xxh3-64 of everything before (8). All numbers are little-endian. Encoding and decoding need numba and zstandard.
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

from longhaul.weight_sync.delta import block_codec
from longhaul.weight_sync.delta.block_codec import Patterns
from longhaul.weight_sync.digest import Running, digest, library

Buffer = Any
"""Object with contiguous bytes: bytes, memoryview, or a NumPy array of any dtype."""

MAGIC = b"LHD1"

HEAD = struct.Struct("<4sB3xQ16s16s")

SEAL = 8
"""Bytes of a frame's checksum, an xxh3-64."""

NOTHING = bytes(16)
"""Digest in a frame that needs no base."""

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Delta(NamedTuple):
    """Contents of a frame."""

    width: int  # bytes of an element
    nbytes: int  # bytes of the tensor
    base: bytes  # xxh3-128 of the base; zeros where none is needed
    target: bytes  # xxh3-128 of the result
    blocks: tuple[memoryview, ...]


def encode(
    base: Buffer | None, new: Buffer, dtype: Any, *, known: bytes | None = None, pool: Executor | None = None
) -> bytes:
    """Frame that leads from `base` to `new`, both elements of `dtype`; without a base it holds `new` itself.

    `known` is the base's digest, if the caller has it: then it is not computed again. `pool` encodes blocks in parallel
    (threads suffice: the work releases Python's lock). Raises ValueError where base and new differ in size, or are no
    whole number of elements.
    """
    size = np.dtype(dtype).itemsize
    width = size if size in WIDTHS else 4 if size % 4 == 0 else 1  # wider elements are taken in pieces
    after = patterns(new, width)
    before = None if base is None else patterns(base, width)
    if before is not None and before.size != after.size:
        raise ValueError(f"the base has {before.nbytes} bytes, what is new {after.nbytes}; they must be of one shape")
    work = [
        functools.partial(block_codec.encode, None if before is None else before[s], after[s]) for s in _spans(after)
    ]
    unknown = [] if before is None or known else [before]
    running = [Running(each.view(np.uint8)) for each in (after, *unknown)]
    blocks, (target, *needed) = _done(work, after, running, pool)
    base_digest = NOTHING if before is None else known or needed[0]
    lengths = struct.pack(f"<{len(blocks)}I", *map(len, blocks))
    return seal(b"".join([HEAD.pack(MAGIC, width, after.nbytes, base_digest, target), lengths, *blocks]))


def seal(data: Buffer) -> bytes:
    """`data`, followed by its checksum."""
    return bytes(data) + library("xxhash").xxh3_64_digest(data)


def read(frame: Buffer) -> Delta:
    """Contents of a frame; ValueError where it was damaged or cut off. The blocks are not decoded."""
    data = _bytes(frame)
    if len(data) < HEAD.size + SEAL:
        raise ValueError(f"the delta is cut off: {len(data)} bytes, and its head alone has {HEAD.size}")
    magic, width, nbytes, base, target = HEAD.unpack_from(data)
    if library("xxhash").xxh3_64_digest(data[:-SEAL]) != data[-SEAL:]:
        raise ValueError(f"the delta is damaged or cut off: its {len(data)} bytes do not match its checksum")
    data = data[:-SEAL]
    if magic != MAGIC or width not in WIDTHS or nbytes % width or any(data[5:8]):
        raise ValueError("these bytes are no delta; give what `encode` returned")
    count = -(-nbytes // (width * block_codec.BLOCK))
    rest = data[HEAD.size :]
    if 4 * count > len(rest):
        raise ValueError("the delta is cut off: its table of blocks is not all there")
    lengths, rest = struct.unpack_from(f"<{count}I", rest), rest[4 * count :]
    if sum(lengths) != len(rest):
        raise ValueError(f"the delta is damaged: {len(rest)} bytes of blocks, not {sum(lengths)} as its table says")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return Delta(width, nbytes, base, target, tuple(rest[end - n : end] for end, n in zip(ends, lengths)))


def decode(
    base: Buffer | None, frame: Buffer, out: Buffer, *, known: bytes | None = None, pool: Executor | None = None
) -> None:
    """Writes the result of `frame` upon `base` to `out`, a writable buffer of the same size, or `base` itself.

    `known` and `pool` are those of `encode`. Without `known`, and with `out` apart from the base, the base is not
    digested first: the digest of the result proves it as well. Raises ValueError. `out` is then untouched where the
    frame is cut off, or its base is not the `known` one, not of this size, or another that it would be applied to in
    place; `out` is worthless where the error is found later, so it should not be what serves. Nothing is ever written
    outside `out`, and it never returns with other bytes than were encoded.
    """
    head, given = read(frame), _bytes(out)
    if given.nbytes != head.nbytes:
        raise ValueError(
            f"the delta makes {head.nbytes} bytes; there is room for {given.nbytes}: give a buffer of that size"
        )
    if given.readonly:
        raise ValueError("the buffer to write to is read-only; give a writable one")
    now = np.frombuffer(given, WIDTHS[head.width])
    if not now.flags.aligned:
        raise ValueError(
            f"the buffer to write to is not aligned to elements of {head.width} bytes; give one that begins an array"
        )
    if head.base == NOTHING:
        _decoded(head, patterns(out, head.width), now, pool)
        return
    size = None if base is None else _bytes(base).nbytes
    if base is None or size != head.nbytes:
        here = "there is none" if base is None else f"here are {size}"
        raise ValueError(
            f"the delta needs the base {head.base.hex()} of {head.nbytes} bytes; {here}: send the whole tensor"
        )
    before = patterns(base, head.width)
    if not known and np.may_share_memory(before, now):
        known = digest(before)
    if known:
        _check(head, known)
    try:
        _decoded(head, before, now, pool)
    except ValueError:
        if not known:
            _check(head, digest(before))  # a better reason, where it is one
        raise


def _decoded(head: Delta, before: Patterns, now: Patterns, pool: Executor | None) -> None:
    """Writes the result to `now`; ValueError where it is not the frame's target."""
    spans = zip(_spans(now), head.blocks)
    work = [functools.partial(block_codec.decode, before[span], now[span], block) for span, block in spans]
    target = _done(work, now, [Running(now.view(np.uint8))], pool)[1][0]
    if target != head.target:
        raise ValueError(f"the delta is damaged: its result is {target.hex()}, not {head.target.hex()}")


def apply(staging: Buffer, frame: Buffer, **options: Any) -> None:
    """Applies a frame in place: `staging` holds the base before, the result afterwards."""
    decode(staging, frame, staging, **options)


def _check(head: Delta, actual: bytes) -> None:
    """Raises ValueError where a digest is not that of the base that the frame needs."""
    if actual != head.base:
        raise ValueError(
            f"the delta needs the base {head.base.hex()} of {head.nbytes} bytes; here is {actual.hex()}: send the "
            "whole tensor"
        )


def patterns(data: Buffer, width: int) -> Patterns:
    """Bytes of `data` as read-only unsigned integers of `width` bytes; copied only where they are not aligned."""
    raw = _bytes(data)
    if raw.nbytes % width:
        raise ValueError(f"{raw.nbytes} bytes are no whole number of elements of {width} bytes; give the array's dtype")
    found = np.frombuffer(raw, WIDTHS[width])
    if not found.flags.aligned:
        found = found.copy()
    found.flags.writeable = False  # so that kernels are compiled for one kind of array alone
    return found


def _bytes(data: Buffer) -> memoryview:
    """View of the bytes."""
    if sys.byteorder != "little":
        raise RuntimeError("deltas are written for little-endian machines")
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("a delta's arrays must be contiguous; take numpy.ascontiguousarray")
        return data.reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def _spans(words: Patterns) -> list[slice]:
    return [slice(at, min(at + block_codec.BLOCK, words.size)) for at in range(0, words.size, block_codec.BLOCK)]


def _done(
    work: Sequence[Callable[[], Any]], words: Patterns, running: Sequence[Running], pool: Executor | None
) -> tuple[list[Any], list[bytes]]:
    """(results of each block's work, digests afterwards). Without a pool, a block is digested while in the cache."""
    if pool is not None and len(work) > 1:
        return list(pool.map(lambda call: call(), work)), [each.end() for each in running]

    results = []
    for call, span in zip(work, _spans(words)):
        results.append(call())
        for each in running:
            each.upto(span.stop * words.itemsize)
    return results, [each.end() for each in running]
