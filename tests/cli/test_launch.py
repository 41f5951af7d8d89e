"""The launcher: what it does with processes of any kind, and two that train together."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from longhaul.cli import launch, main
from longhaul.cli.flags import FlagError
from longhaul.runtime import heartbeat
from longhaul.runtime.launch import local, supervisor
from longhaul.runtime.launch.supervisor import DEADLINE
from longhaul.runtime.provenance import params_sha256
from longhaul.training import loop
from longhaul.training.checkpoint.resume import restore_policy
from tests.helpers.launch_faults import pids, wait_for
from tests.helpers.small_runs import records, result, resume

ROOT = Path(__file__).resolve().parents[2]

KILL, TERM, ABORT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


# ------------------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hosts 2", "what is to be launched"),
        ("--hosts 2 -- evaluate x", "what is to be launched"),
        ("--hosts 0 -- train cartpole", "--hosts is 0; it must be at least 1"),
        ("--devices-per-host 0 -- train cartpole", "--devices-per-host is 0; it must be at least 1"),
        ("--restarts -1 -- train cartpole", "--restarts is -1"),
        ("--deadline 3 -- train cartpole", "--deadline is 3; it must be at least 15"),
        ("--host 2 -- train cartpole", "--host"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        launch.launch(words.split())


def test_the_command_stands_behind_dashes_or_alone() -> None:
    for words in ("--hosts 2 -- train cartpole --seed 1", "--hosts 2 train cartpole --seed 1"):
        assert launch._split_argv(words.split()) == (["--hosts", "2"], ["train", "cartpole", "--seed", "1"])
    assert launch._split_argv(["--on", "ray"]) == (["--on", "ray"], [])


def test_more_processes_than_memory_holds_are_refused_before_the_first_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(launch, "machine_memory", lambda: 4 * 2**30)
    monkeypatch.setattr(launch, "supervise", lambda command, start, *_: started.append(start.keywords["count"]) or 0)
    with pytest.raises(FlagError, match=r"--hosts is 9; this machine's 4\.3 GB hold at most 8 processes, .*--on ray"):
        launch.launch(["--hosts", "9", "--", "train", "cartpole"])
    assert started == []
    assert launch.launch(["--hosts", "8", "--", "train", "cartpole"]) == 0 and started == [8]


# --------------------------------------------------------------------------------------------- processes of any kind

PROCESS = """
import os, signal, sys, time
from pathlib import Path
k, folder, words = int(os.environ["LONGHAUL_PROCESS_ID"]), Path(sys.argv[1]), sys.argv[2:]
(folder / f"pid{k}").write_text(str(os.getpid()))
print(f"{folder}\\nprocess {k} of {os.environ['LONGHAUL_NUM_PROCESSES']}", flush=True)
print("on stderr", file=sys.stderr, flush=True)
(folder / f"printed{k}").touch()
mode = words[0]
def wait(name):
    while not (folder / name).exists():
        time.sleep(0.01)
if mode == "end":
    sys.exit(int(words[1 + k]))
if mode == "die" and k == 1:
    wait("pid0")
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "recover" and "--resume" not in words:
    if k == 1:
        (folder / "run.json").write_text("{}")
        wait("printed0")
        os.kill(os.getpid(), signal.SIGKILL)
elif mode == "recover":
    sys.exit(words[words.index("--resume") + 1] != str(folder))
if mode == "hang" and k == 1 and "--resume" not in words:
    signs = int(os.environ["LONGHAUL_PULSE"])
    wait("run.json")
    if words[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    for sign in b"wccc" if words[1] == "silent" else b"":
        os.write(signs, bytes([sign]))
        time.sleep(0.05)
if mode == "hang" and k == 0:
    (folder / "run.json").write_text("{}")
if mode == "hang" and "--resume" in words:
    sys.exit(0)
if mode == "listen":
    signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))
    (folder / f"listens{k}").touch()
