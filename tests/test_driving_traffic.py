"""Replay, the Intelligent Driver Model, and who reacts to whom."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.datasets.log import PEDESTRIAN, VEHICLE
from longhaul.driving import tables, traffic
from longhaul.driving.simulator import Config, driving
from tests.driving_worlds import DT, bank, line, scenario, trip

T = 61


def test_idm_balances_at_its_own_gap_and_speed() -> None:
    speed, desired = 10.0, 15.0
    # the equilibrium gap of the paper: (s0 + vT) / sqrt(1 - (v / v0)^4)
    gap = (traffic.STANDSTILL + speed * traffic.HEADWAY) / np.sqrt(1 - (speed / desired) ** 4)
    hindrance = traffic.interaction(jnp.float32(speed), jnp.float32(gap), jnp.float32(speed))
    assert float(traffic.idm(jnp.float32(speed), jnp.float32(desired), hindrance)) == pytest.approx(0.0, abs=1e-5)
    free = traffic.idm(jnp.array([0.0, desired]), jnp.full(2, desired), jnp.zeros(2))
    np.testing.assert_allclose(free, [traffic.ACCELERATION, 0.0], atol=1e-6)


def test_a_bend_is_met_at_its_speed_and_reached_by_braking() -> None:
    radius, away = 20.0, 30
    offsets = np.arange(60, dtype=np.float32)
    headings = np.maximum(offsets - away, 0.0) / radius
    expected = np.sqrt(traffic.BEND * radius + traffic.BRAKING * away)
    found = float(traffic.bend_speed(jnp.asarray(headings), 1.0, offsets))
    # the bend begins within the span over which a turn is measured
    assert found == pytest.approx(expected, rel=0.1)
    assert float(traffic.bend_speed(jnp.zeros(60), 1.0, offsets)) > 40.0


def test_replay_puts_everybody_where_the_log_has_them() -> None:
    other, walker = line((20, 3), (-4, 0), T), line((10, -4), (0, 1), T)
    present = np.ones((T, 3), bool)
    present[:20, 2] = False
    made = scenario([line((0, 0), (5, 0), T), other, walker], kinds=[VEHICLE, VEHICLE, PEDESTRIAN], present=present)
    environment = driving(bank(made), Config())
    picture = jax.jit(lambda t: environment.frame(environment.start(0)[0]._replace(t=t)))
    for t in (0, 19, 20, 60):
        frame = picture(jnp.int32(t))
        np.testing.assert_allclose(frame.pose[1:3], np.stack([other[t], walker[t]]), atol=1e-5)
        assert np.asarray(frame.present[:4]).tolist() == [True, True, t >= 20, False]
    assert np.asarray(frame.kind[:4]).tolist() == [VEHICLE, VEHICLE, PEDESTRIAN, 0]
    assert np.asarray(frame.size[1]).tolist() == [4.0, 2.0]


def test_reactive_vehicles_follow_an_undisturbed_log_closely() -> None:
    ego, other = line((0, 0), (0, 0), T), line((-10, 3.5), (8, 0), T)
    driven = trip(scenario([ego, other]), traffic="idm")
    s = driven.states.reactive.s[:, 1]
    expected = 8.0 * DT * np.arange(1, T)
    np.testing.assert_allclose(s, expected, atol=0.6)  # the log's speed is its desired one


def test_a_reactive_vehicle_stops_behind_a_standing_ego_where_replay_would_collide() -> None:
    ego = line((0, 0), (0, 0), T)
    behind = line((-30, 0), (8, 0), T)
    made = scenario([ego, behind])
    assert trip(made).metrics["collision"] == [1.0]
    careful = trip(made, traffic="idm")
    assert careful.metrics["collision"] == [0.0]
    gap = 30.0 - careful.states.reactive.s[-1, 1] - 4.0  # between their bumpers
    assert 0.5 < gap < 6.0
    assert careful.states.reactive.speed[-1, 1] < 1.0


def test_a_reactive_vehicle_waits_where_its_log_waits() -> None:
    """It comes to the place where its log stood still, as if at a light, and leaves when the log does."""
    speed = np.where(np.arange(T) < 20, 6.0, np.where(np.arange(T) < 45, 0.0, 6.0))
    other = line((0, 3.5), (1, 0), T)
    other[:, 0] = np.concatenate([[0], np.cumsum(DT * speed)[:-1]])
    driven = trip(scenario([line((0, -3), (0, 0), T), other]), traffic="idm")
    s = driven.states.reactive.s[:, 1]
    assert s[:43].max() <= 12.0 + 0.7
    assert s[42] == pytest.approx(12.0, abs=3.0)
    assert s[-1] > 13.0


def test_reactive_vehicles_do_not_see_themselves_and_see_each_other() -> None:
    first, second = line((-10, 0), (4, 0), T), line((-30, 0), (10, 0), T)
    ego = line((0, -40), (0, 0), T)
    driven = trip(scenario([ego, first, second], road=None), traffic="idm")
    s = driven.states.reactive.s
    ahead = (-10 + s[:, 1]) - (-30 + s[:, 2])
    assert ahead.min() > 4.0  # never through each other
    assert s[-1, 1] == pytest.approx(24.0, abs=1.0)  # and the first is not held up


def test_arc_lengths_leave_out_the_jitter_of_a_standing_vehicle() -> None:
    rng = np.random.default_rng(0)
    pose = np.zeros((1, 50, 2, 3))
    pose[0, :, 0, :2] = rng.normal(0, 0.05, (50, 2))  # stands
    pose[0, :, 1, 0] = np.arange(50) * 0.8  # drives
    present = np.ones((1, 50, 2), bool)
    present[0, :10, 1] = False
    travelled = tables.arc_lengths(pose, present)
    assert travelled[0, -1, 0] == 0.0
    assert travelled[0, 10, 1] == 0.0
    assert travelled[0, -1, 1] == pytest.approx(0.8 * 39, abs=1e-4)


def test_paths_go_through_the_logged_places() -> None:
    t = np.arange(T) * DT
    angle = 0.25 * t
    pose = np.stack([20 * np.sin(angle), 20 - 20 * np.cos(angle), angle], -1)  # a circle of 20 m at 5 m/s
    made = scenario([line((0, -40), (0, 0), T), pose], road=None)
    world = driving(bank(made), Config(traffic="idm")).tables
    place = jax.jit(lambda s: traffic.on_path(world.paths, jnp.int32(0), s))
    for value in np.linspace(0, 29, 15):
        x, y, heading = (float(v[1]) for v in place(jnp.full(16, value)))
        expected = [20 * np.sin(value / 20), 20 - 20 * np.cos(value / 20)]
        np.testing.assert_allclose([x, y], expected, atol=0.06)  # chords of two metres
        assert heading == pytest.approx(value / 20, abs=0.03)
