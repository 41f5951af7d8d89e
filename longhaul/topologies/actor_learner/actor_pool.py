"""Pool of actors: starts, watches and restarts them, and hands finished rollouts to the learner in order.

An actor that ended, hangs, or wrote a wrong rollout is ended for good before its successor starts. The successor
continues at the same place, because orders and states of environments lie in the shared buffers. An actor that keeps
failing without finishing a rollout ends the run; its last error is reported.

On the nodes of a Ray cluster (Moritz et al. 2018) each actor has a local thread, which sends its orders to a node.
The thread runs `actor.work` as every actor does, with the same tickets, versions, slots and vitals. A rollout is one
call and one reply, whose arrays Ray keeps in shared memory on both sides. Weights are stored once a version and fetched
once a node. Ray restarts no actor and repeats no call: the pool does, because it knows the open tickets.

A reply that arrives after its actor was given up is ignored.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longhaul.runtime import heartbeat, shared_memory
from longhaul.runtime.heartbeat import SILENCE, Silence
from longhaul.runtime.launch import ray_cluster
from longhaul.runtime.launch.process import Process
from longhaul.runtime.shared_memory import Wakeup, wakeup
from longhaul.runtime.signals import AT_WORK
from longhaul.runtime.user_modules import place
from longhaul.topologies import staleness
from longhaul.topologies.actor_learner import actor as actors
from longhaul.topologies.actor_learner import shared_buffers as buffers
from longhaul.topologies.actor_learner.actor import Collect, Description, Leaves
from longhaul.topologies.actor_learner.shared_buffers import Garbage, Head, Shapes, SharedBuffers, Size
from longhaul.topologies.actor_process import FEW, STARTING, ActorHandle, Actors, process
from longhaul.topologies.staleness import Book, Rule, Ticket

if TYPE_CHECKING:
    pass

WATCH = 0.2
"""Seconds between two health checks of the actors."""

LEAVE = 3.0
"""Seconds for all actors to end by themselves at the end of a run."""

LOOK = 0.1
"""Seconds between two checks, while a call to a node runs, whether its actor was given up."""


class ActorThread:
    """Actor in a thread of this process; an `ActorHandle`."""

    def __init__(
        self, shared: SharedBuffers, actor: int, make: Callable[[int], Collect], orders: Wakeup, learner: Wakeup
    ) -> None:
        self._failed: str | None = None
        self._orders = orders
        self._closed = shared.closed

        def run() -> None:
            try:
                actors.work(shared, actor, make(actor), orders, learner)
            except ray_cluster.Lost as error:
                self._failed = str(error)
                learner.wake()
            except Exception as error:
                shared.set_error(actor, f"{type(error).__name__}{place(error)}: {error}")
                self._failed = "it failed"
                learner.wake()

        self._thread = threading.Thread(target=run, name=f"{AT_WORK} {actor}", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        return None if self._thread.is_alive() else self._failed or "it ended"

    def kill(self) -> None:
        """Only a request: a thread cannot be killed."""
        self._orders.wake()

    def end(self, within: float = 0.0) -> None:
        self.join(within if self._closed[0] else max(within, SILENCE))

    def join(self, within: float | None = None) -> None:
        self._orders.wake()
        self._thread.join(within)


# ----------------------------------------------------------------------------------------------------- on a Ray cluster


class Remote:
    """Environment and policy of an actor, on a node."""

    def begin(self, make_bytes: bytes, shapes: Shapes, actor: int) -> int:
        """Start of actor `actor`, whose rollout function a pickled maker creates; -> process id."""
        os.environ |= FEW  # before anything imports JAX
        make: Callable[[int], Collect] = pickle.loads(make_bytes)
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


class Board:
    """Factory of a run's actors on the cluster, and the newest versions of their weights in its object store."""

    def __init__(self, make: Callable[[int], Collect], shapes: Shapes, versions: int) -> None:
        """`make` is importable. `versions`: number of weight versions kept."""
        self._made, self._shapes, self._versions = pickle.dumps(make), shapes, versions
        self.references: dict[int, Any] = {}  # version -> Ray's reference to its weights
        self._turn = 0

    def publish(self, version: int, weights: np.ndarray) -> None:
        import ray

        self.references[version] = ray.put(weights)
        for old in sorted(self.references)[: -self._versions]:
            del self.references[old]

    def place(self, actor: int) -> tuple[Any, Any]:
        """New actor on a live node -> (actor, future of its process id)."""
        remote = ray_cluster.placed(Remote, self._turn)
        self._turn += 1
        return remote, remote.begin.remote(self._made, self._shapes, actor)


