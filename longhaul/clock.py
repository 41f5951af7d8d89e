"""How long a run took, over all the processes that it ran in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Seconds(NamedTuple):
    """Of the whole run, over all its resumes; what a kill undid counts not."""

    train: float = 0.0  # in updates, logging and saving
    compile: float = 0.0
    wall: float = 0.0  # these, and preparing data


class Clock:
    """Reads the Seconds of a run, of which `before` passed in earlier processes."""

    def __init__(self) -> None:
        self.before = Seconds()
        self._born = time.perf_counter()
        self._compile = 0.0
        self._training: float | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._compile += time.perf_counter() - began

    def train(self) -> None:
        """Training begins."""
        self._training = time.perf_counter()

    def read(self) -> Seconds:
        now = time.perf_counter()
        train = 0.0 if self._training is None else now - self._training
        return Seconds(
            self.before.train + train, self.before.compile + self._compile, self.before.wall + now - self._born
        )
