"""Whole episodes with known outcomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.scenario.bank import stack
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import GREEN, RED, Scenario
from longhaul.driving.sim import metrics, reward, traffic
from longhaul.driving.sim.config import MAX_WAYPOINTS, Config, Weights
from longhaul.driving.sim.observation import waypoint_offsets
from longhaul.driving.sim.simulator import driving
from longhaul.spaces import Measure
from tests.helpers.driving_scenarios import DT, ENDLESS, STRAIGHT, Trip, bank, line, scenario, trip
from tests.helpers.environment_contract import check_environment

T = 51
EGO = line((0, 0), (6, 0), T)  # 30 metres
CLEAN = {"accuracy": [1.0], "collision": [0.0], "offroad": [0.0], "red_light": [0.0], "progress": [1.0], "goal": [1.0]}


def outcome(driven: Trip) -> dict[str, list[float]]:
    return {name: driven.metrics[name] for name in CLEAN}


@pytest.mark.parametrize(
    "driver", ["policy", *(pytest.param(driver, marks=pytest.mark.slow) for driver in ("idm", "log", "constant"))]
)
def test_who_keeps_to_a_clean_log_scores_all(driver: str) -> None:
    driven = trip(scenario([EGO, line((10, 4), (6, 0), T)]), driver=driver)
    assert outcome(driven) == CLEAN
    if driver != "idm":
        assert driven.metrics["log_divergence"] == pytest.approx([0.0], abs=1e-3)
        assert driven.metrics["comfort"] == [1.0]
    ended = int(np.argmax(driven.steps.terminated[:, 0])) + 1
    assert driven.steps.terminated.sum() == 1
    assert driven.steps.truncated.sum() == 0
    if driver != "idm":  # 2 % of 30 m before its end
        assert ended in (49, 50)  # there at 29.4 m, but for the millimetres that routes are rounded by


TERMS = Weights(progress=0.5, goal=3.0, lateral=0.0, heading=0.0, discomfort=0.0)


@pytest.mark.slow
def test_the_return_is_made_of_the_terms() -> None:
    driven = trip(scenario([EGO]), weights=TERMS, terminations=())
    there = int(np.argmax(driven.steps.reward[:, 0]))
    np.testing.assert_allclose(np.delete(driven.steps.reward[:, 0], there), 0.5 * 0.6, atol=3e-3)  # routes are rounded
    assert there in (48, 49)  # 29.4 m, 2 % before the end
    assert driven.steps.reward[there, 0] == pytest.approx(0.3 + 3.0, abs=3e-3)
    assert not driven.steps.terminated.any()


def own_terms(step: reward.Step) -> jax.Array:
    """The terms of `TERMS` by the user's own function."""
    return 0.5 * step.metres + 3.0 * (step.events.goal & ~step.happened.goal)


def one_number(step: reward.Step) -> jax.Array:
    return jnp.sum(step.metres)


@pytest.mark.slow
def test_a_reward_of_the_users_own_takes_the_place_of_the_terms() -> None:
    still = replace(TERMS, collision=0.0, offroad=0.0, red_light=0.0, haste=0.0)
    terms, own = (trip(scenario([EGO]), terminations=(), **how) for how in (
        {"weights": still}, {"reward": f"{__name__}:own_terms"},
    ))  # fmt: skip
    np.testing.assert_allclose(own.steps.reward, terms.steps.reward, rtol=1e-6)
    assert own.steps.reward.max() > 3.0 and own.metrics == terms.metrics
    with pytest.raises(ValueError, match=r"one_number returns float32\[\]; it must be float32\[1\], an agent each"):
        trip(scenario([EGO]), reward=f"{__name__}:one_number")


def test_progress_beyond_the_goal_is_worth_nothing() -> None:
    slow = line((0, 0), (2, 0), T)  # 10 metres; the policy keeps 6 m/s
    made = scenario([slow])._replace(velocity=np.gradient(EGO[:, None, :2], DT, axis=0).astype(np.float32))
    driven = trip(made, weights=TERMS, **ENDLESS)
    assert driven.steps.reward.sum() == pytest.approx(0.5 * 10.0 + 3.0, abs=1e-3)
    assert driven.metrics["progress"][0] == 1.0


