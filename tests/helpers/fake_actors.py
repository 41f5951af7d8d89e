"""Actors and a learner of a few NumPy sums, which start at once, and tell any mistake by their last number.

What an actor brings depends on its weights, the state of its environment, the run's key and its ticket; and it does
what a plan says, once: is killed, stops, fails, hangs, or awaits that another one ("1-5": actor 1 with batch 5) comes
to what the plan says of it.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.runtime.shared_memory import Leaf
from longhaul.topologies.actor_learner.actor_pool import ActorPool
from longhaul.topologies.actor_learner.shared_buffers import Shapes
from longhaul.topologies.staleness import Rule, Ticket

SHAPES = Shapes(
    weights=(Leaf((3,), "float32"), Leaf((), "int32")),
    carry=(Leaf((2,), "int64"),),
    data=(Leaf((4, 2), "int64"), Leaf((), "int64")),
    scores=(Leaf((), "float32"),),
)

Plan = dict[tuple[int, int], str]
"""(actor, batch) -> what befalls it there, once."""


def make(plan: Plan, marks: str, actor: int) -> Any:
    """Behaviour of actor `actor`."""

    def collect(weights: Any, state: Any, key: Any, ticket: Ticket, version: int) -> Any:
        _befall(plan.get((actor, ticket.batch), ""), Path(marks) / f"{actor}-{ticket.batch}")
        assert int(weights[1]) == version
        seed = int(key[0]) + 31 * ticket.batch + 7 * ticket.place + version
        after = (np.asarray(state[0]) * 5 + seed + int(weights[0].sum())) % 10_007
        data = np.arange(8, dtype=np.int64).reshape(4, 2) * seed % 101 + after
        return [after], [data, np.int64(version)], [np.float32(ticket.batch)]

    return collect


def _befall(fault: str, mark: Path) -> None:
    if fault == "waits":
        time.sleep(0.01)
        return
    if not fault or (fault != "always" and mark.exists()):
        return
    mark.touch()
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault in ("fail", "always"):
        raise ValueError("the environment broke")
    if fault == "hang":
        time.sleep(600.0)
    if fault.startswith("awaits "):
        there, ends = mark.with_name(fault.removeprefix("awaits ")), time.monotonic() + 60.0
        while not there.exists() and time.monotonic() < ends:
            time.sleep(0.002)


def weights(version: int, total: int) -> np.ndarray:
    parts = np.array([total % 97, version, total % 7], np.float32), np.int32(version)
    return np.concatenate([np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in parts])


def crew(rule: Rule, plan: Plan, marks: Path, kind: str) -> ActorPool:
    return ActorPool(rule, SHAPES, functools.partial(make, plan, str(marks)), kind=kind)


def begin(mine: ActorPool) -> None:
    n = mine.rule.places
    mine.open(0, np.array([11, 12], np.uint32), [weights(0, 0)], [np.arange(2 * n, dtype=np.int64).reshape(n, 2)])


def learn(
    mine: ActorPool, updates: int, before: Callable[[int], object] = lambda version: None
) -> tuple[int, list[int]]:
    """(a number that tells all that was learnt from, in order; the staleness of every rollout); `before` each update
    something may be done."""
    total, ages = 0, []
    for version in range(updates):
        before(version)
        batch = mine.take()
        assert batch is not None
        for place, (data, acted, score, head) in enumerate(zip(*batch.data, batch.scores[0], batch.heads)):
            assert (int(acted), int(score)) == (head.version, version)
            total = (total * 13 + int(data.sum()) * (place + 1)) % 1_000_003
            ages.append(version - head.version)
        mine.learnt(weights(version + 1, total))
    return total, ages
