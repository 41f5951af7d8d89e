"""One block of a tensor as bytes: unchanged, plain, in compressed byte planes, or as a delta, whichever is smallest.

A delta has, for each class of exponents (`reference`), how many of its elements changed, the gaps between them and the
steps they take. Gaps are near to geometric: their low bits are noise and stay as they are, what is above is one byte
for a Huffman code. Steps are half bytes, two of which share one symbol, since a single one, mostly +1 or -1, has too
few bits to be coded by itself. Both go through zstd as an entropy coder alone; rare large values follow as bytes and
whole.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longhaul.weight_sync.delta import backend
from longhaul.weight_sync.delta.backend import LEAST, NO_FEED, Changes, Feed, Loops, Streams
from longhaul.weight_sync.delta.numpy_kernels import CLASSES, Patterns

BLOCK = 1 << 20
"""Elements of a block: base and new of a 16-bit one fit in a core's cache, and its tables are a small part of it."""

HOPELESS = 0.5
"""A delta above this share of the block's bytes is compared with its compressed planes."""

SMALLEST = 32
"""Bytes below which a stream is not worth compressing."""

WINDOW = 1 << 20
"""Bytes that zstd may look back, at most: what level 1 does, so that no stream makes us reserve more."""

MOST_LOW = 24
"""Low bits of a gap, at most: more than a block's gaps have."""


class Mode(IntEnum):
    """How a block is written: its first byte."""

    SAME = 0
    PLAIN = 1
    PLANES = 2
    DELTA = 3


def encode(base: Patterns | None, new: Patterns, by: Loops | None = None) -> bytes:
    """`new` as bytes, given that the receiver has `base` (None: nothing); both of one size, at most BLOCK."""
    best = None
    if base is not None:
        by = by or backend.best()
        found = by.changes(_padded(base), _padded(new))
        if not found.gaps.size:
            return bytes([Mode.SAME])
        if (best := _delta(found, by)) and len(best) <= HOPELESS * new.nbytes:
            return best
    dense = _planes(new)
    best = dense if best is None else min(best, dense, key=len)
    return best if len(best) <= new.nbytes else bytes([Mode.PLAIN]) + new.tobytes()


def decode(
    base: Patterns, out: Patterns, data: memoryview, by: Loops | None = None, feed: Callable[[], Feed] | None = None
) -> None:
    """Makes of `out` what was new, of the base that `encode` was given (`out` itself, or apart from it).

    `feed` is of the digest of `out`, for loops that feed one: asked for where they do.
    Raises ValueError where `data` is no such block. Nothing outside `out` is written, whatever `data` holds; `out`
    itself may be half changed then.
    """
    if len(data) < 1 or data[0] > max(Mode):
        raise ValueError("the delta is damaged: a block begins with no known mode")
    mode, data = Mode(data[0]), data[1:]
    if mode is Mode.SAME:
        _ended(data)
        if out.ctypes.data != base.ctypes.data:
            out[:] = base
    elif mode is Mode.PLAIN:
        if len(data) != out.nbytes:
            raise ValueError(f"the delta is damaged: a plain block has {len(data)} bytes for {out.nbytes}")
        out[:] = np.frombuffer(data, out.dtype)
    elif mode is Mode.PLANES:
        out[:] = _from_planes(data, out)
    else:
        by = by or backend.best()
        found = _changes(data, out.size, by)
        short = out.size < LEAST
        now = _padded(base) if short else out
        if not by.patch(now if short else base, now, found, feed() if feed and not short else NO_FEED):
            raise ValueError("the delta is damaged: its gaps lead outside of the block")
        if short:
            out[:] = now[: out.size]


def _padded(patterns: Patterns) -> Patterns:
    """With zeros up to what `loops` need: both sides add them, and they never change."""
    if patterns.size >= LEAST:
        return patterns
    return np.concatenate([patterns, np.zeros(LEAST - patterns.size, patterns.dtype)])


# ------------------------------------------------------------------------------------------------------------ deltas


