"""TFRecord files and the tf.Example messages in them, without TensorFlow.

A TFRecord file is a row of records: length (uint64), masked CRC-32C of the length, the payload, masked CRC-32C of the
payload. Both checksums are always verified. A tf.Example is a map from names to lists of bytes, float32 or int64.
Sources: tensorflow.org/tutorials/load_data/tfrecord, tensorflow/core/example/{example,feature}.proto.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from longhaul.driving.datasets.log import BadData, Malformed
from longhaul.driving.datasets.protobuf import (
    BYTES,
    FIXED32,
    VARINT,
    Field,
    encode,
    encode_varint,
    fields,
    signed,
    varints,
)

Example = dict[str, "np.ndarray | list[bytes]"]
"""int64 [n], float32 [n], or a list of bytes; an empty list of no kind is float32 [0]."""

REMEDY = "fetch or write the file again"


def masked_crc(data: bytes) -> int:
    """The checksum as TFRecord stores it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def begins(head: bytes) -> bool:
    """True if `head`, the first bytes of a file, is the start of a TFRecord."""
    return len(head) >= 12 and masked_crc(head[:8]) == struct.unpack_from("<I", head, 8)[0]


def read(path: Path) -> Iterator[tuple[int, bytes]]:
    """(byte offset of the record, payload) of every record, one at a time; `BadData` where the file is damaged."""
    try:
        with open(path, "rb") as file:
            yield from _records(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror or error}") from error


def _records(path: Path, file: object, size: int) -> Iterator[tuple[int, bytes]]:
    take = file.read  # type: ignore[attr-defined]
    offset = number = 0
    if size == 0:
        raise BadData(f"{path}: is empty; {REMEDY}")
    while offset < size:
        where = f"{path}: record {number} at byte {offset}"
        head = take(12)
        if len(head) < 12:
            raise BadData(f"{where}: the file ends within the record's header ({len(head)} of 12 bytes); {REMEDY}")
        if not begins(head):
            raise BadData(f"{where}: the length's checksum is wrong: no TFRecord, or damaged here; {REMEDY}")
        (length,) = struct.unpack_from("<Q", head)
        left = size - offset - 12
        if length + 4 > left:
            raise BadData(
                f"{where}: the file is cut off: the record needs {length + 4} bytes more, {left} are left; {REMEDY}"
            )
        body = take(length + 4)
        if len(body) != length + 4:
            raise BadData(f"{where}: the file became shorter while it was read; {REMEDY}")
        payload = body[:length]
        if masked_crc(payload) != struct.unpack_from("<I", body, length)[0]:
            raise BadData(f"{where}: the checksum of its {length} bytes is wrong: the data are damaged; {REMEDY}")
        yield offset, payload
        offset += 16 + length
        number += 1


def write(path: Path, payloads: Iterable[bytes]) -> None:
    """Write `payloads` as the records of a new TFRecord file."""
    with open(path, "wb") as file:
        for payload in payloads:
            length = struct.pack("<Q", len(payload))
            file.write(length + struct.pack("<I", masked_crc(length)))
            file.write(payload + struct.pack("<I", masked_crc(payload)))


def parse(payload: bytes) -> Example:
    """The features of a tf.Example; `Malformed` where there is none. Of equal names the last counts."""
    view = np.frombuffer(payload, np.uint8)
    example: Example = {}
    for features in fields(payload, 0, len(payload)):
        if features.number != 1 or features.wire != BYTES:
            raise Malformed(f"field {features.number} at byte {features.start} is not of a tf.Example")
        for entry in fields(payload, features.start, features.stop):
            if entry.number != 1 or entry.wire != BYTES:
                raise Malformed(f"field {entry.number} at byte {entry.start} is not of a tf.Example")
            name, value = "", None
            for part in fields(payload, entry.start, entry.stop):
                if part.wire == BYTES and part.number == 1:
                    try:
                        name = payload[part.start : part.stop].decode()
                    except UnicodeDecodeError as error:
                        raise Malformed(f"a feature's name at byte {part.start} is not UTF-8") from error
                elif part.wire == BYTES and part.number == 2:
                    value = part
            example[name] = np.zeros(0, np.float32) if value is None else _feature(payload, view, value)
    return example


def _feature(payload: bytes, view: np.ndarray, feature: Field) -> np.ndarray | list[bytes]:
    values: np.ndarray | list[bytes] = np.zeros(0, np.float32)
    for kind in fields(payload, feature.start, feature.stop):
        if kind.wire != BYTES:
            continue
        if kind.number == 1:
            parts = fields(payload, kind.start, kind.stop)
            values = [payload[part.start : part.stop] for part in parts if part.number == 1 and part.wire == BYTES]
        elif kind.number == 2:
            values = _floats(payload, view, kind)
        elif kind.number == 3:
            values = _ints(payload, view, kind)
    return values


def _floats(payload: bytes, view: np.ndarray, values: Field) -> np.ndarray:
    parts = []
    for part in fields(payload, values.start, values.stop):
        if part.number != 1 or part.wire not in (BYTES, FIXED32):
            continue
        if (part.stop - part.start) % 4:
            raise Malformed(f"a list of floats at byte {part.start} has {part.stop - part.start} bytes")
        parts.append(np.frombuffer(payload, "<f4", (part.stop - part.start) // 4, part.start))
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)


def _ints(payload: bytes, view: np.ndarray, values: Field) -> np.ndarray:
    parts = []
    for part in fields(payload, values.start, values.stop):
        if part.number != 1:
            continue
        if part.wire == BYTES:
            parts.append(varints(view[part.start : part.stop]))
        elif part.wire == VARINT:
            parts.append(np.array([signed(part.value)], np.int64))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def serialise(features: Mapping[str, np.ndarray | Sequence[bytes]]) -> bytes:
    """A tf.Example of `features`, names sorted: float arrays as float32, other arrays as int64, lists of bytes."""
    entries = bytearray()
    for name in sorted(features):
        values = features[name]
        if isinstance(values, np.ndarray) and values.dtype.kind == "f":
            kind = encode(2, encode(1, values.astype("<f4").tobytes()))
        elif isinstance(values, np.ndarray):
            kind = encode(3, encode(1, b"".join(map(encode_varint, values.reshape(-1).tolist()))))
        else:
            kind = encode(1, b"".join(encode(1, value) for value in values))
        entries += encode(1, encode(1, name.encode()) + encode(2, kind))
    return encode(1, bytes(entries))
