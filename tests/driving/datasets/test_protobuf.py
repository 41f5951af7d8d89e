"""Protocol-buffer bytes against the specification's own examples and against a slow reader."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.driving.datasets.log import Malformed
from longhaul.driving.datasets.protobuf import (
    FIXED32,
    FIXED64,
    VARINT,
    Field,
    Run,
    encode,
    encode_varint,
    fields,
    runs,
    signed,
    starts,
    table,
    varint,
    varints,
)

NUMBERS = [0, 1, 127, 128, 150, 300, 16383, 16384, 2**31, 2**32, 2**56, 2**63 - 1, -1, -2, -(2**63)]


def test_varints_of_the_specification() -> None:
    """Examples of protobuf.dev/programming-guides/encoding: 150, -2, field 1 = 150, a string."""
    assert encode_varint(150) == bytes.fromhex("9601")
    assert encode_varint(-2) == bytes.fromhex("feffffffffffffffff01")
    assert encode(1, 150) == bytes.fromhex("089601")
    assert encode(2, b"testing") == bytes.fromhex("120774657374696e67")
    assert varints(np.frombuffer(bytes.fromhex("038e029ea705"), np.uint8)).tolist() == [3, 270, 86942]


def _one_by_one(packed: bytes) -> list[int]:
    at, numbers = 0, []
    while at < len(packed):
        value, at = varint(packed, at, len(packed))
        numbers.append(signed(value))
    return numbers


def test_packed_numbers_equal_one_by_one() -> None:
    random = np.random.default_rng(0)
    many = NUMBERS + (random.integers(-(2**62), 2**62, 500) >> random.integers(0, 62, 500)).tolist()
    packed = b"".join(map(encode_varint, many))
    assert varints(np.frombuffer(packed, np.uint8)).tolist() == many
    assert _one_by_one(packed) == many
    assert varints(np.zeros(0, np.uint8)).tolist() == []


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\xff", b"\xff" * 10 + b"\x01"])
def test_packed_numbers_that_are_none(packed: bytes) -> None:
    with pytest.raises(Malformed):
        varints(np.frombuffer(packed, np.uint8))
    with pytest.raises(Malformed):
        _one_by_one(packed)


@pytest.mark.parametrize(
    "data", ["08", "0a05", "0aff01", "09000000", "0d00", "03", "00", "0f", "0affffffffffffffffff01"]
)
def test_messages_that_are_none(data: str) -> None:
    message = bytes.fromhex(data)
    with pytest.raises(Malformed):
        list(fields(message, 0, len(message)))
    with pytest.raises(Malformed):
        list(runs(message, np.frombuffer(message, np.uint8), 0, len(message)))


def _messages(random: np.random.Generator, count: int) -> list[bytes]:
    """Small messages: mostly of one layout, some with fields left out, some with others, in stretches."""
    messages = []
    while len(messages) < count:
        layout = random.integers(0, 4)
        for _ in range(random.integers(1, 40)):
            x, y = random.normal(size=2)
            small, large = int(random.integers(0, 100)), int(random.integers(0, 1 << 40))
            messages.append(
                encode(1, float(x)) + encode(2, np.float32(y)) + encode(3, small if layout else large)
                if layout != 2
                else encode(9, b"other") + encode(2, np.float32(y)) + encode(1, 0.5) + encode(1, float(x))
            )
    return messages[:count]


def test_runs_and_tables_equal_a_slow_reader() -> None:
    random = np.random.default_rng(1)
    messages = _messages(random, 700)
    data = encode(7, 1) + b"".join(encode(5, message) for message in messages) + encode(6, b"end")
    view = np.frombuffer(data, np.uint8)
    begins, lengths, others = [], [], []
    for item in runs(data, view, 0, len(data)):
        if isinstance(item, Run) and item.number == 5:
            begins.append(starts(item))
            lengths.append(np.full(item.repeats, item.length))
        else:
            others.append(item)
    assert len(begins) < 400  # far fewer runs than messages
    spans = [(each.start, each.stop) for each in fields(data, 0, len(data)) if each.number == 5]
    begin, length = np.concatenate(begins), np.concatenate(lengths)
    assert list(zip(begin.tolist(), (begin + length).tolist())) == spans
    assert [(type(each), each.number) for each in others] == [(Field, 7), (Run, 6)]
    found = table(data, view, begin, length, {1: FIXED64, 2: FIXED32, 3: VARINT, 4: VARINT})
    for row, message in zip(found, messages):
        slow = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}
        for field in fields(message, 0, len(message)):
            if field.wire == VARINT:
                slow[field.number] = float(field.value)
            elif field.number in (1, 2):
                dtype = "<f8" if field.wire == FIXED64 else "<f4"
                slow[field.number] = float(np.frombuffer(message, dtype, 1, field.start)[0])
        assert row.tolist() == list(slow.values())


def test_tables_of_many_layouts_of_one_length() -> None:
    """More layouts than the table has patience for: the rest is read one by one, to the same values."""
    messages = [encode(number, 7) + encode(1, index) for index, number in enumerate([2, *range(4, 16)] * 4)]
    messages += [encode(1, index) + encode(number, 7) for index, number in enumerate([2, *range(4, 16)] * 4)]
    data = b"".join(messages)
    begins = np.cumsum([0, *map(len, messages)])[:-1]
    lengths = np.array([len(message) for message in messages])
    found = table(data, np.frombuffer(data, np.uint8), begins, lengths, {1: VARINT, 2: VARINT})
    expected = [[index % 52, 7 if index % 13 == 0 else 0] for index in range(104)]
    assert found.tolist() == expected


def test_a_field_of_another_type_than_wanted_is_unknown() -> None:
    data = encode(1, np.float32(2.0)) + encode(2, 3)
    found = table(data, np.frombuffer(data, np.uint8), np.array([0]), np.array([len(data)]), {1: FIXED64, 2: VARINT})
    assert found.tolist() == [[0.0, 3.0]]
