"""Runs in a real S3 server, by the command line: a machine that is lost, and a server that is away for a while."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longhaul.runtime.object_store import Store
from tests.helpers.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.slow

URL = f"s3://{BUCKET}/runs"
SIZES = ("--total-steps", "3000000", "--save-interval", "100", "--evaluation-episodes", "4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "log")
    yield server
    server.stop()


def begun(server: S3Server, folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "longhaul", "train", "cartpole", *words], cwd=folder, stderr=subprocess.PIPE, text=True,
        env=server.environment(folder / "staging"), stdout=subprocess.DEVNULL,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed, after an end without an error."""
    _, printed = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def digest(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["params_sha256"])


@pytest.fixture(scope="module")
def undisturbed(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    ended(begun(server, folder, *SIZES, "--run-name", "plain"))
    return digest(folder / "runs" / "plain")


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_goes_on_where_nothing_of_it_is(
    seed: int, server: S3Server, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    first = begun(server, tmp_path, *SIZES, "--run-name", f"killed{seed}", "--runs-dir", URL)
    deadline = time.monotonic() + 120.0
    while not Store(URL).has(f"killed{seed}/metrics.jsonl"):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(random.Random(seed).uniform(0.0, 3.0))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    shutil.rmtree(tmp_path / "staging")
    ended(begun(server, tmp_path, "--resume", f"killed{seed}", "--runs-dir", URL))
    (folder,) = (tmp_path / "staging").glob(f"*/killed{seed}")
    assert digest(folder) == undisturbed
    updates = [json.loads(line)["update"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert updates == sorted(set(updates))


def test_a_server_that_is_away_stops_nothing_and_is_caught_up_with(
    server: S3Server, undisturbed: str, tmp_path: Path
) -> None:
    run = begun(server, tmp_path, *SIZES, "--run-name", "away", "--runs-dir", URL)
    assert run.stderr is not None
    printed = ""
    while "agent steps" not in printed:  # under way
        printed += run.stderr.readline()
    server.stop()
    while "is out of reach" not in printed and run.poll() is None:
        printed += run.stderr.readline()
    server.start()  # empty: all is sent again
    printed += ended(run)
    assert printed.count("is out of reach") == 1
    shutil.rmtree(tmp_path / "staging")
    again = begun(server, tmp_path, "--resume", f"{URL}/away")
    assert "is done already" in ended(again)
    (folder,) = (tmp_path / "staging").glob("*/away")
    assert digest(folder) == undisturbed
