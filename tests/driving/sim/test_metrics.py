"""Metrics of whole episodes by hand and of real logs, against a slow reference too; their pieces, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import CYCLIST, LANE_BIKE, LANE_STREET, PEDESTRIAN, Feature, Log
from longhaul.driving.scenario.bank import stack
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.lane_graph import BLOCK, lay_grid, make_road
from longhaul.driving.scenario.scenario import GREEN, RED, Scenario
from longhaul.driving.sim import metrics
from longhaul.driving.sim.config import Config, Weights
from longhaul.driving.sim.features import front_inside, time_to_contact
from longhaul.driving.sim.geometry import Relative
from longhaul.driving.sim.metrics import Course
from longhaul.driving.sim.reward import Ride
from longhaul.driving.sim.simulator import Simulator, State, driving
from tests.helpers import reference_driving_metrics as reference
from tests.helpers.driving_scenarios import DT, Trip, line, scenario, trip
from tests.helpers.measured_drives import ON_LANES, compare, lane_of, motions, world_of

T = 51

AWAY = (0.0, 60.0)

EGO = line((0, 0), (6, 0), T)

BAD = {"collision", "at_fault_collision", "offroad", "red_light", "wrong_way", "off_route", "kinematic_infeasibility"}

GOOD = {"accuracy", "progress", "making_progress", "goal", "time_to_collision", "comfort", "comfortable"}
GOOD |= {"speed_limit", "lanes", "driving_direction"}


# --------------------------------------------------------------------------------------------------------- by hand


def street(*rows: Sequence[Sequence[float]], limit: float | None = 12.0, kind: int = LANE_STREET) -> list[Feature]:
    """Lanes through the given points."""
    points = [np.array([(*p, 0.0) for p in row]) for row in rows]
    dense = [np.concatenate([np.linspace(p[0], p[1], 40), p[2:]]) for p in points]
    return [Feature(i, kind, p, speed_limit=limit) for i, p in enumerate(dense)]


EAST = ((-20, 0), (80, 0))

WEST = ((80, 3.5), (-20, 3.5))

SOUTH_EAST = ((-20, -3.5), (80, -3.5))


def mapped(made: Scenario, features: Sequence[Feature]) -> Scenario:
    """A scenario with these lanes."""
    near = np.concatenate([np.append(r[:, :2], 0.0 * r[:, :1], 1) for r in made.route[:, :100].astype(float)])
    road = make_road(features, near, np.zeros(3), flow=9.0)  # what agents see; scores go by the kind
    return made._replace(road=lay_grid(road, made.route, made.route_length, made.route_points))


def driven(
    poses: Sequence[np.ndarray],
    features: Sequence[Feature] = (),
    driver: str = "log",
    aside: float = 0.0,
    **world: Any,
) -> tuple[dict[str, float | None], Trip]:
    """The metrics of the first of `poses` as the log has it (None where not valid), and agree with the reference. Its
    route lies `aside` to its right."""
    made = scenario(poses, points=100, **world)
    made = mapped(made._replace(route=made.route - np.array([0.0, aside, 0.0], np.float32)), features)
    went = trip(made, driver=driver, terminations=())
    found = {name: (value[0], went.valid[name][0]) for name, value in went.metrics.items()}
    start = tuple(np.append(poses[0][0], np.hypot(*made.velocity[0, 0])).astype(np.float32)[:, None])
    motion = motions(start, went.states.motion)
    lanes = [lane_of(feature, np.zeros(3)) for feature in features]
    compare(found, world_of(made, motion, 0, lanes, np.ones(motion.shape[:2], bool), driver == "log"), "by hand")
    return {name: value if valid else None for name, (value, valid) in found.items()}, went


def speeds(values: np.ndarray, start: Sequence[float] = (0.0, 0.0)) -> np.ndarray:
    """Poses along x at these speeds."""
    x = start[0] + np.append(0.0, np.cumsum(0.5 * DT * (values[1:] + values[:-1])))
    return np.stack([x, np.full(len(x), start[1]), np.zeros(len(x))], -1).astype(np.float32)


def test_an_even_drive_in_its_lane_is_without_fault() -> None:
    found, _ = driven([EGO, line((30, 12), (0, 0), T)], street(EAST, SOUTH_EAST), lights=[(15.0, [GREEN] * T)])
    assert all(found[name] == 0.0 for name in BAD)
    assert all(found[name] == 1.0 for name in GOOD)
    assert found["smallest_ttc"] is None, "nobody was ahead"
    assert found["progression"] == pytest.approx(1.0, abs=1e-3)
    assert found["log_divergence"] == pytest.approx(0.0, abs=1e-2)
    assert found["final_divergence"] == pytest.approx(0.0, abs=1e-2)


def test_metrics_of_unknown_lanes_lights_and_edges_are_not_valid() -> None:
    """No lanes, no lights, no edges; and the log has lost the agent from step 20 on."""
    found, _ = driven([EGO, line(AWAY, (0, 0), T)], road=None)
    unknown = {"offroad", "red_light", "wrong_way", "speed_limit", "lanes", "driving_direction", "smallest_ttc"}
    assert {name for name, value in found.items() if value is None} == unknown
    assert found["accuracy"] == 1.0


def test_lanes_far_away_and_lanes_for_bicycles_tell_a_vehicle_nothing() -> None:
    beyond = ((-20, 6.0), (80, 6.0))
    for features in (street(beyond), street(EAST, kind=LANE_BIKE)):
        found, _ = driven([EGO, line(AWAY, (0, 0), T)], features)
        assert found["speed_limit"] is None and found["driving_direction"] is None and found["lanes"] is None
    found, _ = driven([EGO, line(AWAY, (0, 0), T)], street(EAST, kind=LANE_BIKE), kinds=[CYCLIST, 1])
    assert found["driving_direction"] == 1.0


def test_pedestrians_may_leave_the_road_and_its_rules() -> None:
    walk = line((0, -9), (1.2, 0), T)
    found, _ = driven([walk, line(AWAY, (0, 0), T)], street(WEST), kinds=[PEDESTRIAN, 1], sizes=[(0.8, 0.8), (4, 2)])
    unknown = {"offroad", "red_light", "wrong_way", "speed_limit", "lanes", "driving_direction"}
    assert {name for name, value in found.items() if value is None} >= unknown
    assert found["goal"] == 1.0


def test_a_log_that_never_moves_has_made_all_progress() -> None:
    found, _ = driven([line((0, 0), (0, 0), T), line(AWAY, (0, 0), T)])
    assert found["progress"] == found["making_progress"] == found["goal"] == 1.0
    assert found["progression"] is None


@pytest.mark.parametrize(
    ("me", "other", "kind", "blamed"),
    [
        (line((0, 0), (6, 0), T), line((20, 0), (2, 0), T), 1, True),  # runs into somebody slower
        (line((0, 0), (6, 0), T), line((20, 0), (0, 0), T), 1, True),  # into somebody who stands
        (line((30, 0), (2, 0), T), line((0, 0), (9, 0), T), 1, False),  # is run into
        (line((30, 0), (0, 0), T), line((0, 0), (9, 0), T), 1, False),  # likewise, standing
        (line((0, 0), (0, 0), T), line((0, 14), (0, -4), T), PEDESTRIAN, False),  # is walked into, standing
        (line((0, 0), (5, 0), T), line((16, 10), (0, -3.2), T), PEDESTRIAN, True),  # hits a pedestrian with its side
        (line((0, 0), (6, 0), T), line((10.5, 12), (0, -5), T), 1, False),  # is hit in its side, in one lane
    ],
)
def test_who_is_at_fault_for_a_collision(me: np.ndarray, other: np.ndarray, kind: int, blamed: bool) -> None:
    found, _ = driven([me, other], street(EAST), kinds=[1, kind], sizes=[(4, 2), (4, 2) if kind == 1 else (0.8, 0.8)])
    assert found["collision"] == 1.0
    assert found["at_fault_collision"] == float(blamed)
    assert found["accuracy"] == 0.0


def test_who_changes_lanes_is_at_fault_for_a_collision_at_its_side() -> None:
    """A faster vehicle beside it, whose front is ahead when they touch."""
    drift = line((0, 0), (6, 0), T)
    drift[:, 1] = np.linspace(0, -2.2, T)
    beside = line((-0.5, -3.5), (6, 0), T)
    found, _ = driven([drift, beside], street(EAST, SOUTH_EAST), sizes=[(4, 2), (3.2, 2)])
    assert (found["collision"], found["at_fault_collision"]) == (1.0, 1.0)
    found, _ = driven([drift, beside], street(EAST), sizes=[(4, 2), (3.2, 2)])
    assert (found["collision"], found["at_fault_collision"]) == (1.0, 0.0), "with one lane known, it kept to it"


@pytest.mark.parametrize(("speed", "grade"), [(1.9, 1.0), (3.0, 0.5), (5.9, 0.5), (7.0, 0.0)])
def test_driving_against_the_traffic_is_graded_by_its_metres(speed: float, grade: float) -> None:
    """Metres within one second, by the speed."""
    poses = [line((0, 3.5), (speed, 0), T), line(AWAY, (0, 0), T)]
    found, _ = driven(poses, street(WEST), aside=3.0)
    assert found["driving_direction"] == grade
    assert found["wrong_way"] == 0.0, "it is near its route"
    assert driven(poses, street(WEST))[0]["driving_direction"] == 1.0, "its route leads there"


def test_a_short_way_against_the_traffic_counts_by_its_length() -> None:
    """0.4 s at 7 m/s in the other lane: 2.8 m."""
    poses = line((0, 0), (7, 0), T)
    poses[20:24, 1] = 3.5
    found, _ = driven([poses, line(AWAY, (0, 0), T)], street(EAST, WEST))
    assert found["driving_direction"] == 0.5


def test_beside_the_route_and_far_from_every_lane() -> None:
    """The route leads straight on; the log leaves it sideways. By 3.6 m it is on no way, by 5.1 m off the route."""
    for aside, lanes, wrong, astray in (
        (3.4, street(EAST), 0.0, 0.0),
        (3.8, street(EAST), 1.0, 0.0),
        (3.8, street(EAST, SOUTH_EAST), 0.0, 1.0),
        (5.3, street(EAST), 1.0, 1.0),
    ):
        poses = line((0, 0), (6, 0), T)
        poses[10:, 1] = -np.minimum(np.arange(T - 10) * 0.2, aside)
        found, _ = driven([poses, line(AWAY, (0, 0), T)], lanes, road=None)
        assert (found["wrong_way"], found["off_route"]) == (wrong, astray), aside


@pytest.mark.parametrize(("seconds", "grade"), [(0.0, 1.0), (3.4, 1.0), (3.5, 0.5), (5.7, 0.5), (5.8, 0.0)])
def test_time_between_lanes_is_graded_by_its_seconds(seconds: float, grade: float) -> None:
    steps = 81
    poses = line((0, 0), (4, 0), steps)
    poses[10 : 10 + round(seconds / DT), 1] = -1.75
    found, _ = driven([poses, line(AWAY, (0, 0), steps)], street(EAST, SOUTH_EAST))
    assert found["lanes"] == grade


def test_speeding_costs_its_share() -> None:
    """10 % above 12 m/s: 1 - 1.2 / 2.23. Within limits that nobody wrote down, the log's own speed is right."""
    poses = line((0, 0), (13.2, 0), T)
    found, _ = driven([poses, line(AWAY, (0, 0), T)], street(EAST, limit=12.0))
    assert found["speed_limit"] == pytest.approx(1.0 - 1.2 / 2.23, abs=2e-3)
    slow, _ = driven([line((0, 0), (10, 0), T), line(AWAY, (0, 0), T)], street(EAST, limit=12.0))
    assert slow["speed_limit"] == 1.0
    fast, _ = driven([line((0, 0), (15, 0), T), line(AWAY, (0, 0), T)], street(EAST, limit=12.0))
    assert fast["speed_limit"] == 0.0
    rush = line((0, 0), (23, 0), 35)
    unknown, _ = driven([rush, line(AWAY, (0, 0), 35)], street(EAST, limit=None))
    assert unknown["speed_limit"] == 1.0


