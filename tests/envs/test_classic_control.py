"""Classic control beside Gymnasium: the same state and actions give the same observations, rewards and flags."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.envs import classic_control
from longhaul.spaces import Box, Discrete


class Pair(NamedTuple):
    """One of ours and its model."""

    make: Callable[..., classic_control.Classic]
    model: str


PAIRS = [
    Pair(classic_control.cartpole, "CartPole-v1"),
    Pair(classic_control.pendulum, "Pendulum-v1"),
    Pair(classic_control.mountaincar, "MountainCar-v0"),
    Pair(classic_control.mountaincar_continuous, "MountainCarContinuous-v0"),
    Pair(classic_control.acrobot, "Acrobot-v1"),
]
each = pytest.mark.parametrize("pair", PAIRS, ids=[pair.model for pair in PAIRS])


def put(model: gymnasium.Env[Any, Any], physics: Any) -> None:
    """Gymnasium's world in our state."""
    state = np.array(physics, np.float64)
    model.unwrapped.state = tuple(state) if "MountainCar-v0" in str(model.spec) else state  # type: ignore[attr-defined]


def draw(ours: classic_control.Classic, physics: Any, rng: np.random.Generator) -> Any:
    """An action for Gymnasium; one of a Box may be beyond its bounds, for clipping is part of the dynamics."""
    match ours.spec.action:
        case Discrete(n):
            return int(rng.integers(n))
        case Box(low, high):
            return rng.uniform(1.5 * np.array(low), 1.5 * np.array(high)).astype(np.float32)
    raise AssertionError


def pump(ours: classic_control.Classic, physics: Any, rng: np.random.Generator) -> Any:
    """Pushes along the motion most of the time: so that goals, bounds and fast spins are met."""
    if rng.random() < 0.15:
        return draw(ours, physics, rng)
    speed = float(physics[-1] if physics.shape[0] < 4 else physics[3])
    match ours.spec.action:
        case Discrete(n):
            # An acrobot gains energy by a torque along the second link's motion; a cart pole falls either way.
            return n - 1 if speed > 0 else 0
        case Box(low, high):
            return np.array(high if speed > 0 else low, np.float32)
    raise AssertionError


@functools.cache
def stepping(pair: Pair) -> Any:
    """(one of ours, its step, its reset), compiled once."""
    ours = pair.make()
    return ours, jax.jit(ours.step), jax.jit(ours.reset)