def test_a_collision_is_seen_at_the_step_at_which_boxes_meet() -> None:
    # 4 m long both: they touch when the ego has come 16 m, at 0.6 m a step in step 27 (16.2 m)
    driven = trip(scenario([EGO, line((20, 0), (0, 0), T)]))
    assert driven.metrics["collision"] == [1.0]
    assert driven.metrics["accuracy"] == [0.0]
    assert driven.metrics["progress"] == pytest.approx([16.2 / 30.0], abs=1e-3)
    assert np.flatnonzero(driven.steps.terminated[:, 0]).tolist() == [26]
    assert driven.steps.reward[26, 0] == pytest.approx(-4.0 + 0.06 - 0.1, abs=1e-3)  # the event, the way, the haste


def test_an_agent_that_the_log_does_not_have_is_no_obstacle() -> None:
    present = np.ones((T, 2), bool)
    present[20:, 1] = False
    assert outcome(trip(scenario([EGO, line((20, 0), (0, 0), T)], present=present))) == CLEAN


def test_without_its_termination_an_event_counts_but_does_not_end() -> None:
    driven = trip(scenario([EGO, line((15, 0), (0, 0), T)]), weights=TERMS, **ENDLESS)
    assert driven.metrics["collision"][0] == 1.0
    assert driven.metrics["progress"][0] == 1.0
    assert (driven.steps.reward < -1.0).sum() == 1  # paid once


def test_off_road_begins_when_a_corner_is_beyond_the_edge() -> None:
    # drifting left at 1 m/s: the corner, 1 m beside the centre and 2 m ahead, leaves the road 5 m from its middle
    path = line((0, 0), (6, 1), T)
    made = scenario([path])
    driven = trip(made)
    heading = float(path[0, 2])
    corner = path[1:, 1] + 2.0 * np.sin(heading) + 1.0 * np.cos(heading)
    assert driven.metrics["offroad"] == [1.0]
    assert np.flatnonzero(driven.steps.terminated[:, 0]).tolist() == [int(np.argmax(corner > 5.0))]
    assert outcome(trip(made._replace(field=np.zeros((0, 0), np.int16)))) == CLEAN


@pytest.mark.parametrize(
    ("before", "change", "after", "ran"),
    [
        *((RED, 23, RED, 1.0), (GREEN, 23, GREEN, 0.0), (GREEN, 23, RED, 0.0), (RED, 23, GREEN, 0.0)),
        *((0, 23, 0, 0.0), (2, 23, 2, 0.0), (GREEN, 24, RED, 0.0)),  # the last turns red behind the bumper
    ],
)
def test_a_red_light_is_run_by_the_front_bumper_if_red_before_and_after(
    before: int, change: int, after: int, ran: float
) -> None:
    # the bumper, 2 m ahead, passes 15.3 m between steps 22 (15.2 m) and 23 (15.8 m)
    states = np.where(np.arange(T) < change, before, after)
    driven = trip(scenario([EGO], lights=[(15.3, states)]))
    assert driven.metrics["red_light"] == [ran]
    if ran:
        assert np.flatnonzero(driven.steps.terminated[:, 0]).tolist() == [22]
    else:
        assert outcome(driven) == CLEAN


@pytest.mark.slow
def test_idm_waits_at_a_red_light_and_goes_on_green() -> None:
    states = np.where(np.arange(121) < 70, RED, GREEN)
    ego = line((0, 0), (6, 0), 121)
    driven = trip(scenario([ego], lights=[(30.0, states)]), driver="idm")
    front = driven.states.motion.x[:70, 0] + 2.0
    assert driven.metrics["red_light"] == [0.0]
    assert 25.0 < front.max() < 30.0
    assert driven.states.motion.x[-1, 0] > 40.0


@pytest.mark.slow
def test_idm_stops_behind_a_standing_leader() -> None:
    driven = trip(scenario([line((0, 0), (8, 0), 91), line((40, 0), (0, 0), 91)]), driver="idm")
    assert driven.metrics["collision"] == [0.0]
    assert 30.0 < driven.states.motion.x[-1, 0] < 36.0 - 0.5


def test_who_has_nothing_to_reach_has_to_stay() -> None:
    still = scenario([line((0, 0), (0, 0), T)])
    stays = trip(still)
    assert outcome(stays) == CLEAN
    assert np.flatnonzero(stays.steps.terminated[:, 0]).tolist() == [T - 2]
    leaves = trip(still, (5, 6), weights=TERMS)
    moved = float(leaves.states.motion.x[-1, 0])
    assert moved > 4.0 and leaves.steps.reward.sum() == pytest.approx(-0.5 * moved, rel=1e-4)
    assert leaves.metrics["goal"] == [0.0]
    assert leaves.metrics["progress"] == [1.0]


