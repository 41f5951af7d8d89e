"""Driving logs to packed shards: in parallel, resumable, and the same bytes however often it was killed.

Scenarios keep the order of their files and of the records in them; every shard but the last holds `per_shard`. In the
output folder:

    shard-00000.lhs ...   the scenarios (`shard`)
    state.jsonl           the journal: the settings, then for each finished shard the inputs that ended in it, with
                          their size and time of change, and how far it reaches into the next one
    index.json            totals and errors, written last: present means done

A line of the journal is added after its shard is complete under its name, so what the lines say is on the disk; a line
that a kill cut short does not count. Run again with the same settings, a conversion goes on behind the last shard whose
inputs, up to there, are what they were; so files that were added or changed are converted anew from the first of them
on. Of Argoverse 2 and nuPlan only the logs are watched for changes, not their maps.

A file that can't be used is an error in the report, and so is a scenario; neither ends the conversion, not even when
the process that reads a file dies of it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.scenario.from_log import ROUTES
from longhaul.driving.scenario.scenario import CONTROLS
from longhaul.driving.shards import shard
from longhaul.runtime import bounded_json, files
from longhaul.runtime.worker_pool import pool

STATE = "state.jsonl"

Stamp = tuple[str, int, int]
"""An input as it was: its path, its bytes, the time of its last change in ns."""


@dataclass(frozen=True)
class Settings:
    """Settings on which the shards depend beside the inputs."""

    version: int
    per_shard: int
    agents: int
    horizon: int | None
    control: str
    routes: str


class Input(NamedTuple):
    """An input file that all shards up to some point have used up."""

    path: str
    bytes: int
    changed: int  # ns
    scenarios: int
    errors: list[str]


class Line(NamedTuple):
    """A finished shard, as the state has it."""

    shard: str  # "" where the inputs ended with the shard before
    scenarios: int
    bytes: int
    inputs: list[Input]
    taken: int  # records of the input after them
    partial: Stamp | None  # that input's path, bytes and time of change; None where none was begun
    last: bool


def stamp(path: Path) -> Stamp:
    """Path, bytes and time of change; zeros for a file that is gone, which reading it will say."""
    try:
        status = path.stat()
        return str(path.resolve()), status.st_size, status.st_mtime_ns
    except OSError:
        return str(path.resolve()), 0, 0


def resume(out: Path, settings: Settings, stamps: list[Stamp]) -> list[Line]:
    """The lines of the state that still hold: their shards are there, and their inputs are what they were."""
    path = out / STATE
    if not path.exists():
        foreign = next(out.glob(f"*{readers.SHARD_SUFFIX}"), None)
        if foreign is not None:
            raise BadData(f"{out}: holds {foreign.name}, but no {STATE} of a conversion: name another folder")
        if logs := readers.within(out):
            raise BadData(
                f"{out}: holds logs, as {logs[0].relative_to(out)}, and is where shards would go, as the last folder: "
                "name another one after it"
            )
        return []
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True) or ["{}"]
        before = dict(bounded_json.parse(first)["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path}: is no state of a conversion: remove the folder, or name another") from error
    if before != asdict(settings):
        differ = [name for name, value in asdict(settings).items() if before.get(name) != value]
        changed = ", ".join(f"{name} = {before.get(name)}" for name in differ)
        raise BadData(f"{out}: holds shards made with {changed}: name another folder, or remove this one")
    lines: list[Line] = []
    at = 0
    for text in rest:
        line = _parse(text)
        if line is None:
            break
        ends = at + len(line.inputs)
        same = [each[:3] for each in line.inputs] == stamps[at:ends]
        if line.last:
            same &= ends == len(stamps)
        elif line.partial:
            same &= ends < len(stamps) and line.partial == stamps[ends]
        written = out / line.shard
        if not same or (line.shard and not (written.is_file() and written.stat().st_size == line.bytes)):
            break
        at = ends
        lines.append(line)
    return lines


def _parse(text: str) -> Line | None:
    """A line of the state; None where a kill cut it."""
    if not text.endswith("\n"):
        return None
    try:
        line = Line(**bounded_json.parse(text))
        begun = line.partial and (str(line.partial[0]), int(line.partial[1]), int(line.partial[2]))
        return line._replace(inputs=[Input(*each) for each in line.inputs], partial=begun)
    except (ValueError, TypeError, IndexError):
        return None


def rewrite(out: Path, settings: Settings, lines: list[Line]) -> None:
    """State rewritten with the lines that hold; the shards of the others are removed."""
    rows = [{"settings": asdict(settings)}, *(line._asdict() for line in lines)]
    replace_text(out / STATE, "".join(json.dumps(row) + "\n" for row in rows))
    kept = {line.shard for line in lines}
    for path in out.glob(f"shard-*{readers.SHARD_SUFFIX}"):
        if path.name not in kept:
            path.unlink()


def add(out: Path, line: Line) -> None:
    """New line of the state, which is on the disk when this returns."""
    with (out / STATE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line._asdict()) + "\n")
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replacement of a file, which is there whole, or as it was."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    files.sync(path.parent)


LOCK = ".lock"

AHEAD = 2
"""Files that are read ahead for each worker."""


class Progress(NamedTuple):
    """Progress of a conversion."""

    files: int  # done
    of: int
    scenarios: int
    errors: int


class Packed(NamedTuple):
    """Result of one input file."""

    records: list[tuple[str, bytes]]  # id, record
    errors: list[str]


@dataclass(frozen=True)
class Report:
    files: int
    scenarios: int
    bytes: int
    shards: tuple[str, ...]
    errors: tuple[tuple[str, str], ...]  # path, message


def convert(
    given: Sequence[str],
    out: Path,
    *,
    workers: int = 1,
    per_shard: int = 256,
    agents: int = 1,
    horizon: int | None = None,
    control: str = "vehicles",
    routes: str = "log",
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Conversion of all logs (and shards) at `given` to shards in the folder `out`, with `workers` processes.

    `agents`, `horizon`, `control` and `routes` as of `scenario_from_log`; shards keep their routes. `progress` is
    called after each file. `BadData` where a path means nothing, or `out` holds, or is just getting, another
    conversion; errors of files are in the report.
    """
    for name, value, least in (("workers", workers, 1), ("per_shard", per_shard, 1), ("agents", agents, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}: give at least {least}")
    if horizon is not None and horizon < 2:
        raise ValueError(f"horizon is {horizon}: a scenario has at least 2 steps")
    for name, kind, choices in (("control", control, tuple(CONTROLS)), ("routes", routes, ROUTES)):
        if kind not in choices:
            raise ValueError(f"{name} is {kind!r}: choose from {', '.join(choices)}")
    settings = Settings(shard.VERSION, per_shard, agents, horizon, control, routes)
    inside = out.resolve()
    if out.exists() and not out.is_dir():
        raise BadData(f"{out}: a file is there: name the folder to write to last, after the logs")
    files = [path for path in readers.expand(given) if inside not in path.resolve().parents]
    if not files:
        raise BadData(f"{', '.join(given)}: no logs outside of {out}: name where the logs are")
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        stamps = [stamp(path) for path in files]
        lines = resume(out, settings, stamps)
        (out / readers.SHARD_INDEX).unlink(missing_ok=True)
        rewrite(out, settings, lines)
        if not (lines and lines[-1].last):
            lines += _run(out, files, stamps, lines, settings, workers, progress)
        return _finish(out, files, settings, lines)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps a second conversion out of the folder, where the system can; clears what a killed one left."""
    with (out / LOCK).open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError as error:
            raise BadData(f"{out}: another conversion writes there: wait for it, or name another folder") from error
        for left in out.glob(".*.tmp"):
            files.remove(left)
        yield


def _run(
    out: Path,
    files: list[Path],
    stamps: list[Stamp],
    lines: list[Line],
    settings: Settings,
    workers: int,
    progress: Callable[[Progress], None] | None,
) -> list[Line]:
    """Converts what the shards of `lines` do not hold yet; -> the lines of the shards that this made."""
    begin = sum(len(line.inputs) for line in lines)
    skip = lines[-1].taken if lines else 0
    count = sum(line.scenarios for line in lines)
    wrong = sum(len(each.errors) for line in lines for each in line.inputs)
    number = sum(bool(line.shard) for line in lines)
    waiting: list[tuple[str, bytes]] = []
    ended: list[Input] = []
    written: list[Line] = []
    work = partial(pack_file, settings=settings)

    def close(taken: int, begun: Stamp | None, last: bool) -> None:
        """Writes the next shard, then the line that says so."""
        name = f"shard-{number + len(written):05d}{readers.SHARD_SUFFIX}" if waiting else ""
        part = waiting[: settings.per_shard]
        size = shard.write_records(out / name, part) if name else 0
        written.append(Line(name, len(part), size, list(ended), taken, begun, last))
        add(out, written[-1])
        del waiting[: settings.per_shard]
        ended.clear()

    for place, packed in enumerate(_results(files[begin:], work, workers), begin):
        used = Input(*stamps[place], len(packed.records), packed.errors)
        fresh = packed.records[skip:]
        skip = 0
        waiting += fresh
        while len(waiting) > settings.per_shard:
            close(len(packed.records) - (len(waiting) - settings.per_shard), stamps[place], False)
        ended.append(used)
        if len(waiting) == settings.per_shard:
            close(0, None, False)
        count += len(fresh)
        wrong += len(packed.errors)
        if progress is not None:
            progress(Progress(place + 1, len(files), count, wrong))
    close(0, None, True)
    return written


def pack_file(path: Path, settings: Settings) -> Packed:
    """The records of all scenarios of a file, and what is wrong with it; never raises."""
    packed = Packed([], [])
    try:
        with readers.limited(path):
            for make in scenario_source.makers(
                path, agents=settings.agents, horizon=settings.horizon, control=settings.control, routes=settings.routes
            ):
                try:
                    scenario = make()
                    packed.records.append((scenario.id, shard.pack(scenario)))
                except Exception as error:
                    packed.errors.append(_error_line(path, error))
    except Exception as error:
        packed.errors.append(_error_line(path, error))
    return packed


def _error_line(path: Path, error: Exception) -> str:
    """One line that names the file; of what no reader foresaw, the kind of error too."""
    text = " ".join(str(error).split()) or "nothing more is known"
    if not isinstance(error, BadData):
        text = f"{type(error).__name__}: {text}"
    return text if str(path) in text else f"{path}: {text}"


def _results(files: Sequence[Path], work: Callable[[Path], Packed], workers: int) -> Iterator[Packed]:
    """Results of `work` for each of `files`, in their order."""
    if workers == 1 or len(files) < 2:
        yield from map(work, files)
        return
    processes = pool(workers)
    running: deque[tuple[Path, Future[Packed]]] = deque()
    coming = iter(files)
    try:
        while True:
            while len(running) < workers * AHEAD and (path := next(coming, None)) is not None:
                running.append((path, _submit(processes, work, path)))
            if not running:
                return
            path, future = running.popleft()
            try:
                yield future.result()
            except BrokenProcessPool:  # some worker died, by this file or by one after it
                processes.shutdown(wait=False, cancel_futures=True)
                yield _in_own_process(path, work)
                processes = pool(workers)
                for place, (each, running_job) in enumerate(running):
                    if not running_job.done() or running_job.cancelled() or running_job.exception() is not None:
                        running[place] = each, _submit(processes, work, each)
    finally:
        processes.shutdown(wait=False, cancel_futures=True)


def _submit(processes: ProcessPoolExecutor, work: Callable[[Path], Packed], path: Path) -> Future[Packed]:
    try:
        return processes.submit(work, path)
    except BrokenProcessPool as error:  # seen only now: it is dealt with when the file's turn comes
        broken: Future[Packed] = Future()
        broken.set_exception(error)
        return broken


def _in_own_process(path: Path, work: Callable[[Path], Packed]) -> Packed:
    """Result of a file by a process of its own, also where that process dies."""
    alone: ProcessPoolExecutor = pool(1)
    try:
        return alone.submit(work, path).result()
    except BrokenProcessPool:
        return Packed([], [f"{path}: the process that read it died (out of memory?); leave it out, or split it"])
    finally:
        alone.shutdown(wait=False, cancel_futures=True)


def _finish(out: Path, files: list[Path], settings: Settings, lines: list[Line]) -> Report:
    """Writes the index; -> the report."""
    written = [line for line in lines if line.shard]
    inputs = [each for line in lines for each in line.inputs]
    errors = [(str(path), message) for path, each in zip(files, inputs, strict=True) for message in each.errors]
    report = Report(
        files=len(files),
        scenarios=sum(line.scenarios for line in written),
        bytes=sum(line.bytes for line in written),
        shards=tuple(line.shard for line in written),
        errors=tuple(errors),
    )
    document = asdict(settings) | {
        "files": report.files,
        "scenarios": report.scenarios,
        "bytes": report.bytes,
        "shards": [{"name": each.shard, "scenarios": each.scenarios, "bytes": each.bytes} for each in written],
        "errors": [{"path": path, "message": message} for path, message in errors],
    }
    replace_text(out / readers.SHARD_INDEX, json.dumps(document, indent=1) + "\n")
    return report
