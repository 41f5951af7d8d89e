"""Runs that are tracked without training, and the files of wandb's offline mode read back."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longhaul.telemetry import sinks, wandb

BLOCK, HEAD = 32768, 7
"""Bytes of a block of a .wandb file, and of the file's and each chunk's head (LevelDB's log format)."""


def hide_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's shell and home have, no server is asked."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


class Offline(NamedTuple):
    """What an offline folder of wandb holds."""

    id: str
    project: str
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    exits: list[int]

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]


def chunks(data: bytes) -> list[bytes]:
    """The records of a .wandb file, whole."""
    found, part, at = [], b"", HEAD
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < HEAD or kind == 0:
            at += left
            continue
        part += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):  # whole, or the last of several
            found.append(part)
            part = b""
    return found


def read(folder: Path) -> Offline:
    """The only offline folder of wandb anywhere below `folder`."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.rglob("*.wandb")
    run, rows, exits = None, [], []
    for data in chunks(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run") and run is None:
            run = record.run
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        if record.HasField("exit"):
            exits.append(record.exit.exit_code)
    assert run is not None
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    return Offline(run.run_id, run.project, run.display_name, config, rows, exits)


def record(update: int, **metrics: Any) -> dict[str, Any]:
    counts = {"update": update, "env_steps": 16 * update, "agent_steps": 32 * update, "wall_seconds": 0.5 * update}
    return {**counts, "sps": 640.0, **metrics}


def tracked_folder(tmp_path: Path, name: str = "run", mode: str | None = "offline") -> Path:
    """The folder of a run that is tracked and has made no update."""
    folder = tmp_path / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"run": {"num_envs": 8, "algorithm": {"lr": 0.5}}, "commit": "abc"}))
    wandb.save(folder, wandb.Tracking("", True, "games", None, mode))
    return folder


def write(folder: Path, updates: range, *, notes: list[str] | None = None, stopped: bool = False) -> None:
    """What a run does that goes on from the update before `updates`."""
    metrics = folder / "metrics.jsonl"
    sinks.truncate_after(metrics, updates[0] - updates.step)
    said = [] if notes is None else notes
    with (
        closing(sinks.jsonl(metrics)) as lines,
        wandb.mirror(folder, said.append, lambda: stopped) as sink,
    ):
        for update in updates:
            row = record(update, **{"ppo/entropy": 1.0 / update})
            lines.write(row)
            sink.write(row)
