"""Training speed of a recipe over sizes of its batch and precisions, and how fast it starts: a table's cells.

The table that the specification "Training Speedups" of charleseff/hack-matrix asks for (256x128 to 2048x256, float32
and bfloat16, with and without a compilation cache), and its goals. A cell runs the program that `longhaul train` runs,
in two processes of its own one after the other: the first finds an empty compilation cache, the second what the first
left there, and goes on to repeat updates.

Shares of an update: the environment is a rollout by random legal actions, inference is what a rollout by the policy
takes longer, learning is what an update takes longer than that.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from longhaul import rollout
from longhaul.bench import harness
from longhaul.bench.cases import training
from longhaul.bench.cases.training import Prepared
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.config.run import Run
from longhaul.distributions import distribution
from longhaul.environment import vectorise
from longhaul.runtime import config_fields
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.spaces import unmasked
from longhaul.topologies import fused
from longhaul.training.assemble import Assembly, assemble
from longhaul.training.data import Feeding, feed
from longhaul.types import Act, Key, Params, Progress, PyTree

SIZES = ((256, 128), (512, 128), (1024, 128), (2048, 128), (2048, 256))
"""Environments and steps of each that an update takes."""

PRECISIONS = ("fp32", "bf16")

GOAL_PER_SECOND, GOAL_STEPS, GOAL_HOURS = 18_000.0, 100_000_000, 2.0
"""Steps a second, and so many steps in so many hours."""

PART_REPEATS = 3

STARTS = ("seconds", "cpu_seconds", "ready_cpu_seconds")
"""Seconds of a start, from that of the process: to the end of the first update, twice, and until its program is
ready."""


class Cell(NamedTuple):
    recipe: str
    num_envs: int
    num_steps: int
    precision: str
    devices: int | None = None  # None: as many as a training run takes

    def run(self) -> Run:
        """The cell's Run, resolved as that of `longhaul train`; it is never trained to its end."""
        recipe = recipes.recipe(self.recipe)
        steps, base = self.num_envs * self.num_steps, recipe.num_envs * recipe.num_steps
        return resolve(
            dataclasses.replace(
                recipe, num_envs=self.num_envs, num_steps=self.num_steps, devices=self.devices,
                total_steps=max(recipe.total_steps, 2 * steps), block=1, base_batch=recipe.base_batch or base,
                algorithm=config_fields.replaced(recipe.algorithm, precision=self.precision),
            )
        )  # fmt: skip

    def same(self, figure: dict[str, Any]) -> bool:
        """True if `figure` is of this cell."""
        return figure["cell"] == self._asdict()


def cells(recipe: str, sizes: Iterable[tuple[int, int]], precisions: Iterable[str], devices: int | None) -> list[Cell]:
    """All cells, checked: one that can't be run is reported before the first runs."""
    grid = [Cell(recipe, envs, steps, precision, devices) for envs, steps in sizes for precision in precisions]
    for cell in grid:
        cell._replace(devices=devices or 1).run()  # to count them would take them from the workers
    return grid


def figure(cell: Cell, *, repeats: int = harness.LEAST_REPEATS) -> dict[str, Any]:
    """One cell measured: medians over `repeats` updates."""
    if repeats < harness.LEAST_REPEATS:
        raise ValueError(f"{repeats} repeats; give {harness.LEAST_REPEATS} or more: a median of fewer says little")
    command = [sys.executable, "-c", OURS, json.dumps(cell)]
    starts, compiled, load = {}, 0.0, _load()
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            began = time.perf_counter()
            worker = harness.Worker(command, {}, {"LONGHAUL_CACHE": cache})
            with worker:
                starts[name] = {"seconds": time.perf_counter() - began, **worker.about["start"]}
                if name == "cold":
                    compiled = worker.about["compile_seconds"]
                    continue
                rows = [worker.ask() for _ in range(repeats)]
                parts = worker.ask("parts")
    peak = max(row.pop("peak_bytes") for row in rows)
    about = {key: worker.about[key] for key in ("versions", "commit", "device")}
    medians = harness.medians(worker.about | {"compile_seconds": compiled}, rows)
    return {
        "name": cell.recipe,
        "cell": cell._asdict(),
        "config": worker.about["config"],
        **medians,
        "repeats": repeats,
        **about,
        "start": starts,
        "warm_shares": {key: starts["warm"][key] / starts["cold"][key] for key in STARTS},
        "cpu_microseconds": 1e6 / medians["per_cpu_second"],
        "peak_bytes": peak,
        "shares": shares(parts["environment"], parts["rollout"], parts["update"]),
        "hours": GOAL_STEPS / medians["per_second"] / 3600.0,
        "load": [load, _load()],
        "goals": {"per_second": GOAL_PER_SECOND, "steps": GOAL_STEPS, "hours": GOAL_HOURS},
    }


def _load() -> float:
    """Processes that wanted a core of this machine, over the last minute: above its cores, seconds say little."""
    return round(os.getloadavg()[0], 2)


def shares(environment: float, collect: float, update: float) -> dict[str, float]:
    """Shares of an update, from the seconds of a rollout by random actions, of one by the policy, and of an update."""
    whole = max(update, collect, environment)
    return {
        "environment": environment / whole,
        "inference": max(collect - environment, 0.0) / whole,
        "learning": max(update - max(collect, environment), 0.0) / whole,
    }


