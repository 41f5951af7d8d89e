"""Stop signals of a run: noted on arrival, obeyed where all finished work is saved.

Python calls a handler in the main thread, between two of its instructions: never while that waits in C++ for memory or
the compiler. So a thread hears of each signal too (`signal.set_wakeup_fd`), and ends the process at the second one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MOMENT = 0.5
"""Seconds within which signals count as one: `timeout` sends its own to the process and to its group."""

STOPS = signal.SIGINT, signal.SIGTERM
"""Signals by which a run saves and stops."""

AT_WORK = "actor"
"""First word of the names of daemon threads that compiled code may hold up for minutes. An interpreter that ends while
one of them is there crashes when it comes back, so a process then ends without the interpreter (`cli.main`)."""


class Stopped(Exception):
    """A signal ended the run after `done` updates, which are saved."""

    def __init__(self, done: int):
        super().__init__(done)
        self.done = done


class Stop:
    """Record of SIGINT or SIGTERM. A second one, after the same moment, ends the process at once (`heard`).

    The run ends where it checks the record, so that finished work is saved first. Within `at_once` a signal raises
    KeyboardInterrupt; not during compilation, which JAX may answer by a crash at the end of the process. There a
    process that is the run's alone ends by `leave`.
    """

    def __init__(self, answer: Callable[[str], None] = lambda line: None) -> None:
        self.ending = "stopping after this stage"  # what the run answers the first signal
        self.leave: Callable[[], None] | None = None  # ends the process; set while there is nothing to save
        self.signal: int | None = None
        self._answer = answer
        self._first: float | None = None
        self._requested = False
        self._raises = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            return
        self.signal = number
        if self._raises:
            raise KeyboardInterrupt

    def heard(self, number: int) -> None:
        """A signal's arrival, in any thread. The second of SIGINT and SIGTERM ends the process by that signal."""
        now = time.monotonic()
        if number not in STOPS:
            return
        if self._first is None:
            self._first = now
            if self.leave is not None and not self._raises:
                self.signal = self.signal or number
                self.leave()
            elif not self._raises:  # in a thread: a terminal that stands still must not hold up the second signal
                line = f"{signal.Signals(number).name}: {self.ending}; again to leave now"
                threading.Thread(target=self._answer, args=[line], daemon=True).start()
        elif now - self._first >= MOMENT:
            default(number)
            os.kill(os.getpid(), number)

    @property
    def requested(self) -> bool:
        """True after a signal, or `request`."""
        return self._requested or self.signal is not None

    def request(self) -> None:
        """Request to stop, as after a signal."""
        self._requested = True

    def cause(self) -> str:
        """Cause that stopped the run, in words."""
        if self.signal is not None:
            return signal.Signals(self.signal).name
        return "the callback asked to stop" if self._requested else "another process was stopped"

    def look(self, done: int) -> None:
        """Check for a signal: Stopped if one came; `done` updates are saved."""
        if self.requested:
            raise Stopped(done)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        self._raises = True
        try:
            yield
        finally:
            self._raises = False


@contextmanager
def listening(answer: Callable[[str], None] = lambda line: None) -> Iterator[Stop]:
    """Context that records signals. They go to the main thread alone: in another thread, none is recorded.

    `answer` takes a line at the first signal, at once.
    """
    stop = Stop(answer)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        with watching(stop.heard):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watching(hear: Callable[[int], None]) -> Iterator[None]:
    """Context in which a thread calls `hear` with the number of each signal that has a handler of Python's, on arrival.

    For the main thread alone, which may hear only later, or never.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    owner = os.getpid()

    def watch() -> None:
        while numbers := os.read(reads, 64):
            for number in numbers:
                hear(number)

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)
        if os.getpid() == owner:  # a forked process has no such thread
            thread.join()
            os.close(reads)


def default(number: int) -> None:
    """Give a signal its default action, from any thread; `signal.signal` does so in the main thread alone."""
    ctypes.pythonapi.PyOS_setsig(number, ctypes.c_void_p(0))


os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not its parent's
