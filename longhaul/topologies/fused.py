"""The `fused` topology: environments, policy and learning in one compiled program on the device (Anakin; Hessel et al.
2021).

One compiled call runs up to `block` updates in a loop whose length is an argument: a run compiles once, and the place
of a cut (a save, the end) changes no number. Randomness comes from the run's key and the number of the update. On a
mesh each shard has its own environments; gradients are averaged by the algorithm's `mean`.

The *context* is read-only data of the environments (a bank of scenarios): an argument of the compiled program, equal on
every shard. It may change between two calls if its shapes do not. Only `collector_in` reads it: it returns the
collector in a context while the program is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.runtime import overlap, partition
from longhaul.runtime.batch_shards import Shards, by_device, part, whole
from longhaul.types import LEARNING, Algorithm, Collector, Key, Metrics, Progress, PyTree, is_local

CollectorIn = Callable[[PyTree], Collector]
"""context -> the collector in it."""


class Program(NamedTuple):
    """(progress, context, n) -> (progress, metrics [block, ...]): n <= block updates; the first n rows are valid.

    Donates its progress, not the context.
    """

    executable: jax.stages.Compiled
    mesh: Mesh

    def __call__(self, progress: Progress, context: PyTree, n: jax.Array) -> tuple[Progress, Metrics]:
        progress, metrics = self.executable(progress, context, meshes.everywhere(n, self.mesh))
        return progress, metrics


Enter = Callable[[Key, PyTree], PyTree]
"""(key, context) -> initial carry in the context, laid out on the mesh."""

ENTRIES = 2**32 - 1
"""Number folded into the run's key when a context is entered; no update has it."""

FINITE = "finite"
"""Metric: 1 if the state and the learning metrics are all finite after the update."""

EVERYWHERE: PartitionSpec = PartitionSpec()


def start(algorithm: Algorithm, enter: Enter, context: PyTree, key: Key, mesh: Mesh) -> Progress:
    """Progress of a run before its first update, laid out on `mesh`."""
    key_state, key_carry, key_run = jax.random.split(key, 3)
    everywhere = meshes.replicated(mesh)
    layouts = partition.shardings(jax.eval_shape(algorithm.init, key_state), mesh), everywhere, everywhere
    state, key_run, updates = jax.jit(
        lambda: (algorithm.init(key_state), key_run, jnp.int32(0)), out_shardings=layouts
    )()
    return Progress(state, enter(key_carry, context), key_run, updates)


def outline(algorithm: Algorithm, enter: Enter, context: PyTree, mesh: Mesh) -> Progress:
    """Shapes and shardings of the result of `start`; `context` may consist of shapes."""
    key, everywhere = jax.eval_shape(jax.random.key, 0), meshes.replicated(mesh)
    state, carry = jax.eval_shape(algorithm.init, key), jax.eval_shape(enter, key, context)
    progress = Progress(state, carry, key, jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[arg-type]
    held = meshes.columns(carry, mesh)
    shardings = Progress(partition.shardings(state, mesh), held, everywhere, everywhere)  # type: ignore[arg-type]
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), progress, shardings)


def is_finite(tree: PyTree) -> jax.Array:
    """True if all floating-point numbers of a pytree are finite."""
    numbers = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, (jnp.all(jnp.isfinite(leaf)) for leaf in numbers), jnp.bool_(True))


def entering(collector_in: CollectorIn, mesh: Mesh, shards: Shards | None = None) -> Enter:
    """Function that enters a context. Compiles once per shape of context. `shards` defaults to one per device."""
    begin = beginning(collector_in, shards or by_device(mesh))
    shard = meshes.per_shard(begin, mesh, (EVERYWHERE, EVERYWHERE), PartitionSpec(meshes.DATA))
    if mesh.shape[meshes.FSDP] == 1:
        program = jax.jit(shard, out_shardings=meshes.sharded(mesh))
    else:
        program = jax.jit(lambda key, context: meshes.in_columns(shard(key, context), mesh))
    return lambda key, context: program(meshes.everywhere(key, mesh), context)


