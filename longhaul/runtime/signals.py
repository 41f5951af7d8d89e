"""Stop signals of a run: noted on arrival, obeyed where all finished work is saved."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOMENT = 0.5
"""Seconds within which signals count as one: `timeout` sends its own to the process and to its group."""


class Stopped(Exception):
    """A signal ended the run after `done` updates, which are saved."""

    def __init__(self, done: int):
        super().__init__(done)
        self.done = done


class Stop:
    """Record of SIGINT or SIGTERM. A second one, after the same moment, ends the process at once.

    The run ends where it checks the record, so that finished work is saved first. Within `at_once` a signal raises
    KeyboardInterrupt; not during compilation, which JAX may answer by a crash at the end of the process.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at = 0.0
        self._told = False
        self._raises = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            if time.monotonic() - self._at < MOMENT:
                return
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal, self._at = number, time.monotonic()
        if self._raises:
            raise KeyboardInterrupt

    @property
    def asked(self) -> bool:
        """True after a signal, or `ask`."""
        return self._told or self.signal is not None

    def ask(self) -> None:
        """Stop as after a signal."""
        self._told = True

    def who(self) -> str:
        """Words on what stopped the run."""
        if self.signal is not None:
            return signal.Signals(self.signal).name
        return "the callback asked to stop" if self._told else "another process was stopped"

    def look(self, done: int) -> None:
        """Raise Stopped if a signal came; `done` updates are saved."""
        if self.asked:
            raise Stopped(done)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        self._raises = True
        try:
            yield
        finally:
            self._raises = False


@contextmanager
def listening() -> Iterator[Stop]:
    """Context that records signals. They go to the main thread alone: in another thread, none is recorded."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