# ---------------------------------------------------------------------------------------------------------- workers

OURS = "from longhaul.bench.cases.hackmatrix_grid import serve; serve()"


class Ready(NamedTuple):
    run: Run
    assembly: Assembly
    context: PyTree
    update: Callable[[], Progress]  # one more update, waited for
    start: dict[str, float]  # seconds of its parts, and STARTS but for the first


def serve() -> None:
    """Loop of a worker: makes a cell's program ready, then repeats an update, or measures parts, for every line."""
    cell = Cell(*json.loads(sys.argv[1]))
    ready = prepare(cell)
    names = ("num_envs", "num_steps", "devices", "threads")
    config = {"recipe": cell.recipe} | {name: getattr(ready.run, name) for name in names}
    config |= config_fields.values(ready.run.algorithm)
    compiled = ready.start["trace_seconds"] + ready.start["compile_seconds"]

    def work(_: Any) -> dict[str, float]:
        ready.update()
        return {"peak_bytes": training.peak_bytes()}

    prepared = Prepared(config, ready.assembly.steps_per_update, "env steps", compiled, lambda number: (), work)
    harness.tell(harness.introduction(prepared) | {"start": ready.start})
    for line in sys.stdin:
        if line.strip() == "parts":
            harness.tell(parts(ready))
            break
        harness.tell(harness.measure(prepared, 0))


def prepare(cell: Cell) -> Ready:
    """The program of a cell after its first update."""
    run = cell.run()
    assert run.devices is not None
    prepare_devices(run.all_devices, run.threads)
    source = feed(run)
    context = Feeding(source).now.context
    times = [time.perf_counter()]
    assembly = assemble(run, source.within, context)
    progress = assembly.start(run.seed, context)
    times.append(time.perf_counter())
    lowered = fused.lowered(assembly.algorithm, assembly.collector_in, progress, context, assembly.mesh, block=1)
    times.append(time.perf_counter())
    executable = lowered.compile()
    times.append(time.perf_counter())
    used = harness.cpu_seconds()
    one = jax.device_put(jnp.int32(1), meshes.replicated(assembly.mesh))

    def update() -> Progress:
        nonlocal progress
        progress, _ = jax.block_until_ready(executable(progress, context, one))
        return progress

    update()
    times.append(time.perf_counter())
    names = ("assemble_seconds", "trace_seconds", "compile_seconds", "first_update_seconds")
    taken = {name: after - before for name, (before, after) in zip(names, itertools.pairwise(times), strict=True)}
    taken |= {"cpu_seconds": harness.cpu_seconds(), "ready_cpu_seconds": used}
    return Ready(run, assembly, context, update, taken)


def parts(ready: Ready) -> dict[str, float]:
    """Seconds of a rollout by random legal actions, of one by the policy, and of an update; of CPU time on a CPU."""
    assembly, context, progress = ready.assembly, ready.context, ready.update()
    environment: Any = feed(ready.run).within(context)
    many = vectorise(environment, ready.run.num_envs // assembly.mesh.shape[meshes.DATA])
    by_chance = rollout.collector(
        many, _at_random(environment.spec.action), assembly.algorithm.memory, steps=ready.run.num_steps
    )
    policy = assembly.algorithm.policy(progress.state)

    def program(collector: Any) -> Callable[[], Any]:
        def shard(policy: Params, carry: PyTree, key: Key) -> jax.Array:
            _, data, _ = collector.collect(policy, carry, jax.random.fold_in(key, meshes.shard_index()), jnp.int32(0))
            whole = [jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(data)]
            return meshes.mean_over_data(jnp.sum(jnp.stack(whole)))

        everywhere, split = PartitionSpec(), PartitionSpec(meshes.DATA)
        arguments = (policy, progress.carry, progress.key)
        jitted = jax.jit(meshes.per_shard(shard, assembly.mesh, (everywhere, split, everywhere), everywhere))
        compiled = jitted.lower(*arguments).compile()
        return lambda: jax.block_until_ready(compiled(*arguments))

    return {
        "environment": _median(program(by_chance)),
        "rollout": _median(program(assembly.collector_in(context))),
        "update": _median(ready.update),  # at last: it takes the carry that the others read
    }


def _at_random(space: Any) -> Act:
    """Acts by no network: every legal action is as likely."""
    policy = distribution(space)

    def act(params: Params, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, PyTree]:
        assert key is not None
        seen, mask = unmasked(observation)
        columns = jax.tree.leaves(seen)[0].shape[0]
        raw = policy.sample(jnp.zeros((columns, policy.size)), mask, key)
        return policy.action(raw), memory, {"raw": raw}

    return act


def _median(work: Callable[[], Any]) -> float:
    """Seconds of `work`, after one to warm up: of the CPU where that is the device, for others may use it, too."""
    work()
    cpu = jax.default_backend() == "cpu"
    taken = []
    for _ in range(PART_REPEATS):
        used, began = harness.cpu_seconds(), time.perf_counter()
        work()
        taken.append(harness.cpu_seconds() - used if cpu else time.perf_counter() - began)
    return statistics.median(taken)
