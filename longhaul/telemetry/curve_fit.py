"""Least squares of one curve from many starts, or through many draws, at once.

Bounded damped Gauss-Newton steps, as scipy's `least_squares` takes, which fits one curve a call: the 200 draws of a
scaling law's interval take it 9 s, and these steps 0.2 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Law = TypeVar("Law")

Model = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(values [S, points], their slopes [S, points, P]) of parameters [S, P]."""


class Fit(NamedTuple, Generic[Law]):
    law: Law
    error: float  # root mean square of the residuals
    intervals: dict[str, tuple[float, float]]  # of each fitted number of the law, 90 % of the draws


def minimise(
    model: Model, target: np.ndarray, p: np.ndarray, bounds: tuple[np.ndarray, np.ndarray], *, steps: int,
    longest: float, huber: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Minima for `target` ([S, points], or one for all) from starts `p` [S, P] within bounds [P], and their cost [S].

    The cost is the sum of squares, or of Huber's loss from the residual `huber` on. No number moves by more than
    `longest` a step. A step that increases the cost is rejected, and the next is damped more (Levenberg-Marquardt).
    """

    def cost_of(residual: np.ndarray) -> np.ndarray:
        if huber is None:
            return np.sum(residual**2, axis=1)
        size = np.abs(residual)
        return np.where(size <= huber, 0.5 * size**2, huber * (size - 0.5 * huber)).sum(-1)

    damping, p = np.full(len(p), 1e-2), np.clip(p, *bounds)
    value, slope = model(p)
    cost = cost_of(target - value)
    for _ in range(steps):
        residual = target - value
        weight = np.ones_like(residual) if huber is None else huber / np.maximum(np.abs(residual), huber)
        normal = np.einsum("sci,sc,scj->sij", slope, weight, slope)
        scale = np.einsum("sii->si", normal) + 1e-9
        damped = normal + damping[:, None, None] * (scale[:, :, None] * np.eye(p.shape[1]))
        step = np.linalg.solve(damped, np.einsum("sci,sc->si", slope, weight * residual)[..., None])[..., 0]
        tried = np.clip(p + np.clip(step, -longest, longest), *bounds)
        value_tried, slope_tried = model(tried)
        cost_tried = cost_of(target - value_tried)
        better = cost_tried < cost
        p, cost = np.where(better[:, None], tried, p), np.where(better, cost_tried, cost)
        value, slope = (
            np.where(better[:, None], value_tried, value),
            np.where(better[:, None, None], slope_tried, slope),
        )
        damping = np.clip(np.where(better, damping / 3.0, damping * 4.0), 1e-9, 1e6)
    return p, cost
