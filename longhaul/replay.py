"""Replay on the device: a ring of experience [rows, columns], sampled uniformly or by priority.

Lin 1992; priorities after Schaul et al. 2016 (arXiv 1511.05952), n-step targets after Hessel et al. 2018 (arXiv
1710.02298). Where we differ:

- Observations are stored once. A step's successor is the next row's observation, except where the step was truncated:
  successors of truncated steps lie behind the ring, in as many rows as `Spec.truncation_interval` allows, so that both
  kinds are one look-up. Terminated and truncated stay two things.
- Priorities are in a tree with wide nodes (sum_tree.py), whose cost does not depend on the fill.
- An n-step return ends early at the ring's newest row: with fewer rewards, never with a wrong successor.
- A column that was restarted between two rollouts (other scenarios, an actor restarted) loses its last step, whose
  successor was not kept.

Functions are of one shard; each shard has a ring of its own (`types.Local`) and samples from it alone. All rings have
the same rows filled, so one `Cursor` serves them. With `half`, floats are kept as the bits of their bfloat16: some
compilers would widen a whole ring of bfloat16 to write one row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul import prng, sum_tree
from longhaul.sum_tree import Tree
from longhaul.types import Key, PyTree, Rollout, Spec

ON, TERMINATED, NOBODY = -1, -2, -3
"""Ending of a row: it continues; it terminated; no agent played. From 0 on: truncated, the place of its successor."""

MOST = 2**31 - 1
"""Largest number of steps on a shard: they are counted in int32."""


class Sizes(NamedTuple):
    """Sizes of the rollouts that go into a replay."""

    shards: int
    columns: int  # of each shard
    steps: int  # rows of a rollout


class Cursor(NamedTuple):
    """Position at which the rings are written next; the same on all shards."""

    at: jax.Array  # int32: row
    filled: jax.Array  # int32: rows that can be sampled, those before `at`


class Ring(NamedTuple):
    """Experience of one shard: R rows, B columns, K places for successors of truncated steps."""

    observation: PyTree  # [R + K, B, ...], packed; the row at the cursor is the newest step's successor
    last: PyTree  # [B, ...], a copy of that row: reading the ring before a write makes the compiler copy all of it
    open: jax.Array  # bool [B]: the newest step's episode continues
    action: jax.Array  # [R, B, ...]
    reward: jax.Array  # float32 [R, B]
    ending: jax.Array  # [R, B]: ON, TERMINATED, NOBODY or a place
    cuts: jax.Array  # int32 [B]: the next free place
    tree: Tree | tuple[()]  # priorities of the steps, row by row
    greatest: jax.Array  # float32: priority of a step that was never sampled


class Chosen(NamedTuple):
    """Steps of a sample, by their places."""

    place: jax.Array  # int32 [n], in the ring, row by row
    weight: jax.Array  # float32 [n]: importance, at most 1


class Transitions(NamedTuple):
    """Sample of n steps, each with the rewards and the successor of an n-step return."""

    observation: PyTree  # [n, ...]
    action: jax.Array  # [n, ...]
    rewards: jax.Array  # float32 [n_step, n], 0 past an end
    counts: jax.Array  # int32 [n]: number of them that count, m
    terminated: jax.Array  # bool [n]: the last of them ended the episode; the successor's value is zero
    successor: PyTree  # [n, ...]: the observation after m steps
    weight: jax.Array  # float32 [n]: importance, at most 1; 0 where no agent played
    chosen: jax.Array  # int32 [n]: their places in the ring


class Replay(NamedTuple):
    """Replay as pure functions of a shard's ring."""

    rows: int
    start: Callable[[], Ring]  # of all shards, leaves [shards, ...]
    add: Callable[[Ring, Cursor, Rollout], tuple[Ring, Cursor]]
    sample: Callable[[Ring, Cursor, Key, int, jax.Array | float], Transitions]
    #     (ring, cursor, key, n, exponent of the importance weights)
    choose: Callable[[Ring, Cursor, Key, int, jax.Array | float], Chosen]  # first half of `sample`: reads no experience
    look: Callable[[Ring, Cursor, Chosen], Transitions]  # second half of `sample`
    prioritise: Callable[[Ring, Transitions, jax.Array], Ring]  # (ring, a sample, its priorities float32 [n] >= 0)


def start_cursor() -> Cursor:
    return Cursor(jnp.int32(0), jnp.int32(0))


def rows_of(size: int, sizes: Sizes) -> int:
    """Rows of a ring, whole rollouts, for about `size` steps over all shards. Raises ValueError above MOST."""
    wanted = size // (sizes.shards * sizes.columns)
    rows = max(2, math.ceil(wanted / sizes.steps)) * sizes.steps
    if rows * sizes.columns > MOST:
        raise ValueError(
            f"a replay of {size} steps is {rows * sizes.columns} a device; it must be at most {MOST}: give fewer"
        )
    return rows


