"""No failure of Weights & Biases ends or holds up a run; a module of its name plays the server, and what fails."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longhaul.runtime.launch.process import Process
from longhaul.telemetry import sinks, wandb, wandb_process
from tests.helpers.wandb_files import hide_credentials, record, tracked_folder, write


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_credentials(tmp_path, monkeypatch)


WANDB = """
    import json, os, signal, sys, time
    class Settings:
        def __init__(self, **options): pass
    def teardown(): pass
    class Run:
        url, resumed, starting_step = "https://w/run", {resumed}, {starting}
        class settings: sync_dir = os.environ["FAKE"]
        def log(self, row, step):
            {log}
            with open(os.environ["FAKE"] + "/log", "a") as file: print(step, file=file)
        def mark_preempting(self): pass
        def finish(self, exit_code):
            {finish}
            with open(os.environ["FAKE"] + "/exit", "w") as file: file.write(str(exit_code))
    def init(mode, id, resume=None, **rest):
        {init}
        return Run()
"""


class Fake(NamedTuple):
    folder: Path

    @property
    def steps(self) -> list[int]:
        log = self.folder / "log"
        return [int(line) for line in log.read_text().split()] if log.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(what its functions do) -> a wandb that the tracker finds before the real one."""

    def make(**parts: str) -> Fake:
        whole = {"resumed": "False", "starting": "0", "log": "pass", "finish": "pass", "init": "pass"} | parts
        package = tmp_path / "fake"
        package.mkdir(exist_ok=True)
        (package / "wandb.py").write_text(textwrap.dedent(WANDB).format(**whole))
        monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)
        monkeypatch.setenv("FAKE", str(package))
        return Fake(package)

    return make


def test_online_only_what_the_server_lacks_is_sent(tmp_path: Path, fake: Any) -> None:
    """Its last step is asked for: it may be before the checkpoint (a machine that failed) or after it (a kill)."""
    folder, notes = tracked_folder(tmp_path, mode="online"), []
    server = fake()
    write(folder, range(1, 6), notes=notes)
    assert notes == ["W&B: https://w/run"]
    assert server.steps == [1, 2, 3, 4, 5]
    for starting, begin, sent in ((4, 6, [4, 5, 6, 7]), (9, 7, [9]), (20, 8, [])):
        server = fake(resumed="True", starting=str(starting))
        (server.folder / "log").unlink(missing_ok=True)
        write(folder, range(begin, begin + 3 if starting == 9 else 8 if starting == 4 else 12))
        assert server.steps == sent


def test_a_server_that_cannot_be_reached_leaves_an_offline_folder(tmp_path: Path, fake: Any) -> None:
    folder, notes = tracked_folder(tmp_path, mode="online"), []
    server = fake(init="if mode == 'online': raise RuntimeError('no route to host\\nmore')")
    write(folder, range(1, 4), notes=notes)
    assert notes[0] == "W&B does not take the run (no route to host), so it is logged offline"
    assert server.steps == [1, 2, 3]
    assert "Traceback" in (folder / "wandb.log").read_text()


@pytest.mark.parametrize(
    ("parts", "phrase"),
    [
        ({"init": "raise RuntimeError('broken')"}, "W&B failed: broken"),
        ({"init": "os._exit(3)"}, "W&B"),
        ({"log": "raise RuntimeError('broken')"}, "W&B failed: broken"),
        ({"log": "os.kill(os.getpid(), signal.SIGSEGV)"}, "W&B"),
        ({"log": "time.sleep(1000)"}, "W&B did not finish"),
        ({"finish": "time.sleep(1000)"}, "W&B did not finish"),
    ],
)
def test_no_failure_of_wandb_ends_or_holds_up_a_run(
    tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch, parts: dict[str, str], phrase: str
) -> None:
    fake(**parts)
    monkeypatch.setattr(wandb, "PATIENCE", 2.0 if "finish" in phrase else 60.0)  # who ends by himself may be slow
    folder, notes = tracked_folder(tmp_path), []
    write(folder, range(1, 2000), notes=notes)  # more words than a pipe holds, were none of them read
    failures = [note for note in notes if not note.startswith("W&B: offline")]
    assert 1 <= len(failures) <= 2
    assert phrase in failures[0]
    assert len(set(notes)) == len(notes)
    assert len(sinks.read(folder / "metrics.jsonl")) == 1999


def test_a_run_that_fails_says_so_and_its_error_goes_on(tmp_path: Path, fake: Any) -> None:
    server, folder = fake(), tracked_folder(tmp_path)
    with pytest.raises(ZeroDivisionError), wandb.mirror(folder, lambda line: None, lambda: False):
        _ = 1 / 0
    assert (server.folder / "exit").read_text() == "1"


def test_signals_stay_the_runs_own(tmp_path: Path, fake: Any) -> None:
    """SIGTERM reaches whole groups of processes: the tracker sends what there is, and then ends."""
    server, folder = fake(), tracked_folder(tmp_path)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    started: list[Process] = []
    begun = wandb._begun

    def keep(*words: Any) -> Any:
        process = begun(*words)
        assert process is not None
        started.append(process)
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wandb, "_begun", keep)
        with wandb.mirror(folder, lambda line: None, lambda: True):
            while not (server.folder / wandb_process.MARK).exists():
                time.sleep(0.02)
            for number in (signal.SIGTERM, signal.SIGINT):
                started[0].send(number)
            (folder / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert os.getpgid(0) != started[0].id
    assert server.steps == [1]
    assert (server.folder / "exit").read_text() == "75"
