"""The condensed curves of HackMatrix's training: means over made records, the bars, and real runs that go on."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hackmatrix_learning as learning


def record(update: int, **values: Any) -> dict[str, Any]:
    """A record of metrics after `update` updates of 100 steps; each value is the metric of that short name."""
    keys = learning.OF_EPISODES | learning.OF_UPDATES | {"count": "episode/count", "peak": learning.PEAK}
    return {"update": update, "agent_steps": 100 * update} | {keys[name]: value for name, value in values.items()}


def test_episodes_weigh_by_their_number_and_updates_by_theirs() -> None:
    rows = [
        record(1, count=10.0, **{"return": -2.0}, entropy=1.0, peak=2.0),
        record(4, count=30.0, **{"return": -1.0}, entropy=2.0, peak=4.0),
        record(5, count=0.0, **{"return": math.nan}, entropy=4.0, peak=-math.inf),
    ]
    (point,) = learning.condense(rows, 1)
    assert (point["agent_steps"], point["update"]) == (500, 5)
    assert point["return"] == pytest.approx((10 * -2.0 + 30 * -1.0) / 40)
    assert point["entropy"] == pytest.approx((1 * 1.0 + 3 * 2.0 + 1 * 4.0) / 5)
    assert point["highest_stage"] == 4.0
    assert point["approx_kl"] is None, "no record tells it"


@pytest.mark.parametrize(("records", "points"), [(0, 40), (1, 40), (39, 40), (40, 40), (41, 40), (1000, 40), (7, 3)])
def test_every_record_is_in_one_point(records: int, points: int) -> None:
    """The means over all points, weighed by their updates, are those over all records."""
    rows = [record(3 * i, count=1.0, entropy=float(i * i % 11), **{"return": float(i)}) for i in range(1, records + 1)]
    found = learning.condense(rows, points)
    assert len(found) == min(records, points)
    if records:
        updates = [point["update"] for point in found]
        lengths = [end - start for start, end in zip([0, *updates], updates)]
        assert sum(lengths) == 3 * records and max(lengths) - min(lengths) <= 3
        for name, key in (("entropy", "ppo/entropy"), ("return", "episode/return")):
            whole = sum(point[name] * length for point, length in zip(found, lengths)) / sum(lengths)
            assert whole == pytest.approx(sum(row[key] for row in rows) / records)


def run(seed: int, *ends: float, entropy: float = 1.2, kl: float = 0.01, clip: float = 0.1) -> dict[str, Any]:
    values = {"count": 5.0, "length": 20.0, "stage": 2.0, "score": 0.0, "siphons": 0.0, "programs": 0.0, "peak": 3.0}
    values |= {"entropy": entropy, "approx_kl": kl, "clip_fraction": clip, "explained_variance": 0.5}
    rows = [record(i, **values, **{"return": end}) for i, end in enumerate(ends, 1)]
    return {"seed": seed, "done": True, "curve": learning.condense(rows)}


def test_the_bars_are_passed_or_not() -> None:
    good = [run(0, -2.5, -1.0, -1.0, -1.0, -1.0), run(1, -2.5, -1.8, -1.8, -1.8, -1.8)]
    found = learning.summary(good)
    assert found["end"]["return"] == pytest.approx(-1.4), "the last four points, then the seeds"
    assert found["passed"] and all(bar["passed"] for bar in found["bars"].values())
    assert (found["seeds"], found["done"], found["agent_steps"], found["highest_stage"]) == (2, 2, 500, 3.0)
    for name, bad in (
        ("return", run(2, *[-2.0] * 5)),
        ("entropy", run(2, *[-1.0] * 5, entropy=0.99)),
        ("approx_kl", run(2, *[-1.0] * 5, kl=0.06)),
        ("clip_fraction", run(2, *[-1.0] * 5, clip=0.3)),
    ):
        bars = learning.summary([*good, bad])["bars"]
        assert [key for key, bar in bars.items() if not bar["passed"]] == [name]
    assert not learning.summary([])["passed"], "nothing was trained"


@pytest.mark.slow
def test_real_runs_go_on_and_are_not_trained_twice(tmp_path: Path) -> None:
    out = tmp_path / "learning.json"
    words = ["--recipe", "cartpole", "--seeds", "3", "4", "--runs-dir", str(tmp_path), "--json", str(out), "--"]
    words += ["--total-steps", "4096", "--num-envs", "8", "--num-steps", "32", "--evaluation-episodes", "2"]
    command = [sys.executable, "-m", "benchmarks.hackmatrix_learning", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr  # CartPole has a high return, and low entropy
    found = json.loads(out.read_text())
    assert [one["seed"] for one in found["runs"]] == [3, 4]
    assert found["summary"]["done"] == 2 and found["summary"]["bars"]["return"]["passed"]
    for one in found["runs"]:
        assert one["curve"][-1]["agent_steps"] == 4096
        assert one["evaluation"]["trained"]["episodes"] == 2
    digests = [one["params_sha256"] for one in found["runs"]]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert [one["params_sha256"] for one in json.loads(out.read_text())["runs"]] == digests
    assert "parameters" not in again.stderr, "nothing was trained again"
