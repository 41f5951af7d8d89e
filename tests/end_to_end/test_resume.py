"""A run that was killed, stopped or damaged anywhere, and is gone on with, ends as if nothing had been."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.algorithms.config import DQNConfig, PPOConfig, SACConfig
from longhaul.config import run as runs
from longhaul.config.resolve import named
from longhaul.config.run import Named, Run
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.telemetry import sinks
from longhaul.telemetry.sinks import MetricsError
from longhaul.topologies import fused
from longhaul.training import assemble, final_evaluation, loop, run_dir
from longhaul.training.checkpoint import checkpoint
from longhaul.training.checkpoint.checkpoint import CheckpointError, Checkpoints
from tests.helpers.small_runs import after, begin, checkpoints, records, result, resume, small, stop

TRAIN = """
import json, sys
from pathlib import Path
from longhaul.training import run_dir as folders
from longhaul.config import run as runs
from longhaul.training import loop as training
folder, resumed = Path(sys.argv[1]), Path(sys.argv[1], "run.json").exists()
run = folders.load_run(folder) if resumed else runs.from_dict(runs.Run, json.loads(sys.argv[2]))
sys.exit(training.train(run, folder, resumed=resumed).code)
"""

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def whole(quick_runs: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small run, never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert begin(small(save_interval=30), folder).code == 0  # a save costs more than three calls
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    """The same result, parameters bit for bit, and the same records, each once."""
    assert result(folder) == result(whole)
    assert len(result(folder)["params_sha256"]) == 64
    assert records(folder) == records(whole)
    assert [r["update"] for r in records(folder)] == list(range(4, 61, 4))


# ------------------------------------------------------------------------------------------------------------- kill


def spawn(folder: Path, run: Run) -> subprocess.Popen:
    """A process that trains or resumes, with one device and one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    command = [sys.executable, "-c", TRAIN, str(folder), json.dumps(runs.to_dict(run))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finished(folder: Path) -> int:
    """Updates of which there is a record."""
    path = folder / "metrics.jsonl"
    return max((r["update"] for r in sinks.read(path)), default=0) if path.exists() else 0


def kill_when(process: subprocess.Popen, ready: Callable[[], bool], delay: float) -> None:
    """kill -9 `delay` seconds after `ready()`."""
    while process.poll() is None and not ready():
        time.sleep(0.0005)
    time.sleep(delay)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"it ended before it was killed: {errors.decode()}"


@pytest.mark.slow
def test_killed_three_times_it_ends_bit_identical(whole: Path, tmp_path: Path) -> None:
    """Two kills at random moments and one within a save, with 1 thread; the end here, as `whole`, with 4 devices."""
    rng = random.Random(7)
    run, folder = small(save_interval=2, threads=1), tmp_path / "run"
    saving = folder / "checkpoints"
    first, last = rng.randint(8, 16), rng.randint(36, 44)
    kept: list[bytes] = []
    for ready in (
        lambda: finished(folder) >= first,
        lambda: finished(folder) >= 24 and any(saving.glob("*.partial")),
        lambda: finished(folder) >= last,
    ):
        kill_when(spawn(folder, run), ready, delay=0.0 if kept else rng.uniform(0.0, 0.1))
        newest = max(int(path.name) for path in saving.iterdir() if path.name.isdecimal())
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()
        lines = [line for line in lines if json.loads(line)["update"] <= newest]
        assert lines[: len(kept)] == kept, "it went on from a checkpoint, and kept what was before it"
        assert len(lines) > len(kept)
        kept = lines
    assert resume(folder).code == 0
    assert (folder / "metrics.jsonl").read_bytes().splitlines()[: len(kept)] == kept
    assert_same(folder, whole)


@pytest.mark.slow
def test_tortured_it_ends_bit_identical(tmp_path: Path) -> None:
    """Kills and signals at a dozen moments, from the start of the process on."""
    rng = random.Random(11)
    run = small(total_steps=8 * 16 * 600, save_interval=2, threads=1)
    folder, whole = tmp_path / "tortured", tmp_path / "whole"
    assert begin(run, whole).code == 0
    for turn in range(12):
        process = spawn(folder, run)
        done = finished(folder)
        delay = rng.uniform(0.0, 0.5)
        if turn % 2 == 0:  # after so many seconds, be it in importing, compiling or training
            delay = rng.uniform(0.0, 8.0)
        while turn % 2 and process.poll() is None and finished(folder) <= done:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        errors = process.communicate()[1].decode()
        # Before it listens, SIGTERM and SIGINT do what they do to any Python.
        assert process.returncode in (0, 1, loop.STOPPED, -9, -2, -15), errors
        assert process.returncode != 1 or "KeyboardInterrupt" in errors, errors
    found = resume(folder).result
    assert found is not None
    assert found["params_sha256"] == result(whole)["params_sha256"]
    assert records(folder) == records(whole)


@pytest.mark.slow
def test_the_game_killed_ends_bit_identical(tmp_path: Path) -> None:
    """HackMatrix, whose observations are packed and whose actions are masked: a kill after the first save."""
    network = NetworkConfig(hidden_dim=8, shared=True, init="lecun")
    config = PPOConfig(num_minibatches=2, update_epochs=1, network=network)
    run = small(environment=Named("hackmatrix"), algorithm=config, total_steps=8 * 16 * 40, threads=1)
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert begin(run, whole).code == 0
    kill_when(spawn(folder, run), lambda: finished(folder) >= 12, delay=0.0)
    assert finished(folder) < 40
    assert resume(folder).code == 0
    assert result(folder) == result(whole)
    assert records(folder) == records(whole)


# ---------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_run_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    """In the middle of a record, far from any save that is due."""
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Sums, "add", after(5, lambda: signal.raise_signal(number), loop.Sums.add))
        assert begin(small(save_interval=None), folder) == (75, None)
    assert signal.getsignal(number) is before
    assert checkpoints(folder) == [12]  # 5 calls of 2 were counted, the sixth was under way
    assert not (folder / "result.json").exists()
    name = signal.Signals(number).name
    assert f"{name}: saved after update 12; go on with --resume {folder}\n" in capfd.readouterr().err
    assert resume(folder).code == 0
    assert_same(folder, whole)


