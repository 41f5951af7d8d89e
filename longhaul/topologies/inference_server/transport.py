"""What the server asks of a lane, whichever: frames over gRPC, or the same blocks in shared memory.

An actor has `slots` groups of environments, and steps one while the other waits for its actions (double buffering).
Group g is slot g % slots of actor g // slots. A life of an actor begins with step 0 of each of its groups; when its
stream ends, for whatever reason, the lane says so once, and nothing of that life arrives after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from longhaul.topologies.inference_server.frames import Block, Codec


class Arrival(NamedTuple):
    """One step of a group, checked; its views hold until the group is answered or its actor lost."""

    group: int
    life: int
    first: bool  # the life begins: reward and flags say nothing
    step: Block
    state: np.ndarray | None = None  # uint8, where the step ends a trajectory and states are wanted; a copy


class Answer(NamedTuple):
    """To an arrival, by whose group and life it is known."""

    group: int
    life: int
    action: np.ndarray  # [C, ...]


Held = Mapping[int, np.ndarray]
"""Group -> the state that its next life goes on from; the others begin new episodes."""


NOBODY: Held = {}


class Lost(NamedTuple):
    """The end of an actor's stream."""

    actor: int
    why: str


class Transport(Protocol):
    """The server's side, for one thread. No method waits but `wait`."""

    def wait(self, seconds: float) -> None:
        """Until something may have come, or for so long."""

    def take(self) -> list[Arrival | Lost]:
        """What came since, in order."""

    def answer(self, answers: Sequence[Answer]) -> None:
        """To groups that arrived and wait; actions are copied. To a life that is lost nothing is said."""

    def cut(self, actor: int, why: str) -> None:
        """Ends an actor's stream; `take` says so later."""

    def live(self) -> frozenset[int]:
        """The actors whose streams are open."""

    def close(self) -> None: ...


class ActorBlocks(Protocol):
    """The actor's side, whichever transport: a step is written to `blocks[slot]`, and its ended episodes to the block
    of `ended`; then it is posted."""

    codec: Codec  # with the scores that are wanted, once it is open; as the blocks
    blocks: list[Block]

    def held(self, slot: int) -> np.ndarray | None:
        """The state that a group goes on from; None: new episodes."""

    def ended(self, slot: int, finals: int) -> Block: ...

    def keeps(self, slot: int, finals: int) -> np.ndarray | None:
        """Memory for the group's state, which the server wants with the step that is posted next; None: it does not."""

    def post(self, slot: int, finals: int) -> None:
        """Sends the step; does not wait."""


class ActorTransport(ActorBlocks, Protocol):
    """Actor's side where waiting suspends a coroutine. `ShmActorTransport` has the same methods, and blocks instead."""

    async def open(self) -> list[int]:
        """Begins a life -> a seed for each group. Raises WireError where it is refused, OSError where nobody is."""

    async def next(self) -> tuple[int, np.ndarray]:
        """-> (slot, actions [C, ...]), which hold until that slot is posted again."""

    async def close(self) -> None: ...
