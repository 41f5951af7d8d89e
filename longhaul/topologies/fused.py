"""The `fused` topology: environments, policy and learning in one compiled program on the device (Anakin; Hessel et al.
2021).

One compiled call runs up to `block` updates in a loop whose length is an argument, so that a run compiles once, and
where it is cut (for saving, at its end) changes no number. All that varies from update to update is drawn from the
run's key and the update's number. Over a mesh each shard has its own environments; gradients meet in the algorithm's
`mean`.

What environments read and never write (a bank of scenarios) is the *context*: an argument of the compiled program, the
same on every shard, that may change between two calls as long as its shapes do not. What it is, only `collector_in`
knows: the collector in a context, made while the program is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from longhaul.runtime import mesh as meshes
from longhaul.runtime import partition
from longhaul.runtime.batch_shards import Shards, by_device, part, whole
from longhaul.types import LEARNING, Algorithm, Collector, Key, Metrics, Progress, PyTree, is_local

CollectorIn = Callable[[PyTree], Collector]
"""context -> the collector in it."""


class Program(NamedTuple):
    """(progress, context, n) -> (progress, metrics [block, ...]): n <= block updates, of which the first n rows tell.

    Donates its progress, and leaves the context as it is.
    """

    executable: jax.stages.Compiled
    mesh: Mesh

    def __call__(self, progress: Progress, context: PyTree, n: jax.Array) -> tuple[Progress, Metrics]:
        progress, metrics = self.executable(progress, context, meshes.everywhere(n, self.mesh))
        return progress, metrics


Enter = Callable[[Key, PyTree], PyTree]
"""(key, context) -> a carry that begins in it, laid out on the mesh."""

ENTRIES = 2**32 - 1
"""What the run's key is folded with for the keys of new contexts: no update has this number."""

FINITE = "finite"
"""Beside the metrics of an update: whether its state and what it told of learning are finite numbers throughout."""

EVERYWHERE: PartitionSpec = PartitionSpec()


def start(algorithm: Algorithm, enter: Enter, context: PyTree, key: Key, mesh: Mesh) -> Progress:
    """The progress of a run that has made no update yet, laid out on `mesh`."""
    key_state, key_carry, key_run = jax.random.split(key, 3)
    everywhere = meshes.replicated(mesh)
    layouts = partition.shardings(jax.eval_shape(algorithm.init, key_state), mesh), everywhere, everywhere
    state, key_run, updates = jax.jit(
        lambda: (algorithm.init(key_state), key_run, jnp.int32(0)), out_shardings=layouts
    )()
    return Progress(state, enter(key_carry, context), key_run, updates)


def outline(algorithm: Algorithm, enter: Enter, context: PyTree, mesh: Mesh) -> Progress:
    """The shapes of what `start` gives in contexts like `context`, which may be shapes itself, laid out on `mesh`."""
    key, everywhere = jax.eval_shape(jax.random.key, 0), meshes.replicated(mesh)
    state, carry = jax.eval_shape(algorithm.init, key), jax.eval_shape(enter, key, context)
    made = Progress(state, carry, key, jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[arg-type]
    held = jax.tree.map(lambda _: meshes.sharded(mesh), carry)
    lies = Progress(partition.shardings(state, mesh), held, everywhere, everywhere)  # type: ignore[arg-type]
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), made, lies)


def is_finite(tree: PyTree) -> jax.Array:
    """Whether all floating-point numbers of a pytree are finite."""
    numbers = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, (jnp.all(jnp.isfinite(leaf)) for leaf in numbers), jnp.bool_(True))


def entering(collector_in: CollectorIn, mesh: Mesh, shards: Shards | None = None) -> Enter:
    """How a run gets into a context. Compiles once for contexts of the same shapes. `shards`: else one a device."""
    begin = beginning(collector_in, shards or by_device(mesh))
    shard = meshes.per_shard(begin, mesh, (EVERYWHERE, EVERYWHERE), PartitionSpec(meshes.DATA))
    program = jax.jit(shard, out_shardings=meshes.sharded(mesh))
    return lambda key, context: program(meshes.everywhere(key, mesh), context)


def beginning(collector_in: CollectorIn, shards: Shards) -> Enter:
    """(key, context) -> the carry of one device's shards, which begins in the context."""
    start = shards.apart(lambda context, key: collector_in(context).start(key))

    def begin(key: Key, context: PyTree) -> PyTree:
        return shards.each(lambda number, _: (start(context, jax.random.fold_in(key, number)), ()))(())[0]

    return begin


def entered(progress: Progress, enter: Enter, context: PyTree) -> Progress:
    """`progress` with all worlds at the beginning of episodes in another context; those under way end unfinished.

    The last rollout before has counted them as going on. The new ones are drawn from the run's key and its updates.
    """
    key = jax.random.fold_in(jax.random.fold_in(progress.key, ENTRIES), progress.updates)
    return progress._replace(carry=enter(key, context))


