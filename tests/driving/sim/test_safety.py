"""The safety check: what it stops in time and by which law, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longhaul.driving.scenario.scenario import GREEN, RED, Scenario
from longhaul.driving.sim import safety
from longhaul.driving.sim.config import Weights
from tests.helpers.driving_scenarios import DT, ENDLESS, STRAIGHT, Trip, line, scenario, trip

T, SPEED = 71, 12.0
EGO = line((0, 0), (SPEED, 0), T)
PUSH = (6, 6)
"""The discrete action of the strongest acceleration, 4 m/s^2."""

CHECKED: dict[str, Any] = ENDLESS | {"safety": True}
"""Settings of one program for all trips with the check, of one driver or two: it takes a quarter of a minute."""


def both(made: Scenario, actions: tuple[int, int] = STRAIGHT) -> tuple[Trip, Trip]:
    """The same trip without and with the check."""
    return trip(made, actions), trip(made, actions, **CHECKED)


def test_who_would_hit_a_wall_brakes_gently_before_it_and_no_sooner() -> None:
    wall = 60.0
    free, checked = both(scenario([EGO, line((wall, 0), (0, 0), T)]))
    assert free.metrics["collision"] == [1.0]
    assert checked.metrics["collision"][0] == 0.0
    speed, x = checked.states.motion.speed[:, 0], checked.states.motion.x[:, 0]
    braking = int(np.argmax(speed < SPEED - 1e-3))
    gap = wall - 4.0 - x[braking - 1]
    needed = SPEED * safety.HORIZON + 0.5 * safety.SOFT * safety.HORIZON**2  # as far as gentle braking is looked at
    assert needed < gap < needed + safety.STANDING + SPEED * (2 * DT + safety.STEP)
    assert speed[-1] < 1.0  # rolls up to it
    assert 0.0 < wall - 4.0 - x[-1] < 5.0
    assert checked.metrics["comfortable"][0] == 1.0
    assert checked.metrics["time_to_collision"][0] == 1.0


def test_who_pushes_on_behind_somebody_who_stands_comes_no_nearer_than_a_standing_gap() -> None:
    stands = line((12.0, 0), (0, 0), T)
    checked = trip(scenario([line((0, 0), (1.5, 0), T), stands]), PUSH, **CHECKED)
    x = checked.states.motion.x[:, 0]
    assert 0.6 * safety.STANDING < 12.0 - 4.0 - x[-1] < safety.STANDING + 1.0
    assert checked.states.motion.speed[-10:, 0].max() < 0.1


def test_who_is_in_the_way_counts_before_a_crowd_that_is_nearer() -> None:
    ego, wall = line((0, 0), (SPEED, 0), T), line((60.0, 0), (0, 0), T)
    crowd = [line((x, side * 3.6), (SPEED, 0), T) for x in (-6.0, -1.0, 4.0, 9.0, 14.0) for side in (-1, 1)]
    free, checked = both(scenario([ego, *crowd, wall], road=lambda x, y: np.abs(y) - 9.0))
    assert (free.metrics["collision"][0], checked.metrics["collision"][0]) == (1.0, 0.0)


LEFT = (3, 10)
"""The discrete action that holds the speed and steers to the left."""


def test_steering_over_the_edge_is_replaced_by_following_the_route() -> None:
    free, checked = both(scenario([line((0, 0), (8, 0), T)]), LEFT)
    assert (free.metrics["offroad"][0], checked.metrics["offroad"][0]) == (1.0, 0.0)
    y = checked.states.motion.y[:, 0]
    assert 1.0 < y.max() < 4.0  # on its way to the edge nothing is replaced
    assert checked.metrics["goal"][0] == 1.0


def test_where_the_route_leads_over_the_edge_the_agent_steers_beside_it() -> None:
    def road(x: np.ndarray, y: np.ndarray) -> np.ndarray:  # a kerb on the right reaches 0.1 m into the agent's way
        return np.where(np.abs(x - 30.0) < 4.0, np.maximum(np.abs(y) - 5.0, -0.9 - y), np.abs(y) - 5.0)

    free, checked = both(scenario([line((0, 0), (8, 0), T)], road=road))
    assert (free.metrics["offroad"][0], checked.metrics["offroad"][0]) == (1.0, 0.0)
    x, y = checked.states.motion.x[:, 0], checked.states.motion.y[:, 0]
    assert y[np.abs(x - 30.0) < 4.0].min() > 0.0 and np.abs(y[x < 34.0]).max() < 1.0
    assert checked.metrics["goal"][0] == 1.0


def test_steering_into_others_beside_the_route_is_replaced() -> None:
    parked = [line((x, 3.5), (0, 0), T) for x in np.arange(2.0, 60.0, 6.0)]
    made = scenario([line((0, 0), (6, 0), T), *parked], road=lambda x, y: np.abs(y) - 9.0)
    free, checked = both(made, LEFT)
    assert (free.metrics["collision"][0], checked.metrics["collision"][0]) == (1.0, 0.0)


@pytest.mark.slow
def test_a_bend_is_met_slowly_enough() -> None:
    radius, away = 12.0, 40.0
    made = scenario([EGO])
    s = np.arange(made.route.shape[1], dtype=np.float32)
    angle = np.maximum(s - away, 0.0) / radius
    x = np.where(s < away, s, away + radius * np.sin(angle))
    made.route[0] = np.stack([x, radius * (1.0 - np.cos(angle)), angle], -1)
    checked = trip(made, **CHECKED)
    speed, there = checked.states.motion.speed[:, 0], checked.states.motion.x[:, 0]
    assert speed[there < 3.0].min() == pytest.approx(SPEED)  # not before it must
    assert speed[int(np.argmax(there > away - 1.0))] <= np.sqrt(safety.BEND * radius) + 0.5


def test_a_red_light_holds_whoever_would_pass_it() -> None:
    stop = 50.0
    free, checked = both(scenario([EGO], lights=[(stop, [RED] * T)]), PUSH)
    assert (free.metrics["red_light"][0], checked.metrics["red_light"][0]) == (1.0, 0.0)
    assert checked.states.s[-1, 0] + 2.0 <= stop


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([line((60, -30), (0, 6), T)], id="somebody crosses"),
        pytest.param([line((20, 0), (4, 0), T)], id="a slow leader"),
        pytest.param([line((90, 0), (-3, 0), T)], id="somebody comes the wrong way"),
    ],
)
def test_collisions_that_a_driver_can_avoid_are_avoided(others: list[np.ndarray]) -> None:
    free, checked = both(scenario([EGO, *others]))
    assert (free.metrics["collision"][0], checked.metrics["collision"][0]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(scenario([EGO]), id="empty"),
        pytest.param(scenario([EGO, line((0, 3.0), (SPEED, 0), T)]), id="beside"),
        pytest.param(scenario([EGO, line((-60, 0), (SPEED + 3, 0), T)], lights=[(60.0, [GREEN] * T)]), id="behind"),
        pytest.param(scenario([EGO, line((60, -45), (0, 2), T)]), id="somebody crosses after it"),
    ],
)
def test_safe_commands_are_left_alone(made: Scenario) -> None:
    checked = trip(made, **CHECKED)
    np.testing.assert_allclose(checked.states.motion.speed[:, 0], SPEED, atol=1e-5)


def test_a_choice_of_acceleration_is_approached_within_the_limit_of_jerk() -> None:
    checked = trip(scenario([line((0, 0), (3, 0), T)]), PUSH, **CHECKED)
    felt = checked.states.acceleration[:, 0].astype(np.float64)
    assert np.abs(np.diff(felt)).max() <= safety.PUSHING_JERK * DT + 0.01
    assert felt[:12].max() == pytest.approx(safety.GENTLE[1], abs=0.01)  # PUSH asks for 4 m/s^2
    assert checked.metrics["comfortable"][0] == 1.0


def test_a_command_that_is_replaced_costs_its_share() -> None:
    made = scenario([EGO, line((60, 0), (0, 0), T)])
    nothing = dict.fromkeys(("progress", "collision", "goal", "discomfort", "haste", "lateral", "heading"), 0.0)
    weights = Weights(**nothing, unsafe=-0.5)
    checked = trip(made, **CHECKED, weights=weights)
    speed = checked.states.motion.speed[:, 0]
    cost = checked.steps.reward[:, 0]
    first = int(np.argmax(speed < SPEED - 1e-3))
    assert cost[first] == -0.5 and not cost[:first].any()
    assert trip(made, weights=weights).steps.reward.sum() == 0.0


def crossing(angle: float, behind: float = 0.0, steps: int = 121) -> Scenario:
    """Two drivers whose straight ways cross at `angle`, degrees, 16 m ahead of the one and `behind` metres more of the
    other."""
    cos, sin, away = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle)), 16.0 + behind
    other = line((16.0 - away * cos, -away * sin), (4.0 * cos, 4.0 * sin), steps)
    return scenario([line((0, 0), (4.0, 0), steps), other], drivers=2, road=None)


@pytest.mark.parametrize("angle", [30, 60, 90, 120, -60, -90])
@pytest.mark.parametrize("behind", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_two_who_would_wait_for_each_other_both_arrive(angle: float, behind: float) -> None:
    made = crossing(angle, behind)
    checked = trip(made, PUSH, **CHECKED)
    assert checked.metrics["collision"][:2] == [0.0, 0.0]
    assert checked.metrics["goal"][:2] == [1.0, 1.0]
    # the one that goes first is not even made to stand
    assert checked.states.motion.speed[:30, :2].min(0).max() > 0.5


def test_of_two_who_come_to_a_crossing_as_soon_the_one_from_the_right_goes_first() -> None:
    for angle, first in ((90, 1), (-90, 0)):
        s = trip(crossing(angle), PUSH, **CHECKED).states.s
        passed = np.argmax(s > 20.0, axis=0)
        assert passed[first] < passed[1 - first]


@pytest.mark.parametrize("behind", [0.0, 1.0, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("actions", [STRAIGHT, PUSH])
def test_who_drives_almost_the_same_way_and_comes_nearer_is_not_taken_to_stay_beside(
    behind: float, actions: tuple[int, int]
) -> None:
    made = crossing(20.0, behind)
    checked = trip(made, actions, **CHECKED)
    assert checked.metrics["collision"][:2] == [0.0, 0.0]
