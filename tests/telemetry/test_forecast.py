"""Records of a known sigmoid are forecast; a warm start is left out; what can't be told yet is said in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longhaul.telemetry import forecast
from longhaul.telemetry.reward_ceiling import Ceiling

TRUE = Ceiling(0.2, 0.95, 1.7, 300_000.0)


def records(last: float, count: int = 60, taught: int = 0) -> list[dict[str, Any]]:
    """`taught` records of imitation, whose return is nonsense, and `count` of rewards up to `last` steps."""
    warm = [{"agent_steps": 1_000 * (i + 1), "episode/return": 9.0, "grpo/taught": 1.0} for i in range(taught)]
    steps = np.linspace(last / count, last, count)
    noise = np.random.default_rng(0).normal(scale=0.004, size=count)
    told = zip(steps, TRUE.at(steps) + noise, strict=True)
    return warm + [
        {"agent_steps": 1_000 * taught + float(x), "episode/return": float(y), "grpo/taught": 0.0} for x, y in told
    ]


@pytest.mark.parametrize(("count", "taught"), [(60, 0), (60, 7), (1_000, 7)])
def test_a_known_ceiling_is_forecast(count: int, taught: int) -> None:
    found = forecast.forecast(records(900_000.0, count, taught))
    assert found.fit.law.ceiling == pytest.approx(TRUE.ceiling, abs=0.03)
    assert found.steps == pytest.approx(900_000.0, rel=0.01)
    assert found.doubled == pytest.approx(float(TRUE.at(2 * found.steps)), abs=0.02)
    assert found.go_on
    assert len(forecast.points(records(900_000.0, count, taught))[0]) == min(count, forecast.POINTS)


def test_a_run_at_its_ceiling_is_told_to_stop() -> None:
    found = records(30_000_000.0)
    assert not forecast.forecast(found).go_on
    (_, ceiling), (name, ahead) = forecast.said(found)
    assert ceiling.startswith("0.9")
    assert name == "twice the steps"
    assert ahead.endswith("stop")


def test_what_can_not_be_told_yet_is_one_line() -> None:
    assert forecast.said([{"agent_steps": 5}]) == []
    assert forecast.said(records(900_000.0, 4)) == [
        ("ceiling", "none yet: 4 records with a return are too few to tell a ceiling; 6 are enough")
    ]
    ((_, early),) = forecast.said(records(60_000.0))
    assert early.endswith("train on, then ask again")
