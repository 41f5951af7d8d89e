"""Do two ways to train learn the same? Returns of several seeds each, compared by an exact permutation test.

Runs on other numbers of devices draw other random numbers, so that only the distributions over seeds can be compared.
Where both were the same, every way to deal the values to the two sides would be as likely (Fisher 1935): the share of
those whose means differ at least as much is the chance of what was seen. It needs no normal distribution and no equal
variances, and with few seeds it can never be very small.
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
"""Of each side: the smallest chance that 5 against 5 can give is 0.008."""

UNLIKELY = 0.01
"""A chance below which two sides differ."""

LITTLE = 0.1
"""Share of what was learnt by which the sides may differ, however sure it is."""


class Comparison(NamedTuple):
    difference: float  # of the means, second less first
    chance: float  # of a difference at least as large, if both were the same
    gained: float  # how far the return came on average, from the first update on
    spread: float  # standard error of the difference


def curve(subject: Subject, seed: int, updates: int) -> np.ndarray:
    """The mean return of the episodes that ended in each update, NaN where none did: float64 [updates]."""
    _, rows = subject.updates(subject.start(seed), updates)
    counts = rows.get("episodes/return", rows["episodes"])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, np.asarray(rows["episode/return"], np.float64) / counts, np.nan)


def level(curve_: np.ndarray) -> float:
    """The mean return over the second half of a curve; NaN where no episode ended in it."""
    later = curve_[len(curve_) // 2 :]
    return float(np.nanmean(later)) if np.any(np.isfinite(later)) else math.nan


def permutation_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """The share of all ways to deal the values to two such sides whose means differ at least as much."""
    both, n = np.array([*first, *second], np.float64), len(first)
    seen = abs(both[:n].mean() - both[n:].mean())
    total = both.sum()
    picked = np.array([both[list(some)].sum() for some in itertools.combinations(range(len(both)), n)])
    apart = np.abs(picked / n - (total - picked) / (len(both) - n))
    return float(np.mean(apart >= seen * (1.0 - 1e-9)))


def compare(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Comparison | None:
    """Curves of two sides, at least two each; None where some curve has no episode in its second half."""
    one, other = ([level(each) for each in side] for side in (first, second))
    if not all(map(math.isfinite, (*one, *other))):
        return None
    begun = [float(each[np.isfinite(each)][0]) for each in (*first, *second)]
    gained = statistics.fmean((*one, *other)) - statistics.fmean(begun)
    spread = math.sqrt(statistics.variance(one) / len(one) + statistics.variance(other) / len(other))
    difference = statistics.fmean(other) - statistics.fmean(one)
    return Comparison(difference, permutation_chance(one, other), gained, spread)
