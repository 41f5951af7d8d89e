"""Compiled program of a run with its timings, of which the doctor, the profile and the planner measure."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import registry
from longhaul.config.resolve import parts
from longhaul.config.run import Run
from longhaul.networks import actor_critic
from longhaul.runtime import mesh as meshes
from longhaul.runtime import partition
from longhaul.runtime.compile_cache import Ledger
from longhaul.runtime.errors import RunError
from longhaul.runtime.provenance import params_sha256
from longhaul.topologies import fused
from longhaul.training.assemble import Assembly, assemble
from longhaul.training.data import Feed, Feeding, feed
from longhaul.types import Key, Progress, PyTree


class Program(NamedTuple):
    """A resolved run and its program."""

    run: Run
    assembly: Assembly
    source: Feed
    context: PyTree
    executable: jax.stages.Compiled
    start_seconds: float  # to build its first state
    trace_seconds: float
    compile_seconds: float
    hit: bool  # loaded from the persistent compilation cache
    parameters: int
    own_bytes: int  # bytes of the parameters on a device
    begin: Callable[[Key], Progress]  # as `Assembly.start`, compiled once

    @property
    def optimiser_steps(self) -> int:
        """Optimiser steps of an update."""
        config = registry.on_policy(self.run.algorithm)
        assert config.num_minibatches is not None and config.update_epochs is not None
        return config.num_minibatches * config.update_epochs

    def start(self, seed: int) -> Progress:
        return self.begin(jax.random.key(seed))

    def call(self, progress: Progress, n: int) -> tuple[Progress, dict[str, Any]]:
        """`n` more updates, at most a block, not awaited; donates `progress`."""
        count = meshes.everywhere(jnp.int32(n), self.assembly.mesh)
        progress, rows = self.executable(progress, self.context, count)
        return progress, rows

    def updates(self, progress: Progress, n: int) -> tuple[Progress, dict[str, np.ndarray]]:
        """`n` more updates, awaited, and their rows of metrics, [n] each."""
        assert self.run.block is not None
        parts = []
        while n > 0:
            now = min(n, self.run.block)
            progress, rows = self.call(progress, now)
            parts.append({name: np.asarray(values)[:now] for name, values in jax.device_get(rows).items()})
            n -= now
        return progress, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def text(self) -> str:
        """Text of the compiled program, XLA's HLO."""
        return self.executable.as_text() or ""

    def digest(self, progress: Progress) -> str:
        """SHA-256 of the parameters, as in result.json."""
        return params_sha256(jax.device_get(self.assembly.algorithm.policy(progress.state).params))


def compiled(run: Run, source: Feed | None = None) -> Program:
    """Program of a resolved run, as `longhaul train` compiles it. Call `prepare_devices` first."""
    if run.many:
        raise RunError("this looks at one run; leave --seeds and --sweep out")
    assert run.block is not None
    source = source or feed(run)
    with closing(Feeding(source)) as feeding:
        context = feeding.now.context
    assembly = assemble(run, source.within, context)
    algorithm, mesh = assembly.algorithm, assembly.mesh
    layout = partition.shardings(jax.eval_shape(algorithm.init, jax.random.key(0)), mesh)
    init = jax.jit(algorithm.init, out_shardings=layout)

    def begin(key: Key) -> Progress:
        key_state, key_carry, key_run = jax.random.split(key, 3)  # keys as in `fused.start`
        state, rest = init(key_state), meshes.everywhere((key_run, jnp.int32(0)), mesh)
        return Progress(state, assembly.enter(key_carry, context), *rest)

    began = time.perf_counter()
    progress = begin(jax.random.key(run.seed))
    started = time.perf_counter()
    lowered = fused.lowered(
        algorithm, assembly.collector_in, progress, context, mesh, block=run.block, shards=assembly.shards
    )
    traced = time.perf_counter()
    with closing(Ledger()) as ledger:
        executable = lowered.compile()
    ended = time.perf_counter()
    params = algorithm.policy(progress.state).params
    return Program(
        run, assembly, source, context, executable, started - began, traced - started, ended - traced,
        ledger.hits > 0, actor_critic.count(params), partition.shares(params, mesh.shape[meshes.MODEL]).own, begin,
    )  # fmt: skip


def smaller(run: Run, *, devices: int, batch: int = 2048, **algorithm: Any) -> Run:
    """`run` with the same network and environment and a batch of about `batch` steps on `devices`; not resolved.

    For checks that do not depend on sizes. Its compiled call makes two updates.
    """
    share = parts(run, devices)
    envs = share * max(1, min(run.num_envs, batch // run.num_steps) // share)
    while envs * run.num_steps > batch and run.num_steps > 16:
        run = dataclasses.replace(run, num_steps=run.num_steps // 2)
    learner = registry.on_policy(run.algorithm)
    rows = envs // share if learner.network.memory else envs // share * run.num_steps
    wanted = learner.num_minibatches or 4
    minibatches = next(n for n in range(min(wanted, rows), 0, -1) if rows % n == 0)
    config = dataclasses.replace(learner, num_minibatches=minibatches, **algorithm)
    return dataclasses.replace(
        run, num_envs=envs, devices=devices, threads=None, algorithm=config, block=2, log_interval=2,
        total_steps=10**9, base_batch=None, save_interval=None,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- cache


@contextmanager
def fresh_cache() -> Iterator[Path]:
    """Context with an empty persistent compilation cache, whatever the user's settings are."""
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    with tempfile.TemporaryDirectory(prefix="longhaul-doctor-") as folder:
        try:
            for name, value in zip(names, (True, folder, 0.0, 0), strict=True):
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield Path(folder)
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
