"""Scaling law through measured losses: loss(N, D) = E + A N^-alpha + B D^-beta, a robust fit with intervals.

N is the size of the model, D that of its data (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3). As there, the
Huber loss of the residuals of log loss is minimised from a grid of starts. We differ in the minimiser (damped
Gauss-Newton steps with Huber's weights) and in giving intervals: residuals of the fit are resampled
and fitted again, which keeps the grid of (N, D) (with nine cells, resampled cells would often be too few).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from longhaul.telemetry.curve_fit import minimise

HUBER = 1e-3
"""Residual of log loss from which it counts linearly (the paper's delta)."""

STEPS = 150

LEAST_CELLS, LEAST_KINDS = 6, 3
"""Least cells, as five numbers are fitted; least different sizes, which separate an exponent from a floor."""

FLOOR, STEEPEST = 1e-6, 3.0
"""Lower bound of E relative to the least loss; upper bound of the exponents."""


class Law(NamedTuple):
    """Loss in the unit of the data; N and D in the fitted units."""

    e: float  # irreducible loss
    a: float
    alpha: float
    b: float
    beta: float

    def at(self, n: np.ndarray | float, d: np.ndarray | float) -> np.ndarray:
        """Loss of models of size n on data of size d."""
        n, d = np.asarray(n, float), np.asarray(d, float)
        return self.e + self.a * n**-self.alpha + self.b * d**-self.beta


class Fitted(NamedTuple):
    """Law with its error and intervals, as `curve_fit.Fit`, and what its forecasts need."""

    law: Law
    error: float  # root mean square of the residuals of log loss
    intervals: dict[str, tuple[float, float]]  # of each number of the law, 90 % of the draws
    laws: tuple[Law, ...]  # of the draws
    spread: tuple[float, ...]  # residuals of log loss, widened as the draws have them

    def forecast(self, n: float, d: float) -> tuple[float, float, float]:
        """Loss at (n, d), and the ends of the interval in which 90 % of measurements are to be expected there."""
        drawn = np.log([law.at(n, d) for law in self.laws])
        low, high = np.exp(np.quantile(drawn[:, None] + np.array(self.spread)[None], (0.05, 0.95)))
        return float(self.law.at(n, d)), float(low), float(high)


class TooFew(ValueError):
    """Too few cells, or too few different sizes, for a law."""


def fit(n: np.ndarray, d: np.ndarray, loss: np.ndarray, *, draws: int = 200, seed: int = 0) -> Fitted:
    """Law through `loss` [cells] > 0, measured at `n` and `d` [cells] > 0; its residuals are of log loss.

    Raises TooFew, or ValueError.
    """
    n, d, loss = (np.asarray(x, float) for x in (n, d, loss))
    _check(n, d, loss)
    # Centred logarithms: numbers of one size, and well-conditioned normal equations.
    middle = np.log(n).mean(), np.log(d).mean()
    log_loss = _model(np.log(n) - middle[0], np.log(d) - middle[1])
    target = np.log(loss)
    low = np.array([target.min() + np.log(FLOOR), -np.inf, 0.0, -np.inf, 0.0])
    high = np.array([target.max(), np.inf, STEEPEST, np.inf, STEEPEST])

    def minima(target: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return minimise(log_loss, target, starts, (low, high), steps=STEPS, longest=2.0, huber=HUBER)

    fitted, cost = minima(target[None], _starts(target))
    best = fitted[np.argmin(cost)]
    residual = target - log_loss(best[None])[0][0]
    rng = np.random.default_rng(seed)
    spread = residual * np.sqrt(len(loss) / max(len(loss) - 5, 1))  # a fit lowers its residuals
    drawn = (target - residual)[None] + rng.choice(spread, (draws, len(loss)))
    around = best[None] + rng.normal(scale=0.1, size=(draws, 5))
    laws = tuple(_law(p, middle) for p in minima(drawn, around)[0])
    ends = np.quantile(np.array(laws), (0.05, 0.95), axis=0)
    intervals = {name: (float(ends[0, i]), float(ends[1, i])) for i, name in enumerate(Law._fields)}
    error = float(np.sqrt(np.mean(residual**2)))
    return Fitted(_law(best, middle), error, intervals, laws, tuple(spread.tolist()))


def _check(n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> None:
    """Raises TooFew or ValueError for cells through which there is no law."""
    if not (n.shape == d.shape == loss.shape and n.ndim == 1):
        raise ValueError(f"n, d and loss have shapes {n.shape}, {d.shape} and {loss.shape}; give three equal vectors")
    if not all(np.all(np.isfinite(x) & (x > 0)) for x in (n, d, loss)):
        raise ValueError("n, d and loss must be finite and above 0; a loss of 0 has no logarithm")
    kinds = min(len(np.unique(n)), len(np.unique(d)))
    if len(loss) < LEAST_CELLS or kinds < LEAST_KINDS:
        raise TooFew(
            f"{len(loss)} cells with {len(np.unique(n))} sizes of model and {len(np.unique(d))} of data; a law needs "
            f"{LEAST_CELLS} cells and {LEAST_KINDS} of each"
        )


def _model(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Function of the law's parameters, at centred log sizes `x` and `y` [cells] of model and data."""

    def log_loss(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log loss [S, cells], its slopes [S, cells, 5]) of (log E, log A, alpha, log B, beta) [S, 5]."""
        floor = np.broadcast_to(p[:, :1], (len(p), len(x)))
        terms = np.stack([floor, p[:, 1:2] - p[:, 2:3] * x[None], p[:, 3:4] - p[:, 4:5] * y[None]])
        top = terms.max(0)
        total = top + np.log(np.exp(terms - top).sum(0))
        floor, model, data = np.exp(terms - total)
        return total, np.stack([floor, model, -x[None] * model, data, -y[None] * data], axis=-1)

    return log_loss


def _starts(target: np.ndarray) -> np.ndarray:
    """Parameters [S, 5] from which a fit to log losses begins: floors, shares and exponents from flat to steep."""
    lowest, middle = target.min(), np.median(target)
    floors = lowest - 5.0, lowest - 1.0, lowest - 0.2
    shares, exponents = (middle - 0.7, middle - 2.0), (0.2, 0.6, 1.2)
    return np.array(list(itertools.product(floors, shares, exponents, shares, exponents)))


def _law(p: np.ndarray, middle: tuple[float, float]) -> Law:
    """Law of (log E, log A, alpha, log B, beta) about the middle."""
    e, a, alpha, b, beta = (float(v) for v in p)
    return Law(math.exp(e), math.exp(a + alpha * middle[0]), alpha, math.exp(b + beta * middle[1]), beta)