def beginning(collector_in: CollectorIn, shards: Shards) -> Enter:
    """(key, context) -> initial carry of one device's shards in the context."""
    start = shards.apart(lambda context, key: collector_in(context).start(key))

    def begin(key: Key, context: PyTree) -> PyTree:
        return shards.each(lambda number, _: (start(context, jax.random.fold_in(key, number)), ()))(())[0]

    return begin


def entered(progress: Progress, enter: Enter, context: PyTree) -> Progress:
    """`progress` in another context, with new episodes in all worlds; running episodes are dropped.

    New episodes are drawn from the run's key and its number of updates.
    """
    key = jax.random.fold_in(jax.random.fold_in(progress.key, ENTRIES), progress.updates)
    return progress._replace(carry=enter(key, context))


def layout(progress: Progress) -> Progress:
    """Partition of a Progress along `data`: the carry and `Local` parts of the state by their leading axis, the rest
    replicated."""
    split = PartitionSpec(meshes.DATA)
    state = jax.tree.map(lambda x: split if is_local(x) else EVERYWHERE, progress.state, is_leaf=is_local)
    return Progress(state, split, EVERYWHERE, EVERYWHERE)  # type: ignore[arg-type]


def compiled(
    algorithm: Algorithm,
    collector_in: CollectorIn,
    progress: Progress,
    context: PyTree,
    mesh: Mesh,
    *,
    block: int,
    shards: Shards | None = None,
) -> Program:
    """Program for runs like `progress` in contexts like `context`, compiled ahead of time; it never recompiles."""
    program = lowered(algorithm, collector_in, progress, context, mesh, block=block, shards=shards)
    return Program(overlap.compiled(program, mesh), mesh)


def lowered(
    algorithm: Algorithm,
    collector_in: CollectorIn,
    progress: Progress,
    context: PyTree,
    mesh: Mesh,
    *,
    block: int,
    shards: Shards | None = None,
) -> jax.stages.Lowered:
    """Program traced but not compiled, for a test or a profile. The context is replicated on `mesh`.

    `shards` are the parts in which a batch is computed; default: one per device. Raises ValueError for no update.
    """
    shards = shards or by_device(mesh)
    if block < 1:
        raise ValueError(f"a compiled call of {block} updates; at least 1 is needed: raise log_interval")
    shardings, keep = _by_compiler(progress, mesh)
    run = repeating(updating(algorithm, collector_in, shards, keep), block)
    specs = layout(progress), EVERYWHERE, EVERYWHERE
    shard = meshes.per_shard(run, mesh, specs, (layout(progress), EVERYWHERE))
    program = jax.jit(shard, donate_argnums=0, out_shardings=shardings)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=meshes.replicated(mesh))
    return program.lower(progress, context, count)


Update = Callable[[PyTree, Progress], tuple[Progress, Metrics]]
"""(context, progress) -> (progress after one update, metrics)."""