def test_the_logs_end_truncates_whoever_still_plays_once() -> None:
    made = scenario([EGO])
    environment = driving(bank(made, scenario([EGO[:31]])), Config())
    assert (environment.spec.truncation_interval, environment.spec.max_steps) == (30, 50)
    driven = trip(made, (0, 6))  # brakes, and stands
    assert np.flatnonzero(driven.steps.truncated[:, 0]).tolist() == [T - 2]
    assert not driven.steps.terminated.any()
    assert driven.states.playing[:, 0].tolist() == [True] * (T - 2) + [False]
    assert driven.metrics["goal"] == [0.0]
    assert driven.metrics["progress"][0] == pytest.approx(6.0 * 6.0 / 12.0 / 30.0, abs=1e-3)


@pytest.mark.slow
def test_agents_are_columns_and_an_ended_one_is_gone() -> None:
    # the first runs into a post and is gone, the second, behind it, passes through its place
    first, second = line((0, 0), (6, 0), T), line((-14, 0), (6, 0), T)
    post = line((7, 1.6), (0, 0), T)
    post_there = np.ones((T, 3), bool)
    post_there[15:, 2] = False
    made = scenario([first, second, post], drivers=2, sizes=[(4, 2), (4, 2), (1, 1.5)], present=post_there)
    driven = trip(made, agents=3)
    assert driven.metrics["collision"] == [1.0, 0.0, 0.0]
    assert driven.metrics["goal"][:2] == [0.0, 1.0]
    assert driven.states.playing[0].tolist() == [True, True, False]  # the third slot is empty
    ended = int(np.argmax(driven.steps.terminated[:, 0]))
    assert driven.steps.reward[:, 2].tolist() == [0.0] * (T - 1)
    assert not driven.steps.terminated[:, 2].any()
    assert not driven.steps.truncated[:, 2].any()
    seen = driven.steps.observation.agents[:, 1, :, -1].sum(-1)  # how many the second agent sees
    assert seen[ended] == 2
    assert seen[ended + 1] == 1  # only the post
    assert seen[20] == 0


def test_agents_see_each_other_where_they_are_and_not_where_the_log_has_them() -> None:
    made = scenario([line((0, 0), (6, 0), T), line((20, 3), (6, 0), T)], drivers=2)
    driven = trip(made, np.array([STRAIGHT, (0, 6), STRAIGHT]), **ENDLESS)
    squashed = driven.steps.observation.agents[9, 0, 0, 0]
    x = driven.states.motion.x[9]
    assert 10.0 * squashed / (1.0 - squashed) == pytest.approx(x[1] - x[0], abs=1e-3)


@pytest.mark.slow
def test_the_ego_alone_scores_as_among_more_slots() -> None:
    made = scenario([EGO, line((20, 0.5), (0, 0), T)])
    alone, among = trip(made), trip(made, agents=3)
    assert {name: value[:1] for name, value in among.metrics.items()} == alone.metrics
    np.testing.assert_array_equal(among.steps.reward[:, 0], alone.steps.reward[:, 0])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[:, 0], b[:, 0], atol=1e-6),
        among.steps.observation,
        alone.steps.observation,
    )


def test_observation_of_a_known_scene() -> None:
    made = scenario(
        [EGO, line((12, 0), (2, 0), T), line((-5, 3), (6, 0), T)], lights=[(24.0, [RED] * T)], kinds=[1, 1, 3]
    )
    seen = trip(made).first
    route = seen.route[0].reshape(-1, 4)
    np.testing.assert_allclose(route[:, 0] * 60, waypoint_offsets(10), atol=5e-3)
    np.testing.assert_allclose(route[:, 1:], np.broadcast_to([0.0, 0.0, 1.0], (10, 3)), atol=1e-5)
    assert seen.ego[0, 0] == pytest.approx(6.0 / 20.0)
    np.testing.assert_allclose(seen.ego[0, -4:], -1.0, atol=1e-6)  # 4 m to the edge from each corner, cut at 3 m
    gap = 8.0 * seen.ego[0, 14] / (1 - seen.ego[0, 14])
    assert gap == pytest.approx(12.0 - 2.0 - 2.0, abs=1.5)  # between the bumpers, on a grid of one metre
    assert seen.ego[0, 15] == pytest.approx(0.4)  # closing at 4 m/s
    assert seen.ego[0, 16] == pytest.approx(4.0**2 / (2 * gap) / 6.0, rel=1e-4)  # what it takes not to touch
    light = seen.lights[0]
    assert light[[0, 2, 3, 4]].tolist() == [1, 1, 0, 0]
    assert 8.0 * light[1] / (1 - light[1]) == pytest.approx(24.0 - 2.0, abs=1e-3)
    near, far, *nobody = seen.agents[0]
    x, y = (10.0 * near[:2] / (1 - np.abs(near[:2]))).tolist()
    assert (x, y) == pytest.approx((-5.0, 3.0), abs=1e-3)
    assert near[11] == 1.0  # a cyclist
    assert far[4] == pytest.approx(-0.2)
    assert far[-1] == 1.0
    assert not np.any(nobody)