def test_a_signal_before_the_first_update_or_in_the_evaluation_ends_the_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def stopped(owner: Any, name: str) -> str:
        """Trains until a signal in a function that then goes on; -> what was said."""
        with monkeypatch.context() as patch:
            heard = after(1, lambda: signal.raise_signal(signal.SIGTERM), getattr(owner, name))
            patch.setattr(owner, name, heard)
            outcome = resume(folder) if folder.exists() else begin(small(save_interval=30), folder)
        assert outcome == (loop.STOPPED, None)
        return capfd.readouterr().err

    assert f"SIGTERM: stopped before its first update; go on with --resume {folder}\n" in stopped(loop, "save_run")
    assert f"SIGTERM: nothing was left to save; go on with --resume {folder}\n" in stopped(loop, "feed")
    assert f"SIGTERM: stopped before its first update; go on with --resume {folder}\n" in stopped(fused, "compiled")
    assert not (folder / "checkpoints").exists()
    assert f"SIGTERM: saved after update 60; go on with --resume {folder}\n" in stopped(final_evaluation, "evaluations")
    assert checkpoints(folder)[-1] == 60
    assert not (folder / "result.json").exists()
    with monkeypatch.context() as patch:  # all updates are made: nothing is compiled, nothing is trained
        patch.delattr(fused, "compiled")
        patch.delattr(fused, "fused")
        before = (folder / "metrics.jsonl").read_bytes(), sorted(path.name for path in folder.iterdir())
        assert resume(folder).code == 0
    assert (folder / "metrics.jsonl").read_bytes() == before[0]
    assert {path.name for path in folder.iterdir()} - set(before[1]) == {"result.json", "report.html"}
    assert_same(folder, whole)


