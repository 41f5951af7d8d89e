"""The `fused` topology for many runs at once: each member of a population is an independent run.

A member's update is that of `fused` on one shard. Members lie along the leading axis of state, carry and key, and the
mesh splits this axis: each device has its own members and communicates with none. A device computes `width` members
together (`vmap`), group after group; each group makes all updates of a call.

One `vmap` over all members is no alternative on a CPU: it is no faster, its last bits differ from a single run, and on
two cores such programs deadlocked (docs/seeds.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from longhaul.runtime import batch_shards
from longhaul.runtime import mesh as meshes
from longhaul.topologies import fused
from longhaul.types import Algorithm, Key, Metrics, Progress, PyTree

MEMBERS, ALL = PartitionSpec(meshes.DATA), PartitionSpec()

Start = Callable[[PyTree, Key, PyTree], Progress]
"""(member's own data, its key, context) -> its progress before the first update."""

Evolve = Callable[[PyTree, jax.Array, Key], PyTree]
"""(states [M, ...], scores float32 [M], key) -> states [M, ...] after selection."""

Within = Callable[[PyTree, PyTree], PyTree]
"""(context, member's own data) -> the member's context."""


def same(context: PyTree, own: PyTree) -> PyTree:
    """The context itself: one for all members."""
    return context


class Scored(NamedTuple):
    """Carry of a member, and the returns of its episodes since the last evolution."""

    carry: PyTree
    total: jax.Array  # float32: of returns
    episodes: jax.Array  # float32

    def mean(self) -> jax.Array:
        """Mean return of an episode; -inf if none ended."""
        return jnp.where(self.episodes > 0, self.total / jnp.maximum(self.episodes, 1.0), -jnp.inf)


def layout() -> Progress:
    """Partition of a population's Progress along `data`: members are split, the number of updates is replicated."""
    return Progress(MEMBERS, MEMBERS, MEMBERS, ALL)  # type: ignore[arg-type]


def starting(
    init: Callable[[PyTree, Key], PyTree], collector_in: fused.CollectorIn, mesh: Mesh, within: Within = same
) -> Callable[[PyTree, Key, PyTree], Progress]:
    """(own [M, ...], keys [M], context) -> progress of a population before its first update, laid out on `mesh`.

    `init`: (member's own data, key) -> its state. A member draws as `fused.start` does with its key on one device.
    """
    begin = fused.beginning(collector_in, batch_shards.alone())

    def shard(own: PyTree, keys: Key, context: PyTree) -> Progress:
        def one(member: tuple[PyTree, Key]) -> tuple[PyTree, PyTree, Key]:
            own, key = member
            key_state, key_carry, key_run = jax.random.split(key, 3)
            scored = Scored(begin(key_carry, within(context, own)), jnp.float32(0.0), jnp.float32(0.0))
            return init(own, key_state), scored, key_run

        state, carry, key = jax.lax.map(one, (own, keys))
        return Progress(state, carry, key, jnp.int32(0))

    program = jax.jit(meshes.per_shard(shard, mesh, (MEMBERS, MEMBERS, ALL), layout()))
    return lambda own, keys, context: program(own, keys, meshes.everywhere(context, mesh))


def compiled(
    algorithm: Algorithm,
    collector_in: fused.CollectorIn,
    progress: Progress,
    context: PyTree,
    mesh: Mesh,
    *,
    block: int,
    width: int,
    within: Within = same,
) -> fused.Program:
    """Program of a population like `progress`, with metrics [block, M]. A device computes `width` members together.

    With `within` a state has the member's own data as `values`. Raises ValueError for no update, or no member.
    """
    if block < 1 or width < 1:
        raise ValueError(f"a compiled call of {block} updates, {width} members together; at least 1 is needed")
    once = fused.updating(algorithm, collector_in, batch_shards.alone())

    def update(context: PyTree, progress: Progress) -> tuple[Progress, Metrics]:
        scored = progress.carry
        own = context if within is same else within(context, progress.state.values)
        after, metrics = once(own, progress._replace(carry=scored.carry))
        carry = Scored(after.carry, scored.total + metrics["episode/return"], scored.episodes + metrics["episodes"])
        return after._replace(carry=carry), metrics

    run = fused.repeating(update, block)

    def shard(progress: Progress, context: PyTree, n: jax.Array) -> tuple[Progress, Metrics]:
        def one(member: tuple[PyTree, PyTree, Key]) -> tuple[tuple[PyTree, PyTree, Key], Metrics]:
            state, carry, key = member
            after, rows = run(Progress(state, carry, key, progress.updates), context, n)
            return (after.state, after.carry, after.key), rows

        member = progress.state, progress.carry, progress.key
        own = progress.key.shape[0]
        if width >= own > 1:
            (state, carry, key), rows = jax.vmap(one)(member)
        else:
            (state, carry, key), rows = jax.lax.map(one, member, batch_size=None if 1 in (width, own) else width)
        rows = jax.tree.map(lambda row: jnp.moveaxis(row, 0, 1), rows)
        return Progress(state, carry, key, progress.updates + n), rows

    specs = layout(), ALL, ALL
    mapped = meshes.per_shard(shard, mesh, specs, (layout(), PartitionSpec(None, meshes.DATA)))
    lowered = jax.jit(mapped, donate_argnums=0).lower(progress, context, meshes.everywhere(jnp.int32(block), mesh))
    return fused.Program(lowered.compile(), mesh)


def evolving(evolve: Evolve, mesh: Mesh) -> Callable[[Progress], Progress]:
    """Evolution step between two updates; it resets the scores. Its key is the first member's key folded with the
    number of updates."""

    def step(progress: Progress) -> Progress:
        key = jax.random.fold_in(jax.random.fold_in(progress.key[0], fused.ENTRIES), progress.updates)
        scored = progress.carry
        state = evolve(progress.state, scored.mean(), key)
        zero = jnp.zeros_like(scored.total)
        return progress._replace(state=state, carry=Scored(scored.carry, zero, zero))

    split, everywhere = meshes.sharded(mesh), meshes.replicated(mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=Progress(split, split, split, everywhere))  # type: ignore[arg-type]


def fused_population(
    program: fused.Program,
    progress: Progress,
    context: PyTree,
    *,
    updates: int,
    block: int,
    evolve: Callable[[Progress], Progress] | None = None,
    every: int | None = None,
) -> Iterator[tuple[Progress, int, Metrics]]:
    """Iterator as `fused.fused`; with `evolve` the population evolves after each `every` updates except the last.

    The progress yielded at such an update has not evolved yet, so a run resumed from its checkpoint evolves equally.
    """
    done = int(progress.updates)
    while done < updates:
        until = updates
        if evolve is not None and every is not None:
            if done and done % every == 0:
                progress = evolve(progress)
            until = min(updates, (done // every + 1) * every)
        for progress, n, rows in fused.fused(program, progress, context, updates=until, block=block):
            done += n
            yield progress, n, rows