def _delta(found: Changes, by: Loops) -> bytes:
    """Bounds; numbers (counts, low bits, how many rare values, lengths of streams); streams; raw bits and words."""
    ends = np.cumsum(found.counts).tolist()
    spans = [slice(end - count, end) for end, count in zip(ends, found.counts.tolist())]
    lows = [_low(found.gaps[span]) for span in spans]
    highs, bits, gaps = zip(*(by.pack_gaps(found.gaps[span], low) for span, low in zip(spans, lows)))
    halves, more, steps = zip(*(by.pack_steps(found.steps[span]) for span in spans))
    squeezed = [_squeeze(stream) for stream in (*highs, *halves, np.concatenate(more))]
    rare = [sum(map(len, each)) for each in (gaps, more, steps)]
    lengths = [len(data) << 1 | packed for packed, data in squeezed]
    numbers = _varints([*found.counts.tolist(), *lows, *rare, *lengths])
    raw = [array.tobytes() for array in (*bits, *gaps, *steps)]
    return b"".join([bytes([Mode.DELTA]), found.bounds.tobytes(), numbers, *(data for _, data in squeezed), *raw])


def _low(gaps: NDArray[np.uint32]) -> int:
    """Bits of a gap that are as good as noise: those below a sixteenth of the mean."""
    mean = float(gaps.sum(dtype=np.int64)) / gaps.size if gaps.size else 0.0
    return min(MOST_LOW, max(0, int(math.log2(mean + 1.0)) - 4))


