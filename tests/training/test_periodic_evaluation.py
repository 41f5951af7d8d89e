"""Evaluations while a run trains: at their updates, with intervals, and without a trace in what is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.spaces import Measure
from longhaul.training import periodic_evaluation, runs
from longhaul.training.evaluate import Scores
from longhaul.training.periodic_evaluation import Evaluations
from tests.helpers import small_runs


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / runs.EVALUATIONS).read_text().splitlines()]


def played(policy: Any) -> tuple[Scores, list[dict[str, Any]]]:
    """Scores of four episodes, and a completion."""
    measure = Measure(np.arange(4.0), np.ones(4, bool))
    return Scores({"return": measure}, [""] * 4), [{"prompt": "<b>", "chain": "x" * 5000, "right": True}]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small_runs.make_quick(monkeypatch)
    monkeypatch.setattr(periodic_evaluation, "player", lambda run: played)


@pytest.mark.slow
def test_they_come_at_their_updates_and_change_nothing_that_is_learnt(tmp_path: Path, quick: None) -> None:
    with_them, without = small_runs.small(evaluation_interval=15), small_runs.small(evaluation_interval=0)
    small_runs.begin(with_them, tmp_path / "with"), small_runs.begin(without, tmp_path / "without")
    found = lines(tmp_path / "with")
    assert [line["update"] for line in found] == [16, 30, 46]  # 60 is evaluated at the end; calls have two updates
    mean, low, high = found[0]["metrics"]["return"]
    assert mean == 1.5 and low < 1.5 < high and found[0]["episodes"] == 4
    assert found[0]["chains"] == [{"prompt": "<b>", "chain": "x" * periodic_evaluation.LETTERS, "right": True}]
    assert not (tmp_path / "without" / runs.EVALUATIONS).exists()
    assert small_runs.result(tmp_path / "with") == small_runs.result(tmp_path / "without")
    records = small_runs.records(tmp_path / "with")
    assert [r["update"] for r in records if r.pop("eval/return", None) is not None] == [20, 32, 48]
    assert records == small_runs.records(tmp_path / "without")


@pytest.mark.slow
def test_a_resumed_run_has_each_once(tmp_path: Path, quick: None) -> None:
    whole, cut = (small_runs.small(evaluation_interval=10) for _ in range(2))
    small_runs.begin(whole, tmp_path / "whole")
    small_runs.stop(cut, tmp_path / "cut", save=5)  # at update 30, whose evaluation no record has yet
    small_runs.resume(tmp_path / "cut")
    plain = [[{k: v for k, v in line.items() if k != "wall_seconds"} for line in lines(tmp_path / name)]
             for name in ("whole", "cut")]  # fmt: skip
    assert plain[0] == plain[1] and len(plain[0]) == 5
    assert small_runs.records(tmp_path / "whole") == small_runs.records(tmp_path / "cut")


def test_without_an_interval_they_take_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, costs = 0.0, iter([10.0, *[3.0] * 100])

    def play(policy: Any) -> tuple[Scores, list[dict[str, Any]]]:
        nonlocal now
        now += next(costs)
        return played(policy)

    monkeypatch.setattr(periodic_evaluation, "player", lambda run: play)
    monkeypatch.setattr(periodic_evaluation, "FIRST", 30.0)
    monkeypatch.setattr(periodic_evaluation.time, "perf_counter", lambda: now)
    made = Evaluations(small_runs.small(), tmp_path, updates=1000, done=0)
    at = []
    for update in range(1, 1001):
        now += 1.0
        if made.due(update, 1):
            at.append(update)
            made.make(None, {"update": update})
        if update == 40:
            made.taken(update)
    assert at == [41, 141, *range(241, 1001, 100)]  # not before the first record, and each a hundredth of the run apart
    alone = Evaluations(small_runs.small(), tmp_path, updates=10, done=0, alone=False)
    alone.taken(1)
    assert not alone.due(9, 1)


@pytest.mark.parametrize(("updates", "first"), [(149, None), (151, 31), (1000, 31)])
def test_the_first_is_not_made_where_the_run_soon_ends(
    updates: int, first: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(periodic_evaluation, "FIRST", 31.0)
    monkeypatch.setattr(periodic_evaluation.time, "perf_counter", lambda: now)
    made = Evaluations(small_runs.small(), tmp_path, updates=10 + updates, done=10)  # a resumed run
    made.taken(10)
    due = []
    for update in range(1, updates):
        now += 1.0
        due += [update] if made.due(10 + update, 1) else []
    assert due[:1] == ([] if first is None else [first])
