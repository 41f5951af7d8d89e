"""Weights & Biases tracking of a run: settings, and the process that sends records.

W&B stays out of the run's process: `longhaul.telemetry.wandb_process` follows metrics.jsonl from its own. So a W&B that
is slow, crashes or catches signals cannot delay, end or change a run. Records that W&B lacks after a kill are sent from
metrics.jsonl at the resume, exactly once. Nothing here imports wandb.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import json
import netrc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from longhaul.runtime import files
from longhaul.runtime.launch.process import PIPE, Process
from longhaul.telemetry.sinks import Record, Sink

MODES = ("online", "offline", "disabled")

FILE = "wandb.json"
"""File of a run's folder with its tracking settings."""

LOG = "wandb.log"
"""File of a run's folder with the output of wandb and the tracker."""

PATIENCE, HASTE = 60.0, 10.0
"""Seconds that a finished run, or one stopped by a signal, waits at its end for W&B."""

Note = Callable[[str], None]


class TrackingError(ValueError):
    """A run that cannot be tracked as requested; the message is one line."""


class Tracking(NamedTuple):
    """Tracking settings of a run, stored in its folder."""

    id: str  # W&B's id, the same at each resume
    on: bool
    project: str
    entity: str | None = None  # None: the user's default
    mode: str | None = None  # one of MODES; None: chosen at each start


def run_id(name: str) -> str:
    """W&B id of the run of that name: 8 hexadecimal digits, as in HackMatrix's own trainer."""
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:8]


def load(folder: Path) -> Tracking | None:
    """Tracking settings of the run in `folder`; None if never tracked. Raises TrackingError if the file is damaged."""
    try:
        return Tracking(**json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TrackingError(f"{folder / FILE} can't be read ({error}); remove it, and give --wandb again") from error


def known_id(folder: Path) -> str | None:
    """W&B id of the run in `folder`; None if there is none that can be read."""
    with suppress(TrackingError):
        tracking = load(folder)
        return tracking.id if tracking is not None else None
    return None


def chosen(
    values: Mapping[str, Any], given: frozenset[str], recipe: str, before: Tracking | None = None
) -> Tracking | None:
    """Tracking settings by flags and environment, after `before`; None if tracking was and is off.

    Raises TrackingError if W&B is requested but not installed, or WANDB_MODE is none of MODES. The id of a new run is
    "".
    """
    on = values["wandb"] if "wandb" in given or before is None else before.on
    if before is None and not on:
        return None
    known = before or Tracking("", True, os.environ.get("WANDB_PROJECT") or recipe, os.environ.get("WANDB_ENTITY"))
    changes = {name: values[name] for name in ("project", "entity") if values[name] is not None}
    mode = values["wandb-mode"] if "wandb-mode" in given else known.mode
    tracking = known._replace(on=on, mode=mode, **changes)
    if on and resolved(tracking.mode) != "disabled" and importlib.util.find_spec("wandb") is None:
        raise TrackingError("--wandb needs wandb: pip install 'longhaul-rl[logging]', or leave it out (--no-wandb)")
    return tracking


def save(folder: Path, tracking: Tracking | None) -> None:
    """Store the tracking settings of the run in `folder`, with an id."""
    if tracking is not None:
        tracking = tracking._replace(id=tracking.id or os.environ.get("WANDB_RUN_ID") or run_id(folder.name))
        files.write(folder / FILE, json.dumps(tracking._asdict(), indent=2) + "\n")


# --------------------------------------------------------------------------------------------------- where it goes


def resolved(mode: str | None) -> str:
    """Mode of MODES: as requested, else by WANDB_MODE, else by credentials."""
    mode = mode or os.environ.get("WANDB_MODE") or ("online" if has_credentials() else "offline")
    mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)
    if mode not in MODES:
        raise TrackingError(f"WANDB_MODE is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode


def has_credentials() -> bool:
    """True if wandb would find credentials in the environment, its settings or the netrc file; only the server can
    check them."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = configparser.ConfigParser(interpolation=None)
    config = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        settings.read([Path(config) / "settings"])
    if settings.get("default", "api_key", fallback=""):
        return True
    url = os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback="https://api.wandb.ai")
    host: str = urlsplit(str(url)).netloc
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if netrc.netrc(os.path.expanduser(place)).authenticators(host):
                return True
    return False


# ------------------------------------------------------------------------------------------------------ the process


@contextmanager
def mirror(folder: Path, note: Note, stopping: Callable[[], bool]) -> Iterator[Sink]:
    """Sink through which W&B gets the run's records; each is written to metrics.jsonl first, then to this sink.

    `note` takes one line. `stopping` reports a signal, after which the end waits only briefly. The sink of an untracked
    run does nothing. No failure of W&B raises.
    """
    tracking = load(folder)
    mode = resolved(tracking.mode) if tracking is not None and tracking.on else "disabled"
    process = None if mode == "disabled" else _begun(folder, mode, note)
    if process is None:
        yield Sink()
        return
    if mode == "offline" and tracking is not None and (tracking.mode or os.environ.get("WANDB_MODE")) is None:
        note("W&B: there are no credentials (wandb login, or WANDB_API_KEY), so the run is logged offline")
    said: list[bytes] = []
    lost = False

    def write(record: Record) -> None:
        nonlocal lost
        if lost:
            return
        lost = not process.say(b"\n")
        _relay(process, said, note)
        if lost:
            note(f"W&B has ended ({folder / LOG} says why); the run goes on, and its metrics are in metrics.jsonl")

    end = "failed"
    try:
        yield Sink(write)
        end = "done"
    finally:
        end = "stopped" if stopping() else end
        process.say(b"" if lost else end.encode() + b"\n")
        process.hang_up()
        begun = time.monotonic()
        while process.code is None:
            passed = time.monotonic() - begun
            if passed > (PATIENCE if end == "done" and not stopping() else HASTE):
                process.kill()
                process.wait()
                break
            time.sleep(min(0.01 + passed / 10, 0.2))
        _relay(process, said, note)
        if process.code and not lost:
            note(f"W&B did not finish ({folder / LOG}); what it lacks is sent when the run goes on, or by wandb sync")
        process.end()


def _begun(folder: Path, mode: str, note: Note) -> Process | None:
    """Tracker process, out of reach of the terminal's Ctrl-C."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with open(folder / LOG, "ab") as log:
            process = Process(
                [sys.executable, "-m", "longhaul.telemetry.wandb_process", str(folder), mode, str(os.getpid())],
                variables=os.environ | {"PYTHONPATH": path}, talks=True, out=PIPE, error=log, session=True,
                tied=False,  # it sends the records of a killed run
            )  # fmt: skip
    except OSError as error:
        note(f"W&B can't be started ({error.strerror}); the run goes on without it")
        return None
    assert process.out is not None
    os.set_blocking(process.out.fileno(), False)
    return process


def _relay(process: Process, said: list[bytes], note: Note) -> None:
    """Note the tracker's whole lines."""
    assert process.out is not None
    with suppress(BlockingIOError):
        while part := os.read(process.out.fileno(), 65536):
            said.append(part)
    *lines, rest = b"".join(said).split(b"\n")
    said[:] = [rest]
    for line in lines:
        note(line.decode(errors="replace"))
