"""Completions of many requests in one batch, which requests join and leave while it is decoded.

Scheduling between a few decode steps is that of Orca (Yu et al., OSDI 2022). Where we differ: all rows of a batch write
into the same slot of the cache, and a request that joins puts its prompt into the slots before it. So shapes are
static. A batch ends when its slots are used up.

Each size is a program of its own, and a program of a deep model takes a hundred megabytes. So rows, slots and prompts
have few sizes, and no program depends on all of them: prompts are read by one program, and put into the batch piece by
piece by another one. A server keeps so many programs, and gives up those that it has not used for longest.

A batch has one version of the weights. New ones are taken between two batches: while a version waits, no further
request joins.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import OrderedDict
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
"""Fewest tokens that a prompt is padded to, and slots of a batch. Prompts double; slots and rows grow by `GROWTH`."""

TOGETHER = 8
"""Prompts that are read by one call, where at least half as many are there; others are read one by one."""

PROGRAMS = 48
"""Compiled programs that a server keeps, at most."""

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
    """Batch of S slots and B rows between two tokens: its part on the device."""

    key: tuple[jax.Array, ...]  # of each layer [S, kv_heads, head_dim, B]
    value: tuple[jax.Array, ...]
    logits: jax.Array  # float32 [V, B], of the next token


class Progress(NamedTuple):
    """Settings and progress of a batch's rows, on the host between two calls."""

    place: np.ndarray  # int32: slot of the next token
    lengths: np.ndarray  # int32 [B]: tokens, with those of the prompt
    own: np.ndarray  # int32 [B]: slots before `place` that it attends to
    drawn: np.ndarray  # int32 [B], tokens so far
    most: np.ndarray  # int32 [B]
    key: np.ndarray  # uint32 [B, 2]
    temperature: np.ndarray  # float32 [B]
    top_p: np.ndarray  # float32 [B]
    wanted: np.ndarray  # bool [B]: alternatives are asked for
    active: np.ndarray  # bool [B]


class Chunk(NamedTuple):
    """Keys and values of `SMALLEST_ROOM` slots of J prompts."""

    key: jax.Array  # [layers, SMALLEST_ROOM, kv_heads, head_dim, J]
    value: jax.Array


class Drawn(NamedTuple):
    """Tokens of one call, `STEPS` by B."""

    token: jax.Array
    log_prob: jax.Array
    written: jax.Array  # bool
    top: jax.Array  # int32 [STEPS, TOPS, B]
    top_log_prob: jax.Array


class Programs:
    """Compiled parts of a batch, by size: at most `most`, beside the one of `prepare`.

    A further one takes the place of the one that was not used for longest. That one comes back from the compilation
    cache when its size is asked for again.
    """

    def __init__(self, config: ModelConfig, slots: int, ends: Sequence[int], pad: int, most: int = PROGRAMS) -> None:
        """Programs of a model for batches of at most `slots` slots."""
        self._config, self._ends, self._pad, self._most = config, tuple(ends), pad, most
        self._kept: OrderedDict[tuple[str | int, ...], jax.stages.Compiled] = OrderedDict()  # the latest used last
        self.compiled = 0  # so far
        self.prepare: Callable[[Params], decode.Kernels] = jax.jit(lambda params: decode.prepare(config, params, slots))

    def __len__(self) -> int:
        return len(self._kept)

    def blank(self, slots: int, rows: int) -> State:
        """Batch without requests."""
        return self._call(("blank", slots, rows), functools.partial(blank, self._config, slots, rows))

    def read(self, params: Params, tokens: np.ndarray, lengths: np.ndarray) -> tuple[tuple[Chunk, ...], jax.Array]:
        """(keys and values, logits [J, V]) of prompts [J, P], whose last `lengths` [J] tokens are none of padding."""
        part = functools.partial(_read, self._config)
        return self._call(("read", *tokens.shape), part, params, tokens, lengths)

    def join(self, state: State, chunk: Chunk, logits: jax.Array, first: int, source: np.ndarray) -> State:
        """State with a chunk in the slots from `first` on, and logits, in the columns of the rows that join.

        `source` int32 [B] is the number of each column's prompt; -1: the column stays.
        """
        sizes = ("join", len(logits), *_sizes(state))
        return self._call(sizes, _join, state, chunk, logits, np.int32(first), source, donate=0)

    def run(self, kernels: decode.Kernels, state: State, progress: Progress) -> tuple[State, Progress, Drawn]:
        """(state, progress, tokens) after at most `STEPS` tokens of each active row."""
        part = functools.partial(_run, self._config, self._ends, self._pad)
        return self._call(("run", *_sizes(state)), part, kernels, state, progress, donate=1)

    def grow(self, state: State, rows: int) -> State:
        """State with room for `rows` rows."""
        return self._call(("grow", *_sizes(state), rows), functools.partial(_grow, rows=rows), state)

    def _call(self, sizes: tuple[str | int, ...], part: Callable[..., Any], *given: Any, donate: Any = ()) -> Any:
        program = self._kept.pop(sizes, None)
        if program is None:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            # A partial function of its own: what JAX keeps of its trace goes with it.
            program = device_memory.compiled(jax.jit(functools.partial(part), donate_argnums=donate), *given)
            self.compiled += 1
        self._kept[sizes] = program
        return program(*given)


