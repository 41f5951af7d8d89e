"""Trajectories, assembled in place: batches of [T, B, ...] in memory that is allocated once and reused.

Column k x C + i of a batch is environment i of the group that fills place k. A place counts once it is full; the rows
of a lost group are overwritten. Successors of truncated steps are stored as in `types.Successors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.topologies.inference_server.wire import Block
from longhaul.topologies.staleness import Ticket
from longhaul.types import PyTree, Rollout, Successors

Sums = dict[str, float]
"""Sums over finished episodes: "episodes", "episode/return" ..., as `telemetry.aggregate.Sums` takes them."""


class Overrun(ValueError):
    """Error: an environment was truncated more often than its spec allows."""


class Shapes(NamedTuple):
    """ShapeDtypeStructs of one column."""

    observation: PyTree
    action: Any
    extras: PyTree
    memory: PyTree


class Room(NamedTuple):
    """Memory of one batch; leaves in JAX's order."""

    observation: list[np.ndarray]  # [T, B, ...]
    action: np.ndarray
    reward: np.ndarray
    flags: np.ndarray  # bool [3, T, B]: terminated, truncated, valid
    extras: list[np.ndarray]
    last: list[np.ndarray]  # [B, ...]
    cut: list[np.ndarray]  # [K, B, ...]: successors of truncated steps
    memory: list[np.ndarray]  # [B, ...]
    version: np.ndarray  # int32 [T, places]: of the weights that acted
    sums: Sums  # of the episodes that ended


