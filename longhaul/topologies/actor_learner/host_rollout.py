"""Rollouts and evaluation of environments on the host: NumPy steps, a compiled policy, the `Rollout`s of the device.

The state of the environments travels with the rollouts if the vector reports it (`HostVector.state`): a restarted actor
then continues exactly. Otherwise it starts new episodes, and its scores count those worlds.

A vector may contain steps that do not count (auto-reset), so its data are weighted by `valid`: its spec has one agent
where the spec of an ordinary environment has None.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from longhaul.envs import pictures
from longhaul.envs.host import registry
from longhaul.envs.host.gymnasium_vector import Loop
from longhaul.envs.host.vector import HostVector, LostState, Slot
from longhaul.envs.registry import spec_stub
from longhaul.spaces import Measure
from longhaul.topologies.actor_learner import learner
from longhaul.topologies.actor_learner.actor import Leaves
from longhaul.topologies.actor_learner.learner import CompiledActor
from longhaul.topologies.staleness import Ticket
from longhaul.types import Algorithm, Key, PyTree, Rollout, Successors


class Carry(NamedTuple):
    """State carried from one rollout to the next."""

    state: PyTree  # of the vector; () if it reports none
    observation: PyTree  # [B, ...]
    episode_return: np.ndarray  # float32 [B], of the running episode
    episode_length: np.ndarray  # int32 [B]
    memory: PyTree  # [B, ...]


class Sizes(NamedTuple):
    worlds: int  # of one actor
    steps: int


def entering(name: str, algorithm: Algorithm, sizes: Sizes, count: int) -> Callable[[Key, PyTree], PyTree]:
    """Initial carry of `count` actors in host environments, stacked as by `learner.entering`."""

    def enter(key: Key, context: PyTree) -> PyTree:
        each = []
        for actor in learner.process_places(count):
            with closing(registry.make(registry.describe(name), sizes.worlds)) as vector:
                key_data = np.asarray(jax.random.key_data(jax.random.fold_in(key, actor)))
                each.append(_fresh_carry(vector, algorithm, int(key_data.ravel()[-1]) >> 1))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *each)

    return enter


def _fresh_carry(vector: HostVector, algorithm: Algorithm, seed: int) -> Carry:
    """Fresh episodes everywhere."""
    observation = jax.tree.map(np.array, vector.reset(seed))
    zero = np.zeros(vector.columns, np.float32)
    state, memory = vector.state(), jax.device_get(algorithm.memory(vector.columns))
    kept = () if state is None else jax.tree.map(np.array, state)
    return Carry(kept, observation, zero, zero.astype(np.int32), memory)


def acting(name: str, algorithm: Algorithm, policy: PyTree, sizes: Sizes) -> CompiledActor:
    """Actor that steps `sizes.worlds` host worlds. The vector is created at its first rollout."""
    with closing(registry.make(registry.describe(name), sizes.worlds)) as vector:
        spec, columns, likeness = spec_stub(name).spec, vector.columns, _fresh_carry(vector, algorithm, 0)
    key = jax.random.key(0)
    drawn = jax.eval_shape(algorithm.act, policy, likeness.memory, likeness.observation, key)
    rows = sizes.steps
    slots = math.ceil(rows / (spec.truncation_interval or rows))

    def shaped(tree: PyTree, *lead: int) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), tree)

    reward = shaped(jax.ShapeDtypeStruct((), jnp.float32), rows, columns)
    flag = shaped(jax.ShapeDtypeStruct((), bool), rows, columns)
    data = Rollout(
        shaped(likeness.observation, rows), shaped(drawn[0], rows), reward, flag, flag, flag, shaped(drawn[2], rows),
        Successors(shaped(likeness.observation), shaped(likeness.observation, slots)), shaped(likeness.memory),
        shaped(jax.ShapeDtypeStruct((), jnp.int32)),
    )  # fmt: skip
    scores: Any = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in SCORES}
    shapes = learner.shapes(policy, likeness, data, scores)

    @jax.jit
    def act(weights: Leaves, memory: PyTree, observation: PyTree, key: jax.Array, where: Any) -> Any:
        batch, place, t = where
        drawn = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), batch), place)
        return algorithm.act(learner.tree(policy, weights), memory, observation, jax.random.fold_in(drawn, t))

    return CompiledActor(_Collector(name, algorithm, sizes, likeness, data, act), shapes, data, scores)


def seed_of(key: np.ndarray, ticket: Ticket) -> int:
    """Seed of episodes that begin with a ticket's rollout, from the run's key."""
    return (int(key[0]) * 1_000_003 + int(key[1]) + ticket.batch * 1009 + ticket.place) % 2**31


SCORES = ("episodes", "episode/return", "episode/length", "actors/environment_seconds", "actors/inference_seconds",
          "actors/begun_anew")  # fmt: skip
"""Scores of a rollout: sums over its finished episodes, seconds by use, and worlds restarted without their state."""


class _Collector:
    """A `Collect` with its vector and its buffers for one rollout."""

    def __init__(
        self, name: str, algorithm: Algorithm, sizes: Sizes, likeness: Carry, data: Rollout, act: Callable[..., Any]
    ) -> None:
        self._name, self._algorithm, self._sizes, self._act = name, algorithm, sizes, act
        self._form = jax.tree.structure(likeness)
        self._data = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), data)
        # One row more than a rollout has, for the observation after its last step.
        self._seen = jax.tree.map(lambda x: np.zeros((sizes.steps + 1, *x.shape), x.dtype), likeness.observation)
        self._initial = likeness.memory
        self._vector: HostVector | None = None
        self._after: Leaves | None = None

    def __call__(
        self, weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int
    ) -> tuple[Leaves, Leaves, Leaves]:
        carry: Carry = jax.tree.unflatten(self._form, [np.array(x) for x in state])
        anew = 0
        if self._vector is None:
            self._vector = registry.make(registry.describe(self._name), self._sizes.worlds)
        if state is not self._after and not self._restore_vector(carry):  # another life, or the first turn
            anew = 0 if ticket.turn == 0 else self._sizes.worlds
            carry = _fresh_carry(self._vector, self._algorithm, seed_of(key, ticket))
        carry, scores = self._collect(jax.device_put(weights), carry, key, ticket)
        data = self._data._replace(version=np.int32(version))
        self._after = jax.tree.leaves(carry)
        reported = scores | {"actors/begun_anew": anew}
        return self._after, jax.tree.leaves(data), [np.float32(reported[name]) for name in sorted(reported)]

    def _restore_vector(self, carry: Carry) -> bool:
        """Puts the vector into the state that a carry holds; False where it holds none."""
        assert self._vector is not None
        if not jax.tree.leaves(carry.state):
            return False
        try:
            self._vector.restore(carry.state)
        except LostState:
            return False
        return True

    def _collect(
        self, weights: Leaves, carry: Carry, key: np.ndarray, ticket: Ticket
    ) -> tuple[Carry, dict[str, float]]:
        vector, data, seen = self._vector, self._data, self._seen
        assert vector is not None
        jax.tree.map(lambda to, x: np.copyto(to[0], x), seen, carry.observation)
        jax.tree.map(np.copyto, data.memory, carry.memory)
        total, length, memory = carry.episode_return, carry.episode_length, carry.memory
        used_slots = np.zeros(len(total), np.int32)  # successors of truncated steps that a column has stored
        scores = dict.fromkeys(SCORES[:3], 0.0)
        inference = stepping = 0.0
        for t in range(self._sizes.steps):
            began = time.perf_counter()
            where = np.int32(ticket.batch), np.int32(ticket.place), np.int32(t)
            now = jax.tree.map(lambda x: x[t], seen)  # noqa: B023
            action, memory, extras = self._act(weights, memory, now, key[:2], where)
            chosen = np.asarray(action)
            data.action[t] = chosen
            jax.tree.map(lambda to, x: np.copyto(to[t], np.asarray(x)), data.extras, extras)  # noqa: B023
            acted = time.perf_counter()
            flags = data.terminated[t], data.truncated[t], data.valid[t]
            led_to = vector.step(chosen, Slot(jax.tree.map(lambda x: x[t + 1], seen), data.reward[t], *flags))  # noqa: B023
            finals = led_to.finals
            data.reward[t] *= data.valid[t]
            total += data.reward[t]
            length += data.valid[t]
            data.terminated[t] &= data.valid[t]
            data.truncated[t] &= data.valid[t] & ~data.terminated[t]
            if len(ended := finals.columns):
                scores["episodes"] += len(ended)
                scores["episode/return"] += float(total[ended].sum())
                scores["episode/length"] += float(length[ended].sum())
                total[ended], length[ended] = 0.0, 0
                truncated = data.truncated[t][ended]
                columns = ended[truncated]
                for slots, last in zip(jax.tree.leaves(data.successors.truncated), jax.tree.leaves(finals.observation)):
                    slots[used_slots[columns], columns] = np.asarray(last)[truncated]
                used_slots[columns] += 1
            if jax.tree.leaves(self._initial):
                begins = data.terminated[t] | data.truncated[t] | ~data.valid[t]
                memory = jax.tree.map(functools.partial(_reset_memory, begins), memory, self._initial)
            inference += acted - began
            stepping += time.perf_counter() - acted
        for to, x in zip(jax.tree.leaves(data.observation), jax.tree.leaves(seen)):
            np.copyto(to, x[:-1])
        last = jax.tree.map(lambda x: x[-1].copy(), seen)
        jax.tree.map(np.copyto, data.successors.last, last)
        state = vector.state()
        kept = () if state is None else jax.tree.map(np.array, state)
        reported = scores | {"actors/environment_seconds": stepping, "actors/inference_seconds": inference}
        return Carry(kept, last, total, length, jax.tree.map(np.asarray, memory)), reported


def _reset_memory(begins: np.ndarray, memory: Any, initial: Any) -> np.ndarray:
    """Memory with the initial value in columns whose episode begins."""
    now = np.array(memory)
    now[begins] = np.asarray(initial)[begins]
    return now


def play(name: str, algorithm: Algorithm, policy: PyTree, episodes: int, seed: int) -> dict[str, Measure]:
    """Scores of a policy that acts by its mode, float64 [E]: each world's first episode, over `episodes` worlds."""
    worlds = max(1, -(-episodes // (spec_stub(name).spec.agents or 1)))
    act = jax.jit(lambda memory, seen: algorithm.act(policy, memory, seen, None)[:2])
    with closing(registry.make(registry.describe(name), worlds, seed)) as vector:
        initial = jax.device_get(algorithm.memory(vector.columns))
        seen, memory = vector.reset(seed), initial
        total, length = np.zeros(vector.columns), np.zeros(vector.columns)
        returns, lengths = np.full(vector.columns, np.nan), np.full(vector.columns, np.nan)
        for _ in range(spec_stub(name).spec.max_steps or MOST):
            action, memory = act(memory, seen)
            led_to = vector.step(np.asarray(action))
            total, length = total + led_to.reward * led_to.valid, length + led_to.valid
            first = led_to.finals.columns[np.isnan(returns[led_to.finals.columns])]
            returns[first], lengths[first] = total[first], length[first]
            if not np.isnan(returns).any():
                break
            begins = led_to.terminated | led_to.truncated | ~led_to.valid
            memory = jax.tree.map(functools.partial(_reset_memory, begins), memory, initial)
            seen = led_to.observation
    ended = ~np.isnan(returns[:episodes])
    return {
        "return": Measure(np.nan_to_num(returns[:episodes]), ended),
        "length": Measure(np.nan_to_num(lengths[:episodes]), ended),
    }


def _rendered(name: str, environment: Any) -> np.ndarray:
    try:
        shown = environment.render()
    except Exception as error:  # of a user's environment, or of a library that it draws with
        raise ValueError(f"{name} has no picture: {error}") from error
    if not isinstance(shown, np.ndarray):
        raise ValueError(f"{name} has no picture: render() returns {type(shown).__name__}, no array of colours")
    return shown


def film(name: str, algorithm: Algorithm, policy: PyTree, most: int, seed: int) -> tuple[list[Image.Image], int, float]:
    """(pictures, steps, return) of one episode of a policy that acts by its mode: pictures are the environment's own,
    or its observations.

    Raises ValueError where it has neither.
    """
    path, _ = registry.with_options(name)
    own = path.startswith(("gymnasium/", "single/"))
    options = {"render_mode": "rgb_array"} | ({"vectorised": False} if path.startswith("gymnasium/") else {})
    act = jax.jit(lambda memory, seen: algorithm.act(policy, memory, seen, None)[:2])
    images, total = [], 0.0
    with closing(registry.make(registry.describe(name, **options if own else {}), 1, seed)) as vector:
        seen, memory = vector.reset(seed), algorithm.memory(vector.columns)
        shapes = [np.shape(leaf)[1:] for leaf in jax.tree.leaves(seen)]
        if not own and not (len(shapes) == 1 and len(shapes[0]) == 3):
            raise ValueError(f"{name} has no picture: its observations are no images")
        for _ in range(most):
            shown = _rendered(name, vector.environments[0]) if own and isinstance(vector, Loop) else None
            images.append(pictures.image(jax.tree.leaves(seen)[0][0]) if shown is None else Image.fromarray(shown))
            action, memory = act(memory, seen)
            led_to = vector.step(np.asarray(action))
            total += float(led_to.reward[0])
            if (led_to.terminated | led_to.truncated)[0]:
                break
            seen = led_to.observation
    return images, len(images), total


MOST = 27_000
"""Step limit of an evaluated episode without a limit of its own: half an hour of Atari at four frames a step."""