def _sizes(state: State) -> tuple[int, int]:
    """(slots, rows)."""
    return state.key[0].shape[0], state.logits.shape[1]


def _read(
    config: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
) -> tuple[tuple[Chunk, ...], jax.Array]:
    room = tokens.shape[1]
    mask = jnp.arange(room)[None] >= room - lengths[:, None]
    hidden, kept = transformer.trunk(config, params, tokens, mask, keeps=True)
    assert kept is not None
    turned = [jnp.transpose(x, (0, 2, 3, 4, 1)) for x in kept]  # rows along the minor axis, as in the batch
    chunks = (
        Chunk(*(x[:, at : at + SMALLEST_ROOM] for x in turned)) for at in range(0, room, SMALLEST_ROOM)
    )  # fmt: skip
    return tuple(chunks), transformer.unembed(config, params, hidden[:, -1])


def _join(state: State, chunk: Chunk, logits: jax.Array, first: jax.Array, source: jax.Array) -> State:
    joins, prompt = source >= 0, jnp.maximum(source, 0)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(joins, jnp.take(new, prompt, axis=-1), old)

    def placed(old: jax.Array, new: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(old, first, SMALLEST_ROOM)
        return jax.lax.dynamic_update_slice_in_dim(old, put(part, new), first, 0)

    key, value = (tuple(map(placed, olds, news)) for olds, news in zip(state[:2], chunk, strict=True))
    return State(key, value, put(state.logits, logits.T))


def _run(
    config: ModelConfig, ends: Sequence[int], pad: int, kernels: decode.Kernels, state: State, progress: Progress
) -> tuple[State, Progress, Drawn]:
    """(state, progress, tokens) after at most `STEPS` tokens of each active row; fewer where all rows have ended."""
    rows, tops = progress.active.shape[0], min(TOPS, config.vocabulary)
    whole, alternatives = (STEPS, rows), (STEPS, tops, rows)
    nothing = Drawn(
        jnp.zeros(whole, jnp.int32), jnp.zeros(whole), jnp.zeros(whole, bool), jnp.zeros(alternatives, jnp.int32),
        jnp.zeros(alternatives),
    )  # fmt: skip

    def one(at: tuple[jax.Array, State, Any, Drawn]) -> tuple[jax.Array, State, Any, Drawn]:
        step, state, now, drawn = at
        token, log_prob, top, top_log_prob = draw(state.logits, now, pad, tops)
        row = Drawn(token, log_prob, now.active, top, top_log_prob)
        drawn = jax.tree.map(lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, step, 0), drawn, row)
        count = now.drawn + 1
        ended = count >= now.most
        for end in ends:
            ended |= token == end
        active = now.active & ~ended
        cache = decode.Cache(state.key, state.value, jnp.zeros((0, rows), bool), now.lengths, now.own, now.place)
        logits, cache = decode.step(config, kernels, token, cache)
        own = jnp.where(active, cache.own, 0)
        now = now._replace(place=cache.place, lengths=cache.lengths, own=own, drawn=count, active=active)
        return step + 1, State(cache.key, cache.value, logits), now, drawn

    def goes_on(at: tuple[jax.Array, State, Any, Drawn]) -> jax.Array:
        return (at[0] < STEPS) & jnp.any(at[2].active)

    begin: Any = jax.tree.map(jnp.asarray, progress)
    _, state, after, drawn = jax.lax.while_loop(goes_on, one, (jnp.int32(0), state, begin, nothing))
    return state, after, drawn


def _grow(state: State, rows: int) -> State:
    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows - x.shape[-1])])

    grown: State = jax.tree.map(padded, state)
    return grown


