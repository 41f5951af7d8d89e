"""Comparison of runs: their differing settings, and statistics over the seeds of a setting.

The interquartile mean and the stratified bootstrap are those of rliable (Agarwal et al., "Deep reinforcement learning
at the edge of the statistical precipice", 2021): a quarter of the scores is cut off at each end, and runs are drawn
with replacement within each task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.training import runs
from longhaul.training.runs import Curves

RESAMPLES, SHARE = 2000, 0.95
"""Draws of the bootstrap, and the share of them inside an interval."""

TRIM = 0.25
"""Share of the scores that is cut off at each end."""

LAST = 0.05
"""Share of a run's records, its last, whose mean is its final value."""

GRID = 300
"""Points of a curve over seeds."""

OF_SEEDS = (
    *("seed", "population.together", "devices", "threads"),
    *("save_interval", "save_interval_minutes", "keep", "evaluation_interval"),
)
"""Settings in which runs of one group may differ: they do not change what is learnt, but for chance."""


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Settings in which the runs differ, with each run's value; None where it has no such setting."""
    fields = dict.fromkeys(name for each in configs.values() for name in each)
    values = {name: [each.get(name) for each in configs.values()] for name in fields}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def groups(configs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Names of the runs that share all settings but `OF_SEEDS`, group by group."""
    alike: dict[str, list[str]] = {}
    for name, each in configs.items():
        kept = {field: value for field, value in each.items() if field not in OF_SEEDS}
        alike.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(name)
    return list(alike.values())


def iqm(scores: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Interquartile mean of scores: of all, or along an axis."""
    scores = np.sort(np.ravel(scores) if axis is None else np.moveaxis(scores, axis, -1), axis=-1)
    cut = int(TRIM * scores.shape[-1])
    return np.mean(scores[..., cut : scores.shape[-1] - cut], axis=-1)


def interval(
    scores: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray] = iqm,
    *,
    resamples: int = RESAMPLES,
) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of a statistic of scores [runs, tasks, ...] over runs and tasks; NaN for a single run.

    `statistic` takes [samples, runs * tasks, ...] along axis 1. Ends are percentiles of the statistic of runs
    drawn with replacement within each task.
    """
    count, tasks, *rest = scores.shape
    if count < 2:
        return np.full(rest, np.nan), np.full(rest, np.nan)
    drawn = np.random.default_rng(0).integers(count, size=(resamples, count, tasks))
    samples = scores[drawn, np.arange(tasks)].reshape(resamples, count * tasks, *rest)
    edges = np.quantile(statistic(samples), ((1 - SHARE) / 2, (1 + SHARE) / 2), axis=0)
    return edges[0], edges[1]


def final(curves: Curves, metric: str) -> float | None:
    """Mean of the last 5 % of a run's records that have a metric, at least one; None if none has."""
    values = curves.column(metric)
    known = values[np.isfinite(values)]
    return float(known[-max(1, round(LAST * len(known))) :].mean()) if len(known) else None


class Row(NamedTuple):
    """Final values of a metric over the runs of one group; a single run has no intervals."""

    runs: list[str]
    metric: str
    values: list[float]
    mean: float
    mean_low: float
    mean_high: float
    iqm: float
    iqm_low: float
    iqm_high: float


def table(curves: Mapping[str, Curves], together: Sequence[Sequence[str]], metrics: Sequence[str]) -> list[Row]:
    """A row for each group of runs and each metric that one of its runs has."""
    rows = []
    for metric in metrics:
        for names in together:
            finals = {name: value for name in names if (value := final(curves[name], metric)) is not None}
            if finals:
                scores = np.array(list(finals.values()))[:, None]
                low, high = interval(scores, lambda drawn: drawn.mean(axis=1))
                middle = interval(scores, lambda drawn: iqm(drawn, 1))
                ends = (float(low), float(high), float(iqm(scores)), float(middle[0]), float(middle[1]))
                rows.append(Row(list(finals), metric, scores[:, 0].tolist(), float(scores.mean()), *ends))
    return rows


def over_seeds(curves: Sequence[Curves], metric: str, axis: str = "agent_steps") -> tuple[np.ndarray, ...]:
    """(x, iqm, low, high) [points] of a metric over runs, on a grid over the stretch that all of them cover."""
    lines = []
    for each in curves:
        x, y = each.column(axis), each.column(metric)
        known = np.isfinite(x) & np.isfinite(y)
        if known.any():
            lines.append((x[known], y[known]))
    if not lines or (start := max(x[0] for x, _ in lines)) >= (end := min(x[-1] for x, _ in lines)):
        return (np.zeros(0),) * 4
    grid = np.linspace(start, end, GRID)
    scores = np.stack([np.interp(grid, x, y) for x, y in lines])
    low, high = interval(scores[:, None], lambda drawn: iqm(drawn, 1), resamples=RESAMPLES // 4)
    return grid, iqm(scores, 0), low, high


class Comparison(NamedTuple):
    """Runs side by side."""

    curves: dict[str, Curves]  # by name
    groups: list[list[str]]  # names of runs that differ in their seed alone
    differences: dict[str, list[Any]]  # settings that differ, a value each run


def compare(folders: Mapping[str, Path]) -> Comparison:
    """Comparison of runs by name."""
    curves, configs = {}, {}
    for name, folder in folders.items():
        curves[name], configs[name] = Curves(folder), runs.config(folder)
        curves[name].update()
    return Comparison(curves, groups(configs), differences(configs))
