"""Output whose reader has gone: it goes on in a file, so that a closed pipe or terminal ends no run."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

OUTPUT = "output.log"
"""File of a run's folder with what was printed after the reader had gone."""


@contextmanager
def outlasting(folder: Path) -> Iterator[None]:
    """Context in which output whose reader has gone continues in a file of `folder`, so that it ends no work."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outlasting(stream, folder / OUTPUT) for stream in before)
    try:
        yield
    finally:
        own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = before
        for stream in own:
            stream.flush()


def _outlasting(stream: TextIO, file: Path) -> TextIO:
    with suppress(OSError, AttributeError):
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = io.BufferedWriter(_Outlasting(stream.fileno(), file))
            return io.TextIOWrapper(raw, stream.encoding, errors="replace", line_buffering=True)
    return stream


class _Outlasting(io.RawIOBase):
    """Descriptor that becomes a file once its reader has gone."""

    def __init__(self, descriptor: int, file: Path) -> None:
        self._descriptor, self._file = descriptor, file

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, self._descriptor)
        os.close(file)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(self._descriptor, f"{since}: nobody reads the output any more; the run goes on\n".encode())
        return os.write(self._descriptor, data)
