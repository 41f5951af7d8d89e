"""Folder of a run: creation, lookup, locking, reading and writing.

`run.json` holds the Run with every default resolved, so that the folder is enough to resume, evaluate and repeat; and
in `asked` the settings that the user gave, by their fields.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longhaul.algorithms import external
from longhaul.config.run import Named, Run, from_dict, to_dict
from longhaul.envs.host.registry import is_hosted
from longhaul.runtime import bounded_json, config_fields, files, object_store, process_group
from longhaul.runtime.errors import FieldError, ModuleError, RunError, did_you_mean
from longhaul.runtime.user_modules import Source, is_named, source
from longhaul.telemetry import tracking
from longhaul.telemetry.trackers import wandb, wandb_artifacts
from longhaul.training import hub, legacy_runs, store

RUNS = Path("runs")
"""Default folder of runs."""

FORMAT = 1
"""Version of run.json and the files beside it; folders of other versions are refused."""

UNDECIDED = "what it leaves open was decided in the run that wrote it"


def new_folder(runs_dir: Path, run: Run, name: str | None, suffix: str | None = None) -> Path:
    """Folder of a new run, created; in a store's staging folder where `runs_dir` is its address. Raises RunError if
    `name` is taken or malformed, or the store can't be written to.

    Without a name it is called after recipe, time and `suffix`.
    """
    for flag, word in (("run-name", name), ("run-suffix", suffix)):
        if word is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", word):
            raise RunError(f"--{flag} is {word!r}; use letters, digits, '.', '_' and '-', at most 100")
    if name is not None and suffix is not None:
        raise RunError(f"--run-suffix {suffix} and --run-name {name} are both given; leave one out")
    if url := object_store.address(runs_dir):
        return store.prepared(url, lambda local: new_folder(local, run, name, suffix))
    if (names := sys.getfilesystemencoding()) != "utf-8" and not str(runs_dir.absolute()).isascii():
        raise RunError(  # Orbax can't write there
            f"--runs-dir {runs_dir.absolute()} has letters beyond ASCII, and this locale's names of files are {names}; "
            "set PYTHONUTF8=1, or give another folder"
        )
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
    """Folder of a run by its name, path, address or W&B id; RunError with the nearest names if there is none."""
    import difflib

    if hub.is_address(run_id):
        raise RunError(f"{run_id} is a policy without its run; give a run, or --init-from {run_id} to train")
    if url := object_store.address(run_id):
        return store.local_folder(*url.rsplit("/", 1))
    if url := object_store.address(runs_dir):
        return store.local_folder(url, run_id)
    for folder in (runs_dir / run_id, files.expanded(run_id)):
        if (folder / "run.json").is_file():
            return folder
    if (path := files.expanded(run_id)).exists():
        if around := next((folder for folder in path.parents if (folder / "run.json").is_file()), None):
            raise RunError(f"{run_id} lies in a run; give {around}")
        if path.is_file():
            raise RunError(f"{run_id} is a file, not a run; driving logs are given with --data {run_id}")
        if within := sorted(file.parent for file in path.glob("*/run.json")):
            raise RunError(f"{run_id} is a folder of runs, not a run; give one of its {len(within)}: {within[-1]}")
    names = sorted(p.parent.name for p in runs_dir.glob("*/run.json"))
    for name in names:
        if run_id in (tracking.run_id(name), tracking.known_id(runs_dir / name)):
            return runs_dir / name
    near = difflib.get_close_matches(run_id, names, n=3, cutoff=0.4) or names[-3:]
    hint = did_you_mean(near, "there are none yet: longhaul train makes one")
    empty = f", and the folder {run_id} has no run.json" if path.is_dir() else ""
    raise RunError(f"no run {run_id!r} in {runs_dir}{empty}; {hint}")


def find_or_fetch(runs_dir: Path, run_id: str, recipe: str, project: str | None, entity: str | None) -> Path:
    """Folder of a run as `find_folder` finds it; without one, that of W&B's newest artifact of the run with that id.

    W&B is asked only where its credentials are.
    """
    try:
        return find_folder(runs_dir, run_id)
    except RunError as error:
        online = (
            object_store.address(runs_dir) is None
            and re.fullmatch(r"[\w-]+", run_id)
            and wandb.resolved(None) == "online"
        )
        if not online or importlib.util.find_spec("wandb") is None:
            raise
        project = project or os.environ.get("WANDB_PROJECT") or recipe
        try:
            return wandb_artifacts.fetched(runs_dir, run_id, project, entity or os.environ.get("WANDB_ENTITY"))
        except LookupError as missing:
            raise RunError(f"{error}; {missing}") from missing


def called(folder: Path) -> str:
    """Argument of --resume for a run's folder, quoted for a shell: its name, or its path or address outside ./runs."""
    if url := store.address_of(folder):
        return shlex.quote(url)
    usual = os.path.abspath(folder.parent) == os.path.abspath(RUNS)
    return folder.name if usual else shlex.quote(str(folder))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock of `folder` against other trainers; RunError if one trains there. A killed process releases it.

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
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Atomic write; non-finite numbers become null, since JSON cannot hold them."""
    partial_path = path.with_name(path.name + ".partial")
    with files.naming(path):
        with open(partial_path, "w") as file:
            json.dump(files.finite(value), file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial_path, path)


def save_run(folder: Path, run: Run, about: dict[str, Any]) -> None:
    head = {"format": FORMAT, "id": folder.name, "recipe": run.recipe, "run": to_dict(run)}
    write_json(folder / "run.json", head | about)


def load_asked_settings(folder: Path) -> dict[str, Any]:
    """Settings that a run's user gave, by field; empty for a run that an older version wrote, or that has no folder."""
    path = folder / "run.json"
    asked: dict[str, Any] = bounded_json.read(path).get("asked", {}) if path.is_file() else {}
    return asked


