"""Where driving scenarios come from: logs on disk, or the generator; for training and, unseen, for evaluation."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process

from longhaul.datasets import sources
from longhaul.datasets.log import BadData, Log
from longhaul.driving.compile import compile_log
from longhaul.driving.generator import generate
from longhaul.driving.scenario import Scenario

HELD_OUT = 1_000_000
"""Generated seeds from here on are for evaluation only; a run trains on seeds below."""


def from_logs(paths: Sequence[str], *, agents: int, horizon: int | None) -> list[Scenario]:
    """Every scenario of the files at `paths`. Raises BadData, one line, where one can't be used."""
    logs = sources.load(paths)
    if not logs:
        raise BadData(f"{', '.join(paths)}: the files hold no scenario; give other --data")
    return [compile_log(log, agents=agents, horizon=horizon) for log in logs]


def generated(first: int, count: int, *, agents: int, horizon: int | None, workers: int) -> list[Scenario]:
    """The generated scenarios of seeds first .. first + count - 1, in order."""
    make = partial(_generate, agents=agents, horizon=horizon)
    seeds = range(first, first + count)
    if workers <= 1 or count < 16:
        return [make(seed) for seed in seeds]
    # Fresh processes: a fork of one that runs JAX's threads may hang. They make scenarios with NumPy alone.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_attend) as pool:
        return list(pool.map(make, seeds, chunksize=8))


def _attend() -> None:
    """In a worker: leaves Ctrl-C to its parent, and ends when that ends, be it killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _generate(seed: int, *, agents: int, horizon: int | None) -> Scenario:
    log: Log = generate(seed)
    return compile_log(log, agents=agents, horizon=horizon)
