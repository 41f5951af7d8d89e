"""Benchmarks at tiny sizes: the records' fields, their arithmetic, the peer's turn, and that the work is done."""

import inspect
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu
from longhaul.algorithms import values
from longhaul.bench import harness
from longhaul.bench.cases import training
from longhaul.driving.sim import device_bank
from longhaul.driving.sim.config import HELD_OUT
from longhaul.driving.sim.dynamics import Motion
from tests.helpers.driving_scenarios import bank, line, scenario

EXAMPLE = Path(os.environ.get("LONGHAUL_DATA", "../shared/data")) / "womd" / "motion_data_one_example.tfrecord"

FIELDS = [
    *("name", "config", "steps", "unit", "wall_seconds", "cpu_seconds", "per_second", "per_cpu_second"),
    *("compile_seconds", "repeats", "versions", "commit", "device"),
]
"""The contract's."""

PEER = """
import jax, jax.numpy as jnp

def make_train(config):
    assert config["NUM_ENVS"] == 4 and config["NUM_STEPS"] == 128 and config["ANNEAL_LR"] and config["LR"] == 2.5e-4
    updates = config["TOTAL_TIMESTEPS"] // 512
    print("this is no figure")

    def train(key):
        score = jnp.full((updates, 128, 4), 7.0)
        return {"metrics": {"returned_episode": score > 0, "returned_episode_returns": score}}

    return train
"""
"""Look of PureJaxRL's ppo.py from outside."""


def check(record: dict[str, Any]) -> None:
    assert [field for field in record if field in FIELDS] == FIELDS
    assert json.loads(json.dumps(record)) == record
    assert record["name"] in harness.BENCHMARKS
    assert record["unit"] in ("env steps", "agent steps", "world steps", "bytes")
    assert record["repeats"] >= 5
    for field in ("wall_seconds", "cpu_seconds", "compile_seconds"):
        assert record[field] > 0.0
    assert math.isclose(record["per_second"], record["steps"] / record["wall_seconds"])
    assert math.isclose(record["per_cpu_second"], record["steps"] / record["cpu_seconds"])
    assert {"longhaul", "jax"} <= record["versions"].keys()
    assert record["device"].endswith(" x cpu")


@pytest.mark.slow
def test_ppo_cartpole_takes_turns_with_a_peer(tmp_path: Path) -> None:
    import sys

    (tmp_path / "ppo.py").write_text(PEER)
    peer = {"peer_python": sys.executable, "peer_path": str(tmp_path)}
    (record,) = harness.run("ppo-cartpole", num_envs=(4,), total_steps=3_000, **peer)
    check(record)
    assert record["steps"] == 2_560, "whole updates of 4 x 128 steps"
    assert record["config"]["devices"] == 1
    assert record["config"]["hidden_dim"] == 64
    assert record["device"] == "1 x cpu"
    assert 9.0 < record["mean_return"] < 100.0, "CartPole by a beginner"
    assert math.isclose(record["ratio"], record["per_second"] / record["reference_per_second"])
    other = record["peer"]
    assert other["mean_return"] == 7.0
    assert other["steps"] == record["steps"]
    assert math.isclose(other["per_second"], other["steps"] / other["wall_seconds"])
    assert 0.0 < record["peer_ratio"] < 1.0, "the peer does nothing"
    assert 0.0 < record["peer_cpu_ratio"] < 1.0


HOLDER = """
import subprocess, sys, json
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], stdin=subprocess.DEVNULL)
print("figure " + json.dumps({"child": child.pid}), flush=True)
sys.stdin.read()
"""


def test_a_figure_ends_though_what_it_began_holds_its_output_open() -> None:
    """A client that is stopped, say: whoever waited for the end of the output would wait for its end."""
    import signal
    import sys

    with harness.Worker([sys.executable, "-c", HOLDER], {}) as worker:
        child = int(worker.about["child"])
    assert worker._process.code == -signal.SIGKILL
    os.kill(child, signal.SIGKILL)  # ProcessLookupError where it was waited for


