"""Packed shards: what a round trip may change, and every kind of damage."""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData, Malformed
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import Road, Scenario
from longhaul.driving.shards import shard as shards
from tests.helpers import log_files as made

ROUNDING = 2.0**-23
"""float32's own, relative."""

BOUNDS = {
    "pose": (0.005, 0.005, 0.0001),
    "velocity": (0.005, 0.005),
    "size": (0.0005, 0.0005),
    "route": (0.005, 0.005, 0.0001),
    "onward": (0.005, 0.005),
    "route_length": (0.0005,),
    "expert_s": (0.0005,),
}


@functools.cache
def small(agents: int = 2, name: str = "straight") -> Scenario:
    return scenario_from_log(replace(made.make_log(), id=name), agents=agents)


def assert_close(found: Scenario, given: Scenario) -> None:
    """Within the documented bounds, everything else equal; types and shapes too."""
    for name in Scenario._fields:
        one, other = getattr(found, name), getattr(given, name)
        if name == "drawing":
            assert [kind for kind, _ in one] == [kind for kind, _ in other]
            for (_, line), (_, expected) in zip(one, other):
                assert line.dtype == np.float32
                np.testing.assert_allclose(line, expected, rtol=ROUNDING, atol=0.005)
        elif name == "road":
            assert len(other.kind)
            for column, array, expected in zip(other._fields, one, other, strict=True):
                assert (array.dtype, array.flags.writeable) == (expected.dtype, True), column
                np.testing.assert_array_equal(array, expected, err_msg=column)
        elif isinstance(other, np.ndarray):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name
            assert one.flags.c_contiguous
            assert one.flags.writeable
            if name in BOUNDS:
                error = np.abs(one.astype(np.float64) - other)
                bound = np.array(BOUNDS[name]) + 2 * ROUNDING * np.abs(other)
                assert (error <= bound).all(), (name, error.max())
            else:
                np.testing.assert_array_equal(one, other, err_msg=name)
        else:
            assert one == other, name


@pytest.mark.parametrize("agents", [1, 4])
def test_a_round_trip_keeps_the_bounds(tmp_path: Path, agents: int) -> None:
    given = [
        small(agents),
        scenario_from_log(generate(3), agents=agents),
        scenario_from_log(generate(4), agents=agents, horizon=9),
    ]
    size = shards.write(tmp_path / "a.lhs", given)
    shard = shards.open(tmp_path / "a.lhs")
    assert size == (tmp_path / "a.lhs").stat().st_size
    assert (len(shard), shard.ids) == (3, tuple(each.id for each in given))
    for one, other in zip(shard, given, strict=True):
        assert_close(one, other)
    assert_close(shard[-1], given[-1])
    with pytest.raises(IndexError, match="scenario 3 of 3"):
        shard[3]
    shard.close()


def test_packing_what_was_unpacked_gives_the_same_bytes() -> None:
    record = shards.pack(small())
    assert shards.pack(shards.unpack(record)) == record


def test_values_beyond_16_bits_take_32() -> None:
    """Beyond 327 m, whole turns of headings, and steps of more than 2^15 units between neighbours."""
    given = small()
    pose = given.pose.copy()
    pose[:, 0, 0] += 5000.0
    pose[::2, 0, 1] -= 20000.0
    pose[:, 1, 2] += 40.0
    given = given._replace(pose=pose, field=np.where(np.arange(12).reshape(3, 4) % 2, 32000, -32000).astype(np.int16))
    found = shards.unpack(shards.pack(given))
    assert_close(found, given)
    assert len(shards.pack(given)) < 2 * len(shards.pack(small()))


def test_no_agents_lights_field_or_drawing() -> None:
    given = small(1)
    given = given._replace(
        light_s=np.zeros((1, 0), np.float32),
        light_state=np.zeros((1, 0, given.steps), np.int8),
        field=np.zeros((0, 0), np.int16),
        drawing=(),
    )
    assert_close(shards.unpack(shards.pack(given)), given)


def test_every_part_of_a_scenario_is_stored() -> None:
    stored = set(shards.COLUMNS) | {"id", "steps", "dt", "drawing", "road", "control"}
    assert {f"road_{name}" for name in Road._fields} - stored == {"road_near"}
    assert set(Scenario._fields) <= stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"velocity": np.zeros((3, 2, 2), np.float32)}, "velocity has shape"),
        ({"steps": 5}, "pose has shape"),
        ({"expert_s": np.full((2, 81), np.nan, np.float32)}, "expert_s is not finite"),
        ({"route_length": np.full(2, 1e9, np.float32)}, "route_length has 1e"),
    ],
)
def test_scenarios_of_wrong_shapes_or_values_are_not_stored(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shards.pack(small()._replace(**change))


def test_the_same_scenarios_give_the_same_bytes_and_nothing_else_is_left(tmp_path: Path) -> None:
    for name in ("a.lhs", "b.lhs"):
        shards.write(tmp_path / name, [small(), small(1, "\ud800 two\n")])
    assert (tmp_path / "a.lhs").read_bytes() == (tmp_path / "b.lhs").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.lhs", "b.lhs"]
    assert shards.open(tmp_path / "a.lhs").ids == ("straight", "? two\n")
    assert shards.open(tmp_path / "a.lhs")[1].id == "? two\n"


def test_a_writer_that_fails_leaves_the_old_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.lhs"
    shards.write(path, [small()])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="velocity"):
        shards.write(path, [small(), small()._replace(velocity=np.zeros((1, 1, 2)))])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def attempt(path: Path) -> int:
    """Number of scenarios that could be read; anything but scenarios or one clear line is a failure of the test."""
    read, told = 0, []
    try:
        shard = shards.open(path)
        for index in range(len(shard)):
            try:
                assert np.isfinite(shard[index].pose).all()
                read += 1
            except BadData as error:
                told.append((f"{path}: record {index} of {len(shard)}", str(error)))
    except BadData as error:
        told.append((f"{path}: ", str(error)))
    for start, message in told:
        assert message.startswith(start)
        assert "\n" not in message
    return read


