"""Vectorising: resets, successors, episode statistics; columns of many agents are followed in test_rollout."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.environment import time_limit, vectorise
from longhaul.spaces import Discrete, Measure
from longhaul.types import Spec, transition
from tests.helpers.quick import quick


@dataclass(frozen=True)
class Counter:
    """Counts steps from a random start below 0.5; terminates at `end`; pays its count.

    Metrics: the count, and the count where it is above `high`.
    """

    end: int = 10**6
    high: float = 3.25

    @property
    def spec(self):
        return Spec(jax.ShapeDtypeStruct((1,), jnp.float32), Discrete(2), truncation_interval=None)

    def reset(self, key):
        state = jax.random.uniform(key, (1,), maxval=0.5)
        return state, state

    def step(self, key, state, action):
        state = state + 1.0
        return state, transition(state, state[0], state[0] >= self.end, jnp.bool_(False))

    def active(self, state):
        return state[0] < self.end

    def metrics(self, state):
        return {"count": Measure(state[0], jnp.bool_(True)), "high": Measure(state[0], state[0] > self.high)}


def roll(environment, worlds, steps, starts=4):
    """The time steps of `steps` steps as NumPy, the observations acted upon, and the tally."""
    many = vectorise(environment, worlds)
    state, observation = many.reset(jax.random.key(0))
    bank = many.fresh(jax.random.key(1), starts)
    step, tally, rows = quick(many.step), many.tally(), []
    for t in range(steps):
        action = jnp.zeros((many.columns,), jnp.int32)
        state, tally, led_to = step(state, tally, action, jax.random.key(t), bank)
        rows.append((observation, led_to))
        observation = led_to.observation
    return rows, tally, bank


@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # which sums up scores otherwise
def test_the_time_limit_truncates_and_keeps_the_successor(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rows, tally, bank = roll(time_limit(Counter(), 3), 2, 7)
    for t, (observation, led_to) in enumerate(rows):
        np.testing.assert_allclose(led_to.successor, observation + 1.0)
        ended = (t + 1) % 3 == 0
        assert np.all(led_to.truncated == ended) and not np.any(led_to.terminated)
        if ended:
            np.testing.assert_array_equal(led_to.observation, bank.observation[t // 3])
        else:
            np.testing.assert_array_equal(led_to.observation, led_to.successor)
    np.testing.assert_array_equal(tally.episodes, [2, 2])
    np.testing.assert_array_equal(tally.sums["length"], [6, 6])
    starts = np.stack([rows[0][0], bank.observation[0]])[:, :, 0]
    np.testing.assert_allclose(tally.sums["return"], (3 * starts + 6).sum(0), rtol=1e-6)
    np.testing.assert_allclose(tally.sums["count"], (starts + 3).sum(0), rtol=1e-6)
    np.testing.assert_array_equal(tally.counts["count"], [2, 2])
    high = starts + 3 > 3.25
    assert 0 < high.sum() < high.size, "some episodes should tell it, and some not"
    np.testing.assert_array_equal(tally.counts["high"], high.sum(0))
    np.testing.assert_allclose(tally.sums["high"], np.where(high, starts + 3, 0.0).sum(0), rtol=1e-6)


def test_termination_is_no_truncation_and_starts_come_round():
    rows, tally, bank = roll(Counter(end=2), 1, 7, starts=2)
    assert [bool(led_to.terminated[0]) for _, led_to in rows] == [False, True] * 3 + [False]
    assert not any(bool(led_to.truncated[0]) for _, led_to in rows)
    begun = [float(led_to.observation[0, 0]) for _, led_to in rows[1::2]]
    bank = np.asarray(bank.observation)[:, 0, 0]
    np.testing.assert_array_equal(begun, [bank[0], bank[1], bank[0]])
    assert tally.episodes[0] == 3


def test_a_start_drawn_when_a_world_ends_is_the_one_drawn_ahead():
    """A rollout of one step is given the key of its starts; worlds that go on keep what they have."""
    many = vectorise(Counter(end=2, high=1.25), 8)
    state, _ = many.reset(jax.random.key(0))
    state = state._replace(state=state.state + jnp.arange(8.0)[:, None] % 2)  # every other one ends with this step
    step, action = quick(many.step), jnp.zeros(8, jnp.int32)
    for key in (jax.random.key(2), jax.random.key(3)):
        ahead, late = (
            step(state, many.tally(), action, jax.random.key(1), starts) for starts in (many.fresh(key, 1), key)
        )
        jax.tree.map(np.testing.assert_array_equal, ahead, late)
        np.testing.assert_array_equal(late[2].terminated, [False, True] * 4)
        np.testing.assert_array_equal(late[2].observation[::2], late[2].successor[::2])
        np.testing.assert_array_equal(late[2].observation[1::2], many.fresh(key, 1).observation[0, 1::2])
        state = late[0]._replace(state=jnp.where(jnp.arange(8)[:, None] % 2, 1.5, 0.5))


def test_impossible_sizes_are_named():
    with pytest.raises(ValueError, match="num_envs is 0"):
        vectorise(Counter(), 0)
    with pytest.raises(ValueError, match="time limit of 0"):
        time_limit(Counter(), 0)
