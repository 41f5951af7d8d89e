"""Transport on one machine: the blocks of the wire format in shared memory, and wake-up pipes.

Each life of an actor has its own unnamed memory: a killed actor cannot write to its successor's memory, and the memory
is freed when both sides are gone. Each slot has a counter of posted steps, written by the actor, and one of answered
steps, written by the server. There are no locks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime import shared_memory
from longhaul.runtime.shared_memory import Leaf, Wakeup, wakeup
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.wire import NONE_HELD, Answer, Arrival, Block, Codec, Held, Lost, WireError

POSTED, FINALS = 0, 1
"""Actor's words of a slot: number of steps posted; episodes that ended in the last one."""

ANSWERED, HELD = 0, 1
"""Server's words of a slot: number of steps answered; 1 if the life starts from the state in memory."""


class Ends(NamedTuple):
    """Actor's ends of the transport: descriptors of its memory and wake-up pipes, and its seeds."""

    memory: int
    reads: int
    writes: int
    seeds: tuple[int, ...]


def _plan(codec: Codec, slots: int) -> shared_memory.Plan:
    """Memory plan of one life. The words of the two sides lie on different cache lines."""
    size, state = codec.block_bytes(codec.layout.columns), codec.keeps.size
    words = ("theirs", Leaf((slots, 8), "int64")), ("ours", Leaf((slots, 8), "int64"))
    return shared_memory.plan(
        [
            *words,
            ("steps", Leaf((slots, size), "uint8")),
            ("actions", Leaf((slots, codec.action_bytes), "uint8")),
            ("states", Leaf((slots, state), "uint8")),
        ]
    )


class _Views:
    """Views of one life's memory, for both sides."""

    def __init__(self, descriptor: int, codec: Codec, slots: int) -> None:
        self.codec = codec
        found = shared_memory.arrays(descriptor, _plan(codec, slots))
        self.theirs, self.ours, self.states = found["theirs"], found["ours"], found["states"]
        self.posted, self.answered = self.theirs[:, POSTED], self.ours[:, ANSWERED]
        self._steps = found["steps"]
        self.actions = [codec.action(row) for row in found["actions"]]
        self._blocks: list[dict[int, Block]] = [{} for _ in range(slots)]

    def block(self, slot: int, finals: int) -> Block:
        known = self._blocks[slot]
        if finals not in known:
            known[finals] = self.codec.block(self._steps[slot], finals)
        return known[finals]


class _Life:
    def __init__(self, number: int, views: _Views, wakes: Wakeup, slots: int) -> None:
        self.number, self.views, self.wakes = number, views, wakes
        self.taken = [0] * slots  # steps that arrived
        self.waits = [False] * slots  # for an answer