def _changes(data: memoryview, size: int, by: Loops) -> Changes:
    """Reads what `_delta` wrote of a block of `size`; ValueError where a length does not fit."""
    bounds, data = _array(data, CLASSES - 1, np.uint8)
    if (row := bounds.tolist()) != sorted(row):
        raise ValueError("the delta is damaged: bounds of classes do not ascend")
    numbers, data = _read_varints(data, 4 * CLASSES + 4)
    counts, lows, rare = numbers[:CLASSES], numbers[CLASSES : 2 * CLASSES], numbers[2 * CLASSES : 2 * CLASSES + 3]
    if sum(counts) > max(size, LEAST) or max(lows) > MOST_LOW or max(rare) > sum(counts):
        raise ValueError("the delta is damaged: a block changes more elements than it has")
    streams, bits = [], []
    lengths = [*counts, *(-(-count // 2) for count in counts), rare[1]]
    for length, about in zip(lengths, numbers[2 * CLASSES + 3 :]):
        stream, data = _expand(data, about, length)
        streams.append(stream)
    for count, low in zip(counts, lows):
        some, data = _array(data, -(-count * low // 8), np.uint8)
        bits.append(some)
    rest, data = _array(data, rare[0], np.uint32)
    whole, data = _array(data, rare[2], np.uint32)
    _ended(data)
    highs, halves, more = streams[:CLASSES], streams[CLASSES:-1], streams[-1]
    found = Streams(tuple(lows), tuple(highs), tuple(bits), tuple(halves), more, rest, whole)
    gaps, steps, left = by.unpack(found)
    if left:
        raise ValueError(f"the delta is damaged: a stream {'ends too early' if left < 0 else 'is too long'}")
    return Changes(bounds, np.array(counts, np.int64), gaps, steps)


# ------------------------------------------------------------------------------------------------------------- planes


def _planes(new: Patterns) -> bytes:
    """First bytes of all elements, then second ones ...: signs and exponents compress, mantissas hardly."""
    planes = new.view(np.uint8).reshape(-1, new.itemsize).T
    squeezed = [_squeeze(np.ascontiguousarray(plane), whole=True) for plane in planes]
    lengths = _varints(len(data) << 1 | packed for packed, data in squeezed)
    return b"".join([bytes([Mode.PLANES]), lengths, *(data for _, data in squeezed)])


def _from_planes(data: memoryview, like: Patterns) -> Patterns:
    abouts, data = _read_varints(data, like.itemsize)
    planes = np.empty((like.size, like.itemsize), np.uint8)
    for i, about in enumerate(abouts):
        planes[:, i], data = _expand(data, about, like.size)
    _ended(data)
    return planes.reshape(-1).view(like.dtype)


# ------------------------------------------------------------------------------------------------------------- bytes


class _Zstd(threading.local):
    """A thread's own zstd contexts, which are dear to make and can't be shared."""

    def __init__(self) -> None:
        zstandard = backend.library("zstandard")
        common: dict[str, Any] = {"write_content_size": False, "format": zstandard.FORMAT_ZSTD1_MAGICLESS}
        alone = {"window_log": 17, "hash_log": 6, "chain_log": 6, "search_log": 1, "min_match": 7, "target_length": 0}
        huffman = zstandard.ZstdCompressionParameters(strategy=zstandard.STRATEGY_FAST, **alone, **common)
        level = zstandard.ZstdCompressionParameters.from_level(1, **common)
        self.huffman = zstandard.ZstdCompressor(compression_params=huffman)
        self.level = zstandard.ZstdCompressor(compression_params=level)
        self.reader = zstandard.ZstdDecompressor(max_window_size=WINDOW, format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        self.error: type[Exception] = zstandard.ZstdError


@functools.cache
def _zstd() -> _Zstd:
    return _Zstd()


def _squeeze(stream: NDArray[np.uint8], whole: bool = False) -> tuple[bool, bytes]:
    """-> (whether compressed, bytes): by Huffman's code alone, or with `whole` by all that zstd's level 1 does."""
    plain = stream.tobytes()
    if len(plain) < SMALLEST:
        return False, plain
    packed = (_zstd().level if whole else _zstd().huffman).compress(plain)
    return (True, packed) if len(packed) < len(plain) else (False, plain)


def _expand(data: memoryview, about: int, length: int) -> tuple[NDArray[np.uint8], memoryview]:
    """Reads a stream of `length` bytes that `_squeeze` wrote; -> (stream, what is behind it)."""
    taken, packed = about >> 1, about & 1
    if taken > len(data) or (not packed and taken != length):
        raise ValueError("the delta is damaged: a stream has another length than it says")
    if not packed:
        return np.frombuffer(data[:taken].toreadonly(), np.uint8), data[taken:]
    if taken and data[0]:  # a length of its own, for which memory would be reserved; a dictionary; a checksum
        raise ValueError("the delta is damaged: a stream begins as none of ours does")
    try:
        plain = _zstd().reader.decompress(data[:taken], max_output_size=max(1, length), allow_extra_data=False)
    except _zstd().error as error:
        raise ValueError(f"the delta is damaged: {error}") from None
    if len(plain) != length:
        raise ValueError("the delta is damaged: a stream has another length than it says")
    return np.frombuffer(plain, np.uint8), data[taken:]


def _array(data: memoryview, count: int, dtype: Any) -> tuple[Any, memoryview]:
    """-> (a copy of `count` little-endian numbers, what is behind them)."""
    size = count * np.dtype(dtype).itemsize
    if size > len(data):
        raise ValueError("the delta is damaged: a block is too short")
    return np.frombuffer(bytes(data[:size]), dtype), data[size:]


def _ended(data: memoryview) -> None:
    if len(data):
        raise ValueError("the delta is damaged: a block is too long")


def _varints(numbers: Iterable[int]) -> bytes:
    """Seven bits a byte, the lowest first."""
    made = bytearray()
    for number in numbers:
        while number > 127:
            made.append(number & 127 | 128)
            number >>= 7
        made.append(number)
    return bytes(made)


def _read_varints(data: memoryview, count: int) -> tuple[list[int], memoryview]:
    """-> (`count` numbers below 2^35, what is behind them)."""
    numbers, number, shift = list[int](), 0, 0
    for at, byte in enumerate(bytes(data[: 5 * count])):  # bytes are quicker to go through than their view
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            if len(numbers) == count:
                return numbers, data[at + 1 :]
            number = shift = 0
        elif shift == 35:
            raise ValueError("the delta is damaged: a number has no end")
    raise ValueError("the delta is damaged: a block is too short")
