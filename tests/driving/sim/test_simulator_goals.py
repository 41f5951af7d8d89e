"""Many driven agents in a world: what becomes of them, who may be controlled, and reward weights of their own."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.config.recipes import recipe
from longhaul.config.resolve import resolve
from longhaul.driving import scenario_source
from longhaul.driving.datasets.log import CYCLIST, PEDESTRIAN, VEHICLE
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.sim import reward, simulator
from longhaul.driving.sim.config import Config, Weights
from longhaul.driving.sim.simulator import ARRIVED, GHOST, GONE, PLAYING, STANDING, driving
from longhaul.runtime.errors import RunError
from tests.helpers.driving_scenarios import STRAIGHT, bank, line, scenario, trip
from tests.helpers.log_files import make_log

T = 51
HASTEN = (6, 6)
"""The discrete action of the strongest acceleration, straight on."""


def pair(ahead: float, behind: float, first: float = 12.0, second: float = 60.0) -> Scenario:
    """Two vehicles, 4 m long, that drive along x at 6 m/s from these places, with goals after so many metres."""
    made = scenario([line((ahead, 0), (6, 0), T), line((behind, 0), (6, 0), T)], drivers=2)
    return made._replace(route_length=np.array([first, second], np.float32))


STOP: dict[str, Any] = {"agents": 2, "goal": "stop", "crash": "stop"}
RESPAWN: dict[str, Any] = {"agents": 2, "goal": "respawn"}


@pytest.mark.slow
def test_who_stops_at_its_goal_is_met_by_who_follows() -> None:
    # 11.76 m are 2 % short of the goal: step 20, at 12 m; the follower's front is there after 16 m: step 27
    driven = trip(pair(0.0, -8.0), **STOP)
    assert [np.flatnonzero(column).tolist() for column in driven.steps.terminated.T] == [[19], [26]]
    assert driven.metrics["goal"] == [1.0, 0.0]
    assert driven.metrics["collision"] == [0.0, 1.0]
    assert driven.states.stage[[18, 19, 26, -1], 0].tolist() == [PLAYING, STANDING, STANDING, STANDING]
    assert driven.states.stage[[25, 26, -1], 1].tolist() == [PLAYING, STANDING, STANDING]
    np.testing.assert_allclose(driven.states.motion.x[19:, 0], 12.0, atol=0.02)
    np.testing.assert_allclose(driven.states.motion.x[26:, 1], 8.2, atol=0.02)
    assert driven.states.motion.speed[19:, 0].tolist() == [0.0] * 31
    assert driven.states.motion.speed[26:, 1].tolist() == [0.0] * 24
    assert not driven.steps.reward[20:, 0].any()


@pytest.mark.slow
def test_who_begins_anew_is_paid_for_each_goal() -> None:
    # 50 steps: goals in the 20th and, after a step in which it is put back, the 41st
    driven = trip(pair(0.0, 25.0, second=90.0), **RESPAWN)
    assert driven.metrics["goals"] == [2.0, 0.0]
    assert driven.metrics["goal"] == [1.0, 0.0]
    assert not driven.steps.terminated.any()
    assert driven.steps.truncated[-1].tolist() == [True, True]
    assert np.flatnonzero(driven.steps.reward[:, 0] > 1.0).tolist() == [19, 40]
    assert driven.steps.reward[20, 0] == driven.steps.reward[41, 0] == 0.0
    assert driven.states.motion.x[[20, 41], 0] == pytest.approx([0.0, 0.0], abs=0.02)
    assert driven.states.motion.speed[[20, 41], 0] == pytest.approx([6.0, 6.0], abs=0.02)
    assert driven.states.stage[[18, 19, 20, 40, 41], 0].tolist() == [PLAYING, ARRIVED, PLAYING, ARRIVED, PLAYING]
    # each time the same way is paid again
    np.testing.assert_allclose(driven.steps.reward[21:41, 0], driven.steps.reward[:20, 0], atol=0.02)
    assert driven.metrics["collision"] == [0.0, 0.0]


@pytest.mark.slow
def test_who_begins_anew_where_somebody_is_is_a_ghost_until_it_is_free() -> None:
    plan = np.tile(np.array(STRAIGHT), (T - 1, 2, 1))
    plan[20:, 1] = HASTEN  # the other is at 0.6 m when the first is put to 0 m; then it pulls away
    driven = trip(pair(0.0, -12.0, second=90.0), plan, **RESPAWN)
    x, stage = driven.states.motion.x, driven.states.stage[:, 0]
    gap = x[:, 1] - x[:, 0] - 4.0
    assert gap[20] < 0.0
    assert stage[19] == ARRIVED
    real = int(np.argmax((stage[20:] == PLAYING) & (gap[20:] > 0.0))) + 20
    assert set(stage[20:real].tolist()) == {GHOST}
    assert gap[real - 1] < simulator.CLEARANCE <= gap[real]
    assert driven.metrics["collision"] == [0.0, 0.0]
    assert not driven.steps.terminated.any()


def test_only_one_ghost_becomes_real_in_a_step() -> None:
    stage = jnp.array([GHOST, GHOST, GHOST, PLAYING], jnp.uint8)
    no, yes = jnp.zeros(4, bool), jnp.ones(4, bool)
    follow = partial(simulator.next_stage, goal="respawn", crash="remove")
    after = follow(stage, no, no, no, jnp.array([False, True, True, True]))
    assert after.tolist() == [GHOST, PLAYING, GHOST, PLAYING]
    assert follow(after, no, no, no, yes).tolist() == [PLAYING, PLAYING, GHOST, PLAYING]
    assert follow(stage, no, no, no, no).tolist() == stage.tolist()
    assert follow(stage, no, yes, no, yes).tolist() == [ARRIVED] * 4  # who arrives goes, seen or not
    assert follow(stage, no, yes, yes, yes).tolist() == [GONE] * 4


@pytest.mark.parametrize("goal", ["remove", "stop"])
@pytest.mark.parametrize("crash", ["remove", "stop"])
def test_who_ends_goes_or_stands_by_what_ended_it(goal: str, crash: str) -> None:
    stage = jnp.array([PLAYING, PLAYING, PLAYING, PLAYING, GONE, STANDING], jnp.uint8)
    failed = jnp.array([False, True, False, True, True, True])
    arrived = jnp.array([False, False, True, True, True, True])
    after = simulator.next_stage(stage, failed, arrived, jnp.zeros(6, bool), jnp.ones(6, bool), goal, crash)
    by = {"remove": GONE, "stop": STANDING}
    assert after.tolist() == [PLAYING, by[crash], by[goal], by[crash], GONE, STANDING]


# --------------------------------------------------------------------------------------------------------- kinds

MIXED: dict[str, Any] = {"agents": 2, "control": "all", "conditioning": True, "terminations": ()}


@pytest.mark.slow
def test_people_may_leave_the_road_and_run_no_faster_than_they_can() -> None:
    paths = [line((0, 0), (6, 1), T), line((0, -3), (0, 1.5), T)]
    made = scenario(paths, drivers=2, kinds=[VEHICLE, PEDESTRIAN], sizes=[(4.0, 2.0), (0.6, 0.6)])
    driven = trip(made, np.tile(np.array(HASTEN), (T - 1, 2, 1)), **MIXED)
    assert driven.metrics["offroad"][0] == 1.0
    assert driven.metrics["offroad"][1] == 0.0
    assert driven.states.motion.y[-1, 1] > 6.0  # far beyond the edge at 5 m
    speed = driven.states.motion.speed[-1]
    assert speed[0] == pytest.approx(np.hypot(6, 1) + 4.0 * 5.0, abs=0.05)
    assert speed[1] == pytest.approx(7.0, abs=1e-4)
    # episodes that are chosen, not drawn, have the configured weights, which are seen as zeros
    assert not driven.first.ego[:, -len(reward.RANGES) :].any()


def test_control_says_who_may_be_controlled() -> None:
    log = make_log()
    tracks = log.tracks

    def kinds_of(**chosen: Any) -> list[int]:
        made = scenario_from_log(log, agents=8, **chosen)
        return [int(made.kind[i]) for i in made.controlled if i >= 0]

    assert set(kinds_of()) == {VEHICLE}
    every = kinds_of(control="all")
    assert {VEHICLE, PEDESTRIAN} <= set(every)
    assert kinds_of(control="all")[: len(kinds_of())].count(VEHICLE) >= 1
    some = [i for i in range(len(tracks.kind)) if tracks.kind[i] in (PEDESTRIAN, CYCLIST)]
    assert set(kinds_of(control=some)[1:]) <= {PEDESTRIAN, CYCLIST}
    assert len(kinds_of(control=())) == 1  # the ego is always driven
    with pytest.raises(ValueError, match="control is 'people': choose from vehicles, all"):
        scenario_from_log(log, control="people")
    made = scenario_from_log(log, agents=8, control="all")
    with pytest.raises(ValueError, match="cyclists and pedestrians to control; choose all"):
        driving(bank(made, agents=8), Config(agents=8))


def test_scenarios_have_the_agents_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    some = scenario_source.generated(0, 3, agents=16, horizon=30, workers=1, least=12)
    assert all((made.controlled >= 0).sum() >= 12 for made in some)
    numbers = [int(made.id.split("-")[1]) for made in some]
    assert numbers == sorted(set(numbers))
    skipped = [seed for seed in range(numbers[-1]) if seed not in numbers]
    assert skipped
    for seed in skipped[:2]:
        (other,) = scenario_source.generated(seed, 1, agents=16, horizon=30, workers=1)
        assert (other.controlled >= 0).sum() < 12
    monkeypatch.setattr(scenario_source, "TRIED", 3)
    with pytest.raises(ValueError, match="0 of 3 generated scenarios have 2 agents or more; ask for fewer"):
        scenario_source.generated(0, 1, agents=1, horizon=12, workers=1, least=2)


# -------------------------------------------------------------------------------------------------- conditioning


def test_draws_are_uniform_and_differ_by_episode_agent_and_term() -> None:
    episodes = jnp.arange(1, 2001, dtype=jnp.uint32)
    drawn = np.asarray(jax.vmap(lambda e: reward.weight_draws(e, 4))(episodes))
    assert drawn.shape == (2000, 4, len(reward.RANGES))
    assert drawn.min() >= -1.0
    assert drawn.max() < 1.0
    flat = drawn.reshape(2000, -1)
    share = np.histogram(flat, bins=20, range=(-1, 1))[0] / flat.size
    np.testing.assert_allclose(share, 0.05, atol=0.002)
    assert np.abs(flat.mean(0)).max() < 4.0 * np.sqrt(1 / 3 / 2000)
    related = np.corrcoef(np.concatenate([flat.T, flat.T[:, ::-1]]))
    assert np.abs(related - np.eye(len(related))).max() < 5.0 / np.sqrt(2000)
    following = np.mean(flat[1:] * flat[:-1], 0) * 3.0
    assert np.abs(following).max() < 5.0 / np.sqrt(2000)


def test_weights_lie_within_their_ranges_around_the_configured_ones() -> None:
    drawn = jnp.stack([jnp.full(len(reward.RANGES), d) for d in (-1.0, 0.0, 1.0)])
    given = Weights()
    found = reward.drawn_weights(given, drawn)
    for field in fields(Weights):
        value, wanted = getattr(found, field.name), getattr(given, field.name)
        factor = reward.RANGES.get(field.name)
        if factor is None:
            assert value == wanted
        else:
            np.testing.assert_allclose(value, [wanted / factor, wanted, wanted * factor], rtol=1e-5)
    assert not reward.weight_draws(jnp.uint32(0), 3).any()


@pytest.mark.slow
def test_each_driver_of_a_drawn_episode_sees_weights_of_its_own() -> None:
    environment = driving(bank(pair(0.0, 25.0), agents=2), Config(agents=2, conditioning=True))
    keys = jax.random.split(jax.random.key(0), 2)
    states, seen = jax.jit(jax.vmap(environment.reset))(keys)
    assert (states.episode != 0).all()
    count = len(reward.RANGES)
    assert seen.ego.shape[2:] == environment.spec.observation.ego.shape
    shown = np.asarray(seen.ego)[..., -count:]
    assert len(np.unique(shown)) == shown.size
    np.testing.assert_array_equal(shown[0], reward.weight_draws(states.episode[0], 2))


# ------------------------------------------------------------------------------------------------------- recipes


def test_the_recipe_drives_all_agents_of_full_worlds() -> None:
    run = resolve(recipe("driving-selfplay"))
    task = run.environment
    assert task.simulator.agents == 16  # type: ignore[union-attr]
    assert 1 < task.least <= 16  # type: ignore[union-attr]
    plain = recipe("driving")
    wrong = replace(plain, environment=replace(plain.environment, least=3))  # type: ignore[type-var,arg-type]
    with pytest.raises(RunError, match="--least is 3; it must lie in 1 to --agents, 1"):
        resolve(wrong)
