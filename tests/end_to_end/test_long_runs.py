"""Runs up to the last of 2^31 - 1 updates and past 2^32 steps, begun a little before it: their counters are set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longhaul.config.run import MOST, Run
from longhaul.training import loop, runs
from longhaul.training.assemble import Assembly
from tests.helpers.small_runs import checkpoints, records, result, resume, small
from tests.telemetry.test_sinks import events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

STEPS = 8 * 16
LR = 3e-3


def longest() -> Run:
    """The small run with as many updates as int32 counts."""
    return small(total_steps=STEPS * MOST)


def begin_at(updates: int, folder: Path, until: int | None = None) -> loop.Outcome:
    """Trains from this many updates on, to the end or until a record of update `until`."""
    start = Assembly.start

    def later(*given: Any) -> Any:
        progress = start(*given)
        now, own = (jax.device_put(jnp.int32(updates), progress.updates.sharding) for _ in range(2))
        return progress._replace(updates=now, state=progress.state._replace(updates=own))

    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assembly, "start", later)
        return loop.train(longest(), folder, resumed=False, callback=lambda record: record["update"] == until)


def check(folder: Path, first: int) -> list[int]:
    """The updates of the records, whose counts are exact and whose rate is that of their place."""
    found = records(folder)
    assert [r["env_steps"] for r in found] == [r["agent_steps"] for r in found] == [STEPS * r["update"] for r in found]
    for r in found:
        assert r["ppo/lr"] == pytest.approx(LR * (1.0 - r["update"] / MOST), rel=1e-6, abs=LR * 2.0**-23)
    updates = [r["update"] for r in found]
    assert updates == list(range(first + 4, updates[-1] + 1, 4))
    return updates


def test_the_last_of_two_to_the_31_updates_is_made(tmp_path: Path) -> None:
    """274 G steps of an agent are behind it; stopped between and gone on with, it ends with the same bits."""
    whole, cut, first = tmp_path / "whole", tmp_path / "cut", MOST - 16
    assert begin_at(first, whole).code == 0
    assert check(whole, first)[-1] == MOST
    assert begin_at(first, cut, until=MOST - 8).code == loop.STOPPED
    assert MOST - 8 <= checkpoints(cut)[-1] < MOST
    assert resume(cut).code == 0
    assert result(cut) == result(whole) and records(cut) == records(whole)
    assert result(whole)["agent_steps"] == 274_877_906_816 == STEPS * MOST
    assert checkpoints(whole)[-1] == MOST
    assert "274,877,906,816" in (whole / "report.html").read_text()
    (file,) = whole.glob("events*")
    (tmp_path / "events").mkdir()
    shutil.copy(file, tmp_path / "events")
    ((_, told),) = events(tmp_path / "events")
    assert [step for step, values in told if isinstance(values, dict)] == [STEPS * r["update"] for r in records(whole)]
    assert runs.summary(whole).steps == STEPS * MOST


@pytest.mark.parametrize("steps", [2**31, 2**32])
def test_a_run_goes_past_so_many_steps_and_resumes_there(steps: int, tmp_path: Path) -> None:
    first = steps // STEPS - 8
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    begin_at(first, whole, until=first + 16)
    begin_at(first, cut, until=first + 4)
    assert json.loads((cut / "run.json").read_text())["run"]["total_steps"] == STEPS * MOST
    loop.train(longest(), cut, resumed=True, callback=lambda record: record["update"] == first + 16)
    assert check(whole, first)[-1] >= first + 16
    assert records(cut) == records(whole)
