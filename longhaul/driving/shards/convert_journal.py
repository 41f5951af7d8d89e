"""Journal of a conversion, so that it can go on after it was killed: one line of JSON for each shard.

The first line holds the settings. A line is added after its shard is complete under its name, so what the lines say is
on the disk; a line that a kill cut short does not count.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.shards import shard as shards

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
        found = path.stat()
        return str(path.resolve()), found.st_size, found.st_mtime_ns
    except OSError:
        return str(path.resolve()), 0, 0


def resume(out: Path, settings: Settings, stamps: list[Stamp]) -> list[Line]:
    """The lines of the state that still hold: their shards are there, and their inputs are what they were."""
    path = out / STATE
    if not path.exists():
        foreign = next(out.glob(f"*{readers.SHARD_SUFFIX}"), None)
        if foreign is not None:
            raise BadData(f"{out}: holds {foreign.name}, but no {STATE} of a conversion: name another folder")
        return []
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True) or ["{}"]
        before = dict(json.loads(first)["settings"])
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
        shard = out / line.shard
        if not same or (line.shard and not (shard.is_file() and shard.stat().st_size == line.bytes)):
            break
        at = ends
        lines.append(line)
    return lines


def _parse(text: str) -> Line | None:
    """A line of the state; None where a kill cut it."""
    if not text.endswith("\n"):
        return None
    try:
        line = Line(**json.loads(text))
        begun = line.partial and (str(line.partial[0]), int(line.partial[1]), int(line.partial[2]))
        return line._replace(inputs=[Input(*each) for each in line.inputs], partial=begun)
    except (ValueError, TypeError, IndexError):
        return None


def rewrite(out: Path, settings: Settings, lines: list[Line]) -> None:
    """Writes the state anew with the lines that hold, and removes the shards of the others."""
    text = json.dumps({"settings": asdict(settings)}) + "\n" + "".join(map(_text, lines))
    replace_text(out / STATE, text)
    kept = {line.shard for line in lines}
    for path in out.glob(f"shard-*{readers.SHARD_SUFFIX}"):
        if path.name not in kept:
            path.unlink()


def add(out: Path, line: Line) -> None:
    """Adds a line to the state; it is on the disk when this returns."""
    with (out / STATE).open("a", encoding="utf-8") as file:
        file.write(_text(line))
        file.flush()
        os.fsync(file.fileno())


def _text(line: Line) -> str:
    return json.dumps(line._asdict()) + "\n"


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that it is there whole, or as it was."""
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    shards.settle(path.parent)
