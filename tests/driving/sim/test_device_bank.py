"""Device bank: read back as it was laid out, in so many bytes; the room of chunks, known from the indices of shards."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.config.run import Driving
from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import PEDESTRIAN, VEHICLE, BadData
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.bank import Bank, stack
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import CELL, Scenario
from longhaul.driving.scenario_source import cut
from longhaul.driving.shards import shard, stream
from longhaul.driving.sim import device_bank
from longhaul.driving.sim.device_bank import AHEAD, BEHIND, DeviceBank
from longhaul.driving.sim.geometry import clearance
from longhaul.training import data as feeds
from tests.helpers.driving_scenarios import bank, line, scenario
from tests.helpers.short_logs import decoded, sample
from tests.training.test_data import BANK, COUNT, EGO, PERIOD, assert_same, contexts, streaming, written

EXAMPLE = Path(os.environ.get("LONGHAUL_DATA", "../shared/data")) / "womd" / "motion_data_one_example.tfrecord"

slice_at = jax.jit(device_bank.slice_at)


def size(known: DeviceBank) -> float:
    """Bytes a scenario."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(known)) / known.scenarios


@pytest.fixture(scope="module")
def made() -> list[Scenario]:
    return [
        scenario_from_log(generate(seed), agents=8, horizon=horizon) for seed, horizon in ((3, None), (5, 30), (8, 50))
    ]


@pytest.fixture(scope="module")
def whole(made: list[Scenario]) -> tuple[Bank, DeviceBank]:
    stacked = stack(made, agents=8)
    return stacked, device_bank.tabulate(stacked, 8, reactive=True)


