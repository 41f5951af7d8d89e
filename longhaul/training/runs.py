"""Runs of a folder, read cheaply: status, progress, returns and learning curves. Without JAX.

A thousand runs are listed in less than a second: of a run's metrics some lines at even distances are read, and nothing
again before its files change. Curves read only what a file has grown by.

Of a store's address the small files of each run are kept in the cache, and fetched again where their size changes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime import bounded_json, files, object_store
from longhaul.runtime.errors import RunError
from longhaul.runtime.files import finite_number
from longhaul.training import store

SPARK = 32
"""Points of a sparkline."""

PIECE = 1 << 14
"""Bytes read around each point of a sparkline: a few lines of the log."""

WHOLE = 16 << 20
"""Bytes of the log up to which curves read every line; of a longer one `LINES` lines at even distances."""

LINES = 4000

MOST_DOCUMENT = 64 << 20
"""Bytes of memory of a run's JSON file, the result of a thousand members included."""

LINE = 1 << 16
"""Bytes of a record; what is longer is none of ours."""

MOST_VALUES = 1 << 22
"""Values of all curves of a run, records times metrics: more than a log of `WHOLE` bytes has. A log of a stranger may
have a metric more in each line."""

RECENT = 60.0
"""Seconds since the last record within which a run of another machine counts as running."""

REMOTE = (
    *("run.json", "metrics.jsonl", "members.jsonl", "result.json", "memory.json", "health.jsonl", "report.html"),
    "evaluations.jsonl",
)
"""Files of a run that are fetched from a store to be shown."""

EVALUATIONS = "evaluations.jsonl"
"""File of a run's folder with an evaluation a line, those made while it trains."""

AXES = ("agent_steps", "wall_seconds", "update")
"""Fields of a record that a curve is drawn over."""

RETURN = "episode/return"

NUMBER = rb'": (-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![0-9.eE+-])'
STEPS, VALUE = re.compile(rb'"agent_steps' + NUMBER), re.compile(rb'"episode/return' + NUMBER)


class Summary(NamedTuple):
    """State of a run. Times are Unix seconds."""

    name: str
    recipe: str
    environment: str
    algorithm: str
    seed: int
    members: int  # runs in it, above 1 in a population
    status: str  # running, starting (no record yet), done, stopped, damaged
    steps: int  # agent steps
    total_steps: int
    updates: int
    rate: float | None  # agent steps per second of the last record
    seconds: float  # of wall clock
    value: float | None  # last known return
    trained: float | None  # return of the final evaluation
    spark: list[float]  # returns over the run
    created: float
    updated: float
    checkpoints: list[int]
    init_from: str | None


def names(folder: Path) -> list[str]:
    """Names of the runs in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if os.path.isfile(f"{entry.path}/run.json"))
    return []


def summaries(folder: Path, known: dict[str, tuple[Any, Summary]] | None = None) -> list[Summary]:
    """Summaries of all runs in a folder, newest first. Only runs that changed since `known` was filled are read."""
    known = {} if known is None else known
    locks, present = _locks(), names(folder)
    for gone in known.keys() - set(present):
        del known[gone]
    for name in present:
        running = _is_locked(f"{folder}/{name}", locks)
        state = (running, *(stamp(f"{folder}/{name}/{file}") for file in ("run.json", "metrics.jsonl", "result.json")))
        if known.get(name, (None,))[0] != state or known[name][1].status == "running":
            known[name] = state, _summary(folder / name, running)
    return sorted((summary for _, summary in known.values()), key=lambda s: (-s.created, s.name))


def summary(folder: Path) -> Summary:
    """Summary of one run."""
    return _summary(folder, trains(folder))


def trains(folder: Path) -> bool:
    """True while a process of this machine trains in a run's folder."""
    return _is_locked(folder, _locks())


def document(path: str | Path) -> dict[str, Any]:
    """Object of a JSON file; empty where there is none, or it is damaged."""
    try:
        return bounded_json.read(Path(path), MOST_DOCUMENT)
    except (OSError, ValueError):
        return {}


