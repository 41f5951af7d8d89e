"""Statistics over seeds against SciPy's, and what runs differ in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longhaul.training import comparison, runs
from tests.helpers.libraries import library
from tests.training.test_runs import make

stats = library("scipy.stats")

SCORES = np.random.default_rng(3).lognormal(size=(11, 3))


def test_the_interquartile_mean_is_scipys() -> None:
    assert comparison.iqm(SCORES) == pytest.approx(stats.trim_mean(SCORES, 0.25, axis=None))
    assert comparison.iqm(SCORES, 0) == pytest.approx(stats.trim_mean(SCORES, 0.25, axis=0))
    assert comparison.iqm(np.array([1.0, 2.0, 3.0, 100.0])) == 2.5


def test_the_interval_of_a_mean_is_scipys() -> None:
    one = SCORES[:, :1]
    theirs = stats.bootstrap((one[:, 0],), np.mean, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    ours = comparison.interval(one, lambda drawn: drawn.mean(axis=1), resamples=20_000)
    assert ours == pytest.approx(tuple(theirs), rel=0.02)


def test_runs_are_drawn_within_each_task() -> None:
    tasks = np.array([[0.0, 1000.0]] * 8)  # no spread within a task: every draw is the same
    low, high = comparison.interval(tasks, lambda drawn: comparison.iqm(drawn, 1))
    assert low == high == 500.0


def test_a_single_run_has_no_interval() -> None:
    assert np.isnan(comparison.interval(SCORES[:1])).all()


def test_seeds_of_a_setting_are_one_group(tmp_path: Path) -> None:
    folders = {
        name: make(tmp_path / name, lr=lr, seed=seed, records=records)
        for name, lr, seed, records in (("a", 0.1, 0, 100), ("b", 0.2, 0, 100), ("c", 0.1, 1, 80))
    }
    curves, together, differ = comparison.compare(folders)
    assert together == [["a", "c"], ["b"]]
    assert differ == {"algorithm.lr": [0.1, 0.2, 0.1], "seed": [0, 0, 1]}
    rows = comparison.table(curves, together, [runs.RETURN, "missing"])
    assert [row.runs for row in rows] == together
    assert rows[0].values == [98.0, 78.5]  # the mean of the last 5 and of the last 4
    assert rows[0].mean == rows[0].iqm == 88.25 and rows[0].iqm_low == 78.5 and rows[0].iqm_high == 98.0
    assert np.isnan(rows[1].iqm_low) and rows[1].mean == 98.0


def test_a_curve_over_seeds_spans_what_all_have(tmp_path: Path) -> None:
    folders = {name: make(tmp_path / name, records=count) for name, count in (("a", 100), ("b", 50))}
    curves, *_ = comparison.compare(folders)
    x, middle, low, high = comparison.over_seeds(list(curves.values()), runs.RETURN)
    assert (x[0], x[-1]) == (100, 5000)
    assert middle == pytest.approx(x / 100) and low == pytest.approx(middle) and high == pytest.approx(middle)
    assert all(len(part) == 0 for part in comparison.over_seeds([runs.Curves(tmp_path)], runs.RETURN))
