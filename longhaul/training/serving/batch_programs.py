"""Compiled parts of a batch of completions: prompts are read, join the batch, and a few tokens of its rows are decoded.

Each size is a program of its own, and a program of a deep model takes a hundred megabytes. So rows, slots and prompts
have few sizes, and no program depends on all of them: prompts are read by one program, and put into the batch piece by
piece by another one. A server keeps so many programs, and gives up those that it has not used for longest.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.networks.layers import PRECISIONS
from longhaul.reasoning import decode, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import device_memory
from longhaul.types import Params

STEPS = 8
"""Decode steps of one compiled call; requests join and leave between two of them."""

TOPS = 5
"""Most alternatives of a token that are reported with their log-probabilities."""

SMALLEST_ROOM = 16
"""Fewest tokens that a prompt is padded to; a prompt joins in pieces of so many slots."""

PROGRAMS = 48
"""Compiled programs that a server keeps, at most."""


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


def _grow(state: State, rows: int) -> State:
    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows - x.shape[-1])])

    grown: State = jax.tree.map(padded, state)
    return grown


def _sizes(state: State) -> tuple[int, int]:
    """(slots, rows)."""
    return state.key[0].shape[0], state.logits.shape[1]