def blank(config: ModelConfig, slots: int, rows: int) -> State:
    """Batch without requests."""
    dtype, shape = PRECISIONS[config.precision], (slots, config.kv_heads, config.head_dim, rows)
    key, value = (tuple(jnp.zeros(shape, dtype) for _ in range(config.layers)) for _ in range(2))
    return State(key, value, jnp.zeros((config.vocabulary, rows)))


def idle(rows: int, place: int) -> Progress:
    """Progress of rows without requests, whose next token goes into slot `place`."""
    lengths, own, drawn, most = (np.zeros(rows, np.int32) for _ in range(4))
    temperature, top_p = (np.ones(rows, np.float32) for _ in range(2))
    wanted, active = (np.zeros(rows, bool) for _ in range(2))
    key = np.zeros((rows, 2), np.uint32)
    return Progress(np.array(place, np.int32), lengths, own, drawn, most, key, temperature, top_p, wanted, active)


def draw(logits: jax.Array, progress: Any, pad: int, tops: int) -> tuple[jax.Array, ...]:
    """(token, log-probability [B]; the likeliest tokens, theirs [TOPS, B]) of logits float32 [V, B].

    Log-probabilities are those at the row's temperature, before top-p cuts; at temperature 0 those at 1. A row's noise
    depends on its own key and the number of the token alone.
    """
    greedy = progress.temperature == 0.0
    logits = logits / jnp.where(greedy, 1.0, progress.temperature)[None]
    if pad != tokenizer.NONE:
        logits = logits.at[pad].set(transformer.NEVER)
    scores = jax.nn.log_softmax(logits, axis=0)

    def nucleus(scores: jax.Array) -> jax.Array:
        share = jnp.exp(scores)
        ordered = jnp.sort(share, axis=0, descending=True)
        kept = jnp.cumsum(ordered, axis=0) - ordered < progress.top_p[None]
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=0)
        return jnp.where((share >= least[None]) | (progress.top_p >= 1.0)[None], scores, transformer.NEVER)

    def noise() -> jax.Array:
        def one(key: jax.Array, count: jax.Array) -> jax.Array:
            return jax.random.gumbel(jax.random.fold_in(jax.random.wrap_key_data(key), count), scores.shape[:1])

        return jnp.where(greedy[None], 0.0, jax.vmap(one)(progress.key, progress.drawn).T)

    def likeliest() -> tuple[jax.Array, jax.Array]:
        best, which = jax.lax.top_k(scores.T, tops)
        return which.T.astype(jnp.int32), best.T

    def none() -> tuple[jax.Array, jax.Array]:
        shape = (tops, scores.shape[1])
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape)

    acting = progress.active
    cut = jax.lax.cond(jnp.any((progress.top_p < 1.0) & ~greedy & acting), nucleus, lambda x: x, scores)
    cut = cut + jax.lax.cond(jnp.any(~greedy & acting), noise, lambda: jnp.zeros(scores.shape))
    token = jnp.argmax(cut, axis=0).astype(jnp.int32)
    log_prob = jnp.take_along_axis(scores, token[None], axis=0)[0]
    return token, log_prob, *jax.lax.cond(jnp.any(progress.wanted & acting), likeliest, none)


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
        self.programs = self.compiled = 0  # kept now; made so far


class Engine:
    """Decodes jobs in a thread of its own, until `close`."""

    def __init__(
        self, config: ModelConfig, params: Params, tokeniser: Tokeniser, limits: Limits, version: str = "0"
    ) -> None:
        self.config, self.tokeniser, self.limits, self.counters = config, tokeniser, limits, Counters()
        self._slots = _doubled(SMALLEST_SLOTS, _doubled(SMALLEST_ROOM, limits.prompt_tokens) + limits.tokens)
        self._programs = Programs(config, self._slots, tokeniser.ends, tokeniser.pad, limits.programs)
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._offered: tuple[str, Params] | None = None
        self._closing = False
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
        slots = _grown(SMALLEST_SLOTS, room + 2 * longest, self._slots)
        rows = _grown(1, len(taken), self.limits.rows)
        held: list[tuple[Job, int] | None] = [None] * rows
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
            if self._waiting:
                taken = self._take(self.limits.rows - self.counters.active, int(progress.place), slots)

    def _widened(
        self, state: State, progress: Progress, held: list[tuple[Job, int] | None], more: int
    ) -> tuple[State, Progress]:
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

    def _join(
        self, state: State, progress: Progress, held: list[tuple[Job, int] | None], taken: list[tuple[Job, int]]
    ) -> State:
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