def discounted(batch: Transitions, gamma: float) -> tuple[jax.Array, jax.Array]:
    """(discounted sum of a sample's rewards, discount of its successor's value), float32 [n] each."""
    powers = gamma ** jnp.arange(batch.rewards.shape[0], dtype=jnp.float32)
    ahead = jnp.float32(gamma) ** batch.counts.astype(jnp.float32)
    return jnp.sum(powers[:, None] * batch.rewards, axis=0), jnp.where(batch.terminated, 0.0, ahead)


def replay(
    spec: Spec, action: jax.ShapeDtypeStruct, sizes: Sizes, size: int, *, n_step: int = 1, half: bool = False,
    prioritised: bool = False,
) -> Replay:  # fmt: skip
    """Ring of about `size` steps over all shards, for environments of `spec` and stored actions like `action` (of one
    agent).

    `half` keeps float32 observations in bfloat16; other dtypes do not change. Without `prioritised` all steps have the
    same chance.
    """
    rows = rows_of(size, sizes)
    places = min(rows, math.ceil(rows / spec.truncation_interval)) if spec.truncation_interval else 1
    layout = _Layout(
        rows, sizes.columns, places, sizes, spec, action, n_step, prioritised, *_packing(spec.observation, half)
    )
    part = functools.partial
    return Replay(
        rows, part(_start, layout), part(_add, layout), part(_sample, layout), part(_choose, layout),
        part(_look, layout), _prioritise,
    )  # fmt: skip


class _Layout(NamedTuple):
    """Layout of a shard's ring, and the forms of what it stores."""

    rows: int
    columns: int
    places: int  # for successors of truncated steps, of each column
    sizes: Sizes
    spec: Spec
    action: jax.ShapeDtypeStruct
    n_step: int
    prioritised: bool
    pack: Callable[[PyTree], PyTree]
    unpack: Callable[[PyTree], PyTree]

    @property
    def kept(self) -> Any:
        """Type of a stored ending, which may be a place."""
        return jnp.int8 if self.places <= 127 else jnp.int16 if self.places <= 32_767 else jnp.int32

    def look(self, ring: Ring, row: jax.Array, column: jax.Array) -> PyTree:
        return self.unpack(jax.tree.map(lambda x: x[row, column], ring.observation))


def _start(layout: _Layout) -> Ring:
    rows, columns = layout.rows, layout.columns
    packed = jax.eval_shape(
        lambda: layout.pack(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.spec.observation))
    )
    observation = jax.tree.map(lambda x: jnp.zeros((rows + layout.places, columns, *x.shape), x.dtype), packed)
    ring = Ring(
        observation,
        jax.tree.map(lambda x: jnp.zeros_like(x[0]), observation),
        jnp.zeros(columns, bool),
        jnp.zeros((rows, columns, *layout.action.shape), layout.action.dtype),
        jnp.zeros((rows, columns), jnp.float32),
        jnp.full((rows, columns), NOBODY, layout.kept),
        jnp.zeros(columns, jnp.int32),
        sum_tree.start(rows * columns) if layout.prioritised else (),
        jnp.float32(1.0),
    )
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (layout.sizes.shards, *x.shape)), ring)


def _add(layout: _Layout, ring: Ring, cursor: Cursor, data: Rollout) -> tuple[Ring, Cursor]:
    rows, steps, places, column = layout.rows, layout.sizes.steps, layout.places, jnp.arange(layout.columns)
    assert data.reward.shape == (steps, layout.columns), (data.reward.shape, layout.sizes)
    at, after = cursor.at, (cursor.at + steps) % rows
    before = (at - 1) % rows
    new, last, truncated = (layout.pack(x) for x in (data.observation, *data.successors))
    broken = _differ(ring.last, jax.tree.map(lambda x: x[0], new)) & ring.open
    cut = data.truncated & ~data.terminated & data.valid
    place = (ring.cuts[None] + jnp.cumsum(cut, axis=0) - cut) % places
    ending = jnp.where(cut, place, jnp.where(data.terminated, TERMINATED, ON))
    ending = jnp.where(data.valid, ending, NOBODY).astype(layout.kept)
    # A column's k-th truncation in a rollout goes to the k-th free place; places out of range are dropped.
    k = jnp.arange(jax.tree.leaves(truncated)[0].shape[0])[:, None]
    where = jnp.where(k < jnp.sum(cut, axis=0)[None], rows + (ring.cuts[None] + k) % places, rows + places)

    def write(store: jax.Array, new: jax.Array, last: jax.Array, truncated: jax.Array) -> jax.Array:
        store = _put(_put(store, new, at), last[None], after)
        return store.at[where, column].set(truncated, mode="drop")

    endings = ring.ending.at[jnp.where(broken, before, rows), column].set(NOBODY, mode="drop")
    ring = ring._replace(
        observation=jax.tree.map(write, ring.observation, new, last, truncated),
        last=last,
        open=ending[-1] == ON,
        action=_put(ring.action, data.action.astype(layout.action.dtype), at),
        reward=_put(ring.reward, data.reward, at),
        ending=_put(endings, ending, at),
        cuts=(ring.cuts + jnp.sum(cut, axis=0, dtype=jnp.int32)) % places,
    )
    if isinstance(ring.tree, Tree):
        ring = ring._replace(
            tree=_with_priorities(layout, ring, ring.tree, at, after, data.valid, jnp.where(broken, before, after))
        )
    return ring, Cursor(after, jnp.minimum(cursor.filled + steps, rows - 1))


