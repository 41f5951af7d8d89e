"""Compiled program of a run with its timings, for doctor, profile and plan.

Where there is one device, the collectives of two shards are read from a program compiled on forced CPU devices in
another process: they are the compiler's choice and follow from the program, not from the chip.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import registry
from longhaul.config.resolve import parts, resolve
from longhaul.config.run import Run, from_dict, to_dict
from longhaul.diagnostics import hlo
from longhaul.diagnostics.hlo import Crossing
from longhaul.networks import actor_critic
from longhaul.runtime import mesh as meshes
from longhaul.runtime import overlap, partition
from longhaul.runtime.compile_cache import Ledger
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import RunError, last_line
from longhaul.runtime.provenance import params_sha256
from longhaul.telemetry import screen
from longhaul.topologies import fused
from longhaul.training.assemble import Assembly, assemble, check_room
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
    ahead: dict[str, int] = {}  # noqa: RUF012  bytes of contexts prepared in advance

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


def check(run: Run) -> None:
    """Raises RunError for a run whose worlds and learner are not one program."""
    if run.many:
        raise RunError("this looks at one run; leave --seeds and --sweep out")
    if run.topology != "fused":
        raise RunError(
            f"this looks at one program of worlds and learner, and --topology {run.topology} has several; choose "
            "--topology fused"
        )


def compiled(run: Run, source: Feed | None = None) -> Program:
    """Program of a resolved run, as `longhaul train` compiles it. Call `prepare_devices` first."""
    check(run)
    assert run.block is not None
    source = source or feed(run)
    with closing(Feeding(source)) as feeding:
        context, ahead = feeding.now.context, feeding.ahead()
    assembly = assemble(run, source.within, context)
    check_room(assembly, context, fused_too=True)
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
    with screen.stage("compiling"):
        lowered = fused.lowered(
            algorithm, assembly.collector_in, progress, context, mesh, block=run.block, shards=assembly.shards
        )
        traced = time.perf_counter()
        with closing(Ledger()) as ledger:
            executable = overlap.compiled(lowered, mesh)
        ended = time.perf_counter()
    params = algorithm.policy(progress.state).params
    return Program(
        run, assembly, source, context, executable, started - began, traced - started, ended - traced,
        ledger.hits > 0, actor_critic.count(params), partition.shares(params, mesh.shape[meshes.MODEL]).own, begin,
        ahead,
    )  # fmt: skip


SMALL_BATCH = 2048
"""Agent steps of a batch whose size does not matter."""


def smaller(run: Run, *, devices: int, **algorithm: Any) -> Run:
    """`run` with the same network and environment and a batch of about SMALL_BATCH steps on `devices`; not resolved.

    For checks that do not depend on sizes. Its compiled call makes two updates.
    """
    share = parts(run, devices)
    envs = share * max(1, min(run.num_envs, SMALL_BATCH // run.num_steps) // share)
    while envs * run.num_steps > SMALL_BATCH and run.num_steps > 16:
        run = dataclasses.replace(run, num_steps=run.num_steps // 2)
    learner = registry.on_policy(run.algorithm)
    rows = envs // share if learner.network.memory else envs // share * run.num_steps
    count = learner.num_minibatches or 4
    minibatches = next(n for n in range(min(count, rows), 0, -1) if rows % n == 0)
    config = dataclasses.replace(learner, num_minibatches=minibatches, **algorithm)
    return dataclasses.replace(
        run, num_envs=envs, devices=devices, threads=None, algorithm=config, block=2, log_interval=2,
        total_steps=10**9, base_batch=None, save_interval=None,
    )  # fmt: skip


# ------------------------------------------------------------------------------- two shards where there is one device


def ask(run: Run, module: str, name: str, *words: str, variables: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Result of function `name` of `module` for `run`, not resolved, in a process with as many CPU devices as it wants.

    `words` are further arguments of the function, `variables` are added to the environment. Raises RunError with the
    last line of a failed process.
    """
    devices = (run.devices or 1) * run.model
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": str(devices)} | dict(variables)
    program = f"from {module} import {name}; from {__name__} import serve; serve({name}, *{words!r})"
    stdin = json.dumps(to_dict(run))
    done = subprocess.run(
        [sys.executable, "-c", program], input=stdin, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RunError(f"{devices} CPU devices failed: {last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def serve(work: Callable[..., Any], *words: str) -> None:
    """Body of that process: read a Run, print the result of `work` as JSON."""
    run = resolve(from_dict(Run, json.loads(sys.stdin.read())))
    prepare_devices(run.all_devices, run.all_devices)
    print(json.dumps(work(run, *words)))


def two_shards(run: Run) -> list[Crossing]:
    """Collectives of `run` (resolved, one shard) on two shards, each with the batch of the one."""
    twice = 2 * run.total_steps  # as many updates, each of twice the steps
    two = dataclasses.replace(run, devices=2, num_envs=2 * run.num_envs, total_steps=twice, threads=None)
    return crossings_of(ask(two, __name__, "crossings"))


def crossings_of(rows: Sequence[Sequence[Any]]) -> list[Crossing]:
    """Collectives as they come from another process, by JSON."""
    return [Crossing(each[0], each[1], tuple(each[2]), tuple(each[3])) for each in rows]


def crossings(run: Run) -> list[Crossing]:
    """Collectives in the program of a resolved run."""
    prepare_devices(run.all_devices, run.threads)
    return hlo.crossings(compiled(run).text())
