"""MLflow beside a run, by the real library with a store of this machine: each record once, whatever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import longhaul
from longhaul.telemetry import follower, sinks, tracking
from longhaul.telemetry.trackers import mlflow as tracker
from tests.helpers.libraries import library
from tests.helpers.own_environments import Corridor
from tests.helpers.tracked_runs import record, tracked_folder, write

mlflow = library("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, by MLflow

ROOT = Path(__file__).resolve().parents[3]

SECRET = "hunter2hunter2"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty store, whose tables take seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an empty store."""
    shutil.copy(empty, tmp_path / "mlflow.db")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    for name, value in follower.QUIET.items():
        monkeypatch.setenv(name, value)
    return mlflow.MlflowClient(address)


def runs(store: Any, project: str = "games") -> list[Any]:
    found = store.get_experiment_by_name(project)
    return list(store.search_runs([found.experiment_id])) if found else []


def history(store: Any, run: Any, metric: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in store.get_metric_history(run.info.run_id, metric)]


@pytest.mark.slow
def test_a_run_goes_on_in_its_own_and_no_step_comes_twice(tmp_path: Path, store: Any) -> None:
    folder, notes = tracked_folder(tmp_path, tracker="mlflow"), []
    write(folder, range(1, 6), notes=notes, stopped=True)
    (run,) = runs(store)
    assert notes == [f"MLflow: run {run.info.run_id} of experiment games in {os.environ['MLFLOW_TRACKING_URI']}"]
    assert run.info.status == "KILLED"
    write(folder, range(4, 9))  # from a checkpoint before the stop
    (again,) = runs(store)
    assert again.info.run_id == run.info.run_id
    assert (again.info.status, again.info.run_name) == ("FINISHED", "run")
    assert again.data.params == {"num_envs": "8", "algorithm.lr": "0.5"}
    assert history(store, run, "ppo/entropy") == [(update, 1.0 / update) for update in range(1, 9)]
    assert history(store, run, "agent_steps") == [(update, 32.0 * update) for update in range(1, 9)]
    assert "episode/return" not in again.data.metrics


@pytest.mark.slow
def test_a_killed_follower_is_started_again_and_sends_the_rest(tmp_path: Path, store: Any) -> None:
    folder, notes = tracked_folder(tmp_path, tracker="mlflow"), []

    def kill(line: str) -> None:
        notes.append(line)
        if line.startswith("MLflow: run") and len(notes) == 1:
            (child,) = children()
            os.kill(child, signal.SIGKILL)

    metrics = folder / "metrics.jsonl"
    lines = sinks.jsonl(metrics)
    with tracking.mirror(folder, kill, lambda: False) as sink:
        for update in range(1, 200):
            lines.write(record(update))
            sink.write(record(update))
            if not notes:
                time.sleep(0.1)
    lines.close()
    assert notes[1] == "MLflow's process was killed; it is started again, and sends what is missing"
    (run,) = runs(store)
    assert history(store, run, "update") == [(update, float(update)) for update in range(1, 200)]


def children() -> list[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in listed if b"longhaul.telemetry.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
def test_records_that_mlflow_lacks_are_sent_by_hand(tmp_path: Path, store: Any) -> None:
    folder = tracked_folder(tmp_path, tracker="mlflow")
    lines = sinks.jsonl(folder / "metrics.jsonl")
    for update in range(1, 1001):  # more than one call of MLflow takes
        lines.write(record(update))
    lines.close()
    (folder / "result.json").write_text("{}")
    command = [sys.executable, "-m", "longhaul.telemetry.follower", str(folder), "mlflow"]
    subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True, capture_output=True)
    (run,) = runs(store)
    assert run.info.status == "FINISHED"
    assert history(store, run, "sps") == [(update, 640.0) for update in range(1, 1001)]


def test_a_store_that_is_not_there_ends_no_run_and_tells_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{SECRET}@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    folder, notes = tracked_folder(tmp_path, tracker="mlflow"), []
    write(folder, range(1, 4), notes=notes)
    assert notes[0].startswith("MLflow failed: ")
    assert len(notes) <= 2
    assert len(sinks.read(folder / "metrics.jsonl")) == 3
    said = "\n".join([*notes, *(path.read_text() for path in folder.iterdir())])
    assert "127.0.0.1" in said
    assert SECRET not in said


def test_settings_are_flat_and_metrics_are_numbers() -> None:
    assert dict(tracker.flat({"a": {"b": 1, "c": None}, "d": [1, 2]})) == {"a.b": "1", "a.c": "None", "d": "[1, 2]"}
    found = tracker.numbers({"update": 3, "a/b%": 1.5, "text": "x", "none": None})
    assert json.dumps(found) == '{"a/b_": 1.5, "update": 3.0}'


@pytest.mark.slow
def test_a_run_from_python_is_tracked(tmp_path: Path, store: Any) -> None:
    settings = {"num_envs": 4, "num_steps": 8, "total_steps": 256, "evaluation_episodes": 2, "log_interval": 1}
    result = longhaul.train("ppo", env=Corridor, runs_dir=tmp_path, track="mlflow", project="mine", **settings)
    (run,) = runs(store, "mine")
    wanted = result.metrics["ppo/entropy"].tolist()
    assert history(store, run, "ppo/entropy") == [(update + 1, value) for update, value in enumerate(wanted)]
    assert (run.info.run_name, run.info.status) == (result.folder.name, "FINISHED")
    assert "track" not in json.loads((result.folder / "run.json").read_text())["asked"]
    with pytest.raises(tracking.TrackingError, match="--track neptune is no tracker"):
        longhaul.train("ppo", env=Corridor, runs_dir=tmp_path / "none", track=["neptune"], **settings)
    assert not (tmp_path / "none").exists()
    assert longhaul.resume(result, track="none").summary == result.summary
    assert not tracking.load_all(result.folder)["mlflow"].on


@pytest.mark.slow
def test_a_run_killed_at_any_moment_has_one_history(tmp_path: Path, store: Any) -> None:
    """SIGKILL of the run, twice, then to its end: MLflow has each record of metrics.jsonl once."""
    words = "train cartpole --num-envs 8 --num-steps 16 --hidden-dim 8 --total-timesteps 1e6 --log-interval 100"
    words += " --save-interval 400 --evaluation-episodes 2"
    command = [sys.executable, "-m", "longhaul", *words.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    for more, update in ((["--track", "mlflow", "--run-name", "mine"], 1000), (["--resume", "mine"], 3000)):
        process = subprocess.Popen([*command, *more], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        while not metrics.exists() or not sinks.read(metrics) or sinks.read(metrics)[-1]["update"] < update:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait(60)
    subprocess.run([*command, "--resume", "mine"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    (run,) = runs(store, "cartpole")
    total = int(1e6) // 128
    records = sinks.read(metrics)
    assert [row["update"] for row in records] == [*range(100, total, 100), total]
    assert history(store, run, "agent_steps") == [(row["update"], row["agent_steps"]) for row in records]
    returns = [(row["update"], row["episode/return"]) for row in records]  # None: no episode ended since the one before
    assert history(store, run, "episode/return") == [each for each in returns if each[1] is not None]
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.lr"] == str(
        json.loads((metrics.parent / "run.json").read_text())["run"]["algorithm"]["lr"]
    )
