"""Analytic policy gradient: against finite differences, and a regulator whose best gain is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import registry
from longhaul.algorithms.config import APGConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.config import resolve as runs
from longhaul.config.run import Named, Run
from longhaul.driving.sim import dynamics
from longhaul.driving.sim.dynamics import Drive, Motion
from longhaul.environment import time_limit, vectorise
from longhaul.envs import registry as environments
from longhaul.envs import suite_adapters
from longhaul.networks.config import NetworkConfig
from longhaul.rollout import finite_gradient, pathwise
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.spaces import Box, Discrete, Measure
from longhaul.training.assemble import assemble
from longhaul.types import Key, Spec, TimeStep, transition
from tests.helpers.own_environments import LikeMJX
from tests.helpers.quick import quick

PUSH, COST, STEPS, GAMMA = 0.5, 1.0, 8, 0.95


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


def cost(gain: np.ndarray) -> np.ndarray:
    """Cost of a = -gain x in an episode, the mean over its beginnings: E[x^2] of -1 .. 1 is 1/3."""
    shrinks = (1.0 - PUSH * gain[:, None]) ** 2
    each = (GAMMA * shrinks) ** np.arange(STEPS) * (shrinks + COST * gain[:, None] ** 2)
    return np.asarray(each.sum(axis=1) / 3.0)


@pytest.fixture(scope="module")
def collected() -> Any:
    """(algorithm, its beginning, (policy, carry, key) -> (carry, data), compiled once)."""
    config = APGConfig(lr=2e-2, gamma=GAMMA, network=NetworkConfig(hidden_dim=16, num_layers=1))
    algorithm = registry.make(REGULATOR.spec, config, RunContext(updates=300, mean=meshes.identity))
    collect = pathwise(vectorise(REGULATOR, 32), algorithm.act, algorithm.memory, steps=STEPS, gamma=GAMMA)
    begun = quick(lambda key: (algorithm.init(key), collect.start(key)))(jax.random.key(0))
    return algorithm, begun, quick(lambda policy, carry, key: collect.collect(policy, carry, key, jnp.int32(0))[:2])


def test_the_gradient_is_that_of_finite_differences(collected: Any) -> None:
    """Across an episode's end, and with a discount; along three directions of the parameters."""
    algorithm, (state, carry), collect = collected
    begun = carry.worlds.state
    carry = carry._replace(worlds=carry.worlds._replace(state=begun._replace(steps=begun.steps + 3)))

    def objective(policy: Any) -> float:
        return float(collect(policy, carry, jax.random.key(2))[1].metrics["objective"])

    policy = jax.tree.map(lambda x: np.float32(3.0) * np.asarray(x), algorithm.policy(state))
    gradient = jax.device_get(collect(policy, carry, jax.random.key(2))[1].gradient)
    rng, step = np.random.default_rng(0), np.float32(1e-2)
    for _ in range(3):
        along = jax.tree.map(lambda x: (rng.normal(size=x.shape) / 5).astype(np.float32), policy)
        ahead, behind = (objective(jax.tree.map(lambda x, d, s=s: x + s * d, policy, along)) for s in (step, -step))
        wanted = (ahead - behind) / (2 * step)
        found = sum(float(np.sum(x * d)) for x, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(along)))
        assert found == pytest.approx(wanted, rel=2e-2, abs=2e-3)
        assert abs(wanted) > 1e-2


class Touching(LikeMJX):
    """A cart whose reward has no finite gradient on the left."""

    def reward(self, place: jax.Array) -> Any:
        return super().reward(place) + jnp.sqrt(jnp.maximum(place[0], 0.0))


def of_physics(physics: LikeMJX) -> Any:
    """(policy, (policy, key) -> data of a rollout of 6 steps through Brax's interface, whose episodes end after 4)."""
    environment = suite_adapters.adapted(suite_adapters.physics_world(physics, lambda seen: seen, 4))
    config = APGConfig(network=NetworkConfig(hidden_dim=4, num_layers=1))
    algorithm = registry.make(environment.spec, config, RunContext(updates=1, mean=meshes.identity))
    collect = pathwise(vectorise(environment, 8), algorithm.act, algorithm.memory, steps=6, gamma=GAMMA)
    policy, carry = quick(lambda key: (algorithm.policy(algorithm.init(key)), collect.start(key)))(jax.random.key(0))
    return policy, quick(lambda policy, key: collect.collect(policy, carry, key, jnp.int32(0))[1])


def test_the_gradient_through_physics_and_its_resets_is_that_of_finite_differences() -> None:
    """Of a state with keys, whole numbers and an array without elements."""
    policy, collect = of_physics(LikeMJX())
    data = collect(policy, jax.random.key(1))
    rng, step = np.random.default_rng(0), np.float32(1e-2)
    along = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), policy)
    ahead, behind = (
        float(collect(jax.tree.map(lambda x, d, s=s: x + s * d, policy, along), jax.random.key(1)).metrics["objective"])
        for s in (step, -step)
    )
    found = sum(float(np.sum(x * d)) for x, d in zip(jax.tree.leaves(data.gradient), jax.tree.leaves(along)))
    wanted = (ahead - behind) / (2 * step)
    assert found == pytest.approx(wanted, rel=2e-2) and abs(wanted) > 1e-2
    assert data.metrics["cuts"] == 0


