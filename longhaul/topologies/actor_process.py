"""Actor processes of both topologies: started, ended for good, and restarted after a growing pause."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from longhaul.runtime.launch.process import TIED, Process, Restarts

FEW = {
    "JAX_PLATFORMS": "cpu", "NPROC": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
}  # fmt: skip
"""Environment variables of an actor process: CPU only, one thread, and JAX programs run in the calling thread
(reason: `runtime.devices.prepare_devices`)."""

STARTING = 600.0
"""Seconds an actor may take until its first result: it compiles, and a cluster must find a free core for it."""

RESTARTS = Restarts(allowed=4, first=0.1, most=10.0)
"""The fifth failure in a row ends the run."""


class ActorError(RuntimeError):
    """Repeated failure of an actor; the message is one line."""


class ActorHandle(Protocol):
    """Incarnation of an actor: a `Process`, a thread, or a Ray actor."""

    def ended(self) -> str | None:
        """Reason of its end; None while it runs."""

    def kill(self) -> None:
        """End it at once, if possible, without waiting."""

    def end(self, within: float = 0.0) -> None:
        """End of it: up to `within` seconds to end by itself, then a kill. It writes nothing afterwards."""


class _Seat(NamedTuple):
    restarts: Restarts
    handle: ActorHandle | None = None  # None: one is started at `due`
    started: float = 0.0
    due: float = 0.0
    again: int = 0  # restarts


class Actors:
    """Actors 0 .. N-1, each kept running. Call `close` at the end.

    An actor is ended for good before its successor starts, so two never write to one place. The owner calls `failed`
    for each actor that `look` reports or that the owner ended.
    """

    def __init__(self, count: int, start: Callable[[int], ActorHandle], without: str) -> None:
        """`start(a)` starts actor a. `without` ends the error message: the progress that a failing actor lacks."""
        self._start, self._without = start, without
        self._seats = [_Seat(RESTARTS) for _ in range(count)]

    def look(self, now: float) -> list[tuple[int, str]]:
        """Start of the actors that are due; -> (actor, reason) of those that ended."""
        gone = []
        for actor, seat in enumerate(self._seats):
            if seat.handle is None:
                if now >= seat.due:
                    self._seats[actor] = seat._replace(handle=self._start(actor), started=now)
            elif (reason := seat.handle.ended()) is not None:
                gone.append((actor, reason))
        return gone

    def end(self, actor: int) -> bool:
        """End an actor for good; -> whether it was running."""
        handle = self._seats[actor].handle
        if handle is not None:
            handle.end()
        return handle is not None

    def failed(self, actor: int, why: str, *, progress: bool) -> float:
        """Record of an actor's end; -> seconds until its successor starts. ActorError after too many failures in a
        row without progress."""
        seat = self._seats[actor]
        if seat.handle is not None:
            seat.handle.end()
        restarts = seat.restarts.failed(progress=progress)
        if restarts.exhausted:
            raise ActorError(f"actor {actor} failed {restarts.failures} times {self._without}; {why}")
        due = time.monotonic() + restarts.pause
        self._seats[actor] = _Seat(restarts, due=due, again=seat.again + 1)
        return restarts.pause

    def started(self, actor: int) -> float:
        """Monotonic time of an actor's last start."""
        return self._seats[actor].started

    def count(self, actor: int) -> int:
        """Restarts of an actor since the run began."""
        return self._seats[actor].again

    def handles(self) -> list[ActorHandle | None]:
        """Handles of all actors; None for one not started yet."""
        return [seat.handle for seat in self._seats]

    @property
    def restarts(self) -> int:
        """Restarts of all actors since the run began."""
        return sum(seat.again for seat in self._seats)

    def close(self, within: Callable[[int], float] = lambda actor: 0.0) -> None:
        """End all actors. `within(a)`: seconds that actor a may take to end by itself."""
        alive = [(actor, seat.handle) for actor, seat in enumerate(self._seats) if seat.handle is not None]
        for actor, handle in alive:
            if not within(actor):
                handle.kill()  # all of them, before any is waited for
        for actor, handle in alive:
            handle.end(within(actor))
        self._start = _closed  # breaks a reference cycle, so the owner's memory is freed at once
        self._seats = [_Seat(seat.restarts, due=float("inf"), again=seat.again) for seat in self._seats]


def _closed(actor: int) -> ActorHandle:
    raise AssertionError(f"actor {actor} is started after the end")


def process(module: str, payload: bytes, descriptors: Sequence[int] = ()) -> Process:
    """Actor in its own process, of a module. `payload` is its standard input; it inherits `descriptors`."""
    command = [sys.executable, "-m", TIED, module]
    return Process(command, variables=os.environ | FEW, payload=payload, descriptors=descriptors)