def test_a_shard_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.lhs"
    shards.write(path, [small(), small()])
    whole = path.read_bytes()
    for cut in [*range(shards.HEAD_BYTES + 2), *np.linspace(50, len(whole) - 1, 60).astype(int).tolist()]:
        path.write_bytes(whole[:cut])
        with pytest.raises(BadData, match=r"cut off"):
            shards.open(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadData, match="grown"):
        shards.open(path)


def test_any_flipped_bit_is_found_and_spoils_one_record_at_most(tmp_path: Path) -> None:
    path = tmp_path / "a.lhs"
    shards.write(path, [small(), small(), small()])
    whole = path.read_bytes()
    assert attempt(path) == 3
    random = np.random.default_rng(5)
    for place in [*range(shards.HEAD_BYTES), *random.integers(0, len(whole), 120).tolist()]:
        data = bytearray(whole)
        data[place] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(data)
        assert attempt(path) in (0, 2)
    assert attempt(path) < 3


def test_another_version_and_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.lhs"
    shards.write(path, [small()])
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", shards.VERSION + 1)
    path.write_bytes(data)
    with pytest.raises(BadData, match=f"version {shards.VERSION + 1}; this program reads version"):
        shards.open(path)
    path.write_bytes(b"something else, and long enough to be a head of a shard")
    with pytest.raises(BadData, match="is no shard"):
        shards.open(path)
    with pytest.raises(BadData, match="cannot be read"):
        shards.open(tmp_path / "none.lhs")


def test_a_record_can_not_ask_for_much_memory() -> None:
    """Sizes that multiply to 2^60 bytes, and a kilobyte that would inflate to 64 MiB and more."""
    record = shards.pack(small(1))
    huge = list(shards.RECORD_HEAD.unpack_from(record))
    huge[1] = huge[6] = huge[7] = 2**30
    with pytest.raises(Malformed, match="are possible"):
        shards.unpack(shards.RECORD_HEAD.pack(*huge) + record[shards.RECORD_HEAD.size :])
    bomb = record[: shards.RECORD_HEAD.size + 8] + zlib.compress(bytes(1 << 26), 9)
    with pytest.raises(Malformed, match="does not hold"):
        shards.unpack(bomb)


def test_an_index_that_points_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "a.lhs"
    shards.write(path, [small(), small()])
    data = bytearray(path.read_bytes())
    _, _, count, offset, length, _ = shards.HEAD.unpack_from(data)

    def rewritten(index: bytes) -> None:
        head = shards.HEAD.pack(
            readers.SHARD_MAGIC, shards.VERSION, count, offset, len(index), google_crc32c.value(index)
        )
        path.write_bytes(head + struct.pack("<I", google_crc32c.value(head)) + data[len(head) + 4 : offset] + index)

    good = bytes(data[offset : offset + length])
    rewritten(good)
    assert attempt(path) == 2
    entries = np.frombuffer(good, shards.ENTRY, 2).copy()
    entries["offset"][1] = 2**63
    for index in (entries.tobytes() + good[32:], good[:32] + b'["a"]', good[:32] + b"[1, 2]", good[:20], b""):
        rewritten(index)
        with pytest.raises(BadData, match="index"):
            shards.open(path)


REAL = (
    "womd/motion_data_one_example.tfrecord",
    "womd/motion_data_one_scenario.tfrecord",
    "scenarionet/sd_waymo_v1.2_eb4b91b10ca94ff2.pkl",
)


@pytest.mark.parametrize("name", REAL)
def test_real_logs_keep_the_bounds_and_the_size(logs: Path, tmp_path: Path, name: str) -> None:
    if not (logs / name).exists():
        pytest.skip(f"no {name} among the real logs")
    (log,) = readers.read(logs / name)
    for agents in (1, 64):
        given = scenario_from_log(log, agents=agents)
        size = shards.write(tmp_path / "a.lhs", [given])
        assert size <= 250_000
        assert_close(shards.open(tmp_path / "a.lhs")[0], given)
