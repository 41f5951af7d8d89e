"""Weights & Biases beside a run: what is tracked where, and the process that sends it.

W&B is kept out of the run's process: `longhaul.telemetry.wandb_process` follows metrics.jsonl from a process of its
own. So a W&B that
is slow, that crashes or that catches signals cannot hold up, end or change a run; and what W&B lacks after any kill is
sent from metrics.jsonl when the run goes on, neither twice nor never. Nothing here imports wandb.
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
"""Of a run's folder: how it is tracked."""

LOG = "wandb.log"
"""Of a run's folder: what wandb and the tracker have to say."""

PATIENCE, HASTE = 60.0, 10.0
"""Seconds that a run which is done, or which a signal stops, waits at its end for W&B."""

Note = Callable[[str], None]


class TrackingError(ValueError):
    """A run that cannot be tracked as it is asked for; the message is one line."""


class Tracking(NamedTuple):
    """How a run is tracked, as its folder keeps it."""

    id: str  # W&B's, the same whenever the run goes on
    on: bool
    project: str
    entity: str | None = None  # None: the user's own
    mode: str | None = None  # one of MODES; None: told anew each time


def run_id(name: str) -> str:
    """The W&B id of the run of that name: 8 hexadecimal digits, as HackMatrix's own trainer has them."""
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:8]


def load(folder: Path) -> Tracking | None:
    """How the run in `folder` is tracked; None where it never was. Raises TrackingError where the file is damaged."""
    try:
        return Tracking(**json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TrackingError(f"{folder / FILE} can't be read ({error}); remove it, and give --wandb again") from error


def known_id(folder: Path) -> str | None:
    """The W&B id that the run in `folder` has; None where it has none that can be read."""
    with suppress(TrackingError):
        tracking = load(folder)
        return tracking.id if tracking is not None else None
    return None


def chosen(
    values: Mapping[str, Any], given: frozenset[str], recipe: str, before: Tracking | None = None
) -> Tracking | None:
    """What the flags and the environment ask for, after `before`; None where nothing was and is to be tracked.

    Raises TrackingError where W&B is wanted and not installed, or WANDB_MODE is none of MODES. The id is "" for a run
    that has none yet.
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


def unused(given: frozenset[str], tracking: Tracking | None) -> list[str]:
    """The flags that were given and do nothing, since the run is not tracked."""
    if tracking is not None and tracking.on:
        return []
    return [f"--{name}" for name in ("project", "entity", "wandb-mode") if name in given]


def save(folder: Path, tracking: Tracking | None) -> None:
    """Keeps how the run in `folder` is tracked, with an id of its own."""
    if tracking is not None:
        tracking = tracking._replace(id=tracking.id or os.environ.get("WANDB_RUN_ID") or run_id(folder.name))
        files.write(folder / FILE, json.dumps(tracking._asdict(), indent=2) + "\n")


# --------------------------------------------------------------------------------------------------- where it goes


def resolved(mode: str | None) -> str:
    """One of MODES: as asked for, else by WANDB_MODE, else by whether there are credentials."""
    mode = mode or os.environ.get("WANDB_MODE") or ("online" if has_credentials() else "offline")
    mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)
    if mode not in MODES:
        raise TrackingError(f"WANDB_MODE is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode


def has_credentials() -> bool:
    """Whether wandb would find credentials: in the environment, its settings or the netrc file. Their worth, the server
    tells."""
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
    """Within it, W&B gets the records of the run's metrics.jsonl: each is to be written there first, then to the sink.

    `note` says one line; `stopping` tells whether a signal came, and then the end waits but shortly. Where the run is
    not tracked, the sink does nothing. No failure of W&B is an exception.
    """
    tracking = load(folder)
    mode = resolved(tracking.mode) if tracking is not None and tracking.on else "disabled"
    process = None if mode == "disabled" else _begun(folder, mode, note)
    if process is None:
        yield Sink(lambda record: None, lambda: None)
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
        yield Sink(write, lambda: None)
        end = "done"
    finally:
        end = "stopped" if stopping() else end
        _finish(process, b"" if lost else end.encode() + b"\n", end, stopping)
        _relay(process, said, note)
        if process.code and not lost:
            note(f"W&B did not finish ({folder / LOG}); what it lacks is sent when the run goes on, or by wandb sync")
        process.end()


def _begun(folder: Path, mode: str, note: Note) -> Process | None:
    """The tracker's process, out of reach of the terminal's Ctrl-C."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with open(folder / LOG, "ab") as log:
            process = Process(
                [sys.executable, "-m", "longhaul.telemetry.wandb_process", str(folder), mode, str(os.getpid())],
                variables=os.environ | {"PYTHONPATH": path}, talks=True, out=PIPE, error=log, session=True,
                tied=False,  # it sends what a run that is killed has written
            )  # fmt: skip
    except OSError as error:
        note(f"W&B can't be started ({error.strerror}); the run goes on without it")
        return None
    assert process.out is not None
    os.set_blocking(process.out.fileno(), False)
    return process


def _relay(process: Process, said: list[bytes], note: Note) -> None:
    """Notes the whole lines that the tracker has said."""
    assert process.out is not None
    with suppress(BlockingIOError):
        while part := os.read(process.out.fileno(), 65536):
            said.append(part)
    *lines, rest = b"".join(said).split(b"\n")
    said[:] = [rest]
    for line in lines:
        note(line.decode(errors="replace"))


def _finish(process: Process, word: bytes, end: str, stopping: Callable[[], bool]) -> None:
    """Tells the tracker the end, and waits for its own as long as there is time; then it is killed."""
    process.say(word)
    process.hang_up()
    begun = time.monotonic()
    while process.code is None:
        passed = time.monotonic() - begun
        if passed > (PATIENCE if end == "done" and not stopping() else HASTE):
            process.kill()
            process.wait()
            return
        time.sleep(min(0.01 + passed / 10, 0.2))
