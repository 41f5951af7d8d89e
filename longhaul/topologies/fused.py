"""The `fused` topology: environments, policy and learning in one compiled program on the device (Anakin; Hessel et al. 2021).

One compiled call runs up to `block` updates in a loop whose length is an argument, so that a run compiles once, and where it is cut
(for saving, at its end) changes no number. All that varies from update to update is drawn from the run's key and the update's
number. Over a mesh each shard has its own environments; gradients meet in the algorithm's `mean`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from longhaul import mesh as meshes
from longhaul.types import Algorithm, Collector, Key, Metrics, Progress, PyTree


@dataclass(frozen=True)
class Config:
    updates: int  # of the whole run
    block: int = 32  # most updates a compiled call


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


def updater(algorithm: Algorithm, collector: Collector, mesh: Mesh, block: int) -> Any:
    """The compiled program (progress, n) -> (progress, metrics [block, ...]): n <= block updates; donates its progress."""
    sharded = mesh.size > 1

    def update(progress: Progress) -> tuple[Progress, Metrics]:
        key = jax.random.fold_in(progress.key, progress.updates)
        key_data, key_learn = jax.random.split(key)
        shard = meshes.shard_index()
        params = algorithm.policy(progress.state)
        carry, data, scores = collector.collect(
            params, progress.carry, jax.random.fold_in(key_data, shard), progress.updates
        )
        # Each shard shuffles its own rows; the same order everywhere would do, but would tie columns together.
        state, metrics = algorithm.learn(progress.state, data, jax.random.fold_in(key_learn, shard))
        if sharded:
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
    program = meshes.per_shard(run, mesh, (layout(), everywhere), (layout(), everywhere))
    return jax.jit(program, donate_argnums=0)


def fused(
    algorithm: Algorithm, collector: Collector, progress: Progress, config: Config, mesh: Mesh
) -> Iterator[tuple[Progress, int, PyTree]]:
    """Yields (progress, n, metrics) after every compiled call of n updates, without waiting for it.

    `metrics` are device arrays [block, ...] whose first n rows count: read them one call late and the device never waits.
    `progress` is taken back (donated) when the iterator is advanced: save it before.
    """
    if config.block < 1 or config.updates < 1:
        raise ValueError(f"block is {config.block} and updates {config.updates}; both must be at least 1")
    program = updater(algorithm, collector, mesh, config.block)
    done = int(progress.updates)
    while done < config.updates:
        n = min(config.block, config.updates - done)
        progress, metrics = program(progress, jnp.int32(n))
        done += n
        yield progress, n, metrics
