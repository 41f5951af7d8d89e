"""Protocol-buffer bytes written and taken apart by hand: an oracle for the readers, and a way to damage messages.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types."""


class Field(NamedTuple):
    """One field of a message, whose content lies in data[start:stop]."""

    number: int
    wire: int
    start: int
    stop: int


def varint(data: bytes, at: int) -> tuple[int, int]:
    """-> (unsigned value, where the next byte is)."""
    value, shift = data[at] & 0x7F, 7
    while data[at] >= 0x80:
        at += 1
        value |= (data[at] & 0x7F) << shift
        shift += 7
    return value, at + 1


def fields(data: bytes, start: int, stop: int) -> list[Field]:
    """The fields of the message data[start:stop] in order; `ValueError` where it is none."""
    found: list[Field] = []
    at = start
    while at < stop:
        try:
            tag, at = varint(data, at)
            end = at + {FIXED64: 8, FIXED32: 4}.get(tag & 7, 0)
            if tag & 7 == VARINT:
                end = varint(data, at)[1]
            elif tag & 7 == BYTES:
                length, at = varint(data, at)
                end = at + length
        except IndexError as error:
            raise ValueError("a number is cut off") from error
        if end > stop or tag >> 3 == 0 or tag & 7 not in (VARINT, FIXED64, BYTES, FIXED32):
            raise ValueError("no such field")
        found.append(Field(tag >> 3, tag & 7, at, end))
        at = end
    return found


def encode_varint(value: int) -> bytes:
    """An int64 or uint64 as a varint."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encode(number: int, value: int | float | bytes | np.float32) -> bytes:
    """One field: an int as a varint, a float as fixed64, np.float32 as fixed32, bytes with their length."""
    if isinstance(value, bytes):
        return encode_varint(number << 3 | BYTES) + encode_varint(len(value)) + value
    if isinstance(value, np.float32):
        return encode_varint(number << 3 | FIXED32) + struct.pack("<f", value)
    if isinstance(value, float):
        return encode_varint(number << 3 | FIXED64) + struct.pack("<d", value)
    return encode_varint(number << 3 | VARINT) + encode_varint(int(value))
