"""What more training is forecast to bring a run, of its records: the ceiling of its return, and whether to go on.

Compute is agent steps since rewards began to teach: a warm start that imitates is left out. Long runs are averaged in
parts of equal length. A run whose return has not bent has no forecast, and is told so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.telemetry import reward_ceiling
from longhaul.telemetry.reward_ceiling import Fit

RETURN, STEPS, TAUGHT = "episode/return", "agent_steps", "grpo/taught"

POINTS = 200
"""Most points that are fitted."""

WORTH = 0.01
"""Of the way from the first return to the ceiling: what twice the steps must be forecast to bring."""


class Forecast(NamedTuple):
    """Returns in their own units; `steps` are agent steps from rewards."""

    fit: Fit
    steps: float  # behind
    now: float  # the fitted return there
    doubled: float  # after twice as many
    go_on: bool  # the stop rule's opposite


def points(records: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(agent steps since rewards began, return) of the records that have one, in at most `POINTS` parts."""
    begun, rows = 0.0, []
    for record in records:
        steps, value, taught = (record.get(name) for name in (STEPS, RETURN, TAUGHT))
        if not isinstance(steps, int | float):
            continue
        if isinstance(taught, int | float) and taught > 0.0:
            begun = float(steps)
        elif isinstance(value, int | float) and np.isfinite(value) and steps > begun:
            rows.append((float(steps), float(value)))
    kept = np.array([(steps - begun, value) for steps, value in rows if steps > begun]).reshape(-1, 2)
    if len(kept) > POINTS:
        parts = np.array_split(kept, POINTS)
        kept = np.array([part.mean(axis=0) for part in parts])
    return kept[:, 0], kept[:, 1]


def forecast(records: Sequence[Mapping[str, Any]]) -> Forecast:
    """What lies ahead of a run. Raises ValueError, one line, where nothing can be told yet."""
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
    """The forecast in words, a name and a line each; none where records have no return."""
    if not len(points(records)[0]):
        return []
    try:
        found = forecast(records)
    except ValueError as error:
        return [("ceiling", f"none yet: {error}")]
    low, high = found.fit.intervals["ceiling"]
    told = f"{found.fit.law.ceiling:.4g} (90 %: {low:.4g} to {high:.4g}); the return is at {found.now:.4g}"
    worth = "worth it" if found.go_on else f"less than {WORTH:.0%} of the way: stop"
    return [("ceiling", told), ("twice the steps", f"{found.doubled - found.now:+.3g} forecast, {worth}")]
