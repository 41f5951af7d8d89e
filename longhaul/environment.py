"""Vectorised worlds with automatic resets and the scores of ended episodes.

`vectorise` keeps the successor of an ended step beside the first observation of the next episode (`types.TimeStep`).
Resets are cheap: fresh episodes come from a small bank that is drawn once a rollout (`Worlds.fresh`), so that a step
only chooses between two existing states. A world that ends more often within a rollout than its bank has starts meets
the same starts again, in order. Where a rollout is one step, its bank is drawn only if a world has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from longhaul import prng
from longhaul.spaces import Measure
from longhaul.types import Demonstrator, Environment, Key, PyTree, Spec, TimeStep, platform, transition


class Starts(NamedTuple):
    """Bank of fresh episodes, R a world: leaves [R, W, ...]."""

    state: PyTree
    observation: PyTree


class WorldsState(NamedTuple):
    """State of all worlds, with the running episode's return and length in each column."""

    state: PyTree  # [W, ...]
    episode_return: jax.Array  # float32 [B], of the running episode
    episode_length: jax.Array  # int32 [B]


class Tally(NamedTuple):
    """Sums over the ended episodes, one a column: the report of a rollout."""

    start: jax.Array  # int32 [W]: starts used
    episodes: jax.Array  # float32 [B]
    sums: dict[str, jax.Array]  # float32 [B] each: "return", "length" and the environment's metrics where valid
    counts: dict[str, jax.Array]  # float32 [B] each: episodes in which the environment's metric was valid
    peaks: dict[str, jax.Array]  # float32 [B] each: greatest valid value of `Spec.peaks`; -inf where none was valid


class Worlds(NamedTuple):
    """Worlds of one environment, W of them; B = W x A columns, a world's agents side by side."""

    spec: Spec
    worlds: int
    columns: int
    reset: Callable[[Key], tuple[WorldsState, PyTree]]
    fresh: Callable[[Key, int], Starts]
    tally: Callable[[], Tally]
    step: Callable[[WorldsState, Tally, jax.Array, Key, Starts | Key], tuple[WorldsState, Tally, TimeStep]]
    #     (state, tally, action, key, starts or the key that draws one start a world if any world ends)
    valid: Callable[[WorldsState], jax.Array]  # bool [B]: the column's next step will count


class _Shape(NamedTuple):
    """Layout of worlds and agents as columns."""

    worlds: int
    agents: int | None

    @property
    def columns(self) -> int:
        return self.worlds * (self.agents or 1)

    def flat(self, tree: PyTree) -> PyTree:
        """Leaves [W, A, ...] as [B, ...]."""
        if self.agents is None:
            return tree
        return jax.tree.map(lambda leaf: leaf.reshape(self.columns, *leaf.shape[2:]), tree)

    def by_world(self, tree: PyTree) -> PyTree:
        """Leaves [B, ...] as [W, A, ...]."""
        if self.agents is None:
            return tree
        return jax.tree.map(lambda leaf: leaf.reshape(self.worlds, self.agents, *leaf.shape[1:]), tree)


def vectorise(environment: Environment, worlds: int) -> Worlds:
    """Copies of `environment` that reset themselves, with W = `worlds`. Raises ValueError for fewer than 1."""
    if worlds < 1:
        raise ValueError(f"num_envs is {worlds}; at least 1 environment is needed")
    spec = environment.spec
    shape = _Shape(worlds, spec.agents)
    score = _scorer(environment, shape)
    names = sorted(jax.eval_shape(lambda key: environment.metrics(environment.reset(key)[0]), jax.random.key(0)))

    def reset(key: Key) -> tuple[WorldsState, PyTree]:
        state, observation = jax.vmap(environment.reset)(prng.split(key, worlds))
        zero = jnp.zeros(shape.columns, jnp.float32)
        return WorldsState(state, zero, zero.astype(jnp.int32)), shape.flat(observation)

    def fresh(key: Key, count: int) -> Starts:
        keys = prng.split(key, count * worlds).reshape(count, worlds)
        return Starts(*jax.vmap(jax.vmap(environment.reset))(keys))

    def empty_tally() -> Tally:
        zero = jnp.zeros(shape.columns, jnp.float32)
        sums = {name: zero for name in ["return", "length", *names]}
        peaks = {name: jnp.full_like(zero, -jnp.inf) for name in spec.peaks}
        return Tally(jnp.zeros(worlds, jnp.int32), zero, sums, {name: zero for name in names}, peaks)

    def valid(state: WorldsState) -> jax.Array:
        if spec.agents is None:
            return jnp.ones(shape.columns, bool)
        return shape.flat(jax.vmap(environment.active)(state.state))

    def step(
        state: WorldsState, tally: Tally, action: jax.Array, key: Key, starts: Starts | Key
    ) -> tuple[WorldsState, Tally, TimeStep]:
        played = valid(state)
        keys = prng.split(key, worlds)
        following, led_to = jax.vmap(environment.step)(keys, state.state, shape.by_world(action))
        ended = shape.flat(led_to.terminated | led_to.truncated) & played
        episode_return = state.episode_return + jnp.where(played, shape.flat(led_to.reward), 0.0)
        episode_length = state.episode_length + played
        scored = score(tally, following, ended, episode_return, episode_length)

        over = ended if spec.agents is None else ~jnp.any(jax.vmap(environment.active)(following), axis=-1)
        now = following, led_to.successor
        if isinstance(starts, Starts):
            begun, observation = _restart(now, starts, tally.start, over)
        else:
            begun, observation = lax.cond(
                jnp.any(over), lambda: _restart(now, fresh(starts, 1), tally.start, over), lambda: now
            )
        time_step = shape.flat(led_to._replace(observation=observation))
        new_state = WorldsState(begun, jnp.where(ended, 0.0, episode_return), jnp.where(ended, 0, episode_length))
        return new_state, Tally(tally.start + over, tally.episodes + ended, *scored), time_step

    return Worlds(spec, worlds, shape.columns, reset, fresh, empty_tally, step, valid)


