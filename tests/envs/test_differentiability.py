"""Environments without a gradient are named before training; those of real physics have that of finite differences."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.envs import differentiability, registry, suite_adapters
from longhaul.spaces import Box
from longhaul.types import Environment
from tests.helpers.own_environments import Converging, LikeMJX, Reaching, Surviving
from tests.helpers.quick import quick


def adapted(physics: Any) -> Environment:
    return suite_adapters.adapted(suite_adapters.physics_world(physics, lambda seen: seen, 5))


def refusal(name: str, physics: Any) -> str:
    with pytest.raises(ValueError) as error:
        differentiability.check(name, lambda context: adapted(physics))
    return str(error.value)


def test_a_state_may_hold_keys_and_whole_numbers() -> None:
    differentiability.check("my_env:LikeMJX", lambda context: adapted(LikeMJX()))


@pytest.mark.parametrize("physics", [Surviving(), Reaching()])
def test_a_reward_that_is_constant_or_jumps_is_named(physics: Any) -> None:
    said = refusal("my_env:Cart", physics)
    assert said.startswith("my_env:Cart has a reward without a gradient, which APG needs: it is constant or jumps;")
    assert said.endswith("longhaul train ppo --env my_env:Cart")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("my_env:Cart", "write it as lax.scan, or lax.fori_loop with fixed bounds"),
        ("playground/WalkerRun", "playground/WalkerRun?iterations=1"),
        ("brax/ant?backend=mjx", "brax/ant?backend=mjx&iterations=1"),
        ("brax/ant", "brax/ant?backend=spring"),
    ],
)
def test_a_loop_without_a_fixed_number_of_turns_is_named_with_its_remedy(name: str, remedy: str) -> None:
    said = refusal(name, Converging())
    assert "a loop without a fixed number of turns (lax.while_loop)" in said and said.endswith(remedy)


def test_the_environment_may_read_a_context_of_which_only_the_shapes_are_known() -> None:
    class Pulled(LikeMJX):
        def __init__(self, pull: jax.Array) -> None:
            self.pull = pull

        def reward(self, place: jax.Array) -> Any:
            return jnp.sum(self.pull * place)

    context = jax.ShapeDtypeStruct((2,), jnp.float32)
    differentiability.check("pulled", lambda context: adapted(Pulled(context)), context)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "brax/reacher?backend=spring", "brax/reacher?backend=positional", "brax/reacher?backend=generalized",
        "playground/CartpoleBalance",
    ],
)  # fmt: skip
def test_the_gradient_of_real_physics_is_that_of_finite_differences(name: str) -> None:
    """By the actions of six steps of three worlds, along a direction drawn at random."""
    suite = suite_adapters.SUITES[name.partition("/")[0]]
    if importlib.util.find_spec(suite.module) is None:
        pytest.skip(f"{suite.package} is not installed")
    with jax.numpy_rank_promotion("allow"):
        environment = registry.make(name)
        differentiability.check(name, lambda context: environment)
        assert isinstance(environment.spec.action, Box)
        rng, shape = np.random.default_rng(0), (6, 3, len(environment.spec.action.low))
        taken, along = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
        state = quick(jax.vmap(environment.reset))(jax.random.split(jax.random.key(0), 3))[0]
        keys = jax.random.split(jax.random.key(1), 3)

        def step(state: Any, action: jax.Array) -> Any:
            state, led_to = jax.vmap(environment.step)(keys, state, action)
            return state, led_to.reward

        def returns(actions: jax.Array) -> tuple[jax.Array, jax.Array]:
            each = jnp.sum(jax.lax.scan(step, state, actions)[1], axis=0)
            return jnp.sum(each), each

        program = jax.jit(jax.value_and_grad(returns, has_aux=True))
        found = np.sum(np.asarray(program(0.5 * taken)[1]) * along, axis=(0, 2))
        ahead, behind = (np.asarray(program(0.5 * taken + s * along)[0][1]) for s in (2e-3, -2e-3))
    wanted = (ahead - behind) / 4e-3
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())
    assert np.abs(wanted).max() > 1e-2
