"""Environments as a user writes them, of each kind that `module:name` takes: a corridor with its goal at the right."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from longhaul.spaces import Discrete
from longhaul.types import Spec, TimeStep, transition

LENGTH, LIMIT = 5, 20


class Corridor:
    """Our protocol without what may be left out."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        seen = jax.ShapeDtypeStruct((length,), jnp.float32)
        self.spec = Spec(seen, Discrete(2), truncation_interval=LIMIT, max_steps=LIMIT)

    def see(self, place: jax.Array) -> jax.Array:
        return jax.nn.one_hot(place, self.length)

    def reset(self, key: jax.Array) -> tuple[Any, jax.Array]:
        place = jax.random.randint(key, (), 0, self.length - 2)
        return (place, jnp.int32(0)), self.see(place)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        place, steps = jnp.clip(state[0] + 2 * action - 1, 0, self.length - 1), state[1] + 1
        won = place == self.length - 1
        return (place, steps), transition(self.see(place), jnp.where(won, 1.0, -0.1), won, (steps >= LIMIT) & ~won)


class Wide(Corridor):
    """An observation that is not what the spec says."""

    def see(self, place: jax.Array) -> jax.Array:
        return jax.nn.one_hot(place, self.length + 1)


class Drifting(Corridor):
    """A state that changes its type."""

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        (place, steps), led_to = super().step(key, state, action)
        return (place.astype(jnp.float32), steps), led_to


class Endless(Corridor):
    def __init__(self) -> None:
        super().__init__()
        self.spec = Spec(self.spec.observation, Discrete(2))


class Space(NamedTuple):
    """A space as gymnax and JaxMARL have it."""

    n: int
    shape: tuple[int, ...] = ()


class Params(NamedTuple):
    max_steps_in_episode: int = LIMIT


class LikeGymnax:
    default_params = Params()

    def action_space(self, params: Params) -> Space:
        return Space(2)

    def reset_env(self, key: jax.Array, params: Params) -> tuple[jax.Array, Any]:
        state, observation = Corridor().reset(key)
        return observation, state

    def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: Params) -> Any:
        state, led_to = Corridor().step(key, state, action)
        return led_to.observation, state, led_to.reward, led_to.terminated, {}


class BraxState(NamedTuple):
    pipeline_state: Any
    obs: jax.Array
    reward: jax.Array
    done: jax.Array


class LikeBrax:
    """A point that is pushed to the origin."""

    observation_size, action_size = 2, 1

    def reset(self, rng: jax.Array) -> BraxState:
        place = jax.random.uniform(rng, (2,), minval=-1.0)
        return BraxState(place, place, jnp.float32(0.0), jnp.float32(0.0))

    def step(self, state: BraxState, action: jax.Array) -> BraxState:
        place = state.pipeline_state + 0.1 * action[0]
        far = jnp.max(jnp.abs(place)) > 2.0
        return BraxState(place, place, -jnp.sum(place**2), far.astype(jnp.float32))


class Physics(NamedTuple):
    pipeline_state: Any
    obs: jax.Array
    reward: Any
    done: jax.Array
    info: dict[str, Any]


class LikeMJX:
    """A cart that is braked by an iteration, with the parts of a state that have no gradient."""

    observation_size, action_size = 2, 1

    def reset(self, rng: jax.Array) -> Physics:
        key, drawn = jax.random.split(rng)
        place = jax.random.uniform(drawn, (2,), minval=-1.0)
        info = {"rng": key, "steps": jnp.int32(0), "muscles": jnp.zeros(0)}
        return Physics(place, place, jnp.float32(0.0), jnp.float32(0.0), info)

    def step(self, state: Physics, action: jax.Array) -> Physics:
        x, v = state.pipeline_state
        v = self.solved(v + 0.2 * action[0])
        place = jnp.stack([x + 0.2 * v, v])
        key, drawn = jax.random.split(state.info["rng"])
        info = state.info | {"rng": key, "steps": state.info["steps"] + 1}
        seen = place + 0.01 * jax.random.normal(drawn, (2,))
        return Physics(place, seen, self.reward(place), (jnp.abs(place[0]) > 1.0).astype(jnp.float32), info)

    def solved(self, force: jax.Array) -> jax.Array:
        """Velocity v with v + v^3 / 2 = force, by Newton's steps."""
        newton = lambda i, v: v - (v + 0.5 * v**3 - force) / (1.0 + 1.5 * v**2)  # noqa: E731
        return jax.lax.fori_loop(0, 3, newton, force)

    def reward(self, place: jax.Array) -> Any:
        return -jnp.sum(place**2)