@pytest.mark.slow
def test_the_conduct_that_the_scores_judge_is_paid_for_as_it_is_judged() -> None:
    """2 m/s above the limit all the way, and from 1 s on a jerk beyond nuPlan's; the ego sees the limit beside its
    other numbers."""
    config = {"progress": 0.0, "goal": 0.0, "discomfort": 0.0, "haste": 0.0, "lateral": 0.0, "heading": 0.0}
    only = {name: Weights(**config, **{name: -1.0}) for name in ("speeding", "unease", "near_collision")}
    shown: dict[str, Any] = {"terminations": (), "speed_limit": True}
    even = mapped(scenario([line((0, 0), (6, 0), T)], points=100), street(EAST, limit=4.0))
    paid = trip(even, weights=only["speeding"], **shown).steps
    np.testing.assert_allclose(paid.reward[:, 0], -2.0, atol=1e-5)
    np.testing.assert_allclose(paid.observation.ego[:, 0, -3:], [[1.0, 0.2, 0.5]] * (T - 1), atol=1e-6)
    assert trip(even, weights=only["unease"], **shown).steps.reward.sum() == 0.0
    abrupt = trip(even, (6, 6), weights=only["unease"], **shown)  # 4 m/s^2 in the first step, above 2.4
    assert abrupt.metrics["comfortable"] == [0.0] and abrupt.steps.reward.sum() < -1.0
    ahead = scenario([line((0, 0), (6, 0), T), line((20, 0), (0, 0), T)])
    near = trip(ahead, weights=only["near_collision"], **shown).steps.reward[:, 0]
    assert np.flatnonzero(near).tolist()[0] == 17  # 16 m between the boxes; 0.95 s are 5.7 m: after 10.3 m, 17.2 steps


