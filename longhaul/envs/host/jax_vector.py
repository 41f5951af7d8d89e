"""Longhaul's own environments as a `HostVector`: all worlds step in one compiled call, and go on exactly.

Every random number follows from (seed, world, episode) or (seed, world, step), so that no world's course depends on
how many others there are, and a state put back goes on with the same bits. Fresh episodes are computed for the worlds
that ended, a few at a time, by a second compiled call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs import registry
from longhaul.envs.host.vector import Finals, HostSpec, HostStep, Slot, check_action, no_finals, slot, take, write
from longhaul.spaces import Leaf, Measure, Tree, action_shape, mapped
from longhaul.types import Environment, Key, PyTree, TimeStep

Within = Callable[[PyTree], Environment]
"""context -> environment in it, also under tracing."""

EPISODES, STEPS = 0, 1
"""Streams of a world's random numbers."""


class Running(NamedTuple):
    state: PyTree  # [W, ...]
    key: jax.Array  # uint32 [W, 2]: data of each world's key
    episode: jax.Array  # int32 [W]: fresh episodes before this one
    steps: jax.Array  # int32 [W], of all episodes
    valid: jax.Array  # bool [W, A]: whose next step counts


def host_spec(environment: Environment) -> HostSpec:
    """An environment's spec without JAX."""
    spec = environment.spec
    leaf = functools.partial(jax.tree.map, lambda x: Leaf(tuple(x.shape), np.dtype(x.dtype)))
    return HostSpec(leaf(spec.observation), spec.action, spec.agents, spec.truncation_interval, spec.max_steps)