def test_motion_is_read_back_within_half_a_unit_at_every_step_of_scenarios_of_any_length(whole) -> None:
    stacked, known = whole
    read = jax.jit(lambda i, t: device_bank.slice_at(known, i, t))
    for i, steps in enumerate(stacked.steps):
        unit = np.asarray(known.scale[i])
        assert (unit <= 0.02).all()
        for t in (0, int(steps) // 2, int(steps) - 1):
            found, there = np.asarray(read(i, t)), stacked.present[i, t]
            np.testing.assert_array_equal(found[5] > 0.5, there)
            pose, velocity = stacked.pose[i, t][there], stacked.velocity[i, t][there]
            np.testing.assert_allclose(found[:2, there], pose[:, :2].T, atol=0.51 * unit[0] + 1e-5)
            np.testing.assert_allclose(np.cos(found[2, there] - pose[:, 2]), 1.0, atol=1e-7)
            np.testing.assert_allclose(found[3:5, there], velocity.T, atol=0.51 * unit[1] + 1e-5)
            assert (found[3:5, ~there] == 0.0).all()
        np.testing.assert_array_equal(read(i, int(steps) + 7), read(i, int(steps) - 1))


def test_logged_at_is_a_part_of_the_slice(whole) -> None:
    _, known = whole
    objects = jnp.array([3, 0, 5])
    np.testing.assert_array_equal(
        jax.jit(device_bank.logged_at)(known, jnp.int32(1), jnp.int32(9), objects),
        np.asarray(slice_at(known, jnp.int32(1), jnp.int32(9)))[:6, np.asarray(objects)],
    )


def test_the_unit_grows_with_the_extent_so_that_nothing_is_cut() -> None:
    """2 cm at 655 m, 6 cm at 2 km: and the walls of others, which are nowhere, stay nowhere."""
    for away, unit in ((655.0, 0.02), (2000.0, 0.0611)):
        other = line((away, 3), (0, 0), 11)
        host = device_bank.arrange(bank(scenario([line((0, 0), (5, 0), 11), other])), 1, reactive=True)
        known = jax.tree.map(jnp.asarray, host)
        found = np.asarray(slice_at(known, jnp.int32(0), jnp.int32(4)))
        assert float(known.scale[0, 0]) == pytest.approx(unit, rel=1e-2)
        np.testing.assert_allclose(found[:2, 1], [away, 3.0], atol=0.51 * unit)
        np.testing.assert_allclose(found[0, 0], 2.0, atol=0.51 * unit)
        assert found[7, 0] == device_bank.NOWHERE
        assert found[6, 0] == pytest.approx(2.0, abs=1e-2)


def test_flat_routes_are_the_padded_ones_with_points_before_and_after(whole) -> None:
    stacked, known = whole
    read = jax.jit(lambda i, a, s: device_bank.window(known, i, a, s, AHEAD))
    for i, a in zip(*np.nonzero(stacked.controlled >= 0), strict=True):
        route, count = stacked.route[i, a], int(stacked.route_points[i, a])
        unit = float(known.routes.scale[i])
        for s in (0.0, 7.3, count - 1.5):
            points, first = (np.asarray(x) for x in read(i, a, jnp.float32(s)))
            assert first == int(s) - BEHIND
            inside = [j for j in range(points.shape[1]) if 0 <= first + j < count]
            expected = route[[first + j for j in inside]]
            np.testing.assert_allclose(points[:2, inside], expected[:, :2].T, atol=0.51 * unit + 1e-5)
            np.testing.assert_allclose(np.cos(points[2, inside] - expected[:, 2]), 1.0, atol=1e-7)
            steps = np.hypot(*np.diff(points[:2], axis=1))
            assert (steps > 0.3).all()  # straight on where the route is not, never into another one
            assert (steps < 1.2).all()


def test_places_on_a_route_lie_between_its_points() -> None:
    known = device_bank.tabulate(bank(scenario([line((3, 1), (5, 0), 11)])), 1, reactive=False)
    found = np.asarray(
        jax.jit(jax.vmap(lambda s: device_bank.place_on(known, jnp.int32(0), jnp.int32(0), s)))(jnp.array([0.0, 7.25]))
    )
    np.testing.assert_allclose(found, [[3.0, 1.0, 0.0], [10.25, 1.0, 0.0]], atol=1e-2)


def test_lights_are_stored_once_and_read_by_whoever_meets_them() -> None:
    """Two routes meet one light, one of them another; a third scenario has none."""
    red, late = [1] * 11, [2] * 5 + [1] * 6
    poses = [line((0, 0), (5, 0), 11), line((0, 3), (5, 0), 11)]
    first = scenario(poses, drivers=2, lights=[(24.0, red), (40.0, late)])
    state = first.light_state.copy()
    state[1, 1] = 0  # the second vehicle's log disputes it
    known = device_bank.tabulate(
        bank(first._replace(light_state=state), scenario(poses, drivers=2), agents=2), 2, reactive=False
    )
    np.testing.assert_array_equal(known.lights.courses, [3, 1])  # dark, red, and late
    read = jax.jit(lambda i, t, a: device_bank.lights_at(known, i, t, a))
    for t in (0, 4, 5, 10):
        s, states = read(0, t, 0)
        np.testing.assert_allclose(s, [24.0, 40.0, np.inf, np.inf])
        assert states.tolist() == [red[t], late[t], 0, 0]
        assert read(0, t, 1)[1].tolist() == [red[t], 0, 0, 0]
        assert read(1, t, 0)[1].tolist() == [0, 0, 0, 0]
        assert np.isinf(read(1, t, 0)[0]).all()


def test_a_code_keeps_the_sign_and_is_finest_at_the_edge() -> None:
    distance = np.concatenate([-np.logspace(-4, 1.5, 500), np.logspace(-4, 1.5, 500)])
    found = decoded(distance_field.encode(distance))
    assert (np.sign(found) == np.sign(distance)).all()
    error = np.abs(found - np.clip(distance, -distance_field.REACH, distance_field.REACH))
    for within, bound in ((0.1, 0.008), (0.7, 0.02), (3.0, 0.04), (100.0, 0.065)):
        assert error[np.abs(distance) <= within].max() <= bound


def test_tiles_answer_as_the_whole_field_does(whole) -> None:
    stacked, known = whole
    read = jax.jit(lambda i, x, y: clearance(device_bank.field(known, i), x, y))
    rng = np.random.default_rng(0)
    for i, whole_field in enumerate(device_bank.fields_of(stacked)):
        origin = stacked.field_origin[i].astype(np.float64)
        top = origin + CELL * (np.array(whole_field.shape[::-1]) - 1)
        points = rng.uniform(origin, top, (40_000, 2))
        exact = sample(whole_field, origin, points)
        found = np.asarray(read(i, *jnp.asarray(points.T, jnp.float32)))
        near = np.abs(exact) < 1.0
        assert near.sum() > 500
        # where an edge ends, its other side begins far from all edges: there samples jump, and saturated ones jump less
        assert np.quantile(np.abs(found - exact)[near], 0.995) < 0.03
        wrong = (found > 0) != (exact > 0)
        assert wrong.mean() < 1e-3
        assert np.quantile(np.abs(exact[wrong]), 0.9, method="lower") < 0.05 if wrong.any() else True
        clipped = np.clip(exact, -distance_field.REACH, distance_field.REACH)
        assert np.quantile(np.abs(found - clipped), 0.999) < 0.35  # every second sample, far from the edges


def test_places_far_from_all_edges_take_no_memory() -> None:
    x, y = np.meshgrid(np.arange(400) * CELL, np.arange(400) * CELL)
    packed = distance_field.tile([np.round(100.0 * np.minimum(np.abs(y - 100.0) - 3.0, 300.0)).astype(np.int16)])
    assert packed.cells.size < 0.2 * x.size
    assert len(np.unique(packed.tiles)) < 0.3 * packed.tiles.size


def test_reactive_paths_and_walls_are_kept(whole) -> None:
    stacked, known = whole
    travelled = device_bank.arc_lengths(stacked.pose, stacked.present)
    walls = device_bank.walls(stacked, travelled)
    for i, steps in enumerate(stacked.steps):
        found = np.asarray(slice_at(known, jnp.int32(i), jnp.int32(steps - 1)))
        np.testing.assert_allclose(found[6], travelled[i, steps - 1], atol=0.51 * float(known.scale[i, 2]) + 1e-5)
        np.testing.assert_allclose(found[7], walls[i, steps - 1], atol=0.51 * float(known.scale[i, 2]) + 1e-5)


def test_angles_wrap_and_scales_are_exact_enough() -> None:
    angle = np.linspace(-20.0, 20.0, 1001)
    found = device_bank.encode_angle(angle).astype(np.float32) * device_bank.TURN
    np.testing.assert_allclose(np.exp(1j * found), np.exp(1j * angle), atol=6e-5)
    values = np.array([[0.0, 1.0, -3.0], [655.34, -200.0, 0.01]])
    scale = device_bank.scale_for(values)
    np.testing.assert_allclose(scale, [0.001, 0.02], rtol=1e-4)
    found = device_bank.encode(values, scale[:, None]).astype(np.float32) * scale[:, None]
    np.testing.assert_allclose(found, values, atol=0.0101)


def test_generated_scenarios_are_small(made: list[Scenario]) -> None:
    assert size(device_bank.tabulate(stack(made, agents=8), 8, reactive=False)) < 200_000


@pytest.mark.skipif(not EXAMPLE.exists(), reason="no shared logs")
@pytest.mark.parametrize(("agents", "objects"), [(64, 64), (1, 128)])
def test_a_real_scenario_takes_at_most_350_kilobytes(agents: int, objects: int) -> None:
    (log,) = readers.read(EXAMPLE)
    scenarios = [scenario_from_log(log, agents=agents, objects=objects)]
    assert size(device_bank.tabulate(stack(scenarios, agents=agents), agents, reactive=False)) <= 350_000


# ------------------------------------------------------------------------------------------------ room of chunks


@pytest.mark.parametrize("traffic", [pytest.param("log", marks=pytest.mark.slow), "idm"])
@pytest.mark.parametrize("cuts", [pytest.param({}, marks=pytest.mark.slow), {"horizon": 6, "objects": 3}])
def test_the_room_is_known_before_any_chunk_is_read(tmp_path: Path, traffic: str, cuts: dict[str, int]) -> None:
    """No chunk of a run needs more, and the largest needs all but what the bounds of lights and ways give away."""
    run = streaming(written(tmp_path), updates=60 * PERIOD, simulator=dataclasses.replace(EGO, traffic=traffic), **cuts)
    assert isinstance(run.environment, Driving)
    library = stream.open([str(tmp_path)])
    room = feeds.room_for(run, run.environment, library)
    assert room.keys() == device_bank.FLAT.keys() - ({".paths.lines.points"} if traffic == "log" else set())
    most = dict.fromkeys(room, 0)
    for chosen in np.split(stream.picks(COUNT, 61 * BANK, (0, 0), seed=run.seed)[0], 61):
        some = [cut(library[i], agents=1, **{"horizon": None, "objects": None} | cuts) for i in chosen]
        found = device_bank.lengths(device_bank.arrange(stack(some), 1, reactive=traffic == "idm"))
        most = {name: max(length, found[name]) for name, length in most.items()}
    bounds = {".paths.lines.points", ".lights.states"} | ({".routes.points"} if cuts else set())
    for name, length in most.items():
        assert room[name] >= length, name
        assert room[name] == length or name in bounds, name
    assert room[".paths.lines.points" if traffic == "idm" else ".motion"] < 4 * max(most.values())


@pytest.mark.parametrize("cuts", [{}, {"horizon": 20, "agents": 2}])
def test_the_room_that_a_shard_announces_is_what_its_tables_take(tmp_path: Path, cuts: dict[str, int]) -> None:
    """Generated scenarios with roads, lights and traffic, one by one."""
    made = scenario_source.generated(10, 3, agents=8, horizon=None, workers=1)
    shard.write(tmp_path / "a.lhs", made)
    library = stream.open([str(tmp_path)])
    cuts = {"agents": 8, "horizon": None} | cuts  # type: ignore[dict-item]
    needed = device_bank.needs(library.sizes, library.extents, reactive=True, **cuts)  # type: ignore[arg-type]
    gaps = set()
    for i, compiled in enumerate(made):
        one = stack([cut(library[i], **cuts)], agents=cuts["agents"])  # type: ignore[arg-type]
        for name, length in device_bank.lengths(device_bank.arrange(one, cuts["agents"], reactive=True)).items():
            room = needed[name][0] + int(needed[name][1][i])
            assert length <= room, (compiled.id, name)
            assert room <= 2 * length or name == ".paths.lines.points", (compiled.id, name)
            gaps |= {name} if room > length else set()
    bounds = {".paths.lines.points", ".lights.states", ".routes.points"}
    assert gaps <= (bounds if cuts["agents"] == 2 else bounds - {".routes.points", ".lights.states"})
    assert library.extents["movers"].min() > 0
    assert library.extents["courses"].max() > 1


def test_a_chunk_that_needs_more_than_its_shards_say_is_one_line(tmp_path: Path) -> None:
    library = stream.open([str(written(tmp_path))])
    host = device_bank.arrange(stack([library[3]]), 1, reactive=False)
    room = device_bank.lengths(host)
    assert_same(device_bank.padded(host, room), host)
    with pytest.raises(ValueError, match=r"\.cells has \d+ places; by the index of the shards it should have 9"):
        device_bank.padded(host, room | {".cells": 9})
    run = streaming(tmp_path)
    assert isinstance(run.environment, Driving)
    library.extents["cells"][:] = 2**30
    with pytest.raises(BadData, match=r"--bank is 3; \.cells of that many takes \d+ places, above 2147483647"):
        feeds.room_for(run, run.environment, library)


def test_the_largest_batches_are_those_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sums batch by batch; however many are looked at together."""
    values = np.random.default_rng(0).integers(0, 1000, (3, 11))
    expected, at = np.zeros(3, np.int64), stream.Position(0, 0)
    for _ in range(9):
        chosen, at = stream.picks(11, 4, at, seed=5)
        expected = np.maximum(expected, values[:, chosen].sum(1))
    for together in (1, 8, 12, 1 << 16):
        monkeypatch.setattr(stream, "TOGETHER", together)
        np.testing.assert_array_equal(stream.largest(values, 4, 9, seed=5), expected)
    assert (stream.largest(values, 4, 1, seed=5) < expected).any()
    both = [stream.picks(11, 2, (0, 0), seed=5, share=stream.Share(host, 2))[0] for host in range(2)]
    np.testing.assert_array_equal(
        stream.largest(values, 2, 1, seed=5, hosts=2), np.max([values[:, part].sum(1) for part in both], axis=0)
    )


WALKER = scenario(
    [line((0.0, 0.0), (4.0, 0.0), 9), line((5.0, 5.0), (2.0, 0.0), 9), line((5.0, -5.0), (2.0, 0.0), 9)],
    kinds=[VEHICLE, VEHICLE, PEDESTRIAN],
    drivers=3,
)
"""Two vehicles and somebody on foot, all controlled."""


@pytest.mark.parametrize(
    ("compiled", "control", "agents", "message"),
    [
        ("all", "vehicles", 2, r"scenario 0: was compiled for the control of all, not vehicles: .* --control vehicles"),
        ("vehicles", "all", 2, r"scenario 0: was compiled for the control of vehicles, not all: .* --control all"),
        ("chosen", "vehicles", 3, r"--control is vehicles; 2 scenarios, the first of them 0, have cyclists or ped"),
        ("all", "all", 3, None),
        ("chosen", "all", 3, None),
        ("chosen", "vehicles", 2, None),
        ("all", "vehicles", 1, None),
    ],
)
@pytest.mark.parametrize("bank", [None, 1])
def test_who_is_controlled_is_checked_whether_streamed_or_not(
    tmp_path: Path, compiled: str, control: str, agents: int, message: str | None, bank: int | None
) -> None:
    shard.write(tmp_path / "a.lhs", [WALKER._replace(control=compiled, id=name) for name in "ab"])
    config = dataclasses.replace(EGO, agents=agents, control=control)
    run = streaming(tmp_path, bank=bank, bank_updates=bank, simulator=config)
    if message is None:
        assert len(contexts(run, 1)) == 1
        return
    if bank is None:
        message = {"scena": message.replace("scenario 0", "record 0 of 2")}.get(
            message[:5], "control is 'vehicles': the bank has 2"
        )
    with pytest.raises(ValueError, match=message) as raised:
        feeds.feed(run)
    assert "\n" not in str(raised.value)
