"""Cost of an open board beside a training run: `python -m benchmarks.board_cost --json FILE`.

CartPole trains, in turn alone and beside a board whose page of the run is open: its parts are fetched and its events
read, as a browser does. All processes share the cores that this one has; give one (`taskset -c 0`) to see the board
take its time from the trainer. Taken are

    board_cpu_seconds      of the board's server while the run trains
    cost                   these over the seconds of training: the share of one core, whose bar is 0.02
    slowdown               of training: by how much fewer steps a second it makes beside a board, medians of the turns

The page's drawing is the browser's, and is left out. Exit code 1 above the bar.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results

COST = 0.02
"""Most of a run's time that a board beside it may take."""


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1_500_000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    turns = [turn(args.steps, board) for _ in range(args.repeats) for board in (False, True)]
    without, beside = ([each for each in turns if each["board"] == board] for board in (False, True))
    rates = [statistics.median(each["sps"] for each in turns_of) for turns_of in (without, beside)]
    record = {
        "name": "board-cost", "steps": args.steps, "repeats": args.repeats, "turns": turns,
        "slowdown": 1 - rates[1] / rates[0],
        "cost": statistics.median(each["board_cpu_seconds"] / each["train_seconds"] for each in beside),
    }  # fmt: skip
    results.emit(record, args.json)
    return int(record["cost"] >= COST)


def turn(steps: int, board: bool) -> dict[str, Any]:
    """One training run of CartPole; with a `board`, its page's events are read as a browser reads them."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "longhaul"]
        server = None
        if board:
            server = subprocess.Popen([*words, "board", folder, "--port", "0"], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            address = server.stdout.readline().strip()
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        flags = ["--total-steps", str(steps), "--evaluation-interval", "0", "--runs-dir", folder, "--run-name", "a"]
        trainer = subprocess.Popen(
            [*words, "train", "cartpole", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        spent, before = 0.0, 0.0
        if server is not None:
            watched = psutil.Process(server.pid)
            metrics = Path(folder) / "a" / "metrics.jsonl"
            while not metrics.exists() and trainer.poll() is None:
                time.sleep(0.05)
            before = sum(watched.cpu_times()[:2])
            threading.Thread(target=read, args=(address,), daemon=True).start()
        trainer.wait()
        if server is not None:
            spent = sum(watched.cpu_times()[:2]) - before
            server.terminate()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
        if server is not None:
            server.wait()
        result = json.loads((Path(folder) / "a" / "result.json").read_text())
    return {
        "board": board, "board_cpu_seconds": spent, "trainer_cpu_seconds": cpu,
        "train_seconds": result["train_seconds"], "sps": result["sps"],
    }  # fmt: skip


def read(address: str) -> None:
    """Requests of a run's page: its parts, then its events until they end."""
    for path in ("/run/a", "/api/run/a", "/api/run/a/curves", "/api/run/a/evaluations"):
        urllib.request.urlopen(address.rstrip("/") + path).read()
    events = urllib.request.urlopen(address.rstrip("/") + "/api/events?run=a&count=0")
    with events, contextlib.suppress(http.client.HTTPException):  # the board's end cuts them off
        while events.read1(1 << 16):
            pass


if __name__ == "__main__":
    sys.exit(main())
