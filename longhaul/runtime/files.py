"""Atomic and durable writing of files, removal of any entry, names of checkpoints, and values as JSON can hold them."""

from __future__ import annotations

import math
import numbers
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
"""File of a checkpoint that is written last."""

CHECKPOINT = re.compile(r"(\d+)(?:\.(\d+))?")
"""Name of a checkpoint: its step, and the number of its later saves."""


def finite(value: Any) -> Any:
    """A value as JSON can hold it: non-finite numbers become null."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finite_number(value: Any) -> float | None:
    """A finite number, Python's or NumPy's, as float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of 400 digits
        return None


def expanded(path: Path | str) -> Path:
    """Path in which a ~ at the beginning is the home folder."""
    return Path(os.path.expanduser(path))


def write(path: Path | str, content: str | bytes) -> None:
    """Atomic write of a file: a reader sees the old one or the new one. Missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path):
            partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
            os.replace(partial, path)
    finally:
        with suppress(OSError):  # on a full disk the failed write is the error to report
            partial.unlink(missing_ok=True)


def apply_umask(path: Path | str) -> None:
    """Rights of a new file by the umask, for one that a library made for its owner alone (safetensors 0.8)."""
    beside = Path(f"{path}.{os.getpid()}.rights")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.chmod(path, os.fstat(descriptor).st_mode & 0o777)
    finally:
        os.close(descriptor)
        beside.unlink()


def sync(path: Path | str) -> None:
    """Flush of a file's content, or of the names in a folder, which then outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removal of an entry of a folder: a folder with its content, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's folder, intact or not, ascending."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder / "checkpoints") as entries:
        matches = ((CHECKPOINT.fullmatch(entry.name), entry) for entry in entries)
        return sorted({int(match[1]) for match, entry in matches if match and entry.is_dir()})
    return []


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Context in which an OSError names `path`: a full disk's names nothing, others name the partial file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
