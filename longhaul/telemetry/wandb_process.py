"""Process that sends a run's metrics.jsonl to W&B: `python -m longhaul.telemetry.wandb_process FOLDER MODE PID`.

A line on stdin reports new records, a word the run's end; the end of stdin means that the run is gone. The run shows
each line of stdout.

Only records that W&B lacks are sent. Online, W&B reports its last record, and the rest of the file follows. Offline,
nothing can be queried, and a killed wandb loses its memory: so each session writes the whole history again, and removes
the offline folder of the session before. Either way the history has each record once, in order, whenever the run is
killed. W&B's step is the number of updates.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from longhaul.telemetry import wandb as tracking
from longhaul.telemetry.health import of_learning
from longhaul.telemetry.sinks import Record
from longhaul.telemetry.wandb import Tracking

MOST_SECONDS = 600.0
"""Seconds that it outlives a killed run, to send the rest."""

MARK = "longhaul-run"
"""File in an offline folder that names the run's folder."""

NAMES = {
    "episode/return": "train/mean_episode_return",
    "episode/length": "train/mean_episode_length",
    "episode/move_frac": "actions/move_frac",
    "episode/siphon_frac": "actions/siphon_frac",
    "episode/program_frac": "actions/program_frac",
    "peak/stage": "stats/highest_stage",
    "update": "train/update_step",
    "sps": "train/steps_per_second",
}
"""Names of records -> those of HackMatrix's own trainer, for its dashboards and sweeps."""

LEARNING = {
    "policy_loss": "train/pg_loss",
    "value_loss": "train/vf_loss",
    "total_loss": "train/total_loss",
    "entropy": "train/entropy",
    "approx_kl": "train/approx_kl",
    "clip_fraction": "train/clip_frac",
}
"""Names of learning metrics, without the algorithm's name -> that trainer's."""

PARTS = "episode/reward_", "reward/"
"""Prefix of the parts of an episode's return -> prefix of the parts of a step's reward."""

KEYS = ("mean_reward", "mean_episode_return", "mean_episode_length")
"""Names under train/ that are copied under key/."""

SETTINGS = {
    "num_envs": "num_envs", "num_steps": "num_steps", "total_steps": "total_timesteps", "seed": "seed",
    "devices": "device_count",
}  # fmt: skip
ALGORITHM = {"lr": "learning_rate"} | {
    name: name
    for name in (
        "gamma", "gae_lambda", "num_minibatches", "update_epochs", "clip_eps", "vf_coef", "ent_coef", "max_grad_norm",
        "hidden_dim", "num_layers",
    )
}  # fmt: skip
"""Settings of a Run -> names in that trainer's config."""


def renamed(record: Record, before: Record | None = None) -> dict[str, Any]:
    """Record with the names of HackMatrix's own trainer; unknown names stay, nulls are dropped.

    `before` is the previous record, None for the first. Means of a step are over the steps of ended episodes.
    """
    metrics = {name: value for name, value in record.items() if value is not None}
    length, returned = metrics.get("episode/length"), metrics.get("episode/return")
    mine, theirs = PARTS
    fields: dict[str, Any] = {}
    for name, value in metrics.items():
        if name.startswith(mine) and length:
            fields[theirs + name.removeprefix(mine)] = value / length
        elif name != "episode/count":
            fields[NAMES.get(name) or LEARNING.get(of_learning(name) or "", name)] = value
    updates = record["update"] - (before["update"] if before else 0)
    steps = record["agent_steps"] - (before["agent_steps"] if before else 0)
    if "episode/count" in metrics:
        fields["train/num_episodes"] = metrics["episode/count"] / updates
    if "train/entropy" in fields:
        fields["train/ent_loss"] = -fields["train/entropy"]
    if "sps" in metrics and steps:
        fields["train/updates_per_second"] = metrics["sps"] * updates / steps
    if returned is not None and length:
        fields["train/mean_reward"] = returned / length
    return fields | {f"key/{name}": fields[f"train/{name}"] for name in KEYS if f"train/{name}" in fields}


