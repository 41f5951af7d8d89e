"""Where driving scenarios come from: logs on disk, or the generator; for training and, unseen, for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from longhaul import workers as processes
from longhaul.datasets import scenarios
from longhaul.datasets.log import Log
from longhaul.driving.compile import compile_log
from longhaul.driving.generator import generate
from longhaul.driving.scenario import Scenario

HELD_OUT = 1_000_000
"""Generated seeds from here on are for evaluation only; a run trains on seeds below."""


def from_logs(paths: Sequence[str], *, agents: int, horizon: int | None) -> list[Scenario]:
    """Every scenario of the files (logs, and shards of `longhaul data convert`) at `paths`.

    Raises BadData, one line, where one can't be used.
    """
    return scenarios.load(paths, agents=agents, horizon=horizon)


def generated(first: int, count: int, *, agents: int, horizon: int | None, workers: int) -> list[Scenario]:
    """The generated scenarios of seeds first .. first + count - 1, in order."""
    make = partial(_generate, agents=agents, horizon=horizon)
    seeds = range(first, first + count)
    if workers <= 1 or count < 16:
        return [make(seed) for seed in seeds]
    with processes.pool(workers) as pool:
        return list(pool.map(make, seeds, chunksize=8))


def _generate(seed: int, *, agents: int, horizon: int | None) -> Scenario:
    log: Log = generate(seed)
    return compile_log(log, agents=agents, horizon=horizon)