def test_features_of_the_same_scene_do_not_depend_on_where_it_lies() -> None:
    """Turned and moved as a whole, a world without a map looks the same to its driver."""
    poses = [EGO, line((12, -4), (2, -0.3), T), line((30, -18), (0, 2), T)]
    c, s = np.cos(2.0), np.sin(2.0)

    def moved(pose: np.ndarray) -> np.ndarray:
        x, y, h = pose.T
        return np.stack([c * x - s * y + 50, s * x + c * y - 30, h + 2.0], -1)

    here, there = (trip(scenario(p, road=None), (4, 7)) for p in (poses, [moved(p) for p in poses]))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-2), here.steps.observation, there.steps.observation
    )
    for name, value in here.metrics.items():
        units = {"smallest_ttc": metrics.TTC_UNIT, "final_divergence": metrics.FINAL_UNIT, "distance": 0.01}
        unit = units.get(name, 0.0)
        assert value == pytest.approx(there.metrics[name], abs=1e-3 + unit), name


def test_a_red_light_is_something_not_to_pass_and_haste_towards_it_costs() -> None:
    weights = replace(TERMS, progress=0.0, goal=0.0, collision=0.0, red_light=0.0)
    red, green = (
        trip(scenario([EGO], lights=[(15.3, [state] * T)]), weights=weights, **ENDLESS) for state in (RED, GREEN)
    )
    assert not green.steps.reward.any()
    distance = 15.3 - 2.0 - 0.6 * np.arange(1, T)
    needed = np.where(distance > 0, 6.0**2 / (2.0 * np.maximum(distance, 0.5)), 0.0)
    expected = -0.05 * np.clip(needed / reward.HARD - 1.0, 0.0, 2.0)
    np.testing.assert_allclose(red.steps.reward[:, 0], expected, atol=1e-4)
    assert expected.min() < -0.05
    ahead = 8.0 * red.first.ego[0, 14] / (1 - red.first.ego[0, 14])
    assert ahead == pytest.approx(13.3, abs=1e-3)
    assert green.first.ego[0, 14] == 1.0


def test_agents_do_not_see_the_time() -> None:
    """A log's end truncates; an observation that tells of it has a value that no reward ever corrects."""
    long, short = (trip(scenario([line((0, 0), (0, 0), steps)])) for steps in (T, 11))
    pair = (jax.tree.leaves(one.steps.observation) for one in (long, short))
    for leaf, other in zip(*pair, strict=True):
        np.testing.assert_array_equal(leaf[:10], other)


CROWD = [line((12 * i - 30, 3.0 * (-1) ** i), (4.0 - i, 0.3 * i), T) for i in range(1, 6)]


def test_random_driving_gives_finite_bounded_numbers() -> None:
    states = np.tile([RED, GREEN, 0], 17)
    made = scenario([EGO, line((-9, 0), (6, 0), T), *CROWD], drivers=2, lights=[(9.0, states)])
    rng = np.random.default_rng(0)
    for _ in range(10):
        driven = trip(made, rng.integers(0, [7, 13], (T - 1, 3, 2)), **ENDLESS)
        for leaf in jax.tree.leaves((driven.first, driven.states, driven.steps, driven.metrics)):
            assert np.isfinite(leaf).all()
        for leaf in jax.tree.leaves(driven.steps.observation):
            assert np.abs(leaf).max() <= 2.0
        assert np.abs(driven.steps.reward).max() < 10.0


@pytest.mark.slow
def test_the_contract_of_environments_is_kept() -> None:
    worlds = bank(
        scenario([EGO, line((-9, 0), (6, 0), T), *CROWD], drivers=2, lights=[(9.0, np.tile([RED, GREEN, 0], 17))]),
        scenario([EGO[:31], *[c[:31] for c in CROWD]], road=None),
        agents=2,
    )
    check_environment(driving(worlds, Config(agents=2, actions="continuous", neighbours=4)))


