"""Evaluations of a run while it trains: a line each in `evaluations.jsonl`, with intervals and sample completions.

They draw random numbers of their own, so that a run's parameters are the same without them. Their means stand in the
next record of metrics.jsonl, too, as `eval/NAME`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.config.run import Driving, Named, Run
from longhaul.envs.host.registry import is_hosted
from longhaul.runtime import files
from longhaul.telemetry import sinks
from longhaul.training import confidence, evaluate, evaluate_driving
from longhaul.training.evaluate import Scores
from longhaul.training.runs import EVALUATIONS
from longhaul.types import Params

SHARE = 0.03
"""Share of a run's time that evaluations take, where no interval is given."""

FIRST, LEAST, COMPILED = 300.0, 2.0, 10.0
"""Seconds of training before the first one, so that short runs have none (driving's takes most of a minute to compile);
least seconds between two; multiple of the first one's time, which compiles, before the second."""

LEFT = 120.0
"""Seconds of training that must be left for the first one: it compiles beside the training, and a run's end evaluates
anyhow."""

MOST = 100
"""Most evaluations of a run, where no interval is given."""

LETTERS = 2000
"""Most letters of a prompt or a completion that are kept."""

Play = Callable[[Params], tuple[Scores, list[dict[str, Any]]]]
"""policy -> (scores, completions of a language model)."""


class Evaluations:
    """Evaluations of `run` in `folder`, where `done` of all `updates` are done.

    Without an interval they come by time, in runs that one process trains alone and whose episodes are played on the
    device: elsewhere one may take minutes.
    """

    def __init__(self, run: Run, folder: Path, updates: int, done: int, *, alone: bool = True) -> None:
        self._run, self._path = run, folder / EVALUATIONS
        self._least = updates / MOST
        hosted = isinstance(run.environment, Named) and is_hosted(run.environment.env)
        self._by_time = run.evaluation_interval is None and alone and not run.many and not hosted
        before = sinks.read(self._path) if self._path.exists() else []
        self._play: Play | None = None
        self._last, self._ended, self._wait = done, time.perf_counter(), FIRST
        self._begun, self._updates = done, updates
        records = folder / "metrics.jsonl"
        self._recorded = sinks.read(records)[-1]["update"] if records.exists() and records.stat().st_size else 0
        self._pending = means(before[-1]) if before and before[-1]["update"] > self._recorded else {}

    def due(self, done: int, n: int) -> bool:
        """True if one is due after `done` updates, the last n of them in one call."""
        if every := self._run.evaluation_interval:
            return done // every > (done - n) // every
        waited = time.perf_counter() - self._ended
        late = waited >= self._wait and done - self._last >= self._least
        if self._play is None:
            late = late and waited * (self._updates - done) >= LEFT * (done - self._begun)
        return self._by_time and self._recorded > 0 and late

    def make(self, policy: Params, counts: Mapping[str, Any]) -> None:
        """Evaluation of the policy, written as a line; `counts` are the counts of a record."""
        began, first = time.perf_counter(), self._play is None
        self._play = self._play or player(self._run)
        scores, chains = self._play(policy)
        line = row(counts, scores, chains)
        with files.naming(self._path), open(self._path, "a") as file:
            file.write(json.dumps(files.finite(line), allow_nan=False) + "\n")
        self._pending = means(line)
        self._last, self._ended = counts["update"], time.perf_counter()
        duration = self._ended - began
        self._wait = max(LEAST, duration * COMPILED if first else duration / SHARE)

    def taken(self, update: int) -> dict[str, float]:
        """Means that no record has yet, for the record of this update."""
        taken, self._pending, self._recorded = self._pending, {}, update
        return taken


def player(run: Run) -> Play:
    """Function that plays the run's evaluation. Compiles once."""
    assert run.evaluation_episodes is not None
    if isinstance(run.environment, Driving):
        drive = evaluate_driving.drives(run).player("policy")
        return lambda policy: (drive(policy)[0], [])
    return evaluate.scorer(run, run.evaluation_episodes)


def row(counts: Mapping[str, Any], scores: Scores, chains: list[dict[str, Any]]) -> dict[str, Any]:
    """Line of an evaluation: counts, episodes, [mean, low, high] of each metric, and completions, cut to `LETTERS`."""
    estimates = confidence.bootstrap(scores.metrics, scores.groups())
    metrics = {name: list(estimate[:3]) for name, estimate in estimates.items()}
    line = {**counts, "episodes": len(scores.names), "metrics": metrics}
    cut = [{key: text[:LETTERS] if isinstance(text, str) else text for key, text in each.items()} for each in chains]
    return line | ({"chains": cut} if cut else {})


def means(line: Mapping[str, Any]) -> dict[str, float]:
    """Means of a line by their names in a record."""
    return {f"eval/{name}": np.nan if each[0] is None else each[0] for name, each in line["metrics"].items()}
