"""Kilometres between infractions: Garwood's published limits, and that the interval holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.driving.evaluation import infractions
from longhaul.spaces import Measure


@pytest.mark.parametrize(
    ("count", "least", "most"), [(0, 0.0, 3.689), (1, 0.0253, 5.572), (5, 1.623, 11.668), (20, 12.217, 30.888)]
)
def test_limits_are_garwoods(count: int, least: float, most: float) -> None:
    """Limits of a Poisson mean at 95 %, from his table."""
    found = infractions.rate(count, 100.0)
    assert 100.0 / found.low == pytest.approx(most, abs=2e-3)
    assert found.high == (pytest.approx(100.0 / least, rel=2e-3) if count else np.inf)
    assert found.between == (100.0 / count if count else np.inf)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    for mean in (0.5, 3.0, 30.0):
        found = [infractions.rate(int(count), 10.0) for count in draw.poisson(mean, 2000)]
        assert np.mean([each.low <= 10.0 / mean <= each.high for each in found]) >= 0.945


def test_kilometres_count_where_an_infraction_could_be_told() -> None:
    every, some = np.ones(3, bool), np.array([True, False, True])
    metrics = {
        "distance": Measure(np.array([1000.0, 2000.0, 3000.0]), every),
        "collision": Measure(np.array([1.0, 0.0, 0.0]), every),
        "red_light": Measure(np.array([0.0, 1.0, 1.0]), some),
        "offroad": Measure(np.zeros(3), ~every),
        "accuracy": Measure(np.array([0.0, 1.0, 0.0]), every),
    }
    found = infractions.rates(metrics)
    assert {name: (rate.events, rate.driven) for name, rate in found.items()} == {
        "collision": (1, 6.0), "red_light": (1, 4.0), "any": (2, 6.0),
    }  # fmt: skip
    assert infractions.rates({"collision": metrics["collision"]}) == {}
