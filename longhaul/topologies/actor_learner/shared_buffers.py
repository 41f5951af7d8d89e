"""Shared buffers between actors and learner: orders, rollouts, states of environments and vitals, in one memory.

Every word has one writer. An order is a ticket; its actor reads it once `ordered` has grown. A rollout belongs to the
learner once `finished` has grown. So an actor may die at any instruction: its orders stay for its successor, which
rewrites the unfinished slot.

Slots of a batch are adjacent, [depth, N, ...] per array: the learner takes a batch [N, ...] without a copy on the host.
The environment's state after turn j lies at j % depth, so a repeated rollout starts from the same state.

Weights lie beside them in a ring, one flat buffer a version, with one writer and any number of readers. Version v lies
in place v % H, so the H newest can be read. The writer never waits: it makes the mark of the place odd, copies,
and makes it even again (a sequence lock; Lameter, "Effective synchronization on Linux/NUMA systems", 2005). A reader
copies, and repeats the copy if the mark changed meanwhile. A copy whose checksum (CRC-32C) differs from the published
one is refused, so no actor uses damaged weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

from longhaul.runtime import shared_memory
from longhaul.runtime.shared_memory import Leaf, Plan
from longhaul.topologies.staleness import Ticket

STARTS, WAITS, ACTS, WRITES, ENDED = range(5)
"""States of an actor."""

STATES = ("starts", "waits", "acts", "writes", "ended")

INCARNATION, STATE, BEAT, ACTED_NS, WAITED_NS, ROLLOUTS, LONGEST_NS, PROCESS = range(8)
"""Vitals of an actor: number of its life; its state and the time of its last change (ns of the monotonic clock); ns in
rollouts, ns of waiting; rollouts; ns of the longest one; process id."""

BEGUN, WRITTEN, OWNER, ACTED_BY = range(4)
"""Head of a slot: the ticket's number plus 1, set when writing begins and again when it ends; actor and life of the
writer; version of the weights that acted."""


class Shapes(NamedTuple):
    """Arrays of one actor, as flat lists."""

    weights: tuple[Leaf, ...]
    carry: tuple[Leaf, ...]
    data: tuple[Leaf, ...]
    scores: tuple[Leaf, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.weights)


class Size(NamedTuple):
    actors: int
    depth: int  # batches, states of each environment and versions of the weights in memory at once


class Head(NamedTuple):
    """Origin of the rollout in a slot."""

    actor: int
    incarnation: int
    version: int


PATIENCE = 1000
"""Number of copies a reader tries before it reports that the weights change too fast."""


class Garbage(ValueError):
    """Error: a slot holds a rollout that was not ordered."""


def weight_regions(size: int, places: int) -> Iterator[tuple[str, Leaf]]:
    """Shared arrays of a ring for policies of `size` bytes."""
    yield "weights/newest", Leaf((8,), "int64")
    yield "weights/marks", Leaf((places, 8), "int64")
    yield "weights/bytes", Leaf((places, size), "uint8")


class WeightRing:
    """`types.Weights` of flat policies, uint8 [size], between processes of one machine. Only one process publishes."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._newest, self._marks = arrays["weights/newest"], arrays["weights/marks"]
        self._weights = arrays["weights/bytes"]
        self._buffer, self._read = np.empty(0, np.uint8), -1

    def reader(self) -> WeightRing:
        """Reader of the same ring for another thread, with its own buffer."""
        return WeightRing(self._arrays)

    def publish(self, version: int, params: np.ndarray) -> None:
        """Publication of `params`, uint8 [size], as `version`. Versions ascend, or restart before the first read."""
        place = version % len(self._weights)
        mark = self._marks[place]
        mark[0] |= 1  # being written
        mark[1] = version
        self._weights[place] = params
        mark[2] = _checksum(params)
        mark[0] += 1
        self._newest[0] = version + 1

    @property
    def newest(self) -> int:
        """Newest version; -1 if there is none."""
        return int(self._newest[0]) - 1

    def latest(self) -> tuple[int, np.ndarray]:
        """(version, bytes) of the newest version, in the reader's buffer; copied only if the version is new."""
        return self.at(-1)

    def at(self, version: int) -> tuple[int, np.ndarray]:
        """(version, bytes) of a version, or of the newest if it is negative."""
        target = self.newest if version < 0 else version
        if target < 0 or target != self._read:
            if not len(self._buffer):
                self._buffer = np.empty(self._weights.shape[1], np.uint8)
            self._read = -1  # invalid until the read is complete
            self._read = self.read(version, self._buffer)
        return self._read, self._buffer

    def view(self, version: int) -> np.ndarray:
        """View of a version's bytes, for the publisher; valid until its place is overwritten. Zeros if the version is
        absent."""
        place = version % len(self._weights)
        if version < 0 or int(self._marks[place, 1]) != version:
            return np.zeros_like(self._weights[0])
        return self._weights[place]

    def read(self, version: int, out: np.ndarray) -> int:
        """Number of a version, or of the newest if it is negative, which is copied to `out`.

        LookupError if it was never published, has been overwritten, or is damaged.
        """
        for _ in range(PATIENCE):
            target = self.newest if version < 0 else version
            if target < 0:
                raise LookupError("no weights were published yet")
            place = target % len(self._weights)
            before, held, checksum = (int(word) for word in self._marks[place, :3])
            if not before & 1 and held == target:
                out[...] = self._weights[place]
                if int(self._marks[place, 0]) == before:
                    if _checksum(out) != checksum:
                        raise LookupError(f"version {target} of the weights is damaged: its checksum is another")
                    return target
            elif not before & 1 and version >= 0:
                raise LookupError(f"version {version} of the weights is not there; the newest is {self.newest}")
        raise LookupError("the weights change faster than they can be read")


