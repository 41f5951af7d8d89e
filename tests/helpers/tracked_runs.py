"""Runs whose trackers are tested: a folder with settings, and what training does to it, without any training."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from longhaul.telemetry import sinks, tracking


def record(update: int, **metrics: Any) -> dict[str, Any]:
    counts = {"update": update, "env_steps": 16 * update, "agent_steps": 32 * update, "wall_seconds": 0.5 * update}
    return {**counts, "sps": 640.0, **metrics}


def tracked_folder(tmp_path: Path, name: str = "run", mode: str | None = "offline", tracker: str = "wandb") -> Path:
    """The folder of a run that is tracked and has made no update."""
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run": {"num_envs": 8, "algorithm": {"lr": 0.5}}, "commit": "abc"}))
    tracking.save(folder, {tracker: tracking.Tracking("", True, "games", None, mode)})
    return folder


def write(folder: Path, updates: range, *, notes: list[str] | None = None, stopped: bool = False) -> None:
    """Acts of a run that goes on from the update before `updates`."""
    metrics = folder / "metrics.jsonl"
    sinks.truncate_after(metrics, updates[0] - updates.step)
    messages = [] if notes is None else notes
    with (
        closing(sinks.jsonl(metrics)) as lines,
        tracking.mirror(folder, messages.append, lambda: stopped) as sink,
    ):
        for update in updates:
            row = record(update, **{"ppo/entropy": 1.0 / update, "episode/return": None, "note": "text"})
            lines.write(row)
            sink.write(row)
