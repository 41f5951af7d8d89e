"""Exact permutation test of two training setups: returns of several seeds each.

Runs on other numbers of devices draw other random numbers, so only distributions over seeds can be compared. If both
were the same, every assignment of the values to the two sides would be equally likely (Fisher 1935); the chance is the
share of assignments whose means differ at least as much. The test needs no normal distribution and no equal variances;
with few seeds the chance can never be very small.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longhaul.diagnostics.compiled_run import Subject

LEAST_SEEDS = 5
"""Seeds of each side: the smallest chance that 5 against 5 can give is 0.008."""

UNLIKELY = 0.01
"""Chance below which two sides count as different."""

LITTLE = 0.1
"""Share of the gain by which the sides may differ, however sure the difference is."""


class Comparison(NamedTuple):
    difference: float  # of the means, second less first
    chance: float  # of a difference at least as large, if both were the same
    gained: float  # mean gain of the return from the first update on
    spread: float  # standard error of the difference


def curve(subject: Subject, seed: int, updates: int) -> np.ndarray:
    """Mean return of the episodes that ended in each update, NaN if none did: float64 [updates]."""
    _, rows = subject.updates(subject.start(seed), updates)
    counts = rows.get("episodes/return", rows["episodes"])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, np.asarray(rows["episode/return"], np.float64) / counts, np.nan)


def level(curve_: np.ndarray) -> float:
    """Mean return over the second half of a curve; NaN if no episode ended in it."""
    later = curve_[len(curve_) // 2 :]
    return float(np.nanmean(later)) if np.any(np.isfinite(later)) else math.nan


def permutation_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of all assignments of the values to two such sides whose means differ at least as much."""
    both, n = np.array([*first, *second], np.float64), len(first)
    seen = abs(both[:n].mean() - both[n:].mean())
    total = both.sum()
    picked = np.array([both[list(some)].sum() for some in itertools.combinations(range(len(both)), n)])
    apart = np.abs(picked / n - (total - picked) / (len(both) - n))
    return float(np.mean(apart >= seen * (1.0 - 1e-9)))


def compare(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Comparison | None:
    """Comparison of two sides' curves, at least two each; None if a curve has no episode in its second half."""
    one, other = ([level(each) for each in side] for side in (first, second))
    if not all(map(math.isfinite, (*one, *other))):
        return None
    starts = [float(each[np.isfinite(each)][0]) for each in (*first, *second)]
    gained = statistics.fmean((*one, *other)) - statistics.fmean(starts)
    spread = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    difference = statistics.fmean(other) - statistics.fmean(one)
    return Comparison(difference, permutation_chance(one, other), gained, spread)
