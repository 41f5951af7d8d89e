"""The folder of a run: made, found, locked, written and read.

`run.json` holds the Run with every default resolved, so that a folder alone says how to go on, evaluate and repeat.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longhaul.config.population import Population
from longhaul.config.resolve import resolve
from longhaul.config.run import Run
from longhaul.config.serialize import from_dict, to_dict
from longhaul.runtime import files, process_group
from longhaul.runtime.errors import RunError
from longhaul.telemetry import wandb

RUNS = Path("runs")
"""Where runs are if nobody says."""

FORMAT = 1
"""Of run.json and what lies beside it; a folder of another format is refused."""


def new_folder(runs_dir: Path, run: Run, name: str | None, suffix: str | None = None) -> Path:
    """Makes the folder of a new run. Raises RunError where `name` is taken or is no name.

    Without a name it is called after recipe and time, and `suffix`.
    """
    for flag, word in (("run-name", name), ("run-suffix", suffix)):
        if word is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", word):
            raise RunError(f"--{flag} is {word!r}; use letters, digits, '.', '_' and '-', at most 100")
    if name is not None and suffix is not None:
        raise RunError(f"--run-suffix {suffix} and --run-name {name} are both given; leave one out")
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--runs-dir {runs_dir} can't be made ({error.strerror}); give another folder") from error
    stem = name or "-".join(filter(None, (run.recipe, time.strftime("%Y%m%d-%H%M%S"), suffix)))
    for attempt in range(1000):
        folder = runs_dir / (stem if attempt == 0 else f"{stem}-{attempt + 1}")
        try:
            folder.mkdir()
        except FileExistsError:
            if name is not None:
                raise RunError(
                    f"run {name!r} exists in {runs_dir}; choose another --run-name, or --resume {called(folder)}"
                ) from None
            continue
        return folder
    raise RunError(f"{runs_dir} holds a thousand runs of this second; give a --run-name")


def find_folder(runs_dir: Path, run_id: str) -> Path:
    """The folder of a run by its name, path or W&B id; RunError with the nearest names where there is none."""
    import difflib

    for folder in (runs_dir / run_id, Path(run_id)):
        if (folder / "run.json").is_file():
            return folder
    there = sorted(p.parent.name for p in runs_dir.glob("*/run.json"))
    for name in there:
        if run_id in (wandb.run_id(name), wandb.known_id(runs_dir / name)):
            return runs_dir / name
    near = difflib.get_close_matches(run_id, there, n=3, cutoff=0.4) or there[-3:]
    hint = f"did you mean {' or '.join(near)}?" if near else "there are none yet: longhaul train makes one"
    raise RunError(f"no run {run_id!r} in {runs_dir}; {hint}")


def called(folder: Path) -> str:
    """What --resume takes for a run's folder, to be pasted: its name, or its path where it is not in ./runs."""
    usual = os.path.abspath(folder.parent) == os.path.abspath(RUNS)
    return folder.name if usual else shlex.quote(str(folder))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within it no other process trains in `folder`; RunError where one does. A process that is killed lets go too.

    Of processes that train together, the first one locks it.
    """
    if process_group.index() > 0:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process trains in {folder}; let it end, or stop it, before --resume") from None
        except OSError:
            pass  # a file system without locks: no harm as long as only one comes
        yield
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Writes at once or not at all; what is not finite becomes null, since JSON has no word for it."""
    partial_path = path.with_name(path.name + ".partial")
    with files.naming(path):
        with open(partial_path, "w") as file:
            json.dump(files.finite(value), file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_path, path)


def save_run(folder: Path, run: Run, about: dict[str, Any]) -> None:
    """Writes run.json."""
    head = {"format": FORMAT, "id": folder.name, "recipe": run.recipe, "run": to_dict(run)}
    write_json(folder / "run.json", head | about)


def _as_now(run: dict[str, Any]) -> dict[str, Any]:
    """A Run of a run.json with the fields of this version: what was not there yet is as if it still were not."""
    algorithm = run["algorithm"]
    if not isinstance(algorithm, dict):
        raise TypeError(f"its algorithm is {algorithm!r}")
    if algorithm.get("kind", "ppo") in ("ppo", "impala"):  # of one that learns from a replay nothing was written before
        algorithm = {"accumulate": None} | algorithm
    if isinstance(algorithm.get("remat"), bool):  # a switch, once
        algorithm["remat"] = "full" if algorithm["remat"] else "none"
    return {"population": to_dict(Population())} | run | {"algorithm": algorithm}


def load_run(folder: Path) -> Run:
    """The Run of a folder. Raises RunError where run.json can't be read or is of another version."""
    path = folder / "run.json"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} can't be read ({error}); it was not written by longhaul, or is damaged") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise RunError(f"{path} has format {found}, and this version reads {FORMAT}; use the one that wrote it")
    try:
        run: Run = from_dict(Run, _as_now(data["run"]))
        if resolve(run) != run:
            raise TypeError("what it leaves open was decided in the run that wrote it")
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is no run of this version ({error}); use the version that wrote it") from error
    return run
