"""Codec of one block of a tensor: unchanged, plain, compressed byte planes, or a delta, whichever is smallest.

A delta has, for each class of exponents (`numba_kernels`), the number of changes, their gaps and their steps. Gaps are
nearly geometric: their low bits are noise and stay raw, and the part above is one byte for a Huffman code. Steps are
half bytes, two in a symbol, since a single one, mostly +1 or -1, has too few bits to be coded alone. Both go through
zstd as an entropy coder only; rare large values follow as bytes and whole words.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longhaul.weight_sync.digest import library

Patterns = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
"""Elements as bit patterns, [n]."""

CLASSES = 4
"""Classes of exponents, used or not: more saved no bytes on trained models."""

LEAST = 64
"""Elements of a block for the kernels, at least: shorter ones are padded with zeros."""

BLOCK = 1 << 20
"""Elements of a block: 2 MB of 16-bit ones fit in a core's cache, and the block's tables are small beside it."""

HOPELESS = 0.5
"""Share of the block's bytes above which a delta is compared with the compressed planes."""

SMALLEST = 32
"""Bytes of a stream below which compression gains nothing."""

WINDOW = 1 << 20
"""Bytes of zstd's window, at most: those of level 1, so that no stream from elsewhere reserves more memory."""

MOST_LOW = 24
"""Raw low bits of a gap, at most: a block's gaps have fewer."""


class Mode(IntEnum):
    """First byte of a block: its form."""

    SAME = 0
    PLAIN = 1
    PLANES = 2
    DELTA = 3


class Changes(NamedTuple):
    """Changes of a block, class after class."""

    bounds: NDArray[np.uint8]  # [CLASSES - 1] largest exponent of each class but the last
    counts: NDArray[np.int64]  # [CLASSES] changes of each class
    gaps: NDArray[np.uint32]  # members of the class since the change before
    steps: NDArray[np.uint32]  # zigzag of the units moved, less one


class Streams(NamedTuple):
    """Changes as they travel: the first four by class, the last three for all classes together."""

    lows: tuple[int, ...]  # [CLASSES] raw low bits of a gap
    highs: tuple[NDArray[np.uint8], ...]  # gaps above those bits
    bits: tuple[NDArray[np.uint8], ...]  # the raw bits, packed
    halves: tuple[NDArray[np.uint8], ...]  # steps, two in a byte
    more: NDArray[np.uint8]  # steps of 15 and more
    rest: NDArray[np.uint32]  # gaps too large for a byte
    whole: NDArray[np.uint32]  # steps too large for both


@functools.cache
def kernels() -> Any:
    """The compiled loops. ValueError where numba is not installed. Tests put their NumPy oracle here."""
    library("numba")
    from longhaul.weight_sync.delta import numba_kernels

    return numba_kernels


def encode(base: Patterns | None, new: Patterns) -> bytes:
    """`new` as bytes for a receiver that has `base` (None: nothing); both of one size, at most BLOCK."""
    best = None
    if base is not None:
        changes = kernels().changes(_padded(base), _padded(new))
        if not changes.gaps.size:
            return bytes([Mode.SAME])
        if (best := _delta(changes)) and len(best) <= HOPELESS * new.nbytes:
            return best
    dense = _planes(new)
    best = dense if best is None else min(best, dense, key=len)
    return best if len(best) <= new.nbytes else bytes([Mode.PLAIN]) + new.tobytes()


