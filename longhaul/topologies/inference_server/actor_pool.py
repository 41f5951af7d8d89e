"""The processes of actors that a run begins itself: watched, and begun again.

An actor is ended for good (killed, and waited for) before another takes its place. Who fails again and again within a
short time ends the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from longhaul.topologies.actor_process import Child, CrewError, delay

FAILURES, SOON = 5, 60.0
"""So many failures, each within so many seconds of its beginning, end the run."""


class Orders(NamedTuple):
    """What a process that is to be an actor is told, as JSON can hold it, and the descriptors that it gets."""

    about: dict[str, Any]
    descriptors: tuple[int, ...] = ()  # closed here once it has them


class Life(Protocol):
    """One life of an actor."""

    @property
    def id(self) -> int | None:
        """Its process, where that is one of this machine."""

    def ended(self) -> str | None:
        """How it ended; None while it lives."""

    def kill(self) -> None: ...

    def wait(self) -> None:
        """Until nothing of it is left that could do harm."""


def process(actor: int, orders: Orders) -> Child:
    """An actor in a process of this machine."""
    about = orders.about | {"parent": os.getpid(), "actor": actor}
    try:
        return Child("longhaul.topologies.inference_server.actor", json.dumps(about).encode(), orders.descriptors)
    finally:
        for descriptor in orders.descriptors:
            os.close(descriptor)


class _Place(NamedTuple):
    life: Life | None = None
    begun: float = 0.0
    due: float = 0.0  # when another is to begin
    failures: int = 0


class Processes:
    """`actors` lives, of processes of this machine unless `begin` makes others; a `server.Crew`. Call `close` at the
    end."""

    def __init__(
        self, actors: int, orders: Callable[[int], Orders], lost: Callable[[int, str], None],
        note: Callable[[str], None] = lambda line: None, begin: Callable[[int, Orders], Life] = process,
    ) -> None:  # fmt: skip
        """`orders(a)`: what a new actor a is told. `lost(a, why)`: its life has ended."""
        self._orders, self._lost, self._note, self._begin = orders, lost, note, begin
        self._places = [_Place() for _ in range(actors)]
        self.restarts = 0

    def ids(self) -> list[int | None]:
        """The actors' processes on this machine; None where one is yet to begin."""
        return [place.life.id if place.life else None for place in self._places]

    def look(self, now: float) -> None:
        for actor, place in enumerate(self._places):
            if place.life is None:
                if now >= place.due:
                    self._places[actor] = place._replace(life=self._begin(actor, self._orders(actor)), begun=now)
            elif (how := place.life.ended()) is not None:
                self._ended(actor, how)
                self._lost(actor, how)

    def _ended(self, actor: int, why: str) -> None:
        """Another one is to begin after a while. Raises CrewError where that helps not."""
        place, now = self._places[actor], time.monotonic()
        failures = place.failures + 1 if now - place.begun < SOON else 1
        if failures >= FAILURES:
            raise CrewError(f"actor {actor} failed {failures} times within {SOON:.0f} s of its beginning; {why}")
        self.restarts += 1
        self._places[actor] = _Place(None, 0.0, now + delay(failures), failures)

    def end(self, actor: int, why: str) -> None:
        life = self._places[actor].life
        if life is not None:
            life.kill()
            life.wait()
            self._ended(actor, why)

    def close(self) -> None:
        """Ends them all. Nothing of them is left."""
        running: Sequence[Life] = [place.life for place in self._places if place.life is not None]
        for life in running:
            life.kill()
        for life in running:
            life.wait()
        self._places = [_Place(due=float("inf")) for _ in self._places]