def test_an_acceleration_within_what_is_gentle_can_be_held_and_no_more() -> None:
    """A thousand states of who is at ease: the bounds held for 2 s, and a little more than they."""
    rng = np.random.default_rng(0)
    felt, jerk = (rng.uniform(-most, most, 1000) for most in (3.0, 3.9))
    zeros = jnp.zeros(1000)
    scale = 1.0 / metrics.FELT_UNIT
    tally = metrics.begin(1000, zeros)._replace(
        felt=jnp.int16(felt * scale), jerk=jnp.int16(jerk * scale), steps=jnp.full(1000, 5, jnp.int16)
    )
    course = Course(jnp.int32(5), jnp.float32(0.1), zeros, jnp.float32(0.0), zeros, zeros > 0.0)

    def worst(held: jax.Array) -> np.ndarray:
        now, found = tally, []
        for _ in range(20):
            comfort = metrics.smoothed(now, Ride(held, zeros, zeros, zeros), course)
            now = now._replace(felt=comfort.felt, jerk=comfort.jerk)
            found.append(np.abs(np.asarray(comfort.jerk, float)) * metrics.FELT_UNIT)
        return np.max(found, axis=0)

    low, high = metrics.gentle_range(tally, course.dt)
    for bound, way in ((low, -1.0), (high, 1.0)):
        assert worst(bound).max() < metrics.MAX_JERK
        assert worst(bound + 0.1 * way).min() > metrics.EASY_JERK