def layout(progress: Progress) -> Progress:
    """How a Progress lies along `data`: the carry is split by its leading axis, and so is what of the state is `Local`;
    the rest is in every shard."""
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
    """The program for runs like `progress` in contexts like `context`, compiled ahead: it can't compile again, whatever
    comes."""
    program = lowered(algorithm, collector_in, progress, context, mesh, block=block, shards=shards)
    return Program(program.compile(), mesh)


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
    """The program traced but not compiled yet: what a test or a profile reads. A context lies on each device of `mesh`.

    `shards` say in which parts a batch is computed; else in one a device.
    """
    shards = shards or by_device(mesh)
    if block < 1:
        raise ValueError(f"a compiled call of {block} updates; at least 1 is needed: raise log_interval")
    lies, keep = _over_model(progress, mesh)
    run = repeating(updating(algorithm, collector_in, shards, keep), block)
    specs = layout(progress), EVERYWHERE, EVERYWHERE
    shard = meshes.per_shard(run, mesh, specs, (layout(progress), EVERYWHERE))
    program = jax.jit(shard, donate_argnums=0, out_shardings=lies)
    count = meshes.everywhere(jnp.int32(block), mesh)
    return program.lower(progress, context, count)


Update = Callable[[PyTree, Progress], tuple[Progress, Metrics]]
"""(context, progress) -> the progress one update later, and what it told."""


def updating(
    algorithm: Algorithm,
    collector_in: CollectorIn,
    shards: Shards,
    keep: Callable[[Progress], Progress] = lambda progress: progress,
) -> Update:
    """One update: every shard of it collects, then learns. `keep` is put around the progress that it leads to."""
    collect = shards.apart(lambda context, *args: collector_in(context).collect(*args))

    def update(context: PyTree, progress: Progress) -> tuple[Progress, Metrics]:
        key = jax.random.fold_in(progress.key, progress.updates)

        common, own = part(progress.state)

        def shard(number: jax.Array, mine: PyTree) -> tuple[PyTree, tuple[PyTree, Metrics]]:
            carry, own = mine
            before = whole(common, own)
            # Shards draw and shuffle apart from each other; the same order everywhere would tie their columns together.
            key_data, key_learn = jax.random.split(jax.random.fold_in(key, number))
            policy = algorithm.policy(before)
            carry, data, scores = collect(context, policy, carry, key_data, progress.updates)
            with jax.named_scope(LEARNING):
                state, metrics = algorithm.learn(before, data, key_learn)
            after, own = part(state)
            # As one vector: a score that no shard can have would cross devices alone, as a constant.
            peaks = {name: shards.most(scores.pop(name)) for name in list(scores) if name.startswith("peak/")}
            sums = shards.number * shards.mean(jnp.stack(list(scores.values())))
            told = metrics | dict(zip(scores, sums)) | peaks
            # A replay is as large as it is, and what is not finite in it shows in what is learnt from it.
            return (carry, own), (after, told | {FINITE: is_finite((after, metrics))})

        (carry, own), (common, told) = shards.each(shard)((progress.carry, own))
        return keep(Progress(whole(common, own), carry, progress.key, progress.updates + 1)), told

    return update


def repeating(update: Update, block: int) -> Callable[[Progress, PyTree, jax.Array], tuple[Progress, Metrics]]:
    """(progress, context, n) -> n <= block updates later; of metrics [block, ...] the first n rows tell."""

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


def _over_model(progress: Progress, mesh: Mesh) -> tuple[Any, Callable[[Progress], Progress]]:
    """(the layout of what a call gives, where it must be said; what keeps a Progress in it from update to update)."""
    model = mesh.shape[meshes.MODEL]
    if model == 1:
        return None, lambda progress: progress
    specs = partition.specs(progress.state, model)
    everywhere = meshes.replicated(mesh)
    state = partition.shardings(progress.state, mesh)

    def keep(progress: Progress) -> Progress:
        """Else the compiler might split worlds over `model`, or put parameters together."""
        state = jax.lax.with_sharding_constraint(progress.state, specs)
        carry = jax.lax.with_sharding_constraint(progress.carry, EVERYWHERE)
        return progress._replace(state=state, carry=carry)

    lies = Progress(state, meshes.sharded(mesh), everywhere, everywhere)  # type: ignore[arg-type]
    return (lies, everywhere), keep


def fused(
    program: Program, progress: Progress, context: PyTree, *, updates: int, block: int
) -> Iterator[tuple[Progress, int, Metrics]]:
    """Goes on from `progress` to `updates` finished updates in one context; yields (progress, n, metrics) after each
    call of n, unawaited.

    `metrics` are device arrays [block, ...] whose first n rows count: read them one call late and the device never
    waits. `progress` is taken back (donated) when the iterator is advanced: save it before.
    """
    done = int(progress.updates)
    while done < updates:
        n = min(block, updates - done)
        progress, metrics = program(progress, context, jnp.int32(n))
        done += n
        yield progress, n, metrics