def test_the_state_is_small_and_holds_no_map() -> None:
    """At most 4,096 bytes with 64 agents and 64 objects, all that react elsewhere, and every option, but a byte of each
    object for who is in the world, and 30 that the safety check remembers."""
    many = [line((5.0 * i, 0), (3, 0), 5) for i in range(64)]
    worlds = bank(scenario(many, drivers=64, road=None), scenario(many, road=None), agents=64)
    every = Config(agents=64, traffic="idm", goal="respawn", crash="stop", conditioning=True, road_points=50)
    state, _ = jax.eval_shape(driving(worlds, every).start, jnp.int32(0))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) <= 4096 + 64
    checked, _ = jax.eval_shape(driving(worlds, replace(every, safety=True)).start, jnp.int32(0))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(checked)) <= 4096 + 64 * 31
    assert state.reactive is not None
    assert {x.dtype for x in jax.tree.leaves((state.motion, state.s))} == {jnp.dtype("float32")}
    assert sum(leaf.dtype.itemsize for leaf in metrics.begin(1, np.zeros(1, np.float32))) == 33


def test_comfort_counts_each_limit() -> None:
    zero = jnp.zeros(1)

    def excess(**felt: float) -> float:
        ride = reward.Ride(*(jnp.full(1, felt.get(name, 0.0)) for name in reward.Ride._fields))
        return float(reward.excess(ride)[0])

    assert float(reward.excess(reward.Ride(zero, zero, zero, zero))[0]) == 0.0
    assert excess(longitudinal=2.39, lateral=-1.99, jerk=8.2, yaw=-0.94) == 0.0
    assert excess(longitudinal=-4.0) == 0.0
    for over in ({"longitudinal": 2.5}, {"longitudinal": -4.1}, {"lateral": -2.1}, {"jerk": -8.4}, {"yaw": 1.0}):
        assert 0.0 < excess(**over) < 0.1
    assert excess(jerk=1e6) == 2.0


@pytest.mark.parametrize("count", [1, 5, 10, MAX_WAYPOINTS])
def test_waypoints_are_as_many_as_asked_for(count: int) -> None:
    offsets = waypoint_offsets(count)
    assert len(offsets) == count
    assert (np.diff(offsets) > 0).all()
    assert offsets[-1] <= 57


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agents": 2}, "agents is 2"),
        ({"traffic": "none"}, "traffic is 'none'; it must be one of log, idm"),
        ({"driver": "me"}, "driver is 'me'"),
        ({"actions": "both"}, "actions is 'both'; it must be one of discrete, continuous, joint"),
        ({"dynamics": "none"}, "dynamics is 'none'; it must be one of bicycle, steering, delta, jerk"),
        ({"goal": "none"}, "goal is 'none'; it must be one of remove, stop, respawn"),
        ({"crash": "none"}, "crash is 'none'; it must be one of remove, stop"),
        ({"control": "none"}, "control is 'none'; it must be one of vehicles, all"),
        ({"terminations": ("crash",)}, "terminations is 'crash'"),
        ({"neighbours": 0}, "neighbours is 0"),
        ({"waypoints": 99}, "waypoints is 99"),
        ({"road_points": 385}, "road_points is 385; it must lie in 0 to 384"),
        ({"observation_noise": (0.1, -1.0, 0.0)}, "observation_noise is"),
        ({"observation_mask": 1.5}, "observation_mask is 1.5; it must lie in 0 to 1"),
        ({"bystanders": (0.7, 0.6)}, r"bystanders is \(0.7, 0.6\).*sum is at most 1"),
        ({"start_offset": (0.1,)}, "start_offset is"),
        ({"start_speed": 1.5}, "start_speed is 1.5; it must lie in 0 to 1"),
        ({"view_range": 0.0}, "view_range is 0.0; it must be above 0"),
        ({"view_angle": 7.0}, "view_angle is 7.0"),
    ],
)
def test_bad_settings_are_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        driving(bank(scenario([EGO])), replace(Config(), **change))
    assert "\n" not in str(error.value)


def three(**settings: Any) -> Any:
    """Three worlds of three agents that their log has at 6 m/s, side by side; the second lies 40 m to the east, the
    third 80 m."""

    def made(x: float) -> Scenario:
        return scenario([line((x, y), (6, 0), T) for y in (0, 30, 60)], drivers=3)

    worlds = stack([made(x) for x in (0.0, 40.0, 80.0)], agents=3)
    return driving(worlds, Config(agents=3, terminations=(), **settings))


