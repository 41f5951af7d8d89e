"""Forecasts that are kept until their figures are measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu, plan_check
from longhaul.config import recipes
from longhaul.config.resolve import changed


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "forecast", "program": "mine", "recipe": "cartpole", "settings": settings, "on": "1 x H100",
        "forecast": 150.0, "said": 0.34, "own": True,
    }  # fmt: skip


def row(name: str, recipe: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name, "config": {"recipe": recipe, "settings": settings}, "per_second": 100.0, "commit": "abc"
    }  # fmt: skip


def test_a_figure_meets_the_forecast_of_its_own_settings_alone() -> None:
    rows = [
        row("train", "cartpole", {"num_envs": 8}),
        row("train", "cartpole", {"num_envs": 16}),
        row("train", "pendulum", {"num_envs": 8}),
        {"name": "cartpole", "config": {}},
    ]
    (found,) = plan_check.met([kept({"num_envs": 8}), kept({"num_envs": 32})], rows)
    assert (found["program"], found["of"]) == ("mine", "abc")
    (one,) = found["forecasts"]
    assert plan_check.error(one) == pytest.approx(0.5)
    assert one["said"] == 0.34


@pytest.mark.parametrize("name", ["selfplay", "selfplay-safety", "selfplay-recurrent", "hackmatrix-best"])
def test_the_planned_run_has_the_settings_of_the_measured_one(name: str) -> None:
    """But for the number of scenarios, and what a plan decides."""
    ((recipe, settings),) = [given for known, *given in gpu.TRAINED if known == name]
    planned, _ = plan_check.chosen(plan_check.flags(recipe, settings), ["--hardware", "h100", "--on", "1"])
    measured = changed(recipes.recipe(recipe), settings)
    for field in ("num_envs", "num_steps", "total_steps", "algorithm"):
        assert getattr(planned, field) == getattr(measured, field), field
    if "scenarios" in settings:
        assert planned.environment.simulator == measured.environment.simulator  # type: ignore[union-attr]
        assert planned.environment.least == measured.environment.least == 16  # type: ignore[union-attr]


def test_every_committed_training_run_of_the_chip_is_forecast_by_its_own_settings() -> None:
    compared = [words for words in map(plan_check.program, plan_check.rows(plan_check.COMMITTED)) if words]
    assert len(compared) >= 9
    for words in compared:
        if not any("craftax" in word for word in words):  # which may not be installed
            plan_check.chosen(words, ["--hardware", "h100", "--on", "1"])
