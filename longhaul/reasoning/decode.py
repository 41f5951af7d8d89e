"""Decode steps: `transformer.forward` for a single token, with rows along the minor axis.

A decode step is small products and much besides, so its speed depends on the layout. Here x is [width, B], and the keys
and values of a layer are [P + R, kv_heads, head_dim, B]: those of a token are one block, every product reads its
factors in place, and all rows are computed side by side between the products. Work that does not depend on the token is
done before the loop: kernels are transposed, those of one input joined, LoRA's factors merged. Layers are compiled one
by one, because a loop over them would copy its part of the cache out and in again for each token.

A row begins at any time: its prompt has the first P slots, its own tokens a ring of R slots, into which all rows write
at the same place. So a token is one block whatever each row's length, and an old row's tokens are hidden by a count.
On a CPU attention reads pieces of the cache, the used ones alone, with a running maximum (online softmax; Milakov and
Gimelshein 2018, arXiv 1805.02867).

Mathematics and parameters are those of transformer.py; a test compares the two. The price is a second copy of the
kernels while sampling.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.networks.layers import PRECISIONS, rms_norm
from longhaul.reasoning import transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import mesh as meshes
from longhaul.runtime import partition
from longhaul.types import Params

JOINED = {"enter": ("query", "key", "value"), "gated": ("gate", "up")}
"""Kernels of the same input, which are joined: name -> their names."""

FEATURES = -2
"""Axis of the features: rows lie along the last one."""

PIECE, LEAST = 64, 16
"""Slots that attention reads at a time, at most and at least: a power of two, by the length of completions. Of caches
larger than `PIECE` prompts and ring have a multiple of it."""

PART, FEW = 8, 8
"""Slots of a piece whose scores and values are one loop on a CPU, and rows of which twice as many slots are; of so few
XLA's short loops are slow."""


class Kernels(NamedTuple):
    """Factors of decode steps; kernels are [outputs, inputs]."""

    embedding: jax.Array  # [V, width]
    unembedding: jax.Array  # float32 [V, width]
    final_norm: jax.Array  # [width]
    layers: tuple[dict[str, jax.Array], ...]
    turns: tuple[jax.Array, jax.Array]  # cosines and sines float32 [S, head_dim / 2] of a row's tokens


class Cache(NamedTuple):
    """Keys and values of earlier tokens of B rows, in P slots of prompts and R of their own tokens."""

    key: tuple[jax.Array, ...]  # of each layer [P + R, kv_heads, head_dim, B]
    value: tuple[jax.Array, ...]
    asked: jax.Array  # bool [P, B]: a slot holds a prompt's token, not padding
    lengths: jax.Array  # int32 [B]: a row's tokens, without padding
    own: jax.Array  # int32 [B]: those behind its prompt, the last of the ring
    place: jax.Array  # int32: of the next tokens in the ring


def prepare(config: ModelConfig, params: Params, slots: int) -> Kernels:
    """Kernels of steps within `slots` slots."""
    dtype = PRECISIONS[config.precision]
    shared = meshes.parts()[1] > 1
    each = (_shared_layers if shared else _joined_layers)(config, params["layers"])
    embedding = params["embedding"]
    kernel = meshes.spread(embedding if config.tied else params["unembedding"].T, 0)
    embedding = meshes.spread(embedding.astype(dtype), 1)
    angles = jnp.arange(slots, dtype=jnp.float32)[:, None] * transformer.frequencies(config)[None]
    return Kernels(embedding, kernel.astype(jnp.float32), params["final_norm"], each,
                   (jnp.cos(angles), jnp.sin(angles)))  # fmt: skip


Layers = tuple[dict[str, jax.Array], ...]
"""Kernels [outputs, inputs] of each layer."""


def _joined_layers(config: ModelConfig, layers: Params) -> Layers:
    """Kernels of layers that a device has whole."""
    kernels = transformer.merged(config, layers)
    for joined, names in JOINED.items():
        kernels[joined] = jnp.concatenate([kernels.pop(name) for name in names], axis=-1)
        if config.biased and joined == "enter":
            kernels["enter_bias"] = jnp.concatenate([kernels.pop(f"{name}_bias") for name in names], axis=-1)
    dtype = PRECISIONS[config.precision]
    kernels = {name: jnp.swapaxes(x, 1, 2).astype(dtype) if x.ndim == 3 else x for name, x in kernels.items()}
    return tuple({name: x[number] for name, x in kernels.items()} for number in range(config.layers))


