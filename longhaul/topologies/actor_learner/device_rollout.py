"""Rollouts of environments whose tensors lie on the learner's device, as torch's: nothing passes through the host.

The learner steps them itself: `--actor-kind device`. A compiled program writes a step into the rollout and chooses the
next action; the environment takes that action, and gives its tensors, by DLPack, in the same memory. The rollout stays
where it is written, and the update reads it there. With several processes each has a device and an environment, and
their gradients meet as those of several learners do.

Numbers are those of an actor in a thread with staleness 0: same keys, same order. Such environments report no state, so
a run that is resumed begins new episodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from longhaul.envs.host.vector import DeviceStep, DeviceVector
from longhaul.runtime import mesh as meshes
from longhaul.spaces import Tree
from longhaul.topologies.actor_learner import learner
from longhaul.topologies.actor_learner.host_rollout import SCORES, seed_of
from longhaul.topologies.staleness import Ticket
from longhaul.types import Algorithm, Key, Metrics, Progress, PyTree, Rollout


class Running(NamedTuple):
    """State between two steps, on the device. Leaves of `rollout` have a leading axis of 1: the place in the batch."""

    rollout: Rollout
    memory: PyTree  # [B, ...]
    total: jax.Array  # float32 [B], return of the running episode
    length: jax.Array  # int32 [B]
    cuts: jax.Array  # int32 [B], truncations in this rollout
    sums: jax.Array  # float32 [3]: episodes that ended in this rollout, their returns and lengths


class Programs:
    """Compiled programs of a rollout: `first` acts, `next` records a step and acts, `last` records the last one.

    All donate the Running that they are given. A key is that of the run, as in `host_rollout`.
    """

    def __init__(self, algorithm: Algorithm, data: Rollout, steps: int) -> None:
        """`data`: shapes of a rollout."""
        self._algorithm, self._data, self._steps = algorithm, data, steps
        self.first = jax.jit(self._first, donate_argnums=1)
        self.next = jax.jit(self._next, donate_argnums=1)
        self.last = jax.jit(self._last, donate_argnums=0)

    def begin(self) -> Running:
        """Memory for rollouts, and no episode under way."""
        rollout = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), self._data)
        columns = self._data.reward.shape[1]
        zero, zeros = jnp.zeros(columns), jnp.zeros(columns, jnp.int32)
        return Running(rollout, self._algorithm.memory(columns), zero, zeros, zeros.copy(), jnp.zeros(3))

    def _first(
        self, policy: PyTree, running: Running, observation: Tree, key: Key, where: tuple[Any, Any], version: Any
    ) -> tuple[jax.Array, Running]:
        rollout = running.rollout
        memory = jax.tree.map(lambda to, x: to.at[0].set(x), rollout.memory, running.memory)
        rollout = rollout._replace(memory=memory, version=rollout.version.at[0].set(version))
        running = running._replace(rollout=rollout, cuts=jnp.zeros_like(running.cuts), sums=jnp.zeros(3))
        return self._act(policy, running, observation, key, where, jnp.int32(0))

    def _next(
        self, policy: PyTree, running: Running, step: DeviceStep, key: Key, where: tuple[Any, Any], t: jax.Array
    ) -> tuple[jax.Array, Running]:
        running = self._record(running, step, t - 1)
        return self._act(policy, running, step.observation, key, where, t)

    def _last(self, running: Running, step: DeviceStep) -> tuple[Running, Tree]:
        running = self._record(running, step, jnp.int32(self._steps - 1))
        successors = running.rollout.successors
        last = jax.tree.map(lambda to, x: to.at[0].set(x), successors.last, step.observation)
        rollout = running.rollout._replace(successors=successors._replace(last=last))
        return running._replace(rollout=rollout), jax.tree.map(jnp.copy, step.observation)

    def _act(
        self, policy: PyTree, running: Running, observation: Tree, key: Key, where: tuple[Any, Any], t: jax.Array
    ) -> tuple[jax.Array, Running]:
        batch, place = where
        drawn = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, batch), place), t)
        action, memory, extras = self._algorithm.act(policy, running.memory, observation, drawn)

        def put(into: PyTree, values: PyTree) -> PyTree:
            return jax.tree.map(lambda to, x: to.at[0, t].set(x), into, values)

        rollout = running.rollout
        rollout = rollout._replace(
            observation=put(rollout.observation, observation), action=put(rollout.action, action),
            extras=put(rollout.extras, extras),
        )  # fmt: skip
        return action, running._replace(rollout=rollout, memory=memory)

    def _record(self, running: Running, step: DeviceStep, t: jax.Array) -> Running:
        rollout, truncated = running.rollout, step.truncated & ~step.terminated
        ended = step.terminated | truncated
        total, length = running.total + step.reward, running.length + 1
        sums = jnp.stack([jnp.sum(ended), jnp.sum(jnp.where(ended, total, 0.0)), jnp.sum(jnp.where(ended, length, 0))])
        # Without finals, what a truncated step started from is the nearest that is known.
        before = jax.tree.map(lambda x: x[0, t], rollout.observation)
        led_to = before if step.final is None else step.final
        columns = jnp.arange(len(ended))
        cut = jax.tree.map(
            lambda to, x: to.at[0, jnp.where(truncated, running.cuts, to.shape[1]), columns].set(x, mode="drop"),
            rollout.successors.truncated, led_to,
        )  # fmt: skip
        begun = self._algorithm.memory(len(ended))

        def put_back(now: jax.Array, initial: jax.Array) -> jax.Array:
            return jnp.where(ended.reshape(-1, *(1,) * (now.ndim - 1)), initial, now)

        return Running(
            rollout._replace(
                reward=rollout.reward.at[0, t].set(step.reward),
                terminated=rollout.terminated.at[0, t].set(step.terminated),
                truncated=rollout.truncated.at[0, t].set(truncated),
                valid=rollout.valid.at[0, t].set(True),
                successors=rollout.successors._replace(truncated=cut),
            ),
            jax.tree.map(put_back, running.memory, begun), jnp.where(ended, 0.0, total), jnp.where(ended, 0, length),
            running.cuts + truncated, running.sums + sums,
        )  # fmt: skip


class Collected(NamedTuple):
    """A rollout on the device, leaves [1, ...], and the scores of its finished episodes, [1] each by name."""

    rollout: Rollout
    scores: dict[str, jax.Array]


class Collector:
    """Rollouts of a vector on this process's device. `place`: that of its rollouts in the batch."""

    def __init__(
        self, algorithm: Algorithm, data: Rollout, vector: DeviceVector, steps: int, place: int, key: np.ndarray
    ) -> None:
        self._programs, self._vector, self._steps = Programs(algorithm, data, steps), vector, steps
        self._place, self._words, self._key = np.int32(place), key, jax.random.wrap_key_data(jnp.asarray(key))
        self._slots = math.ceil(steps / (vector.spec.truncation_interval or steps))
        self._running: Running | None = None
        self._seen: Tree = None

    def collect(self, policy: PyTree, update: int) -> Collected:
        """Rollout for the update of this number; the arrays are good until the next."""
        programs, vector, anew = self._programs, self._vector, 0
        if self._running is None:
            self._running = programs.begin()
            self._seen = vector.begin_on_device(seed_of(self._words, Ticket(update, int(self._place), -1, update)))
            anew = vector.columns if update else 0
        where, began, stepping = (np.int32(update), self._place), time.perf_counter(), 0.0
        action, running = programs.first(policy, self._running, self._seen, self._key, where, np.int32(update))
        for t in range(1, self._steps + 1):
            acted = time.perf_counter()
            step = vector.on_device(action)
            stepping += time.perf_counter() - acted
            if t < self._steps:
                action, running = programs.next(policy, running, step, self._key, where, np.int32(t))
        self._running, self._seen = programs.last(running, step)
        if self._slots < self._steps and (most := int(self._running.cuts.max())) > self._slots:
            raise ValueError(
                f"the environment truncates an episode {most} times in {self._steps} steps; its limit promises "
                f"{self._slots} at most: give the option truncation_interval=1"
            )
        reported = dict(zip(SCORES[:3], self._running.sums))
        seconds = time.perf_counter() - began
        reported |= {"actors/environment_seconds": stepping, "actors/inference_seconds": seconds - stepping}
        reported |= {"actors/begun_anew": float(anew)}
        return Collected(self._running.rollout, {name: jnp.float32(reported[name])[None] for name in sorted(reported)})


