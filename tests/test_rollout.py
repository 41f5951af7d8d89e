"""Rollouts against a step-by-step oracle: successors, validity, memory, tallies; and episodes played to their ends."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import returns
from longhaul.environment import vectorise
from longhaul.rollout import collector, play, starts
from tests.helpers.checkable_environment import Chaos, decode, follow
from tests.helpers.quick import quick

STEPS, WORLDS = 24, 6


def act(params, memory, observation, key):
    """Random actions (mode: 1); the memory counts its steps and sums what it saw."""
    shape = observation.shape[:1]
    memory = memory + jnp.stack([jnp.ones(shape), (observation[:, 0] + 0.5) * 4096], axis=-1)
    action = jnp.ones(shape, jnp.int32) if key is None else jax.random.randint(key, shape, 0, 3, jnp.int32)
    return action, memory, {"memory": memory}


def no_memory(columns: int) -> jax.Array:
    return jnp.zeros((columns, 2), jnp.float32)


def begins(data: Any) -> np.ndarray:
    """bool [T, B]: a step before which this rollout saw an episode's end, or the agent waiting."""
    ended = np.asarray(data.terminated | data.truncated) | ~np.asarray(data.valid)
    return np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])


def check_steps(environment: Chaos, data: Any) -> None:
    """Rewards and flags follow from observation and action; so do the next step's observation and the successor."""
    n, age = decode(data.observation)
    led = follow(n, age, np.asarray(data.action), environment.interval)
    valid = np.asarray(data.valid)
    np.testing.assert_array_equal(np.asarray(data.reward)[valid], led.reward[valid])
    np.testing.assert_array_equal(np.asarray(data.terminated)[valid], led.terminated[valid])
    cut = led.truncated & ~led.terminated & valid
    np.testing.assert_array_equal(np.asarray(data.truncated), cut)
    assert cut.sum() > 5, "nothing was truncated: nothing is tested"
    assert (led.terminated & valid).sum() > 5
    following, following_age = decode(np.concatenate([data.observation, data.successors.last[None]])[1:])
    goes_on = valid & ~led.terminated & ~cut
    np.testing.assert_array_equal(following[goes_on], led.n[goes_on])
    np.testing.assert_array_equal(following_age[goes_on], led.age[goes_on])
    if environment.agents is None:
        assert np.all(following_age[~goes_on] == 0)
    # Bellman consistency, with any function of the observation for a value: here one that no two successors share.
    worth = lambda o: jnp.asarray(np.array(decode(o)[0] * 64 + decode(o)[1], np.float32))  # noqa: E731
    found = returns.successor_values(
        worth(data.observation), worth(data.successors.last), worth(data.successors.truncated), data.truncated
    )
    needed = valid & ~led.terminated
    np.testing.assert_array_equal(np.asarray(found)[needed], (led.n * 64 + led.age)[needed])


def check_memory(data: Any) -> None:
    seen, valid = decode(data.observation)[0], np.asarray(data.valid)
    memory, fresh = np.array(data.memory), begins(data)
    for t in range(len(seen)):
        memory = np.where(fresh[t][:, None], 0.0, memory) + np.stack([np.ones(seen.shape[1]), seen[t]], -1)
        np.testing.assert_array_equal(np.asarray(data.extras["memory"])[t][valid[t]], memory[valid[t]])


