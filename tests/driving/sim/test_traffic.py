"""Replay, and who reacts to whom."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets.log import PEDESTRIAN, VEHICLE
from longhaul.driving.scenario.scenario import ONWARD, ONWARD_SPACING, Scenario
from longhaul.driving.sim import device_bank, traffic
from longhaul.driving.sim.config import Config
from longhaul.driving.sim.dynamics import Motion
from longhaul.driving.sim.simulator import driving
from tests.helpers.driving_scenarios import DT, Trip, bank, line, scenario, trip

T = 61


def test_replay_puts_everybody_where_the_log_has_them() -> None:
    other, walker = line((20, 3), (-4, 0), T), line((10, -4), (0, 1), T)
    present = np.ones((T, 3), bool)
    present[:20, 2] = False
    made = scenario([line((0, 0), (5, 0), T), other, walker], kinds=[VEHICLE, VEHICLE, PEDESTRIAN], present=present)
    environment = driving(bank(made), Config())
    picture = jax.jit(lambda t: environment.frame(environment.start(0)[0]._replace(t=t)))
    for t in (0, 19, 20, 60):
        frame = picture(jnp.int32(t))
        logged = np.stack([other[t], walker[t]])
        np.testing.assert_allclose(frame.pose[1:3, :2], logged[:, :2], atol=1e-3)
        np.testing.assert_allclose(np.cos(frame.pose[1:3, 2] - logged[:, 2]), 1.0, atol=1e-6)
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
    travelled = device_bank.arc_lengths(pose, present)
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


def crossing(steps: int, meets: float, speed: float) -> np.ndarray:
    """Poses of who comes from the right, northwards, and is on the x axis at x = 20 after `meets` seconds."""
    return line((20, -speed * meets), (0, speed), steps)


def test_a_reactive_vehicle_gives_way_to_who_will_cross_before_it() -> None:
    """By present poses alone it would brake only when the other one is in its corridor, a few metres ahead."""
    ego, mine = line((0, -60), (0, 0), T), line((-10, 0), (8, 0), T)
    first = crossing(T, 2.6, 9.0)  # is there while mine would be: at 3.1 .. 4.3 s with both bodies' lengths
    driven = trip(scenario([ego, mine, first], road=None, kinds=[VEHICLE, VEHICLE, PEDESTRIAN]), traffic="idm")
    pace = driven.states.reactive.speed[:, 1]
    assert pace[15:28].min() < 6.0  # slows down in time
    gap = separation_by_step(driven, 1, first)
    assert gap.min() > 0.5
    alone = trip(scenario([ego, mine], road=None), traffic="idm")
    assert alone.states.reactive.speed[:30, 1].min() > 7.0


def separation_by_step(driven: Trip, n: int, other: np.ndarray) -> np.ndarray:
    """A lower bound of the distance between a reactive vehicle on the x axis, from x = -10 on, and another box."""
    x = -10.0 + driven.states.reactive.s[:, n]
    aside = np.abs(other[1 : len(x) + 1, 1]) - 1.0 - 2.0
    ahead = np.abs(other[1 : len(x) + 1, 0] - x) - 2.0 - 1.0
    return np.maximum(aside, ahead)


def test_nobody_waits_for_who_crosses_long_before_or_after_it() -> None:
    ego, mine = line((0, -60), (0, 0), T), line((-10, 0), (8, 0), T)
    for meets in (0.2, 5.8):
        other = crossing(T, meets, 9.0)
        driven = trip(scenario([ego, mine, other], road=None, kinds=[VEHICLE, VEHICLE, PEDESTRIAN]), traffic="idm")
        assert driven.states.reactive.speed[:30, 1].min() > 6.5


def test_a_parked_car_that_the_log_passed_stops_no_reactive_vehicle() -> None:
    """A parked car two hands beside the logged way, nearer than the margin that is kept to traffic."""
    ego, mine, parked = line((0, -60), (0, 0), T), line((-20, 0), (8, 0), T), line((0, 2.05), (0, 0), T)
    driven = trip(scenario([ego, mine, parked], road=None), traffic="idm")
    assert driven.states.reactive.s[-1, 1] > 45.0
    blocking = trip(scenario([ego, mine, line((0, 1.5), (0, 0), T)], road=None), traffic="idm")
    assert blocking.states.reactive.s[-1, 1] < 20.0


def test_a_vehicle_goes_on_along_its_lane_where_the_log_ends() -> None:
    """The lane turns left in an arc of 20 m where the log stops, at 6 m/s; then it is driven on for three seconds."""
    steps = 41
    mine = line((-24, 0), (6, 0), steps)
    angle = ONWARD_SPACING * np.arange(1, ONWARD + 1) / 20.0
    arc = np.stack([20 * np.sin(angle), 20 - 20 * np.cos(angle)], -1).astype(np.float32)
    made = scenario([line((0, -60), (0, 0), steps), mine], road=None)
    made = made._replace(onward_of=np.array([1], np.int16), onward=arc)
    paths = driving(bank(made), Config(traffic="idm")).tables.paths
    assert float(paths.end[0, 1]) == pytest.approx(24.0 + ONWARD * ONWARD_SPACING, abs=0.1)
    place = jax.jit(lambda s: traffic.on_path(paths, jnp.int32(0), s))
    for s in np.linspace(1.0, 38.0, 12):
        x, y, heading = (float(v[1]) for v in place(jnp.full(16, 24.0 + s)))
        np.testing.assert_allclose([x, y], [20 * np.sin(s / 20), 20 - 20 * np.cos(s / 20)], atol=0.1)
        assert heading == pytest.approx(s / 20, abs=0.1)
    straight = driving(bank(made._replace(onward=arc + 50.0)), Config(traffic="idm")).tables.paths  # not where it ends
    assert float(straight.end[0, 1]) == pytest.approx(24.0 + device_bank.EXTENSION, abs=0.1)


def test_a_vehicle_that_is_held_up_does_not_vanish_on_its_way_and_stops_at_its_end() -> None:
    """The log loses it after two seconds; held up behind a standing ego it stays; without one it is gone in time."""
    ego, mine = line((0, 0), (0, 0), T), line((-20, 0), (8, 0), T)
    present = np.ones((T, 2), bool)
    present[21:, 1] = False
    assert presence(scenario([ego, mine], present=present)).all()
    free = presence(scenario([line((0, -60), (0, 0), T), mine], present=present, road=None))
    assert free[:18].all()
    assert not free[24:].any()
    tables_ = driving(bank(scenario([ego, mine])), Config(traffic="idm")).tables

    @jax.jit
    def pushed(s: jax.Array) -> tuple[jax.Array, traffic.Reactive]:
        state, t = traffic.reacting(s, jnp.zeros_like(s)), jnp.int32(5)
        here = traffic.scene_at(tables_, jnp.int32(0), t, still(), jnp.array([True]), state)
        return here.present, traffic.react(tables_, jnp.int32(0), t, here, state)

    there, after = pushed(jnp.full(16, 500.0))
    assert bool(there[1])
    assert float(after.s[1]) == pytest.approx(float(tables_.paths.end[0, 1]), abs=float(traffic.S_UNIT))
    assert float(after.speed[1]) == 0.0


def still() -> Motion:
    return Motion(*(jnp.zeros(1) for _ in Motion._fields))


inside = jax.jit(jax.vmap(traffic.inside, in_axes=(None, None, 0, 0)))


def presence(made: Scenario) -> np.ndarray:
    """bool [T]: whether agent 1 is in the world after each step."""
    paths, states = driving(bank(made), Config(traffic="idm")).tables.paths, trip(made, traffic="idm").states
    return np.asarray(inside(paths, jnp.int32(0), states.t, states.reactive))[:, 1] > 0.5


def test_who_appears_waits_until_his_place_is_free() -> None:
    """A vehicle that the log sees from 2 s on; first there stands the ego, then nobody."""
    mine = line((-5, 0), (4, 0), T)
    present = np.ones((T, 2), bool)
    present[:20, 1] = False
    entry = mine[20]
    free = trip(scenario([line((0, -60), (0, 0), T), mine], present=present, road=None), traffic="idm")
    assert (free.states.reactive.s[:19, 1] == traffic.OUTSIDE).all()
    assert free.states.reactive.s[19, 1] == 0.0
    assert free.states.reactive.speed[19, 1] == pytest.approx(4.0, abs=0.01)
    blocked = trip(scenario([line(entry[:2] + [2.0, 0.0], (0, 0), T), mine], present=present), traffic="idm")
    assert (blocked.states.reactive.s[:, 1] == traffic.OUTSIDE).all()
    assert blocked.metrics["collision"] == [0.0]


def test_constant_traffic_keeps_the_velocity_of_its_first_step() -> None:
    """Someone who turns, someone who comes later, and a car that only jitters."""
    t = DT * np.arange(T)
    angle = 0.25 * t
    turns = np.stack([20 * np.sin(angle), 20 - 20 * np.cos(angle), angle], -1)
    later = line((30, 5), (-3, 1), T)
    jitters = line((40, -3), (0.05, 0), T)
    present = np.ones((T, 4), bool)
    present[:20, 2] = False
    present[50:, 2] = False
    made = scenario([line((0, -60), (0, 0), T), turns, later, jitters], present=present, road=None)
    environment = driving(bank(made), Config(traffic="constant"))
    picture = jax.jit(lambda t: environment.frame(environment.start(0)[0]._replace(t=t)))
    start = np.hypot(*made.velocity[0, 1])
    for step in (0, 10, 20, 49, 60):
        frame = picture(jnp.int32(step))
        along = made.pose[0, 1, :2] + DT * step * made.velocity[0, 1]
        np.testing.assert_allclose(frame.pose[1], [*along, 0.0], atol=2e-2)
        assert np.asarray(frame.present[:4]).tolist() == [True, True, 20 <= step < 50, True]
        np.testing.assert_allclose(frame.pose[3], jitters[0], atol=2e-3)
        if 20 <= step < 50:
            np.testing.assert_allclose(frame.pose[2], later[step], atol=2e-2)
    assert start == pytest.approx(5.0, abs=0.05)