def decode(base: Patterns, out: Patterns, data: memoryview) -> None:
    """Writes the new elements to `out`, which is the base that `encode` was given, or memory apart from it.

    Raises ValueError where `data` is no such block; `out` may be half changed then. Nothing outside `out` is written,
    whatever `data` holds.
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
        changes = _changes(data, out.size)
        short = out.size < LEAST
        now = _padded(base) if short else out
        if not kernels().patch(now if short else base, now, changes):
            raise ValueError("the delta is damaged: its gaps lead outside of the block")
        if short:
            out[:] = now[: out.size]


def _padded(patterns: Patterns) -> Patterns:
    """Patterns with zeros up to LEAST: both sides add them, and they never change."""
    if patterns.size >= LEAST:
        return patterns
    return np.concatenate([patterns, np.zeros(LEAST - patterns.size, patterns.dtype)])


# ------------------------------------------------------------------------------------------------------------ deltas


def _delta(changes: Changes) -> bytes:
    """Bounds; numbers (counts, low bits, numbers of rare values, lengths of streams); streams; raw bits and words."""
    ends = np.cumsum(changes.counts).tolist()
    spans = [slice(end - count, end) for end, count in zip(ends, changes.counts.tolist())]
    lows = [_low(changes.gaps[span]) for span in spans]
    highs, bits, gaps = zip(*(kernels().pack_gaps(changes.gaps[span], low) for span, low in zip(spans, lows)))
    halves, more, steps = zip(*(kernels().pack_steps(changes.steps[span]) for span in spans))
    squeezed = [_squeeze(stream) for stream in (*highs, *halves, np.concatenate(more))]
    rare = [sum(map(len, each)) for each in (gaps, more, steps)]
    lengths = [len(data) << 1 | packed for packed, data in squeezed]
    numbers = _varints([*changes.counts.tolist(), *lows, *rare, *lengths])
    raw = [array.tobytes() for array in (*bits, *gaps, *steps)]
    return b"".join([bytes([Mode.DELTA]), changes.bounds.tobytes(), numbers, *(data for _, data in squeezed), *raw])


def _low(gaps: NDArray[np.uint32]) -> int:
    """Number of low bits of a gap that are noise: those below a sixteenth of the mean gap."""
    mean = float(gaps.sum(dtype=np.int64)) / gaps.size if gaps.size else 0.0
    return min(MOST_LOW, max(0, int(math.log2(mean + 1.0)) - 4))


def _changes(data: memoryview, size: int) -> Changes:
    """Inverse of `_delta` for a block of `size` elements; ValueError where a length does not fit."""
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
    travelled = Streams(tuple(lows), tuple(highs), tuple(bits), tuple(halves), more, rest, whole)
    gaps, steps, left = kernels().unpack(travelled)
    if left:
        raise ValueError(f"the delta is damaged: a stream {'ends too early' if left < 0 else 'is too long'}")
    return Changes(bounds, np.array(counts, np.int64), gaps, steps)


# ------------------------------------------------------------------------------------------------------------- planes


def _planes(new: Patterns) -> bytes:
    """Byte planes, compressed: the first bytes of all elements, then the second ones ... Mantissas hardly compress."""
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
    """Zstd contexts of one thread: they are expensive to make and can't be shared."""

    def __init__(self) -> None:
        zstandard = library("zstandard")
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
    """(compressed or not, bytes): by Huffman's code alone, or with `whole` by zstd's level 1."""
    plain = stream.tobytes()
    if len(plain) < SMALLEST:
        return False, plain
    packed = (_zstd().level if whole else _zstd().huffman).compress(plain)
    return (True, packed) if len(packed) < len(plain) else (False, plain)


def _expand(data: memoryview, about: int, length: int) -> tuple[NDArray[np.uint8], memoryview]:
    """(stream of `length` bytes that `_squeeze` wrote, the data behind it)."""
    taken, packed = about >> 1, about & 1
    if taken > len(data) or (not packed and taken != length):
        raise ValueError("the delta is damaged: a stream has another length than it says")
    if not packed:
        return np.frombuffer(data[:taken].toreadonly(), np.uint8), data[taken:]
    if taken and data[0]:  # a length of its own would reserve memory; a dictionary and a checksum are not ours
        raise ValueError("the delta is damaged: a stream begins as none of ours does")
    try:
        plain = _zstd().reader.decompress(data[:taken], max_output_size=max(1, length), allow_extra_data=False)
    except _zstd().error as error:
        raise ValueError(f"the delta is damaged: {error}") from None
    if len(plain) != length:
        raise ValueError("the delta is damaged: a stream has another length than it says")
    return np.frombuffer(plain, np.uint8), data[taken:]


def _array(data: memoryview, count: int, dtype: Any) -> tuple[Any, memoryview]:
    """(copy of `count` little-endian numbers, the data behind them)."""
    size = count * np.dtype(dtype).itemsize
    if size > len(data):
        raise ValueError("the delta is damaged: a block is too short")
    return np.frombuffer(bytes(data[:size]), dtype), data[size:]


def _ended(data: memoryview) -> None:
    if len(data):
        raise ValueError("the delta is damaged: a block is too long")


def _varints(numbers: Iterable[int]) -> bytes:
    """Numbers at seven bits a byte, the lowest first."""
    packed = bytearray()
    for number in numbers:
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def _read_varints(data: memoryview, count: int) -> tuple[list[int], memoryview]:
    """(`count` numbers below 2^35, the data behind them)."""
    numbers, number, shift = list[int](), 0, 0
    for at, byte in enumerate(bytes(data[: 5 * count])):  # bytes are faster to iterate than a view
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
