"""Calibration of the planner: short runs on this machine in processes of one device each.

Processes of one machine share its cores, its caches and the bandwidth of its memory, and so do the threads of their
collectives. No data sheet knows what that costs; a run of one process beside a run of two does
(`compute_plan.Calibration`). The runs are those of `longhaul launch --devices-per-host 1`: each process has the batch
of one device, and they meet by gloo.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from longhaul.config.resolve import resolve
from longhaul.config.run import Run, from_dict, to_dict
from longhaul.diagnostics import hlo
from longhaul.diagnostics.compiled_run import compiled
from longhaul.runtime import device_memory, process_group
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import RunError, last_line
from longhaul.runtime.launch import local
from longhaul.types import PyTree

CALLS = 9
"""Compiled calls of a run that are timed."""

CALL = 0.4
"""Least seconds of a call: shorter ones would tell the clock and the scheduler of the system."""

LARGE = 2**20
"""Bytes of the all-reduce that measures the link."""

AROUND = 50
"""All-reduces of a timed program."""


class Timed(NamedTuple):
    """Times of a short run, and its program."""

    seconds: list[float]  # of an update, by call
    steps: int  # agent steps of an update, over all processes
    memory: float = 0.0  # bytes of each process's device
    state_bytes: float = 0.0  # of a checkpoint
    carry_bytes: float = 0.0  # of a checkpoint, over all processes
    crossings: Sequence[Sequence[Any]] = ()  # collectives of the program, `hlo.Crossing`
    small: float = 0.0  # seconds of an all-reduce of 4 bytes; 0 where one process is alone
    large: float = 0.0  # of LARGE bytes

    @property
    def update(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the calls, relative to their median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2.0 / self.update


def measure(run: Run, processes: int, calls: int = CALLS) -> Timed:
    """Short run of a resolved `run` of one device in so many processes, each with its batch.

    Raises RunError with the last line of a failed process.
    """
    many = dataclasses.replace(
        run, devices=processes, num_envs=processes * run.num_envs, total_steps=processes * run.total_steps, threads=None
    )
    return Timed(**ask(__name__, "work", {"run": to_dict(many), "calls": calls}, processes))


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Work of a process of `measure`."""
    timing = timed(resolve(from_dict(Run, request["run"])), request["calls"])
    if jax.device_count() > 1:
        timing = timing._replace(small=all_reduce(4), large=all_reduce(LARGE))
    return timing._asdict()


def ask(
    module: str, name: str, request: Any, processes: int, variables: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """Result of function `name` of `module`, JSON both ways, in process 0 of a group of one device each.

    `variables` are added to their environment. Raises RunError with the last line of a failed process.
    """
    base = {key: value for key, value in os.environ.items() if key != "NPROC"} | dict(variables)
    program = f"from {module} import {name}; from {__name__} import serve; serve({name})"
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as err:
        try:
            for i in range(processes):
                own = local.environment(base, i, processes, os.path.join(folder, "socket"), 1)
                out = subprocess.PIPE if i == 0 else subprocess.DEVNULL
                child = subprocess.Popen(
                    [sys.executable, "-c", program], env=own, text=True, stdin=subprocess.PIPE, stdout=out, stderr=err
                )
                children.append(child)
                assert child.stdin is not None
                child.stdin.write(json.dumps(request))
                child.stdin.close()
            assert children[0].stdout is not None
            with children[0].stdout as reporting:
                output = reporting.read()
            failed = [child.wait() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(failed):
            err.seek(0)
            raise RunError(f"a run of {processes} process(es) failed: {last_line(err.read())}")
    return json.loads(output.splitlines()[-1])


def serve(work: Callable[[Any], Any]) -> None:
    """Body of a process of `ask`: reads what is given, and prints the result as JSON in process 0."""
    request = json.loads(sys.stdin.read())
    process_group.start(process_group.find(os.environ))

    def run() -> int:
        reply = work(request)
        if process_group.index() == 0:
            print(json.dumps(reply), flush=True)
        return 0

    sys.exit(process_group.follow(run) if process_group.index() else process_group.lead(run))


def timed(run: Run, calls: int, threads: int | None = None) -> Timed:
    """Times of `calls` compiled calls of a resolved run. `threads` are those of all processes."""
    prepare_devices(run.all_devices, threads)
    program, block = compiled(run), run.block
    assert block is not None
    progress = program.start(run.seed)

    def update(n: int) -> float:
        """Seconds of one of `n` updates."""
        nonlocal progress
        began = time.perf_counter()
        progress = jax.block_until_ready(program.call(progress, n))[0]
        return (time.perf_counter() - began) / n

    update(1)  # allocates
    once = update(1)
    n = process_group.share("updates of a call", lambda: max(1, min(block, round(CALL / once))))
    seconds, need = [update(n) for _ in range(calls)], device_memory.need(program.executable)
    return Timed(
        seconds, program.assembly.steps_per_update, 0.0 if need is None else float(need.total),
        total_bytes(progress.state), total_bytes(progress.carry),
        [list(each) for each in hlo.crossings(program.text())],
    )  # fmt: skip


def total_bytes(tree: PyTree) -> float:
    """Bytes of the arrays of a pytree, over all processes."""
    return float(sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)))


def all_reduce(size: int) -> float:
    """Seconds of one of so many bytes over all devices, the median of six programs of `AROUND` each."""
    mesh, same = meshes.make_mesh(), PartitionSpec()

    def around(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, AROUND, lambda i, x: meshes.mean_over_data(x) + 1.0, x)

    work = jax.jit(meshes.per_shard(around, mesh, same, same))
    x = meshes.everywhere(jnp.zeros(size // 4, jnp.float32), mesh)
    taken = []
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready(work(x))
        taken.append((time.perf_counter() - began) / AROUND)
    return statistics.median(taken[1:])