@pytest.mark.slow
def test_any_recipe_is_trained_with_other_settings() -> None:
    """Columns are those of all agents, of whom some end before their world does."""
    settings = {"num_envs": 4, "num_steps": 64, "least": 2, "scenarios": 8, "hidden_dim": 8, "memory": 8, "lr": 1e-3}
    (record,) = harness.run("train", recipe=("driving-selfplay",), settings=settings, devices=1)
    check(record)
    assert record["config"]["settings"] == settings
    assert (record["config"]["memory"], record["config"]["lr"], record["config"]["clip_value"]) == (8, 1e-3, False)
    assert record["steps"] == 4 * 4 * 16 * 64, "four updates of all slots"
    assert 0.0 < record["played"] < 1.0, "two of 16 slots may be all that have an agent"


@pytest.mark.slow
def test_driving_step_moves_all_objects() -> None:
    (record,) = harness.run("driving-step", objects=(32,), batch=8, num_steps=8, scenarios=4)
    check(record)
    assert record["steps"] == 64
    assert 0.0 < record["speed"] < 35.0
    assert 0.0 < record["offroad"] < 1.0
    assert 0.0 <= record["collision"] < 1.0


@pytest.mark.slow
@pytest.mark.skipif(not EXAMPLE.exists(), reason="no shared logs")
def test_driving_on_logs_counts_agents_and_bytes() -> None:
    few = {"data": [str(EXAMPLE)], "objects": (32,), "batch": 4, "num_steps": 32, "devices": 1}
    (record,) = harness.run("driving-env", agents=(3,), road_points=8, **few)
    check(record)
    assert record["unit"] == "agent steps"
    assert record["steps"] == 4 * 32 * 3
    assert record["config"]["agents"] == 3
    assert 50_000 < record["config"]["scenario_bytes"] <= 350_000
    assert 0 < record["config"]["state_bytes"] <= 64 * 3 + 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "steps"),
    [
        ("driving-env", {"objects": (64,), "batch": 16, "num_steps": 64, "scenarios": 4, "devices": 2}, 1024),
        ("driving-train", {"total_steps": 2048, "num_envs": 16, "scenarios": 4}, 2048),
        ("hackmatrix-ppo", {"total_steps": 256, "num_envs": 16, "num_steps": 8, "devices": 1}, 256),
    ],
)
def test_whole_training_works(name: str, sizes: dict[str, Any], steps: int) -> None:
    (record,) = harness.run(name, **sizes)
    check(record)
    assert record["steps"] == steps
    if name == "hackmatrix-ppo":
        assert record["config"]["shared"]
        assert 2**27 < record["peak_bytes"] < 2**34
    if name == "driving-env":
        assert record["device"] == "2 x cpu"
        assert record["episodes"] > 0
        assert 1.0 <= record["length"] <= 80.0
        assert 0.0 <= record["accuracy"] <= 1.0


def test_scenarios_with_too_few_agents_are_not_kept() -> None:
    every, none = (training.driving_scenarios((2, least), 3) for least in (1, 3))
    first = every.begin(2)
    assert every.steps == 3 and first == HELD_OUT + 6
    assert every.work(first)["kept"] == 1.0 and every.work(first)["scenario_bytes"] > 50_000
    assert none.work(first) == {"kept": 0.0, "scenario_bytes": 0.0}


def test_all_objects_are_judged_and_absent_ones_are_not() -> None:
    """Two cars in one place, one beside the road, one alone; the rest of the slots is empty."""
    poses = [line(start, (5.0, 0.0), 3) for start in ((0.0, 0.0), (2.0, 0.5), (30.0, 8.0), (60.0, 0.0))]
    known = device_bank.tabulate(bank(scenario(poses)), 1, reactive=False)
    logged = device_bank.slice_at(known, jnp.int32(0), jnp.int32(0))
    motion = Motion(logged[0], logged[1], logged[2], jnp.hypot(logged[3], logged[4]))
    zeros = jnp.zeros_like(logged[0])
    moved, hit, off = jax.jit(lambda *a: training._all_objects(known, *a))(jnp.int32(0), motion, zeros, zeros)
    np.testing.assert_array_equal(np.flatnonzero(hit), [0, 1])
    np.testing.assert_array_equal(np.flatnonzero(off), [2])
    np.testing.assert_allclose(moved.x[:4], [0.5, 2.5, 30.5, 60.5], atol=2e-3)  # the log is rounded