def on_device(
    update: jax.stages.Compiled, algorithm: Algorithm, mesh: Mesh, collector: Collector, progress: Progress, *,
    updates: int, leaving: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Progress, int, Metrics]]:  # fmt: skip
    """Iterator over updates from `progress` to `updates` finished ones: (progress, 1, metrics), as `fused.fused`.

    The state of `progress` is donated when the iterator advances: save it before. `update` is `learner.compiled`'s, for
    as many actors as `mesh` has devices. Once `leaving`, it ends.
    """
    layout, number = meshes.sharded(mesh), mesh.shape[meshes.DATA]
    parts = learner.parted(progress.state, algorithm, shared=False)
    acting = jax.jit(algorithm.policy)
    state, key, count, done = progress.state, progress.key, progress.updates, int(progress.updates)

    def placed(leaf: jax.Array) -> jax.Array:
        shape = (number, *leaf.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, layout, [leaf])

    while done < updates:
        if leaving() and not mesh.is_multi_process:  # several processes leave after the same update
            return
        policy = jax.tree.map(lambda x: x.addressable_data(0), acting(state))
        collected = collector.collect(policy, done)
        data, scores = jax.tree.map(placed, (jax.tree.leaves(collected.rollout), jax.tree.leaves(collected.scores)))
        changing, fixed = parts.split(state)
        del state  # its arrays are donated
        changing, count, rows, _ = update(changing, fixed, key, count, data, scores)
        state = parts.join(changing, fixed)
        done += 1
        yield Progress(state, progress.carry, key, count), 1, rows
