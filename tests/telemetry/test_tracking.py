"""Trackers beside a run: which of them, what is kept of them, and that nothing of them counts for the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli.main import main
from longhaul.telemetry import follower, sinks, tracking
from tests.helpers.tracked_runs import record, tracked_folder


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in tracking.KINDS.values():
        for variable in filter(None, (kind.project, kind.entity)):
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")


def chosen(before: dict[str, tracking.Tracking] | None = None, **values: Any) -> dict[str, bool]:
    """Trackers after flags, and whether they are on."""
    found = tracking.chosen(values, frozenset(values), "pong", before)
    return {name: tracked.on for name, tracked in found.items()}


def test_the_flags_name_the_trackers_and_a_run_keeps_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: True)  # type: ignore[attr-defined]
    assert chosen() == {}
    assert chosen(track=("mlflow", "swanlab")) == {"mlflow": True, "swanlab": True}
    assert chosen(track=("mlflow",), wandb=True) == {"wandb": True, "mlflow": True}
    assert chosen(track="wandb") == chosen(wandb=True) == {"wandb": True}
    assert chosen(track=("wandb",), wandb=False) == {}
    before = {"mlflow": tracking.Tracking("a1", True, "games"), "wandb": tracking.Tracking("b2", False, "games")}
    assert chosen(before) == {"wandb": False, "mlflow": True}
    assert chosen(before, wandb=True) == {"wandb": True, "mlflow": True}
    assert chosen(before, track=("swanlab",)) == {"wandb": False, "mlflow": False, "swanlab": True}
    assert chosen(before, track=("none",)) == {"wandb": False, "mlflow": False}
    with pytest.raises(tracking.TrackingError, match="--track neptune is no tracker; give some of wandb, mlflow"):
        chosen(track=["neptune"])
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sports")
    found = tracking.chosen({"track": ("mlflow", "swanlab")}, frozenset({"track"}), "pong")
    assert [tracked.project for tracked in found.values()] == ["sports", "pong"]


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert main(["train", "cartpole", "--track", "mlflow"]) == 2
    needs = "--track mlflow needs mlflow: pip install 'longhaul-rl[trackers]', or leave it out"
    assert needs in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ids_are_kept_and_two_runs_of_one_name_have_two(tmp_path: Path) -> None:
    one, two = (tracked_folder(tmp_path / name, tracker="mlflow") for name in ("one", "two"))
    first = tracking.load_all(one)
    assert first["mlflow"].id != tracking.load_all(two)["mlflow"].id
    tracking.save(one, first)
    assert tracking.load_all(one) == first


def test_trackers_that_fail_leave_the_run_and_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three libraries that fail at once, differently; each says so in at most two lines."""
    fakes = {"wandb": "raise RuntimeError('a')", "mlflow": "import os; os._exit(3)", "swanlab": "import gone"}
    for name, body in fakes.items():
        (tmp_path / f"{name}.py").write_text(body + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder, notes = tracked_folder(tmp_path), list[str]()
    tracking.save(folder, {name: tracking.Tracking("", True, "games") for name in fakes})
    lines = sinks.jsonl(folder / "metrics.jsonl")
    with tracking.mirror(folder, notes.append, lambda: False) as sink:
        for update in range(1, 50):
            lines.write(record(update))
            sink.write(record(update))
    lines.close()
    assert "W&B failed: a" in notes
    assert "SwanLab failed: No module named 'gone'" in notes
    assert any(note.startswith("MLflow ") for note in notes)
    assert all(sum(note.startswith(kind.title) for note in notes) <= 2 for kind in tracking.KINDS.values())
    assert len(sinks.read(folder / "metrics.jsonl")) == 49


def test_secrets_are_left_out_of_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "0123456789abc")
    text = "API request to http://me:word@host:5000/api failed with 0123456789abc"
    assert follower.public(text) == "API request to http://***@host:5000/api failed with ***"


def test_a_record_is_sent_once_and_with_the_one_before(tmp_path: Path) -> None:
    path, got = tmp_path / "metrics.jsonl", []
    lines = sinks.jsonl(path)
    for update in range(1, 5):
        lines.write(record(update))
    lines.close()
    with open(path, "a") as torn:
        torn.write('{"update": 5, ')
    with open(tmp_path / "words", "wb+") as words:
        words.write(b"\nstopped\n")
        words.seek(0)
        assert follower.follow(path, words, tracking.Tracker(2, got.extend, print)) == "stopped"
    assert [(row["update"], before and before["update"]) for row, before in got] == [(3, 2), (4, 3)]
    assert json.loads(path.read_text().splitlines()[0])["update"] == 1