time.sleep(60)
"""


@pytest.fixture
def dummies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PROGRAM", (sys.executable, "-c", PROCESS))
    monkeypatch.setattr(supervisor, "HANGING", 0.3)
    monkeypatch.setattr(supervisor, "LINGER", 0.3)
    monkeypatch.setattr(supervisor, "PAUSES", (0.01, 0.02))


def supervise(words: list[str], count: int, restarts: int, deadline: float = DEADLINE) -> int:
    return supervisor.supervise(words, partial(local.Local, count=count, devices=None), restarts, deadline)


def assert_gone(folder: Path) -> None:
    for path in folder.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_output_is_passed_on_and_codes_count(
    dummies: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "LINGER", 60.0)  # each ends by itself, however busy the machine
    assert supervise([str(tmp_path), "end", "0", "0", "0"], 3, 0) == 0
    out, err = capfd.readouterr()
    assert out == f"{tmp_path}\nprocess 0 of 3\n"
    assert sorted(err.splitlines()) == [f"[{k}] on stderr" for k in range(3)]
    assert supervise([str(tmp_path), "end", "75", "75"], 2, 5) == 75
    assert supervise([str(tmp_path), "end", "2", "1"], 2, 5) == 2
    assert supervise([str(tmp_path), "end", "0", "3"], 2, 0) == 1
    assert "longhaul launch: process 1 ended with exit code 3\n" in capfd.readouterr().err


def test_where_one_dies_the_others_are_ended_and_it_is_named(
    dummies: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise([str(tmp_path), "die"], 2, 0) == 1
    assert "process 1 was ended by SIGKILL; after it: 0 had to be killed" in capfd.readouterr().err
    assert_gone(tmp_path)


def test_new_starts_are_counted_and_go_on_with_the_run(
    dummies: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise([str(tmp_path), "recover"], 2, 1) == 0
    out, err = capfd.readouterr()
    assert "starts again (1 of 1), from update 0" in err
    assert out.count(f"{tmp_path}\n") == 1, "the folder is said once"
    assert supervise([str(tmp_path), "die"], 2, 2) == 1
    assert capfd.readouterr().err.count("process 1 was ended by SIGKILL") == 3
    assert_gone(tmp_path)


@pytest.mark.parametrize(("words", "said"), [
    ("stopped", "process 1 was stopped for"),
    ("silent", "process 1 was silent for"),
    ("deadline", "process 0 has not begun to work for"),
])  # fmt: skip
def test_who_lives_and_hangs_is_killed_and_all_start_again(
    dummies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str,
    said: str,
) -> None:  # fmt: skip
    """The silent one has done some calls; the other one, which waits for it, is not named."""
    monkeypatch.setattr(heartbeat, "FROZEN" if words == "stopped" else "SILENCE", 0.5)
    monkeypatch.setattr(supervisor, "LINGER", 60.0)  # the second time each ends by itself, however busy the machine
    deadline = 2.0 if words == "deadline" else 60.0
    assert supervise([str(tmp_path), "hang", words], 2, 1, deadline) == 0
    err = capfd.readouterr().err
    assert said in err
    assert "and was killed" in err
    assert "starts again (1 of 1)" in err
    assert_gone(tmp_path)


def test_a_launcher_that_was_away_forgives(
    dummies: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has not looked for longer than silence may last; its processes end meanwhile, and well."""
    monkeypatch.setattr(supervisor, "AWAY", 0.02)  # every look comes late
    monkeypatch.setattr(heartbeat, "FROZEN", 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "PROGRAM", (sys.executable, "-c", "import time; time.sleep(1)"))
        assert supervise([], 1, 0, 0.3) == 0
    assert "killed" not in capfd.readouterr().err


def test_a_signal_is_passed_to_all(dummies: None, tmp_path: Path) -> None:
    program = (
        "import functools, sys; from longhaul.cli import launch; from longhaul.runtime.launch import local\n"
        "local.PROGRAM = (sys.executable, '-c', sys.argv[1])\n"  # without JAX: a launcher imports none
        "start = functools.partial(local.Local, count=2, devices=None)\n"
        "sys.exit(launch.supervise([sys.argv[2], 'listen'], start, 3))"
    )
    command = [sys.executable, "-c", program, PROCESS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        wait_for(lambda: all((tmp_path / f"listens{k}").exists() for k in range(2)))
        launcher.terminate()
        assert launcher.wait(timeout=20) == 75
    assert_gone(tmp_path)


# -------------------------------------------------------------------------------------------- two processes that train

FLAGS = shlex.split(
    "--num-envs 8 --num-steps 16 --hidden-dim 8 --num-layers 1 --num-minibatches 2 --update-epochs 1 --lr 3e-3 "
    "--no-anneal --seed 3 --block 2 --log-interval 4 --evaluation-episodes 4"
)


@contextmanager
def spawned(
    runs_dir: Path,
    devices: int,
    updates: int,
    *more: str,
    restarts: int = 0,
    recipe: str = "cartpole",
    flags: list[str] = FLAGS,
) -> Iterator[subprocess.Popen[str]]:
    """`longhaul launch` of two processes with so many devices each; nothing is left of them afterwards."""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    own = ["--hosts", "2", "--devices-per-host", str(devices), "--restarts", str(restarts)]
    train = ["train", recipe, *flags, "--total-steps", str(8 * 16 * updates), "--runs-dir", str(runs_dir), *more]
    command = [sys.executable, "-m", "longhaul", "launch", *own, "--", *train]
    launcher = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def alone(
    folder: Path, devices: int, updates: int, *more: str, recipe: str = "cartpole", flags: list[str] = FLAGS
) -> Path:
    """The same run in one process, this one."""
    words = ["--total-steps", str(8 * 16 * updates), "--mesh", f"data={devices}", "--runs-dir", str(folder.parent)]
    assert main.main(["train", recipe, *flags, *words, "--run-name", folder.name, *more]) == 0
    return folder


def assert_alike(both: Path, whole: Path) -> None:
    """Parameters of one beginning, and of one end up to the order of a sum over four devices."""
    _, one, begun = restore_policy(both)
    _, other, begun_alone = restore_policy(whole)
    assert params_sha256(begun.params) == params_sha256(begun_alone.params) != params_sha256(one.params)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.0, atol=1e-5)


