"""Forecast of a run's return from its records: its ceiling, and the gain of further training.

A sigmoid in compute is fitted, R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B): A is the final reward of a recipe, B the
steepness, Cmid the compute at half way (ScaleRL, Khatri et al. 2025, arXiv 2510.13786). R0 is given, as there.
Intervals come from fits to resampled residuals. A curve that has not bent has no identifiable ceiling and is refused.

Compute is agent steps since rewards are learnt from, without an imitating warm start. Long runs are averaged over parts
of equal length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.telemetry.curve_fit import Fit, minimise

TAUGHT = "grpo/taught"
"""Metric of an imitating warm start: above 0 while it lasts."""

POINTS = 200
"""Largest number of fitted points."""

WORTH = 0.01
"""Least gain worth twice the steps, as a share of the way from the first return to the ceiling."""

LEAST = 6
"""Least number of points of a curve; three numbers are fitted."""

BENT, UNSURE = 0.5, 0.5
"""Least share of the way to the ceiling that must be covered, and largest width of the ceiling's interval as a share.
"""

STEPS, STEEPEST = 100, 8.0
"""Steps of the fit; upper bound of B."""


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


class NotBent(ValueError):
    """The curve has not bent enough to show its ceiling."""


def fit(compute: np.ndarray, reward: np.ndarray, *, start: float, draws: int = 200, seed: int = 0) -> Fit[Ceiling]:
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
    bounds = np.array([-np.inf, np.log(0.1), low]), np.array([np.inf, np.log(STEEPEST), high])

    def gains(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(gains [S, points], their slopes [S, points, 3]) of (A - R0, log B, log Cmid) [S, 3]."""
        b, away = np.exp(p[:, 1:2]), p[:, 2:3] - x[None]
        value = p[:, :1] / (1.0 + np.exp(np.clip(b * away, -60.0, 60.0)))
        share = value / np.where(np.abs(p[:, :1]) < 1e-12, 1e-12, p[:, :1])
        rest = value * (1.0 - share)
        return value, np.stack([share, -rest * b * away, -rest * b], axis=-1)

    minima, cost = minimise(gains, (reward - start)[None], starts, bounds, steps=STEPS, longest=1.0)
    best = minima[np.argmin(cost)]
    residual = reward - start - gains(best[None])[0][0]
    rng = np.random.default_rng(seed)
    spread = (residual - residual.mean()) * np.sqrt(len(x) / max(len(x) - 3, 1))
    drawn = (reward - start - residual)[None] + rng.choice(spread, (draws, len(x)))
    refitted = minimise(gains, drawn, np.repeat(best[None], draws, axis=0), bounds, steps=STEPS, longest=1.0)[0]
    numbers = np.stack([start + refitted[:, 0], np.exp(refitted[:, 1]), np.exp(refitted[:, 2])])
    ends = np.quantile(numbers, (0.05, 0.95), axis=1)
    law = Ceiling(start, start + float(best[0]), float(np.exp(best[1])), float(np.exp(best[2])))
    intervals = {name: (float(ends[0, i]), float(ends[1, i])) for i, name in enumerate(Ceiling._fields[1:])}
    way, (least, most) = law.ceiling - start, intervals["ceiling"]
    behind = (float(law.at(compute.max())) - start) / way if abs(way) > 1e-9 else 0.0
    if behind < BENT:
        raise NotBent(f"{behind:.0%} of the way to a ceiling of {law.ceiling:.3g} lie behind, less than {BENT:.0%}; "
                      "train on, then ask again")  # fmt: skip
    if most - least > UNSURE * abs(way):
        raise NotBent(f"the ceiling lies anywhere in {least:.3g} to {most:.3g}; train on, then ask again")
    return Fit(law, float(np.sqrt(np.mean(residual**2))), intervals)


def worth_going_on(law: Ceiling, compute: float, least: float) -> bool:
    """True if twice the compute is forecast to gain `least` reward: the opposite of the stop rule."""
    return bool(law.at(2.0 * compute) - law.at(compute) >= least)


class Forecast(NamedTuple):
    """Returns in their own units; `steps` are agent steps since rewards are learnt from."""

    ceiling: Fit[Ceiling]
    steps: float  # so far
    now: float  # fitted return there
    doubled: float  # fitted return after twice as many
    go_on: bool  # opposite of the stop rule


def points(records: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(agent steps since rewards are learnt from, return) of the records with a return, in at most `POINTS` parts."""
    first, rows = 0.0, []
    for record in records:
        steps, value, taught = (record.get(name) for name in ("agent_steps", "episode/return", TAUGHT))
        if not isinstance(steps, int | float):
            continue
        if isinstance(taught, int | float) and taught > 0.0:
            first = float(steps)
        elif isinstance(value, int | float) and np.isfinite(value) and steps > first:
            rows.append((float(steps), float(value)))
    kept = np.array([(steps - first, value) for steps, value in rows if steps > first]).reshape(-1, 2)
    if len(kept) > POINTS:
        parts = np.array_split(kept, POINTS)
        kept = np.array([part.mean(axis=0) for part in parts])
    return kept[:, 0], kept[:, 1]


def forecast(records: Sequence[Mapping[str, Any]]) -> Forecast:
    """Forecast of a run. Raises ValueError, one line, if there are too few records."""
    steps, value = points(records)
    if len(steps) < LEAST:
        raise ValueError(f"{len(steps)} records with a return are too few to tell a ceiling; {LEAST} are enough")
    ceiling = fit(steps, value, start=float(value[0]))
    law, last = ceiling.law, float(steps[-1])
    worth = WORTH * abs(law.ceiling - law.start)
    now, doubled = float(law.at(last)), float(law.at(2.0 * last))
    return Forecast(ceiling, last, now, doubled, worth_going_on(law, last, worth))


def in_words(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Forecast in words, a name and a line each; none if records have no return."""
    if not len(points(records)[0]):
        return []
    try:
        outlook = forecast(records)
    except ValueError as error:
        return [("ceiling", f"none yet: {error}")]
    low, high = outlook.ceiling.intervals["ceiling"]
    line = f"{outlook.ceiling.law.ceiling:.4g} (90 %: {low:.4g} to {high:.4g}); the return is at {outlook.now:.4g}"
    worth = "worth it" if outlook.go_on else f"less than {WORTH:.0%} of the way: stop"
    return [("ceiling", line), ("twice the steps", f"{outlook.doubled - outlook.now:+.3g} forecast, {worth}")]