def _checksum(weights: np.ndarray) -> int:
    return int(google_crc32c.value(np.ascontiguousarray(weights)))


def planned(shapes: Shapes, size: Size) -> Plan:
    """Positions of all buffers in their memory."""
    n, depth = size
    named = {
        "closed": Leaf((8,), "int64"),
        "key": Leaf((8,), "uint32"),
        "entries": Leaf((8,), "int64"),
        "ordered": Leaf((n, 8), "int64"),
        "finished": Leaf((n, 8), "int64"),
        "orders": Leaf((n, depth, 8), "int64"),
        "vitals": Leaf((n, 16), "int64"),
        "words": Leaf((n, 512), "uint8"),
        "heads": Leaf((depth, n, 8), "int64"),
    }
    for name in ("data", "scores", "carry"):
        for i, leaf in enumerate(getattr(shapes, name)):
            named[f"{name}/{i}"] = Leaf((depth, n, *leaf.shape), leaf.dtype)
    return shared_memory.plan([*named.items(), *weight_regions(shapes.weight_bytes, depth)])


class SharedBuffers:
    """View of the buffers in one process."""

    def __init__(self, descriptor: int, shapes: Shapes, size: Size) -> None:
        self.shapes, self.size = shapes, size
        views = shared_memory.arrays(descriptor, planned(shapes, size))
        self.closed, self.key, self._entries = views["closed"], views["key"], views["entries"]
        self.ordered, self.finished = views["ordered"][:, 0], views["finished"][:, 0]
        self.vitals = views["vitals"]
        self.weights = WeightRing(views)
        self._orders, self._heads, self._words = views["orders"], views["heads"], views["words"]
        self._data = [views[f"data/{i}"] for i in range(len(shapes.data))]
        self._scores = [views[f"scores/{i}"] for i in range(len(shapes.scores))]
        self._carry = [views[f"carry/{i}"] for i in range(len(shapes.carry))]

    # ------------------------------------------------------------------------------------------------- the learner's

    def order(self, actor: int, ticket: Ticket) -> None:
        """Give a ticket to an actor; the memory holds all tickets that it may have open."""
        self._orders[actor, int(self.ordered[actor]) % self.size.depth, :4] = ticket
        self.ordered[actor] += 1

    def check(self, actor: int, ticket: Ticket) -> Head:
        """Head of a finished rollout. Raises Garbage if it is not the one that was ordered."""
        head = self._heads[ticket.batch % self.size.depth, ticket.place]
        number = _number(ticket, self.size.actors)
        owner, incarnation = divmod(int(head[OWNER]), 2**32)
        lives = int(self.vitals[actor, INCARNATION])
        if head[BEGUN] != number or head[WRITTEN] != number or owner != actor or not 0 <= incarnation <= lives:
            origin = f"{int(head[BEGUN]) - 1} to {int(head[WRITTEN]) - 1} by actor {owner} in life {incarnation}"
            raise Garbage(f"actor {actor} was to write ticket {number - 1}, and its slot says {origin}")
        version = int(head[ACTED_BY])
        newest = self.weights.newest
        if not 0 <= version <= newest or (ticket.version >= 0 and version != ticket.version):
            raise Garbage(f"actor {actor} acted by version {version} of the weights; the newest is {newest}")
        return Head(owner, incarnation, version)

    def batch(self, number: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(data, scores) of a complete batch, [N, ...] each; views, valid until its memory is reused."""
        room = number % self.size.depth
        return [x[room] for x in self._data], [x[room] for x in self._scores]

    def carry(self, turns: Sequence[int]) -> list[np.ndarray]:
        """States of all environments after these turns (one per actor), [N, ...] each."""
        places = [turn % self.size.depth for turn in turns]
        if len(set(places)) == 1:
            return [x[places[0]] for x in self._carry]
        return [np.stack([x[place, a] for a, place in enumerate(places)]) for x in self._carry]

    def set_carry(self, turns: Sequence[int], leaves: Sequence[np.ndarray]) -> None:
        """Inverse of `carry`: another entry, after which no actor goes on from a state of its own."""
        for x, leaf in zip(self._carry, leaves, strict=True):
            for actor, turn in enumerate(turns):
                x[turn % self.size.depth, actor] = leaf[actor]
        self._entries[0] += 1

    def last_error(self, actor: int) -> str:
        """Last error of an actor that failed."""
        return bytes(self._words[actor]).rstrip(b"\0").decode(errors="replace")

    # --------------------------------------------------------------------------------------------------- the actors'

    def next_ticket(self, actor: int) -> Ticket | None:
        """Oldest unfinished order; None if there is none."""
        finished = int(self.finished[actor])
        if finished >= self.ordered[actor]:
            return None
        return Ticket(*(int(word) for word in self._orders[actor, finished % self.size.depth, :4]))

    @property
    def entry(self) -> int:
        """Number of times that the states of the environments were set by the learner."""
        return int(self._entries[0])

    def state(self, actor: int, turn: int) -> list[np.ndarray]:
        """State of an actor's environment before a turn."""
        return [x[(turn - 1) % self.size.depth, actor] for x in self._carry]

    def deliver(
        self, actor: int, ticket: Ticket, version: int, data: Sequence[np.ndarray], scores: Sequence[np.ndarray],
        carry: Sequence[np.ndarray],
    ) -> None:  # fmt: skip
        """Hand-over of a rollout to the learner, written to its slot."""
        room, number = ticket.batch % self.size.depth, _number(ticket, self.size.actors)
        head = self._heads[room, ticket.place]
        head[BEGUN] = number
        for all_, leaves in ((self._data, data), (self._scores, scores)):
            for x, leaf in zip(all_, leaves, strict=True):
                x[room, ticket.place] = leaf
        for x, leaf in zip(self._carry, carry, strict=True):
            x[ticket.turn % self.size.depth, actor] = leaf
        head[OWNER] = actor * 2**32 + int(self.vitals[actor, INCARNATION])
        head[ACTED_BY] = version
        head[WRITTEN] = number
        self.finished[actor] += 1

    def set_error(self, actor: int, message: str) -> None:
        """Store the error of an actor."""
        encoded = message.encode()[: self._words.shape[1]]
        self._words[actor] = 0
        self._words[actor, : len(encoded)] = np.frombuffer(encoded, np.uint8)

    def set_state(self, actor: int, state: int) -> int:
        """Change of an actor's state; -> ns of the monotonic clock."""
        now = time.monotonic_ns()
        self.vitals[actor, BEAT] = now
        self.vitals[actor, STATE] = state
        return now


def _number(ticket: Ticket, actors: int) -> int:
    return ticket.batch * actors + ticket.place + 1