class RayActor:
    """Incarnation of an actor on a node; an `ActorHandle`."""

    def __init__(self, shared: SharedBuffers, actor: int, board: Board, orders: Wakeup, learner: Wakeup) -> None:
        self._board = board
        self._given_up = threading.Event()
        self._after: Leaves | None = None
        self._remote, begun = board.place(actor)

        def make(actor: int) -> Collect:
            self._answer(begun)
            return self._collect

        self._thread = ActorThread(shared, actor, make, orders, learner)

    def ended(self) -> str | None:
        return self._thread.ended()

    def kill(self) -> None:
        import ray

        self._given_up.set()
        ray.kill(self._remote)

    def end(self, within: float = 0.0) -> None:
        """The thread has ended on return, so nothing more is written, even if the node is still working."""
        self._thread.join(within)
        self.kill()
        self._thread.join()

    def _collect(
        self, weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int
    ) -> tuple[Leaves, Leaves, Leaves]:
        """An `actor.Collect` that runs on the node."""
        sent = None if state is self._after else list(state)  # the node still has this state
        reference = [self._board.references[version]]  # in a list: else Ray would fetch it with each call
        after, result = self._remote.collect.options(num_returns=2).remote(version, reference, sent, key, ticket)
        data, scores = self._answer(result)
        self._after = self._answer(after)
        return self._after, data, scores

    def _answer(self, coming: Any) -> Any:
        """Result of a call. Raises `ray_cluster.Lost`, also once the pool gives the actor up."""
        import ray

        arrived = False
        while not arrived and not self._given_up.is_set():
            arrived = bool(ray.wait([coming], timeout=LOOK)[0])
        if self._given_up.is_set():
            raise ray_cluster.Lost("it was given up")
        return ray_cluster.fetched(coming)


# ------------------------------------------------------------------------------------------------------------- the pool


class Batch(NamedTuple):
    """Complete batch: views [N, ...], valid until its update has finished."""

    data: list[np.ndarray]
    scores: list[np.ndarray]
    heads: list[Head]


