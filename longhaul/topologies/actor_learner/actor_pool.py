"""The crew: actors begun, watched and begun again; what they finished handed to the learner in order.

An actor that ended, hangs, or writes what it was not asked for is ended for good (killed, and waited for) before
another takes its place, so that never two write one slot. The other begins where it left off: its orders and the states
of its environments lie on the desk. Who fails again and again without one rollout ends the run, with its last words.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.runtime import heartbeat, shared_memory
from longhaul.runtime.shared_memory import Wakeup, wakeup
from longhaul.topologies import staleness
from longhaul.topologies.actor_learner import actor as worker
from longhaul.topologies.actor_learner import ray_actor
from longhaul.topologies.actor_learner import shared_buffers as desks
from longhaul.topologies.actor_learner.actor import Collect, Description
from longhaul.topologies.actor_learner.shared_buffers import Desk, Garbage, Head, Shapes, Size
from longhaul.topologies.actor_process import Child, CrewError, delay
from longhaul.topologies.staleness import Book, Rule, Ticket

WATCH = 0.2
"""Seconds between two looks at the actors."""

HANG, TIMES = 10.0, 4.0
"""A rollout that takes longer than so many seconds, and so many times the longest one before, hangs."""

FROZEN = 5.0
"""Seconds that a process may be stopped (by SIGSTOP, say)."""

STARTING = 600.0
"""Seconds that an actor may take until its first rollout is done: it compiles."""

LEAVE = 3.0
"""Seconds for all to leave of themselves, at the end of a run."""

FAILURES = 5
"""So many failures of one actor, without a rollout between them, end the run."""


class Hand(Protocol):
    """One life of an actor."""

    def ended(self) -> str | None:
        """How it ended; None while it lives."""

    def end(self, within: float) -> None:
        """Waits for its end; kills it where that takes more than so many seconds."""


class ThreadHand:
    """An actor in a thread of this process."""

    def __init__(self, desk: Desk, actor: int, make: Callable[[int], Collect], orders: Wakeup, learner: Wakeup) -> None:
        self._failed: str | None = None
        self._orders = orders

        def run() -> None:
            try:
                worker.work(desk, actor, make(actor), orders, learner)
            except Exception as error:
                worker.failed(desk, actor, error)
                self._failed = "it failed"
                learner.wake()

        self._thread = threading.Thread(target=run, name=f"actor {actor}", daemon=True)
        self._thread.start()

    def ended(self) -> str | None:
        return None if self._thread.is_alive() else self._failed or "it ended"

    def end(self, within: float) -> None:
        """Waits: a thread can't be killed."""
        self._orders.wake()
        self._thread.join(max(within, HANG))


class Station(NamedTuple):
    """An actor as the crew knows it."""

    hand: Hand | None  # None: it is to be begun at `due`
    due: float = 0.0
    failures: int = 0  # since its last rollout
    rollouts: int = 0  # when it was begun
    restarts: int = 0


class Batch(NamedTuple):
    """A whole batch: views of [N, ...] arrays, which hold until the update that learns from it is finished."""

    data: list[np.ndarray]
    scores: list[np.ndarray]
    heads: list[Head]


