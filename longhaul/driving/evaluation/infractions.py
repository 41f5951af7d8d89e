"""Kilometres from one infraction to the next, with the exact interval of a Poisson rate.

Infractions are rare and taken to be independent of one another: their number over a distance is then Poisson's. The
interval is Garwood's, from quantiles of chi-square ("Fiducial limits for the Poisson distribution", 1936); it holds for
no infraction at all, too, where the upper end is open. An episode counts each kind at most once, and its kilometres
count for the kinds that it can tell: where no light is known, none is run. Agents that meet each other in one
scenario are not independent; the bootstrap of `training.confidence` is for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import gammaincinv

from longhaul.spaces import Measure

KINDS = ("collision", "at_fault_collision", "offroad", "red_light")

SHARE = 0.95
"""Chance that the interval holds the truth, at least."""


class Rate(NamedTuple):
    """Infractions of one kind; distances in km."""

    events: int
    driven: float
    between: float  # inf where there was none
    low: float
    high: float  # inf where there was none


def rates(metrics: Mapping[str, Measure]) -> dict[str, Rate]:
    """Rates by kind from the metrics [E] of episodes, and of any kind but fault: "any". Empty without "distance"."""
    if "distance" not in metrics:
        return {}
    columns = {kind: metrics[kind] for kind in KINDS if kind in metrics and metrics[kind].valid.any()}
    if "accuracy" in metrics:
        columns["any"] = Measure(1.0 - metrics["accuracy"].value, metrics["accuracy"].valid)
    metres = metrics["distance"].value
    return {
        kind: rate(int(np.sum(m.value[m.valid] > 0.5)), float(np.sum(metres[m.valid])) / 1000.0)
        for kind, m in columns.items()
    }


def rate(count: int, driven: float) -> Rate:
    """`count` infractions in `driven` km."""
    tail = (1.0 - SHARE) / 2.0
    most = float(gammaincinv(count + 1, 1.0 - tail))
    least = float(gammaincinv(count, tail)) if count else 0.0
    between, high = (driven / number if number else float("inf") for number in (count, least))
    return Rate(count, driven, between, driven / most, high)