@each
@pytest.mark.parametrize("chooser", [pytest.param(draw, marks=pytest.mark.slow), pump])
def test_every_step_is_gymnasiums_step(pair: Pair, chooser: Callable[..., Any]) -> None:
    """Put in our state before each step, Gymnasium gives what we give: for 800 steps, over ends and limits."""
    (ours, step, reset), model, rng = stepping(pair), gymnasium.make(pair.model), np.random.default_rng(0)
    key, episode, ends = jax.random.key(0), 0, 0
    state, _ = reset(key)
    model.reset(seed=0)
    for _ in range(800):
        put(model, state.physics)
        action = chooser(ours, state.physics, rng)
        state, result = step(key, state, jnp.asarray(action))
        seen, reward, terminated, truncated, _ = model.step(action)
        np.testing.assert_allclose(result.observation, seen, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(result.reward, reward, rtol=2e-5, atol=2e-5)
        assert bool(result.terminated) == terminated
        # A step that ends both ways is terminated only.
        assert bool(result.truncated) == (truncated and not terminated)
        if terminated or truncated:
            episode, ends = episode + 1, ends + int(terminated)
            state, _ = reset(jax.random.fold_in(key, episode))
            model.reset(seed=episode)
    assert episode > 0 or ours.max_steps > 800
    if chooser is pump and pair.model != "Pendulum-v1":
        assert ends > 0, "no episode ended by its task, so ends were not compared"
    model.close()


# States far from where episodes begin: every bound, wall and wrap is met within a few hundred of them.
ANYWHERE = {
    "CartPole-v1": [(-2.4, 2.4), (-3.0, 3.0), (-0.2, 0.2), (-3.0, 3.0)],
    "Pendulum-v1": [(-30.0, 30.0), (-8.0, 8.0)],
    "MountainCar-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "MountainCarContinuous-v0": [(-1.2, 0.6), (-0.07, 0.07)],
    "Acrobot-v1": [(-np.pi, np.pi), (-np.pi, np.pi), (-4 * np.pi, 4 * np.pi), (-9 * np.pi, 9 * np.pi)],
}


@each
def test_from_anywhere_the_state_within_is_gymnasiums(pair: Pair) -> None:
    """One step from each of 400 states all over the space, compared in the physics, which no cosine smooths over."""
    ours, model, rng = pair.make(), gymnasium.make(pair.model), np.random.default_rng(3)
    model.reset(seed=0)
    low, high = np.array(ANYWHERE[pair.model]).T
    starts = rng.uniform(low, high, (400, len(low))).astype(np.float32)
    actions = [draw(ours, start, rng) for start in starts]
    ends = jax.jit(jax.vmap(ours.advance))(jnp.asarray(starts), jnp.asarray(np.array(actions)))
    theirs = []
    for start, action in zip(starts, actions):
        put(model, start)
        model.unwrapped.step(action)
        theirs.append(np.asarray(model.unwrapped.state))  # type: ignore[attr-defined]
        if pair.model == "CartPole-v1":
            model.reset()  # it warns of steps beyond its end
    gap = np.asarray(ends) - np.array(theirs)
    if pair.model == "Acrobot-v1":
        assert (np.abs(np.asarray(ends)[:, :2]) <= np.pi + 1e-6).all()
        gap[:, :2] = (gap[:, :2] + np.pi) % (2 * np.pi) - np.pi  # pi and -pi are the same angle
        spins = np.abs(np.asarray(ends)[:, 2:])
        assert ((spins == spins.max(0)).sum(0) > 3).all(), "the bounds of the speeds were not met"
        # Float32 differs by under 1e-5 at most states, and by 1.6e-3 at the stiffest of 2,000 that were tried.
        np.testing.assert_allclose(gap, 0.0, atol=2e-3)
    else:
        np.testing.assert_allclose(gap, 0.0, atol=1e-5)
    model.close()


# Where episodes begin: the bounds of each number of the physics, from Gymnasium's documentation.
STARTS = {
    "CartPole-v1": [(-0.05, 0.05)] * 4,
    "Pendulum-v1": [(-np.pi, np.pi), (-1.0, 1.0)],
    "MountainCar-v0": [(-0.6, -0.4), (0.0, 0.0)],
    "MountainCarContinuous-v0": [(-0.6, -0.4), (0.0, 0.0)],
    "Acrobot-v1": [(-0.1, 0.1)] * 4,
}


@each
def test_episodes_begin_where_gymnasiums_do(pair: Pair) -> None:
    """Bounds that are nearly reached, mean and spread of an even distribution; Gymnasium's own draws as well."""
    ours, model = pair.make(), gymnasium.make(pair.model)
    state, seen = jax.vmap(ours.reset)(jax.random.split(jax.random.key(2), 4096))
    low, high = np.array(STARTS[pair.model]).T
    width = high - low
    physics = np.asarray(state.physics)
    assert (physics >= low - 1e-6).all()
    assert (physics <= high + 1e-6).all()
    np.testing.assert_allclose(physics.min(0), low, atol=float(width.max()) * 0.01)
    np.testing.assert_allclose(physics.max(0), high, atol=float(width.max()) * 0.01)
    # The mean of n even draws has a standard error of width / sqrt(12 n); five of them.
    assert (np.abs(physics.mean(0) - (low + high) / 2) <= 5 * width / np.sqrt(12 * 4096) + 1e-7).all()
    np.testing.assert_allclose(physics.std(0), width / np.sqrt(12), rtol=0.05)
    correlation = np.cov(physics.T) - np.diag(physics.var(0))
    assert (np.abs(correlation) <= 5 * np.outer(width, width) / 12 / np.sqrt(4096) + 1e-6).all(), "numbers go together"
    for seed in range(50):
        theirs, _ = model.reset(seed=seed)
        raw = np.asarray(model.unwrapped.state)  # type: ignore[attr-defined]
        assert ((raw >= low) & (raw <= high)).all()
        np.testing.assert_allclose(ours.observe(jnp.asarray(raw, jnp.float32)), theirs, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(state.steps), 0)
    np.testing.assert_allclose(np.asarray(seen), np.asarray(jax.vmap(ours.observe)(state.physics)), atol=1e-6)
    model.close()


@each
def test_the_spec_is_gymnasiums(pair: Pair) -> None:
    ours, model = pair.make(), gymnasium.make(pair.model)
    assert model.spec is not None
    assert ours.max_steps == ours.spec.max_steps == ours.spec.truncation_interval == model.spec.max_episode_steps
    assert ours.spec.observation.shape == model.observation_space.shape
    match ours.spec.action:
        case Discrete(n):
            assert n == model.action_space.n  # type: ignore[attr-defined]
        case Box(low, high):
            np.testing.assert_array_equal(low, model.action_space.low)  # type: ignore[attr-defined]
            np.testing.assert_array_equal(high, model.action_space.high)  # type: ignore[attr-defined]
    model.close()


@each
@pytest.mark.parametrize("limit", [1, 7])
def test_the_limit_truncates_at_its_step_and_not_before(pair: Pair, limit: int) -> None:
    ours = pair.make(max_steps=limit)
    step = jax.jit(ours.step)
    state, _ = ours.reset(jax.random.key(3))
    action = jnp.zeros((), jnp.int32) + 1 if isinstance(ours.spec.action, Discrete) else jnp.zeros((1,))
    for t in range(1, limit + 1):
        assert bool(ours.active(state))
        state, result = step(jax.random.key(0), state, action)
        assert (bool(result.terminated), bool(result.truncated)) == (False, t == limit)
    assert not bool(ours.active(state))


def test_a_pole_that_falls_with_the_limit_is_terminated_only() -> None:
    fallen = jnp.array([0.0, 0.0, classic_control.TILT - 1e-4, 3.0], jnp.float32)
    for steps, limit in ((0, 1), (0, 500), (499, 500)):
        ours = classic_control.cartpole(limit)
        state, result = ours.step(
            jax.random.key(0), classic_control.ClassicState(fallen, jnp.int32(steps)), jnp.int32(1)
        )
        assert (bool(result.terminated), bool(result.truncated), float(result.reward)) == (True, False, 1.0)
        assert not bool(ours.active(state))


@pytest.mark.parametrize("position", [classic_control.LEFT, -1.18])
def test_the_wall_takes_the_speed_away(position: float) -> None:
    """Both cars at and near the wall, moving left: Gymnasium is asked the same."""
    for make, name, push in (
        (classic_control.mountaincar, "MountainCar-v0", 0),
        (classic_control.mountaincar_continuous, "MountainCarContinuous-v0", np.array([-1.0], np.float32)),
    ):
        ours, model = make(), gymnasium.make(name)
        model.reset(seed=0)
        physics = jnp.array([position, -0.05], jnp.float32)
        put(model, physics)
        state, result = ours.step(
            jax.random.key(0), classic_control.ClassicState(physics, jnp.int32(0)), jnp.asarray(push)
        )
        theirs = model.step(push)[0]
        np.testing.assert_allclose(result.observation, theirs, atol=1e-6)
        np.testing.assert_allclose(state.physics, [classic_control.LEFT, 0.0], atol=1e-7)
        model.close()


@pytest.mark.parametrize("make", [pair.make for pair in PAIRS])
def test_an_episode_without_steps_is_refused(make: Callable[..., classic_control.Classic]) -> None:
    with pytest.raises(ValueError, match="max_steps is 0, but an episode has at least 1 step"):
        make(max_steps=0)


def test_equal_settings_make_equal_environments() -> None:
    """So that what is compiled for one serves the other."""
    assert classic_control.cartpole() == classic_control.cartpole()
    assert hash(classic_control.cartpole()) == hash(classic_control.cartpole())
    assert classic_control.cartpole() != classic_control.cartpole(499)
    assert classic_control.cartpole() != classic_control.acrobot()
