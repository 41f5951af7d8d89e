"""Run of billions of steps, killed on its way: `python -m benchmarks.long_run [-- RECIPE FLAGS of longhaul train]`.

    python -m benchmarks.long_run [--steps 3e9] [--kills 2] [--folder FOLDER] [--json FILE] [-- RECIPE FLAGS]

Trains CartPole, or RECIPE. At equal shares of the way `kill -9` ends the run, which goes on by `--resume`. All the
while the memory of its process is read every two seconds. One JSON object tells for each of twenty parts of the way
the largest memory, the steps a second, and the mean return; what each kill cost; and, at the end: whether every record
stands once and in order, the size of records, report and checkpoints, and the score of the trained policy. Exit code 1
where a record is missing or stands twice, where the run ends with another code than 0, or where it has not come to its
last step. `--folder` keeps the run there; else it goes with the measurement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import results

ROOT = Path(__file__).resolve().parent.parent

TRAIN = ("cartpole", "--num-envs", "1024", "--num-steps", "64", "--update-epochs", "1", "--hidden-dim", "8",
         "--seed", "0", "--log-interval", "50", "--save-interval-minutes", "0.5")  # fmt: skip
"""Small network and one epoch an update: more than two million steps a second on one processor."""

PARTS, INTERVAL = 20, 2.0


class Reading(NamedTuple):
    """Memory of the run's process at a point of its way."""

    seconds: float
    steps: int
    megabytes: float


class Ended(NamedTuple):
    """Process of the run that came to an end, by itself or by a kill, and what was read of it."""

    code: int
    readings: list[Reading]
    at: int  # steps of its last record
    seconds: float


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = results.parser(__doc__)
    parser.add_argument("--steps", type=float, default=3e9)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the run in this folder")
    args, train = parser.parse_args(words[:split]), words[split + 1 :] or list(TRAIN)
    if args.kills < 0 or args.steps < 1:
        parser.error(f"--steps {args.steps:g} and --kills {args.kills}: give at least 1 step and 0 kills")
    steps = int(args.steps)
    home = tempfile.TemporaryDirectory() if args.folder is None else nullcontext(str(args.folder))
    with home as runs:
        figure, holds = measured(Path(runs), train, steps, args.kills)
    results.emit({"name": "long_run", "train": train, "steps": steps, **figure, "holds": holds}, args.json)
    return 0 if holds else 1


def measured(runs: Path, train: Sequence[str], steps: int, kills: int) -> tuple[dict[str, Any], bool]:
    """The run's figures, and whether it holds what a long run must."""
    runs.mkdir(parents=True, exist_ok=True)
    folder = runs / "long"
    where = ["--runs-dir", str(runs)]
    readings: list[Reading] = []
    killed = []
    for turn in range(kills + 1):
        begin = [train[0], "--resume", "long"] if turn else [*train, "--total-steps", str(steps), "--run-name", "long"]
        until = steps * (turn + 1) // (kills + 1) if turn < kills else None
        ended = process([*begin, *where], folder, until, readings)
        readings = ended.readings
        if until is not None:
            killed.append({"steps": ended.at, "code": ended.code, "seconds": round(ended.seconds, 1)})
        if (ended.code == 0) != (until is None):
            break
    records = read(folder)
    updates = [record["update"] for record in records]
    gaps = [later - earlier for earlier, later in pairwise(updates)]
    scores = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else None
    last = records[-1]["agent_steps"] if records else 0
    once = len(set(gaps[:-1])) <= 1 and all(gap > 0 for gap in gaps)  # the last record may come sooner
    rollout = records[-1]["agent_steps"] // records[-1]["update"] if records else steps
    holds = ended.code == 0 and scores is not None and once and steps - rollout < last <= steps
    return {
        "kills": killed, "code": ended.code, "agent_steps": last, "updates": updates[-1] if updates else 0,
        "records": len(records), "each_record_once": once, "parts": parts(records, readings, steps),
        "wall_seconds": round(readings[-1].seconds, 1) if readings else 0.0,
        "bytes": {name: size(folder / name) for name in ("metrics.jsonl", "report.html", "checkpoints")},
        "result": scores,
    }, holds  # fmt: skip


def process(words: Sequence[str], folder: Path, until: int | None, before: list[Reading]) -> Ended:
    """One process of the run, killed once its records are past `until` steps."""
    began = time.monotonic()
    earlier = before[-1].seconds if before else 0.0
    readings = list(before)
    with open(folder.parent / "long.log", "ab") as log:
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.Popen(
            [sys.executable, "-m", "longhaul", "train", *words], stdout=log, stderr=log, cwd=ROOT, env=variables
        )
        watched = psutil.Process(run.pid)
        first = newest(folder)
        while run.poll() is None:
            time.sleep(INTERVAL)
            at = newest(folder)
            try:
                megabytes = watched.memory_info().rss / 1e6
            except psutil.NoSuchProcess:
                break
            if at > first or not before:  # what starts has not its full size
                readings.append(Reading(earlier + time.monotonic() - began, at, megabytes))
            if until is not None and at >= until:
                run.kill()
        code = run.wait()
    return Ended(code, readings, newest(folder), time.monotonic() - began)


def newest(folder: Path) -> int:
    """Agent steps of the last whole record."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["agent_steps"])
    except (OSError, IndexError, ValueError, KeyError):
        return 0


def read(folder: Path) -> list[dict[str, Any]]:
    """All records of the run."""
    if not (folder / "metrics.jsonl").exists():
        return []
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def parts(records: Sequence[dict[str, Any]], readings: Sequence[Reading], steps: int) -> list[dict[str, Any]]:
    """What was measured in each of PARTS equal parts of the way."""
    rows = []
    for part in range(PARTS):
        low, high = steps * part // PARTS, steps * (part + 1) // PARTS
        inside = [record for record in records if low < record["agent_steps"] <= high]
        memory = [reading.megabytes for reading in readings if low < reading.steps <= high]
        returns = [record["episode/return"] for record in inside if record.get("episode/return") is not None]
        rates = sorted(record["sps"] for record in inside)
        rows.append({
            "to": high, "megabytes": round(max(memory), 1) if memory else None,
            "sps": round(rates[len(rates) // 2]) if rates else None,
            "return": round(sum(returns) / len(returns), 2) if returns else None,
        })  # fmt: skip
    return rows


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