@pytest.mark.slow
def test_a_world_without_a_finite_gradient_does_not_spoil_the_others() -> None:
    policy, collect = of_physics(Touching())
    data = collect(policy, jax.random.key(1))
    assert data.metrics["cuts"] > 0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(data.gradient))
    assert any(np.any(np.abs(x) > 1e-3) for x in jax.tree.leaves(data.gradient))


def test_what_is_not_finite_is_cut_in_its_world_alone() -> None:
    def roots(x: jax.Array, count: jax.Array) -> jax.Array:
        kept, _ = finite_gradient((x, jnp.arange(3)), 3, count)
        return jnp.sum(jnp.sqrt(jnp.maximum(kept, 0.0)))

    x = jnp.array([[1.0, 4.0], [-1.0, 4.0], [4.0, 1.0]])
    by_x, cuts = jax.grad(roots, argnums=(0, 1))(x, jnp.float32(0.0))
    np.testing.assert_allclose(by_x, [[0.5, 0.25], [0.0, 0.0], [0.25, 0.5]])
    assert cuts == 1


def test_it_finds_the_best_gain(collected: Any) -> None:
    """Known by trying all. Who looks one step ahead only would pay 32 % more."""
    algorithm, (state, carry), collect = collected
    learn = quick(algorithm.learn)
    for i in range(300):
        carry, data = collect(algorithm.policy(state), carry, jax.random.key(i))
        state, _ = learn(state, data, jax.random.key(0))
    act = quick(lambda x: algorithm.act(algorithm.policy(state), (), x, None)[0])
    x = np.linspace(-1.0, 1.0, 201, dtype=np.float32)[:, None]
    paid, weight = 0.0, np.full_like(x, 1.0 / 200)  # the mean over -1 .. 1, by the trapezoidal rule
    weight[[0, -1]] /= 2.0
    for t in range(STEPS):
        action = np.asarray(act(x))
        x = x + PUSH * action
        paid += GAMMA**t * float(np.sum(weight * (x**2 + COST * action**2)))
    gains = np.linspace(0.0, 2.0, 2001)
    best, short = cost(gains).min(), cost(np.array([PUSH / (COST + PUSH**2)]))[0]
    assert short > 1.3 * best
    assert best * 0.98 < paid < best * 1.02


def test_drivings_own_dynamics_have_their_gradient() -> None:
    """Ten steps of the bicycle, by the actions, against finite differences."""
    limits, dt = dynamics.VEHICLE, jnp.float32(0.1)
    zero = jnp.float32(0.0)
    begun = Drive(Motion(zero, zero, jnp.float32(0.3), jnp.float32(8.0)), zero, zero)

    @jax.jit
    @jax.value_and_grad
    def place(actions: jax.Array) -> jax.Array:
        step = lambda now, action: (dynamics.act(now, action, limits, dt, "bicycle", "continuous"), None)  # noqa: E731
        motion = jax.lax.scan(step, begun, actions)[0].motion
        return motion.x + 2.0 * motion.y

    rng = np.random.default_rng(0)
    actions, along = (rng.uniform(-0.4, 0.4, (10, 2)).astype(np.float32) for _ in range(2))
    gradient = place(actions)[1]
    wanted = (float(place(actions + 0.02 * along)[0]) - float(place(actions - 0.02 * along)[0])) / 0.04
    assert float(jnp.sum(gradient * along)) == pytest.approx(wanted, rel=1e-2) and abs(wanted) > 0.1


def test_choices_actors_and_a_discount_above_1_are_refused() -> None:
    with pytest.raises(ValueError, match="APG learns a vector"):
        registry.make(replace(Regulator().spec, action=Discrete(3)), APGConfig(), RunContext(1, meshes.identity))
    for changes, message in (
        ({"topology": "actors"}, "--topology is actors, and gradients"),
        ({"algorithm": APGConfig(gamma=1.5)}, "--gamma is 1.5; it must lie in 0 to 1"),
    ):
        with pytest.raises(RunError, match=message):
            runs.resolve(replace(Run("x", Named("pendulum"), APGConfig(), devices=1), **changes))


def test_an_environment_without_a_gradient_is_refused_before_training() -> None:
    name = "tests.helpers.own_environments:Surviving"
    run = runs.resolve(Run("x", Named(name), APGConfig(), devices=1, total_steps=64, num_envs=2, num_steps=4))
    with pytest.raises(ValueError, match=f"{name} has a reward without a gradient"):
        assemble(run, lambda context: environments.make(name), ())
