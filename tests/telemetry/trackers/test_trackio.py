"""Trackio beside a run, by the real library with a folder of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from longhaul.telemetry import tracking
from tests.helpers.libraries import library
from tests.helpers.tracked_runs import tracked_folder, write

trackio = library("trackio")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trackio's folder, in an environment that names no server."""
    for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path / "trackio"


def history(run: str) -> list[tuple[int, float]]:
    rows: list[dict[str, Any]] = trackio.sqlite_storage.SQLiteStorage.get_logs("games", run)
    assert all("note" not in row and "episode/return" not in row for row in rows)
    return [(row["step"], row["ppo/entropy"]) for row in rows]


@pytest.mark.slow
def test_a_run_that_goes_on_has_one_history_and_its_namesake_another(tmp_path: Path, place: Path) -> None:
    folder, notes = tracked_folder(tmp_path, tracker="trackio"), list[str]()
    write(folder, range(1, 6), notes=notes, stopped=True)
    write(folder, range(4, 9), notes=notes)  # from a checkpoint before the stop
    tracked = tracking.load_all(folder)["trackio"]
    name = f"run-{tracked.id[:8]}"
    assert notes == 2 * [f"Trackio: run {name} of project games in {place}"]
    assert history(name) == [(update, 1.0 / update) for update in range(1, 9)]
    write(tracked_folder(tmp_path / "other", tracker="trackio"), range(1, 3))
    assert len(history(name)) == 8
    assert len(trackio.sqlite_storage.SQLiteStorage.get_runs("games")) == 2
    config = trackio.sqlite_storage.SQLiteStorage.get_run_config("games", name)
    assert config["run"]["algorithm"]["lr"] == 0.5


def test_a_server_that_is_not_there_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    folder, notes = tracked_folder(tmp_path, tracker="trackio"), list[str]()
    write(folder, range(1, 3), notes=notes)
    assert notes[0].startswith("Trackio failed: Self-hosted logging requires a write token")