def config(folder: Path) -> dict[str, Any]:
    """Settings of a run by their dotted names: {"algorithm.lr": 0.0005, "num_envs": 256}."""
    flat: dict[str, Any] = {}

    def visit(value: Any, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                visit(inner, f"{name}.{key}" if name else str(key))
        else:
            flat[name] = value

    visit(document(folder / "run.json").get("run", {}), "")
    return flat


def _summary(folder: Path, running: bool) -> Summary:
    about, result = document(f"{folder}/run.json"), document(f"{folder}/result.json")
    run: dict[str, Any] = about["run"] if isinstance(about.get("run"), dict) else {}
    environment, algorithm = (value if isinstance(value := run.get(key), dict) else {} for key in
                              ("environment", "algorithm"))  # fmt: skip
    last, spark = _glance(f"{folder}/metrics.jsonl")
    created, updated = (stamp(f"{folder}/{name}")[0] / 1e9 for name in ("run.json", "metrics.jsonl"))
    if not run:
        status = "damaged"
    elif running:
        status = "running" if last else "starting"
    elif result:
        status = "done"
    else:
        status = "running" if _is_remote(folder) and time.time() - updated < RECENT else "stopped"
    several = result.get("members")
    members = several if isinstance(several, list) else []
    trained = _dictionary(_dictionary(result.get("evaluation")).get("trained")).get("return")
    return Summary(
        name=folder.name,
        recipe=str(about.get("recipe", "")),
        environment=str(environment.get("env") or environment.get("task") or environment.get("kind", "")).lower(),
        algorithm=str(algorithm.get("kind", "ppo" if run else "")),
        seed=int(finite_number(run.get("seed")) or 0),
        members=len(members) or int(finite_number(_dictionary(run.get("population")).get("seeds")) or 1),
        status=status,
        steps=int(finite_number(last.get("agent_steps")) or 0),
        total_steps=int(finite_number(run.get("total_steps")) or 0),
        updates=int(finite_number(last.get("update")) or 0),
        rate=finite_number(last.get("sps")),
        seconds=finite_number(last.get("wall_seconds")) or 0.0,
        value=spark[-1] if spark else None,
        trained=finite_number(trained),
        spark=spark,
        created=created,
        updated=updated or created,
        checkpoints=files.checkpoint_steps(folder) if status != "damaged" else [],
        init_from=run.get("init_from") and str(run["init_from"]),
    )


def _glance(path: str) -> tuple[dict[str, Any], list[float]]:
    """(last record, returns at even distances, the last known one last) of a log, from a few pieces of it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= SPARK * PIECE // 4:
                lines = file.read().split(b"\n")[:-1]
                ends = lines[-1:]
                chosen = [lines[i] for i in _even(len(lines), SPARK)]
                tail = reversed(lines)
            else:
                chosen = []
                for start in range(0, size - PIECE, (size - PIECE) // (SPARK - 1)):
                    part = os.pread(file.fileno(), PIECE, start).split(b"\n", 2)
                    chosen += part[1:2] if len(part) > 2 else []
                ends = os.pread(file.fileno(), 4 * PIECE, max(0, size - 4 * PIECE)).split(b"\n")[:-1]
                tail = reversed(ends[1:])
    except OSError:
        return {}, []
    last = (_record(ends[-1]) if ends else None) or {}
    spark = [float(match[1]) for line in chosen if (match := VALUE.search(line))]
    newest = next((float(match[1]) for line in tail if (match := VALUE.search(line))), None)
    return last, spark if newest is None or spark[-1:] == [newest] else [*spark, newest]


def _record(line: bytes) -> dict[str, Any] | None:
    """Record of a line; None where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line) if len(line) <= LINE else None
        return record if isinstance(record, dict) else None
    return None


def _even(count: int, most: int) -> list[int]:
    """At most `most` indices of 0 .. count - 1 at even distances, the last one among them."""
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most).astype(int).tolist()


def stamp(path: str | Path) -> tuple[int, int]:
    """(modification time in ns, bytes) of a file; zeros without one."""
    try:
        about = os.stat(path)
    except OSError:
        return 0, 0
    return about.st_mtime_ns, about.st_size