@pytest.mark.parametrize(
    ("other", "smallest"),
    [
        (line((60, 0), (-4, 0), T), 0.6),  # head-on, 60 m at 10 m/s less 4 m of boxes: 5.6 s, 0.6 s after five
        (line((20, 0), (6, 0), T), None),  # as fast
        (line((30, 0), (4, 0), T), 8.0),  # 26 m at 2 m/s: 13 s, 8 s after five
        (line((50, 20), (0, -8), T), None),  # passes long before
        (line((-8, 0), (6.5, 0), T), None),  # behind
    ],
)
def test_time_to_collision_by_hand(other: np.ndarray, smallest: float | None) -> None:
    found, _ = driven([EGO, other])
    if smallest is None or smallest >= 5.0:
        assert found["smallest_ttc"] is None
        assert found["time_to_collision"] == 1.0
    else:
        assert found["smallest_ttc"] == pytest.approx(smallest, abs=0.03)
        assert found["time_to_collision"] == float(smallest >= 0.95)


@pytest.mark.slow
def test_time_to_collision_with_crossing_traffic() -> None:
    """It comes from the left at 6 m/s and would be met where the ways cross, but is through in time."""
    crossing = line((34, 20), (0, -6), T)
    found, _ = driven([EGO, crossing])
    assert found["collision"] == 0.0
    assert found["smallest_ttc"] is not None or found["time_to_collision"] == 1.0
    brake = speeds(np.maximum(6.0 - 3.0 * DT * np.arange(T), 0.0))
    stops, _ = driven([brake, line((10.5, 0), (0, 0), T)])  # stops after 6 m with 0.5 m left
    assert (stops["collision"], stops["at_fault_collision"]) == (0.0, 0.0)
    assert stops["smallest_ttc"] is not None


