"""Where driving scenarios come from: logs on disk, or the generator; for training and, unseen, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from longhaul import workers as processes
from longhaul.datasets import scenarios
from longhaul.datasets.log import Log
from longhaul.driving.compile import compile_log
from longhaul.driving.generator import generate
from longhaul.driving.scenario import Scenario

HELD_OUT = 1_000_000
"""Generated seeds from here on are for evaluation only; a run trains on seeds below."""

TRIED = 50
"""Seeds for one scenario that is good enough before giving up."""


def from_logs(
    paths: Sequence[str], *, agents: int, horizon: int | None, objects: int = scenarios.OBJECTS,
    count: int | None = None, control: str = "vehicles",
) -> list[Scenario]:  # fmt: skip
    """Every scenario, or the first `count`, of the files (logs, and shards of `longhaul data convert`) at `paths`.

    Raises BadData, one line, where one can't be used.
    """
    return scenarios.load(paths, agents=agents, horizon=horizon, objects=objects, count=count, control=control)


def generated(
    first: int, count: int, *, agents: int, horizon: int | None, workers: int, control: str = "vehicles", least: int = 1
) -> list[Scenario]:
    """The generated scenarios of seeds first .. first + count - 1, in order.

    With `least` above 1: from `first` on the first `count` in which so many agents can be controlled. ValueError where
    hardly any has them.
    """
    make = partial(_generate, agents=agents, horizon=horizon, control=control)
    found: list[Scenario] = []
    seed = first
    with ExitStack() as closed:
        pool = closed.enter_context(processes.pool(workers)) if workers > 1 and count >= 16 else None
        while len(found) < count:
            seeds = range(seed, seed + count - len(found))
            made = map(make, seeds) if pool is None else pool.map(make, seeds, chunksize=8)
            found += [scenario for scenario in made if int((scenario.controlled >= 0).sum()) >= least]
            seed = seeds.stop
            if len(found) < count and seed - first >= TRIED * (1 + len(found)):
                raise ValueError(
                    f"{len(found)} of {seed - first} generated scenarios have {least} agents or more; ask for fewer"
                )
    return found


def _generate(seed: int, *, agents: int, horizon: int | None, control: str) -> Scenario:
    log: Log = generate(seed)
    return compile_log(log, agents=agents, horizon=horizon, control=control)
