"""Generated scenarios kept on disk, a block of seeds a file, so that the next run need not make them.

A scenario follows from its seed, from how it is compiled, and from the code that makes it: all three are in a file's
name. Unlike shards, which round to centimetres, a file gives each bit back: a run does not depend on what is kept. One
that is damaged, or can't be written, costs the time of making its scenarios, never the run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longhaul import driving
from longhaul.driving.scenario.scenario import Road, Scenario
from longhaul.runtime import cache_dir

BLOCK = 32
"""Seeds of a file; the first one is a multiple of it."""

SUFFIX = ".npz"

ROAD, DRAWING, SHAPES = "road.", "drawing.", ".shapes"
"""Prefixes of array names, and of what tells the scenarios' parts of one array apart."""


class Store:
    """The scenarios compiled in one way. `about` tells it from others: "agents=1,horizon=all". `open` makes one."""

    def __init__(self, folder: Path, about: str) -> None:
        self.folder, self.about = folder, about
        self._complained = False

    def path(self, first: int) -> Path:
        """Path of the block that begins with the seed `first`."""
        return self.folder / f"{maker()}-{self.about}-{first}{SUFFIX}"

    def load(self, first: int) -> list[Scenario] | None:
        """The scenarios of the block; None where they must be made."""
        path = self.path(first)
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: _apart(file[name], file[name + SHAPES]) for name in NAMES}
            found = [_scenario({name: columns[name][i] for name in NAMES}) for i in range(BLOCK)]
            os.utime(path)  # what is used stays; many file systems don't note a reading
        except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            self._complain(error)
            return None
        return found

    def save(self, first: int, scenarios: Sequence[Scenario]) -> None:
        """Keeps a block that was made."""
        if self._complained:
            return
        path = self.path(first)
        beside = path.with_name(f".{path.stem}.{os.getpid()}{SUFFIX}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            rows = [_arrays(scenario) for scenario in scenarios]
            columns = {name: np.concatenate([row[name].reshape(-1) for row in rows]) for name in NAMES}
            shapes = {name + SHAPES: np.array([row[name].shape for row in rows]) for name in NAMES}
            np.savez_compressed(beside, allow_pickle=False, **columns, **shapes)
            beside.replace(path)
        except OSError as error:
            self._complain(error)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            cache_dir.say(f"generated scenarios in {self.folder} are of no use ({error}): they are made anew")
        self._complained = True


def open(about: str) -> Store | None:
    """Store of such scenarios; None where caches are switched off, or the code can't be read."""
    folder = cache_dir.folder("scenarios")
    if folder is None:
        return None
    try:
        maker()
        cache_dir.trim(folder, f"*{SUFFIX}")
    except OSError:
        return None
    return Store(folder, about)


@functools.cache
def maker() -> str:
    """The digest of all that a scenario follows from but its seed: our code, NumPy's version, the kind of machine."""
    digest = hashlib.sha256(f"{np.__version__} {platform.machine()}".encode())
    root = Path(str(driving.__file__)).parent
    files = sorted(root.rglob("*.py"))
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _apart(values: np.ndarray, shapes: np.ndarray) -> list[np.ndarray]:
    """The arrays of these shapes that lie one behind the other."""
    ends = np.cumsum(np.prod(shapes, axis=1, dtype=np.int64))
    each = np.split(values, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(each, shapes.astype(int).tolist(), strict=True)]


def _arrays(scenario: Scenario) -> dict[str, np.ndarray]:
    """All that a scenario holds, by name. Lines of the drawing lie one behind the other."""
    plain = {name: np.asarray(value) for name, value in scenario._asdict().items() if name not in ("road", "drawing")}
    road = {ROAD + name: value for name, value in scenario.road._asdict().items()}
    kinds, lines = [kind for kind, _ in scenario.drawing], [line for _, line in scenario.drawing]
    drawing = {
        "kinds": np.array(kinds, np.int64), "points": np.array([len(line) for line in lines], np.int64),
        "lines": np.concatenate(lines) if lines else np.zeros((0, 2), np.float32),
    }  # fmt: skip
    return plain | road | {DRAWING + name: value for name, value in drawing.items()}


def _scenario(arrays: Mapping[str, np.ndarray]) -> Scenario:
    """The other way round."""
    kinds, points, lines = (arrays[DRAWING + name] for name in ("kinds", "points", "lines"))
    each = np.split(lines, np.cumsum(points)[:-1]) if len(points) else []
    values: dict[str, Any] = {name: arrays[name] for name in Scenario._fields if name in arrays}
    values |= {"id": str(values["id"]), "control": str(values["control"]), "steps": int(values["steps"])}
    values |= {"dt": float(values["dt"]), "road": Road(*(arrays[ROAD + name] for name in Road._fields))}
    return Scenario(**values, drawing=tuple(zip(kinds.tolist(), each, strict=True)))


NAMES = tuple(
    [name for name in Scenario._fields if name not in ("road", "drawing")]
    + [ROAD + name for name in Road._fields]
    + [DRAWING + name for name in ("kinds", "points", "lines")]
)
"""Names of a scenario's arrays in a file."""