def test_agents_of_training_begin_beside_their_logs_and_among_bystanders() -> None:
    worlds = three(bystanders=(0.5, 0.25), start_offset=(0.3, 0.1), start_speed=0.5)
    keys = jax.random.split(jax.random.key(0), 256)
    first, _ = jax.jit(jax.vmap(worlds.reset))(keys)
    east = 40.0 * np.asarray(first.scenario)[:, None]
    assert np.bincount(first.scenario, minlength=3).min() > 60  # 85 expected
    np.testing.assert_allclose(first.motion.x, east + np.zeros(3), atol=1.0)
    kind, driven = np.asarray(first.partners.kind), np.asarray(first.partners.driven)
    shares = [np.mean(kind == each) for each in (traffic.REPLAYED, traffic.DRIFTING, traffic.DRIVEN)]
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], atol=0.1)
    assert driven[:, 0].all() and driven[kind == traffic.DRIVEN].all()
    assert 0.4 < driven[kind != traffic.DRIVEN][:, 1:].mean() < 0.6
    np.testing.assert_array_equal(np.asarray(first.playing), driven)

    aside, speed = np.asarray(first.motion.y) - np.array([0.0, 30.0, 60.0]), np.asarray(first.motion.speed)
    assert 0.2 < aside.std() < 0.35 and np.abs(aside).max() <= 0.6 + 0.02
    assert 0.07 < np.asarray(first.motion.heading).std() < 0.12
    logged = np.isclose(speed, 6.0, atol=0.05)
    assert 0.4 < logged.mean() < 0.6
    assert speed[~logged].min() < 0.3 and 6.9 < speed[~logged].max() <= 7.25

    here = jax.jit(jax.vmap(lambda state: worlds._scene(state._replace(t=state.t + 1))))(first)
    assert (np.asarray(here.slot)[:, :3] == np.where(driven, np.arange(3), -1)).all()
    gone = np.asarray(here.x)[:, :3] - east
    np.testing.assert_allclose(gone[~driven], 0.6, atol=0.03)  # as logged: 6 m/s for 0.1 s
    np.testing.assert_allclose(np.asarray(here.y)[:, 1][~driven[:, 1]], 30.0, atol=0.02)
    assert np.asarray(here.present)[:, :3].all()


def test_reacting_traffic_still_reacts_where_worlds_may_have_bystanders() -> None:
    worlds = replace(three(bystanders=(0.3, 0.2)), config=Config(agents=3, traffic="idm", bystanders=(0.3, 0.2)))
    partners = jax.jit(jax.vmap(worlds._bystanders))(jax.random.split(jax.random.key(0), 256))
    kind = np.asarray(partners.kind)
    assert set(kind.tolist()) == {traffic.REPLAYED, traffic.DRIFTING, traffic.REACTING}
    assert np.asarray(partners.driven)[kind == traffic.REACTING].all()


def test_evaluation_begins_as_the_logs_do() -> None:
    worlds = three(bystanders=(0.5, 0.25), start_offset=(0.3, 0.1), start_speed=0.5)
    whole, _ = jax.jit(worlds.start)(0)
    np.testing.assert_allclose(whole.motion.speed, 6.0, atol=0.05)
    np.testing.assert_allclose(whole.motion.y, [0.0, 30.0, 60.0], atol=0.02)
    assert whole.partners is None and bool(whole.playing.all())


def test_a_scenario_of_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="scenario 1 has 1 step"):
        driving(bank(scenario([EGO]), scenario([EGO]))._replace(steps=np.array([51, 1])), Config())


def test_real_logs_replayed_are_clean(logs: Path) -> None:
    from longhaul.driving.datasets import readers

    found = [log for path in readers.expand([str(logs / "womd"), str(logs / "gpudrive")]) for log in readers.read(path)]
    worlds = driving(stack([scenario_from_log(log) for log in found]), Config(driver="log"))

    def whole(index: jax.Array) -> dict[str, Measure]:
        state, _ = worlds.start(index)
        state, _ = jax.lax.scan(
            lambda s, _: (worlds.step(jax.random.key(0), s, jnp.zeros((1, 2), jnp.int32))[0], None),
            state,
            length=worlds.spec.max_steps,
        )
        return worlds.metrics(state)

    values = {name: m.value for name, m in jax.jit(jax.vmap(whole))(jnp.arange(worlds.scenarios)).items()}
    assert values["accuracy"].tolist() == [[1.0]] * len(found)
    assert values["progress"].tolist() == [[1.0]] * len(found)
    assert float(values["log_divergence"].max()) < 1e-4
