"""Duration of a run over all its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from longhaul.runtime.compile_cache import Ledger

LOADED = time.perf_counter()


class Seconds(NamedTuple):
    """Totals over all resumes; work lost to a kill is not counted."""

    train: float = 0.0  # in updates, logging and saving
    compile: float = 0.0
    wall: float = 0.0  # these, and preparing data
    trace: float = 0.0  # part of `compile` before the compiler
    start: float = 0.0  # from the start of the newest process to the end of its first call


def age() -> float:
    """Seconds since this process started; since this file was loaded if the system does not report it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - LOADED


class Clock:
    """Clock of a run, of which `before` passed in earlier processes; `ledger` counts compilation."""

    def __init__(self, ledger: Ledger) -> None:
        self.before = Seconds()
        self.ledger = ledger
        self._born = time.perf_counter()
        self._compile = self._trace = self._start = 0.0
        self._aside = 0.0
        self._training: float | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        began, compiled = time.perf_counter(), self.ledger.seconds
        yield
        seconds = time.perf_counter() - began
        self._compile += seconds
        self._trace += max(0.0, seconds - (self.ledger.seconds - compiled))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of work that does not count as training."""
        began = time.perf_counter()
        yield
        self._aside += time.perf_counter() - began

    def train(self) -> None:
        """Start of training."""
        self._training = time.perf_counter()

    def started(self) -> None:
        """End of its first call; later ones change nothing."""
        self._start = self._start or age()

    def read(self) -> Seconds:
        now = time.perf_counter()
        train = 0.0 if self._training is None else now - self._training - self._aside
        return Seconds(
            self.before.train + train, self.before.compile + self._compile, self.before.wall + now - self._born,
            self.before.trace + self._trace, self._start or self.before.start,
        )  # fmt: skip
