"""Completions of many requests in one batch, which requests join and leave while it is decoded.

Scheduling between a few decode steps is that of Orca (Yu et al., OSDI 2022). Where we differ: all rows of a batch write
into the same slot of the cache, and a request that joins puts its prompt into the slots before it. So shapes are
static. A batch ends when its slots are used up. Rows, slots and prompts have few sizes, each compiled once.

A batch has one version of the weights. New ones are taken between two batches: while a version waits, no further
request joins.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.networks.layers import PRECISIONS
from longhaul.reasoning import decode, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime import device_memory
from longhaul.types import Params

STEPS = 8
"""Decode steps of one compiled call; requests join and leave between two of them."""

TOPS = 5
"""Most alternatives of a token that are reported with their log-probabilities."""

SMALLEST_ROOM, SMALLEST_SLOTS, GROWTH = 16, 64, 4
"""Fewest tokens that a prompt is padded to, and slots of a batch; they double. Rows grow by `GROWTH`."""

MOST_ROWS = 128
"""Most completions of one request."""

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.001, 100.0
"""Bounds of a temperature that is not 0."""


class Limits(NamedTuple):
    """Bounds of requests."""

    prompt_tokens: int
    tokens: int  # of a completion
    rows: int = 64  # decoded together
    queue: int = 512  # completions that wait


class QueueFull(RuntimeError):
    """Queue with as many waiting completions as it may have."""


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


class State(NamedTuple):
    """Batch between two tokens: B rows."""

    cache: decode.Cache
    logits: jax.Array  # float32 [V, B], of the next token
    key: jax.Array  # uint32 [B, 2]
    drawn: jax.Array  # int32 [B], tokens so far
    most: jax.Array  # int32 [B]
    temperature: jax.Array  # float32 [B]
    top_p: jax.Array  # float32 [B]
    wanted: jax.Array  # bool [B]: alternatives are asked for
    active: jax.Array  # bool [B]


class Joining(NamedTuple):
    """Settings of the rows that join, C of them; a column beyond the batch is for nobody."""

    source: np.ndarray  # int32 [C]: number of the prompt
    column: np.ndarray  # int32 [C]
    key: np.ndarray  # uint32 [C, 2]
    most: np.ndarray  # int32 [C]
    temperature: np.ndarray  # float32 [C]
    top_p: np.ndarray  # float32 [C]
    wanted: np.ndarray  # bool [C]


class Drawn(NamedTuple):
    """Tokens of one call, `STEPS` by B."""

    token: jax.Array
    log_prob: jax.Array
    written: jax.Array  # bool
    top: jax.Array  # int32 [STEPS, TOPS, B]
    top_log_prob: jax.Array


class Programs(NamedTuple):
    """Compiled parts of a batch."""

    prepare: Callable[[Params], decode.Kernels]
    read: Callable[..., tuple[transformer.KeyValue, jax.Array]]  # (params, tokens [J, P], lengths [J])
    join: Callable[..., State]  # (state, kept, logits, lengths, joining)
    run: Callable[..., tuple[State, Drawn]]  # (kernels, state, live [B])
    grow: Callable[[State, int], State]


def programs(config: ModelConfig, slots: int, ends: Sequence[int], pad: int) -> Programs:
    """Programs of a model for batches of at most `slots` slots."""

    def prepare(params: Params) -> decode.Kernels:
        return decode.prepare(config, params, slots)

    def read(params: Params, tokens: jax.Array, lengths: jax.Array) -> tuple[transformer.KeyValue, jax.Array]:
        room = tokens.shape[1]
        mask = jnp.arange(room)[None] >= room - lengths[:, None]
        hidden, kept = transformer.trunk(config, params, tokens, mask, keeps=True)
        assert kept is not None
        return kept, transformer.unembed(config, params, hidden[:, -1])

    def run(kernels: decode.Kernels, state: State, live: jax.Array) -> tuple[State, Drawn]:
        return _run(config, ends, pad, kernels, state, live)

    return Programs(
        jax.jit(prepare), jax.jit(read), jax.jit(_join, donate_argnums=0), jax.jit(run, donate_argnums=1),
        jax.jit(_grow, static_argnums=1),
    )  # fmt: skip


def _join(state: State, kept: transformer.KeyValue, logits: jax.Array, lengths: jax.Array, joining: Joining) -> State:
    """State with prompts that were read, by their keys and values `kept`, in the columns of the rows that join."""
    column, source, cache = joining.column, joining.source, state.cache
    room = kept[0].shape[2]
    first = cache.place - room

    def placed(old: jax.Array, new: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(old, first, room)
        part = part.at[..., column].set(jnp.transpose(new[source], (1, 2, 3, 0)), mode="drop")
        return jax.lax.dynamic_update_slice_in_dim(old, part, first, 0)

    key, value = (tuple(map(placed, olds, news)) for olds, news in zip((cache.key, cache.value), kept, strict=True))
    own = lengths[source]
    lengths, owns = (old.at[column].set(own, mode="drop") for old in (cache.lengths, cache.own))
    cache = decode.Cache(key, value, cache.asked, lengths, owns, cache.place)

    def put(old: jax.Array, new: Any) -> jax.Array:
        return old.at[column].set(new, mode="drop")

    return State(
        cache, state.logits.at[:, column].set(logits[source].T, mode="drop"), put(state.key, joining.key),
        put(state.drawn, 0), put(state.most, joining.most), put(state.temperature, joining.temperature),
        put(state.top_p, joining.top_p), put(state.wanted, joining.wanted), put(state.active, True),
    )  # fmt: skip


def _run(
    config: ModelConfig, ends: Sequence[int], pad: int, kernels: decode.Kernels, state: State, live: jax.Array
) -> tuple[State, Drawn]:
    """(state, tokens) after at most STEPS tokens of each row that is `live`; fewer where all rows have ended."""
    rows, tops = live.shape[0], min(TOPS, config.vocabulary)
    state = state._replace(active=state.active & live)
    whole, alternatives = (STEPS, rows), (STEPS, tops, rows)
    blank = Drawn(
        jnp.zeros(whole, jnp.int32), jnp.zeros(whole), jnp.zeros(whole, bool), jnp.zeros(alternatives, jnp.int32),
        jnp.zeros(alternatives),
    )  # fmt: skip

    def one(at: tuple[jax.Array, State, Drawn]) -> tuple[jax.Array, State, Drawn]:
        step, state, drawn = at
        token, log_prob, top, top_log_prob = draw(state, pad, tops)
        row = Drawn(token, log_prob, state.active, top, top_log_prob)
        drawn = jax.tree.map(lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, step, 0), drawn, row)
        count = state.drawn + 1
        ended = count >= state.most
        for end in ends:
            ended |= token == end
        logits, cache = decode.step(config, kernels, token, state.cache)
        active = state.active & ~ended
        cache = cache._replace(own=jnp.where(active, cache.own, 0))
        return step + 1, state._replace(cache=cache, logits=logits, drawn=count, active=active), drawn

    def goes_on(at: tuple[jax.Array, State, Drawn]) -> jax.Array:
        return (at[0] < STEPS) & jnp.any(at[1].active)

    _, state, drawn = jax.lax.while_loop(goes_on, one, (jnp.int32(0), state, blank))
    return state, drawn


def _grow(state: State, rows: int) -> State:
    """State with room for `rows` rows."""

    def padded(x: jax.Array, axis: int = -1) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, rows - x.shape[axis])
        return jnp.pad(x, widths)

    cache = state.cache
    key, value = (tuple(map(padded, each)) for each in (cache.key, cache.value))
    asked, lengths, own = map(padded, (cache.asked, cache.lengths, cache.own))
    cache = decode.Cache(key, value, asked, lengths, own, cache.place)
    return State(cache, padded(state.logits), padded(state.key, 0), *map(padded, state[3:]))


def blank(config: ModelConfig, slots: int, rows: int, index: int) -> State:
    """Batch without requests, whose next token goes into slot `index`."""
    dtype, shape = PRECISIONS[config.precision], (slots, config.kv_heads, config.head_dim, rows)
    key, value = (tuple(jnp.zeros(shape, dtype) for _ in range(config.layers)) for _ in range(2))
    lengths, own, drawn, most = (jnp.zeros(rows, jnp.int32) for _ in range(4))  # each its own memory, which is donated
    temperature, top_p = (jnp.ones(rows) for _ in range(2))
    wanted, active = (jnp.zeros(rows, bool) for _ in range(2))
    cache = decode.Cache(key, value, jnp.zeros((0, rows), bool), lengths, own, jnp.int32(index))
    logits, keys = jnp.zeros((config.vocabulary, rows)), jnp.zeros((rows, 2), jnp.uint32)
    return State(cache, logits, keys, drawn, most, temperature, top_p, wanted, active)


def draw(state: State, pad: int, tops: int) -> tuple[jax.Array, ...]:
    """(token, log-probability [B]; the likeliest tokens, theirs [TOPS, B]) of a state's logits.

    Log-probabilities are those at the row's temperature, before top-p cuts; at temperature 0 those at 1. A row's noise
    depends on its own key and the number of the token alone.
    """
    greedy = state.temperature == 0.0
    logits = state.logits / jnp.where(greedy, 1.0, state.temperature)[None]
    if pad != tokenizer.NONE:
        logits = logits.at[pad].set(transformer.NEVER)
    scores = jax.nn.log_softmax(logits, axis=0)

    def nucleus(scores: jax.Array) -> jax.Array:
        share = jnp.exp(scores)
        ordered = jnp.sort(share, axis=0, descending=True)
        kept = jnp.cumsum(ordered, axis=0) - ordered < state.top_p[None]
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=0)
        return jnp.where((share >= least[None]) | (state.top_p >= 1.0)[None], scores, transformer.NEVER)

    def noise() -> jax.Array:
        def one(key: jax.Array, count: jax.Array) -> jax.Array:
            return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key), count), scores.shape[:1])

        return jnp.where(greedy[None], 0.0, jax.vmap(one)(state.key, state.drawn).T)

    def likeliest() -> tuple[jax.Array, jax.Array]:
        best, which = jax.lax.top_k(scores.T, tops)
        return which.T.astype(jnp.int32), best.T

    def none() -> tuple[jax.Array, jax.Array]:
        shape = (tops, scores.shape[1])
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    acting = state.active
    cut = jax.lax.cond(jnp.any((state.top_p < 1.0) & ~greedy & acting), nucleus, lambda x: x, scores)
    cut = cut + jax.lax.cond(jnp.any(~greedy & acting), noise, lambda: jnp.zeros(scores.shape))
    token = jnp.argmax(cut, axis=0).astype(jnp.int32)
    log_prob = jnp.take_along_axis(scores, token[None], axis=0)[0]
    return token, log_prob, *jax.lax.cond(jnp.any(state.wanted & acting), likeliest, none)


# --------------------------------------------------------------------------------------------------------------- engine


class Weights(NamedTuple):
    """One version of a model."""

    version: str
    params: Params
    kernels: decode.Kernels


class Counters:
    """Sums since the start, written by the engine's thread alone."""

    def __init__(self) -> None:
        self.prompt_tokens = self.tokens = self.batches = self.calls = self.swaps = self.failures = 0
        self.active = 0  # rows now


