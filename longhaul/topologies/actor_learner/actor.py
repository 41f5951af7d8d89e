"""Actor: takes orders, acts with the published weights, writes rollouts to shared memory; in a thread or a process.

The process is `python -m longhaul.topologies.actor_learner.actor`. It reads a pickled `Description` of its environment
and policy from standard input; nothing is pickled after that.
"""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime.launch.process import end_with_parent
from longhaul.runtime.shared_memory import Wakeup
from longhaul.runtime.user_modules import place
from longhaul.topologies.actor_learner import shared_buffers as buffers
from longhaul.topologies.actor_learner.shared_buffers import Shapes, SharedBuffers, Size
from longhaul.topologies.staleness import Ticket

BEAT = 0.5
"""Seconds between two heartbeats of a waiting actor."""

Leaves = Sequence[Any]
"""NumPy arrays, or arrays that NumPy reads without a copy."""

Collect = Callable[[list[np.ndarray], Leaves, np.ndarray, Ticket, int], tuple[Leaves, Leaves, Leaves]]
"""(weights, state of the environments, run's key, ticket, version) -> (state after, data, scores), all computed."""


class Description(NamedTuple):
    """Input of an actor process."""

    actor: int
    make: Callable[[int], Collect]  # importable; takes the actor's number
    shapes: Shapes
    size: Size
    memory: int  # descriptors
    reads: int
    writes: int


def work(shared: SharedBuffers, actor: int, collect: Collect, orders: Wakeup, learner: Wakeup) -> None:
    """Collection of the ordered rollouts until the buffers are closed or the learner is gone."""
    vitals = shared.vitals[actor]
    ring = shared.weights.reader()
    kept: Leaves | None = None  # state after the last turn of this life
    kept_at = 0, 0  # its turn, and the entry into states of the learner's that it goes on from
    since = shared.set_state(actor, buffers.WAITS)
    while not shared.closed[0]:
        ticket = shared.next_ticket(actor)
        if ticket is None:
            shared.set_state(actor, buffers.WAITS)
            if not orders.wait(BEAT):
                return
            continue
        began = shared.set_state(actor, buffers.ACTS)
        version, weights = ring.at(ticket.version)
        entry = shared.entry
        state = kept if kept is not None and kept_at == (ticket.turn - 1, entry) else shared.state(actor, ticket.turn)
        carry, data, scores = collect(split(weights, shared.shapes), state, shared.key, ticket, version)
        now = shared.set_state(actor, buffers.WRITES)
        shared.deliver(actor, ticket, version, data, scores, carry)
        learner.wake()
        kept, kept_at = carry, (ticket.turn, entry)
        vitals[buffers.WAITED_NS] += began - since
        vitals[buffers.ACTED_NS] += now - began
        vitals[buffers.LONGEST_NS] = max(int(vitals[buffers.LONGEST_NS]), now - began)
        vitals[buffers.ROLLOUTS] += 1
        since = now
    shared.set_state(actor, buffers.ENDED)


def split(buffer: np.ndarray, shapes: Shapes) -> list[np.ndarray]:
    """Arrays of the policy in a flat buffer; views."""
    arrays, offset = [], 0
    for leaf in shapes.weights:
        arrays.append(buffer[offset : offset + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape))
        offset += leaf.nbytes
    return arrays


def main() -> int:
    """Main function of an actor process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner, which ends us
    end_with_parent()
    about: Description = pickle.load(sys.stdin.buffer)
    shared = SharedBuffers(about.memory, about.shapes, about.size)
    try:
        shared.set_state(about.actor, buffers.STARTS)
        collect = about.make(about.actor)
        work(shared, about.actor, collect, Wakeup(about.reads, -1), Wakeup(-1, about.writes))
    except Exception as error:
        shared.set_error(about.actor, f"{type(error).__name__}{place(error)}: {error}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
