"""Actors on the nodes of a Ray cluster (Moritz et al. 2018): a thread here for each, which has its orders done there.

The thread is an actor as any other: tickets, versions, slots and vitals are those of `worker.work`, so that what holds
of actors in threads holds of these. Of each rollout one call goes out and one answer comes back, whose arrays Ray keeps
in shared memory on both sides; weights are put there once a version, and fetched once a node. Ray begins no actor again
and repeats no call: who died is begun again by the crew, which knows what it owes, and with what delay.

An answer that comes after its actor was given up is read by nobody.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longhaul.runtime.launch import ray_cluster
from longhaul.runtime.shared_memory import Wakeup
from longhaul.topologies.actor_learner import actor as worker
from longhaul.topologies.actor_learner.actor import Collect, Leaves
from longhaul.topologies.actor_learner.shared_buffers import Desk
from longhaul.topologies.actor_process import FEW
from longhaul.topologies.staleness import Ticket

LOOK = 0.1
"""Seconds between two looks whether an actor that is waited for was given up."""


class Given(Exception):
    """The actor was given up by its crew."""


class Remote:
    """What runs on a node: one actor's environment and policy."""

    def begin(self, made: bytes, actor: int) -> int:
        """Makes what actor `actor` does, of a pickled maker; -> its process."""
        os.environ |= FEW  # before anything imports JAX
        make: Callable[[int], Collect] = pickle.loads(made)
        self._collect = make(actor)
        self._version = -1
        self._weights: list[np.ndarray] = []
        self._after: Leaves = []
        return os.getpid()

    def collect(
        self, version: int, weights: Sequence[Any], state: Leaves | None, key: np.ndarray, ticket: Ticket
    ) -> tuple[Leaves, tuple[Leaves, Leaves]]:
        """-> state after, (data, scores). `state` None: as the last rollout left it. `weights`: [reference]."""
        import ray

        if version != self._version:
            self._weights = ray.get(weights[0])
            self._version = version
        before = self._after if state is None else state
        self._after, data, scores = self._collect(self._weights, before, key, ticket, version)
        return _plain(self._after), (_plain(data), _plain(scores))


def _plain(leaves: Leaves) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in leaves]


class Board:
    """The learner's side of all actors: how they are made, and the weights that lie ready for them."""

    def __init__(self, make: Callable[[int], Collect], versions: int) -> None:
        """`make` is importable; so many versions of the weights are kept."""
        self._made, self._versions = pickle.dumps(make), versions
        self._weights: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._turn = 0

    def place(self, actor: int) -> tuple[Any, Any]:
        """A new actor, on a node that is there -> (it, its process, which will come)."""
        remote = ray_cluster.placed(Remote, self._turn)
        self._turn += 1
        return remote, remote.begin.remote(self._made, actor)

    def weights(self, version: int, leaves: Sequence[np.ndarray]) -> Any:
        """A reference to the weights of a version, put there by the first who asks."""
        import ray

        with self._lock:
            found = self._weights.get(version)
            if found is None:
                found = self._weights[version] = ray.put(list(leaves))
                for old in sorted(self._weights)[: -self._versions]:
                    del self._weights[old]
            return found


class FarHand:
    """One life of an actor on a node; a `crew.Hand`."""

    def __init__(self, desk: Desk, actor: int, board: Board, orders: Wakeup, learner: Wakeup) -> None:
        self._board, self._orders = board, orders
        self._given = threading.Event()
        self._failed: str | None = None
        self._after: Leaves | None = None
        self._remote, begun = board.place(actor)

        def run() -> None:
            try:
                self._answer(begun)
                worker.work(desk, actor, self._collect, orders, learner)
            except Given:
                pass
            except ray_cluster.Lost as error:
                self._failed = str(error)
                learner.wake()
            except Exception as error:
                worker.failed(desk, actor, error)
                self._failed = "it failed"
                learner.wake()

        self._thread = threading.Thread(target=run, name=f"actor {actor}", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        return None if self._thread.is_alive() else self._failed or "it ended"

    def end(self, within: float) -> None:
        """Its thread has ended afterwards, so that it writes nothing more, whatever its node still does."""
        import ray

        self._orders.wake()
        self._thread.join(within)
        self._given.set()
        ray.kill(self._remote)
        self._thread.join()

    def _collect(
        self, weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int
    ) -> tuple[Leaves, Leaves, Leaves]:
        """A `worker.Collect` that has it done there."""
        sent = None if state is self._after else list(state)  # it knows where it is itself
        held = [self._board.weights(version, weights)]  # in a list: else Ray would have it fetched with each call
        after, made = self._remote.collect.options(num_returns=2).remote(version, held, sent, key, ticket)
        data, scores = self._answer(made)
        self._after = self._answer(after)
        return self._after, data, scores

    def _answer(self, coming: Any) -> Any:
        """What a call gives. Raises Given as soon as the crew gives the actor up, and `membership.Lost`."""
        import ray

        while not ray.wait([coming], timeout=LOOK)[0]:
            if self._given.is_set():
                raise Given
        if self._given.is_set():
            raise Given
        return ray_cluster.fetched(coming)
