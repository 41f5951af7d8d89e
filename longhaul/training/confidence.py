"""Confidence intervals of means over episodes, and over runs, by the bootstrap (Efron, "Bootstrap methods", 1979)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from longhaul.spaces import Measure

RESAMPLES = 1000

SHARE = 0.95
"""Share of the resampled means inside an interval."""

BLOCK = 1 << 20
"""Largest number of draws held at a time, a bound on memory."""


class Estimate(NamedTuple):
    """Mean with its interval; `low` and `high` are NaN where fewer than two scenarios report the metric."""

    mean: float
    low: float
    high: float
    episodes: int  # episodes that report the metric


def bootstrap(metrics: Mapping[str, Measure], scenario: np.ndarray, *, seed: int = 0) -> dict[str, Estimate]:
    """Mean with interval of each metric [E] over the episodes that report it; metrics reported by none are left out.

    Agents of one scenario are not independent: they met on one map. So scenarios are drawn with replacement, each with
    all its agents (the cluster bootstrap: Field and Welsh, "Bootstrapping clustered data", 2007). The interval lies
    between two percentiles of the means.

    `scenario` [E] numbers the scenario of each episode. The same seed gives the same intervals, whatever the order of
    the metrics: all share the draws. A resample without an episode that reports a metric is left out for that metric.
    """
    _, group = np.unique(scenario, return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    names = [name for name, m in metrics.items() if np.any(m.valid)]
    if not names:
        return {}
    values = np.stack([np.where(metrics[n].valid, metrics[n].value, 0.0) for n in names], -1).astype(float)
    valid = np.stack([metrics[n].valid for n in names], -1).astype(float)
    sums, counts = np.zeros((groups, len(names))), np.zeros((groups, len(names)))
    np.add.at(sums, group, values)
    np.add.at(counts, group, valid)
    block, parts, draw = max(1, BLOCK // groups), [], np.random.default_rng(seed)
    for begin in range(0, RESAMPLES, block):
        times = draw.multinomial(groups, np.full(groups, 1.0 / groups), min(block, RESAMPLES - begin))
        total, number = times @ sums, times @ counts
        parts.append(np.where(number > 0, total / np.maximum(number, 1e-9), np.nan))
    means = np.concatenate(parts)  # [RESAMPLES, metrics]; NaN where no episode that reports it was drawn
    edges = 100.0 * np.array([(1 - SHARE) / 2, (1 + SHARE) / 2])
    estimates = {}
    for i, name in enumerate(names):
        known = means[np.isfinite(means[:, i]), i]
        sure = np.count_nonzero(counts[:, i]) >= 2 and len(known) > 0
        low, high = np.percentile(known, edges) if sure else (np.nan, np.nan)
        mean = float(sums[:, i].sum() / counts[:, i].sum())
        estimates[name] = Estimate(mean, float(low), float(high), int(counts[:, i].sum()))
    return estimates


def bootstrap_runs(values: np.ndarray) -> tuple[np.ndarray, ...]:
    """(mean, low, high) [P] over M runs, of their values [P, M] at P shared points; NaN where a run reports none.

    Runs are drawn with replacement, the same ones at every point. `low` and `high` of a single run are NaN.
    """
    count = values.shape[1]
    known = np.isfinite(values).astype(float)
    sums = np.where(known > 0, values, 0.0)
    number = known.sum(1)
    mean = np.where(number > 0, sums.sum(1) / np.maximum(number, 1.0), np.nan)
    if count < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1.0 / count), RESAMPLES).T
    drawn = known @ times
    means = np.where(drawn > 0, sums @ times / np.maximum(drawn, 1.0), mean[:, None])
    low, high = np.quantile(means, [(1 - SHARE) / 2, (1 + SHARE) / 2], axis=1)
    return mean, np.where(number > 1, low, np.nan), np.where(number > 1, high, np.nan)