class TrajectoryBuffer:
    """Buffer of `rooms` batches of `steps` steps, for `places` groups of `columns` columns."""

    def __init__(
        self, shapes: Shapes, *, rooms: int, steps: int, places: int, columns: int, interval: int | None
    ) -> None:  # fmt: skip
        self.steps, self._c, self._shapes = steps, columns, shapes
        b, slots = places * columns, math.ceil(steps / (interval or steps))

        def many(tree: PyTree, *lead: int) -> list[np.ndarray]:
            return [np.zeros((*lead, *leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree)]

        self.rooms = [
            Room(
                many(shapes.observation, steps, b), many(shapes.action, steps, b)[0], np.zeros((steps, b), np.float32),
                np.zeros((3, steps, b), bool), many(shapes.extras, steps, b), many(shapes.observation, b),
                many(shapes.observation, slots, b), many(shapes.memory, b), np.zeros((steps, places), np.int32),
                {},
            )
            for _ in range(rooms)
        ]  # fmt: skip
        self._slots = slots
        self._used = np.zeros((rooms, b), np.int32)  # successors kept of each column

    def begin(self, ticket: Ticket) -> None:
        """Begin to fill a place."""
        self._used[ticket.batch % len(self.rooms), self._span(ticket.place)] = 0

    def _span(self, place: int) -> slice:
        return slice(place * self._c, (place + 1) * self._c)

    def acted(
        self, ticket: Ticket, t: int, observation: Sequence[np.ndarray], action: np.ndarray,
        extras: Sequence[np.ndarray], version: int,
    ) -> None:  # fmt: skip
        """Store the observation and the action of step t."""
        room, span = self.rooms[ticket.batch % len(self.rooms)], self._span(ticket.place)
        for into, leaf in zip(room.observation, observation, strict=True):
            into[t, span] = leaf
        room.action[t, span] = action
        for into, leaf in zip(room.extras, extras, strict=True):
            into[t, span] = leaf
        room.version[t, ticket.place] = version

    def remembered(self, ticket: Ticket, memory: Sequence[np.ndarray]) -> None:
        """Store the policy's memory at the start of a trajectory."""
        for into, leaf in zip(self.rooms[ticket.batch % len(self.rooms)].memory, memory, strict=True):
            into[self._span(ticket.place)] = leaf

    def memory(self, ticket: Ticket) -> list[np.ndarray]:
        """Policy's memory at the start of a trajectory, [C, ...]."""
        return [leaf[self._span(ticket.place)] for leaf in self.rooms[ticket.batch % len(self.rooms)].memory]

    def led_to(self, ticket: Ticket, t: int, step: Block) -> None:
        """Store the result of step t. Raises Overrun."""
        number = ticket.batch % len(self.rooms)
        room, span = self.rooms[number], self._span(ticket.place)
        room.reward[t, span] = step.reward
        room.flags[:, t, span] = step.flags
        ended = step.columns
        if not len(ended) or not step.flags[1].any():  # most episodes end without truncation
            return
        # A step with both flags is terminated: its value is zero, and it needs no successor.
        terminated, truncated = step.flags[:2, ended]
        cut = truncated & ~terminated
        if not cut.any():
            return
        columns = ended[cut] + span.start
        used = self._used[number, columns]
        if (used >= self._slots).any():
            raise Overrun(f"a column was truncated {self._slots + 1} times in {self.steps} steps")
        for into, leaf in zip(room.cut, step.final, strict=True):
            into[used, columns] = leaf[cut]
        self._used[number, columns] += 1

    def filled(self, ticket: Ticket, last: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """End of a place; `last` is the observation after its last step. -> reward [T, C]; flags [3, T, C], made
        consistent: an invalid step does not end, and none is both terminated and truncated."""
        room, span = self.rooms[ticket.batch % len(self.rooms)], self._span(ticket.place)
        for into, leaf in zip(room.last, last, strict=True):
            into[span] = leaf
        flags = room.flags[:, :, span]
        flags[:2] &= flags[2]
        flags[1] &= ~flags[0]
        return room.reward[:, span], flags

    def add_sums(self, batch: int, sums: Sums) -> None:
        """Add the sums over the episodes that ended in a full place."""
        room = self.rooms[batch % len(self.rooms)]
        for name, value in sums.items():
            room.sums[name] = room.sums.get(name, 0.0) + value

    def batch(self, number: int) -> tuple[Rollout, Sums, np.ndarray]:
        """Complete batch: (rollout, sums, versions [T, places]); views, valid until its memory is reused."""
        room, shapes = self.rooms[number % len(self.rooms)], self._shapes
        oldest = np.int32(room.version.min())

        def tree(like: PyTree, leaves: list[np.ndarray]) -> PyTree:
            return jax.tree.unflatten(jax.tree.structure(like), leaves)

        seen, cut = tree(shapes.observation, room.observation), tree(shapes.observation, room.cut)
        parts: list[Any] = [
            seen, room.action, room.reward, *room.flags, tree(shapes.extras, room.extras),
            Successors(tree(shapes.observation, room.last), cut), tree(shapes.memory, room.memory), oldest,
        ]  # fmt: skip
        return Rollout(*parts), room.sums, room.version

    def empty(self, number: int) -> None:
        """Free the memory of a batch after its update."""
        self.rooms[number % len(self.rooms)].sums.clear()


# ------------------------------------------------------------------------------------------------------------ episodes


class Running(NamedTuple):
    """Return and length so far of the running episode of each column."""

    earned: np.ndarray  # float64 [C]
    length: np.ndarray  # int64 [C]


class Ended(NamedTuple):
    """Sums over finished episodes."""

    episodes: int
    earned: float
    length: int


def fresh(columns: int) -> Running:
    """Running episodes at their start."""
    return Running(np.zeros(columns), np.zeros(columns, np.int64))


def count_episodes(running: Running, reward: np.ndarray, over: np.ndarray, valid: np.ndarray) -> tuple[Ended, Running]:
    """Count of finished episodes, and the running ones after it. Arrays are [T, C]; `over` only where `valid`.

    Counting is done once per complete trajectory, for all columns: per step it would double the server's cost of a
    step. Steps up to a column's last end belong to finished episodes, later ones to the running episode.
    """
    ends = over.any(axis=0)
    last = np.where(ends, len(over) - 1 - over[::-1].argmax(axis=0), -1)
    after = np.arange(len(over))[:, None] > last
    after &= valid
    steps, left = valid.sum(axis=0), after.sum(axis=0)
    earned = np.add.reduce(reward, axis=0, dtype=np.float64, where=valid)
    rest = np.add.reduce(reward, axis=0, dtype=np.float64, where=after)
    done = (running.earned + earned - rest)[ends], (running.length + steps - left)[ends]
    now = Running(np.where(ends, rest, running.earned + earned), np.where(ends, left, running.length + steps))
    return Ended(int(over.sum()), float(done[0].sum()), int(done[1].sum())), now