Advise = Callable[[WorldsState], tuple[jax.Array, jax.Array]]
"""Expert's action in each column: (action [B, ...], bool [B]: it is known)."""


def advising(environment: Demonstrator, worlds: int) -> Advise:
    """The expert of W = `worlds` copies of an environment."""
    shape = _Shape(worlds, environment.spec.agents)

    def advise(state: WorldsState) -> tuple[jax.Array, jax.Array]:
        action, known = jax.vmap(environment.demonstrate)(state.state)
        return shape.flat(action), shape.flat(known)

    return advise


Sums = dict[str, jax.Array]


def _scorer(environment: Environment, shape: _Shape) -> Callable[..., tuple[Sums, Sums, Sums]]:
    """Function to the sums, counts and peaks of a tally after a step that led to `following` and ended some episodes.

    On a CPU the environment's metrics are behind a condition: in most steps nothing has ended, and the compiler then
    does not repeat a whole step inside each of the sums. On an accelerator the host would wait for the condition, and
    XLA computes whatever it fuses with it in one block of threads (seen on an H100: a sixth of HackMatrix's update).
    """

    def score(
        tally: Tally, following: PyTree, ended: jax.Array, episode_return: jax.Array, episode_length: jax.Array
    ) -> tuple[Sums, Sums, Sums]:
        added = {
            "return": tally.sums["return"] + jnp.where(ended, episode_return, 0.0),
            "length": tally.sums["length"] + jnp.where(ended, episode_length.astype(jnp.float32), 0.0),
        }
        names = sorted(tally.counts)

        def add(following: PyTree) -> tuple[Sums, Sums, Sums]:
            scored = shape.flat(jax.vmap(environment.metrics)(following))
            known = {name: ended & scored[name].valid for name in names}
            more = {name: tally.sums[name] + jnp.where(known[name], scored[name].value, 0.0) for name in names}
            peaks = {
                name: jnp.maximum(peak, jnp.where(known[name], scored[name].value, -jnp.inf))
                for name, peak in tally.peaks.items()
            }
            return more, {name: tally.counts[name] + known[name] for name in names}, peaks

        if not names:
            return added, {}, {}
        if platform() == "cpu":
            same = {name: tally.sums[name] for name in names}, tally.counts, tally.peaks
            more, counts, peaks = lax.cond(jnp.any(ended), lambda: add(following), lambda: same)
        else:
            more, counts, peaks = add(lax.optimization_barrier(following))
        return added | more, counts, peaks

    return score


def _restart(now: tuple[PyTree, PyTree], starts: Starts, used: jax.Array, over: jax.Array) -> tuple[PyTree, PyTree]:
    """State and observation [W, ...]; where a world is `over` [W], those of its next start, of which `used` [W] are."""
    which = used % jax.tree.leaves(starts)[0].shape[0]
    world = jnp.arange(len(over))

    def choose(new: jax.Array, bank: jax.Array) -> jax.Array:
        return jnp.where(over.reshape(-1, *([1] * (new.ndim - 1))), bank[which, world], new)

    state, observation = (jax.tree.map(choose, *pair) for pair in zip(now, starts, strict=True))
    return state, observation


class _Timed(NamedTuple):
    state: PyTree
    steps: jax.Array  # int32 [] or [A]


@dataclass(frozen=True)
class _TimeLimit:
    environment: Environment
    limit: int

    @property
    def spec(self) -> Spec:
        inner = self.environment.spec
        interval = min(self.limit, inner.truncation_interval or self.limit)
        return replace(inner, max_steps=min(self.limit, inner.max_steps or self.limit), truncation_interval=interval)

    def reset(self, key: Key) -> tuple[_Timed, PyTree]:
        state, observation = self.environment.reset(key)
        return _Timed(state, jnp.int32(0)), observation

    def step(self, key: Key, state: _Timed, action: jax.Array) -> tuple[_Timed, TimeStep]:
        inner, led_to = self.environment.step(key, state.state, action)
        steps = state.steps + 1
        truncated = led_to.truncated | (steps >= self.limit)
        return _Timed(inner, steps), transition(led_to.observation, led_to.reward, led_to.terminated, truncated)

    def active(self, state: _Timed) -> jax.Array:
        return self.environment.active(state.state) & (state.steps < self.limit)

    def metrics(self, state: _Timed) -> dict[str, Measure]:
        return self.environment.metrics(state.state)


def time_limit(environment: Environment, steps: int) -> Environment:
    """Environment whose episodes are truncated after `steps` steps. Raises ValueError for fewer than 1."""
    if steps < 1:
        raise ValueError(f"a time limit of {steps} steps; at least 1 is needed")
    return _TimeLimit(environment, steps)
