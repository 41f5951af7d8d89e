"""Scores that put several metrics of an episode into one number, as the field's benchmarks do.

Pure NumPy over columns: a `Measure` holds a value and whether it means anything, each [E], a row for an agent's
episode. A weighted mean leaves out the parts that are not valid and divides by the weights of the others, as nuPlan
does with metrics that a scenario does not have; a multiplier that is not valid is 1. So a log without lanes or
lights is scored by what can be said about it. A score is valid where whether there was a collision is known and, if it
has a weighted mean, any part of that is.

Where the sources disagree, here is which we take:

- `accuracy` (V-Max, arXiv 2503.08388): 1 if none of collision, offroad and red_light ever was.
- `accuracy_at_fault`: the same with collisions that were the driver's fault alone. V-Max adds the collisions without
  fault to its accuracy, which counts an episode as right that also left the road; here any other fault still counts.
- `nuplan_score` (closed-loop score of the nuPlan devkit's documentation): multipliers no collision at fault, drivable
  area, making progress, driving direction; weights 5 time to collision, 5 progress, 4 speed limit, 2 comfort. Its table
  of weights also has 5 for driving direction, its text treats that as a multiplier, and so do we. It forgives half of
  one collision with an object that is neither a vehicle nor a road user, and corners up to 0.3 m off the road; here
  both count as V-Max has them, in full: our score is never above theirs for that.
- `vmax_score` (V-Max): the same multipliers and no red light, and among the weighted 3 for keeping to one lane. Its
  verdict on comfort has limits of its own; both scores take nuPlan's here, `comfortable`.
- `puffer_score` (PufferDrive 2.0): 1 if the goal was reached without a collision and without leaving the road;
  `completion` is 1 if it was reached at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from longhaul.spaces import Measure

Columns = Mapping[str, Measure]

NUPLAN_WEIGHTS = {"time_to_collision": 5.0, "progress": 5.0, "speed_limit": 4.0, "comfortable": 2.0}
VMAX_WEIGHTS = NUPLAN_WEIGHTS | {"lanes": 3.0}
"""Terms of the weighted mean; each is 1 at best."""

NUPLAN_FAULTS = ("at_fault_collision", "offroad")
VMAX_FAULTS = (*NUPLAN_FAULTS, "red_light")
"""Events, 1 if they ever were: each makes a score 0."""

CONDUCT = ("making_progress", "driving_direction")
"""Multipliers that are 1 at best."""

NAMES = ("accuracy", "accuracy_at_fault", "vmax_score", "nuplan_score", "puffer_score", "completion")


def aggregates(columns: Columns) -> dict[str, Measure]:
    """The scores `NAMES` of episodes, float64 [E] each within [0, 1]; those whose metrics are absent are left out.

    `columns` are the metrics of `sim.metrics`, [E] each. A metric that is absent altogether counts as one that is
    valid nowhere, but without "collision" and "offroad" nothing can be scored: the result is then empty.
    """
    if not {"collision", "offroad"} <= columns.keys():
        return {}
    known = columns["collision"].valid
    scores = {"accuracy": Measure(without(columns, ("collision", "offroad", "red_light")), known)}
    if "at_fault_collision" in columns:
        scores["accuracy_at_fault"] = Measure(without(columns, VMAX_FAULTS), known)
        scores["vmax_score"] = weighed(columns, VMAX_FAULTS, VMAX_WEIGHTS)
        scores["nuplan_score"] = weighed(columns, NUPLAN_FAULTS, NUPLAN_WEIGHTS)
    if "goal" in columns:
        goal = columns["goal"]
        reached = np.where(goal.valid, np.asarray(goal.value, float), 0.0)
        clean = without(columns, ("collision", "offroad"))
        scores["puffer_score"] = Measure(reached * clean, known & goal.valid)
        scores["completion"] = Measure(reached, goal.valid)
    return scores


def without(columns: Columns, events: Sequence[str]) -> np.ndarray:
    """float64 [E]: 1 where none of `events` is known to have been."""
    return np.prod([1.0 - part(columns, name, 0.0) for name in events], axis=0)


def weighed(columns: Columns, faults: Sequence[str], weights: Mapping[str, float]) -> Measure:
    """No fault x conduct x the weighted mean of what is valid."""
    total = sum((weight * part(columns, name, 0.0) for name, weight in weights.items()), start=np.zeros(1))
    known = {name: part_valid(columns, name) for name in weights}
    weight = sum((weights[name] * valid for name, valid in known.items()), start=np.zeros(1))
    multipliers = np.prod([part(columns, name, 1.0) for name in CONDUCT], axis=0)
    value = without(columns, faults) * multipliers * total / np.maximum(weight, 1e-9)
    return Measure(value, part_valid(columns, faults[0]) & (weight > 0.0))


def part(columns: Columns, name: str, otherwise: float) -> np.ndarray:
    """float64 [E]: a metric within [0, 1]; `otherwise` where it is not valid."""
    if name not in columns:
        return np.full(len(columns["collision"].valid), otherwise)
    value = np.clip(np.asarray(columns[name].value, np.float64), 0.0, 1.0)
    return np.where(columns[name].valid, value, otherwise)


def part_valid(columns: Columns, name: str) -> np.ndarray:
    """bool [E]: where a metric is valid."""
    if name not in columns:
        return np.zeros(len(columns["collision"].valid), bool)
    return np.asarray(columns[name].valid, bool)