def _with_priorities(
    layout: _Layout, ring: Ring, tree: Tree, at: jax.Array, after: jax.Array, valid: jax.Array, lost: jax.Array
) -> Tree:
    """Tree with the priorities of new rows. The row at the cursor holds the newest step's successor and cannot be
    sampled, nor can the step in row `lost` [B], whose successor is not known."""
    worth = jnp.where(valid, ring.greatest, 0.0).reshape(-1)
    nothing = jnp.zeros(layout.columns)
    rows = (at * layout.columns, worth), (after * layout.columns, nothing)
    return sum_tree.change(tree, rows, lost * layout.columns + jnp.arange(layout.columns), nothing)


def _choose(layout: _Layout, ring: Ring, cursor: Cursor, key: Key, n: int, beta: jax.Array | float) -> Chosen:
    if isinstance(ring.tree, Tree):
        index, priority = sum_tree.draw(ring.tree, key, n)
        least = jnp.min(jnp.where(priority > 0.0, priority, jnp.inf))
        return Chosen(index, jnp.where(priority > 0.0, (jnp.maximum(priority, least) / least) ** -beta, 0.0))
    drawn = prng.bits(key, (2, n))
    row = (_bounded(drawn[0], jnp.maximum(cursor.filled, 1)) + cursor.at - cursor.filled) % layout.rows
    return Chosen(row * layout.columns + _bounded(drawn[1], layout.columns), jnp.ones(n, jnp.float32))


def _sample(layout: _Layout, ring: Ring, cursor: Cursor, key: Key, n: int, beta: jax.Array | float) -> Transitions:
    return _look(layout, ring, cursor, _choose(layout, ring, cursor, key, n, beta))


def _look(layout: _Layout, ring: Ring, cursor: Cursor, chosen: Chosen) -> Transitions:
    rows, n_step, (n,) = layout.rows, layout.n_step, chosen.place.shape
    row, column = chosen.place // layout.columns, chosen.place % layout.columns
    ahead = jnp.arange(n_step)[:, None]
    newest = (cursor.at - 1 - row) % rows  # rows after this one, to the newest
    window = (row[None] + ahead) % rows, jnp.broadcast_to(column[None], (n_step, n))
    ending = ring.ending[window].astype(jnp.int32)
    exists = (ending != NOBODY) & (ahead <= newest[None])
    goes_on = jnp.cumprod(exists & (ending == ON), axis=0, dtype=jnp.int32)
    counts = exists & jnp.concatenate([jnp.ones((1, n), bool), goes_on[:-1] > 0])
    m = jnp.sum(counts, axis=0, dtype=jnp.int32)
    last = jnp.take_along_axis(ending, jnp.maximum(m - 1, 0)[None], axis=0)[0]
    following = jnp.where(last >= 0, rows + last, (row + m) % rows)
    return Transitions(
        layout.look(ring, row, column), ring.action[row, column], jnp.where(counts, ring.reward[window], 0.0), m,
        last == TERMINATED, layout.look(ring, following, column), jnp.where(m > 0, chosen.weight, 0.0), chosen.place,
    )  # fmt: skip


def _prioritise(ring: Ring, batch: Transitions, priority: jax.Array) -> Ring:
    if not isinstance(ring.tree, Tree):
        return ring
    greatest = jnp.maximum(ring.greatest, jnp.max(priority))
    # A step without weight keeps priority 0. The condition also orders the read before the write, without a copy.
    priority = jnp.where(batch.weight > 0.0, priority, 0.0)
    return ring._replace(tree=sum_tree.change(ring.tree, (), batch.chosen, priority), greatest=greatest)


def _packing(observation: PyTree, half: bool) -> tuple[Callable[[PyTree], PyTree], Callable[[PyTree], PyTree]]:
    """Functions (observation -> stored form, and back); leading axes are free."""
    halved = jax.tree.map(lambda x: half and x.dtype == jnp.float32, observation)

    def pack(seen: PyTree) -> PyTree:
        def one(x: jax.Array, halve: bool) -> jax.Array:
            return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) if halve else x

        return jax.tree.map(one, seen, halved)

    def unpack(packed: PyTree) -> PyTree:
        def one(x: jax.Array, halve: bool) -> jax.Array:
            return jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32) if halve else x

        return jax.tree.map(one, packed, halved)

    return pack, unpack


def _put(store: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(store, rows, at, axis=0)


def _differ(left: PyTree, right: PyTree) -> jax.Array:
    """Flag bool [B]: any leaf [B, ...] differs."""

    def leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.any((x != y).reshape(x.shape[0], -1), axis=-1)

    return jnp.any(jnp.stack(jax.tree.leaves(jax.tree.map(leaf, left, right))), axis=0)


def _bounded(bits: jax.Array, bound: Any) -> jax.Array:
    """Random bits as int32 below `bound`; biased by less than bound / 2^32."""
    return (bits % jnp.asarray(bound, jnp.uint32)).astype(jnp.int32)