class Engine:
    """Decodes jobs in a thread of its own, until `close`."""

    def __init__(
        self, config: ModelConfig, params: Params, words: Tokeniser, limits: Limits, version: str = "0"
    ) -> None:
        self.config, self.words, self.limits, self.counters = config, words, limits, Counters()
        slots = _doubled(SMALLEST_SLOTS, _doubled(SMALLEST_ROOM, limits.prompt_tokens) + limits.tokens)
        self._slots = slots
        self._programs = programs(config, slots, words.ends, words.pad)
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._offered: tuple[str, Params] | None = None
        self._closing = False
        self._compiled: set[tuple[int | str, ...]] = set()  # sizes of programs
        params = jax.tree.map(jnp.asarray, params)
        self._weights = Weights(version, params, self._programs.prepare(params))
        self._thread = threading.Thread(target=self._work, name="longhaul-serve", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ for callers

    @property
    def version(self) -> str:
        return self._weights.version

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def queued(self) -> int:
        """Completions that wait."""
        return sum(len(job.rows) - job.joined for job in list(self._waiting))

    def submit(self, job: Job) -> None:
        """Job for the queue, whose `done` is resolved later. Raises QueueFull; RuntimeError after `close`."""
        with self._changed:
            if self._closing:
                raise RuntimeError("the server ends")
            if self.queued + len(job.rows) > self.limits.queue:
                raise QueueFull(f"{self.queued} completions wait; at most {self.limits.queue} may")
            self._waiting.append(job)
            self._changed.notify()

    def offer(self, version: str, params: Params) -> None:
        """Newer weights, which serve after the batch that is decoded; of several that wait, the last."""
        with self._changed:
            self._offered = (version, params)
            self._changed.notify()

    def close(self) -> None:
        """End, after what was submitted is decoded."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # --------------------------------------------------------------------------------------------- its own thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing or self._offered is not None)
                if self._closing and not self._waiting:
                    return
            try:
                self._swap()
                self._sweep()
                if self._waiting:
                    self._batch()
            except Exception as error:  # a program that did not compile, no memory: these requests fail, others may not
                self.counters.failures += 1
                self.counters.active = 0
                for job in [*self._begun, *[job for job in self._waiting if job.joined]]:
                    self._fail(job, error)

    def _swap(self) -> None:
        """Takes the weights that wait, unless a request still needs the old ones."""
        with self._changed:
            if self._offered is None or any(job.joined for job in self._waiting):
                return
            version, params = self._offered
            self._offered = None
        params = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), params, self._weights.params)
        self._weights = Weights(version, params, self._programs.prepare(params))
        self.counters.swaps += 1

    def _sweep(self) -> None:
        """Drops jobs that nobody waits for any more."""
        now = time.monotonic()
        for job in list(self._waiting):
            if job.cancelled or now > job.deadline:
                self._fail(job, TimeoutError("its deadline is over"))

    def _fail(self, job: Job, error: Exception) -> None:
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
        if not job.done.done():
            job.done.set_exception(error)

    def _take(self, count: int, index: int | None, slots: int) -> list[tuple[Job, int]]:
        """At most `count` rows in the order of requests, that fit behind slot `index`; any if it is None."""
        taken: list[tuple[Job, int]] = []
        with self._changed:
            for job in list(self._waiting):
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
                self._waiting.remove(job)
        for job, _ in taken:
            job.version = self._weights.version
        return taken

    _begun: Sequence[Job] = ()
    """Jobs of the batch that is decoded."""

    def _batch(self) -> None:
        """Decodes one batch to its end."""
        taken = self._take(self.limits.rows, None, 0)
        if not taken:
            return
        room = max(_doubled(SMALLEST_ROOM, max(map(len, job.prompts))) for job, _ in taken)
        longest = max(job.max_tokens for job, _ in taken)
        slots = min(_doubled(SMALLEST_SLOTS, room + 2 * longest), self._slots)
        if slots < room + longest:
            slots = _doubled(SMALLEST_SLOTS, room + longest)
        rows = _rows(len(taken), self.limits.rows)
        state = blank(self.config, slots, rows, room)
        held: list[tuple[Job, int] | None] = [None] * rows
        self.counters.batches += 1
        self._begun = [job for job, _ in taken]
        while True:
            if taken:
                self._begun = list({id(each[0]): each[0] for each in (*held, *taken) if each is not None}.values())
                if (needed := len(taken) + sum(each is not None for each in held)) > len(held):
                    rows = _rows(needed, self.limits.rows)
                    state, held = self._programs.grow(state, rows), held + [None] * (rows - len(held))
                state = self._join(state, held, taken)
            live = np.array([each is not None for each in held])
            with self._untimed("run", len(held), state.cache.key[0].shape[0]):
                state, drawn = self._programs.run(self._weights.kernels, state, live)
            self.counters.calls += 1
            self._deliver(held, *(np.asarray(each) for each in drawn))
            self.counters.active = sum(each is not None for each in held)
            self._sweep()
            if not self.counters.active:
                self._begun = ()
                return
            taken = []
            if self._waiting:
                taken = self._take(self.limits.rows - self.counters.active, int(state.cache.place), slots)

    def _join(self, state: State, held: list[tuple[Job, int] | None], taken: list[tuple[Job, int]]) -> State:
        """State with the rows of `taken` in free columns, which are noted in `held`."""
        texts: dict[tuple[int, ...], int] = {}
        for job, number in taken:
            texts.setdefault(tuple(job.prompts[number // job.n]), len(texts))
        room = _doubled(SMALLEST_ROOM, max(map(len, texts)))
        tokens, lengths = np.zeros((_rows(len(texts)), room), np.int32), np.ones(_rows(len(texts)), np.int32)
        for text, place in texts.items():
            tokens[place, room - len(text) :], lengths[place] = text, len(text)
        count = _rows(len(taken))
        joining = Joining(
            np.zeros(count, np.int32), np.full(count, len(held), np.int32), np.zeros((count, 2), np.uint32),
            np.ones(count, np.int32), np.zeros(count, np.float32), np.ones(count, np.float32), np.zeros(count, bool),
        )  # fmt: skip
        free = (column for column, each in enumerate(held) if each is None)
        for place, (job, number) in enumerate(taken):
            column = next(free)
            held[column] = (job, number)
            joining.source[place] = texts[tuple(job.prompts[number // job.n])]
            joining.column[place], joining.most[place] = column, job.max_tokens
            joining.key[place] = np.random.SeedSequence((job.seed, number)).generate_state(2)
            joining.temperature[place], joining.top_p[place] = job.temperature, job.top_p
            joining.wanted[place] = job.tops > 0
        self.counters.prompt_tokens += sum(map(len, texts))
        with self._untimed("join", *tokens.shape, count, len(held), state.cache.key[0].shape[0]):
            kept, logits = self._programs.read(self._weights.params, tokens, lengths)
            return self._programs.join(state, kept, logits, lengths, joining)

    @contextlib.contextmanager
    def _untimed(self, *sizes: int | str) -> Iterator[None]:
        """Context of a call that compiles a program if its sizes are new: all requests get that time added, and the
        machine gets back what the compiler took."""
        began = time.monotonic()
        yield
        if sizes not in self._compiled:
            self._compiled.add(sizes)
            device_memory.trim()
            took = time.monotonic() - began
            for job in {id(job): job for job in (*self._begun, *self._waiting)}.values():
                job.deadline += took

    def _deliver(
        self, held: list[tuple[Job, int] | None], token: np.ndarray, log_prob: np.ndarray, written: np.ndarray,
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
        if job.stop and any(stop in self.words.decode(row.tokens) for stop in job.stop):
            for count in range(before + 1, len(row.tokens) + 1):
                text = self.words.decode(row.tokens[:count])
                if any(stop in text for stop in job.stop):
                    del row.tokens[count:], row.log_probs[count:], row.tops[count:]
                    return "stop"
        if row.tokens and row.tokens[-1] in self.words.ends:
            return "stop"
        return "length" if len(row.tokens) >= job.max_tokens else ""


def text_of(words: Tokeniser, job: Job, row: Row) -> str:
    """Text of a completion, before its end and the first of the job's stops."""
    text = words.decode(row.tokens)
    ends = [text.find(stop) for stop in job.stop if stop in text]
    return text[: min(ends)] if ends else text


def _doubled(least: int, wanted: int) -> int:
    """Smallest size of at least `wanted`, doubled from `least`."""
    return least * 2 ** max(0, math.ceil(math.log2(wanted / least)))


def _rows(wanted: int, most: int | None = None) -> int:
    """Smallest number of rows of at least `wanted`: powers of `GROWTH`, or `most`."""
    rows = GROWTH ** math.ceil(math.log(wanted, GROWTH)) if wanted > 1 else 1
    rows = rows if rows >= wanted else rows * GROWTH
    return rows if most is None else min(rows, most)
