"""Actors on the nodes of a Ray cluster (Moritz et al. 2018): one local thread each sends its orders to a node.

The thread runs `actor.work` as every actor does, with the same tickets, versions, slots and vitals. A rollout is one
call and one reply, whose arrays Ray keeps in shared memory on both sides. Weights are stored once a version and fetched
once a node. Ray restarts no actor and repeats no call: the pool does, because it knows the open tickets.

A reply that arrives after its actor was given up is ignored.
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
from longhaul.topologies.actor_learner import actor as actors
from longhaul.topologies.actor_learner.actor import Collect, Leaves
from longhaul.topologies.actor_learner.shared_buffers import Shapes, SharedBuffers
from longhaul.topologies.actor_process import FEW
from longhaul.topologies.staleness import Ticket

LOOK = 0.1
"""Seconds between two checks, while a call runs, whether its actor was given up."""


class GivenUp(Exception):
    """The pool gave the actor up."""


class Remote:
    """Environment and policy of an actor, on a node."""

    def begin(self, made: bytes, shapes: Shapes, actor: int) -> int:
        """Create the rollout function of actor `actor` from a pickled maker; -> process id."""
        os.environ |= FEW  # before anything imports JAX
        make: Callable[[int], Collect] = pickle.loads(made)
        self._collect, self._shapes = make(actor), shapes
        self._version = -1
        self._weights: list[np.ndarray] = []
        self._after: Leaves = []
        return os.getpid()

    def collect(
        self, version: int, weights: Sequence[Any], state: Leaves | None, key: np.ndarray, ticket: Ticket
    ) -> tuple[Leaves, tuple[Leaves, Leaves]]:
        """Rollout: state after, (data, scores). `state` None: that after the last rollout. `weights`: [reference]."""
        import ray

        if version != self._version:
            self._weights = actors.split(ray.get(weights[0]), self._shapes)
            self._version = version
        before = self._after if state is None else state
        self._after, data, scores = self._collect(self._weights, before, key, ticket, version)
        return _plain(self._after), (_plain(data), _plain(scores))


def _plain(leaves: Leaves) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in leaves]


class RayWeights:
    """`types.Weights` in the object store of the joined cluster; keeps the newest versions."""

    def __init__(self, versions: int) -> None:
        self._kept = versions
        self._references: dict[int, Any] = {}

    def publish(self, version: int, params: Any) -> None:
        import ray

        self._references[version] = ray.put(params)
        for old in sorted(self._references)[: -self._kept]:
            del self._references[old]

    def latest(self) -> tuple[int, Any]:
        """LookupError where nothing was published."""
        import ray

        if not self._references:
            raise LookupError("no weights were published yet")
        version = max(self._references)
        return version, ray.get(self._references[version])

    def reference(self, version: int) -> Any:
        """Ray reference of a version, for its actors."""
        return self._references[version]


class Board:
    """Factory of a run's actors on the cluster, and their weights."""

    def __init__(self, make: Callable[[int], Collect], shapes: Shapes, versions: int) -> None:
        """`make` is importable. `versions`: number of weight versions kept."""
        self._made, self._shapes = pickle.dumps(make), shapes
        self.weights = RayWeights(versions)
        self._turn = 0

    def place(self, actor: int) -> tuple[Any, Any]:
        """New actor on a live node -> (actor, future of its process id)."""
        remote = ray_cluster.placed(Remote, self._turn)
        self._turn += 1
        return remote, remote.begin.remote(self._made, self._shapes, actor)


class RayActor:
    """Incarnation of an actor on a node; an `ActorHandle`."""

    def __init__(self, shared: SharedBuffers, actor: int, board: Board, orders: Wakeup, learner: Wakeup) -> None:
        self._board, self._orders = board, orders
        self._given_up = threading.Event()
        self._failed: str | None = None
        self._after: Leaves | None = None
        self._remote, begun = board.place(actor)

        def run() -> None:
            try:
                self._answer(begun)
                actors.work(shared, actor, self._collect, orders, learner)
            except GivenUp:
                pass
            except ray_cluster.Lost as error:
                self._failed = str(error)
                learner.wake()
            except Exception as error:
                actors.failed(shared, actor, error)
                self._failed = "it failed"
                learner.wake()

        self._thread = threading.Thread(target=run, name=f"actor {actor}", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        return None if self._thread.is_alive() else self._failed or "it ended"

    def kill(self) -> None:
        import ray

        self._given_up.set()
        ray.kill(self._remote)

    def end(self, within: float = 0.0) -> None:
        """The thread has ended on return, so nothing more is written, even if the node is still working."""
        self._orders.wake()
        self._thread.join(within)
        self.kill()
        self._thread.join()

    def _collect(
        self, weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int
    ) -> tuple[Leaves, Leaves, Leaves]:
        """An `actor.Collect` that runs on the node."""
        sent = None if state is self._after else list(state)  # the node still has this state
        reference = [self._board.weights.reference(version)]  # in a list: else Ray would fetch it with each call
        after, made = self._remote.collect.options(num_returns=2).remote(version, reference, sent, key, ticket)
        data, scores = self._answer(made)
        self._after = self._answer(after)
        return self._after, data, scores

    def _answer(self, coming: Any) -> Any:
        """Result of a call. Raises GivenUp once the pool gives the actor up, and `ray_cluster.Lost`."""
        import ray

        while not ray.wait([coming], timeout=LOOK)[0]:
            if self._given_up.is_set():
                raise GivenUp
        if self._given_up.is_set():
            raise GivenUp
        return ray_cluster.fetched(coming)
