"""Protocol-buffer bytes, read and written without generated code.

Source: protobuf.dev/programming-guides/encoding. Only what the driving formats need is here: no groups, no text, no
schema. Where a message holds thousands of small ones of equal length (points of a polyline, states of a track),
`runs` finds them by stride and `table` decodes them as columns, so that Python walks over runs instead of messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import Malformed

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""

TEMPLATES = 16
"""Layouts that `table` looks for among messages of one length before it reads the rest one by one."""


class Field(NamedTuple):
    """One field of a message: a varint's value is in `value`; the others lie in data[start:stop]."""

    number: int
    wire: int
    value: int
    start: int
    stop: int


class Run(NamedTuple):
    """`repeats` length-delimited fields of one number and length, one every `stride` bytes; 1 is an ordinary field."""

    number: int
    start: int
    length: int
    stride: int
    repeats: int


def varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """-> (unsigned value below 2**64, where the next byte is)."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise Malformed(f"a number is cut off at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise Malformed(f"a number before byte {at} is longer than 64 bits")


def signed(value: int) -> int:
    """The int64 that an unsigned varint stands for."""
    return value - (1 << 64) if value >> 63 else value


def header(data: bytes, at: int, stop: int) -> Field:
    """The field that starts at byte `at`."""
    tag, at = varint(data, at, stop)
    number, wire = tag >> 3, tag & 7
    if number == 0:
        raise Malformed(f"field number 0 before byte {at}")
    if wire == VARINT:
        value, end = varint(data, at, stop)
        return Field(number, wire, value, at, end)
    if wire == BYTES:
        length, at = varint(data, at, stop)
        end = at + length
    elif wire == FIXED64:
        end = at + 8
    elif wire == FIXED32:
        end = at + 4
    else:
        raise Malformed(f"unknown wire type {wire} before byte {at}")
    if end > stop:
        raise Malformed(f"field {number} at byte {at} reaches {end - stop} bytes beyond its message")
    return Field(number, wire, 0, at, end)


def fields(data: bytes, start: int, stop: int) -> Iterator[Field]:
    """The fields of the message data[start:stop], in order."""
    at = start
    while at < stop:
        field = header(data, at, stop)
        at = field.stop
        yield field


def runs(data: bytes, view: np.ndarray, start: int, stop: int) -> Iterator[Field | Run]:
    """Fields as `fields` gives them, with every length-delimited field as part of a `Run`; `view` is `data` as
    uint8."""
    at = start
    while at < stop:
        field = header(data, at, stop)
        if field.wire != BYTES:
            yield field
            at = field.stop
            continue
        width, stride = field.start - at, field.stop - at
        count = 1
        # the windows grow, so that many short runs cost no more than one long one
        window = 8
        while data[at : at + width] == data[at + count * stride : at + count * stride + width]:
            room = min(window, (stop - at) // stride - count)
            if room <= 0:
                break
            begin = at + count * stride
            heads = view[begin : begin + room * stride].reshape(room, stride)[:, :width]
            same = (heads == view[at : at + width]).all(axis=1)
            matched = room if same.all() else int(same.argmin())
            count += matched
            window *= 2
            if matched < room:
                break
        yield Run(field.number, field.start, field.stop - field.start, stride, count)
        at += count * stride


def starts(run: Run) -> np.ndarray:
    """int64 [repeats]: where each message of the run begins."""
    return run.start + run.stride * np.arange(run.repeats, dtype=np.int64)


def table(
    data: bytes, view: np.ndarray, begins: np.ndarray, lengths: np.ndarray, wanted: Mapping[int, int]
) -> np.ndarray:
    """Many small messages as float64 [messages, len(wanted)].

    One column a field of `wanted` (number -> wire type), 0 where it is absent. Fixed64 is read as double,
    fixed32 as float, varints as int64. The last of a repeated field counts, as protobuf has it.
    """
    result = np.zeros((len(begins), len(wanted)))
    column = {number: index for index, number in enumerate(wanted)}
    for length in np.unique(lengths):
        left = np.flatnonzero(lengths == length)
        for _ in range(TEMPLATES):
            if not len(left):
                break
            left = _template(data, view, begins, int(length), left, wanted, column, result)
        for row in left:
            begin = int(begins[row])
            for field in fields(data, begin, begin + int(length)):
                if wanted.get(field.number) == field.wire:
                    result[row, column[field.number]] = _scalar(data, field)
    return result


def _scalar(data: bytes, field: Field) -> float:
    if field.wire == VARINT:
        return float(signed(field.value))
    return struct.unpack_from("<d" if field.wire == FIXED64 else "<f", data, field.start)[0]


def _template(
    data: bytes,
    view: np.ndarray,
    begins: np.ndarray,
    length: int,
    rows: np.ndarray,
    wanted: Mapping[int, int],
    column: Mapping[int, int],
    result: np.ndarray,
) -> np.ndarray:
    """Decode all of `rows` that are laid out as the first one is; -> the rows that are not."""
    begin = int(begins[rows[0]])
    layout = list(fields(data, begin, begin + length))
    block = view[begins[rows][:, None] + np.arange(length)]
    # what fixes the layout: tags and lengths byte by byte, and of varints which bytes are followed by another
    fixed = np.ones(length, bool)
    number_bytes = np.zeros(length, bool)
    for field in layout:
        fixed[field.start - begin : field.stop - begin] = False
        if field.wire == VARINT:
            number_bytes[field.start - begin : field.stop - begin] = True
    alike = (block[:, fixed] == block[0, fixed]).all(axis=1)
    alike &= ((block[:, number_bytes] >= 0x80) == (block[0, number_bytes] >= 0x80)).all(axis=1)
    block, chosen = block[alike], rows[alike]
    for field in layout:
        if wanted.get(field.number) != field.wire:
            continue
        part = np.ascontiguousarray(block[:, field.start - begin : field.stop - begin])
        if field.wire == VARINT:
            values = varints(part.reshape(-1)).astype(np.float64)
        else:
            values = part.view("<f8" if field.wire == FIXED64 else "<f4")[:, 0].astype(np.float64)
        result[chosen, column[field.number]] = values
    return rows[~alike]


def varints(view: np.ndarray) -> np.ndarray:
    """Packed varints, uint8 [bytes] -> int64 [numbers], all at once."""
    if not len(view):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(view < 0x80)
    if not len(ends) or ends[-1] != len(view) - 1:
        raise Malformed("the last of a packed list of numbers is cut off")
    if len(ends) == len(view):
        return view.astype(np.int64)
    begins = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - begins + 1
    longest = int(lengths.max())
    if longest > 10:
        raise Malformed("a number of a packed list is longer than 64 bits")
    values = (view[begins] & 0x7F).astype(np.uint64)
    for index in range(1, longest):
        longer = np.flatnonzero(lengths > index)
        part = (view[begins[longer] + index] & 0x7F).astype(np.uint64)
        values[longer] |= part << np.uint64(7 * index)
    return values.view(np.int64)


def encode_varint(value: int) -> bytes:
    """An int64 or uint64 as a varint."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(number: int, value: int | float | bytes | np.float32) -> bytes:
    """One field: an int as a varint, a float as fixed64, np.float32 as fixed32, bytes with their length."""
    if isinstance(value, bytes):
        return encode_varint(number << 3 | BYTES) + encode_varint(len(value)) + value
    if isinstance(value, np.float32):
        return encode_varint(number << 3 | FIXED32) + struct.pack("<f", value)
    if isinstance(value, float):
        return encode_varint(number << 3 | FIXED64) + struct.pack("<d", value)
    return encode_varint(number << 3 | VARINT) + encode_varint(int(value))