def check_tally(environment: Chaos, rollouts: list[Any], metrics: list[Any]) -> None:
    """Episodes may span rollouts; what ended is counted where it ended."""
    columns = rollouts[0].reward.shape[1]
    gained, length = np.zeros(columns), np.zeros(columns)
    for data, sums in zip(rollouts, metrics, strict=True):
        expected = {"episodes": 0.0, "episode/return": 0.0, "episode/length": 0.0, "episode/score": 0.0}
        expected |= {"episodes/score": 0.0, "episode/unknown": 0.0, "episodes/unknown": 0.0}
        expected |= {f"peak/{name}": -np.inf for name in environment.peaks}
        n = follow(*decode(data.observation), np.asarray(data.action), environment.interval).n
        for t in range(STEPS):
            valid = np.asarray(data.valid[t])
            gained, length = gained + np.where(valid, data.reward[t], 0.0), length + valid
            ended = valid & np.asarray(data.terminated[t] | data.truncated[t])
            expected["episodes"] += ended.sum()
            known = n[t] % 3 != 0
            for name, values in (("return", gained), ("length", length), ("score", np.where(known, n[t], 0.0))):
                expected[f"episode/{name}"] += values[ended].sum()
            expected["episodes/score"] += known[ended].sum()
            if environment.peaks:
                expected["peak/score"] = max([expected["peak/score"], *n[t][ended & known]])
            gained, length = np.where(ended, 0.0, gained), np.where(ended, 0.0, length)
        assert expected["episodes"] > 5
        assert 0 < expected["episodes/score"] < expected["episodes"]
        assert set(sums) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(Chaos(), marks=pytest.mark.slow, id="every_step"),
        pytest.param(Chaos(interval=3, peaks=("score", "unknown")), id="interval"),
        pytest.param(Chaos(agents=3, peaks=("score",)), id="agents"),
    ],
)
def test_a_rollout_is_what_its_observations_and_actions_say(environment):
    collect = collector(vectorise(environment, WORLDS), act, no_memory, steps=STEPS)
    columns = WORLDS * (environment.agents or 1)
    assert (collect.steps, collect.env_steps) == (STEPS * columns, STEPS * WORLDS)
    run = quick(collect.collect)
    carry = quick(collect.start)(jax.random.key(0))
    rollouts, metrics = [], []
    for i in range(2):
        carry, data, sums = run((), carry, jax.random.key(i + 1), jnp.int32(i))
        rollouts.append(data)
        metrics.append(sums)
    first, second = rollouts
    for i, data in enumerate(rollouts):
        assert data.version == i
        assert data.successors.truncated.shape == (-(-STEPS // environment.interval), columns, 2)
        check_steps(environment, data)
        check_memory(data)
        # A playing agent plays on until its end; it comes back at the first step of an episode, and only then.
        age = decode(data.observation)[1]
        valid, fresh = np.asarray(data.valid), begins(data)
        assert np.all((age == 0)[fresh & valid])
        assert np.all((valid[1:] | fresh[1:])[valid[:-1]])
        if environment.agents:
            assert 0.2 < valid.mean() < 0.9
            waits = valid.reshape(STEPS, WORLDS, -1)
            assert np.all(waits.any(-1)), "a world in which nobody plays was not reset"
        else:
            assert np.all(valid)
    assert np.any(first.action != second.action), "every rollout draws the same"
    assert len(np.unique(first.action, axis=0)) > STEPS // 2, "every step draws the same"
    # The second rollout goes on where the first stopped.
    np.testing.assert_array_equal(first.successors.last, second.observation[0])
    ended = np.asarray((first.terminated | first.truncated)[-1] | ~first.valid[-1])
    np.testing.assert_array_equal(second.memory, np.where(ended[:, None], 0.0, first.extras["memory"][-1]))
    check_tally(environment, rollouts, metrics)


def check_episodes(environment: Chaos, begun: Any, episodes: Any, frames: np.ndarray) -> None:
    """Every episode followed by hand, with action 1 throughout."""
    agents = environment.agents or 1
    state = jax.tree.map(lambda x: np.asarray(x).reshape(len(x), agents), begun[0])
    for e in range(len(state.n)):
        n, age, playing = (np.array(leaf[e]) for leaf in state)
        expected = {"return": np.zeros(agents), "length": np.zeros(agents), "score": np.zeros(agents)}
        present = playing.copy()
        for t in range(len(frames) - 1):
            np.testing.assert_array_equal(frames[t, e].reshape(agents), n)
            if not playing.any():
                continue
            led = follow(n, age, 1, environment.interval)
            expected["return"] += np.where(playing, led.reward, 0.0)
            expected["length"] += playing
            expected["score"] = np.where(playing, led.n, expected["score"])
            n, age = led.n, led.age
            playing = playing & ~led.terminated & ~led.truncated
        np.testing.assert_array_equal(frames[-1, e].reshape(agents), n)
        np.testing.assert_array_equal(episodes.valid[e], present)
        np.testing.assert_array_equal(episodes.finished[e], ~playing)
        for name, value in expected.items():
            scored = episodes.scores[name]
            np.testing.assert_allclose(np.asarray(scored.value[e])[present], value[present], err_msg=name)
            known = present & (value % 3 != 0) if name == "score" else present
            np.testing.assert_array_equal(np.asarray(scored.valid[e])[present], known[present], err_msg=name)


@pytest.mark.parametrize("environment", [Chaos(), Chaos(agents=3)], ids=["alone", "agents"])
def test_play_scores_whole_episodes_and_stops_at_their_ends(environment):
    begun = quick(lambda key: starts(environment, key, 16))(jax.random.key(3))
    run = quick(play(environment, act, no_memory, steps=9, observe=lambda state, metrics: state.n))
    episodes, frames = run((), begun, None, jax.random.key(5))
    check_episodes(environment, begun, episodes, np.asarray(frames))
    finished = np.asarray(episodes.finished)[np.asarray(episodes.valid)]
    assert 0 < finished.sum() < finished.size, "some should end within the steps, and some not"


def test_play_without_observe_has_no_frames_and_samples_with_a_key():
    begun = quick(lambda key: starts(Chaos(), key, 16))(jax.random.key(3))
    run = quick(play(Chaos(), act, no_memory, steps=9))
    (one, frames), (same, _), (other, _) = (run((), begun, jax.random.key(k), jax.random.key(5)) for k in (1, 1, 2))
    assert frames == ()
    first, again, differs = (episodes.scores["return"].value for episodes in (one, same, other))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != differs)
    with pytest.raises(KeyError, match="no measure 'speed': the table has length, return, score, unknown"):
        one.scores["speed"]


def test_impossible_sizes_are_named():
    with pytest.raises(ValueError, match="num_steps is 0"):
        collector(vectorise(Chaos(), 1), act, no_memory, steps=0)
    with pytest.raises(ValueError, match="0 evaluation episodes"):
        starts(Chaos(), jax.random.key(0), 0)