class Crew:
    """N actors, and the learner's side of the desk. Call `close` at the end.

        crew.open(version, key, weights, carry, turns)
        while ...:
            batch = crew.take()                      # waits
            ... learn from it ...
            crew.learnt(weights)                     # the next version
    """  # fmt: skip

    def __init__(
        self, rule: Rule, shapes: Shapes, make: Callable[[int], Collect], *, kind: str
    ) -> None:  # fmt: skip
        """`make` gives what actor a does; for processes (`kind` "process", or "ray" for those on a cluster that was
        joined; else "thread") it is importable."""
        self._make, self._kind = make, kind
        self._board = ray_actor.Board(make, rule.versions) if kind == "ray" else None
        self.news: list[str] = []
        """Lines on what befell actors; whoever tells them takes them out."""
        self._size = Size(rule.places, rule.rooms, rule.turns, rule.versions)
        self.rule = rule
        self._memory = shared_memory.create(desks.planned(shapes, self._size).size)
        self.desk = Desk(self._memory, shapes, self._size)
        self._learner = wakeup()
        self._orders = [wakeup() for _ in range(rule.places)]
        self._stations = [Station(None) for _ in range(rule.places)]
        self._heads: dict[Ticket, Head] = {}
        self._stopped = [math.inf] * rule.places  # since when a process does not run
        self._looked = 0.0
        self.waited = 0.0  # seconds of the learner, for actors
        self.book: Book = staleness.opened(rule, 0)

    def open(self, version: int, key: np.ndarray, weights: Sequence[np.ndarray], carry: Sequence[np.ndarray]) -> None:
        """Begins with `version` finished updates: with the run's key, its weights (the last ones are `version`'s, those
        before them of the versions before) and the states of the environments, [N, ...] each."""
        self.book = staleness.opened(self.rule, version)
        self.desk.key[: key.size] = key.ravel()
        self.desk.set_carry([turn - 1 for turn in self.book.turn], carry)
        for back, policy in zip(range(len(weights) - 1, -1, -1), weights, strict=True):
            if version - back >= self.rule.oldest:
                self.desk.lane.publish(version - back, policy)
        self._hand_out()
        self._watch(time.monotonic())

    def take(self) -> Batch:
        """The learner's next batch; waits until it is whole."""
        began = time.perf_counter()
        while True:
            self._drain()
            if not staleness.missing(self.book):
                break
            self._learner.wait(WATCH)
            now = time.monotonic()
            if now - self._looked >= WATCH:
                self._watch(now)
        self.waited += time.perf_counter() - began
        number = self.book.version
        mine = sorted((t for t in self._heads if t.batch == number), key=lambda t: t.place)
        data, scores = self.desk.batch(number)
        return Batch(data, scores, [self._heads.pop(ticket) for ticket in mine])

    def learnt(self, weights: np.ndarray) -> None:
        """The update is finished and nothing reads its batch any more; `weights` are what it made."""
        self.book = staleness.learnt(self.book)
        self.desk.lane.publish(self.book.version, weights)
        self._hand_out()

    def carry(self) -> list[np.ndarray]:
        """The states of the environments after the last batch that was learnt from, [N, ...] each: views, which hold
        until the next one is."""
        turns = [turn - len(given) - 1 for turn, given in zip(self.book.turn, self.book.given)]
        return self.desk.carry(turns)

    @property
    def queue(self) -> int:
        """Rollouts that wait for the learner."""
        return staleness.queue(self.book)

    @property
    def restarts(self) -> int:
        """How often an actor was begun again."""
        return sum(station.restarts for station in self._stations)

    def worked(self) -> tuple[float, float]:
        """Seconds that actors spent in rollouts, and waiting for orders, all together since they began."""
        acted, waited = self.desk.vitals[:, [desks.ACTED_NS, desks.WAITED_NS]].sum(axis=0)
        return acted / 1e9, waited / 1e9

    def report(self) -> dict[str, Any]:
        """What everybody is at, as JSON can hold it."""
        now, rows = time.monotonic(), []
        for actor, (vitals, station) in enumerate(zip(self.desk.vitals, self._stations)):
            acted, waited = vitals[desks.ACTED_NS] / 1e9, vitals[desks.WAITED_NS] / 1e9
            rows.append(
                {
                    "actor": actor,
                    "state": desks.STATES[int(vitals[desks.STATE])] if station.hand is not None else "ended",
                    "since": now - vitals[desks.BEAT] / 1e9,
                    "process": int(vitals[desks.PROCESS]),
                    "rollouts": int(vitals[desks.ROLLOUTS]),
                    "seconds_acting": acted,
                    "seconds_waiting": waited,
                    "queue": self.book.done[actor],
                    "restarts": station.restarts,
                }
            )
        return {"time": time.time(), "updates": self.book.version, "queue": self.queue, "actors": rows}

    def past(self) -> tuple[np.ndarray, ...]:
        """The weights of the versions before the newest one that a pinned run needs to go on: views, as `carry`'s."""
        newest = self.book.version
        return tuple(self.desk.lane.held(newest - back) for back in range(self.rule.pinned, 0, -1))

    def close(self) -> None:
        """Ends all actors. Nothing of them is left."""
        self.desk.closed[0] = 1
        for door in self._orders:
            door.wake()
        deadline = time.monotonic() + LEAVE
        for actor, station in enumerate(self._stations):
            if station.hand is not None:
                starts = self.desk.vitals[actor, desks.STATE] == desks.STARTS
                station.hand.end(within=0.0 if starts else max(0.0, deadline - time.monotonic()))
        for door in (*self._orders, self._learner):
            door.close()
        os.close(self._memory)

    # ------------------------------------------------------------------------------------------------------ inside

    def _hand_out(self) -> None:
        self.book, out = staleness.hand_out(self.book)
        for actor, ticket in out:
            self.desk.order(actor, ticket)
        for actor in {actor for actor, _ in out}:
            self._orders[actor].wake()

    def _drain(self) -> None:
        """Notes what was finished since."""
        moved = False
        for actor in range(self.rule.places):
            while self._finished(actor) < self.desk.finished[actor]:
                ticket = self.book.given[actor][self.book.done[actor]]
                try:
                    self._heads[ticket] = self.desk.check(actor, ticket)
                except (Garbage, IndexError) as error:
                    self._reject(actor, str(error))
                    break
                self.book, _ = staleness.finished(self.book, actor)
                moved = True
        if moved and self.rule.staleness is None:
            self._hand_out()

    def _finished(self, actor: int) -> int:
        """Rollouts of an actor that were taken note of, in all."""
        return int(self.desk.ordered[actor]) - len(self.book.given[actor]) + self.book.done[actor]

    def _reject(self, actor: int, why: str) -> None:
        """What an actor wrote counts not; another does it again."""
        station = self._stations[actor]
        if station.hand is not None:
            station.hand.end(within=0.0)
        self.desk.finished[actor] = self._finished(actor)
        self._failed(actor, why)

    def _watch(self, now: float) -> None:
        """Begins who is due, and ends who hangs."""
        self._looked = now
        for actor, station in enumerate(self._stations):
            if station.hand is None:
                if now >= station.due:
                    self._begin(actor, station)
                continue
            how = station.hand.ended()
            if how is not None:
                self._failed(actor, f"{how}: {words}" if (words := self.desk.said(actor)) else how)
            elif self._hangs(actor, now):
                station.hand.end(within=0.0)
                self._failed(actor, f"it was silent for {now - self.desk.vitals[actor, desks.BEAT] / 1e9:.0f} s")

    def _begin(self, actor: int, station: Station) -> None:
        self._stopped[actor] = math.inf
        vitals = self.desk.vitals[actor]
        vitals[desks.INCARNATION] += 1
        self.desk.at(actor, desks.STARTS)
        self.desk.say(actor, "")
        vitals[desks.LONGEST_NS] = 0
        orders, learner = self._orders[actor], self._learner
        if self._kind == "thread":
            hand: Hand = ThreadHand(self.desk, actor, self._make, orders, learner)
            vitals[desks.PROCESS] = os.getpid()
        elif self._board is not None:
            hand = ray_actor.FarHand(self.desk, actor, self._board, orders, learner)
        else:
            shapes, ends = self.desk.shapes, (self._memory, orders.reads, learner.writes)
            about = Description(actor, self._make, shapes, self._size, *ends, os.getpid())
            hand = child = Child("longhaul.topologies.actor_learner.actor", pickle.dumps(about), ends)
            vitals[desks.PROCESS] = child.id
        self._stations[actor] = station._replace(hand=hand, rollouts=int(vitals[desks.ROLLOUTS]))

    def _failed(self, actor: int, why: str) -> None:
        """An actor has ended; another one is begun after a while. Raises CrewError where that helps not."""
        station, done = self._stations[actor], int(self.desk.vitals[actor, desks.ROLLOUTS])
        failures = 1 if done > station.rollouts else station.failures + 1
        if failures >= FAILURES:
            raise CrewError(f"actor {actor} failed {failures} times without one rollout; {why}")
        wait = delay(failures)
        self.news.append(f"actor {actor}: {why}; another takes its place in {wait:.1f} s")
        self._stations[actor] = Station(None, time.monotonic() + wait, failures, done, station.restarts + 1)

    def _hangs(self, actor: int, now: float) -> bool:
        vitals = self.desk.vitals[actor]
        silent, longest = now - vitals[desks.BEAT] / 1e9, vitals[desks.LONGEST_NS] / 1e9
        if self._kind == "process":
            stops = heartbeat.stopped(int(vitals[desks.PROCESS]))
            since = self._stopped[actor] = min(self._stopped[actor], now) if stops else math.inf
            if now - since > FROZEN:
                return True
        if vitals[desks.STATE] == desks.WAITS:
            return bool(silent > HANG)
        if vitals[desks.STATE] == desks.STARTS or not longest:
            return bool(silent > STARTING)
        return bool(silent > max(HANG, TIMES * longest))
