"""SwanLab: an experiment of its cloud, or an offline folder of this machine.

Its folder is SWANLAB_LOG_DIR, or `swanlab` in the run's. SwanLab says nothing of what it has: offline each session
writes the whole history again, and removes the folder of the session before; online the experiment goes on by its id,
and SwanLab ignores the steps that it has. The step is the number of updates.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longhaul.runtime import bounded_json

if TYPE_CHECKING:
    from longhaul.telemetry.tracking import Row, Session, Tracker

MODES = ("cloud", "local", "offline", "disabled")

OWN = "swanlab.session"
"""File of the run's folder that names the folder of the last session."""


def resolved() -> str:
    """Mode of MODES by SWANLAB_MODE, else by credentials. Raises ValueError for no mode."""
    home = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser()
    signed_in = os.environ.get("SWANLAB_API_KEY") or (home / ".netrc").is_file()
    mode = os.environ.get("SWANLAB_MODE") or ("cloud" if signed_in else "offline")
    mode = "cloud" if mode == "online" else mode
    if mode not in MODES:
        raise ValueError(f"SWANLAB_MODE is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode


def begin(session: Session) -> Tracker:
    """Session of SwanLab."""
    import swanlab

    from longhaul.telemetry.tracking import Tracker

    folder, tracked, mode = session.folder, session.tracked, resolved()
    about = bounded_json.read(folder / "run.json")
    where = Path(os.environ.get("SWANLAB_LOG_DIR") or folder / "swanlab").resolve()
    own = folder / OWN
    if mode != "cloud" and own.is_file():  # each of this run's records is written again
        shutil.rmtree(own.read_text(), ignore_errors=True)
    before = set(where.glob("run-*"))
    resumed = {"id": tracked.id, "resume": "allow"} if mode == "cloud" else {}
    run = swanlab.init(
        mode=mode, project=tracked.project, workspace=tracked.entity, experiment_name=folder.name, config=about,
        logdir=str(where), **resumed,
    )  # fmt: skip
    if mode != "cloud":
        (place,) = set(where.glob("run-*")) - before
        own.write_text(str(place))
        session.say(f"SwanLab: {mode}; swanlab sync {place}")
    else:
        session.say(f"SwanLab: {getattr(getattr(run, 'public', None), 'cloud', None) or tracked.project}")

    def log(rows: Sequence[Row]) -> None:
        for record, _ in rows:
            numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
            swanlab.log(numbers, step=record["update"])

    def finish(end: str) -> None:
        crashed: Any = "crashed"
        with suppress(ImportError):
            from swanlab.data import State  # before version 0.7

            crashed = State.CRASHED
        swanlab.finish(**({} if end == "done" else {"state": crashed, "error": end}))

    return Tracker(0, log, finish)
