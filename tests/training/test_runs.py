"""Runs of a folder read cheaply: states, sparklines, curves that grow, and stores."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.training import runs, store


def record(update: int, **more: Any) -> str:
    known = {"update": update, "agent_steps": 100 * update, "wall_seconds": update / 10, "sps": 1000.0}
    return json.dumps({**known, "episode/return": float(update), **more}) + "\n"


def make(folder: Path, records: int = 10, done: bool = False, lr: float = 1e-3, seed: int = 0) -> Path:
    """Folder of a run with records 1 .. `records`."""
    folder.mkdir(parents=True)
    run = {
        "environment": {"kind": "Named", "env": "cartpole"}, "algorithm": {"kind": "ppo", "lr": lr},
        "population": {"seeds": 1}, "total_steps": 5000, "seed": seed, "init_from": None,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({"format": 1, "id": folder.name, "recipe": "cartpole", "run": run}))
    if records:
        (folder / "metrics.jsonl").write_text("".join(record(i) for i in range(1, records + 1)))
    if done:
        result = {"status": "done", "evaluation": {"trained": {"return": 42.0}}}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_run_is_stopped_done_starting_or_running(tmp_path: Path) -> None:
    make(tmp_path / "stopped"), make(tmp_path / "done", done=True), make(tmp_path / "fresh", records=0)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "stopped" / "checkpoints" / "7").mkdir(parents=True)
    known: dict[str, Any] = {}
    found = {each.name: each for each in runs.summaries(tmp_path, known)}
    assert {name: each.status for name, each in found.items()} == {
        "stopped": "stopped", "done": "done", "fresh": "stopped", "damaged": "damaged",
    }  # fmt: skip
    assert found["stopped"]._replace(created=0, updated=0) == runs.Summary(
        "stopped", "cartpole", "cartpole", "ppo", 0, 1, "stopped", 1000, 5000, 10, 1000.0, 1.0, 10.0, None,
        [float(i) for i in range(1, 11)], 0, 0, [7], None,
    )  # fmt: skip
    assert found["done"].trained == 42.0
    for name, status in (("fresh", "starting"), ("stopped", "running"), ("done", "running")):
        descriptor = os.open(tmp_path / name, os.O_RDONLY)  # as run_dir.alone does
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert {each.name: each.status for each in runs.summaries(tmp_path, known)}[name] == status
        os.close(descriptor)
        assert runs.summary(tmp_path / name).status == found[name].status


def test_looking_takes_no_lock_that_a_trainer_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tried = make(tmp_path / "a"), []
    monkeypatch.setattr(store, "trains", lambda folder: tried.append(folder) or False)
    runs.summaries(tmp_path)
    assert tried == []
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    runs.summaries(tmp_path)
    os.close(descriptor)
    assert tried == [folder]


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        make(tmp_path / name)
    known: dict[str, Any] = {}
    runs.summaries(tmp_path, known)
    read: list[str] = []
    inner = runs._summary
    monkeypatch.setattr(runs, "_summary", lambda folder, running: read.append(folder.name) or inner(folder, running))
    runs.summaries(tmp_path, known)
    assert read == []
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write(record(11))
    (tmp_path / "c" / "run.json").unlink()
    found = runs.summaries(tmp_path, known)
    assert read == ["b"] and {each.name: each.steps for each in found} == {"a": 1000, "b": 1100}


def test_the_sparkline_of_a_long_log_is_even_and_ends_with_the_last_return(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", records=0)
    lines = [record(i, **{f"group/{j}": random.random() for j in range(20)}) for i in range(1, 5001)]
    lines[-1] = lines[-1].replace('"episode/return": 5000.0', '"episode/return": null')
    (folder / "metrics.jsonl").write_text("".join(lines))
    found = runs.summary(folder)
    assert found.steps == 500_000 and found.value == 4999.0
    assert 30 <= len(found.spark) <= 33
    assert np.allclose(np.diff(found.spark)[:-1], 5000 / 32, rtol=0.1)


def test_curves_read_what_a_file_has_grown_by_and_begin_again_after_a_resume(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    path, curves = folder / "metrics.jsonl", runs.Curves(folder)
    assert not curves.update() and curves.column("episode/return").tolist() == list(range(1, 11))
    with open(path, "a") as file:
        file.write(record(11, **{"late/metric": 5}) + record(12)[:20])
    assert not curves.update() and curves.count == 11
    assert curves.column("late/metric")[-2:].tolist() == pytest.approx([np.nan, 5.0], nan_ok=True)
    with open(path, "a") as file:
        file.write(record(12)[20:])
    assert not curves.update() and curves.count == 12 and not curves.update()
    kept = path.read_text().splitlines(keepends=True)[:5]
    other = path.with_name("other")
    other.write_text("".join(kept) + record(6, **{"episode/return": -1.0}))
    os.replace(other, path)
    assert curves.update() and curves.column("episode/return").tolist() == [1, 2, 3, 4, 5, -1]
    path.unlink()
    assert curves.update() and curves.count == 0 and not curves.update()


def test_thin_curves_keep_every_spike_and_the_order_of_steps(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", records=0)
    spikes = {777: 1e6, 2222: -1e6, 2999: 3e5}
    lines = [record(i, **{"episode/return": spikes.get(i, 0.0), "sparse/x": 1.0 if i == 5 else None})
             for i in range(3000)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(lines))
    curves = runs.Curves(folder)
    curves.update()
    thin = curves.thinned(200)
    assert len({len(column) for column in thin.values()}) == 1 and len(thin["update"]) <= 200
    assert set(spikes.values()) <= set(thin["episode/return"])
    assert [value for value in thin["sparse/x"] if value is not None] == [1.0, 1.0]
    steps = thin["agent_steps"]
    assert all(a <= b for a, b in itertools.pairwise(steps)) and steps[0] == 0 and steps[-1] <= 299_900
    assert curves.thinned(5000)["update"] == list(range(3000))
    assert curves.thinned(5000, start=2998)["update"] == [2998, 2999]


def test_a_log_that_is_too_long_is_sampled_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "WHOLE", 100_000)
    monkeypatch.setattr(runs, "LINES", 100)
    monkeypatch.setattr(runs, "PIECE", 1000)
    folder = make(tmp_path / "a", records=5000)
    curves = runs.Curves(folder)
    curves.update()
    assert 100 <= curves.count < 200
    updates = curves.column("update")
    assert (np.diff(updates) >= 0).all() and updates[0] < 100 and updates[-1] == 5000
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(record(5001))
    assert not curves.update() and curves.column("update")[-1] == 5001


HUGE = "9" * 400
STRANGE = {
    "deep": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}\n",
    "huge": f'{{"update":1,"agent_steps":{HUGE},"episode/return": {HUGE},"run":{{"seed":{HUGE}}},"members":7}}\n',
    "odd": '{"update": [], "agent_steps": 1e999, "episode/return": 1-2, "run": {"environment": 3}}\n',
    "columns": "".join(f'{{"a{i}":1}}\n' for i in range(8000)),  # 32 million values
    "wide": "{" + ",".join(f'"a{i}":1' for i in range(600_000)) + "}\n",
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_run_is_listed_beside_ours_within_bounds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_VALUES", 100_000)
    make(tmp_path / "a"), make(tmp_path / "b")
    for file in ("run.json", "metrics.jsonl", "result.json"):
        (tmp_path / "a" / file).write_text(STRANGE[name])
        assert {each.name for each in runs.summaries(tmp_path)} == {"a", "b"}
        curves = runs.Curves(tmp_path / "a")
        curves.update()
        columns = {metric: curves.column(metric) for metric in curves.names}
        assert sum(map(len, columns.values())) <= runs.MOST_VALUES
        assert len(runs.config(tmp_path / "a")) < 100


def test_settings_are_flat(tmp_path: Path) -> None:
    assert runs.config(make(tmp_path / "a", lr=0.5)) == {
        "environment.kind": "Named", "environment.env": "cartpole", "algorithm.kind": "ppo", "algorithm.lr": 0.5,
        "population.seeds": 1, "total_steps": 5000, "seed": 0, "init_from": None,
    }  # fmt: skip


def test_runs_of_a_store_are_fetched_again_where_they_grew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_STAGING", str(tmp_path / "staging"))
    there = tmp_path / "there"
    make(there / "a", done=True), make(there / "b")
    (there / "a" / "checkpoints" / "9").mkdir(parents=True)
    (there / "a" / "checkpoints" / "9" / "manifest.json").write_text("{}")
    (there / "a" / "checkpoints" / "9" / "weights").write_bytes(bytes(1000))
    folder = runs.local(f"local://{there}")
    assert folder != there and runs.local(there) == there
    found = {each.name: each for each in runs.summaries(folder)}
    assert found["a"].status == "done" and found["a"].checkpoints == [9] and found["b"].status == "running"
    assert not list(folder.rglob("weights"))
    curves = runs.Curves(folder / "b")
    curves.update()
    with open(there / "b" / "metrics.jsonl", "a") as file:
        file.write(record(11))
    runs.local(f"local://{there}")
    assert not curves.update() and curves.count == 11  # the same file, longer
    (there / "a" / "run.json").unlink()
    assert runs.names(runs.local(f"local://{there}")) == ["b"]
