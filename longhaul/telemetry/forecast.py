"""Forecast of a run's return from its records: its ceiling, and the gain of further training.

Compute is agent steps since rewards are learnt from, without an imitating warm start. Long runs are averaged over parts
of equal length. A run whose return has not bent yet gets no forecast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.telemetry import reward_ceiling
from longhaul.telemetry.reward_ceiling import Fit

RETURN, STEPS, TAUGHT = "episode/return", "agent_steps", "grpo/taught"

POINTS = 200
"""Largest number of fitted points."""

WORTH = 0.01
"""Least gain worth twice the steps, as a share of the way from the first return to the ceiling."""


class Forecast(NamedTuple):
    """Returns in their own units; `steps` are agent steps since rewards are learnt from."""

    fit: Fit
    steps: float  # so far
    now: float  # fitted return there
    doubled: float  # fitted return after twice as many
    go_on: bool  # opposite of the stop rule


def points(records: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(agent steps since rewards are learnt from, return) of the records with a return, in at most `POINTS` parts."""
    first, rows = 0.0, []
    for record in records:
        steps, value, taught = (record.get(name) for name in (STEPS, RETURN, TAUGHT))
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
    if len(steps) < reward_ceiling.LEAST:
        raise ValueError(
            f"{len(steps)} records with a return are too few to tell a ceiling; {reward_ceiling.LEAST} are enough"
        )
    fit = reward_ceiling.fit(steps, value, start=float(value[0]))
    last, worth = float(steps[-1]), WORTH * abs(fit.law.ceiling - fit.law.start)
    now, doubled = float(fit.law.at(last)), float(fit.law.at(2.0 * last))
    return Forecast(fit, last, now, doubled, reward_ceiling.worth_going_on(fit.law, last, worth))


def said(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Forecast in words, a name and a line each; none if records have no return."""
    if not len(points(records)[0]):
        return []
    try:
        found = forecast(records)
    except ValueError as error:
        return [("ceiling", f"none yet: {error}")]
    low, high = found.fit.intervals["ceiling"]
    line = f"{found.fit.law.ceiling:.4g} (90 %: {low:.4g} to {high:.4g}); the return is at {found.now:.4g}"
    worth = "worth it" if found.go_on else f"less than {WORTH:.0%} of the way: stop"
    return [("ceiling", line), ("twice the steps", f"{found.doubled - found.now:+.3g} forecast, {worth}")]
