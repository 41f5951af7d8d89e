"""What a run's actors are at, for whoever looks on from another terminal: `live.json` as rows and a table."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from longhaul.cli import tables
from longhaul.training.actor_learner import LIVE

OLD = 10.0
"""Seconds after which what was told is said to be old."""

HEADER = ["actor", "process", "state", "for", "rollouts", "waiting", "queue", "restarts"]


def read(folder: Path) -> dict[str, Any] | None:
    """What a run told last; None where it has no actors at work."""
    try:
        told: dict[str, Any] = json.loads((folder / LIVE).read_text())
    except (OSError, ValueError):
        return None
    return told


def rows(told: dict[str, Any], now: float) -> list[tuple[str, str]]:
    """Lines on the whole: how stale, how full, who waits for whom."""
    metrics, bound = told["metrics"], told["staleness"]
    age = max(0.0, now - told["time"])
    return [
        ("actors", f"{len(told['actors'])}, {told['kind']}"),
        ("staleness", f"{metrics['staleness_mean']:.2f}, bound {'none' if bound is None else bound}"),
        ("queue", f"{told['queue']} rollouts"),
        ("waits", f"learner {metrics['learner_wait']:.0%}, actors {metrics['actor_wait']:.0%} of their time"),
        ("bottleneck", told["bottleneck"]),
        ("restarts", str(int(metrics["restarts"]))),
        ("told", f"{age:.0f} s ago" + (", which is long: the learner waits, is stopped, or was killed" * (age > OLD))),
    ]


def lines(told: dict[str, Any]) -> list[list[str]]:
    """A row for each actor, as `HEADER` has it."""
    found = []
    for row in told["actors"]:
        whole = row["seconds_acting"] + row["seconds_waiting"]
        waiting = f"{row['seconds_waiting'] / whole:.0%}" if whole else ""
        numbers = [row["rollouts"], waiting, row["queue"], row["restarts"]]
        found.append(
            [str(row["actor"]), str(row["process"]), row["state"], f"{row['since']:.1f} s", *map(str, numbers)]
        )
    return found


def show(folder: Path) -> None:
    """Prints what a run's actors are at; nothing where it has none at work."""
    told = read(folder)
    if told is not None:
        tables.listing(rows(told, time.time()))
        tables.table(HEADER, lines(told))
