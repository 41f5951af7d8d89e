"""`longhaul plan`'s model of 1 -> 2 processes against a measurement: `python -m benchmarks.plan_check RECIPE [FLAGS]`.

Measured are, each in processes of its own, pinned to a core each, which speak by gloo over the loopback:

    alone   seconds of an update of one process with one device
    pair    the same of two processes with one device each, the batch of a device kept (weak scaling); and what an
            all-reduce of 4 bytes and of 4 MB takes between them, from which follow latency and link of this "chip"
    counted how often an update of two devices has which collectives, as `longhaul plan` counts them

From `alone`, the collectives, latency and link the planner predicts the pair's steps a second. `alone` and `pair` are
measured in turn, so that both meet the same load; of each the median counts. On a machine that others use two processes
wait for cores, and then for each other, which no planner knows; so the CPU-seconds of an update are compared, too.
Prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from longhaul.runtime import process_group
from longhaul.runtime.launch.local import free_port

ROOT = Path(__file__).resolve().parent.parent

LARGE = 4 * 2**20
"""Bytes of the all-reduce that tells the link."""

AROUND = 50
"""All-reduces of a timed call."""


def main(words: Sequence[str]) -> int:
    turns, calls = 2, 8
    alone, pair = [], []
    recipe = list(words) or ["cartpole", "--num-envs", "256", "--num-steps", "64"]
    for _ in range(turns):
        alone.append(start("alone", recipe, calls, 1))
        pair.append(start("pair", recipe, calls, 2))
    crossing = start("counted", recipe, calls, 1)
    results.emit(compare(recipe, alone, pair, crossing))
    return 0


def compare(
    recipe: list[str], alone: list[dict[str, Any]], pair: list[dict[str, Any]], crossing: dict[str, Any]
) -> dict[str, Any]:
    """Forecast of the planner for two processes, and what they did."""
    from longhaul.diagnostics import compute_plan
    from longhaul.diagnostics.chips import Chip

    def middle(rows: list[dict[str, Any]], name: str) -> float:
        return float(statistics.median(row[name] for row in rows))

    small, large = middle(pair, "small_seconds"), middle(pair, "large_seconds")
    link = LARGE / max(large - small, 1e-9)
    chip = Chip("cpu over gloo", 0.0, 0.0, 0.0, float("inf"), link, 2, 0.0)
    what = compute_plan.Measured(
        middle(alone, "update_seconds"), int(alone[0]["steps"]), (),
        tuple(compute_plan.Collective(**each) for each in crossing["collectives"]), 0.0, 0.0, 0.0,
    )  # fmt: skip
    assumed = compute_plan.Assumptions(network=link, latency=small / 2)
    one, two = (compute_plan.row(what, chip, assumed, n, 1e6, here=True, bf16=False, strong=False) for n in (1, 2))
    measured = pair[0]["steps"] / middle(pair, "update_seconds")
    return {
        "name": "plan-check", "recipe": recipe, "turns": len(pair), "steps_per_update": [one.batch, two.batch],
        "alone_steps_per_second": one.steps_per_second, "predicted_steps_per_second": two.steps_per_second,
        "measured_steps_per_second": measured, "error": two.steps_per_second / measured - 1.0,
        "predicted_efficiency": two.efficiency, "measured_efficiency": measured / 2.0 / one.steps_per_second,
        "cpu_efficiency": middle(alone, "cpu_seconds") / middle(pair, "cpu_seconds"),
        "latency_seconds": assumed.latency, "link_bytes_per_second": link, "collectives": crossing["collectives"],
        "alone": alone, "pair": pair,
    }  # fmt: skip


def start(what: str, recipe: list[str], calls: int, count: int) -> dict[str, Any]:
    """Runs `what` in so many processes; -> what process 0 found."""
    port, cores = free_port(), sorted(os.sched_getaffinity(0))
    children = []
    for i in range(count):
        variables = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"PYTHONPATH": str(ROOT)}
        variables |= {
            process_group.COORDINATOR: f"127.0.0.1:{port}",
            process_group.INDEX: str(i),
            process_group.COUNT: str(count),
        }
        pinned = cores if what == "counted" else [cores[i % len(cores)]]
        command = [sys.executable, "-m", "benchmarks.plan_check", "--worker", what, json.dumps([recipe, calls, pinned])]
        children.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True))
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{what} failed; its message is above")
    found: dict[str, Any] = json.loads(said[0].strip().splitlines()[-1])
    return found


def worker(what: str, about: str) -> int:
    recipe, calls, pinned = json.loads(about)
    os.sched_setaffinity(0, set(pinned))
    process_group.start(process_group.find(os.environ))
    work = {"alone": timed, "pair": paired, "counted": counted}[what]

    def run() -> int:
        found = work(recipe, calls)
        if process_group.index() == 0:
            print(json.dumps(found), flush=True)
        return 0

    return process_group.follow(run) if process_group.index() else process_group.lead(run)


def resolved(recipe: list[str], devices: int) -> Any:
    """The recipe's run on so many devices, each with the batch that `recipe` says."""
    from longhaul.cli import flags, run_flags
    from longhaul.config import recipes
    from longhaul.config.resolve import resolve

    known = recipes.recipe(recipe[0])
    table = run_flags.table(known)
    words = [*recipe[1:], "--mesh", f"data={devices}"]
    run = run_flags.chosen(known, flags.parse("plan", "", table, words))
    each = run.num_envs if "--num-envs" in words else resolve(run).num_envs
    words += ["--num-envs", str(devices * each)]
    if "--num-envs" in recipe:
        at = words.index("--num-envs")
        del words[at : at + 2]
    return resolve(run_flags.chosen(known, flags.parse("plan", "", table, words)))


