"""Aggregation of updates' metric rows into records, so that a run's log does not grow with its length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Record = dict[str, float]


def is_peak(name: str) -> bool:
    """True if the maximum counts, not the mean."""
    return name.startswith("peak/") or name.endswith("_max")


class Sums:
    """Sums over the updates since the last record; checkpoints hold them as `pending`."""

    def __init__(self, pending: Mapping[str, Any] | None = None):
        self.updates: int = pending["updates"] if pending else 0
        self._totals: Record = dict(pending["totals"]) if pending else {}

    def add(self, n: int, rows: Mapping[str, np.ndarray]) -> None:
        """Add the first n updates of `rows`, arrays [n or more] by name.

        "episodes" counts the ended episodes. "episode/NAME" is a sum over those that report it: "episodes/NAME" of
        them, or all without such a count. "peak/NAME" and "NAME_max" are an update's maxima, -inf if there was none.
        All others are one value an update.
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
        """The sums as exact JSON."""
        return {"updates": self.updates, "totals": dict(self._totals)}

    def take(self) -> Record:
        """Record of at least one update: means over episodes, maxima of peaks, means of the rest. Resets the sums.

        Without an ended episode the return is NaN; a metric that no episode reported is left out.
        """
        totals, updates = self._totals, self.updates
        episodes = totals.pop("episodes")
        counts = {name: totals.pop(name) for name in list(totals) if name.startswith("episodes/")}
        record = {"episode/count": episodes}
        for name, total in sorted(totals.items()):
            if is_peak(name):
                record[name] = total
                continue
            reporting = "episodes/" + name.removeprefix("episode/")
            count = counts.get(reporting, episodes) if name.startswith("episode/") else updates
            if count or reporting not in counts:
                record[name] = total / count if count else math.nan
        self.updates, self._totals = 0, {}
        return record
