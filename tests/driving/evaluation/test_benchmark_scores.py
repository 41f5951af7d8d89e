"""Benchmark scores by rows made by hand: every product and mean is worked out here with plain numbers."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.driving.evaluation import benchmark_scores
from longhaul.spaces import Measure

BEST = {
    "collision": 0.0, "at_fault_collision": 0.0, "offroad": 0.0, "red_light": 0.0, "goal": 1.0, "making_progress": 1.0,
    "driving_direction": 1.0, "time_to_collision": 1.0, "progress": 1.0, "speed_limit": 1.0, "comfortable": 1.0,
    "lanes": 1.0,
}  # fmt: skip
ALL_OF_THEM = dict.fromkeys(benchmark_scores.NAMES, 1.0)


def row(unknown: tuple[str, ...] = (), **changes: float) -> dict[str, Measure]:
    """One episode: the best there is, but for `changes`; the values of `unknown` metrics are poison."""
    values = BEST | changes | dict.fromkeys(unknown, np.nan)
    return {k: Measure(np.array([v]), np.array([k not in unknown])) for k, v in values.items()}


def scored(**row_of: object) -> dict[str, float]:
    """The scores of `row`; those that are not valid are left out."""
    found = benchmark_scores.aggregates(row(**row_of))  # type: ignore[arg-type]
    assert all(m.value.shape == m.valid.shape == (1,) for m in found.values())
    return {name: float(m.value[0]) for name, m in found.items() if m.valid[0]}


ROWS: dict[str, tuple[dict[str, object], dict[str, float]]] = {
    "nothing is wrong": ({}, {}),
    "somebody else's fault": ({"collision": 1.0}, {"accuracy": 0, "puffer_score": 0}),
    "an own fault": (
        {"collision": 1.0, "at_fault_collision": 1.0},
        {"accuracy": 0, "accuracy_at_fault": 0, "puffer_score": 0, "vmax_score": 0, "nuplan_score": 0},
    ),
    "off the road": (
        {"offroad": 1.0},
        {"accuracy": 0, "accuracy_at_fault": 0, "puffer_score": 0, "vmax_score": 0, "nuplan_score": 0},
    ),
    "off the road and hit by another": (  # V-Max's formula, 0 + 1 - 0, would call it right
        {"offroad": 1.0, "collision": 1.0},
        {"accuracy": 0, "accuracy_at_fault": 0, "puffer_score": 0, "vmax_score": 0, "nuplan_score": 0},
    ),
    "a red light": ({"red_light": 1.0}, {"accuracy": 0, "accuracy_at_fault": 0, "vmax_score": 0}),
    "the goal is missed": ({"goal": 0.0}, {"puffer_score": 0, "completion": 0}),
    "it stands": ({"making_progress": 0.0}, {"vmax_score": 0, "nuplan_score": 0}),
    "some way against traffic": ({"driving_direction": 0.5}, {"vmax_score": 0.5, "nuplan_score": 0.5}),
    "near others": ({"time_to_collision": 0.0}, {"vmax_score": 14 / 19, "nuplan_score": 11 / 16}),
    "half the way": ({"progress": 0.5}, {"vmax_score": 16.5 / 19, "nuplan_score": 13.5 / 16}),
    "too fast": ({"speed_limit": 0.25}, {"vmax_score": 16 / 19, "nuplan_score": 13 / 16}),
    "rough": ({"comfortable": 0.0}, {"vmax_score": 17 / 19, "nuplan_score": 14 / 16}),
    "between lanes": ({"lanes": 0.0}, {"vmax_score": 16 / 19}),
    "all at once": (
        {"driving_direction": 0.5, "time_to_collision": 0.0, "progress": 0.4, "comfortable": 0.5, "lanes": 0.5},
        {"vmax_score": 0.5 * (2 + 4 + 1.5 + 1) / 19, "nuplan_score": 0.5 * (2 + 4 + 1) / 16},
    ),
    "farther than the log": ({"progress": 1.2}, {}),
    # what is not valid is left out of the mean with its weight, and multiplies by 1
    "no lanes": ({"unknown": ("lanes", "driving_direction")}, {}),
    "no lanes, half the way": (
        {"unknown": ("lanes", "speed_limit"), "progress": 0.5},
        {"vmax_score": 9.5 / 12, "nuplan_score": 9.5 / 12},
    ),
    "no edges, no lights": ({"unknown": ("offroad", "red_light"), "comfortable": 0.0}, {"vmax_score": 17 / 19,
                            "nuplan_score": 14 / 16}),
    "only comfort is known": (
        {"unknown": ("lanes", "speed_limit", "time_to_collision", "progress", "making_progress"), "comfortable": 0.5},
        {"vmax_score": 0.5, "nuplan_score": 0.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_worth_what_its_parts_are(name: str) -> None:
    made, changed = ROWS[name]
    assert scored(**made) == pytest.approx(ALL_OF_THEM | changed)


def test_who_has_no_goal_has_no_score_of_it() -> None:
    assert scored(unknown=("goal",)).keys() == set(benchmark_scores.NAMES) - {"puffer_score", "completion"}


def test_without_any_part_there_is_no_mean() -> None:
    left = scored(unknown=("lanes", "speed_limit", "time_to_collision", "progress", "comfortable"))
    assert left.keys() == set(benchmark_scores.NAMES) - {"vmax_score", "nuplan_score"}


def test_where_a_collision_is_not_known_nothing_is() -> None:
    assert scored(unknown=("collision", "at_fault_collision")) == {"completion": 1.0}


def test_metrics_that_nobody_measures_are_as_if_never_valid() -> None:
    """An environment of few metrics: what can't be said is left out; without any, so is everything."""
    few = {name: row(progress=0.5)[name] for name in ("collision", "offroad", "goal", "progress")}
    assert benchmark_scores.aggregates(few).keys() == {"accuracy", "puffer_score", "completion"}
    assert benchmark_scores.aggregates({"length": few["goal"]}) == {}
    more = few | {"at_fault_collision": row()["at_fault_collision"]}
    assert float(benchmark_scores.aggregates(more)["vmax_score"].value[0]) == 0.5


def test_rows_do_not_mix() -> None:
    """All of them in one table score as each did alone."""
    rows = [row(**made) for made, _ in ROWS.values()]  # type: ignore[arg-type]
    table = {
        k: Measure(np.concatenate([r[k].value for r in rows]), np.concatenate([r[k].valid for r in rows])) for k in BEST
    }
    found = benchmark_scores.aggregates(table)
    for i, (_, changed) in enumerate(ROWS.values()):
        assert {name: float(m.value[i]) for name, m in found.items()} == pytest.approx(ALL_OF_THEM | changed)
