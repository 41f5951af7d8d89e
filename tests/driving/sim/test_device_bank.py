"""Device bank: read back as it was laid out, in so many bytes."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.bank import Bank, stack
from longhaul.driving.scenario.compile import compile_log
from longhaul.driving.scenario.scenario import CELL, Scenario
from longhaul.driving.sim import device_bank
from longhaul.driving.sim.device_bank import AHEAD, BEHIND, DeviceBank
from longhaul.driving.sim.geometry import clearance
from tests.helpers.driving_scenarios import bank, line, scenario
from tests.helpers.short_logs import sample

EXAMPLE = Path(os.environ.get("LONGHAUL_DATA", "../shared/data")) / "womd" / "motion_data_one_example.tfrecord"


def size(known: DeviceBank) -> float:
    """Bytes a scenario."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(known)) / known.scenarios


@pytest.fixture(scope="module")
def made() -> list[Scenario]:
    return [compile_log(generate(seed), agents=8, horizon=horizon) for seed, horizon in ((3, None), (5, 30), (8, 50))]


@pytest.fixture(scope="module")
def whole(made: list[Scenario]) -> tuple[Bank, DeviceBank]:
    stacked = stack(made, agents=8)
    return stacked, device_bank.tabulate(stacked, 8, True)


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
        device_bank.logged_at(known, jnp.int32(1), jnp.int32(9), objects),
        device_bank.slice_at(known, jnp.int32(1), jnp.int32(9))[:6, objects],
    )


def test_the_unit_grows_with_the_extent_so_that_nothing_is_cut() -> None:
    """2 cm at 655 m, 6 cm at 2 km: and the walls of others, which are nowhere, stay nowhere."""
    for away, unit in ((655.0, 0.02), (2000.0, 0.0611)):
        other = line((away, 3), (0, 0), 11)
        host = device_bank.arrange(bank(scenario([line((0, 0), (5, 0), 11), other])), 1, True)
        known = jax.tree.map(jnp.asarray, host)
        found = np.asarray(device_bank.slice_at(known, jnp.int32(0), jnp.int32(4)))
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
    known = device_bank.tabulate(bank(scenario([line((3, 1), (5, 0), 11)])), 1, False)
    found = np.asarray(
        jax.vmap(lambda s: device_bank.place_on(known, jnp.int32(0), jnp.int32(0), s))(jnp.array([0.0, 7.25]))
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
        bank(first._replace(light_state=state), scenario(poses, drivers=2), agents=2), 2, False
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
    found = distance_field.decode(distance_field.encode(distance))
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
        points = rng.uniform(origin, top, (20_000, 2))
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


def test_what_is_far_from_all_edges_takes_no_memory() -> None:
    x, y = np.meshgrid(np.arange(400) * CELL, np.arange(400) * CELL)
    packed = distance_field.tile([np.round(100.0 * np.minimum(np.abs(y - 100.0) - 3.0, 300.0)).astype(np.int16)])
    assert packed.cells.size < 0.2 * x.size
    assert len(np.unique(packed.tiles)) < 0.3 * packed.tiles.size


def test_reactive_paths_and_walls_are_kept(whole) -> None:
    stacked, known = whole
    travelled = device_bank.arc_lengths(stacked.pose, stacked.present)
    walls = device_bank.walls(stacked, travelled)
    for i, steps in enumerate(stacked.steps):
        found = np.asarray(device_bank.slice_at(known, jnp.int32(i), jnp.int32(steps - 1)))
        np.testing.assert_allclose(found[6], travelled[i, steps - 1], atol=0.51 * float(known.scale[i, 2]) + 1e-5)
        np.testing.assert_allclose(found[7], walls[i, steps - 1], atol=0.51 * float(known.scale[i, 2]) + 1e-5)


def test_angles_wrap_and_scales_are_exact_enough() -> None:
    angle = np.linspace(-20.0, 20.0, 1001)
    found = device_bank.decode(device_bank.encode_angle(angle), device_bank.TURN)
    np.testing.assert_allclose(np.exp(1j * found), np.exp(1j * angle), atol=6e-5)
    values = np.array([[0.0, 1.0, -3.0], [655.34, -200.0, 0.01]])
    scale = device_bank.scale_for(values)
    np.testing.assert_allclose(scale, [0.001, 0.02], rtol=1e-4)
    found = device_bank.decode(device_bank.encode(values, scale[:, None]), scale[:, None])
    np.testing.assert_allclose(found, values, atol=0.0101)


def test_generated_scenarios_are_small(made: list[Scenario]) -> None:
    assert size(device_bank.tabulate(stack(made, agents=8), 8, False)) < 200_000


@pytest.mark.skipif(not EXAMPLE.exists(), reason="no shared logs")
@pytest.mark.parametrize(("agents", "objects"), [(64, 64), (1, 128)])
def test_a_real_scenario_takes_at_most_350_kilobytes(agents: int, objects: int) -> None:
    (log,) = readers.read(EXAMPLE)
    scenarios = [compile_log(log, agents=agents, objects=objects)]
    assert size(device_bank.tabulate(stack(scenarios, agents=agents), agents, False)) <= 350_000
