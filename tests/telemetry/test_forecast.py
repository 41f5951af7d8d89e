"""A sigmoid of known numbers is found again through noise, and forecast from records without their warm start.

A curve that has not bent is refused, in one line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from longhaul.telemetry import forecast
from longhaul.telemetry.forecast import Ceiling, NotBent

TRUE = Ceiling(0.2, 0.95, 1.7, 300.0)
COMPUTE = np.geomspace(20.0, 5_000.0, 40)


def noisy(law: Ceiling, seed: int, deviation: float = 0.015, compute: np.ndarray = COMPUTE) -> np.ndarray:
    return law.at(compute) + np.random.default_rng(seed).normal(scale=deviation, size=len(compute))


def test_known_numbers_are_found_exactly_without_noise() -> None:
    for true in (TRUE, Ceiling(0.0, 0.6, 0.8, 100.0), Ceiling(-3.0, 40.0, 3.0, 900.0)):
        found = forecast.fit(COMPUTE, true.at(COMPUTE), start=true.start)
        np.testing.assert_allclose(found.law, true, rtol=1e-4)
        assert found.error < 1e-6


@pytest.mark.slow
def test_intervals_hold_what_is_true_about_as_often_as_they_say() -> None:
    held = np.zeros(3)
    for seed in range(30):
        found = forecast.fit(COMPUTE, noisy(TRUE, seed), start=TRUE.start, seed=seed, draws=60)
        assert found.law.ceiling == pytest.approx(TRUE.ceiling, abs=0.03)
        ends = (found.intervals[name] for name in Ceiling._fields[1:])
        held += [low <= value <= high for (low, high), value in zip(ends, TRUE[1:], strict=True)]
    assert np.all(held >= 22), held  # of 30, at 90 %


def test_half_of_a_curve_forecasts_the_rest() -> None:
    early = COMPUTE[COMPUTE < 1_500.0]
    found = forecast.fit(early, noisy(TRUE, 1, 0.005, early), start=TRUE.start)
    assert float(found.law.at(5_000.0)) == pytest.approx(float(TRUE.at(5_000.0)), abs=0.03)


def test_a_curve_that_has_not_bent_gives_no_ceiling() -> None:
    early = np.geomspace(5.0, 120.0, 30)
    with pytest.raises(NotBent, match="train on, then ask again"):
        forecast.fit(early, noisy(TRUE, 0, 0.01, early), start=TRUE.start)
    with pytest.raises(NotBent):
        forecast.fit(COMPUTE, noisy(Ceiling(0.2, 0.2, 1.0, 1.0), 0), start=0.2)  # it stands still


def test_a_run_is_worth_going_on_with_until_its_forecast_is_flat() -> None:
    worth = [forecast.worth_going_on(TRUE, compute, least=0.02) for compute in (100.0, 1_000.0, 2_000.0, 10_000.0)]
    gains = [float(TRUE.at(2 * c) - TRUE.at(c)) for c in (100.0, 1_000.0, 2_000.0, 10_000.0)]
    assert worth == [gain >= 0.02 for gain in gains]
    assert worth[0] and not worth[-1]


def test_points_that_can_not_be_are_named() -> None:
    with pytest.raises(ValueError, match="give two vectors of 6"):
        forecast.fit(COMPUTE[:3], COMPUTE[:3], start=0.0)
    with pytest.raises(ValueError, match="compute must be above 0"):
        forecast.fit(COMPUTE * 0.0, COMPUTE, start=0.0)


# ------------------------------------------------------------------------------------------------------------ records

LONG = Ceiling(0.2, 0.95, 1.7, 300_000.0)


def records(last: float, count: int = 60, taught: int = 0) -> list[dict[str, Any]]:
    """`taught` records of imitation, whose return is nonsense, and `count` of rewards up to `last` steps."""
    warm = [{"agent_steps": 1_000 * (i + 1), "episode/return": 9.0, "grpo/taught": 1.0} for i in range(taught)]
    steps = np.linspace(last / count, last, count)
    noise = np.random.default_rng(0).normal(scale=0.004, size=count)
    told = zip(steps, LONG.at(steps) + noise, strict=True)
    return warm + [
        {"agent_steps": 1_000 * taught + float(x), "episode/return": float(y), "grpo/taught": 0.0} for x, y in told
    ]


@pytest.mark.parametrize(("count", "taught"), [(60, 0), (60, 7), (1_000, 7)])
def test_a_known_ceiling_is_forecast(count: int, taught: int) -> None:
    found = forecast.forecast(records(900_000.0, count, taught))
    assert found.ceiling.law.ceiling == pytest.approx(LONG.ceiling, abs=0.03)
    assert found.steps == pytest.approx(900_000.0, rel=0.01)
    assert found.doubled == pytest.approx(float(LONG.at(2 * found.steps)), abs=0.02)
    assert found.go_on
    assert len(forecast.points(records(900_000.0, count, taught))[0]) == min(count, forecast.POINTS)


def test_a_run_at_its_ceiling_is_told_to_stop() -> None:
    found = records(30_000_000.0)
    assert not forecast.forecast(found).go_on
    (_, ceiling), (name, ahead) = forecast.in_words(found)
    assert ceiling.startswith("0.9")
    assert name == "twice the steps"
    assert ahead.endswith("stop")


def test_too_few_records_give_no_forecast_but_a_line() -> None:
    assert forecast.in_words([{"agent_steps": 5}]) == []
    assert forecast.in_words(records(900_000.0, 4)) == [
        ("ceiling", "none yet: 4 records with a return are too few to tell a ceiling; 6 are enough")
    ]
    ((_, early),) = forecast.in_words(records(60_000.0))
    assert early.endswith("train on, then ask again")
