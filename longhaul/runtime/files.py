"""Atomic writing of files, and values as JSON can hold them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def finite(value: Any) -> Any:
    """A value as JSON can hold it: non-finite numbers become null."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path | str, content: str | bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one. Missing folders are made."""
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


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Context in which an OSError names `path`: a full disk's names nothing, others name the partial file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
