"""CartPole whose reward is now and then not a number, by chance: other random numbers lead around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longhaul.envs import registry
from longhaul.spaces import Measure
from longhaul.types import Environment, Key, Spec, TimeStep


@dataclass(frozen=True)
class Poisonous:
    inner: Environment
    chance: float  # of a step

    @property
    def spec(self) -> Spec:
        return self.inner.spec

    def reset(self, key: Key) -> tuple[Any, Any]:
        return self.inner.reset(key)

    def step(self, key: Key, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, step = self.inner.step(key, state, action)
        bad = jax.random.uniform(jax.random.fold_in(key, 9), ()) < self.chance
        return state, step._replace(reward=jnp.where(bad, jnp.nan, step.reward))

    def active(self, state: Any) -> jax.Array:
        return self.inner.active(state)

    def metrics(self, state: Any) -> dict[str, Measure]:
        return self.inner.metrics(state)


def add(patch: pytest.MonkeyPatch, name: str, chance: float) -> None:
    """Until `patch` is undone there is an environment of that name."""
    make = registry.make
    patch.setattr(registry, "make", lambda word: Poisonous(make("cartpole"), chance) if word == name else make(word))


def poles() -> Environment:
    """The same for a command line: --env tests.helpers.nan_environment:poles."""
    return Poisonous(registry.make("cartpole"), 1e-4)
