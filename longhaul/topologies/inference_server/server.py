"""Inference server: observations in, actions out, and complete batches of trajectories for the learner beside it (SEED
RL; Espeholt et al. 2020).

One thread takes the arrivals, infers on the groups that are due, answers, and fills trajectories in place.
Where we differ from SEED: no batch waits for a lost actor; the lead of acting over learning is bounded (`staleness`);
every step records the version of its weights; the unfinished trajectories of a lost actor are discarded, so nothing is
counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from longhaul.runtime.heartbeat import Silence
from longhaul.topologies import staleness
from longhaul.topologies.actor_process import STARTING
from longhaul.topologies.inference_server import policy as policies
from longhaul.topologies.inference_server.policy import BatchedPolicy
from longhaul.topologies.inference_server.trajectory_buffer import (
    Overrun,
    Running,
    Sums,
    TrajectoryBuffer,
    count_episodes,
    fresh,
)
from longhaul.topologies.inference_server.wire import LOST, Answer, Arrival, Block, Lost, Transport
from longhaul.topologies.staleness import Book, Ticket
from longhaul.types import Params, Rollout

LOOK = 0.2
"""Seconds between two health checks of the actors."""


class EnvSnapshot(NamedTuple):
    """State of G groups of C columns between two batches: a run without staleness resumes from it exactly."""

    there: np.ndarray  # uint8 [1]: 0 if empty; new episodes begin then
    states: np.ndarray  # uint8 [G, size]
    begins: np.ndarray  # bool [G, C]: memory is put back
    earned: np.ndarray  # float64 [G, C], of the episodes that run
    length: np.ndarray  # int64 [G, C]
    memory: list[np.ndarray]  # [G x C, ...]


class ActorPool(Protocol):
    """Starter and restarter of actors; remote actors have none."""

    def look(self, now: float) -> None:
        """Start of the actors that are due. ActorError once restarts are exhausted."""

    def end(self, actor: int, why: str) -> None:
        """End an actor's process for good, if there is one; a successor follows."""


NOBODY = fresh(0)


class _Group:
    """State of a group of environments."""

    def __init__(self) -> None:
        self.life = 0
        self.ticket: Ticket | None = None  # of the trajectory that it fills
        self.t = 0  # step of its trajectory that is acted next, or was acted last
        self.acted = False  # its first step was acted
        self.step: Block | None = None  # step that waits for an answer
        self.owes: float | None = None  # time since when it owes a step
        self.longest = 0.0  # seconds between an answer and its step
        self.sums: Sums = {}  # scores of episodes that ended in its trajectory
        self.running: Running = NOBODY  # episodes at the start of its trajectory
        self.begins: np.ndarray | None = None  # row of `_begins` at that start, if its state is kept


class Meter(NamedTuple):
    """Counters since the server started."""

    steps: int = 0  # environment steps inferred
    batches: int = 0
    rows: int = 0  # rows of all batches, with padding
    discarded: int = 0  # environment steps of lost trajectories
    lost: int = 0  # lives of actors
    waited: float = 0.0  # seconds without anything to infer
    inferred: float = 0.0  # seconds of inference

    def since(self, before: Meter) -> Meter:
        """Counters since `before`."""
        return Meter(*(now - then for now, then in zip(self, before, strict=True)))  # type: ignore[arg-type]


