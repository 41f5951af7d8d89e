"""Completions of many requests in one batch, which requests join and leave while it is decoded.

Scheduling between a few decode steps is that of Orca (Yu et al., OSDI 2022). Where we differ: all rows of a batch write
into the same slot of the cache, and a request that joins puts its prompt into the slots before it. So shapes are
static. A batch ends when its slots are used up.

A batch has one version of the weights. New ones are taken between two batches: while a version waits, no further
request joins.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import decode
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.training.serving.batch_programs import PROGRAMS as PROGRAMS
from longhaul.training.serving.batch_programs import SMALLEST_ROOM, Programs, Progress, State, idle
from longhaul.training.serving.batch_programs import TOPS as TOPS
from longhaul.training.serving.work_queue import Counters, WorkQueue
from longhaul.types import Params

SMALLEST_SLOTS, GROWTH = 64, 4
"""Fewest slots of a batch. Prompts double from `SMALLEST_ROOM` tokens; slots and rows grow by `GROWTH`."""

TOGETHER = 8
"""Prompts that are read by one call, where at least half as many are there; others are read one by one."""

MOST_ROWS = 128
"""Most completions of one request."""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.001, 100.0
"""Bounds of a temperature that is not 0."""


class Limits(NamedTuple):
    """Bounds of requests, and of what is kept for them."""

    prompt_tokens: int
    tokens: int  # of a completion
    rows: int = 64  # decoded together
    queue: int = 512  # completions that wait
    programs: int = PROGRAMS  # that are kept


@dataclass
class Row:
    """One completion."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # of each token
    finish: str = ""  # "stop" or "length"; "" while it is decoded


@dataclass(eq=False)
class Job:
    """A request: `n` completions of each prompt, all from one version of the weights."""

    prompts: list[list[int]]
    max_tokens: int
    deadline: float  # of time.monotonic
    n: int = 1
    temperature: float = 1.0  # 0: always the likeliest token
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    tops: int = 0
    heard: Callable[[int], None] | None = None  # called with a row's number when it has more tokens, by the engine
    version: str | None = None  # from the first row that is decoded
    cancelled: bool = False
    done: Future[None] = field(default_factory=Future)
    rows: list[Row] = field(init=False)
    joined: int = 0  # rows that were begun

    def __post_init__(self) -> None:
        self.rows = [Row() for _ in range(self.n * len(self.prompts))]


Begun = tuple[Job, int]
"""A request and the number of one of its rows."""

Columns = list[Begun | None]
"""The row in each column of a batch; None where it is free."""


class Weights(NamedTuple):
    """One version of a model."""

    version: str
    params: Params
    kernels: decode.Kernels


