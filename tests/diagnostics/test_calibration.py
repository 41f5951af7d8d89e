"""Calibration of the planner: short runs in processes of their own, and the plan that is made of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from longhaul.algorithms.config import PPOConfig
from longhaul.config.resolve import resolve
from longhaul.config.run import Named, Run
from longhaul.diagnostics import calibration
from longhaul.diagnostics.calibration import Timed
from longhaul.runtime.errors import RunError

RUN = Run("ppo", Named("cartpole"), PPOConfig(), total_steps=100_000, num_envs=8, num_steps=16, devices=1)


def test_the_spread_is_that_of_the_middle_half_of_the_calls() -> None:
    calls = Timed([1.0, 2.0, 2.0, 2.1, 1.9, 2.0, 9.0], 100)
    assert calls.update == 2.0
    assert calls.spread == pytest.approx((2.1 - 1.9) / 2 / 2.0)


@pytest.mark.slow
def test_each_process_has_the_batch_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CALL", 0.0)
    alone, pair = (calibration.measure(resolve(RUN), processes, 4) for processes in (1, 2))
    assert (alone.steps, pair.steps) == (8 * 16, 2 * 8 * 16)
    assert len(alone.seconds) == len(pair.seconds) == 4
    assert alone.small == alone.large == 0.0
    assert pair.small > 0.0
    assert pair.large > 0.0


@pytest.mark.slow
def test_a_failed_process_is_said_in_a_line() -> None:
    bad = dataclasses.replace(resolve(RUN), environment=Named("nowhere"))
    with pytest.raises(RunError, match=r"^a run of 2 process\(es\) failed: .*nowhere"):
        calibration.measure(bad, 2)


def test_the_command_calibrates_and_says_its_error(longhaul: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of its own: update times of 10 and 30 s, whatever the program takes here."""
    asked = []

    def measure(run: Run, processes: int, calls: int) -> Timed:
        asked.append((run.devices, processes, calls))
        return Timed([9.0, 10.0, 11.0] if processes == 1 else [29.0, 30.0, 31.0], 128 * processes)

    monkeypatch.setattr(calibration, "measure", measure)
    words = ["plan", "cartpole", "--num-envs", "256", "--num-steps", "16", "--calibrate", "--on", "1", "2", "4"]
    code, out, err = longhaul(*words, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert asked == [(1, 1, calibration.CALLS), (1, 2, calibration.CALLS)]
    assert [row["update_seconds"] for row in found["plan"]][:2] == [10.0, 30.0]
    assert [row["error"] for row in found["plan"]][:2] == pytest.approx([0.1, 0.1])
    assert found["plan"][2]["error"] >= 0.2
    assert "an update took 10 s in one process, 30 s in two" in found["assumptions"]["compute"]


def test_a_batch_is_shared_by_as_many_as_divide_its_worlds(longhaul: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure", lambda run, processes, calls: Timed([9.0, 10.0, 11.0], 32 * processes))
    words = ["plan", "cartpole", "--num-envs", "2", "--calibrate", "--share", "strong", "--json", "-"]
    code, _, err = longhaul(*words, "--on", "1", "4")
    assert code == 2
    assert "--on is 4, and --share strong shares 2 worlds, which 4 shards do not divide; ask for other numbers" in err
    code, out, err = longhaul(*words)
    assert code == 0, err
    assert [row["devices"] for row in json.loads(out)["plan"]] == [1, 2]
