"""The policy as the server runs it: compiled once for each size of a batch, all environments' memory on the device.

Every action is drawn by a key of its own, fold_in of (run, batch, step, column): so what an environment is answered
depends on no other one, nor on which of them happened to be inferred together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.topologies.inference_server import batcher
from longhaul.topologies.inference_server.trajectory_buffer import Shapes
from longhaul.types import INFERENCE, Key, Params, PyTree

GROUP, PLACE, BATCH, STEP = range(4)
"""Of what is said about a group: which it is, its place in which batch, and the step of its trajectory."""

Act = Callable[[Params, PyTree, PyTree, Key | None], tuple[jax.Array, PyTree, PyTree]]


class Inferred(NamedTuple):
    """Of so many groups, [n x C, ...] each, as NumPy arrays."""

    action: np.ndarray
    extras: list[np.ndarray]
    memory: list[np.ndarray]  # before the step; [] where there is none


class _Stage(NamedTuple):
    """What the program takes of a batch of n groups, beside what it always takes."""

    about: np.ndarray  # int32 [n, 4]
    begins: np.ndarray | None  # bool [n, C]: memory is put back; None where there is none
    leaves: list[np.ndarray]  # [n x C, ...]: of the observations


class BatchedPolicy:
    """`groups` groups of `columns` environments each, of which any number is inferred at once."""

    def __init__(
        self, act: Act, memory: Callable[[int], PyTree], key: Key, policy: Params, observation: PyTree,
        *, groups: int, columns: int, fixed: bool,
    ) -> None:  # fmt: skip
        """`observation` is of one column, in ShapeDtypeStructs. Compiles all sizes; `fixed`: there is only one, so that
        every row is rounded alike, whoever else is there."""
        self.columns, self.sizes, self._fixed = columns, batcher.buckets(groups, fixed=fixed), fixed
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
        """Memory for what is said of a batch, and for what its groups see."""
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
        """-> action, extras, memory before the step [n x C, ...], and that of all environments after it."""
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
            # Groups that fill up a size are none: theirs are beyond the end, and dropped.
            kept = jax.tree.map(lambda all_, new: all_.at[mine].set(new, mode="drop"), memory, after)
        return action, extras, before, kept

    def run(
        self, policy: Params, about: np.ndarray, begins: np.ndarray, leaves: Sequence[Sequence[np.ndarray]]
    ) -> Inferred:
        """`about` int32 [n, 4]; `begins` bool [n, C]: memory is put back; `leaves`: the observations of each group."""
        n, c = len(about), self.columns
        size = batcher.bucket(self.sizes, n)
        stage = self._stages[size]
        # Where there is one size, each group has rows of its own: how a row is rounded may depend on where it lies.
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
        # Waits, so that the stage may be written again.
        found = [np.asarray(action)], *([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (extras, before))
        if n < size:
            picked = (rows[:, None] * c + np.arange(c)).ravel() if self._fixed else slice(n * c)
            found = tuple([leaf[picked] for leaf in part] for part in found)
        (acted,), drawn, memory = found
        return Inferred(acted, drawn, memory)

    @property
    def memory(self) -> list[np.ndarray]:
        """Of all environments, [groups x C, ...]; copies."""
        return [np.array(leaf) for leaf in jax.tree.leaves(self._memory)]

    def remember(self, memory: Sequence[np.ndarray]) -> None:
        """The reverse."""
        self._memory = jax.tree.unflatten(jax.tree.structure(self._memory), [jnp.array(leaf) for leaf in memory])

    def put(self, group: int, memory: Sequence[np.ndarray]) -> None:
        """The memory of one group's environments, [C, ...]."""
        all_ = self.memory
        for into, leaf in zip(all_, memory, strict=True):
            into[group * self.columns : (group + 1) * self.columns] = leaf
        self.remember(all_)


def _fold(key: Any, data: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`jax.random.fold_in` of keys' two words, as they lie beside the whole numbers [...]."""
    low = data.astype(jnp.uint32)
    return prng.threefry(key, jnp.zeros_like(low), low)


def _like(flags: jax.Array, leaf: jax.Array) -> jax.Array:
    return flags.reshape(-1, *([1] * (leaf.ndim - 1)))