class Server:
    """Server of `slots` groups per actor, of `inference.columns` environments each."""

    def __init__(
        self, lane: Transport, inference: BatchedPolicy, book: Book, store: TrajectoryBuffer, *, slots: int,
        scores: tuple[str, ...], pool: ActorPool | None = None,
        note: Callable[[str], None] = lambda line: None, kept: dict[int, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """`kept`: group -> state at the start of its trajectory, as actors report it; shared with the transport."""
        self._transport, self._inference, self.book, self._store = lane, inference, book, store
        self._pool, self._note, self._slots, self._scores = pool, note, slots, scores
        n, self._c = book.rule.places, inference.columns
        self._rule = policies.Rule(slots, n)
        self._groups = [_Group() for _ in range(n)]
        self._waiting: dict[int, float] = {}
        self._held: list[int] = []  # for the learner
        self._begins = np.ones((n, self._c), bool)  # memory is put back before the next action
        self._looked, self._left = 0.0, time.monotonic()
        self._kept: dict[int, np.ndarray] = {} if kept is None else kept
        self._policy: Params = None
        self.meter = Meter()

    # ---------------------------------------------------------------------------------------------- the learner's

    def acts_with(self, policy: Params) -> None:
        """Act with `policy`, that of `version`, from the next batch on."""
        self._policy = policy

    def gather(self) -> tuple[Rollout, Sums, np.ndarray]:
        """Serve until the learner's next batch is complete; -> (rollout, sums of its episodes, versions)."""
        while not self.book.whole:
            self.serve()
        return self._store.batch(self.version)

    def learnt(self, policy: Params) -> None:
        """Note of a finished update; nothing reads its batch any more."""
        self._store.empty(self.version)
        self.book = staleness.learnt(self.book)
        self.acts_with(policy)
        self._release()

    @property
    def version(self) -> int:
        """Number of finished updates; the version of the acting weights."""
        return self.book.version

    @property
    def can_act(self) -> bool:
        """True while an actor may act before the learner is done."""
        return len(self._held) < len(self._groups)

    @property
    def standing(self) -> EnvSnapshot | None:
        """Snapshot of all groups between two batches of a run without staleness; None if one reported no state."""
        if len(self._kept) < len(self._groups):
            return None
        groups, whole = self._groups, range(len(self._groups))
        return EnvSnapshot(
            np.ones(1, np.uint8), np.stack([self._kept[g] for g in whole]), self._begins.copy(),
            np.stack([group.running.earned for group in groups]), np.stack([group.running.length for group in groups]),
            self._inference.memory,
        )  # fmt: skip

    def stand(self, at: EnvSnapshot) -> None:
        """Restoration of a snapshot, before any actor starts."""
        self._begins[:] = at.begins
        for g, group in enumerate(self._groups):
            self._kept[g], group.begins = at.states[g], at.begins[g]
            group.running = Running(at.earned[g], at.length[g])
        self._inference.remember(at.memory)

    # ------------------------------------------------------------------------------------------------ the actors'

    def serve(self, most: float = LOOK) -> None:
        """Serve one round: take the arrivals, and infer if a batch is due; wait at most `most` seconds."""
        self._back()
        self._take()
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._look(now)
        owing = [g for g, group in enumerate(self._groups) if group.owes is not None]
        take, wait = policies.decide(self._rule, self._waiting, owing, now)
        if take:
            self._infer(take)
        else:
            self._transport.wait(min(most, wait if self._waiting else most))
            self.meter = self.meter._replace(waited=self.meter.waited + time.monotonic() - now)
        self._left = time.monotonic()

    def _back(self) -> None:
        """Extend the deadlines of groups by the time this thread was away, for example in an update."""
        away = time.monotonic() - self._left
        if away > LOOK:
            for group in self._groups:
                if group.owes is not None:
                    group.owes += away

    def _take(self) -> None:
        for event in self._transport.take():
            if isinstance(event, Lost):
                self._lose(event)
            else:
                try:
                    self._arrive(event)
                except Overrun as error:
                    self._transport.cut(event.group // self._slots, str(error))

    def _lose(self, lost: Lost) -> None:
        for g in range(lost.actor * self._slots, (lost.actor + 1) * self._slots):
            self._drop(g)
        self._release()  # without a bound other groups take its tickets
        self.meter = self.meter._replace(lost=self.meter.lost + 1)
        self._note(f"actor {lost.actor}: {lost.why}")
        if self._pool is not None:
            self._pool.end(lost.actor, lost.why)

    def _drop(self, g: int) -> None:
        """Discard the unfinished trajectory of a group."""
        group = self._groups[g]
        ticket = group.ticket
        self.book, lost = staleness.lose(self.book, g)
        if lost:
            self.meter = self.meter._replace(discarded=self.meter.discarded + group.t * self._c)
        if ticket is not None and group.begins is not None:  # its successor continues from that state
            self._begins[g] = group.begins
            if self._inference.remembers and group.acted:
                self._inference.put(g, self._store.memory(ticket))
        group.ticket = group.step = group.owes = None
        group.sums = {}
        self._waiting.pop(g, None)
        if g in self._held:
            self._held.remove(g)

    def _arrive(self, event: Arrival) -> None:
        group, step = self._groups[event.group], event.step
        if event.first:
            self._drop(event.group)
            group.life = event.life
            # Otherwise it continues from the start of its trajectory.
            if event.group not in self._kept or step.flags[LOST].all():
                group.running = fresh(self._c)
                self._begins[event.group] = True
        else:
            if group.owes is not None:
                group.longest = max(group.longest, time.monotonic() - group.owes)
            self._led_to(event.group, group, step)
            if event.state is not None:
                self._kept[event.group], group.begins = event.state, self._begins[event.group].copy()
        group.step, group.owes = step, None
        if group.ticket is None:
            self._begin(event.group)
        else:
            self._waiting[event.group] = time.monotonic()

    def _led_to(self, g: int, group: _Group, step: Block) -> None:
        assert group.ticket is not None
        self._store.led_to(group.ticket, group.t, step)
        if self._inference.remembers:
            np.logical_not(step.flags[2], out=self._begins[g])
            self._begins[g, step.columns] = True
        if self._scores and len(step.columns):
            self._score(group.sums, step)
        group.t += 1
        if group.t == self._store.steps:
            self._fill(g, group, step)

    def _score(self, sums: Sums, step: Block) -> None:
        """Add the environment's scores of the episodes that ended."""
        for name, value, known in zip(self._scores, step.scores, step.known, strict=True):
            for key, found in ((f"episode/{name}", value[known].sum()), (f"episodes/{name}", known.sum())):
                sums[key] = sums.get(key, 0.0) + float(found)

    def _fill(self, g: int, group: _Group, step: Block) -> None:
        """Finish a group's trajectory, and count the episodes that ended in it."""
        assert group.ticket is not None
        self.book, _ = staleness.finished(self.book, g)
        reward, (terminated, truncated, valid) = self._store.filled(group.ticket, step.observation)
        ended, group.running = count_episodes(group.running, reward, terminated | truncated, valid)
        if ended.episodes:
            of_ended = {"episodes": ended.episodes, "episode/return": ended.earned, "episode/length": ended.length}
            self._store.add_sums(group.ticket.batch, group.sums | of_ended)
        group.ticket, group.sums = None, {}

    def _release(self) -> None:
        """Retry the groups that waited for a ticket."""
        held, self._held = self._held, []
        for group in held:
            self._begin(group)

    def _begin(self, g: int) -> None:
        """Begin a group's next trajectory, or let it wait for the learner."""
        group = self._groups[g]
        self.book, ticket = staleness.begin(self.book, g)
        if ticket is None:
            self._held.append(g)
            return
        group.ticket, group.t, group.acted = ticket, 0, False
        self._store.begin(ticket)
        self._waiting[g] = time.monotonic()

    def _infer(self, take: tuple[int, ...]) -> None:
        began = time.perf_counter()
        take = tuple(sorted(take))
        groups = [self._groups[g] for g in take]
        about, seen = [], []
        for g, group in zip(take, groups, strict=True):
            assert group.ticket is not None and group.step is not None
            about.append((g, group.ticket.place, group.ticket.batch, group.t))
            seen.append(group.step.observation)
        found = self._inference.run(self._policy, np.array(about, np.int32), self._begins[list(take)], seen)
        answers = []
        now, c = time.monotonic(), self._c
        for i, (g, group, observation) in enumerate(zip(take, groups, seen, strict=True)):
            assert group.ticket is not None
            rows = slice(i * c, (i + 1) * c)
            action = found.action[rows]
            drawn = [leaf[rows] for leaf in found.extras]
            self._store.acted(group.ticket, group.t, observation, action, drawn, self.version)
            if group.t == 0:
                self._store.remembered(group.ticket, [leaf[rows] for leaf in found.memory])
            answers.append(Answer(g, group.life, action))
            group.step, group.owes, group.acted = None, now, True
            del self._waiting[g]
        self._transport.answer(answers)
        meter, n = self.meter, len(take)
        self.meter = meter._replace(
            steps=meter.steps + n * c, batches=meter.batches + 1,
            rows=meter.rows + c * policies.bucket(self._inference.sizes, n),
            inferred=meter.inferred + time.perf_counter() - began,
        )  # fmt: skip

    def _look(self, now: float) -> None:
        """End the actors that hang. All arrivals have been taken, so a group that still owes a step is late."""
        self._looked = now
        if self._pool is not None:
            self._pool.look(now)
        live = self._transport.live()
        for g, group in enumerate(self._groups):
            if group.owes is None or g // self._slots not in live:
                continue
            silence = Silence(group.owes, group.longest, resting=not group.longest)
            if (hang := silence.hang(now, STARTING)) is not None:
                why = f"it {hang}"
                self._transport.cut(g // self._slots, why)
                if self._pool is not None:
                    self._pool.end(g // self._slots, why)
