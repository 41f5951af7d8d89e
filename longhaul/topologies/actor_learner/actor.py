"""The actor: takes its orders, acts with the weights of the lane, writes rollouts to their slots. In a thread, or as a
process of its own.

A process is begun as `python -m longhaul.topologies.actor_learner.actor`, with a description on its standard input
that says how to make
its environment and policy; nothing is pickled after that. It ends with its parent, be that killed.
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime.shared_memory import Wakeup
from longhaul.topologies.actor_learner import shared_buffers as desks
from longhaul.topologies.actor_learner.shared_buffers import Desk, Shapes, Size
from longhaul.topologies.actor_process import end_with_parent
from longhaul.topologies.staleness import Ticket

BEAT = 0.5
"""Seconds between two signs of life of an actor that waits."""

Leaves = Sequence[Any]
"""Arrays, NumPy's or what NumPy can read without a copy."""

Collect = Callable[[list[np.ndarray], Leaves, np.ndarray, Ticket, int], tuple[Leaves, Leaves, Leaves]]
"""(weights, state of the environments, the run's key, ticket, version) -> (state after, data, scores), which it waits
for."""


class Description(NamedTuple):
    """What a process needs to be an actor."""

    actor: int
    make: Callable[[int], Collect]  # importable; takes the actor's number
    shapes: Shapes
    size: Size
    memory: int  # descriptors
    reads: int
    writes: int
    parent: int


def work(desk: Desk, actor: int, collect: Collect, orders: Wakeup, learner: Wakeup) -> None:
    """Does what is ordered until the desk is closed, or nobody is left to order."""
    vitals = desk.vitals[actor]
    weights, version = np.empty(desk.shapes.weight_bytes, np.uint8), -1
    policy = _split(weights, desk.shapes)
    kept: Leaves | None = None  # the state after this life's last turn
    kept_turn = 0
    since = desk.at(actor, desks.WAITS)
    while not desk.closed[0]:
        ticket = desk.asked(actor)
        if ticket is None:
            desk.at(actor, desks.WAITS)
            if not orders.wait(BEAT):
                return
            continue
        began = desk.at(actor, desks.ACTS)
        if ticket.version != version or version < 0:
            wanted = desk.lane.latest if ticket.version < 0 else ticket.version
            if wanted != version:
                version = desk.lane.read(wanted if ticket.version >= 0 else -1, weights)
        state = kept if kept is not None and kept_turn == ticket.turn - 1 else desk.state(actor, ticket.turn)
        carry, data, scores = collect(policy, state, desk.key, ticket, version)
        now = desk.at(actor, desks.WRITES)
        desk.deliver(actor, ticket, version, data, scores, carry)
        learner.wake()
        kept, kept_turn = carry, ticket.turn
        vitals[desks.WAITED_NS] += began - since
        vitals[desks.ACTED_NS] += now - began
        vitals[desks.LONGEST_NS] = max(int(vitals[desks.LONGEST_NS]), now - began)
        vitals[desks.ROLLOUTS] += 1
        since = now
    desk.at(actor, desks.ENDED)


def _split(buffer: np.ndarray, shapes: Shapes) -> list[np.ndarray]:
    """The policy's arrays in a flat buffer."""
    found, offset = [], 0
    for leaf in shapes.weights:
        found.append(buffer[offset : offset + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape))
        offset += leaf.nbytes
    return found


def failed(desk: Desk, actor: int, error: BaseException) -> None:
    """Leaves word of why an actor ends."""
    desk.say(actor, f"{type(error).__name__}: {error}")


def main() -> int:
    """A process that is an actor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's, who ends us
    about: Description = pickle.load(sys.stdin.buffer)
    end_with_parent(about.parent)
    desk = Desk(about.memory, about.shapes, about.size)
    try:
        desk.at(about.actor, desks.STARTS)
        collect = about.make(about.actor)
        work(desk, about.actor, collect, Wakeup(about.reads, -1), Wakeup(-1, about.writes))
    except Exception as error:
        failed(desk, about.actor, error)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
