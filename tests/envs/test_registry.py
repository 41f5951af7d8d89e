"""Names find their environments, all of which keep the contract; and the contract's check can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longhaul.envs import classic_control, registry
from longhaul.envs.probes import PROBES
from longhaul.spaces import Discrete
from longhaul.types import Environment, Key, TimeStep, transition
from tests.helpers.environment_contract import check_environment

NAMES = [name for name, _ in registry.names()]

DEAR = (
    *("hackmatrix", "hackmatrix-canonical", "hackmatrix-fixed"),  # which take up to a minute each to compile
    *("acrobot", "mountaincar", "mountaincar-continuous"),  # whose steps test_classic_control.py compares
    # as constant, masked and agents
    *(f"probe/{name}" for name in ("time_limit", "terminal_reward", "two_step", "action", "successor", "memory")),
    "probe/multi_discrete",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in DEAR else ()) for name in NAMES])
def test_every_environment_keeps_the_contract(name: str) -> None:
    # A short limit, so that ends and truncations are met; the probes have their own.
    options = {} if name.startswith("probe/") else {"max_steps": 14}
    options |= {"boards": 64} if name.startswith("hackmatrix") else {}  # all of them are compiled in
    check_environment(registry.make(name, **options), steps=32)


def test_names_are_unique_and_described_in_a_line() -> None:
    assert len(set(NAMES)) == len(NAMES) == len(PROBES) + len(registry.TABLE)
    assert all(line and "\n" not in line and len(line) <= 120 for _, line in registry.names())


def test_options_reach_the_function_that_makes_it() -> None:
    assert registry.make("cartpole") == classic_control.cartpole(500)
    assert registry.make("cartpole", max_steps=7) == classic_control.cartpole(7)
    assert registry.make("cartpole?max_steps=7") == classic_control.cartpole(7)
    assert registry.make("probe/memory", delay=4).spec.max_steps == 5
    assert registry.make("acrobot").spec.truncation_interval == 500


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cartpol", "'cartpol'; did you mean cartpole"),
        ("CartPole-v1", r"did you mean cartpole\? Gymnasium's is gymnasium/CartPole-v1"),
        ("Ant-v5", "named 'Ant-v5'; Gymnasium's is gymnasium/Ant-v5$"),
        ("ALE/SpaceInvaders-v5", "Atari's is ale/space_invaders$"),
        ("atari/Pong", "Atari's is ale/pong$"),
        ("my_env.py", "; one of your own is my_env:NAME, given in the folder of its file$"),
        ("code/my_env.py:Corridor", "; one of your own is my_env:Corridor, given in the folder of its file$"),
        ("probe/mask", "did you mean probe/masked"),
        ("probe/", "no environment is named 'probe/'"),
        ("zzz", "there are cartpole, pendulum"),
        ("", "no environment is named ''"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        registry.make(name)


def test_an_unknown_or_impossible_option_is_named() -> None:
    with pytest.raises(ValueError, match="cartpole has no option 'max_step'; did you mean max_steps"):
        registry.make("cartpole", max_step=3)
    with pytest.raises(ValueError, match="probe/masked has no option 'n'; it takes none"):
        registry.make("probe/masked", n=3)
    with pytest.raises(ValueError, match="max_steps is 0"):
        registry.make("pendulum", max_steps=0)


@dataclass(frozen=True)
class Spoiled:
    """CartPole of 3 steps with one promise broken: `spoil` works on the time step."""

    inner: classic_control.Classic
    spoil: Callable[[TimeStep], TimeStep]
    awake: bool = False  # active for ever

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, key: Key, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        after, result = self.inner.step(key, state, action)
        return after, self.spoil(result)

    def active(self, state: Any) -> jax.Array:
        return jnp.ones((), bool) if self.awake else self.inner.active(state)


SHORT = classic_control.cartpole(3)


def _respec(**changes: object) -> Environment:
    return replace(SHORT, spec=replace(SHORT.spec, **changes))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Spoiled(SHORT, lambda r: r._replace(successor=r.observation + 0.0)), "not the same object"),
        (Spoiled(SHORT, lambda r: r._replace(reward=jnp.asarray(1.0))), "reward is"),
        (Spoiled(SHORT, lambda r: r._replace(reward=jnp.ones((), jnp.int32))), "reward is"),
        (Spoiled(SHORT, lambda r: r._replace(reward=r.reward * jnp.nan)), "not finite"),
        pytest.param(
            Spoiled(SHORT, lambda r: r._replace(truncated=jnp.zeros((), bool))), "active is not", marks=pytest.mark.slow
        ),
        (Spoiled(SHORT, lambda r: r._replace(truncated=r.truncated.astype(jnp.int32))), "truncated is"),
        (Spoiled(SHORT, lambda r: transition(r.observation[:3], *r[1:4])), "different forms"),
        pytest.param(Spoiled(SHORT, lambda r: r, awake=True), "active is not", marks=pytest.mark.slow),
        (_respec(truncation_interval=4), "truncation_interval promises 4"),
        pytest.param(_respec(max_steps=2), "goes on after max_steps = 2", marks=pytest.mark.slow),
        (_respec(observation=jax.ShapeDtypeStruct((3,), jnp.float32)), "spec.observation promises"),
        (_respec(action=Discrete(0)), "no action to take"),
        (replace(SHORT, advance=lambda s, a: s.astype(jnp.float16)), "changes the form of the state"),
    ],
)
def test_the_check_finds_a_broken_promise(environment: Environment, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_environment(environment, steps=8)
