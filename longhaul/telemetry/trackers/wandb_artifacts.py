"""Checkpoints of a run as W&B artifacts: sent by the follower, and fetched where the run's folder is not.

One artifact a run, `checkpoint-ID` of type `model`. Each version is a folder that goes on: one checkpoint and the JSON
files beside it. Its aliases are `latest` and `step-N`. W&B stores a file that did not change once.
"""

from __future__ import annotations

import json
import re
import shutil
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longhaul.runtime import files
from longhaul.runtime.errors import first_line

if TYPE_CHECKING:
    from longhaul.telemetry.tracking import Session

SENT = "wandb.artifacts"
"""File of the run's folder with the names of the checkpoints that the server has."""

LOCAL = ("store.json", "result.json")
"""JSON files that no artifact has: of this machine, or of a run that is done."""


def name_of(run_id: str) -> str:
    return f"checkpoint-{run_id}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the run's checkpoints, in the order in which they were saved."""
    matches = ((files.CHECKPOINT.fullmatch(path.name), path) for path in folder.glob("checkpoints/*"))
    whole = ((int(m[1]), int(m[2] or 0), path) for m, path in matches if m and (path / files.MANIFEST).is_file())
    return [(step, path) for step, _, path in sorted(whole)]


def sender(session: Session, run: Any, online: bool) -> Callable[[], None]:
    """Function that sends the checkpoints that W&B lacks to its run; offline they are logged for `wandb sync`."""
    import wandb

    from longhaul.telemetry.follower import public

    folder, uploads = session.folder, session.tracked.artifact
    if not (online if uploads is None else uploads):
        return lambda: None
    sent = set[str]()
    with suppress(OSError, ValueError):
        sent |= set(json.loads((folder / SENT).read_text())) if online else set()

    def send(step: int, path: Path) -> None:
        about = {"run": folder.name, "update": step}
        artifact = wandb.Artifact(name_of(session.tracked.id), type="model", metadata=about)
        artifact.add_dir(str(path), name=f"checkpoints/{path.name}")
        for file in sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")]):
            if file.name not in LOCAL:
                artifact.add_file(str(file), name=file.name)
        logged = run.log_artifact(artifact, aliases=["latest", f"step-{step}"])
        if online:
            logged.wait()
            files.write(folder / SENT, json.dumps(sorted({*sent, path.name})) + "\n")

    def look() -> None:
        for step, path in checkpoints(folder):
            if path.name in sent:
                continue
            try:
                send(step, path)
            except Exception as error:
                if path.exists():  # else it made room for newer ones
                    print(public(traceback.format_exc()), flush=True)
                    session.say(f"W&B does not take checkpoint {path.name} ({first_line(error)})")
            sent.add(path.name)

    return look


def fetched(runs_dir: Path, run_id: str, project: str, entity: str | None, api: Any = None) -> Path:
    """Folder of the run with that W&B id, made from its newest artifact. Raises LookupError, one line, if W&B has none.

    `api` is a `wandb.Api`. The checkpoint's own digests tell, when the run goes on, whether it came whole.
    """
    if api is None:
        import wandb

        api = wandb.Api()
    path = "/".join(filter(None, (entity, project, f"{name_of(run_id)}:latest")))
    try:
        artifact = api.artifact(path, type="model")
        name = str(artifact.metadata["run"])
    except Exception as error:  # the library has errors of its own
        raise LookupError(
            f"W&B has no artifact {path} ({next(iter(str(error).splitlines()), '')}); check the id, --project and "
            "--entity"
        ) from error
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise LookupError(f"the artifact {path} is of run {name!r}, which is no name of a folder; check the id")
    folder, partial = runs_dir / name, runs_dir / f".{name}.partial"
    if folder.exists():
        raise LookupError(f"{folder} is in the way of W&B's run {run_id}; move it, or give another --runs-dir")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        artifact.download(root=str(partial))
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise LookupError(
            f"the artifact {path} can't be fetched ({next(iter(str(error).splitlines()), '')}); try again"
        ) from error
    files.write(partial / SENT, json.dumps([path.name for _, path in checkpoints(partial)]) + "\n")
    partial.rename(folder)
    return folder
