"""TFRecord framing and tf.Example messages: every bit counts."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from longhaul.driving.datasets import womd
from longhaul.driving.datasets.log import BadData, Malformed
from tests.helpers import log_files as made
from tests.helpers.log_files import encode, encode_varint


def slow_masked_crc(data: bytes) -> int:
    """CRC-32C bit by bit (polynomial 0x1EDC6F41, reflected), masked as the format's description says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % (1 << 32)


def test_checksum_is_masked_crc32c() -> None:
    for data in (b"", b"123456789", bytes(range(256))):
        assert womd.masked_crc(data) == slow_masked_crc(data)


def test_framing_is_the_published_one(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    made.write_records(path, [b"abc", b""])
    expected = b""
    for payload in (b"abc", b""):
        length = struct.pack("<Q", len(payload))
        expected += length + struct.pack("<I", slow_masked_crc(length)) + payload
        expected += struct.pack("<I", slow_masked_crc(payload))
    assert path.read_bytes() == expected
    assert list(womd.records(path)) == [(0, b"abc"), (19, b"")]


def test_every_cut_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    made.write_records(path, [b"first", b"second record"])
    whole = path.read_bytes()
    second = 16 + len(b"first")
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if cut == second:  # a whole file of one record
            assert len(list(womd.records(path))) == 1
            continue
        with pytest.raises(BadData) as caught:
            list(womd.records(path))
        message = str(caught.value)
        assert str(path) in message
        assert "\n" not in message
        assert (
            "empty" in message
            if cut == 0
            else f"record {int(cut > second)} at byte {second * (cut > second)}" in message
        )
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(BadData, match=f"record {int(bit // 8 >= second)} at byte"):
            list(womd.records(path))


def test_a_forged_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    length = struct.pack("<Q", 1 << 60)
    path.write_bytes(length + struct.pack("<I", womd.masked_crc(length)) + b"x" * 50)
    with pytest.raises(BadData, match="cut off: the record needs 1152921504606846980 bytes more, 50 are left"):
        list(womd.records(path))


def test_a_missing_file_and_a_folder_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BadData, match="cannot be read"):
            list(womd.records(path))


def test_example_gives_back_what_was_written() -> None:
    features = {
        "floats": np.array([1.5, -2.25, 3e38, np.inf], np.float32),
        "ints": np.array([0, -1, 2**62, -(2**63), 127, 128]),
        "texts": [b"a", b"", b"\x00\xff"],
        "none": np.zeros(0, np.int64),
    }
    found = womd.parse_example(made.serialise(features))
    assert sorted(found) == sorted(features)
    np.testing.assert_array_equal(found["floats"], features["floats"])
    np.testing.assert_array_equal(found["ints"], features["ints"])
    assert found["ints"].dtype == np.int64
    assert found["texts"] == features["texts"]
    assert len(found["none"]) == 0


def test_example_reads_lists_packed_unpacked_and_mixed() -> None:
    def feature(name: str, kind: bytes) -> bytes:
        return encode(1, encode(1, name.encode()) + encode(2, kind))

    ints = encode(3, encode(1, -5) + encode(1, b"\x01\x02") + encode(1, 300))
    floats = encode(2, encode(1, np.float32(0.5)) + encode(1, np.array([1, 2], "<f4").tobytes()))
    found = womd.parse_example(encode(1, feature("ints", ints) + feature("floats", floats) + feature("empty", b"")))
    assert found["ints"].tolist() == [-5, 1, 2, 300]
    assert found["floats"].tolist() == [0.5, 1.0, 2.0]
    assert len(found["empty"]) == 0


def test_the_wire_format_is_the_specification_s() -> None:
    """Examples of protobuf.dev/programming-guides/encoding: 150, -2, field 1 = 150, a string, packed numbers."""
    assert encode_varint(150) == bytes.fromhex("9601")
    assert encode_varint(-2) == bytes.fromhex("feffffffffffffffff01")
    assert encode(1, 150) == bytes.fromhex("089601")
    assert encode(2, b"testing") == bytes.fromhex("120774657374696e67")
    ints = encode(1, encode(1, b"n") + encode(2, encode(3, encode(1, bytes.fromhex("038e029ea705")))))
    assert womd.parse_example(encode(1, ints))["n"].tolist() == [3, 270, 86942]


@pytest.mark.parametrize("data", ["08", "0a05", "0aff01", "09000000", "0d00", "00", "0f", "0affffffffffffffffff01"])
@pytest.mark.parametrize("name", ["Example", "Scenario"])
def test_bytes_that_are_no_message_are_refused(name: str, data: str) -> None:
    with pytest.raises(Malformed, match=f"bytes are no message {name}"):
        womd.parse(name, bytes.fromhex(data))


@pytest.mark.parametrize(
    "payload",
    [
        encode(1, encode(1, b"\xff")),
        encode(1, encode(1, encode(1, b"\xff\xfe"))),
        encode(1, encode(1, encode(1, b"a") + encode(2, encode(2, encode(1, b"abc"))))),
        encode(1, encode(1, encode(1, b"a") + encode(2, encode(3, encode(1, b"\xff"))))),
    ],
)
def test_what_is_no_example_is_refused(payload: bytes) -> None:
    with pytest.raises(Malformed):
        womd.parse_example(payload)