@pytest.mark.slow
def test_two_processes_of_two_devices_train_as_one_of_four_and_stop_together(tmp_path: Path) -> None:
    """Up to the order of a sum over four devices. Who writes, writes once; a signal is heard by all and saves."""
    both = tmp_path / "both"
    with spawned(tmp_path, 2, 4000, "--run-name", "both") as launcher:
        wait_for(lambda: (both / "metrics.jsonl").exists() and b"\n" in (both / "metrics.jsonl").read_bytes())
        launcher.terminate()
        out, err = launcher.communicate()
    assert launcher.returncode == loop.STOPPED, err
    assert out.splitlines() == [str(both)]
    stopped = supervisor.newest_step(both)
    assert f"[0] SIGTERM: saved after update {stopped}; go on with --resume {both}\n" in err
    assert "[1] SIGTERM" not in err
    assert [r["update"] for r in records(both)] == list(range(4, stopped + 1, 4))
    assert len(list(both.glob("events.out.*"))) == 1
    whole = alone(tmp_path / "whole", 4, stopped)
    assert_alike(both, whole)
    for mine, its in zip(records(both), records(whole), strict=False):  # the last one of a run is there at its end
        assert mine.keys() == its.keys()
        assert mine["agent_steps"] == its["agent_steps"]
        assert mine["episode/return"] == its["episode/return"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")
def test_killed_processes_end_the_launch_and_the_run_goes_on_bit_identical(tmp_path: Path) -> None:
    """One is killed, then the other, under a supervisor and without one; the end is made by one process alone.

    Two devices: a sum over them has one order, so that processes make no difference at all.
    """
    updates = 240
    whole = alone(tmp_path / "whole", 2, updates, "--save-interval", "6")
    folder = tmp_path / "killed"

    def kill(step: int, victim: int) -> None:
        """kill -9 to a process, once there is a checkpoint of `step` or later."""
        wait_for(lambda: supervisor.newest_step(folder) >= step)
        os.kill(pids("killed")[victim], signal.SIGKILL)

    with spawned(tmp_path, 1, updates, "--run-name", "killed", "--save-interval", "6", restarts=1) as launcher:
        kill(12, 1)
        kill(36, 0)  # counts as the first death: there is a new checkpoint
        wait_for(lambda: supervisor.newest_step(folder) >= 60)
        launcher.terminate()
        out, err = launcher.communicate()
    assert launcher.returncode == loop.STOPPED, err
    assert out.splitlines() == [str(folder)]
    assert err.count("starts again (1 of 1)") == 2
    with spawned(tmp_path, 1, updates, "--resume", "killed") as launcher:
        kill(supervisor.newest_step(folder) + 6, 1)
        began = time.monotonic()
        out, err = launcher.communicate()
    assert launcher.returncode == 1
    assert time.monotonic() - began < 60
    assert "process 1 was ended by SIGKILL" in err
    assert not pids("killed")
    outcome = resume(folder)
    assert outcome.code == 0
    assert result(folder) == result(whole)
    assert records(folder) == records(whole)


DRIVING = shlex.split(
    "--scenarios 8 --num-envs 8 --num-steps 16 --hidden-dim 8 --num-layers 1 --num-minibatches 2 --update-epochs 1 "
    "--lr 3e-3 --no-anneal --seed 3 --block 2 --log-interval 10 --evaluation-episodes 4"
)


@pytest.mark.slow
def test_two_processes_of_two_devices_are_one_of_four_after_fifty_updates_of_driving(tmp_path: Path) -> None:
    """The same shards, each with its worlds and keys: what may differ is the order of a sum over four devices."""
    with spawned(tmp_path, 2, 50, "--run-name", "both", recipe="driving", flags=DRIVING) as launcher:
        _, err = launcher.communicate()
    assert launcher.returncode == 0, err
    both, whole = tmp_path / "both", alone(tmp_path / "whole", 4, 50, recipe="driving", flags=DRIVING)
    assert_alike(both, whole)
    assert [r["update"] for r in records(both)] == [r["update"] for r in records(whole)]
    assert result(both)["agent_steps"] == result(whole)["agent_steps"] == 8 * 16 * 50