def test_a_signal_before_a_run_is_one_leaves_nothing_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(loop, "feed", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        begin(small(), folder)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_stopped_at_each_save_it_ends_the_same(whole: Path, tmp_path: Path) -> None:
    """Ten resumes, each one save further; also where the last update is made when the signal comes."""
    folder = tmp_path / "run"
    for save in range(10):
        stop(small(), folder)
        assert checkpoints(folder)[-1] == min(6 * save + 8, 60), "the signal is heard one call after the save"
    assert resume(folder).code == 0
    assert_same(folder, whole)


# ----------------------------------------------------------------------------------------------------------- damage


def _flip(step: Path) -> None:
    """A bit of the checkpoint's largest file."""
    files = (path for path in step.rglob("*") if path.is_file() and path.name != "manifest.json")
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 4
    largest.write_bytes(data)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> Path:
    """The folder of the small run, stopped after update 20."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    stop(small(), folder, save=3)
    assert checkpoints(folder) == [12, 18, 20]
    return folder


# each damage of each file: checkpoint/test_checkpoint.py
@pytest.mark.parametrize("damage", ["flipped", pytest.param("partial", marks=pytest.mark.slow)])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    stopped: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    newest = folder / "checkpoints" / "20"
    if damage == "flipped":
        _flip(newest)
    else:  # what a kill leaves of a save
        newest.rename(newest.with_suffix(".partial"))
    assert resume(folder).code == 0
    assert_same(folder, whole)
    assert checkpoints(folder) == [48, 54, 60]
    assert ("checkpoint 20 in " in capfd.readouterr().err) == (damage != "partial")
    seconds = [r["wall_seconds"] for r in sinks.read(folder / "metrics.jsonl")]
    kept = [r["wall_seconds"] for r in sinks.read(stopped / "metrics.jsonl")]
    assert seconds[:4] == kept[:4], "the records up to update 16 are those of the first process: it went on from 18"
    assert seconds[4] != kept[4]


def test_where_all_checkpoints_are_damaged_nothing_begins_anew(stopped: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    for step in (folder / "checkpoints").iterdir():
        _flip(step)
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"all 3 checkpoints in .* are damaged"):
        resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_records_that_are_missing_are_said_to_be(
    stopped: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    assert resume(folder).code == 0
    assert "metrics.jsonl lacks records before update 20" in capfd.readouterr().err
    assert records(folder) == records(whole)[5:]
    assert result(folder) == result(whole)


# -------------------------------------------------------------------------------------------------------- full disk


@pytest.mark.slow  # checkpoint/test_checkpoint.py fills the disk, too
def test_a_disk_that_stays_full_is_one_error_at_the_end_and_the_older_checkpoints_are_intact(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Until then the run trains on, and says at each save what is missing."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint.Checkpoints, "save",
            after(3, lambda: patch.setattr(checkpoint, "_free_bytes", lambda _: 0), checkpoint.Checkpoints.save),
        )  # fmt: skip
        with pytest.raises(CheckpointError, match=r"checkpoint 60 .*the disk is full.*make room and resume") as raised:
            begin(small(), folder)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err.count("until then it trains on") == 6, "at updates 24, 30, ... 54"
    assert checkpoints(folder) == [6, 12, 18]
    assert resume(folder).code == 0
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_a_save_and_nothing_else(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Records wait in memory, too, and come to the file in their order."""
    folder, write, full = tmp_path / "run", os.write, [False]

    def filling(descriptor: int, data: bytes) -> int:
        if full[0] and bytes(data).startswith(b'{"update"'):
            raise OSError(errno.ENOSPC, "")
        return write(descriptor, data)

    def fill() -> None:
        full[0] = True

    def make_room() -> None:
        full[0] = False

    with monkeypatch.context() as patch:
        patch.setattr(sinks.os, "write", filling)
        patch.setattr(loop.Sums, "add", after(20, make_room, after(9, fill, loop.Sums.add)))
        assert begin(small(), folder).code == 0
    err = capfd.readouterr().err
    assert err.count("records wait in memory") == 1
    assert [f"cannot save checkpoint {step}" in err for step in (18, 24, 30, 36, 42, 48)] == [
        False, True, True, True, False, False,
    ]  # fmt: skip
    assert_same(folder, whole)


@pytest.mark.slow
def test_a_disk_that_fills_while_logging_is_one_error_and_the_run_goes_on(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    write, count = os.write, 0

    def filling(descriptor: int, data: bytes) -> int:
        nonlocal count
        count += bytes(data).startswith(b'{"update"')
        return write(descriptor, data[:20] if count > 8 else data)

    with monkeypatch.context() as patch:
        patch.setattr(sinks.os, "write", filling)
        with pytest.raises(MetricsError, match="the disk is full; make room and resume"):
            begin(small(), folder)
    assert [r["update"] for r in records(folder)] == list(range(4, 33, 4))
    assert checkpoints(folder)[-1] == 30
    assert resume(folder).code == 0
    assert_same(folder, whole)


# ------------------------------------------------------------------------------------------------------------ twice


def test_a_run_that_is_done_is_not_done_again(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    outcome = resume(whole)
    assert outcome.code == 0
    assert outcome.result == json.loads((whole / "result.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == files
    assert "run is done already" in capfd.readouterr().err


def test_two_processes_never_train_in_one_folder(stopped: Path) -> None:
    files = sorted(stopped.rglob("*"))
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 2); print(); input()",
         str(stopped)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(RunError, match=r"another process trains in .*run; let it end"):
            resume(stopped)
        holder.kill()
    with run_dir.alone(stopped):  # who is killed lets go
        assert sorted(stopped.rglob("*")) == files


# ------------------------------------------------------------------------------------------------------------ replay

LITTLE: dict[str, Any] = {
    "hidden_dim": 8, "num_layers": 1, "batch_size": 16, "gradient_steps": 2, "learning_starts": 64, "replay_size": 256
}  # fmt: skip
LEARNERS = {
    "sac": ("pendulum", replaced(SACConfig(), **LITTLE)),
    "dqn": ("cartpole", replaced(DQNConfig(), **LITTLE, replay_precision="bf16")),
}


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "devices"), [pytest.param(*each, marks=pytest.mark.slow) for each in (("dqn", 2), ("sac", 1))]
)  # fmt: skip
def test_a_run_with_a_replay_goes_on_bit_for_bit(
    name: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay is full after 16 updates."""
    env, config = LEARNERS[name]
    settings: dict[str, Any] = {"algorithm": config, "environment": Named(env), "num_steps": 4, "devices": devices}
    run = small(**settings, num_envs=4, total_steps=4 * 4 * 60)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    begin(run, whole)
    stepped, calls = fused.fused, []

    def killed(*args: Any, **kwargs: Any) -> Any:
        for out in stepped(*args, **kwargs):
            calls.append(out)
            if len(calls) == 17:  # after update 34, of which 30 are saved
                raise Killed
            yield out

    with monkeypatch.context() as patch:
        patch.setattr(fused, "fused", killed)
        with pytest.raises(Killed):
            begin(run, cut)
    assert max(checkpoints(cut)) == 30
    resume(cut)
    assert records(cut) == records(whole)
    assert result(cut) == result(whole)
    (cut / "result.json").unlink()
    with pytest.raises(RunError, match="num_envs is 8, and this run's replay is laid out for 4"):
        loop.train(small(**settings, num_envs=8, total_steps=4 * 4 * 60), cut, resumed=True)
    assembly = assemble.assemble(run, lambda _: named(run.environment), ())
    like, last = assembly.start(run.seed, ()), []
    for folder in (whole, cut):
        with closing(Checkpoints(folder / "checkpoints")) as saved:
            found = saved.latest(like)
        assert found is not None
        last.append(jax.device_get(found.progress.state))
    jax.tree.map(np.testing.assert_array_equal, *last)
    ring = last[0].replay.value
    assert ring.reward.shape[0] == devices and np.all(np.any(ring.reward != 0.0, axis=(1, 2)))