def updating(
    algorithm: Algorithm,
    collector_in: CollectorIn,
    shards: Shards,
    keep: Callable[[Progress], Progress] = lambda progress: progress,
) -> Update:
    """Update function: every shard collects, then learns. `keep` constrains the layout of the resulting progress."""
    collect = shards.apart(lambda context, *args: collector_in(context).collect(*args))

    def update(context: PyTree, progress: Progress) -> tuple[Progress, Metrics]:
        key = jax.random.fold_in(progress.key, progress.updates)
        common, own = part(keep(progress).state)

        def shard(number: jax.Array, mine: PyTree) -> tuple[PyTree, tuple[PyTree, Metrics]]:
            carry, own = mine
            before = whole(common, own)
            # Shards draw and shuffle independently; one order for all would correlate their columns.
            key_data, key_learn = jax.random.split(jax.random.fold_in(key, number))
            policy = algorithm.policy(before)
            carry, data, scores = collect(context, policy, carry, key_data, progress.updates)
            with jax.named_scope(LEARNING):
                state, metrics = algorithm.learn(before, data, key_learn)
            after, own = part(state)
            # One vector, one collective: a constant score would otherwise cross devices separately.
            peaks = {name: shards.most(scores.pop(name)) for name in list(scores) if name.startswith("peak/")}
            sums = shards.number * shards.mean(jnp.stack(list(scores.values())))
            reported = metrics | dict(zip(scores, sums)) | peaks
            # A replay buffer is too large to check; its non-finite values appear in the learning metrics.
            return (carry, own), (after, reported | {FINITE: is_finite((after, metrics))})

        (carry, own), (common, reported) = shards.each(shard)((progress.carry, own))
        return keep(Progress(whole(common, own), carry, progress.key, progress.updates + 1)), reported

    return update


def repeating(update: Update, block: int) -> Callable[[Progress, PyTree, jax.Array], tuple[Progress, Metrics]]:
    """(progress, context, n) -> progress after n <= block updates, metrics [block, ...] with n valid rows."""

    def run(progress: Progress, context: PyTree, n: jax.Array) -> tuple[Progress, Metrics]:
        once = jax.jit(lambda progress: update(context, progress), inline=True)  # traced once, for both uses
        shapes = jax.eval_shape(once, progress)[1]
        empty = jax.tree.map(lambda x: jnp.zeros((block, *x.shape), x.dtype), shapes)

        def body(i: jax.Array, carried: tuple[Progress, Metrics]) -> tuple[Progress, Metrics]:
            progress, rows = carried
            progress, row = once(progress)
            return progress, jax.tree.map(lambda all_, one: all_.at[i].set(one), rows, row)

        return jax.lax.fori_loop(0, n, body, (progress, empty))

    return run


def _by_compiler(progress: Progress, mesh: Mesh) -> tuple[Any, Callable[[Progress], Progress]]:
    """(output layout of a call, None where the compiler splits nothing; constraint that keeps a Progress in it between
    updates)."""
    if not meshes.splits(mesh):
        if all(leaf.size for leaf in jax.tree.leaves(progress)):
            return None, lambda progress: progress
        # Physics has arrays without elements (a model without muscles, say), whose layout the compiler would forget.
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), layout(progress))
        return (places, meshes.replicated(mesh)), lambda progress: progress
    specs = partition.specs_on(progress.state, mesh)
    everywhere = meshes.replicated(mesh)
    state = partition.shardings(progress.state, mesh)
    held = meshes.columns(progress.carry, mesh)
    inner = jax.tree.map(lambda each: PartitionSpec(meshes.FSDP) if meshes.FSDP in str(each.spec) else EVERYWHERE, held)

    def keep(progress: Progress) -> Progress:
        """Constraint without which the compiler might split worlds over `model`, or gather parameters."""
        state = jax.lax.with_sharding_constraint(progress.state, specs)
        carry = jax.lax.with_sharding_constraint(progress.carry, inner)
        return progress._replace(state=state, carry=carry)

    shardings = Progress(state, held, everywhere, everywhere)  # type: ignore[arg-type]
    return (shardings, everywhere), keep


def fused(
    program: Program, progress: Progress, context: PyTree, *, updates: int, block: int
) -> Iterator[tuple[Progress, int, Metrics]]:
    """Iterator over calls from `progress` to `updates` finished updates in one context: (progress, n, metrics), not yet
    computed.

    `metrics` are device arrays [block, ...] with n valid rows: read them one call late, and the device never waits.
    `progress` is donated when the iterator advances: save it before.
    """
    done = int(progress.updates)
    while done < updates:
        n = min(block, updates - done)
        progress, metrics = program(progress, context, jnp.int32(n))
        done += n
        yield progress, n, metrics