class Programs:
    """Programs compiled for `worlds` worlds of `environment`: vectors of the same may share it."""

    def __init__(
        self, environment: Environment, worlds: int, within: Within | None = None, context: PyTree = (), data: str = ""
    ) -> None:  # fmt: skip
        """With `within`, the environment is that of `context`, which is an argument of the programs: large arrays are
        no part of them. `data` is `HostSpec.data`."""
        self.environment, self.worlds = environment, worlds
        self.spec = dataclasses.replace(host_spec(environment), data=data)
        self.chunk = max(1, worlds // 8)  # worlds that one call begins anew
        self._within = within or (lambda context: environment)
        bound = functools.partial
        self.begin = bound(jax.jit(self._reset_all), context)
        self.advance = bound(jax.jit(self._one_step, donate_argnums=1), context)
        self.restart = bound(jax.jit(self._reset_worlds, donate_argnums=1), context)
        self.score = bound(jax.jit(self._score), context)
        self.likeness: Running = jax.eval_shape(self._reset_all, context, jax.random.key(0))[0]

    def _score(self, context: PyTree, state: PyTree) -> dict[str, Measure]:
        scores: dict[str, Measure] = jax.vmap(self._within(context).metrics)(state)
        return scores

    def _playing(self, environment: Environment, state: PyTree) -> jax.Array:
        active: jax.Array = jax.vmap(environment.active)(state)
        return active if self.spec.agents is not None else jnp.ones((active.shape[0], 1), bool)

    def _reset_all(self, context: PyTree, key: Key) -> tuple[Running, PyTree]:
        environment = self._within(context)
        worlds = jnp.arange(self.worlds)
        data = jax.vmap(lambda world: jax.random.key_data(jax.random.fold_in(key, world)))(worlds)
        zero = jnp.zeros(self.worlds, jnp.int32)
        state, observation = _fresh_episodes(environment, data, zero)
        return Running(state, data, zero, zero, self._playing(environment, state)), observation

    def _one_step(
        self, context: PyTree, running: Running, action: jax.Array
    ) -> tuple[Running, TimeStep, jax.Array, jax.Array]:
        """-> what follows; what it led to, nothing reset; columns whose episode ended [W, A]; worlds that are over."""
        environment = self._within(context)
        keys = jax.vmap(lambda data, number: _key(data, STEPS, number))(running.key, running.steps)
        state, led_to = jax.vmap(environment.step)(keys, running.state, action)
        ended = (led_to.terminated | led_to.truncated).reshape(running.valid.shape) & running.valid
        playing = self._playing(environment, state)
        over = ended[:, 0] if self.spec.agents is None else ~jnp.any(playing, axis=-1)
        return running._replace(state=state, steps=running.steps + 1, valid=playing), led_to, ended, over

    def _reset_worlds(
        self, context: PyTree, running: Running, observation: PyTree, which: jax.Array
    ) -> tuple[Running, PyTree]:
        """Fresh episodes in the worlds `which` int32 [chunk]; those that are no world (W) are left out."""
        environment = self._within(context)
        episode = running.episode.at[which].add(1, mode="drop")
        state, first = _fresh_episodes(environment, *(x.at[which].get(mode="clip") for x in (running.key, episode)))

        def put(into: jax.Array, values: jax.Array) -> jax.Array:
            return into.at[which].set(values, mode="drop")

        valid = put(running.valid, self._playing(environment, state))
        worlds = jax.tree.map(put, running.state, state)
        return running._replace(state=worlds, episode=episode, valid=valid), jax.tree.map(put, observation, first)


class JaxVector:
    """Worlds as `programs` step them. Algorithms may take `programs.environment.spec` as it is."""

    def __init__(self, programs: Programs) -> None:
        self.programs, self.spec, self.worlds = programs, programs.spec, programs.worlds
        self.columns = self.worlds * (self.spec.agents or 1)
        self._none = no_finals(self.spec)
        shape, _ = action_shape(self.spec.action)
        self._shape = (self.worlds, *shape) if self.spec.agents is None else (self.worlds, self.spec.agents, *shape)
        self._running: Running | None = None

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        out = slot(self.spec, self.columns) if out is None else out
        self._running, observation = self.programs.begin(jax.random.key(seed))
        write(out.observation, self._flat(observation))
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        if self._running is None:
            raise ValueError("step before reset; call reset first")
        action = check_action(self.spec, self.columns, action).reshape(self._shape)
        out = slot(self.spec, self.columns) if out is None else out
        valid = np.array(self._running.valid).reshape(-1)
        running, led_to, ended, over = self.programs.advance(self._running, action)
        flags = (led_to.reward, led_to.terminated, led_to.truncated)
        write((out.reward, out.terminated, out.truncated), tuple(np.asarray(x).reshape(-1) for x in flags))
        out.valid[:] = valid
        for flag in (out.reward, out.terminated, out.truncated):
            flag *= valid
        finals = self._finals(running, led_to.successor, np.asarray(ended).reshape(-1))
        observation, over = led_to.observation, np.flatnonzero(np.asarray(over))
        for i in range(0, len(over), self.programs.chunk):
            which = np.full(self.programs.chunk, self.worlds, np.int32)
            which[: len(over) - i] = over[i : i + self.programs.chunk]
            running, observation = self.programs.restart(running, observation, which)
        self._running = running
        write(out.observation, self._flat(observation))
        return HostStep(*out, finals)

    def _flat(self, tree: PyTree) -> Tree:
        """[W, A, ...] of JAX -> [B, ...] of NumPy, in the memory that it has where that is the host's."""
        return mapped(lambda x, leaf: np.asarray(x).reshape(self.columns, *leaf.shape), tree, self.spec.observation)

    def _finals(self, running: Running, successor: PyTree, ended: np.ndarray) -> Finals:
        if not ended.any():
            return self._none
        rows = np.flatnonzero(ended)
        scores = {
            name: Measure(*(np.asarray(part).reshape(self.columns)[rows] for part in measure))
            for name, measure in self.programs.score(running.state).items()
        }
        return Finals(rows.astype(np.int32), take(self._flat(successor), rows), scores)

    def state(self) -> Tree | None:
        if self._running is None:
            return None
        leaves = jax.tree.leaves(self._running)
        return [np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves]

    def restore(self, state: Tree) -> None:
        """Snapshot of any vector of the same environment and size; ValueError where it is of another."""
        leaves, form = jax.tree.flatten(self.programs.likeness)
        stored = [jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for x in leaves]
        if [(x.shape, x.dtype) for x in stored] != [(x.shape, x.dtype) for x in state]:
            raise ValueError(
                "the state is of another environment, or of another number of worlds; restore it in a vector made alike"
            )

        def again(value: np.ndarray, like: Any) -> jax.Array:
            """An array of its own (the next step may reuse its memory), or the key whose data it was."""
            fresh = jnp.array(value)
            return jax.random.wrap_key_data(fresh, impl=jax.random.key_impl(like)) if _is_key(like) else fresh

        self._running = jax.tree.unflatten(form, map(again, state, leaves))

    def close(self) -> None:
        self._running = None


def state_size(
    environment: Environment, worlds: int, within: Within | None = None, context: PyTree = ()
) -> int:  # fmt: skip
    """Bytes of such a vector's state and observation; nothing is computed. `within` and `context`: as of `Programs`."""
    programs = Programs(environment, worlds, within, context)
    shapes = jax.tree.leaves((programs.likeness, jax.eval_shape(programs.begin, jax.random.key(0))[1]))
    plain = [jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for x in shapes]
    return sum(x.size * x.dtype.itemsize for x in plain)


def _fresh_episodes(environment: Environment, key: jax.Array, episode: jax.Array) -> tuple[PyTree, PyTree]:
    """(states, observations) of these episodes, leaves [n, ...]."""

    def one(data: jax.Array, number: jax.Array) -> tuple[PyTree, PyTree]:
        return environment.reset(_key(data, EPISODES, number))

    return jax.vmap(one)(key, episode)


def _key(data: jax.Array, stream: int, number: jax.Array) -> Key:
    return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(data), stream), number)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


@functools.cache
def _programs(name: str, worlds: int, options: tuple[tuple[str, Any], ...]) -> Programs:
    return Programs(registry.make(name, **dict(options)), worlds)


def named(name: str, num_envs: int, seed: int, **options: Any) -> JaxVector:
    """An environment of `envs.registry` by name, with its options; what is compiled is shared with others like it."""
    return JaxVector(_programs(name, num_envs, tuple(sorted(options.items()))))
