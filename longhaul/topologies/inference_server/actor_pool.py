"""Pool of actors that a run starts for its inference server, watches and restarts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from longhaul.runtime.launch.process import Process
from longhaul.topologies import actor_process
from longhaul.topologies.actor_process import ActorHandle, Actors

SOON = 60.0
"""Seconds after its start during which a failure counts against an actor; a later failure restarts the count at one."""


class Orders(NamedTuple):
    """Orders for an actor process: JSON data, and the descriptors it inherits."""

    about: dict[str, Any]
    descriptors: tuple[int, ...] = ()  # closed here once it has them


def process(actor: int, orders: Orders) -> Process:
    """Actor in a process of this machine."""
    try:
        payload = json.dumps(orders.about | {"actor": actor}).encode()
        return actor_process.process("longhaul.topologies.inference_server.actor", payload, orders.descriptors)
    finally:
        for descriptor in orders.descriptors:
            os.close(descriptor)


class ActorPool:
    """Pool of `actors` actors, local processes by default; a `server.ActorPool`. Call `close` at the end."""

    def __init__(
        self, actors: int, orders: Callable[[int], Orders], lost: Callable[[int, str], None],
        start: Callable[[int, Orders], ActorHandle] = process,
    ) -> None:  # fmt: skip
        """`orders(a)`: orders for a new actor a. `lost(a, why)` is called after actor a ended."""
        self._actors = Actors(
            actors, lambda actor: start(actor, orders(actor)), f"within {SOON:.0f} s of its beginning"
        )  # fmt: skip
        self._lost = lost

    @property
    def restarts(self) -> int:
        return self._actors.restarts

    def ids(self) -> list[int | None]:
        """Process ids of the actors; None for one that has not started or runs on another machine."""
        return [handle.id if isinstance(handle, Process) else None for handle in self._actors.handles()]

    def look(self, now: float) -> None:
        for actor, how in self._actors.look(now):
            self._failed(actor, how)
            self._lost(actor, how)

    def end(self, actor: int, why: str) -> None:
        if self._actors.end(actor):
            self._failed(actor, why)

    def _failed(self, actor: int, why: str) -> None:
        worked = time.monotonic() - self._actors.started(actor) >= SOON
        self._actors.failed(actor, why, progress=worked)

    def close(self) -> None:
        """End all actors."""
        self._actors.close()