class Engine:
    """Decodes the jobs of its `queue`, in that queue's thread."""

    def __init__(
        self, config: ModelConfig, params: Params, tokeniser: Tokeniser, limits: Limits, version: str = "0"
    ) -> None:
        self.config, self.tokeniser, self.limits, self.counters = config, tokeniser, limits, Counters()
        self._slots = _doubled(SMALLEST_SLOTS, _doubled(SMALLEST_ROOM, limits.prompt_tokens) + limits.tokens)
        self._programs = Programs(config, self._slots, tokeniser.ends, tokeniser.pad, limits.programs)
        self.queue = WorkQueue[Job]("completions", limits.queue, lambda job: len(job.rows) - job.joined)
        self._begun: Sequence[Job] = ()  # those of the batch that is decoded
        self._offered: tuple[str, Params] | None = None
        params = jax.tree.map(jnp.asarray, params)
        self._weights = Weights(version, params, self._programs.prepare(params))
        self.queue.start(self._work)

    # ------------------------------------------------------------------------------------------------ for callers

    @property
    def version(self) -> str:
        return self._weights.version

    def offer(self, version: str, params: Params) -> None:
        """Newer weights, which serve after the batch that is decoded; of several that wait, the last."""
        with self.queue.changed:
            self._offered = (version, params)
            self.queue.changed.notify()

    # --------------------------------------------------------------------------------------------- its own thread

    def _work(self) -> None:
        while True:
            with self.queue.changed:
                self.queue.changed.wait_for(
                    lambda: self.queue.waiting or self.queue.closing or self._offered is not None
                )
                if self.queue.closing and not self.queue.waiting:
                    return
            try:
                self._swap()
                self._sweep()
                if self.queue.waiting:
                    self._batch()
            except Exception as error:  # a program that did not compile, no memory: these requests fail, others may not
                self.counters.failures += 1
                self.counters.active = 0
                for job in [*self._begun, *[job for job in self.queue.waiting if job.joined]]:
                    self._fail(job, error)

    def _swap(self) -> None:
        """Takes the weights that wait, unless a request still needs the old ones."""
        with self.queue.changed:
            if self._offered is None or any(job.joined for job in self.queue.waiting):
                return
            version, params = self._offered
            self._offered = None
        params = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), params, self._weights.params)
        self._weights = Weights(version, params, self._programs.prepare(params))
        self.counters.swaps += 1

    def _sweep(self) -> None:
        """Drops jobs that nobody waits for any more."""
        now = time.monotonic()
        for job in list(self.queue.waiting):
            if job.cancelled or now > job.deadline:
                self._fail(job, TimeoutError("its deadline is over"))

    def _fail(self, job: Job, error: Exception) -> None:
        with self.queue.changed:
            if job in self.queue.waiting:
                self.queue.waiting.remove(job)
        if not job.done.done():
            job.done.set_exception(error)

    def _take(self, count: int, index: int | None, slots: int) -> list[Begun]:
        """At most `count` rows in the order of requests, that fit behind slot `index`; any if it is None."""
        taken: list[Begun] = []
        with self.queue.changed:
            for job in list(self.queue.waiting):
                room = _doubled(SMALLEST_ROOM, max(map(len, job.prompts)))
                if index is not None and (room > index or index + job.max_tokens > slots):
                    break  # it begins the next batch
                if self._offered is not None and not job.joined:
                    break
                while job.joined < len(job.rows) and len(taken) < count:
                    taken.append((job, job.joined))
                    job.joined += 1
                if job.joined < len(job.rows):
                    break
                self.queue.waiting.remove(job)
        for job, _ in taken:
            job.version = self._weights.version
        return taken

    def _batch(self) -> None:
        """Decodes one batch to its end."""
        taken = self._take(self.limits.rows, None, 0)
        if not taken:
            return
        room = max(_doubled(SMALLEST_ROOM, max(map(len, job.prompts))) for job, _ in taken)
        longest = max(job.max_tokens for job, _ in taken)
        slots = _grown(SMALLEST_SLOTS, room + 2 * longest, self._slots)
        rows = _grown(1, len(taken), self.limits.rows)
        held: Columns = [None] * rows
        self.counters.batches += 1
        self._begun = [job for job, _ in taken]
        with self._untimed():
            state, progress = self._programs.blank(slots, rows), idle(rows, room)
        while True:
            if taken:
                self._begun = list({id(each[0]): each[0] for each in (*held, *taken) if each is not None}.values())
                with self._untimed():
                    state, progress = self._widened(state, progress, held, len(taken))
                    state = self._join(state, progress, held, taken)
            progress.active[...] &= [each is not None for each in held]
            with self._untimed():
                state, progress, drawn = self._programs.run(self._weights.kernels, state, progress)
                progress = Progress(*map(np.array, progress))  # on the host, and writable
            self.counters.calls += 1
            self._deliver(held, *(np.asarray(each) for each in drawn))
            self.counters.active = sum(each is not None for each in held)
            self._sweep()
            if not self.counters.active:
                self._begun = ()
                return
            taken = []
            if self.queue.waiting:
                taken = self._take(self.limits.rows - self.counters.active, int(progress.place), slots)

    def _widened(self, state: State, progress: Progress, held: Columns, more: int) -> tuple[State, Progress]:
        """(state, progress) with columns for so many `more` rows, which `held` gets, too."""
        needed = more + sum(each is not None for each in held)
        while needed > len(held):
            rows = _grown(1, len(held) + 1, self.limits.rows)  # one size after the other: fewer programs
            state, wider = self._programs.grow(state, rows), idle(rows, int(progress.place))
            for new, old in zip(wider[1:], progress[1:], strict=True):
                new[: len(old)] = old
            progress = wider
            held += [None] * (rows - len(held))
        return state, progress

    def _join(self, state: State, progress: Progress, held: Columns, taken: list[Begun]) -> State:
        """State with the rows of `taken` in free columns, which are noted in `held` and `progress`."""
        columns: dict[tuple[int, ...], list[int]] = {}  # of each prompt
        free = (column for column, each in enumerate(held) if each is None)
        for (job, number), column in zip(taken, list(free), strict=False):
            text = tuple(job.prompts[number // job.n])
            columns.setdefault(text, []).append(column)
            held[column] = (job, number)
            progress.lengths[column] = progress.own[column] = len(text)
            progress.drawn[column], progress.most[column] = 0, job.max_tokens
            progress.key[column] = np.random.SeedSequence((job.seed, number)).generate_state(2)
            progress.temperature[column], progress.top_p[column] = job.temperature, job.top_p
            progress.wanted[column], progress.active[column] = job.tops > 0, True
        self.counters.prompt_tokens += sum(map(len, columns))
        texts = sorted(columns, key=len)  # those of one length are padded to it
        while texts:
            count = TOGETHER if len(texts) >= TOGETHER // 2 else 1
            some, texts = texts[:count], texts[count:]
            room = _doubled(SMALLEST_ROOM, max(map(len, some)))
            tokens, lengths = np.zeros((count, room), np.int32), np.ones(count, np.int32)
            source = np.full(len(held), -1, np.int32)
            for number, text in enumerate(some):
                tokens[number, room - len(text) :], lengths[number] = text, len(text)
                source[columns[text]] = number
            chunks, logits = self._programs.read(self._weights.params, tokens, lengths)
            for number, chunk in enumerate(chunks):
                first = int(progress.place) - room + number * SMALLEST_ROOM
                state = self._programs.join(state, chunk, logits, first, source)
        return state

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        """Context of calls that compile programs of new sizes: all requests get that time added."""
        began, before = time.monotonic(), self._programs.compiled
        yield
        self.counters.programs, self.counters.compiled = len(self._programs), self._programs.compiled
        if self._programs.compiled > before:
            took = time.monotonic() - began
            for job in {id(job): job for job in (*self._begun, *self.queue.waiting)}.values():
                job.deadline += took

    def _deliver(
        self, held: Columns, token: np.ndarray, log_prob: np.ndarray, written: np.ndarray,
        top: np.ndarray, top_log_prob: np.ndarray,
    ) -> None:  # fmt: skip
        """Gives the tokens of one call to their rows, and frees the columns of those that end."""
        now = time.monotonic()
        for column, each in enumerate(held):
            if each is None:
                continue
            job, number = each
            row = job.rows[number]
            if job.done.done() or job.cancelled or now > job.deadline:
                held[column] = None
                self._fail(job, TimeoutError("its deadline is over"))
                continue
            count = int(written[:, column].sum())
            before = len(row.tokens)
            row.tokens += token[:count, column].tolist()
            row.log_probs += log_prob[:count, column].tolist()
            if job.tops:
                pairs = zip(top[:count, : job.tops, column].tolist(), top_log_prob[:count, : job.tops, column].tolist(),
                            strict=True)  # fmt: skip
                row.tops += [list(zip(*pair, strict=True)) for pair in pairs]
            row.finish = self._finish(job, row, before)
            self.counters.tokens += len(row.tokens) - before
            if row.finish:
                held[column] = None
            if job.heard is not None:
                job.heard(number)
            if all(each.finish for each in job.rows) and not job.done.done():
                job.done.set_result(None)

    def _finish(self, job: Job, row: Row, before: int) -> str:
        """Reason for which a row ends, whose tokens from `before` on are new; "" if it goes on. Cuts behind a stop."""
        if job.stop and any(stop in self.tokeniser.decode(row.tokens) for stop in job.stop):
            for count in range(before + 1, len(row.tokens) + 1):
                text = self.tokeniser.decode(row.tokens[:count])
                if any(stop in text for stop in job.stop):
                    del row.tokens[count:], row.log_probs[count:], row.tops[count:]
                    return "stop"
        if row.tokens and row.tokens[-1] in self.tokeniser.ends:
            return "stop"
        return "length" if len(row.tokens) >= job.max_tokens else ""


def text_of(tokeniser: Tokeniser, job: Job, row: Row) -> str:
    """Text of a completion, before its end and the first of the job's stops."""
    text = tokeniser.decode(row.tokens)
    ends = [text.find(stop) for stop in job.stop if stop in text]
    return text[: min(ends)] if ends else text


def _doubled(least: int, needed: int) -> int:
    """Smallest size of at least `needed`, doubled from `least`."""
    return least * 2 ** max(0, math.ceil(math.log2(needed / least)))


def _grown(least: int, needed: int, most: int) -> int:
    """Smallest size of at least `needed`, grown from `least` by `GROWTH`; or `most`."""
    size = least
    while size < needed:
        size *= GROWTH
    return min(size, most)