def config(about: Mapping[str, Any]) -> dict[str, Any]:
    """Config of W&B: run.json, and the settings by the names of HackMatrix's own trainer."""
    run = about.get("run", {})
    algorithm = run.get("algorithm", {})
    algorithm = {**algorithm, **algorithm.get("network", {})}
    flat = {name: run[mine] for mine, name in SETTINGS.items() if mine in run}
    return {**about, **flat, **{name: algorithm[mine] for mine, name in ALGORITHM.items() if mine in algorithm}}


def follow(path: Path, words: BinaryIO, log: Callable[[dict[str, Any], int], None], sent: int) -> str:
    """Log every record of the growing file `path` after the update `sent`, until `words` end; -> the last word,
    "killed" if there is none."""
    end, before, read, rest = "killed", None, 0, b""
    while True:
        word = words.readline()
        end = word.decode().strip() or end
        if path.exists():
            with open(path, "rb") as file:
                file.seek(read)
                data = file.read()
            read += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for record in map(json.loads, lines):
                if record["update"] > sent:
                    log(renamed(record, before), record["update"])
                before = record
        if not word:
            return end


# ------------------------------------------------------------------------------------------------------------- W&B


def begin(folder: Path, tracked: Tracking, mode: str, pid: int) -> tuple[Any, int]:
    """(W&B run, last update that it has); offline if the server refuses."""
    import wandb

    about = json.loads((folder / "run.json").read_text())
    where = Path(os.environ.get("WANDB_DIR") or folder)
    where.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"console": "off", "silent": True}
    if "x_stats_pid" in getattr(wandb.Settings, "model_fields", {}):
        options["x_stats_pid"] = pid  # machine metrics of the run's process
    common: dict[str, Any] = {
        "id": tracked.id, "name": folder.name, "project": tracked.project, "entity": tracked.entity,
        "config": config(about), "dir": str(where), "settings": wandb.Settings(**options),
    }  # fmt: skip
    if mode == "online":
        try:
            run = wandb.init(mode="online", resume="allow", **common)
            print(f"W&B: {run.url}", flush=True)
            return run, run.starting_step - 1 if run.resumed else 0
        except Exception as error:
            traceback.print_exc()
            print(f"W&B does not take the run ({_first_line(error)}), so it is logged offline", flush=True)
            wandb.teardown()
    for place in where.glob(f"wandb/offline-run-*-{tracked.id}"):  # each of this run's records is written again
        mark = place / MARK
        if mark.is_file() and mark.read_text() == str(folder.resolve()):
            shutil.rmtree(place, ignore_errors=True)
    run = wandb.init(mode="offline", **common)
    place = Path(run.settings.sync_dir)
    (place / MARK).write_text(str(folder.resolve()))
    print(f"W&B: offline; wandb sync {place}", flush=True)
    return run, 0


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def main(words: list[str]) -> int:
    """Body of the process; -> its exit code."""
    folder, mode, pid = Path(words[0]), words[1], int(words[2])
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when all is sent
        signal.signal(number, signal.SIG_IGN)
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME"):
        os.environ.pop(name, None)
    tracked = tracking.load(folder)
    assert tracked is not None
    try:
        with open(folder / tracking.LOG, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the tracker of a killed run first sends its remaining records
            run, sent = begin(folder, tracked, mode, pid)
            end = follow(folder / "metrics.jsonl", sys.stdin.buffer, lambda row, step: run.log(row, step=step), sent)
            timer = threading.Timer(MOST_SECONDS, os._exit, (1,))
            timer.daemon = True
            timer.start()
            if end == "stopped":
                run.mark_preempting()
            run.finish(exit_code=0 if end == "done" else 75 if end == "stopped" else 1)
    except Exception as error:
        traceback.print_exc()
        print(f"W&B failed: {_first_line(error)}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
