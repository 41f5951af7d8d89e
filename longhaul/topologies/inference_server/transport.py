"""Transport between actors and server: interface of gRPC frames and of the same blocks in shared memory.

An actor has `slots` groups of environments, and steps one while the other waits for its actions (double buffering).
Group g is slot g % slots of actor g // slots. A life of an actor begins with step 0 of each of its groups. The end of
its stream is reported once, and nothing of that life arrives afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from longhaul.topologies.inference_server.frames import Block, Codec


class Arrival(NamedTuple):
    """Checked step of a group; its views are valid until the group is answered or its actor lost."""

    group: int
    life: int
    first: bool  # first step of a life: reward and flags mean nothing
    step: Block
    state: np.ndarray | None = None  # uint8, a copy; at the end of a trajectory, if states are wanted


class Answer(NamedTuple):
    """Answer to the arrival of the same group and life."""

    group: int
    life: int
    action: np.ndarray  # [C, ...]


Held = Mapping[int, np.ndarray]
"""Group -> state from which its next life continues; other groups begin new episodes."""


NOBODY: Held = {}


class Lost(NamedTuple):
    """End of an actor's stream."""

    actor: int
    why: str


class Transport(Protocol):
    """Server side, for one thread. Only `wait` waits."""

    def wait(self, seconds: float) -> None:
        """Wait for an event, at most `seconds`; it may return early."""

    def take(self) -> list[Arrival | Lost]:
        """Events since the last call, in order."""

    def answer(self, answers: Sequence[Answer]) -> None:
        """Answer waiting groups; actions are copied. Answers to a lost life are dropped."""

    def cut(self, actor: int, why: str) -> None:
        """End an actor's stream; `take` reports it later."""

    def live(self) -> frozenset[int]:
        """Actors with an open stream."""

    def close(self) -> None: ...


class ActorBlocks(Protocol):
    """Actor side of both transports: write a step to `blocks[slot]`, its finished episodes to the block of `ended`,
    then call `post`."""

    codec: Codec  # with the wanted scores once open; so are the blocks
    blocks: list[Block]

    def held(self, slot: int) -> np.ndarray | None:
        """State from which a group continues; None: new episodes."""

    def ended(self, slot: int, finals: int) -> Block: ...

    def keeps(self, slot: int, finals: int) -> np.ndarray | None:
        """Memory for the group's state, if the server wants it with the next posted step; else None."""

    def post(self, slot: int, finals: int) -> None:
        """Send the step without waiting."""


class ActorTransport(ActorBlocks, Protocol):
    """Actor side with coroutines. `ShmActorTransport` has the same methods, and blocks instead."""

    async def open(self) -> list[int]:
        """Begin a life; -> one seed per group. WireError if it is refused, OSError if there is no server."""

    async def next(self) -> tuple[int, np.ndarray]:
        """Next (slot, actions [C, ...]), valid until that slot is posted again."""

    async def close(self) -> None: ...