class Converging(LikeMJX):
    """Newton's steps until they are small: a loop without a fixed number of turns."""

    def solved(self, force: jax.Array) -> jax.Array:
        far = lambda v: jnp.abs(v + 0.5 * v**3 - force) > 1e-3  # noqa: E731
        return jax.lax.while_loop(far, lambda v: v - (v + 0.5 * v**3 - force) / (1.0 + 1.5 * v**2), force)


class Surviving(LikeMJX):
    def reward(self, place: jax.Array) -> Any:
        return 1.0


class Reaching(LikeMJX):
    def reward(self, place: jax.Array) -> Any:
        return jnp.where(jnp.abs(place[0]) < 0.1, 1.0, 0.0)


class LikeJaxMARL:
    """Two agents in corridors of their own."""

    agents = ("left", "right")
    max_steps = LIMIT

    def __init__(self, sizes: tuple[int, int] = (2, 2)) -> None:
        self._sizes = dict(zip(self.agents, sizes, strict=True))

    def observation_space(self, agent: str) -> Space:
        return Space(LENGTH, (LENGTH,))

    def action_space(self, agent: str) -> Space:
        return Space(self._sizes[agent])

    def reset(self, key: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        begun = {name: Corridor().reset(jax.random.fold_in(key, i)) for i, name in enumerate(self.agents)}
        return {name: each[1] for name, each in begun.items()}, {name: each[0] for name, each in begun.items()}

    def step_env(self, key: jax.Array, state: Any, actions: dict[str, jax.Array]) -> Any:
        after = {name: Corridor().step(key, state[name], actions[name]) for name in self.agents}
        done = {name: led_to.terminated for name, (_, led_to) in after.items()}
        return (
            {name: led_to.observation for name, (_, led_to) in after.items()},
            {name: inner for name, (inner, _) in after.items()},
            {name: led_to.reward for name, (_, led_to) in after.items()},
            done | {"__all__": done["left"] & done["right"]},
            {},
        )


class GymCorridor(gymnasium.Env[np.ndarray, Any]):
    """The corridor in NumPy, whose attributes are its state."""

    observation_space = gymnasium.spaces.Box(0, 1, (LENGTH,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps, self.path = int(self.np_random.integers(0, LENGTH - 2)), 0, np.zeros(3)
        return self.see(), {}

    def see(self) -> np.ndarray:
        return np.eye(LENGTH, dtype=np.float32)[self.place]

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = min(max(self.place + 2 * int(action) - 1, 0), LENGTH - 1), self.steps + 1
        won = self.place == LENGTH - 1
        return self.see(), 1.0 if won else -0.1, won, self.steps >= LIMIT, {}


class ListCorridor(GymCorridor):
    """A list among the attributes: no snapshot holds it."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.visited: list[int] = []
        return super().reset(seed=seed, options=options)


class PlainCorridor(GymCorridor):
    """Observations as lists of numbers."""

    def see(self) -> Any:
        return super().see().tolist()


class OldCorridor(GymCorridor):
    """Reset as gym had it before Gymnasium."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()[0]


def fixed_vector(worlds: int = 2) -> Any:
    """Vector that has two worlds, whatever is asked for."""
    return gymnasium.vector.SyncVectorEnv([GymCorridor] * 2)


def unasked_vector() -> Any:
    return fixed_vector()


class LyingCorridor(GymCorridor):
    def see(self) -> np.ndarray:
        return super().see()[:-1]


class PairCorridor:
    """PettingZoo's parallel API: the right agent leaves after three steps."""

    possible_agents = ("left", "right")

    def __init__(self) -> None:
        self._inner = {name: GymCorridor() for name in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return GymCorridor.observation_space

    def action_space(self, agent: str) -> Any:
        return GymCorridor.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._steps = 0
        return {name: inner.reset(seed=seed)[0] for name, inner in self._inner.items()}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        self._steps += 1
        after = {name: self._inner[name].step(action) for name, action in actions.items()}
        ends = {name: each[2] or (name == "right" and self._steps == 3) for name, each in after.items()}
        cut = {name: each[3] for name, each in after.items()}
        return {n: e[0] for n, e in after.items()}, {n: e[1] for n, e in after.items()}, ends, cut, {}

    def close(self) -> None:
        pass


NOTHING = 3


class WordySpec(Corridor):
    def __init__(self) -> None:
        self.spec: Any = "a corridor"


class TypoSpec(Corridor):
    def __init__(self) -> None:
        pass

    @property
    def spec(self) -> Any:  # type: ignore[override]
        return self.lenght  # type: ignore[attr-defined]


class FiveValues(Corridor):
    def step(self, key: Any, state: Any, action: Any) -> Any:
        return self.see(state[0]), state, 0.0, False, {}


def broken() -> Corridor:
    raise RuntimeError("no map is loaded")