def _locks() -> set[int] | None:
    """Inodes that some process has locked; None where the system does not list them."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    return {int(match[1]) for line in lines if (match := re.search(r" [0-9a-f]+:[0-9a-f]+:(\d+) ", line))}


def _is_locked(folder: str | Path, locks: set[int] | None) -> bool:
    """True while a trainer holds the folder's lock.

    The lock is tried only where the list has its inode: a trainer that begins in that moment would find it taken.
    """
    try:
        return (locks is None or os.stat(folder).st_ino in locks) and store.trains(Path(folder))
    except OSError:
        return False


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------------------------------------- curves


class Curves:
    """Columns of a run's metrics.jsonl. `update` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._clear()

    def _clear(self) -> None:
        self._read, self._before, self.count = 0, b"", 0
        self._columns: dict[str, list[float]] = {}
        self.records: deque[dict[str, Any]] = deque(maxlen=64)
        """The last records."""

    def update(self) -> bool:
        """True if all records are new: the file is another one than before, as after a resume. New ones are read."""
        if not self._path.is_file():
            anew = self.count > 0
            self._clear()
            return anew
        with open(self._path, "rb") as file:
            size, number = os.fstat(file.fileno()).st_size, file.fileno()
            same = os.pread(number, len(self._before), self._read - len(self._before)) == self._before
            same = same and (size <= WHOLE or self.count * len(self._columns) <= MOST_VALUES // 2)
            anew = self.count > 0 and not same
            if not same:
                self._clear()
            if size - self._read > WHOLE:
                for start in np.linspace(self._read, size - 4 * PIECE, LINES).astype(int).tolist():
                    part = os.pread(number, PIECE, start).split(b"\n", 2)
                    self._add(part[1]) if len(part) == 3 else None
                file.seek(size - 4 * PIECE)
                file.readline()
            else:
                file.seek(self._read)
            *lines, rest = file.read().split(b"\n")
            self._read = file.tell() - len(rest)
            self._before = os.pread(number, min(256, self._read), self._read - min(256, self._read))
        for line in lines:
            self._add(line)
        return anew

    def _add(self, line: bytes) -> None:
        record = _record(line)
        if record is None:
            return
        values = {name: value for name, value in record.items() if isinstance(value, int | float) or value is None}
        fresh = sum(name not in self._columns for name in values)
        if (len(self._columns) + fresh) * (self.count + 1) > MOST_VALUES:
            return
        for name, value in values.items():
            column = self._columns.setdefault(name, [])
            column += [math.nan] * (self.count - len(column))
            column.append(math.nan if (known := finite_number(value)) is None else known)
        self.count += 1
        self.records.append(record)

    @property
    def names(self) -> list[str]:
        """Metrics with a value, by name."""
        return sorted(name for name, column in self._columns.items() if any(map(math.isfinite, column)))

    def column(self, name: str) -> np.ndarray:
        """Values [records] of a metric; NaN where a record lacks it."""
        values = self._columns.get(name, [])
        return np.array([*values, *[math.nan] * (self.count - len(values))], float)

    def thinned(self, points: int = 2000, start: int = 0) -> dict[str, list[float | None]]:
        """All columns from record `start` on in at most `points` shared rows.

        Rows stand for stretches of records, two a stretch: its smallest and largest value in their order, so that no
        spike is lost. Of the axes they are the stretch's first and middle value.
        """
        count = self.count - start
        size = 1 if count <= points else -(-count // (points // 2))
        thin: dict[str, list[float | None]] = {}
        for name in self.names:
            values = self.column(name)[start:]
            if size > 1:
                filled = np.concatenate([values, np.full(-count % size, np.nan)]).reshape(-1, size)
                if name in AXES:
                    middle = np.minimum(np.arange(len(filled)) * size + size // 2, count - 1)
                    values = np.stack([filled[:, 0], values[middle]], 1).ravel()
                else:
                    low = np.argmin(np.where(np.isnan(filled), np.inf, filled), 1)
                    high = np.argmax(np.where(np.isnan(filled), -np.inf, filled), 1)
                    order = np.sort(np.stack([low, high], 1), 1)
                    values = np.take_along_axis(filled, order, 1).ravel()
            thin[name] = [value if math.isfinite(value) else None for value in values.tolist()]
        return thin


# ------------------------------------------------------------------------------------------------------ remote folders


def local(where: str | os.PathLike[str]) -> Path:
    """Folder of the runs at `where`: itself, or of a store's address a copy of the runs' small files.

    Each call brings the copy up to date. Raises RunError if the store is out of reach.
    """
    url = object_store.address(where)
    if url is None:
        return Path(where)
    folder = store.staging(url).with_name(store.staging(url).name + "-watched")
    try:
        objects = object_store.Store(url)
        sizes = objects.sizes()
        needed = {
            name: size
            for name, size in sizes.items()
            if name.count("/") == 1 and name.split("/")[1] in REMOTE and ".." not in name
        }
        due = [name for name, size in needed.items() if stamp(folder / name)[1] != size]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda name: objects.get(name, folder / name), due))
    except (object_store.Unreachable, FileNotFoundError) as error:
        raise RunError(str(error)) from error
    for name in sizes:  # of checkpoints their names alone
        if re.fullmatch(rf"[^/.][^/]*/checkpoints/{files.CHECKPOINT.pattern}/{files.MANIFEST}", name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in set(names(folder)) - {path.split("/")[0] for path in needed if path.endswith("/run.json")}:
        files.remove(folder / name)
    return folder


def _is_remote(folder: Path) -> bool:
    return folder.parent.name.endswith("-watched")