def test_unknown_benchmarks_and_impossible_sizes_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no benchmark is named 'sack'; there are ppo-cartpole"):
        next(harness.run("sack"))
    with pytest.raises(ValueError, match="4 repeats; give 5 or more"):
        next(harness.run("driving-step", repeats=4))
    with pytest.raises(ValueError, match=r"^--num-envs is 9, which 2 devices can't share evenly"):
        next(harness.run("hackmatrix-env", num_envs=9, devices=2))  # told by the figure's process, without a traceback
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "sizes", "line"),
    [
        ("driving-env", {"agents": (1, 0)}, "--agents is 0; it must lie in 1 to"),
        ("driving-env", {"road_points": -1}, "--road-points is -1; it must lie in 0 to"),
        ("driving-step", {"objects": (32, 48)}, "--objects is 48; choose a power of two, at least 32"),
        ("driving-step", {"batch": -1}, "--batch is -1; it must lie in 1 to"),
        ("driving-train", {"num_envs": 0}, "--num-envs is 0; it must lie in 1 to"),
        ("replay", {"fill": 1.5}, "--fill is 1.5; it must lie in 0 to 1"),
        ("replay", {"columns": 1 << 31}, "--columns is 2147483648; it must lie in 1 to 2147483647"),
        ("sac", {"env": ("pendulum",), "gradient_steps": (1, 0)}, "--gradient-steps is 0; it must lie in 1 to"),
        ("hackmatrix-env", {"num_steps": 0}, "--num-steps is 0; it must lie in 1 to"),
        ("hackmatrix-ppo", {"num_envs": 0}, "--num-envs is 0; it must lie in 1 to"),
        ("transport", {"streams": 0}, "--streams is 0; it must lie in 1 to"),
        ("actors", {"staleness": -1}, "--staleness is -1; it must lie in 0 to"),
        ("central", {"slots": 0}, "--slots is 0; it must lie in 1 to"),
        ("sync", {"receivers": 0}, "--receivers is 0; it must lie in 1 to"),
    ],
)
def test_sizes_that_can_not_be_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, sizes: dict[str, Any], line: str
) -> None:
    """Also where those of an earlier figure can be."""
    monkeypatch.delattr(harness, "figure")
    with pytest.raises(ValueError, match=f"^{line}"):
        list(harness.run(name, **sizes))


def test_every_benchmark_has_cases_that_its_work_takes() -> None:
    for name, benchmark in harness.BENCHMARKS.items():
        for case in harness.cases(name):
            inspect.signature(benchmark.work).bind(**case)
    assert len(harness.cases("replay")) == 6
    assert [case["env"] for case in harness.cases("sac")] == [None]
    assert len(harness.cases("sac", env=["brax/ant"])) == 2
    with pytest.raises(ValueError, match="transport has no worlds; its sizes are rows, width, streams, messages"):
        harness.cases("transport", worlds=3)


def test_figures_of_an_accelerator_are_ones_that_there_are() -> None:
    for _, name, sizes in gpu.FIGURES:
        assert harness.cases(name, **sizes), name


@pytest.mark.parametrize(("backend", "rows"), [("cpu", 1_024), ("gpu", 65_536), ("tpu", 65_536)])
def test_rows_at_once_suit_the_device_unless_they_are_said(
    backend: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 made a ninth of its steps with a core's 1,024."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert (values.at_once(None), values.at_once(7)) == (rows, 7)