def test_comfort_by_hand() -> None:
    """Gentle, a hard brake, a jerk in one step that smoothing forgives, and a swerve."""
    ramp = np.clip(0.15 * np.arange(T), 0, 6)
    gentle, _ = driven([speeds(ramp), line(AWAY, (0, 0), T)])
    assert gentle["comfortable"] == gentle["comfort"] == 1.0
    hard, _ = driven([speeds(np.clip(12.0 - 0.6 * np.arange(T), 0, 12)), line(AWAY, (0, 0), T)])
    assert hard["comfortable"] == 0.0
    assert 0.5 < hard["comfort"] < 0.65, "19 or 20 of 50 steps brake at 6 m/s^2"
    twitch = np.full(T, 6.0)
    twitch[25:] += 0.4
    bumped, _ = driven([speeds(twitch), line(AWAY, (0, 0), T)])
    assert bumped["comfortable"] == 1.0
    assert bumped["comfort"] < 1.0
    swerve = line((0, 0), (8, 0), T)
    swerve[:, 2] = 0.3 * np.sin(np.arange(T) * DT * 4.0)
    swung, _ = driven([swerve, line(AWAY, (0, 0), T)])
    assert swung["comfortable"] == 0.0
    assert swung["kinematic_infeasibility"] == 0.0


def test_motion_beyond_a_vehicle_s_limits_is_infeasible() -> None:
    spin = line((0, 0), (2, 0), T)
    spin[25:, 2] += 0.5  # 0.5 rad within 0.2 m
    assert driven([spin, line(AWAY, (0, 0), T)])[0]["kinematic_infeasibility"] == 1.0
    stands = line((0, 0), (0, 0), T)
    stands[25:, 2] += 0.1
    assert driven([stands, line(AWAY, (0, 0), T)])[0]["kinematic_infeasibility"] == 0.0
    leap = np.full(T, 4.0)
    leap[25:] = 6.5
    assert driven([speeds(leap), line(AWAY, (0, 0), T)])[0]["kinematic_infeasibility"] == 1.0


@pytest.mark.slow
def test_divergence_is_the_mean_distance_to_the_log_while_it_is_known() -> None:
    """At a constant 6 m/s, while the log brakes to 3 m/s and is lost from step 31 on."""
    log = speeds(np.concatenate([np.full(11, 6.0), np.full(T - 11, 3.0)]))
    present = np.ones((T, 2), bool)
    present[31:, 0] = False
    found, _ = driven([log, line(AWAY, (0, 0), T)], driver="constant", present=present)
    gaps = np.abs(6.0 * DT * np.arange(1, 31) - log[1:31, 0])
    assert found["log_divergence"] == pytest.approx(gaps.mean(), abs=0.02)
    assert found["final_divergence"] == pytest.approx(gaps[-1], abs=0.02)
    whole = log[-1, 0] - log[0, 0]
    assert found["progression"] == pytest.approx(30.0 / whole, abs=5e-3)
    assert found["progress"] == 1.0


def test_a_red_light_and_one_that_is_unknown() -> None:
    for state, ran in ((RED, 1.0), (GREEN, 0.0), (0, None)):
        found, _ = driven([EGO, line(AWAY, (0, 0), T)], lights=[(15.2, [state] * T)])
        assert found["red_light"] == ran


# ------------------------------------------------------------------------------------------------ pieces, many at once


@pytest.mark.slow
def test_time_to_contact_against_small_steps() -> None:
    rng = np.random.default_rng(3)
    count = 400
    x, y = rng.uniform(-25, 25, (2, count))
    angle, vx, vy = rng.uniform(-np.pi, np.pi, count), *rng.uniform(-12, 12, (2, count))
    half, other = (2.3, 1.0), tuple(rng.uniform(0.3, 3.0, (2, count)))
    place = (jnp.float32(v) for v in (x, y, np.cos(angle), np.sin(angle)))
    told = time_to_contact(Relative(*place, half, other, jnp.float32(vx), jnp.float32(vy)))
    mine = reference.corners((0.0, 0.0, 0.0, *half))
    touched = 0
    for i in range(count):

        def gap(t: float, i: int = i) -> float:
            box = (x[i] + t * vx[i], y[i] + t * vy[i], angle[i], other[0][i], other[1][i])
            return reference.gap(mine, reference.corners(box))

        first = float(told[i])
        if first < 20.0:
            touched += 1
            assert gap(first) < 1e-4 if first == 0.0 else gap(first) == pytest.approx(0.0, abs=2e-4)
            assert all(gap(t) > -1e-4 for t in np.linspace(0.0, first, 20)[:-1] if first > 0.0)
        else:
            assert all(gap(t) > -1e-4 for t in np.linspace(0.0, 12.0, 241))
    assert touched > 30


