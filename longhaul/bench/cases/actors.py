"""Benchmark of whole training by actors."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul.algorithms.config import IMPALAConfig, PPOConfig
from longhaul.bench.cases.training import Prepared, assembled
from longhaul.config.resolve import resolve
from longhaul.config.run import Named, Run
from longhaul.runtime import config_fields
from longhaul.runtime.devices import prepare_devices
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import actor_learner


def cpu_of(processes: list[int]) -> float:
    """CPU seconds of these processes so far, all their threads, also those that ended."""
    return sum(time.clock_gettime(~process << 3 | CPU_CLOCK) for process in processes)


CPU_CLOCK = 2
"""Linux: the clock of a process's CPU time, in the low bits of a clock's number (`clock_getcpuclockid(3)`)."""

LEARNERS: dict[str, PPOConfig | IMPALAConfig] = {
    "ppo": PPOConfig(lr=2.5e-3, anneal=False),
    "impala": IMPALAConfig(lr=5e-3, anneal=False),
    "appo": IMPALAConfig(lr=2.5e-3, anneal=False, optimiser="adam", clip_eps=0.2, update_epochs=2, max_grad_norm=0.5),
}
"""Learners of the benchmark `actors`; APPO as others have it by default, twice over each batch."""


def actors(
    env: str, num_envs: int, num_steps: int, actors: int, actor_kind: str, staleness: int, updates: int,
    learner: str = "ppo",
) -> Prepared:  # fmt: skip
    """Whole training by actors, whose CPU time counts; `updates` a repeat, of one run that goes on all the time."""
    steps = num_envs * num_steps
    run = resolve(
        Run(
            "bench", Named(env), LEARNERS[learner], topology="actors",
            acting=ActorConfig(actors, actor_kind, staleness), total_steps=steps * 1_000_000, num_envs=num_envs,
            num_steps=num_steps, devices=1,
        )
    )  # fmt: skip
    prepare_devices(1, run.threads, inline=True)
    context, assembly = assembled(run)
    began = time.perf_counter()
    progress = assembly.start(run.seed, context)
    prepared = actor_learner.prepare(run, assembly, context, progress)
    compiled = time.perf_counter() - began
    closed = ExitStack()
    calls = actor_learner.opened(run, Path(), assembly, prepared, progress, closed)
    history: list[Any] = []

    def work(_: Any) -> dict[str, float]:
        processes = calls.processes()
        used = time.process_time() + cpu_of(processes)
        history.clear()
        for _, (_, _, rows) in zip(range(updates), calls.calls, strict=False):
            history.append(jax.device_get(rows))
        used = time.process_time() + cpu_of(processes) - used
        names = ("actors/learner_wait", "actors/actor_wait", "actors/staleness_mean")
        metrics = {name.partition("/")[2]: float(np.mean([row[name] for row in history])) for name in names}
        ended, total = (sum(float(row[name][0]) for row in history) for name in ("episodes", "episode/return"))
        return metrics | {"cpu_seconds": used, "mean_return": total / ended if ended else float("nan")}

    config = {"env": env, "num_envs": num_envs, "num_steps": num_steps, **dataclasses.asdict(run.acting)}
    config |= config_fields.values(run.algorithm)
    return Prepared(config, updates * steps, "env steps", compiled, lambda number: None, work)
