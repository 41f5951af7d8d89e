"""Actors as processes, whichever topology: started, ended for good, and started again with a growing pause."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from longhaul.runtime.launch.process import Process, Restarts

FEW = {
    "JAX_PLATFORMS": "cpu", "NPROC": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
}  # fmt: skip
"""Environment variables of an actor's process: it computes on the CPU with one thread, in which JAX's programs run, too
(`runtime.devices.prepare_devices` says why)."""

STARTING = 600.0
"""Seconds that an actor may take until its first work is done: it compiles, and a cluster must find a place for it."""

RESTARTS = Restarts(allowed=4, first=0.1, most=10.0)
"""The fifth failure in a row ends the run."""


class ActorError(RuntimeError):
    """Actors that can't go on; one line."""


class ActorHandle(Protocol):
    """One life of an actor: a `Process`, a thread, or an actor of Ray's."""

    def ended(self) -> str | None:
        """How it ended; None while it lives."""

    def kill(self) -> None:
        """Ends it at once, as far as it can be; does not wait."""

    def end(self, within: float = 0.0) -> None:
        """Waits so many seconds for its end, then kills it. It writes nothing more after this."""


class _Seat(NamedTuple):
    restarts: Restarts
    handle: ActorHandle | None = None  # None: one is started at `due`
    started: float = 0.0
    due: float = 0.0
    again: int = 0  # restarts


class Actors:
    """Actors 0 .. N-1, each kept alive. Call `close` at the end.

    An actor is ended for good before another takes its place, so that two never write to one place. The owner calls
    `failed` for each that `look` reports, and for those that it ended itself.
    """

    def __init__(self, count: int, start: Callable[[int], ActorHandle], without: str) -> None:
        """`start(a)`: a new life of actor a. `without`: what an actor that fails for good did not reach, for its
        error."""
        self._start, self._without = start, without
        self._seats = [_Seat(RESTARTS) for _ in range(count)]

    def look(self, now: float) -> list[tuple[int, str]]:
        """Starts who is due; -> (actor, how it ended) of those that ended."""
        gone = []
        for actor, seat in enumerate(self._seats):
            if seat.handle is None:
                if now >= seat.due:
                    self._seats[actor] = seat._replace(handle=self._start(actor), started=now)
            elif (how := seat.handle.ended()) is not None:
                gone.append((actor, how))
        return gone

    def end(self, actor: int) -> bool:
        """Ends an actor for good; -> whether it lived."""
        handle = self._seats[actor].handle
        if handle is not None:
            handle.end()
        return handle is not None

    def failed(self, actor: int, why: str, *, progress: bool) -> float:
        """Notes the end of an actor; -> seconds until another takes its place. Raises ActorError once it has failed too
        often in a row without progress."""
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
        """Time of an actor's last start, by the monotonic clock."""
        return self._seats[actor].started

    def count(self, actor: int) -> int:
        """Restarts of an actor since the run began."""
        return self._seats[actor].again

    def handles(self) -> list[ActorHandle | None]:
        """Lives of all actors; None where one is yet to start."""
        return [seat.handle for seat in self._seats]

    @property
    def restarts(self) -> int:
        """Restarts of all actors since the run began."""
        return sum(seat.again for seat in self._seats)

    def close(self, within: Callable[[int], float] = lambda actor: 0.0) -> None:
        """Ends all actors; nothing of them is left. `within(a)`: seconds that actor a may take by itself."""
        alive = [(actor, seat.handle) for actor, seat in enumerate(self._seats) if seat.handle is not None]
        for actor, handle in alive:
            if not within(actor):
                handle.kill()  # all of them, before any is waited for
        for actor, handle in alive:
            handle.end(within(actor))
        self._start = _closed  # the owner's memory is free at once: no circle of references holds it
        self._seats = [_Seat(seat.restarts, due=float("inf"), again=seat.again) for seat in self._seats]


def _closed(actor: int) -> ActorHandle:
    raise AssertionError(f"actor {actor} is started after the end")


def process(module: str, payload: bytes, descriptors: Sequence[int] = ()) -> Process:
    """An actor in a process of its own, `python -m MODULE`. `payload`: all that it reads; the descriptors are its own,
    too."""
    command = [sys.executable, "-m", module]
    return Process(command, variables=os.environ | FEW, payload=payload, descriptors=descriptors)
