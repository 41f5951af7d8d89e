"""A world whose next step follows from its observation and the action alone, so rollouts can be checked after the fact.

Numbers mod 4096 follow each other without visible order; some end the episode, some truncate it, some do both. The
observation tells the whole state exactly, so `follow` says in NumPy what any recorded step must have led to, whatever
keys were used. Agents that have ended go on raising flags and earn nonsense: whoever counts them, sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.spaces import Action, Box, Discrete, Masked, Measure, MultiDiscrete
from longhaul.types import Key, Spec, TimeStep, transition

MODULUS = 4096
NONSENSE = -1e4


class ChaosState(NamedTuple):
    n: jax.Array  # int32, or [A]
    age: jax.Array  # int32, likewise: steps since the episode began
    playing: jax.Array  # bool, likewise


class Followed(NamedTuple):
    """Result of a step."""

    n: Any
    age: Any
    reward: Any
    terminated: Any
    truncated: Any


def follow(n: Any, age: Any, code: Any, interval: int) -> Followed:
    """The step from (n, age) by an action of this code; NumPy or JAX arrays."""
    n = (n * 1103 + code * 701 + age * 37 + 12345) % MODULUS
    age = age + 1
    return Followed(n, age, (n % 13) * 0.25 - 1.0, n % 11 == 0, (n % 7 == 0) & (age >= interval))


def encode(action: Any, space: Action) -> Any:
    """An action [...] as one whole number [...]."""
    if isinstance(space, Discrete):
        return action
    if isinstance(space, MultiDiscrete):
        return action[..., 0] * 3 + action[..., 1]
    return (action.sum(-1) * 8).astype("int32")


def decode(observation: Any) -> tuple[np.ndarray, np.ndarray]:
    """(n, age), int64, of observations [..., 2] (or Masked ones)."""
    seen = np.asarray(observation.observation if isinstance(observation, Masked) else observation, np.float64)
    return ((seen[..., 0] + 0.5) * MODULUS).round().astype(int), (seen[..., 1] * 8).round().astype(int)


@dataclass(frozen=True)
class Chaos:
    """With `agents`, about a quarter of the slots is empty, but never the first."""

    action: Action = Discrete(3)
    agents: int | None = None
    interval: int = 1
    masked: bool = False
    peaks: tuple[str, ...] = ()

    @property
    def spec(self) -> Spec:
        seen: Any = jax.ShapeDtypeStruct((2,), jnp.float32)
        if self.masked:
            seen = Masked(seen, jax.ShapeDtypeStruct((3,), jnp.bool_))
        return Spec(seen, self.action, self.agents, self.interval, peaks=self.peaks)

    def observe(self, n: jax.Array, age: jax.Array) -> Any:
        seen = jnp.stack([n / MODULUS - 0.5, age / 8], axis=-1)
        if not self.masked:
            return seen
        return Masked(seen, jnp.stack([n >= 0, n % 2 == 0, n % 3 == 0], axis=-1))

    def reset(self, key: Key) -> tuple[ChaosState, Any]:
        shape = () if self.agents is None else (self.agents,)
        n = jax.random.randint(key, shape, 0, MODULUS, jnp.int32)
        playing = jnp.ones(shape, bool) if self.agents is None else (n % 4 != 0) | (jnp.arange(self.agents) == 0)
        age = jnp.zeros(shape, jnp.int32)
        return ChaosState(n, age, playing), self.observe(n, age)

    def step(self, key: Key, state: ChaosState, action: jax.Array) -> tuple[ChaosState, TimeStep]:
        led = follow(state.n, state.age, encode(action, self.action), self.interval)
        playing = state.playing & ~led.terminated & ~led.truncated
        reward = jnp.where(state.playing, led.reward, NONSENSE).astype(jnp.float32)
        seen = self.observe(led.n, led.age)
        return ChaosState(led.n, led.age, playing), transition(seen, reward, led.terminated, led.truncated)

    def active(self, state: ChaosState) -> jax.Array:
        return state.playing

    def metrics(self, state: ChaosState) -> dict[str, Measure]:
        """The score, known where it is no multiple of three; and what nobody ever knows."""
        score = state.n.astype(jnp.float32)
        return {"score": Measure(score, state.n % 3 != 0), "unknown": Measure(score, jnp.zeros_like(state.playing))}


BOX = Box((-1.0, -2.0), (1.0, 2.0))
PAIR = MultiDiscrete((2, 3))
