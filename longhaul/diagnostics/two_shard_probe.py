"""Collectives of a two-shard program where there is one device: compiled on forced CPU devices in another process.

The collectives are the compiler's choice and follow from the program, not from the chip.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from longhaul.config.resolve import resolve
from longhaul.config.run import Run, from_dict, to_dict
from longhaul.diagnostics import hlo
from longhaul.diagnostics.hlo import Crossing
from longhaul.diagnostics.program import compiled
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.errors import RunError

HERE = "longhaul.diagnostics.two_shard_probe"
WORKER = f"from {{module}} import {{name}}; from {HERE} import serve; serve({{name}})"


def ask(run: Run, module: str, name: str) -> Any:
    """Result of function `name` of `module` for `run`, not resolved, in a process with as many CPU devices as it wants.

    Raises RunError with the last line of a failed process.
    """
    devices = (run.devices or 1) * run.model
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": str(devices)}
    command = [sys.executable, "-c", WORKER.format(module=module, name=name)]
    given = json.dumps(to_dict(run))
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(f"{devices} CPU devices failed: {last[:200]}")
    return json.loads(done.stdout.splitlines()[-1])


def serve(work: Callable[[Run], Any]) -> None:
    """Body of that process: read a Run, print the result of `work` as JSON."""
    run = resolve(from_dict(Run, json.loads(sys.stdin.read())))
    prepare_devices(run.all_devices, run.all_devices)
    print(json.dumps(work(run)))


def two_shards(run: Run) -> list[Crossing]:
    """Collectives of `run` (resolved, one shard) on two shards, each with the batch of the one."""
    twice = 2 * run.total_steps  # as many updates, each of twice the steps
    two = dataclasses.replace(run, devices=2, num_envs=2 * run.num_envs, total_steps=twice, threads=None)
    return [Crossing(each[0], each[1], tuple(each[2]), tuple(each[3])) for each in ask(two, HERE, "crossings")]


def crossings(run: Run) -> list[Crossing]:
    """Collectives in the program of a resolved run."""
    prepare_devices(run.all_devices, run.threads)
    return hlo.crossings(compiled(run).text())
