"""What the benchmarks of actors measure: questions and answers through shared memory, and whole training by actors."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from longhaul.algorithms.config import IMPALAConfig, PPOConfig
from longhaul.bench.cases.training import Prepared
from longhaul.config.resolve import resolve
from longhaul.config.run import Named, Run
from longhaul.runtime import shared_memory
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.shared_memory import Leaf, Wakeup, wakeup
from longhaul.topologies.actor_learner import slots
from longhaul.topologies.actor_learner.config import Acting
from longhaul.topologies.actor_learner.slots import Slots
from longhaul.training import actor_learner
from longhaul.training.assemble import assemble
from longhaul.training.data import Feeding, feed


def cpu_of(processes: list[int]) -> float:
    """CPU seconds of these processes so far, all their threads, also those that ended."""
    return sum(time.clock_gettime(~process << 3 | CPU_CLOCK) for process in processes)


CPU_CLOCK = 2
"""Linux: the clock of a process's CPU time, in the low bits of a clock's number (`clock_getcpuclockid(3)`)."""


CLIENT = """
import sys
import numpy as np
from longhaul.runtime import shared_memory as memory
from longhaul.topologies.actor_learner import slots
from longhaul.runtime.shared_memory import Wakeup
descriptor, count, rows, width, hears, rings = map(int, sys.argv[1:])
questions, answers = [Leaf((rows, width), "float32")], [Leaf((rows,), "int32")]
planned = memory.plan(slots.regions(count, questions, answers))
mine = slots.Slots(memory.arrays(descriptor, planned))
hear, ring = Wakeup(hears, -1), Wakeup(-1, rings)
seen, all_ = np.ones((rows, width), np.float32), np.arange(count)
waiting = np.zeros(count, bool)
while True:
    free = all_ if not waiting.any() else mine.told(all_)
    if not len(free):
        if not hear.wait(1.0):
            break
        continue
    if len(free) == count:
        mine.questions[0][:] = seen
    else:
        mine.questions[0][free] = seen
    waiting[free] = True
    mine.ask(free)
    ring.wake()
"""
"""A client with `count` slots: it asks again as soon as it has its answer."""

PATIENCE = 120.0
"""Seconds without a question, after which the client is held to be lost."""


def transport(rows: int, width: int, streams: int, messages: int, copies: int) -> Prepared:
    """Questions [rows, width] of float32 from another process, answered by int32 [rows].

    They are copied in there; with two `copies` out here, too, else only where not all slots are open.

    A step is a row: what one world would send in one step.
    """
    leaves = [Leaf((rows, width), "float32")], [Leaf((rows,), "int32")]
    descriptor, planned = slots.create(streams, *leaves)
    mine = Slots(shared_memory.arrays(descriptor, planned))
    ours, theirs = wakeup(), wakeup()
    numbers = [descriptor, streams, rows, width, theirs.reads, ours.writes]
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *map(str, numbers)], pass_fds=(descriptor, theirs.reads, ours.writes),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs.reads)  # it ends when we do
    asks = Wakeup(-1, theirs.writes)
    staging = np.empty((streams, rows, width), np.float32)

    def work(_: Any) -> dict[str, float]:
        used, done, batches = time.process_time() + cpu_of([client.pid]), 0, 0
        heard = time.monotonic()
        while done < messages:
            which = mine.open()
            if not len(which):
                ours.wait(1.0)
                if client.poll() is not None or time.monotonic() - heard > PATIENCE:
                    raise RuntimeError(f"the client stands still (code {client.returncode})")
                continue
            heard = time.monotonic()
            if copies > 1 or len(which) < streams:  # else the slots themselves are the batch
                np.take(mine.questions[0], which, axis=0, out=staging[: len(which)])
            mine.answers[0][which] = batches
            mine.close(which)
            asks.wake()
            done, batches = done + len(which), batches + 1
        used = time.process_time() + cpu_of([client.pid]) - used
        return {"cpu_seconds": used * messages / done, "messages_per_batch": done / batches}

    config = {"rows": rows, "width": width, "streams": streams, "messages": messages, "copies": copies}
    return Prepared(config, messages * rows, "env steps", 0.0, lambda number: None, work)


LEARNERS: dict[str, PPOConfig | IMPALAConfig] = {
    "ppo": PPOConfig(lr=2.5e-3, anneal=False),
    "impala": IMPALAConfig(lr=5e-3, anneal=False),
    "appo": IMPALAConfig(lr=2.5e-3, anneal=False, optimiser="adam", clip_eps=0.2, update_epochs=2, max_grad_norm=0.5),
}
"""What `actors` may train by; APPO as others have it by default, twice over each batch."""


def actors(
    env: str, num_envs: int, num_steps: int, actors: int, actor_kind: str, staleness: int, updates: int,
    learner: str = "ppo",
) -> Prepared:  # fmt: skip
    """Whole training by actors, whose CPU time counts; `updates` a repeat, of one run that goes on all the time."""
    steps = num_envs * num_steps
    made = resolve(
        Run(
            "bench", Named(env), LEARNERS[learner], topology="actors",
            acting=Acting(actors, actor_kind, staleness), total_steps=steps * 1_000_000, num_envs=num_envs,
            num_steps=num_steps, devices=1,
        )
    )  # fmt: skip
    prepare_devices(1, made.threads, True)
    source = feed(made)
    context = Feeding(source).now.context
    assembly = assemble(made, source.within, context)
    began = time.perf_counter()
    progress = assembly.start(made.seed, context)
    prepared = actor_learner.prepare(made, assembly, context, progress)
    compiled = time.perf_counter() - began
    closed = ExitStack()
    calls = actor_learner.opened(made, assembly, prepared, progress, closed)
    found: list[Any] = []

    def work(_: Any) -> dict[str, float]:
        processes = calls.processes()
        used = time.process_time() + cpu_of(processes)
        found.clear()
        for _, (_, _, rows) in zip(range(updates), calls.calls, strict=False):
            found.append(jax.device_get(rows))
        used = time.process_time() + cpu_of(processes) - used
        names = ("actors/learner_wait", "actors/actor_wait", "actors/staleness_mean")
        told = {name.partition("/")[2]: float(np.mean([row[name] for row in found])) for name in names}
        ended, total = (sum(float(row[name][0]) for row in found) for name in ("episodes", "episode/return"))
        return told | {"cpu_seconds": used, "mean_return": total / ended if ended else float("nan")}

    config = {"env": env, "num_envs": num_envs, "num_steps": num_steps, **dataclasses.asdict(made.acting)}
    config |= dataclasses.asdict(made.algorithm)
    return Prepared(config, updates * steps, "env steps", compiled, lambda number: None, work)