def _shared_layers(config: ModelConfig, layers: Params) -> Layers:
    """Kernels of layers that devices share. A device's part of one is of one input alone, and is joined with no other.

    They are made layer by layer: stacked, all of them would be there twice.
    """

    def one(number: int) -> dict[str, jax.Array]:
        kernels = transformer.merged(config, {name: x[number] for name, x in layers.items()})
        large = {name: x.astype(PRECISIONS[config.precision]) for name, x in kernels.items() if x.ndim == 2}
        small = meshes.whole({name: x for name, x in kernels.items() if name not in large})
        return small | {name: x.T for name, x in partition.tensor_parallel(large).items()}

    return tuple(map(one, range(config.layers)))


def room(prompt: int, length: int) -> tuple[int, int]:
    """(P, R): slots for prompts and for own tokens, of at most so many."""
    if prompt + length <= PIECE:
        return prompt, length
    piece = min(PIECE, max(LEAST, 1 << (length - 1).bit_length()))
    return -(-prompt // piece) * piece, -(-length // piece) * piece


def laid(x: jax.Array) -> jax.Array:
    """Part of a cache [P + R, kv_heads, head_dim, B] as it lies in a GPU's memory: a row's slots side by side, a head
    after the other.

    Left to XLA, the loop over tokens and the one within it that begins a row's next completion choose different ones,
    and the whole cache is transposed twice a token. Devices that share the parameters have some heads each.
    """
    return meshes.in_order(x, (1, 3, 0, 2), 1)


def begin(kept: transformer.KeyValue, mask: jax.Array, length: int) -> Cache:
    """Cache of rows that have read prompts with `mask` bool [B, P] and these keys and values of all layers, for
    `length` more tokens of each."""
    prompt_room, own = room(mask.shape[1], length)
    short = prompt_room - mask.shape[1]

    def moved(x: jax.Array) -> tuple[jax.Array, ...]:
        x = jnp.transpose(x, (0, 2, 3, 4, 1))
        return tuple(map(laid, jnp.pad(x, ((0, 0), (short, own), (0, 0), (0, 0), (0, 0)))))

    key, value = map(moved, kept)
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    return Cache(key, value, jnp.pad(mask.T, ((short, 0), (0, 0))), lengths, jnp.zeros_like(lengths), jnp.int32(0))


def renew(cache: Cache, row: jax.Array, kept: transformer.KeyValue, mask: jax.Array) -> Cache:
    """Cache whose row of that number has read another prompt, with `mask` bool [P] and keys and values [L, P, ...]."""
    short = len(cache.asked) - len(mask)
    key, value = (
        tuple(
            laid(jax.lax.dynamic_update_slice(old, new[..., None], (short, 0, 0, row)))
            for old, new in zip(olds, news, strict=True)
        )
        for olds, news in zip((cache.key, cache.value), kept, strict=True)
    )
    at_row = jnp.arange(len(cache.own)) == row
    mask_room = jnp.where(at_row[None], jnp.pad(mask, (short, 0))[:, None], cache.asked)
    lengths = jnp.where(at_row, jnp.sum(mask, dtype=jnp.int32), cache.lengths)
    return Cache(key, value, mask_room, lengths, jnp.where(at_row, 0, cache.own), cache.place)


def of_rows(cache: Cache, rows: jax.Array) -> Cache:
    """Cache of the rows with these numbers."""
    of_each: Cache = jax.tree.map(lambda x: x[..., rows] if x.ndim else x, cache)
    return of_each


class _AttendedSlots(NamedTuple):
    """Slots that the next tokens attend to."""

    seen: jax.Array  # bool [P + R, B]
    first: jax.Array  # int32 [N]: first slot of each piece that is read
    pieces: jax.Array  # int32: number of these


def _attended_slots(cache: Cache) -> _AttendedSlots:
    prompt_room, own = len(cache.asked), len(cache.key[0]) - len(cache.asked)
    age = (cache.place - jnp.arange(own)) % own
    seen = jnp.concatenate([cache.asked, age[:, None] <= cache.own[None]])
    if prompt_room + own <= PIECE:
        return _AttendedSlots(seen, jnp.zeros(1, jnp.int32), jnp.int32(1))
    piece = min(PIECE, own)
    pieces, ring = prompt_room // piece, own // piece
    begun: Any = 0
    if prompt_room:
        begun = jnp.where(jnp.any(cache.asked), jnp.argmax(jnp.any(cache.asked, axis=1)) // piece, pieces)
    last, oldest = cache.place // piece, (cache.place - jnp.max(cache.own)) // piece
    number = jnp.arange(pieces + ring)
    of_ring = pieces + (last - (number - (pieces - begun))) % ring
    first = jnp.where(number < pieces - begun, begun + number, of_ring) * piece
    return _AttendedSlots(seen, first.astype(jnp.int32), pieces - begun + jnp.minimum(last - oldest + 1, ring))


def step(config: ModelConfig, kernels: Kernels, token: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """(logits float32 [V, B] of the next token, cache with this token) for one more token of each row, int32 [B].

    A row that has ended may have any token; its logits mean nothing.
    """
    turn = tuple(part[cache.lengths].T[None] for part in kernels.turns)  # [1, head_dim / 2, B]
    used, position = _attended_slots(cache), len(cache.asked) + cache.place
    x = meshes.whole(kernels.embedding[token].T)
    keys, values = [], []
    for own, key, value in zip(kernels.layers, cache.key, cache.value, strict=True):
        query, new_key, new_value = _heads(config, own, rms_norm(x, own["attention_norm"], config.eps, FEATURES), turn)
        key, value = (
            laid(jax.lax.dynamic_update_slice(old, new[None], (position, 0, 0, 0)))
            for old, new in ((key, new_key), (value, new_value))
        )
        keys.append(key)
        values.append(value)
        query = query.reshape(config.kv_heads, -1, *query.shape[1:])
        mixed = jax.lax.platform_dependent(query, key, value, used, cpu=attend_by_sums, default=attend_by_products)
        x = x + own["out"] @ mixed.reshape(-1, x.shape[1])
        gate, up = _products(config, own, "gated", rms_norm(x, own["mlp_norm"], config.eps, FEATURES))
        x = x + own["narrow"] @ (jax.nn.silu(gate) * up)
    x = rms_norm(x, kernels.final_norm, config.eps, FEATURES).astype(jnp.float32)
    place = (cache.place + 1) % (len(cache.key[0]) - len(cache.asked))
    after = Cache(tuple(keys), tuple(values), cache.asked, cache.lengths + 1, cache.own + 1, place)
    return meshes.whole(kernels.unembedding @ x), after


def _products(config: ModelConfig, own: dict[str, jax.Array], joined: str, x: jax.Array) -> list[jax.Array]:
    """Products of x [width, B] with each of a layer's kernels of the same input, and their biases."""

    def product(name: str) -> jax.Array:
        y = own[name] @ x
        return y + own[f"{name}_bias"].astype(y.dtype)[:, None] if f"{name}_bias" in own else y

    if joined not in own:
        return [product(name) for name in JOINED[joined]]
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    ends = {"enter": (wide, wide + narrow), "gated": (config.hidden,)}
    return jnp.split(product(joined), ends[joined])


def _heads(
    config: ModelConfig, own: dict[str, jax.Array], x: jax.Array, turn: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [heads, head_dim, B], key and value [kv_heads, head_dim, B] of a layer's normalised input [width, B]."""
    query, key, value = (part.reshape(-1, config.head_dim, x.shape[1]) for part in _products(config, own, "enter", x))
    if config.normed:
        query = rms_norm(query, own["query_norm"], config.eps, FEATURES)
        key = rms_norm(key, own["key_norm"], config.eps, FEATURES)
    return transformer.turned(query, turn, 1), transformer.turned(key, turn, 1), value


def attend_by_products(query: jax.Array, key: jax.Array, value: jax.Array, used: _AttendedSlots) -> jax.Array:
    """Attention [kv_heads, group, head_dim, B] of one token of each row: a query of that shape to the slots that are
    `used`, by batched products over all of them; key and value [P + R, kv_heads, head_dim, B]."""
    scores = jnp.einsum("kgdb,skdb->skgb", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(used.seen[:, None, None], scores / math.sqrt(query.shape[2]), transformer.NEVER)
    return jnp.einsum("skgb,skdb->kgdb", jax.nn.softmax(scores, axis=0).astype(value.dtype), value)


def attend_by_sums(query: jax.Array, key: jax.Array, value: jax.Array, used: _AttendedSlots) -> jax.Array:
    """Attention like `attend_by_products`, to the used pieces alone, by sums written out term by term.

    On a CPU XLA does not multiply or add along an outer axis for all rows at once by itself; written out, each of these
    sums is one loop over rows. With 64 rows and 64 slots a step takes 0.3 ms; `attend_by_products` takes 1.0, sums by
    `jnp.sum` 11.

    Pieces are read one after the other; where one has a higher score than those before, their sums are scaled down
    (online softmax). A piece of several is read in parts of `PART` slots, by loops that nothing is fused across:
    otherwise XLA computes its scores twice, copies it, and adds its values in leaps over memory, in which no cache
    helps.
    """
    (heads, group, size, rows), slots = query.shape, len(key) // len(used.first)
    count = slots if len(used.first) == 1 else min(PART * (1 + (rows <= FEW)), slots)
    parts, shape = slots // count, (heads, group, rows)

    def scores(first: Any) -> jax.Array:
        """Scores [count, kv_heads, group, B] of the slots from `first` on."""

        def feature(d: int) -> jax.Array:
            keys = jax.lax.dynamic_slice(key, (first, 0, d, 0), (count, heads, 1, rows)).astype(jnp.float32)
            return query[None, :, :, d] * keys

        even, odd = (functools.reduce(jnp.add, map(feature, range(each, size, 2))) for each in range(2))
        score = (even + odd) / math.sqrt(size)  # two sums, because an addition waits for the one before it
        return jnp.where(jax.lax.dynamic_slice_in_dim(used.seen, first, count)[:, None, None], score, transformer.NEVER)

    def sums(total: jax.Array, share: jax.Array, at: Any, first: Any) -> jax.Array:
        """`total` [kv_heads, head_dim, group, B] and values of the slots from `first` on, by shares from `at` on."""

        def slot(s: int) -> jax.Array:
            values = jax.lax.dynamic_slice(value, (first + s, 0, 0, 0), (1, heads, size, rows))[0]
            return jax.lax.dynamic_index_in_dim(share, at + s, keepdims=False)[:, None] * values[:, :, None]

        return sum((slot(s) for s in range(count)), total)

    def piece(number: jax.Array | int, so_far: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        """(highest score, sum of shares, values summed by share) with a further piece; shares are relative to the
        highest."""
        highest, whole, total = so_far
        first = used.first[number]

        def part(number: jax.Array, score: jax.Array) -> jax.Array:
            at = number * count
            return jax.lax.dynamic_update_slice_in_dim(score, scores(first + at), at, 0)

        score = scores(first) if parts == 1 else jax.lax.fori_loop(0, parts, part, jnp.zeros((slots, *shape)))
        top = functools.reduce(jnp.maximum, score, highest)
        share, before = jnp.exp(score - top[None]), jnp.exp(highest - top)
        whole = functools.reduce(jnp.add, share, whole * before)
        share, total = share.astype(value.dtype), total * before[:, None]
        if parts == 1:
            return top, whole, sums(total, share, 0, first)

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            return sums(total, share, number * count, first + number * count)

        return top, whole, jax.lax.fori_loop(0, parts, add, total)

    begun = jnp.full(shape, transformer.NEVER), jnp.zeros(shape), jnp.zeros((heads, size, group, rows))
    if len(used.first) == 1:
        _, whole, total = piece(0, begun)
    else:
        _, whole, total = jax.lax.fori_loop(0, used.pieces, piece, begun)
    return jnp.swapaxes(total / whole[:, None], 1, 2).astype(value.dtype)
