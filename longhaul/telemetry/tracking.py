"""Trackers of a run: settings, and the processes that send its records to them.

No tracker runs in the run's process: `longhaul.telemetry.follower` follows metrics.jsonl from its own, one process a
tracker. So a tracker that is slow, crashes or catches signals cannot delay, end or change a run, nor another tracker.
Records that a tracker lacks after a kill are sent from metrics.jsonl at the resume, exactly once. No tracker's library
is imported here, and no secret is kept: credentials stay in the environment and the files of the library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from longhaul.runtime import bounded_json, files
from longhaul.runtime.launch.process import PIPE, Process
from longhaul.telemetry import sinks
from longhaul.telemetry.sinks import Record, Sink
from longhaul.telemetry.trackers import swanlab, wandb

PATIENCE, HASTE = 60.0, 10.0
"""Seconds that a finished run, or one stopped by a signal, waits at its end for its trackers."""

MODULE = "longhaul.telemetry.follower"
"""Program of a tracker's process."""

Note = Callable[[str], None]

Row = tuple[Record, Record | None]
"""Record and the one before it, None for the first."""


class TrackingError(ValueError):
    """A run that cannot be tracked as requested; the message is one line."""


class Kind(NamedTuple):
    """Tracker's names: in messages, of the extra that installs it, of the variables with its project and its entity."""

    title: str
    extra: str
    project: str | None
    entity: str | None


KINDS = {
    "wandb": Kind("W&B", "logging", "WANDB_PROJECT", "WANDB_ENTITY"),
    "mlflow": Kind("MLflow", "trackers", "MLFLOW_EXPERIMENT_NAME", None),
    "swanlab": Kind("SwanLab", "trackers", "SWANLAB_PROJ_NAME", "SWANLAB_WORKSPACE"),
    "trackio": Kind("Trackio", "trackers", None, None),
}
"""Trackers by the names of their libraries; `longhaul.telemetry.trackers` has a module for each."""

FLAGS = ("track", "wandb", "project", "entity", "wandb-mode", "artifact", "rewind")
"""Flags of `longhaul train` for trackers."""


class Tracking(NamedTuple):
    """Settings of a run's tracker, stored in its folder as NAME.json; NAME.log has its output."""

    id: str  # the tracker's id of the run, the same at each resume
    on: bool
    project: str
    entity: str | None = None  # None: the user's default
    mode: str | None = None  # of W&B; None: chosen at each start
    artifact: bool | None = None  # whether W&B gets the checkpoints; None: online
    rewind: bool = False  # whether the next session drops what W&B has after the checkpoint


class Session(NamedTuple):
    """Run whose records a tracker shall receive."""

    folder: Path
    tracked: Tracking
    pid: int  # of the run's process, 0 if it is gone
    say: Note  # prints a line in the run's terminal
    last: int = 0  # update of its checkpoint


class Tracker(NamedTuple):
    """Open session of a tracker, as `begin(session)` of its module returns it."""

    sent: int  # last update that it has
    log: Callable[[Sequence[Row]], None]  # sends records, in order
    finish: Callable[[str], None]  # by the run's end: "done", "stopped", "failed" or "killed"
    look: Callable[[], None] = lambda: None  # sends what else is new in the run's folder, its checkpoints


def file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def log_file(folder: Path, name: str) -> Path:
    """Output of a tracker and its process."""
    return folder / f"{name}.log"


def run_id(name: str) -> str:
    """W&B id of the run of that name: 8 hexadecimal digits, as in HackMatrix's own trainer."""
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:8]


