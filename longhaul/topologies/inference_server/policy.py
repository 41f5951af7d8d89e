"""Policy of the inference server, compiled once per batch size, and the rule that says when which groups are inferred.

The memory of all environments lies on the device. Every action has its own key, fold_in of (run, batch, step, column):
it depends neither on other environments nor on the groups that are inferred together.

A rule that waits for a full batch (SEED RL, Acme) stops for ever when an actor dies. Here a batch is due when every
actor that still owes a step has one waiting, or when the oldest step has waited for `deadline`. The batch is padded to
one of a few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.topologies.inference_server.trajectory_buffer import Shapes
from longhaul.types import INFERENCE, Act, Key, Params, PyTree

GROUP, PLACE, BATCH, STEP = range(4)
"""Columns of `about`, one row per group: its number, its place, its batch, and the step of its trajectory."""

DEADLINE = 0.002
"""Longest wait of a step for its batch, in seconds."""


class Rule(NamedTuple):
    slots: int  # groups of an actor
    most: int  # groups of one batch
    deadline: float = DEADLINE


class Decision(NamedTuple):
    take: tuple[int, ...]  # groups, longest waiting first; empty: wait
    wait: float  # seconds until the deadline, where there is nothing to take


def decide(rule: Rule, waiting: Mapping[int, float], owing: Collection[int], now: float) -> Decision:
    """Groups to infer now, or the seconds to wait.

    `waiting`: group -> time of arrival. `owing`: groups of running actors that still owe a step; groups of dead actors,
    and groups that wait for the learner, are not among them.
    """
    if not waiting:
        return Decision((), rule.deadline)
    order = sorted(waiting, key=waiting.__getitem__)
    here = {group // rule.slots for group in waiting}
    missed = any(group // rule.slots not in here for group in owing)
    left = rule.deadline - (now - waiting[order[0]])
    if missed and len(order) < rule.most and left > 0.0:
        return Decision((), left)
    return Decision(tuple(order[: rule.most]), 0.0)


def buckets(groups: int, *, fixed: bool) -> tuple[int, ...]:
    """Batch sizes in groups: 1, 2, 3, 4, 6, 8, 12 ... up to `groups`, so that padding is at most a third of a batch.
    `fixed`: `groups` only."""
    if fixed:
        return (groups,)
    powers = [1 << i for i in range(groups.bit_length())]
    return (*sorted({size for size in (*powers, *(3 * power for power in powers)) if size < groups}), groups)


def bucket(sizes: tuple[int, ...], count: int) -> int:
    """Smallest batch size for `count` groups."""
    return next(size for size in sizes if size >= count)


class Inferred(NamedTuple):
    """Results for n groups, NumPy arrays [n x C, ...]."""

    action: np.ndarray
    extras: list[np.ndarray]
    memory: list[np.ndarray]  # before the step; [] where there is none


class _Stage(NamedTuple):
    """Input buffers of the program for a batch of n groups."""

    about: np.ndarray  # int32 [n, 4]
    begins: np.ndarray | None  # bool [n, C]: reset the memory; None without memory
    leaves: list[np.ndarray]  # observations, [n x C, ...]


class BatchedPolicy:
    """Policy for `groups` groups of `columns` environments; any number of groups is inferred at once."""

    def __init__(
        self, act: Act, memory: Callable[[int], PyTree], key: Key, policy: Params, observation: PyTree,
        *, groups: int, columns: int, fixed: bool,
    ) -> None:  # fmt: skip
        """Compile all batch sizes. `observation`: ShapeDtypeStructs of one column. `fixed`: one size only, so that the
        rounding of a row never depends on the size of its batch."""
        self.columns, self.sizes, self._fixed = columns, buckets(groups, fixed=fixed), fixed
        self._memory = memory(groups * columns)
        self.remembers = bool(jax.tree.leaves(self._memory))
        self._act, self._initial, self._absent = act, memory, groups
        self._key = jnp.asarray(jax.random.key_data(key))
        self._program = jax.jit(self._infer, donate_argnums=1)
        self._form = jax.tree.structure(observation)
        self._stages = {size: self._stage(size, jax.tree.leaves(observation)) for size in self.sizes}
        for stage in self._stages.values():
            *found, self._memory = self._program(policy, self._memory, self._key, *stage)
        action, extras, before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found)
        self.shapes = Shapes(observation, action, extras, before)  # of one column

    def _stage(self, size: int, leaves: list[Any]) -> _Stage:
        """Input buffers for a batch of `size` groups."""
        c = self.columns
        begins = np.zeros((size, c), bool) if self.remembers else None
        return _Stage(
            np.full((size, 4), self._absent, np.int32), begins,
            [np.zeros((size * c, *leaf.shape), leaf.dtype) for leaf in leaves],
        )  # fmt: skip

    def _infer(
        self, policy: Params, memory: PyTree, key: jax.Array, about: jax.Array, begins: jax.Array | None,
        leaves: list[jax.Array],
    ) -> tuple[jax.Array, PyTree, PyTree, PyTree]:  # fmt: skip
        """Action, extras and memory before the step, [n x C, ...]; memory of all environments after it."""
        observation = jax.tree.unflatten(self._form, leaves)
        column = jnp.arange(self.columns)[None]
        mine = (about[:, GROUP, None] * self.columns + column).ravel()
        keys = _fold(_fold(key, about[:, BATCH]), about[:, STEP])
        keys = _fold([word[:, None] for word in keys], about[:, PLACE, None] * self.columns + column)
        drawn = jax.random.wrap_key_data(jnp.stack(keys, -1).reshape(-1, 2), impl="threefry2x32")
        with jax.named_scope(INFERENCE):
            fresh = self._initial(mine.size)
            found = jax.tree.map(lambda leaf: leaf.at[mine].get(mode="clip"), memory)
            before = found
            if begins is not None:
                anew = begins.ravel()
                before = jax.tree.map(lambda new, old: jnp.where(_like(anew, old), new, old), fresh, found)

            def one(memory: PyTree, observation: PyTree, key: Key) -> Any:
                held, seen = jax.tree.map(lambda leaf: leaf[None], (memory, observation))
                return jax.tree.map(lambda leaf: leaf[0], self._act(policy, held, seen, key))

            action, after, extras = jax.vmap(one)(before, observation, drawn)
            # Padding groups have indices beyond the end; their memory is dropped.
            kept = jax.tree.map(lambda all_, new: all_.at[mine].set(new, mode="drop"), memory, after)
        return action, extras, before, kept

    def run(
        self, policy: Params, about: np.ndarray, begins: np.ndarray, leaves: Sequence[Sequence[np.ndarray]]
    ) -> Inferred:
        """Actions of n groups. `about` int32 [n, 4]; `begins` bool [n, C]: reset the memory; `leaves`: observations of
        each group."""
        n, c = len(about), self.columns
        size = bucket(self.sizes, n)
        stage = self._stages[size]
        # With one size each group has fixed rows: the rounding of a row may depend on its position.
        rows = about[:, GROUP] if self._fixed else np.arange(n)
        if n < size:
            stage.about[:, GROUP] = self._absent
        stage.about[rows] = about
        if stage.begins is not None:
            stage.begins[:] = False
            stage.begins[rows] = begins
        for row, group in zip(rows.tolist(), leaves, strict=True):
            for into, leaf in zip(stage.leaves, group, strict=True):
                into[row * c : (row + 1) * c] = leaf
        action, extras, before, self._memory = self._program(policy, self._memory, self._key, *stage)
        # Waits for the program, so that the stage may be overwritten.
        found = [np.asarray(action)], *([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (extras, before))
        if n < size:
            picked = (rows[:, None] * c + np.arange(c)).ravel() if self._fixed else slice(n * c)
            found = tuple([leaf[picked] for leaf in part] for part in found)
        (acted,), drawn, memory = found
        return Inferred(acted, drawn, memory)

    @property
    def memory(self) -> list[np.ndarray]:
        """Memory of all environments, [groups x C, ...]; copies."""
        return [np.array(leaf) for leaf in jax.tree.leaves(self._memory)]

    def remember(self, memory: Sequence[np.ndarray]) -> None:
        """Replacement of the memory of all environments."""
        now, form = jax.tree.flatten(self._memory)
        given = [jax.device_put(np.array(leaf), held.sharding) for leaf, held in zip(memory, now, strict=True)]
        self._memory = jax.tree.unflatten(form, given)

    def put(self, group: int, memory: Sequence[np.ndarray]) -> None:
        """Replacement of the memory of one group's environments, [C, ...]."""
        all_ = self.memory
        for into, leaf in zip(all_, memory, strict=True):
            into[group * self.columns : (group + 1) * self.columns] = leaf
        self.remember(all_)


def _fold(key: Any, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`jax.random.fold_in` of the integers `data` [...] into keys given as two words."""
    low = data.astype(jnp.uint32)
    return prng.threefry(key, jnp.zeros_like(low), low)


def _like(flags: jax.Array, leaf: jax.Array) -> jax.Array:
    return flags.reshape(-1, *([1] * (leaf.ndim - 1)))
