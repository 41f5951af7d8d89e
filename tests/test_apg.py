"""Analytic policy gradient: against finite differences, and a regulator whose best gain is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import learners
from longhaul import mesh as meshes
from longhaul import run as runs
from longhaul.algorithms import apg
from longhaul.algorithms.actor_critic import Policy
from longhaul.environment import time_limit, vectorise
from longhaul.rollout import pathwise
from longhaul.run import Named, Run, RunError
from longhaul.types import Box, Discrete, Key, Measure, Spec, TimeStep, transition

PUSH, COST, STEPS = 0.5, 0.1, 8


@dataclass(frozen=True)
class Regulator:
    """x' = x + PUSH a, and x'^2 + COST a^2 to be paid: linear and quadratic (Kalman 1960)."""

    @property
    def spec(self) -> Spec:
        return Spec(jax.ShapeDtypeStruct((1,), jnp.float32), Box((-4.0,), (4.0,)))

    def reset(self, key: Key) -> tuple[jax.Array, jax.Array]:
        x = jax.random.uniform(key, (1,), minval=-1.0, maxval=1.0)
        return x, x

    def step(self, key: Key, x: jax.Array, action: jax.Array) -> tuple[jax.Array, TimeStep]:
        after = x + PUSH * action
        reward = -jnp.sum(jnp.square(after) + COST * jnp.square(action))
        return after, transition(after, reward, jnp.bool_(False), jnp.bool_(False))

    def active(self, state: jax.Array) -> jax.Array:
        return jnp.bool_(True)

    def metrics(self, state: jax.Array) -> dict[str, Measure]:
        return {}


REGULATOR = time_limit(Regulator(), STEPS)


def best_gain() -> float:
    """a = -gain x, of an endless horizon: the fixed point of Riccati's equation, by the definition."""
    worth = 0.0  # of x^2 afterwards
    for _ in range(100):
        weight = 1.0 + worth
        gain = weight * PUSH / (COST + weight * PUSH**2)
        worth = weight * (1.0 - PUSH * gain) ** 2 + COST * gain**2
    return gain


def made(updates: int, **changes: Any) -> tuple[Any, Any]:
    settings: dict[str, Any] = {"lr": 2e-2, "gamma": 1.0, "hidden_dim": 16, "num_layers": 1}
    how = settings | changes
    algorithm = learners.make(REGULATOR.spec, apg.Config(**how), updates=updates, mean=meshes.identity)
    collect = pathwise(
        vectorise(REGULATOR, 32), algorithm.act, algorithm.memory, steps=STEPS, gamma=how["gamma"],
        detach=how.get("detach", False),
    )  # fmt: skip
    return algorithm, collect


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Across an episode's end, and with a discount; along three directions of the parameters."""
    algorithm, collect = made(1, gamma=0.9)
    carry = collect.start(jax.random.key(1))
    begun = carry.worlds.state
    carry = carry._replace(worlds=carry.worlds._replace(state=begun._replace(steps=begun.steps + 3)))

    @jax.jit
    def told(policy: Any) -> Any:
        data = collect.collect(policy, carry, jax.random.key(2), jnp.int32(0))[1]
        return data.told["objective"], data.gradient

    policy = jax.tree.map(lambda x: 3.0 * x, algorithm.policy(algorithm.init(jax.random.key(0))))
    gradient = told(policy)[1]
    rng, step = np.random.default_rng(0), 1e-2
    for _ in range(3):
        along = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 5, jnp.float32), policy)
        ahead, behind = (told(jax.tree.map(lambda x, d, s=s: x + s * d, policy, along))[0] for s in (step, -step))
        wanted = (float(ahead) - float(behind)) / (2 * step)
        found = sum(float(jnp.sum(x * d)) for x, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(along)))
        assert found == pytest.approx(wanted, rel=1e-2, abs=2e-3)
        assert abs(wanted) > 2e-2


def test_it_finds_the_best_gain() -> None:
    """That of an endless horizon, near enough: the last of eight steps alone would do less."""
    updates = 400
    algorithm, collect = made(updates)

    def update(carried: Any, i: jax.Array) -> Any:
        state, carry = carried
        carry, data, _ = collect.collect(algorithm.policy(state), carry, jax.random.key(i), i)
        state, metrics = algorithm.learn(state, data, jax.random.key(0))
        return (state, carry), metrics

    begun = algorithm.init(jax.random.key(0)), collect.start(jax.random.key(1))
    (state, _), metrics = jax.jit(lambda: jax.lax.scan(update, begun, jnp.arange(updates)))()
    x = jnp.linspace(-0.8, 0.8, 9)[:, None]
    action = algorithm.act(algorithm.policy(state), (), x, None)[0]
    np.testing.assert_allclose(action, -best_gain() * x, atol=0.15)
    objective = np.asarray(metrics["apg/objective"])
    paid = [STEPS * np.mean(objective[k]) / STEPS for k in (slice(0, 5), slice(-20, None))]
    assert paid[1] > 0.3 * paid[0]  # both are below 0
    assert isinstance(algorithm.policy(state), Policy)


def test_what_has_no_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="APG learns a vector"):
        learners.make(replace(Regulator().spec, action=Discrete(3)), apg.Config(), updates=1, mean=meshes.identity)
    for changes, message in (
        ({"topology": "actors"}, "--topology is actors, and gradients"),
        ({"algorithm": apg.Config(gamma=1.5)}, "--gamma is 1.5; it must lie in 0 to 1"),
    ):
        with pytest.raises(RunError, match=message):
            runs.resolve(replace(Run("x", Named("pendulum"), apg.Config(), devices=1), **changes))