def load(folder: Path, name: str = "wandb") -> Tracking | None:
    """Settings of a tracker of the run in `folder`; None if it never had it. TrackingError for a damaged file."""
    path = file(folder, name)
    try:
        return Tracking(**bounded_json.read(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TrackingError(f"{path} can't be read ({error}); remove it, and give --track {name} again") from error


def load_all(folder: Path) -> dict[str, Tracking]:
    """Settings of all trackers that the run in `folder` has or had. Raises TrackingError for a damaged file."""
    return {name: tracked for name in KINDS if (tracked := load(folder, name)) is not None}


def known_id(folder: Path) -> str | None:
    """W&B id of the run in `folder`; None if there is none that can be read."""
    with suppress(TrackingError):
        tracking = load(folder)
        return tracking.id if tracking is not None else None
    return None


def chosen(
    values: Mapping[str, Any], explicit: frozenset[str], recipe: str, before: Mapping[str, Tracking] | None = None
) -> dict[str, Tracking]:
    """Settings of trackers by flags and environment, after `before`; those that were and are off are left out.

    `values` has at least the `explicit` flags. Raises TrackingError for an unknown tracker, one not installed, or a
    mode of the environment that its library lacks. The id of a new one is "".
    """
    before = before or {}
    names = {name for name, tracked in before.items() if tracked.on}
    if "track" in explicit:
        typed = [values["track"]] if isinstance(values["track"], str) else values["track"]
        names = set(typed) - {"none"}
        if unknown := sorted(names - set(KINDS)):
            raise TrackingError(f"--track {unknown[0]} is no tracker; give some of {', '.join(KINDS)}, or none")
    if "wandb" in explicit:
        names = names | {"wandb"} if values["wandb"] else names - {"wandb"}
    trackers = {}
    for name, kind in KINDS.items():
        if name not in names and name not in before:
            continue
        project, entity = (os.environ.get(variable) if variable else None for variable in (kind.project, kind.entity))
        known = before.get(name) or Tracking("", True, project or recipe, entity)
        changes = {flag: values[flag] for flag in ("project", "entity") if values.get(flag) is not None}
        if name == "wandb":
            changes |= {"mode": values["wandb-mode"]} if "wandb-mode" in explicit else {}
            changes |= {"artifact": values["artifact"]} if "artifact" in explicit else {}
            changes["rewind"] = "rewind" in explicit and values["rewind"]
        trackers[name] = known._replace(on=name in names, **changes)
        if name in names and resolved(name, trackers[name]) != "disabled" and importlib.util.find_spec(name) is None:
            asked, negation = ("--wandb", " (--no-wandb)") if name == "wandb" else (f"--track {name}", "")
            raise TrackingError(
                f"{asked} needs {name}: pip install 'longhaul-rl[{kind.extra}]', or leave it out{negation}"
            )
    return trackers


def idle(explicit: frozenset[str], tracked: Mapping[str, Tracking]) -> Iterator[str]:
    """Lines on the flags `explicit` that no tracker takes."""
    active = {name for name, tracking in tracked.items() if tracking.on}
    for flag, takers in (("project", set(KINDS)), ("entity", {"wandb", "swanlab"})):
        if flag in explicit and not active & takers:
            yield f"--{flag} does nothing without --wandb"
    for flag in ("wandb-mode", "artifact", "rewind"):
        if flag in explicit and "wandb" not in active:
            yield f"--{flag} does nothing without --wandb"
    if "rewind" in explicit and "resume" not in explicit:
        yield "--rewind does nothing without --resume"


def save(folder: Path, tracked: Mapping[str, Tracking]) -> None:
    """Store the settings of the run's trackers in `folder`, each with an id."""
    for name, tracking in tracked.items():
        fresh = os.environ.get("WANDB_RUN_ID") or run_id(folder.name) if name == "wandb" else uuid.uuid4().hex[:21]
        tracking = tracking._replace(id=tracking.id or fresh)
        files.write(file(folder, name), json.dumps(tracking._asdict(), indent=2) + "\n")


def resolved(name: str, tracked: Tracking) -> str:
    """Mode of a tracker: "disabled", or any other word. Raises TrackingError for one that its library lacks."""
    try:
        if name == "wandb":
            return wandb.resolved(tracked.mode)
        return swanlab.resolved() if name == "swanlab" else "online"
    except ValueError as error:
        raise TrackingError(str(error)) from error


# ------------------------------------------------------------------------------------------------------ the processes


@contextmanager
def mirror(folder: Path, note: Note, stopping: Callable[[], bool]) -> Iterator[Sink]:
    """Sink through which the run's trackers get its records; each is written to metrics.jsonl first, then to this sink.

    `note` takes one line. `stopping` reports a signal, after which the end waits only briefly. The sink of an untracked
    run does nothing. No failure of a tracker raises.
    """
    names = [name for name, tracked in load_all(folder).items() if tracked.on and resolved(name, tracked) != "disabled"]
    records = sinks.read(folder / "metrics.jsonl") if names and (folder / "metrics.jsonl").exists() else []
    last = int(records[-1]["update"]) if records else 0
    followers = [Follower(folder, name, note, last) for name in names]

    def write(record: Record) -> None:
        for follower in followers:
            follower.say(b"\n")

    end = "failed"
    try:
        yield Sink(write) if followers else Sink()
        end = "done"
    finally:
        end = "stopped" if stopping() else end
        word = end.encode() + b"\n"
        for follower in followers:
            follower.hang_up(word)
        begun = time.monotonic()
        while any(follower.sends(word) for follower in followers):
            passed = time.monotonic() - begun
            if passed > (PATIENCE if end == "done" and not stopping() else HASTE):
                break
            time.sleep(min(0.01 + passed / 10, 0.2))
        for follower in followers:
            follower.end()


class Follower:
    """Process that sends a run's records to one tracker, from the run's side. A killed one is started once more."""

    def __init__(self, folder: Path, name: str, note: Note, last: int = 0) -> None:
        """`last` is the update of the run's checkpoint."""
        self._last = str(last)
        self._folder, self._name, self._title, self._note = folder, name, KINDS[name].title, note
        self._log = log_file(folder, name)
        self._lost, self._again = False, False
        self._part, self._noted = b"", set[str]()
        self._process = self._start()

    def say(self, line: bytes) -> None:
        """Exchange of words to the process and its lines to the run."""
        if self._lost or self._process is None:
            return
        alive = self._process.say(line)
        self._relay()
        if alive:
            return
        self._process.wait(1.0)
        if not self._revived(line):
            self._lost = True
            rest = "the run goes on, and its metrics are in metrics.jsonl"
            self._note(f"{self._title} has ended ({self._log} says why); {rest}")

    def hang_up(self, last: bytes) -> None:
        """End of the words to the process."""
        self.say(last)
        if self._process is not None:
            self._process.hang_up()

    def sends(self, last: bytes) -> bool:
        """True while the process sends the rest, after `hang_up(last)`."""
        if self._process is None or self._process.code is None:
            return self._process is not None
        if self._lost or not self._revived(last):
            return False
        self._process.hang_up()
        return True

    def _revived(self, line: bytes) -> bool:
        """True if the process was killed for the first time, and another one has the words."""
        assert self._process is not None
        if self._again or (self._process.code or 0) >= 0:
            return False
        self._relay()
        self._note(f"{self._title}'s process was killed; it is started again, and sends what is missing")
        self._process.end()
        self._again, self._process = True, self._start()
        self.say(line)
        return True

    def end(self) -> None:
        """End the process, and note whether it has sent all."""
        if self._process is None:
            return
        if self._process.code is None:
            self._process.kill()
            self._process.wait()
        self._relay()
        if self._process.code and not self._lost:
            rest = f"what it lacks is sent when the run goes on, or by python -m {MODULE} {self._folder} {self._name}"
            self._note(f"{self._title} did not finish ({self._log}); {rest}")
        self._process.end()

    def _start(self) -> Process | None:
        """The process, out of reach of the terminal's Ctrl-C."""
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            with open(self._log, "ab") as log:
                process = Process(
                    [sys.executable, "-m", MODULE, str(self._folder), self._name, str(os.getpid()), self._last],
                    variables=os.environ | {"PYTHONPATH": path}, talks=True, out=PIPE, error=log, session=True,
                    tied=False,  # it sends the records of a killed run
                )  # fmt: skip
        except OSError as error:
            self._note(f"{self._title} can't be started ({error.strerror}); the run goes on without it")
            return None
        assert process.out is not None
        os.set_blocking(process.out.fileno(), False)
        return process

    def _relay(self) -> None:
        """Note the process's whole lines, each once."""
        assert self._process is not None
        assert self._process.out is not None
        with suppress(BlockingIOError):
            while part := os.read(self._process.out.fileno(), 65536):
                self._part += part
        *lines, self._part = self._part.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if text not in self._noted:
                self._noted.add(text)
                self._note(text)