def load_run(folder: Path) -> Run:
    """Run of a folder. Raises RunError if run.json can't be read or is of another version; ModuleError, a RunError, if
    it needs a module of the user's own that can't be imported."""
    from longhaul.config.resolve import named, resolve

    run = read_run(folder)
    if isinstance(task := run.environment, Named) and is_hosted(task.env):  # whose class or library may be gone
        try:
            named(task)
        except ValueError as error:
            raise ModuleError(f"run {folder.name}: --env {task.env}: {error}") from error
    try:
        if resolve(run, stored=True) != run:  # other processes may evaluate it than those that trained it
            raise TypeError(UNDECIDED)
    except ModuleError as error:
        raise ModuleError(f"run {folder.name}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(folder, error) from error
    return run


def read_run(folder: Path) -> Run:
    """Run of a folder as `load_run` has it, without JAX: bounds are checked, but not that sizes fit each other."""
    path = folder / "run.json"
    try:
        data = bounded_json.read(path)
    except (OSError, ValueError) as error:
        why = f"{path}: {error.strerror}" if isinstance(error, OSError) else error
        raise RunError(
            f"can't read {why}; it was not written by longhaul, or is damaged: bring back a copy, or name another run"
        ) from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise RunError(f"{path} has format {version}, and this version reads {FORMAT}; use the one that wrote it")
    try:
        run: Run = from_dict(Run, legacy_runs.as_current(data["run"]))
        config_fields.check(run)
        if run.model < 1:
            raise FieldError("mesh", run.mesh, "model must be at least 1")
        if None in (run.devices, run.threads, run.log_interval, run.block, run.base_batch, run.evaluation_episodes):
            raise TypeError(UNDECIDED)
    except ModuleError as error:
        raise ModuleError(f"run {folder.name}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(folder, error) from error
    return run


def read_result(folder: Path) -> dict[str, Any]:
    """Result of a run that is done. Raises OSError; ValueError, one line, for a file that is none."""
    path = folder / "result.json"
    result = bounded_json.read(path)
    members = result.get("members")
    each = [result] if members is None else members if isinstance(members, list) else [None]
    scores = [row.get("evaluation") if isinstance(row, dict) else None for row in each]
    known = all(isinstance(row, dict) and all(isinstance(value, dict) for value in row.values()) for row in scores)
    steps = result.get("agent_steps", 0)
    if not known or type(steps) is not int or _is_long(result):
        raise ValueError(f"{path} is no result of a run; remove it, and go on with --resume {folder}")
    return result


def _is_long(value: Any) -> bool:
    """True where a whole number of hundreds of digits is in a document."""
    if isinstance(value, dict | list):
        return any(map(_is_long, value.values() if isinstance(value, dict) else value))
    return type(value) is int and value.bit_length() > 64


def own_algorithm(folder: Path) -> str | None:
    """Name of a run's algorithm where it is the user's own, whose module is not imported."""
    try:
        kind = bounded_json.read(folder / "run.json")["run"]["algorithm"]["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(kind) if is_named(str(kind)) else None


def sources(run: Run) -> dict[str, Source]:
    """Origins of what is the user's own in a run, beside its environment, by flag; each module is imported."""
    names = {"algorithm": external.name_of(run.algorithm)}
    names |= {leaf.name: leaf.value for leaf in config_fields.walk(run) if leaf.name in ("torso", "reward", "check")}
    by_flag = {}
    for flag, name in names.items():
        if name and is_named(name):
            try:
                by_flag[flag] = source(name)
            except ValueError as error:
                raise ModuleError(f"--{flag} {name}: {error}") from error
    return by_flag


def _foreign(folder: Path, error: Exception) -> RunError:
    return RunError(f"{folder / 'run.json'} is no run of this version ({error}); use the version that wrote it")