class ShmTransport:
    """Server side, a `Transport`. The process of actor a gets `join(a)`; call `cut` at its end."""

    def __init__(self, codec: Codec, actors: int, slots: int, seeds: Any, held: Held = NONE_HELD) -> None:
        self._codec, self._slots, self._seeds, self._held = codec, slots, seeds, held
        self._lives: dict[int, _Life] = {}
        self._numbers = [0] * actors
        self._lost: list[Lost] = []
        self._wakeup = wakeup()

    def join(self, actor: int) -> Ends:
        """Start of a life of an actor. The caller closes the descriptors once the process has inherited them."""
        if actor in self._lives:
            self.cut(actor, "another one takes its place")
        self._numbers[actor] += 1
        number = self._numbers[actor]
        descriptor = shared_memory.create(_plan(self._codec, self._slots).size)
        wakes = wakeup()
        views = _Views(descriptor, self._codec, self._slots)
        for slot in range(self._slots):
            state = self._held.get(actor * self._slots + slot)
            if state is not None:
                views.states[slot], views.ours[slot, HELD] = state, 1
        self._lives[actor] = _Life(number, views, wakes, self._slots)
        return Ends(descriptor, os.dup(wakes.reads), os.dup(self._wakeup.writes), tuple(self._seeds(actor, number)))

    def wait(self, seconds: float) -> None:
        if not self._lost:
            self._wakeup.wait(seconds)

    def take(self) -> list[Arrival | Lost]:
        found: list[Arrival | Lost] = list(self._lost)
        self._lost.clear()
        for actor, life in list(self._lives.items()):
            for slot, (posted, taken) in enumerate(zip(life.views.posted.tolist(), life.taken, strict=True)):
                if posted == taken:
                    continue
                try:
                    step = self._step(life, slot, posted)
                except WireError as error:
                    self.cut(actor, str(error))
                    break
                life.taken[slot], life.waits[slot] = posted, True
                state = life.views.states[slot].copy() if self._codec.keeps.after(taken) else None
                found.append(Arrival(actor * self._slots + slot, life.number, taken == 0, step, state))
        return found

    def _step(self, life: _Life, slot: int, posted: int) -> Block:
        """Posted step of a slot. WireError if none was due, or if it is inconsistent."""
        taken, finals = life.taken[slot], int(life.views.theirs[slot, FINALS])
        if posted != taken + 1 or life.waits[slot]:
            raise WireError(f"step {posted - 1} of slot {slot} was posted after step {taken - 1}")
        if not 0 <= finals <= self._codec.layout.columns:
            raise WireError(f"{finals} final observations of {self._codec.layout.columns} columns")
        step = life.views.block(slot, finals)
        wire.check_block(step, first=taken == 0)
        return step

    def answer(self, answers: Sequence[Answer]) -> None:
        woken: dict[int, Wakeup] = {}
        for group, number, action in answers:
            actor, slot = divmod(group, self._slots)
            life = self._lives.get(actor)
            if life is None or life.number != number:
                continue
            life.views.actions[slot][...] = action
            life.waits[slot] = False
            life.views.answered[slot] = life.taken[slot]
            woken[actor] = life.wakes
        for wakes in woken.values():
            wakes.wake()

    def cut(self, actor: int, why: str) -> None:
        life = self._lives.pop(actor, None)
        if life is not None:
            life.wakes.close()
            self._lost.append(Lost(actor, why))

    def live(self) -> frozenset[int]:
        return frozenset(self._lives)

    def close(self) -> None:
        for actor in list(self._lives):
            self.cut(actor, "the server ends")
        self._wakeup.close()


class ShmActorTransport:
    """Actor side, an `ActorBlocks`, over the descriptors of `Ends`. ConnectionError once the server is gone."""

    def __init__(self, codec: Codec, slots: int, ends: Ends) -> None:
        self.codec = codec
        self._views, self._seeds, self._slots = _Views(ends.memory, codec, slots), ends.seeds, slots
        self._answers, self._server = Wakeup(ends.reads, -1), Wakeup(-1, ends.writes)
        self.blocks = [self._views.block(slot, 0) for slot in range(slots)]
        self._done = [0] * slots  # steps that were answered

    def open(self) -> list[int]:
        return list(self._seeds)

    def held(self, slot: int) -> np.ndarray | None:
        return self._views.states[slot] if self._views.ours[slot, HELD] else None

    def ended(self, slot: int, finals: int) -> Block:
        return self._views.block(slot, finals)

    def keeps(self, slot: int, finals: int) -> np.ndarray | None:
        return self._views.states[slot] if self.codec.keeps.after(self._done[slot]) else None

    def post(self, slot: int, finals: int) -> None:
        self._views.theirs[slot, FINALS] = finals
        self._views.posted[slot] = self._done[slot] + 1
        self._server.wake()

    def next(self) -> tuple[int, np.ndarray]:
        while True:
            answered = self._views.answered.tolist()
            for slot in range(self._slots):
                if answered[slot] != self._done[slot]:
                    self._done[slot] = answered[slot]
                    return slot, self._views.actions[slot]
            if not self._answers.wait(60.0):
                raise ConnectionError("the server is gone")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._answers.close()
            self._server.close()