def test_the_bumper_inside_a_box() -> None:
    rng = np.random.default_rng(4)
    for _ in range(500):
        x, y, angle = *rng.uniform(-6, 6, 2), rng.uniform(-np.pi, np.pi)
        half, other = (2.3, 1.0), tuple(rng.uniform(0.3, 3.0, 2))
        place = [np.float32(v) for v in (x, y, np.cos(angle), np.sin(angle))]
        told = bool(front_inside(Relative(*place, half, other)))  # type: ignore[arg-type]
        bumper = reference.corners((0.0, 0.0, 0.0, *half))[:2]
        gap = reference.gap(bumper, reference.corners((x, y, angle, *other)))
        if abs(gap) > 1e-4:
            assert told == (gap < 0.0)


# ------------------------------------------------------------------------------------------------------- real logs


def drive_all(environment: Simulator, seed: int) -> tuple[Any, Any, Any]:
    """Every scenario of a bank to the end of the longest: -> states' motion and playing [S, T+1, ...] and metrics by
    step [S, T, ...]."""
    steps = environment.spec.max_steps
    shape = (environment.scenarios, steps, environment.config.agents, 2)
    rng = np.random.default_rng(seed)  # actions that are held for half a second, mostly gentle
    gentle = np.stack([rng.choice([2, 3, 4, 5], shape[:3]), rng.choice([4, 5, 6, 6, 7, 8], shape[:3])], -1)
    plan = np.repeat(gentle[:, ::5], 5, axis=1)[:, :steps].astype(np.int32)

    def one(index: jax.Array, actions: jax.Array) -> Any:
        state, _ = environment.start(index)

        def body(state: State, action: jax.Array) -> Any:
            after, _ = environment.step(jax.random.key(0), state, action)
            return after, (after.motion, environment.active(state), environment.metrics(after))

        motion, playing, metrics = jax.lax.scan(body, state, actions)[1]
        whole = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), state.motion, motion)
        return whole, playing, metrics

    return jax.device_get(jax.jit(jax.vmap(one))(jnp.arange(environment.scenarios), plan))


def is_mapped(made: Scenario, place: np.ndarray) -> bool:
    """True where all places [T, 2] are in blocks of the scenario's own: some 8 m around its routes."""
    blocks = np.floor((place - made.road.corner) / BLOCK).astype(int)
    return {tuple(block) for block in blocks.tolist()} <= {tuple(cell) for cell in made.road.cells.tolist()}


def lanes_of(log: Log, made: Scenario) -> list[reference.Lane]:
    """The lanes of a log on the ego's level, relative to its scenario's origin."""
    origin = log.tracks.position[log.sdc, log.current]
    height = log.tracks.position[log.sdc, log.current : log.current + made.steps, 2]
    features = [f for f in log.features if f.kind <= LANE_BIKE and len(f.points) > 1]
    level = [f for f in features if np.abs(f.points[:, 2, None] - height[None]).min() < 4.0]
    return [lane_of(f, origin) for f in level]


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["log", "constant", "policy"])
def test_real_logs_agree_with_the_reference(logs: Path, driver: str) -> None:
    folders, agents = [str(logs / name) for name in ("womd", "gpudrive", "scenarionet")], 2
    real = [log for path in readers.expand(folders) for log in readers.read(path)]
    scenarios = [scenario_from_log(log, agents=agents) for log in real]
    environment = driving(stack(scenarios, agents=agents), Config(agents=agents, driver=driver, terminations=()))
    motion, playing, metrics = drive_all(environment, 5)
    compared = vague = inside = 0
    for i, (log, made) in enumerate(zip(real, scenarios, strict=True)):
        lanes = lanes_of(log, made)
        moved = np.stack([np.asarray(part[i])[: made.steps] for part in motion], -1)
        there = np.concatenate([playing[i][: made.steps - 1], playing[i][made.steps - 2 : made.steps - 1]])
        for agent in np.flatnonzero(made.controlled >= 0):
            found = {
                name: (float(m.value[i, made.steps - 2, agent]), bool(m.valid[i, made.steps - 2, agent]))
                for name, m in metrics.items()
            }
            world = world_of(made, moved, int(agent), lanes, there, driver == "log")
            mapped = is_mapped(made, moved[:, agent, :2])
            vague += compare(found, world, f"{made.id}, agent {agent}, {driver}", mapped)
            compared += len(found) - len(ON_LANES) * (not mapped)
            inside += mapped
    assert compared > 20 * len(real)
    assert inside >= len(real) / 2
    assert vague < 0.02 * compared, "thresholds are met too often to say that verdicts agree"
