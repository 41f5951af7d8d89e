"""Process that sends metrics.jsonl to a tracker: `python -m longhaul.telemetry.follower FOLDER NAME [PID LAST]`.

A line on stdin reports new records, a word the run's end; the end of stdin means that the run is gone. The run shows
each line that `Session.say` prints. By hand it sends what a tracker lacks of a run that is not training.

Only records that the tracker lacks are sent: it reports the last update that it has, and the rest of the file follows.
So its history has each record once, in order, whenever the run or this process is killed.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from longhaul.runtime.errors import first_line
from longhaul.telemetry import tracking
from longhaul.telemetry.sinks import Record
from longhaul.telemetry.tracking import Row, Session, Tracker

MOST_SECONDS = 600.0
"""Seconds that it outlives a killed run, to send the rest."""

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
"""Variables that keep the libraries from reporting their use to their makers."""


def follow(path: Path, orders: BinaryIO, tracker: Tracker) -> str:
    """Transfer of the records of the growing file `path` that the tracker lacks, until `orders` end; -> the last order,
    "killed" if there is none."""
    end, before, read, rest = "killed", None, 0, b""
    while True:
        order = orders.readline()
        end = order.decode().strip() or end
        if path.exists():
            with open(path, "rb") as file:
                file.seek(read)
                data = file.read()
            read += len(data)
            *lines, rest = (rest + data).split(b"\n")
            rows: list[Row] = []
            for line in lines:
                record: Record = json.loads(line)
                if record["update"] > tracker.sent:
                    rows.append((record, before))
                before = record
            if rows:
                tracker.log(rows)
        tracker.look()
        if not order:
            return end


def begin(name: str, session: Session) -> Tracker:
    """Open session of a tracker."""
    opened: Tracker = importlib.import_module(f"longhaul.telemetry.trackers.{name}").begin(session)
    return opened


def public(text: str) -> str:
    """Text without the passwords of its addresses and the values of secret variables."""
    for name, value in os.environ.items():
        if len(value) > 7 and name.endswith(("_KEY", "_TOKEN", "_PASSWORD", "_SECRET")):
            text = text.replace(value, "***")
    return re.sub(r"://[^/@\s]+@", "://***@", text)


def main(argv: list[str]) -> int:
    """Body of the process; -> its exit code."""
    folder, name, (pid, last) = Path(argv[0]), argv[1], map(int, argv[2:] or ("0", "0"))
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when all is sent
        signal.signal(number, signal.SIG_IGN)
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    terminal = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to the log

    def say(line: str) -> None:
        with suppress(BrokenPipeError):  # the run was killed, and nobody reads it
            print(public(line), file=terminal, flush=True)

    tracked, title = tracking.load(folder, name), tracking.KINDS[name].title
    assert tracked is not None
    try:
        with open(tracking.log_file(folder, name), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the tracker of a killed run first sends its remaining records
            tracker = begin(name, Session(folder, tracked, pid, say, last))
            end = follow(folder / "metrics.jsonl", sys.stdin.buffer, tracker)
            timer = threading.Timer(MOST_SECONDS, os._exit, (1,))
            timer.daemon = True
            timer.start()
            tracker.finish("done" if end == "killed" and (folder / "result.json").exists() else end)
    except Exception as error:
        print(public(traceback.format_exc()), file=sys.stderr, flush=True)
        say(f"{title} failed: {first_line(error)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
