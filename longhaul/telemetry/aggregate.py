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
    """Sums over the updates since the last record; checkpoints hold them as `pending`.

    Of the M members of a population each is summed by itself, and `each` holds their values of the last record.
    """

    def __init__(self, members: int = 0, pending: Mapping[str, Any] | None = None):
        self._shape = (members,) if members else ()
        self.updates: int = pending["updates"] if pending else 0
        self.each: dict[str, list[float]] = {}
        self._totals = {name: np.array(total, float) for name, total in pending["totals"].items()} if pending else {}

    def add(self, n: int, rows: Mapping[str, np.ndarray]) -> None:
        """Add the first n updates of `rows`, arrays [n or more], or [n or more, M], by name.

        "episodes" counts the ended episodes. "episode/NAME" is a sum over those that report it: "episodes/NAME" of
        them, or all without such a count. "peak/NAME" and "NAME_max" are an update's maxima, -inf if there was none.
        All others are one value an update.
        """
        for name, values in rows.items():
            own = np.asarray(values[:n], np.float64)
            if is_peak(name):
                before = self._totals.get(name, np.full(self._shape, -math.inf))
                self._totals[name] = np.maximum(before, np.max(own, axis=0, initial=-math.inf))
            else:
                self._totals[name] = self._totals.get(name, np.zeros(self._shape)) + own.sum(0)
        self.updates += n

    def pending(self) -> dict[str, Any]:
        """The sums as exact JSON; non-finite values as words."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(inner) for inner in value]
            return value if math.isfinite(value) else str(value)

        return {
            "updates": self.updates,
            "totals": {name: plain(total.tolist()) for name, total in self._totals.items()},
        }

    def take(self) -> Record:
        """Record of at least one update: means over episodes, maxima of peaks, means of the rest. Resets the sums.

        Without an ended episode the return is NaN; a metric that no episode reported is left out. Of a population the
        record is the mean over the members that report a metric, and their deviation (n - 1) as NAME_std.
        """
        totals, updates = self._totals, self.updates
        episodes = totals.pop("episodes")
        counts = {name: totals.pop(name) for name in list(totals) if name.startswith("episodes/")}
        means: dict[str, np.ndarray] = {"episode/count": episodes}
        for name, total in sorted(totals.items()):
            reporting = "episodes/" + name.removeprefix("episode/")
            count: Any = counts.get(reporting, episodes) if name.startswith("episode/") else updates
            if is_peak(name):
                means[name] = total
            elif self._shape or count or reporting not in counts:
                with np.errstate(divide="ignore", invalid="ignore"):
                    means[name] = np.where(np.asarray(count) > 0, total / count, np.nan)
        self.updates, self._totals = 0, {}
        if not self._shape:
            return {name: float(value) for name, value in means.items() if not is_peak(name) or value > -math.inf}
        self.each = {name: values.tolist() for name, values in means.items()}
        record: Record = {}
        for name, values in means.items():
            known = values[np.isfinite(values)]
            record[name] = float(known.mean()) if len(known) else math.nan
            record[f"{name}_std"] = float(known.std(ddof=1)) if len(known) > 1 else 0.0
        return record
