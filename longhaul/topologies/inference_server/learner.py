"""The `central` topology: actors only step environments; the policy acts for all of them on the learner's device, in
the learner's process (SEED RL; Espeholt et al. 2020).

Where we differ: the staleness S of experience is bounded by construction (`staleness`). With S = 0 nothing acts during
an update; with S > 0 actors are served while the device learns.

Batches lie in memory in the learner's layout; it moves them without reading them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from longhaul.envs.host import registry
from longhaul.runtime import mesh as meshes
from longhaul.runtime import overlap, partition
from longhaul.runtime.batch_shards import part
from longhaul.topologies import fused
from longhaul.topologies.inference_server import actor
from longhaul.topologies.inference_server.server import EnvSnapshot, Server
from longhaul.topologies.inference_server.trajectory_buffer import Sums
from longhaul.types import LEARNING, Algorithm, Key, Metrics, Params, Progress, PyTree, Rollout, Successors

ACTING = 2**32 - 2
"""Number folded into the run's key for the keys of actions; no update has it."""

AROUND = 0.005
"""Seconds the server may wait for actors before it checks whether the learner is done."""


def acting_key(progress: Progress) -> Key:
    """Key of all actions of a run."""
    return jax.random.fold_in(progress.key, ACTING)


def local(policy: Params, device: jax.Device) -> Params:
    """Copy on a device of a policy that lies on a mesh, whole or in parts."""

    def nearest(leaf: jax.Array) -> jax.Array:
        return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf

    return jax.device_put(jax.tree.map(nearest, policy), device)


def entering(
    size: Callable[[PyTree], int], algorithm: Algorithm, groups: int, columns: int
) -> Callable[[Key, PyTree], PyTree]:  # fmt: skip
    """Initial carry of a run with `groups` groups of `columns` columns before their start; () if they report no state.
    `size` tells the bytes of a group's state in a context, which are the same in all."""
    known: list[int] = []

    def enter(key: Key, context: PyTree) -> PyTree:
        if not known:
            known.append(size(context))
        if not (state := known[0]):
            return ()
        memory = jax.tree.leaves(jax.eval_shape(lambda: algorithm.memory(groups * columns)))
        many = groups, columns
        return EnvSnapshot(
            np.zeros(1, np.uint8), np.zeros((groups, state), np.uint8), np.zeros(many, bool), np.zeros(many),
            np.zeros(many, np.int64), [np.zeros(leaf.shape, leaf.dtype) for leaf in memory],
        )  # fmt: skip

    return enter


def hosted_state_size(name: str, worlds: int) -> int:
    """Bytes of the state of `worlds` worlds of a host environment, as an actor writes it; 0 if they report none."""
    size = 0
    for count in (1, worlds):  # one world first: many may be slow to create
        with closing(registry.make(registry.describe(name), count)) as vector:
            size = actor.state_size(vector, vector.reset(0))
        if not size:
            break
    return size


def compiled(algorithm: Algorithm, data: Rollout, progress: Progress, mesh: Mesh) -> jax.stages.Compiled:
    """Update of the learner for runs like `progress` and rollouts like `data`, compiled ahead of time; donates the
    state: (state, key, updates, data) -> (state, updates, metrics, policy). Where devices share the parameters, the
    policy lies in parts, too."""

    def update(state: PyTree, key: Key, updates: jax.Array, data: Rollout) -> Any:
        drawn = jax.random.fold_in(jax.random.fold_in(key, updates), meshes.shard_index())
        _, key_learn = jax.random.split(drawn)  # as in `fused`
        with jax.named_scope(LEARNING):
            state, metrics = algorithm.learn(state, data, key_learn)
        reported = metrics | {fused.FINITE: fused.is_finite((part(state)[0], metrics))}
        # A copy: actors act with this policy until the next update is done, and that update donates the state.
        policy = jax.tree.map(jnp.copy, algorithm.policy(state))
        return state, updates + 1, jax.tree.map(lambda x: x[None], reported), policy

    everywhere = fused.EVERYWHERE
    laid = fused.layout(progress).state
    wide, narrow = PartitionSpec(None, meshes.DATA), PartitionSpec(meshes.DATA)  # a rollout is cut by columns
    cut = Rollout(*(wide,) * 7, Successors(narrow, wide), narrow, everywhere)  # type: ignore[arg-type]
    specs = laid, everywhere, everywhere, cut
    results = laid, everywhere, everywhere, everywhere
    lies = None
    if meshes.splits(mesh):
        policy, whole = jax.eval_shape(algorithm.policy, progress.state), meshes.replicated(mesh)
        lies = partition.shardings(progress.state, mesh), whole, whole, partition.shardings(policy, mesh)
    program = jax.jit(meshes.per_shard(update, mesh, specs, results), donate_argnums=0, out_shardings=lies)
    return overlap.compiled(program.lower(progress.state, progress.key, progress.updates, data), mesh)


def central(
    update: jax.stages.Compiled, server: Server, progress: Progress, policy: Params, device: jax.Device, *, updates: int
) -> Iterator[tuple[Progress, int, Metrics]]:
    """Iterator over updates from `progress`, with its policy `policy` on `device`, to `updates` finished ones:
    (progress, 1, metrics), as `fused.fused`.

    `progress` is donated when the iterator advances: save it before. Its carry is an `EnvSnapshot` if the run has no
    staleness and its environments report their state; else a resumed run starts new episodes.
    """
    state, key, count = progress.state, progress.key, progress.updates
    done, kept = int(count), bool(progress.carry)
    if progress.carry and progress.carry.there[0]:
        server.stand(progress.carry)
    server.acts_with(policy)
    meter = _Telling(server)

    def learn(*given: Any) -> Any:
        return jax.block_until_ready(update(*given))

    with ThreadPoolExecutor(1, "learner") as beside:
        while done < updates:
            data, sums, versions = server.gather()
            meter.gathered()
            learning = beside.submit(learn, state, key, count, data)
            while server.can_act and not learning.done():
                server.serve(AROUND)
            state, count, rows, policy = learning.result()
            reported = meter.read(done, sums, versions)
            server.learnt(local(policy, device))
            done += 1
            yield Progress(state, (server.standing or ()) if kept else (), key, count), 1, rows | reported


class _Telling:
    """Metrics of the server's work between two updates."""

    def __init__(self, server: Server) -> None:
        self._server, self._before, self._began = server, server.meter, time.perf_counter()
        self._waited = 0.0

    def gathered(self) -> None:
        """Note of the learner's complete batch."""
        self._waited = time.perf_counter() - self._began

    def read(self, update: int, sums: Sums, versions: np.ndarray) -> Metrics:
        now, meter = time.perf_counter(), self._server.meter
        new = meter.since(self._before)
        wall, age = max(now - self._began, 1e-9), update - versions
        self._before, self._began = meter, now
        reported = {
            "staleness_mean": float(age.mean()),
            "staleness_max": int(age.max()),
            "batch": new.steps / max(new.batches, 1),  # environments of one inference
            "fill": new.steps / max(new.rows, 1),  # of the rows that are computed
            "inference": new.inferred / wall,
            "actor_wait": new.waited / wall,  # for actors
            "learner_wait": self._waited / wall,  # for a batch
            "lost": new.lost,
            "discarded": new.discarded,
        }
        episodes = {"episodes": 0.0, "episode/return": 0.0, "episode/length": 0.0} | dict(sums)
        rows = episodes | {f"central/{name}": value for name, value in reported.items()}
        return {name: jnp.array([value], jnp.float32) for name, value in rows.items()}
