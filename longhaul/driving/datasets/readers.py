"""Paths to logs: what a user names on the command line, whatever is in it.

The format of a file is told by its content. In a folder, or through a glob, files whose suffix no format has are
passed over; a file that is named must be readable.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from longhaul.driving.datasets import (
    argoverse,
    geopackage,
    gpudrive,
    nuplan,
    scenarionet,
    womd,
)
from longhaul.driving.datasets.log import BadData, Log, Malformed, told
from longhaul.runtime.worker_pool import OutOfTime, bounded

Found = TypeVar("Found")

WOMD_EXAMPLE, WOMD_SCENARIO = womd.EXAMPLE, womd.SCENARIO
GPUDRIVE, SCENARIONET, ARGOVERSE = "gpudrive", "scenarionet", "argoverse2"
NUPLAN = "nuplan"
TFRECORD = "tfrecord"
SHARD = "shard"
"""Scenarios that are compiled already: no logs; `shards.shard` reads them."""

SHARD_SUFFIX = ".lhs"

SHARD_INDEX = "index.json"
"""File beside the shards of a conversion: its totals, no log."""

SHARD_MAGIC = b"\x89LHSHRD\n"
"""First bytes of a shard of any version: the first is no text, and a transfer that changes line ends is detected."""

KNOWN = (
    "a TFRecord (WOMD tf.Example or Scenario), GPUDrive JSON, a ScenarioNet pickle, an Argoverse 2 parquet, "
    f"a nuPlan .db, a {SHARD_SUFFIX} shard of converted logs"
)

MEMORY, MEMORY_PER_BYTE = 2 << 30, 16
SECONDS, SECONDS_PER_BYTE = 60.0, 1e-5
"""Bytes of memory and seconds of CPU time that a file may take, and how many more for each of its bytes: what no other
bound has found ends there."""

LARGEST = 1 << 28
"""Bytes of a file that is read whole; TFRecords are read record by record."""


def expand(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` mean, each once: files as they are, folders searched through, globs ("data/**/*.json").

    Files keep the order of `paths`, those of one folder or glob are sorted. `BadData` where a path means nothing.
    """
    found: dict[Path, Path] = {}
    for given in paths:
        for path in _expand(str(given)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _expand(given: str) -> list[Path]:
    try:
        path = Path(given).expanduser()
        folder, there = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no right to look, no such user's home, a zero byte
        raise BadData(f"{given}: cannot be read: {error}") from error
    if folder:
        files = within(path)
        if not files:
            raise BadData(f"{given}: no driving logs in this folder: put {KNOWN} there, or name another")
        return files
    if there:
        return [path]
    if not glob.has_magic(given):
        raise BadData(f"{given}: no such file or folder: check the path")
    files = []
    for match in sorted(glob.glob(str(path), recursive=True)):
        files += within(Path(match)) if Path(match).is_dir() else [Path(match)] if _known(Path(match)) else []
    if not files:
        raise BadData(
            f"{given}: no driving logs match: check the pattern (quote it, so that the shell leaves it alone)"
        )
    return files


def within(folder: Path) -> list[Path]:
    """The files under a folder that look like logs, sorted."""

    def refuse(error: OSError) -> None:
        raise BadData(
            f"{error.filename}: this folder cannot be read: {error.strerror}; change its permissions"
        ) from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        files += [Path(parent) / name for name in sorted(names) if _known(Path(name))]
    return files


def _known(path: Path) -> bool:
    """True if a file that nobody named may be a log: by its name alone."""
    name = path.name.lower()
    if name.startswith("."):
        return False
    if name.endswith(".json"):
        return name != SHARD_INDEX and not name.startswith(argoverse.MAP_PREFIX)
    if name.endswith(".pkl"):
        return name not in scenarionet.SUMMARIES
    return ".tfrecord" in name or name.endswith((".tfrecords", ".parquet", ".db", SHARD_SUFFIX))


@contextmanager
def limited(path: Path) -> Iterator[None]:
    """Context that reads a file under limits of the whole process (`bounded`); `BadData` beyond them."""
    try:
        size = path.stat().st_size
    except OSError:  # reading reports it
        size = 0
    memory, seconds = MEMORY + MEMORY_PER_BYTE * size, SECONDS + SECONDS_PER_BYTE * size
    try:
        with bounded(memory, seconds):
            yield
    except (MemoryError, OutOfTime) as error:
        what = f"{memory >> 20:,} MB of memory" if isinstance(error, MemoryError) else f"{seconds:,.0f} s of CPU time"
        raise BadData(f"{path}: takes more than {what}: leave it out, or split it") from error


def read(path: Path) -> Iterator[Log]:
    """The logs of one file, one at a time; `BadData` names the file and what is wrong with it."""
    for _, log in scan(path):
        yield log


def scan(path: Path) -> Iterator[tuple[str, Log]]:
    """(format, log) of each scenario of a file, as `read`."""
    kind = detect(path)
    if kind == SHARD:
        raise BadData(f"{path}: holds compiled scenarios, no logs: give the logs that it was converted from")
    if kind == TFRECORD:
        for number, (offset, payload) in enumerate(womd.records(path)):
            kind = womd.kind_of(payload)
            where = f"{path}: record {number} at byte {offset}"
            if kind == "":
                raise BadData(
                    f"{where}: is neither a WOMD tf.Example nor a WOMD Scenario; give a file of the motion dataset"
                )
            reader = womd.read_example if kind == WOMD_EXAMPLE else womd.read_scenario
            yield kind, _guarded(partial(reader, payload), f"{where}: no usable {kind} record")
        return
    if kind == NUPLAN:
        logs = nuplan.read(path)
        while (log := _guarded(lambda: next(logs, None), f"{path}: no usable {kind} file")) is not None:
            yield kind, log
        return
    readers: dict[str, Callable[[], Log]] = {
        GPUDRIVE: lambda: gpudrive.read(_whole(path), path),
        SCENARIONET: lambda: scenarionet.read(_whole(path)),
        ARGOVERSE: lambda: argoverse.read(path),
    }
    yield kind, _guarded(readers[kind], f"{path}: no usable {kind} file")


def _guarded(reader: Callable[[], Found], where: str) -> Found:
    """Result of `reader`, its `Malformed` as `BadData`."""
    try:
        with np.errstate(all="ignore"):  # numbers out of range are found by their value
            return reader()
    except Malformed as error:
        raise BadData(f"{where}: {told(error)}; fetch or convert it again") from error


def _whole(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise BadData(
                f"{path}: has {size} bytes; files of this format are read whole and end at {LARGEST}: split it"
            )
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror or error}") from error


def detect(path: Path) -> str:
    """The format of a file by its first bytes; `BadData` where it has none that is known."""
    try:
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError as error:
        raise BadData(
            f"{path}: cannot be read: {error.strerror or error}; check the path and its permissions"
        ) from error
    if not head:
        raise BadData(f"{path}: is empty; fetch or write it again")
    if womd.begins(head):
        return TFRECORD
    # ScenarioNet calls a pickle after the TFRecord that it is from: sd_training.tfrecord-00000-of-01000_ID.pkl.
    if ".tfrecord" in path.name.lower() and path.suffix.lower() not in (".pkl", ".json"):
        raise BadData(
            f"{path}: record 0 at byte 0: the length's checksum is wrong: no TFRecord, or damaged; {womd.REMEDY}"
        )
    if head.startswith(SHARD_MAGIC):
        return SHARD
    if head.startswith(geopackage.MAGIC):
        if head[geopackage.APPLICATION] == b"GPKG":
            raise BadData(f"{path}: is a GeoPackage, a map and no log: give the logs (.db)")
        return NUPLAN
    if head[:4] == b"PAR1":
        return ARGOVERSE
    if head[0] == 0x80 and len(head) > 1 and 2 <= head[1] <= 5:
        return SCENARIONET
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return GPUDRIVE
    raise BadData(f"{path}: is none of: {KNOWN}; check what it is, or convert it to one of these")
