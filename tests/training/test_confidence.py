"""Confidence intervals: as wide as the standard error says, by scenario, and repeated by their seed."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.training import confidence
from tests.helpers.measures import measured


def test_an_interval_is_that_of_the_mean() -> None:
    """Independent episodes: the standard error says how wide it is; it holds the truth about as often as said."""
    draw = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        values = draw.normal(3.0, 2.0, 200)
        found = confidence.bootstrap({"a": measured(values)}, np.arange(200), seed=seed)["a"]
        assert found.mean == pytest.approx(values.mean())
        assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(200), rel=0.2)
        held += found.low <= 3.0 <= found.high
    assert 88 <= held <= 99


def test_two_scenarios_have_three_means() -> None:
    """Of 0 and 1 a resample makes 0, 0.5 or 1, an end with one chance in four each: the interval is all of it."""
    found = confidence.bootstrap({"a": measured([0.0, 1.0])}, np.array([7, 3]))["a"]
    assert found == confidence.Estimate(0.5, 0.0, 1.0, 2)


def test_agents_of_one_scenario_are_no_more_evidence_than_one() -> None:
    """Each scenario's score fifty times over: resampled by scenario nothing changes; by agent it would be narrow."""
    draw = np.random.default_rng(1)
    values, scenario = draw.normal(0.0, 1.0, 40), np.arange(40)
    one = confidence.bootstrap({"a": measured(values)}, scenario)["a"]
    many = confidence.bootstrap({"a": measured(np.repeat(values, 50))}, np.repeat(scenario, 50))["a"]
    assert many[:3] == pytest.approx(one[:3])
    alone = confidence.bootstrap({"a": measured(np.repeat(values, 50))}, np.arange(2000))["a"]
    assert alone.high - alone.low < 0.3 * (one.high - one.low)


def test_invalid_metrics_count_nowhere_and_seeds_repeat() -> None:
    metrics = {
        "a": measured([1.0, np.nan, 3.0, 7.0], [True, False, True, False]),
        "once": measured([5.0, 1.0, 1.0, 1.0], [True, False, False, False]),
        "never": measured(np.zeros(4), np.zeros(4)),
    }
    found = confidence.bootstrap(metrics, np.arange(4))
    assert found.keys() == {"a", "once"}
    assert (found["a"].mean, found["a"].low, found["a"].high, found["a"].episodes) == (2.0, 1.0, 3.0, 2)
    assert found["once"].mean == 5.0
    assert np.isnan(found["once"].low) and np.isnan(found["once"].high)  # of one scenario nothing can be said
    backwards = dict(reversed(metrics.items()))
    assert confidence.bootstrap(backwards, np.arange(4))["a"] == found["a"]
    assert confidence.bootstrap({}, np.zeros(0, int)) == {}
    draw = np.random.default_rng(2).normal(size=30)
    first, again, other = (confidence.bootstrap({"a": measured(draw)}, np.arange(30), seed=s)["a"] for s in (0, 0, 1))
    assert first == again != other


def test_blocks_of_resamples_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few draws are held at a time, there are as many means, and the interval is as wide."""
    values = np.random.default_rng(3).normal(size=50)
    whole = confidence.bootstrap({"a": measured(values)}, np.arange(50))["a"]
    monkeypatch.setattr(confidence, "BLOCK", 50 * 7)
    parts = confidence.bootstrap({"a": measured(values)}, np.arange(50))["a"]
    assert parts == pytest.approx(whole)  # the same draws, one after the other
