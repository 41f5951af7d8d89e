"""Trackio: a run on this machine, in a Space of Hugging Face or on a server of one's own.

Trackio's own variables name the place: TRACKIO_DIR, TRACKIO_SPACE_ID, or TRACKIO_SERVER_URL with TRACKIO_WRITE_TOKEN.
It knows a run by its name alone, so that ends in the run's id. The step is the number of updates; Trackio is asked for
the last one that it has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longhaul.telemetry.tracking import Row, Session, Tracker


def begin(session: Session) -> Tracker:
    """Session of Trackio."""
    import trackio
    from trackio.utils import TRACKIO_DIR

    from longhaul.telemetry.tracking import Tracker

    folder, tracked = session.folder, session.tracked
    about = json.loads((folder / "run.json").read_text())
    run = trackio.init(
        tracked.project, f"{folder.name}-{tracked.id[:8]}", config=about, resume="allow", embed=False,
        auto_log_gpu=False, auto_log_cpu=False,
    )  # fmt: skip
    place = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL") or TRACKIO_DIR
    session.say(f"Trackio: run {run.name} of project {tracked.project} in {place}")

    def log(rows: Sequence[Row]) -> None:
        for record, _ in rows:
            run.log({name: x for name, x in record.items() if isinstance(x, int | float)}, step=record["update"])

    # what `init` has found of the run, on this machine or on the server; there is no public name for it
    return Tracker(run._next_step - 1, log, lambda end: run.finish())
