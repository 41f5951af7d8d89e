"""Reward ceiling of a run: a sigmoid in compute, R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B), with intervals.

ScaleRL (Khatri et al. 2025, arXiv 2510.13786): A is the final reward of a recipe, B the steepness, Cmid the compute at
half way. Any bounded reward will do, of driving or of reasoning, and any measure of compute.

Least squares by damped Gauss-Newton steps from a grid of starts, all at once; R0 is given, as in the paper. Intervals
come from fits to resampled residuals. A curve that has not bent has no identifiable ceiling and is refused.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

STEPS = 100

LEAST = 6
"""Least number of points of a curve; three numbers are fitted."""

BENT, UNSURE = 0.5, 0.5
"""Least share of the way to the ceiling that must be covered, and largest width of the ceiling's interval as a share.
"""

STEEPEST = 8.0


class Ceiling(NamedTuple):
    """Reward and compute in the fitted units."""

    start: float  # R0
    ceiling: float  # A
    steepness: float  # B
    middle: float  # Cmid

    def at(self, compute: np.ndarray | float) -> np.ndarray:
        """Reward after `compute`."""
        ratio = (self.middle / np.maximum(np.asarray(compute, float), 1e-300)) ** self.steepness
        return self.start + (self.ceiling - self.start) / (1.0 + ratio)


class Fit(NamedTuple):
    law: Ceiling
    error: float  # root mean square of the residuals
    intervals: dict[str, tuple[float, float]]  # of each fitted number, 90 % of the draws


class NotBent(ValueError):
    """The curve has not bent enough to show its ceiling."""


def fit(compute: np.ndarray, reward: np.ndarray, *, start: float, draws: int = 200, seed: int = 0) -> Fit:
    """Sigmoid through `reward` [points] at `compute` [points] > 0, from `start` on.

    Raises NotBent if the ceiling cannot be identified, and ValueError for invalid points.
    """
    compute, reward = np.asarray(compute, float), np.asarray(reward, float)
    if compute.shape != reward.shape or compute.ndim != 1 or len(compute) < LEAST:
        raise ValueError(f"compute and reward have shapes {compute.shape}, {reward.shape}; give two vectors of {LEAST}")
    if not (np.all(np.isfinite(reward)) and np.all(np.isfinite(compute) & (compute > 0))):
        raise ValueError("compute must be above 0, and all finite")
    x = np.log(compute)
    low, high = x.min() - 1.0, x.max() + 3.0
    grid = itertools.product((0.5, 1.0, 2.0), (0.5, 1.0, 2.0, 4.0), np.linspace(low + 1.0, x.max(), 4))
    gain = max(float(np.max(reward)) - start, 1e-3)
    starts = np.array([(gain * share, np.log(b), middle) for share, b, middle in grid])
    found, cost = _minimise(x, (reward - start)[None], starts, (low, high))
    best = found[np.argmin(cost)]
    residual = reward - start - _value(best[None], x)[0]
    rng = np.random.default_rng(seed)
    spread = (residual - residual.mean()) * np.sqrt(len(x) / max(len(x) - 3, 1))
    drawn = (reward - start - residual)[None] + rng.choice(spread, (draws, len(x)))
    again = _minimise(x, drawn, np.repeat(best[None], draws, axis=0), (low, high))[0]
    numbers = np.stack([start + again[:, 0], np.exp(again[:, 1]), np.exp(again[:, 2])])
    ends = np.quantile(numbers, (0.05, 0.95), axis=1)
    law = Ceiling(start, start + float(best[0]), float(np.exp(best[1])), float(np.exp(best[2])))
    intervals = {name: (float(ends[0, i]), float(ends[1, i])) for i, name in enumerate(Ceiling._fields[1:])}
    _refuse(law, intervals, float(compute.max()))
    return Fit(law, float(np.sqrt(np.mean(residual**2))), intervals)


def _refuse(law: Ceiling, intervals: dict[str, tuple[float, float]], last: float) -> None:
    way, (low, high) = law.ceiling - law.start, intervals["ceiling"]
    behind = (float(law.at(last)) - law.start) / way if abs(way) > 1e-9 else 0.0
    if behind < BENT:
        raise NotBent(f"{behind:.0%} of the way to a ceiling of {law.ceiling:.3g} lie behind, less than {BENT:.0%}; "
                      "train on, then ask again")  # fmt: skip
    if high - low > UNSURE * abs(way):
        raise NotBent(f"the ceiling lies anywhere in {low:.3g} to {high:.3g}; train on, then ask again")


def worth_going_on(law: Ceiling, compute: float, least: float, factor: float = 2.0) -> bool:
    """True if `factor` times the compute is forecast to gain `least` reward: the opposite of the stop rule."""
    return bool(law.at(factor * compute) - law.at(compute) >= least)


def _value(p: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Gains [S, points] of (A - R0, log B, log Cmid) [S, 3] at log compute."""
    return p[:, :1] / (1.0 + np.exp(np.clip(np.exp(p[:, 1:2]) * (p[:, 2:3] - x[None]), -60.0, 60.0)))


def _minimise(
    x: np.ndarray, target: np.ndarray, p: np.ndarray, span: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Minima for `target` ([S, points], or one for all) from starts `p` [S, 3], and their sums of squares [S].

    A step that increases the sum is rejected, and the next is damped more (Levenberg-Marquardt).
    """
    low, high = np.array([-np.inf, np.log(0.1), span[0]]), np.array([np.inf, np.log(STEEPEST), span[1]])
    damping, p = np.full(len(p), 1e-2), np.clip(p, low, high)
    cost = np.sum((target - _value(p, x)) ** 2, axis=1)
    for _ in range(STEPS):
        value, b = _value(p, x), np.exp(p[:, 1:2])
        share = value / np.where(np.abs(p[:, :1]) < 1e-12, 1e-12, p[:, :1])
        rest = value * (1.0 - share)
        slope = np.stack([share, -rest * b * (p[:, 2:3] - x[None]), -rest * b], axis=-1)
        normal = np.einsum("sci,scj->sij", slope, slope)
        scale = np.einsum("sii->si", normal) + 1e-9
        damped = normal + damping[:, None, None] * (scale[:, :, None] * np.eye(3))
        step = np.linalg.solve(damped, np.einsum("sci,sc->si", slope, target - value)[..., None])[..., 0]
        tried = np.clip(p + np.clip(step, -1.0, 1.0), low, high)
        cost_tried = np.sum((target - _value(tried, x)) ** 2, axis=1)
        better = cost_tried < cost
        p, cost = np.where(better[:, None], tried, p), np.where(better, cost_tried, cost)
        damping = np.clip(np.where(better, damping / 3.0, damping * 4.0), 1e-9, 1e6)
    return p, cost
