"""Updates' rows of metrics summed up as records, so that what a run logs does not grow with its length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Record = dict[str, float]


def is_peak(name: str) -> bool:
    """Whether the greatest counts, not the mean."""
    return name.startswith("peak/") or name.endswith("_max")


class Sums:
    """Sums over the updates since the last record. What is `pending` goes with a checkpoint, and comes back with it."""

    def __init__(self, pending: Mapping[str, Any] | None = None):
        self.updates: int = pending["updates"] if pending else 0
        self._totals: Record = dict(pending["totals"]) if pending else {}

    def add(self, n: int, rows: Mapping[str, np.ndarray]) -> None:
        """Adds the first n updates of `rows`, arrays [n or more] by name.

        "episodes" counts those that ended, "episode/NAME" sums over those of them that tell it: "episodes/NAME", or
        all where there is no such count. "peak/NAME" is the greatest of an update, -inf where there was none, and
        so is "NAME_max". The others are an update's own.
        """
        for name, values in rows.items():
            if is_peak(name):
                peak = float(np.max(values[:n], initial=-math.inf))
                if peak > self._totals.get(name, -math.inf):
                    self._totals[name] = peak
                continue
            total = float(np.sum(np.asarray(values[:n], np.float64)))
            self._totals[name] = self._totals.get(name, 0.0) + total
        self.updates += n

    def pending(self) -> dict[str, Any]:
        """As JSON can hold it, every bit."""
        return {"updates": self.updates, "totals": dict(self._totals)}

    def take(self) -> Record:
        """The record of at least one update: an episode's mean, the greatest of peaks, the rest's mean; begins anew.

        Where no episode ended, its return is NaN; a metric that no episode told is left out.
        """
        totals, updates = self._totals, self.updates
        episodes = totals.pop("episodes")
        counts = {name: totals.pop(name) for name in list(totals) if name.startswith("episodes/")}
        record = {"episode/count": episodes}
        for name, total in sorted(totals.items()):
            if is_peak(name):
                record[name] = total
                continue
            told = "episodes/" + name.removeprefix("episode/")
            count = counts.get(told, episodes) if name.startswith("episode/") else updates
            if count or told not in counts:
                record[name] = total / count if count else math.nan
        self.updates, self._totals = 0, {}
        return record