class ActorPool:
    """N actors, and the learner's side of the shared buffers. Call `close` at the end.

        pool.open(version, key, weights, carry)
        while ...:
            batch = pool.take()                      # waits
            ... learn from it ...
            pool.learnt(weights)                     # the next version
    """  # fmt: skip

    def __init__(self, rule: Rule, shapes: Shapes, make: Callable[[int], Collect], *, kind: str) -> None:
        """`make(a)`: rollout function of actor a; importable unless `kind` is "thread". `kind`: "process", "thread", or
        "ray" on the joined cluster."""
        self._make, self._kind = make, kind
        self._board = Board(make, shapes, rule.depth) if kind == "ray" else None
        self.news: list[str] = []
        """Messages about failures of actors; the reader removes them."""
        self._size = Size(rule.places, rule.depth)
        self.rule = rule
        self._memory = shared_memory.create(buffers.planned(shapes, self._size).size)
        self.shared = SharedBuffers(self._memory, shapes, self._size)
        self._learner = wakeup()
        self._orders = [wakeup() for _ in range(rule.places)]
        self._actors = Actors(rule.places, self._start, "without one rollout")
        self._rollouts = [0] * rule.places  # of each actor at its last start
        self._silence = [Silence(0.0)] * rule.places
        self._heads: dict[Ticket, Head] = {}
        self._looked = 0.0
        self.waited = 0.0  # seconds of the learner, for actors
        self.book: Book = staleness.opened(rule, 0)

    def open(
        self, version: int, key: np.ndarray, weights: Sequence[np.ndarray], carry: Sequence[np.ndarray],
        until: int | None = None,
    ) -> None:  # fmt: skip
        """Start after `version` updates. `weights`: consecutive versions, `version` last. `carry`: states of the
        environments, [N, ...] each. `until`: batch before which all are collected; None: the rule's."""
        rule = self.rule if until is None else self.rule._replace(until=until)
        self.book = staleness.opened(rule, version)
        self.shared.key[: key.size] = key.ravel()
        self.shared.set_carry([turn - 1 for turn in self.book.turn], carry)
        for back, policy in zip(range(len(weights) - 1, -1, -1), weights, strict=True):
            if version - back >= self.rule.oldest:
                self._publish(version - back, policy)
        self._hand_out()
        self._watch(time.monotonic())

    def enter(self, carry: Sequence[np.ndarray], until: int) -> None:
        """Continue up to batch `until` in other states of the environments, once all that was ordered is learnt."""
        self.book = staleness.entered(self.book, until)
        self.shared.set_carry([turn - 1 for turn in self.book.turn], carry)
        self._hand_out()

    def take(self, leaving: Callable[[], bool] = lambda: False) -> Batch | None:
        """Next batch of the learner; waits until it is complete, or returns None once `leaving`."""
        began = time.perf_counter()
        while True:
            self._drain()
            if self.book.whole:
                break
            if leaving():
                return None
            self._learner.wait(WATCH)
            now = time.monotonic()
            if now - self._looked >= WATCH:
                self._watch(now)
        self.waited += time.perf_counter() - began
        number = self.book.version
        tickets = sorted((t for t in self._heads if t.batch == number), key=lambda t: t.place)
        data, scores = self.shared.batch(number)
        return Batch(data, scores, [self._heads.pop(ticket) for ticket in tickets])

    def learnt(self, weights: np.ndarray) -> None:
        """Note of a finished update, whose batch nothing reads any more; `weights` are the new ones."""
        self.book = staleness.learnt(self.book)
        self._publish(self.book.version, weights)
        self._hand_out()

    def carry(self) -> list[np.ndarray]:
        """States of the environments after the last learnt batch [N, ...]; views, valid until the next `learnt`."""
        turns = [turn - len(given) - 1 for turn, given in zip(self.book.turn, self.book.given)]
        return self.shared.carry(turns)

    def beat(self, actor: int) -> None:
        """Sign of life of an actor in a thread here, whose rollout waits for others."""
        self.shared.set_state(actor, buffers.ACTS)

    @property
    def queue(self) -> int:
        """Finished rollouts that wait for the learner."""
        return sum(self.book.done)

    @property
    def restarts(self) -> int:
        """Restarts of actors since the pool was opened."""
        return self._actors.restarts

    def worked(self) -> tuple[float, float]:
        """Seconds spent in rollouts and waiting for orders, summed over all actors since the start."""
        acted, waited = self.shared.vitals[:, [buffers.ACTED_NS, buffers.WAITED_NS]].sum(axis=0)
        return acted / 1e9, waited / 1e9

    def report(self) -> dict[str, Any]:
        """State of all actors, as JSON can hold it."""
        now, rows = time.monotonic(), []
        for actor, (vitals, handle) in enumerate(zip(self.shared.vitals, self._actors.handles())):
            acted, waited = vitals[buffers.ACTED_NS] / 1e9, vitals[buffers.WAITED_NS] / 1e9
            rows.append(
                {
                    "actor": actor,
                    "state": buffers.STATES[int(vitals[buffers.STATE])] if handle is not None else "ended",
                    "since": now - vitals[buffers.BEAT] / 1e9,
                    "process": int(vitals[buffers.PROCESS]),
                    "rollouts": int(vitals[buffers.ROLLOUTS]),
                    "seconds_acting": acted,
                    "seconds_waiting": waited,
                    "queue": self.book.done[actor],
                    "restarts": self._actors.count(actor),
                }
            )
        return {"time": time.time(), "updates": self.book.version, "queue": self.queue, "actors": rows}

    def past(self) -> tuple[np.ndarray, ...]:
        """Weights before the newest version that a pinned run needs to resume; views, valid as those of `carry`."""
        newest = self.book.version
        return tuple(self.shared.weights.view(newest - back) for back in range(self.rule.pinned, 0, -1))

    def close(self) -> None:
        """End all actors and free the shared memory, which a thread that is still at work keeps."""
        self.shared.closed[0] = 1
        for door in self._orders:
            door.wake()
        deadline = time.monotonic() + LEAVE

        def within(actor: int) -> float:
            starts = self.shared.vitals[actor, buffers.STATE] == buffers.STARTS
            return 0.0 if starts else max(0.0, deadline - time.monotonic())

        handles = self._actors.handles()
        self._actors.close(within)
        working = [each for each in handles if isinstance(each, ActorThread) and each.ended() is None]

        def free() -> None:
            for thread in working:
                thread.join()
            for door in (*self._orders, self._learner):
                door.close()
            os.close(self._memory)

        if not working:
            return free()
        last = threading.Thread(target=free, name=f"{AT_WORK}s", daemon=True)
        last.start()
        atexit.register(last.join)  # in a user's own program; the command ends without the interpreter

    # ------------------------------------------------------------------------------------------------------ inside

    def _publish(self, version: int, weights: np.ndarray) -> None:
        if self._board is not None:
            self._board.publish(version, weights)
        self.shared.weights.publish(version, weights)  # last: an actor reads the version there first

    def _hand_out(self) -> None:
        self.book, out = staleness.hand_out(self.book)
        for actor, ticket in out:
            self.shared.order(actor, ticket)
        for actor in {actor for actor, _ in out}:
            self._orders[actor].wake()

    def _drain(self) -> None:
        """Record the rollouts finished since the last call."""
        moved = False
        for actor in range(self.rule.places):
            while self._finished(actor) < self.shared.finished[actor]:
                ticket = self.book.given[actor][self.book.done[actor]]
                try:
                    self._heads[ticket] = self.shared.check(actor, ticket)
                except (Garbage, IndexError) as error:
                    self._reject(actor, str(error))
                    break
                self.book, _ = staleness.finished(self.book, actor)
                moved = True
        if moved and self.rule.staleness is None:
            self._hand_out()

    def _finished(self, actor: int) -> int:
        """Number of an actor's rollouts recorded so far."""
        return int(self.shared.ordered[actor]) - len(self.book.given[actor]) + self.book.done[actor]

    def _reject(self, actor: int, why: str) -> None:
        """Reject a wrong rollout and end its actor; the successor repeats it."""
        self._actors.end(actor)
        self.shared.finished[actor] = self._finished(actor)
        self._failed(actor, why)

    def _watch(self, now: float) -> None:
        """Start actors that are due, and end those that hang."""
        self._looked = now
        for actor, reason in self._actors.look(now):
            self._failed(actor, f"{reason}: {message}" if (message := self.shared.last_error(actor)) else reason)
        for actor, handle in enumerate(self._actors.handles()):
            if handle is not None and (why := self._hang(actor, handle, now)) is not None:
                self._actors.end(actor)
                self._failed(actor, f"it {why}")

    def _start(self, actor: int) -> ActorHandle:
        self._silence[actor] = Silence(math.inf)
        vitals = self.shared.vitals[actor]
        vitals[buffers.INCARNATION] += 1
        self.shared.set_state(actor, buffers.STARTS)
        self.shared.set_error(actor, "")
        vitals[buffers.LONGEST_NS] = 0
        self._rollouts[actor] = int(vitals[buffers.ROLLOUTS])
        orders, learner = self._orders[actor], self._learner
        if self._kind == "thread":
            vitals[buffers.PROCESS] = os.getpid()
            return ActorThread(self.shared, actor, self._make, orders, learner)
        if self._board is not None:
            return RayActor(self.shared, actor, self._board, orders, learner)
        ends = self._memory, orders.reads, learner.writes
        about = Description(actor, self._make, self.shared.shapes, self._size, *ends)
        started = process("longhaul.topologies.actor_learner.actor", pickle.dumps(about), ends)
        vitals[buffers.PROCESS] = started.id
        return started

    def _failed(self, actor: int, why: str) -> None:
        """Record the end of an actor; its successor starts after a pause. ActorError once restarts are exhausted."""
        progress = int(self.shared.vitals[actor, buffers.ROLLOUTS]) > self._rollouts[actor]
        pause = self._actors.failed(actor, why, progress=progress)
        self.news.append(f"actor {actor}: {why}; another takes its place in {pause:.1f} s")

    def _hang(self, actor: int, handle: ActorHandle, now: float) -> str | None:
        """Reason to end a running actor; None if it is healthy."""
        vitals = self.shared.vitals[actor]
        state, longest = vitals[buffers.STATE], vitals[buffers.LONGEST_NS] / 1e9
        waits = state == buffers.WAITS
        resting = not waits and (state == buffers.STARTS or not longest)
        frozen = self._silence[actor].frozen
        silence = Silence(vitals[buffers.BEAT] / 1e9, 0.0 if waits else longest, resting, frozen)
        if isinstance(handle, Process):
            silence = silence.stopped(heartbeat.stopped(handle.id), now)
        self._silence[actor] = silence
        return silence.hang(now, STARTING)