def updates(recipe: list[str], devices: int) -> Iterator[tuple[float, float, int]]:
    """Calls of the compiled program without an end; -> (seconds of an update, CPU-seconds of it, its steps) of each."""
    import jax

    from longhaul.diagnostics.compiled_run import compiled
    from longhaul.runtime.devices import prepare_devices

    run = resolved(recipe, devices)
    prepare_devices(run.all_devices, run.threads)
    program = compiled(run)
    progress = program.start(run.seed)
    while True:
        began, used = time.perf_counter(), time.process_time()
        progress, rows = program.call(progress, run.block)
        jax.block_until_ready((progress, rows))
        seconds = time.perf_counter() - began, time.process_time() - used
        yield seconds[0] / run.block, seconds[1] / run.block, program.assembly.steps_per_update


def timed(recipe: list[str], calls: int, devices: int = 1) -> dict[str, Any]:
    """Seconds of an update, the median over calls after one to warm up."""
    wall, cpu, steps = zip(*itertools.islice(updates(recipe, devices), 1, calls + 1), strict=True)
    about = {"update_seconds": statistics.median(wall), "fastest_seconds": min(wall)}
    return about | {"cpu_seconds": statistics.median(cpu), "steps": steps[0]}


def paired(recipe: list[str], calls: int) -> dict[str, Any]:
    """The same of two processes, and what an all-reduce takes between them, little and large."""
    found = timed(recipe, calls, 2)
    return found | {"small_seconds": all_reduce(4), "large_seconds": all_reduce(LARGE)}


def all_reduce(size: int) -> float:
    """Seconds of one over all devices, of so many bytes each, among others of a compiled program."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from longhaul.runtime import mesh as meshes

    mesh = meshes.make_mesh()

    def around(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, AROUND, lambda i, x: meshes.mean_over_data(x) + 1.0, x)

    same = PartitionSpec()
    work = jax.jit(meshes.per_shard(around, mesh, same, same))
    x = meshes.everywhere(jnp.zeros(size // 4, jnp.float32), mesh)
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        jax.block_until_ready(work(x))
        taken.append((time.perf_counter() - began) / AROUND)
    return statistics.median(taken[1:])


def counted(recipe: list[str], calls: int) -> dict[str, Any]:
    """The collectives of an update of two devices."""
    from longhaul.diagnostics import compiled_run
    from longhaul.diagnostics import compute_plan as plan

    return {
        "collectives": [each._asdict() for each in plan.collectives(compiled_run.crossings(resolved(recipe, 2)), 1)]
    }


if __name__ == "__main__":
    sys.exit(worker(*sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main(sys.argv[1:]))
