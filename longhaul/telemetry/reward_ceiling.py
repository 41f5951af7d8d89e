"""The ceiling of a run: reward over compute as a sigmoid, R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B), with intervals.

ScaleRL (Khatri et al. 2025, arXiv 2510.13786): A is what a recipe ends at, B how steeply it gets there, Cmid the
compute at half way. Any reward that is bounded will do, of driving as of reasoning, and any measure of compute.

Least squares by damped Gauss-Newton steps from a grid of starts, all at once; R0 is given, as there. Intervals are of
fits to residuals drawn anew. A curve that has not bent has no ceiling that could be told from another, and is refused.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

STEPS = 100

LEAST = 6
"""Points of a curve; three numbers are fitted."""

BENT, UNSURE = 0.5, 0.5
"""Of the way to the ceiling, the share that must lie behind, and the width of its interval that is too much."""

STEEPEST = 8.0


class Ceiling(NamedTuple):
    """Reward and compute in the units that were fitted."""

    start: float  # R0
    ceiling: float  # A
    steepness: float  # B
    middle: float  # Cmid

    def at(self, compute: np.ndarray | float) -> np.ndarray:
        """The reward after so much compute."""
        ratio = (self.middle / np.maximum(np.asarray(compute, float), 1e-300)) ** self.steepness
        return self.start + (self.ceiling - self.start) / (1.0 + ratio)


class Fit(NamedTuple):
    law: Ceiling
    error: float  # root mean square of the residuals
    intervals: dict[str, tuple[float, float]]  # of each fitted number, where 90 % of the draws lie


class NotBent(ValueError):
    """The curve does not say yet where it ends."""


def fit(compute: np.ndarray, reward: np.ndarray, *, start: float, draws: int = 200, seed: int = 0) -> Fit:
    """The sigmoid through `reward` [points] at `compute` [points] > 0, from `start` on.

    Raises NotBent where no ceiling can be told, and ValueError for points that can't be.
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
    """Whether `factor` times the compute so far is forecast to gain `least` reward: the stop rule's opposite."""
    return bool(law.at(factor * compute) - law.at(compute) >= least)


def _value(p: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The gains [S, points] of (A - R0, log B, log Cmid) [S, 3] at log compute."""
    return p[:, :1] / (1.0 + np.exp(np.clip(np.exp(p[:, 1:2]) * (p[:, 2:3] - x[None]), -60.0, 60.0)))


def _minimise(
    x: np.ndarray, target: np.ndarray, p: np.ndarray, span: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """From starts `p` [S, 3] to minima for `target` ([S, points], or one for all), and their sums of squares [S].

    A step that makes things worse is not taken, and the next is damped more (Levenberg-Marquardt).
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
