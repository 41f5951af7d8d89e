"""The `fused` topology: environments, policy and learning in one compiled program on the device (Anakin; Hessel et al.
2021).

One compiled call runs up to `block` updates in a loop whose length is an argument, so that a run compiles once, and
where it is cut (for saving, at its end) changes no number. All that varies from update to update is drawn from the
run's key and the update's number. Over a mesh each shard has its own environments; gradients meet in the algorithm's
`mean`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from longhaul import mesh as meshes
from longhaul.types import Algorithm, Collector, Key, Metrics, Progress

Program = Callable[[Progress, jax.Array], tuple[Progress, Metrics]]
"""(progress, n) -> (progress, metrics [block, ...]): n <= block updates, of which the first n rows tell. Donates its
progress."""


def start(algorithm: Algorithm, collector: Collector, key: Key, mesh: Mesh) -> Progress:
    """The progress of a run that has made no update yet, laid out on `mesh`."""
    key_state, key_carry, key_run = jax.random.split(key, 3)

    def begin() -> Progress:
        carry = collector.start(jax.random.fold_in(key_carry, meshes.shard_index()))
        return Progress(algorithm.init(key_state), carry, key_run, jnp.int32(0))

    return jax.jit(meshes.per_shard(begin, mesh, (), layout()))()


def layout() -> Progress:
    """How a Progress lies on the mesh: the carry is split by its leading axis, the rest is on every device."""
    everywhere = PartitionSpec()
    return Progress(everywhere, PartitionSpec(meshes.DATA), everywhere, everywhere)  # type: ignore[arg-type]


def compiled(algorithm: Algorithm, collector: Collector, progress: Progress, mesh: Mesh, *, block: int) -> Program:
    """The program for runs like `progress`, compiled ahead: it can't compile again, whatever comes."""
    executable = lowered(algorithm, collector, progress, mesh, block=block).compile()
    return lambda progress, n: executable(progress, jax.device_put(n, meshes.replicated(mesh)))


def lowered(
    algorithm: Algorithm, collector: Collector, progress: Progress, mesh: Mesh, *, block: int
) -> jax.stages.Lowered:
    """The program traced but not compiled yet: what a test or a profile reads."""
    if block < 1:
        raise ValueError(f"a compiled call of {block} updates; at least 1 is needed: raise log_interval")

    def update(progress: Progress) -> tuple[Progress, Metrics]:
        key = jax.random.fold_in(progress.key, progress.updates)
        # Shards draw and shuffle apart from each other; the same order everywhere would tie their columns together.
        key_data, key_learn = jax.random.split(jax.random.fold_in(key, meshes.shard_index()))
        policy = algorithm.policy(progress.state)
        carry, data, scores = collector.collect(policy, progress.carry, key_data, progress.updates)
        state, metrics = algorithm.learn(progress.state, data, key_learn)
        scores = jax.tree.map(lambda x: x * mesh.size, meshes.mean_over_data(scores))
        return Progress(state, carry, progress.key, progress.updates + 1), metrics | scores

    def run(progress: Progress, n: jax.Array) -> tuple[Progress, Metrics]:
        shapes = jax.eval_shape(update, progress)[1]
        empty = jax.tree.map(lambda x: jnp.zeros((block, *x.shape), x.dtype), shapes)

        def body(i: jax.Array, carried: tuple[Progress, Metrics]) -> tuple[Progress, Metrics]:
            progress, rows = carried
            progress, row = update(progress)
            return progress, jax.tree.map(lambda all_, one: all_.at[i].set(one), rows, row)

        return jax.lax.fori_loop(0, n, body, (progress, empty))

    everywhere = PartitionSpec()
    program = jax.jit(meshes.per_shard(run, mesh, (layout(), everywhere), (layout(), everywhere)), donate_argnums=0)
    count = jax.device_put(jnp.int32(block), meshes.replicated(mesh))
    return program.lower(progress, count)


def fused(
    program: Program, progress: Progress, *, updates: int, block: int
) -> Iterator[tuple[Progress, int, Metrics]]:
    """Goes on from `progress` to `updates` finished updates; yields (progress, n, metrics) after each call of n,
    unawaited.

    `metrics` are device arrays [block, ...] whose first n rows count: read them one call late and the device never
    waits. `progress` is taken back (donated) when the iterator is advanced: save it before.
    """
    done = int(progress.updates)
    while done < updates:
        n = min(block, updates - done)
        progress, metrics = program(progress, jnp.int32(n))
        done += n
        yield progress, n, metrics
