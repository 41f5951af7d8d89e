"""Decode steps: `transformer.forward` for a single token, with rows along the minor axis.

A decode step is small products and much besides, so its speed depends on the layout. Here x is [width, B], and the keys
and values of a layer are [S, kv_heads, head_dim, B]: those of a token are one block, every product reads its factors in
place, and all rows are computed side by side between the products. Work that does not depend on the token is done
before the loop: kernels are transposed, those of one input joined, LoRA's factors merged. Layers are compiled one by
one, because a loop over them would copy its part of the cache out and in again for each token.

Mathematics and parameters are those of transformer.py; a test compares the two. The price is a second copy of the
kernels while sampling.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul.networks.layers import PRECISIONS, rms_norm
from longhaul.reasoning import transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.types import Params

JOINED = {"enter": ("query", "key", "value"), "gated": ("gate", "up")}
"""Kernels of the same input, which are joined: name -> their names."""

FEATURES = -2
"""Axis of the features: rows lie along the last one."""

PIECE = 64
"""Slots whose values are added up in one step; larger caches have a multiple of it."""


class Kernels(NamedTuple):
    """Factors of decode steps; kernels are [outputs, inputs]."""

    embedding: jax.Array  # [V, width]
    unembedding: jax.Array  # float32 [V, width]
    final_norm: jax.Array  # [width]
    layers: tuple[dict[str, jax.Array], ...]
    turns: tuple[jax.Array, jax.Array]  # cosines and sines float32 [S, head_dim / 2] of a row's tokens


class Cache(NamedTuple):
    """Keys and values of earlier tokens, for S slots, of which `index` are filled in all rows."""

    key: tuple[jax.Array, ...]  # of each layer [S, kv_heads, head_dim, B]
    value: tuple[jax.Array, ...]
    filled: jax.Array  # bool [S, B]: a slot holds a token, or will hold one, and not padding
    lengths: jax.Array  # int32 [B]: a row's own tokens, without padding
    index: jax.Array  # type: ignore[assignment]  # int32; a tuple has a method of that name


def prepare(config: ModelConfig, params: Params, slots: int) -> Kernels:
    """Kernels of steps within `slots` slots."""
    dtype = PRECISIONS[config.precision]
    kernels = transformer.merged(config, params["layers"])
    for joined, names in JOINED.items():
        kernels[joined] = jnp.concatenate([kernels.pop(name) for name in names], axis=-1)
        if config.biased and joined == "enter":
            kernels["enter_bias"] = jnp.concatenate([kernels.pop(f"{name}_bias") for name in names], axis=-1)
    kernels = {name: jnp.swapaxes(x, 1, 2).astype(dtype) if x.ndim == 3 else x for name, x in kernels.items()}
    embedding = params["embedding"]
    kernel = embedding if config.tied else params["unembedding"].T
    angles = jnp.arange(slots, dtype=jnp.float32)[:, None] * transformer.frequencies(config)[None]
    each = tuple({name: x[number] for name, x in kernels.items()} for number in range(config.layers))
    return Kernels(embedding.astype(dtype), kernel.astype(jnp.float32), params["final_norm"], each,
                   (jnp.cos(angles), jnp.sin(angles)))  # fmt: skip


def begin(kept: transformer.KeyValue, mask: jax.Array, slots: int) -> Cache:
    """Cache of at least `slots` slots after prompts with `mask` bool [B, P] and these keys and values of all layers."""
    slots = slots if slots <= PIECE else -(-slots // PIECE) * PIECE

    def moved(x: jax.Array) -> tuple[jax.Array, ...]:
        x = jnp.transpose(x, (0, 2, 3, 4, 1))
        return tuple(jnp.pad(x, ((0, 0), (0, slots - x.shape[1]), (0, 0), (0, 0), (0, 0))))

    room = mask.shape[1]
    filled = jnp.pad(mask.T, ((0, slots - room), (0, 0)), constant_values=True)
    lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    key, value = map(moved, kept)
    return Cache(key, value, filled, lengths, jnp.int32(room))


def step(config: ModelConfig, kernels: Kernels, token: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """(logits float32 [V, B] of the next token, cache with this token) for one more token of each row, int32 [B].

    A row that has ended may have any token; its logits mean nothing.
    """
    turn = tuple(part[cache.lengths].T[None] for part in kernels.turns)  # [1, head_dim / 2, B]
    seen = cache.filled & (jnp.arange(cache.filled.shape[0]) <= cache.index)[:, None]
    x = kernels.embedding[token].T
    keys, values = [], []
    for own, key, value in zip(kernels.layers, cache.key, cache.value, strict=True):
        query, new_key, new_value = _heads(config, own, rms_norm(x, own["attention_norm"], config.eps, FEATURES), turn)
        key, value = (
            jax.lax.dynamic_update_slice(old, new[None], (cache.index, 0, 0, 0))
            for old, new in ((key, new_key), (value, new_value))
        )
        keys.append(key)
        values.append(value)
        query = query.reshape(config.kv_heads, -1, *query.shape[1:])
        mixed = jax.lax.platform_dependent(query, key, value, seen, cpu=written_out, default=multiplied)
        x = x + own["out"] @ mixed.reshape(-1, x.shape[1])
        gate, up = jnp.split(own["gated"] @ rms_norm(x, own["mlp_norm"], config.eps, FEATURES), 2)
        x = x + own["narrow"] @ (jax.nn.silu(gate) * up)
    x = rms_norm(x, kernels.final_norm, config.eps, FEATURES).astype(jnp.float32)
    after = Cache(tuple(keys), tuple(values), cache.filled, cache.lengths + 1, cache.index + 1)
    return kernels.unembedding @ x, after


def _heads(
    config: ModelConfig, own: dict[str, jax.Array], x: jax.Array, turn: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [heads, head_dim, B], key and value [kv_heads, head_dim, B] of a layer's normalised input [width, B]."""
    joined = own["enter"] @ x
    if config.biased:
        joined = joined + own["enter_bias"].astype(joined.dtype)[:, None]
    joined = joined.reshape(-1, config.head_dim, x.shape[1])
    query, key, value = jnp.split(joined, (config.heads, config.heads + config.kv_heads))
    if config.normed:
        query = rms_norm(query, own["query_norm"], config.eps, FEATURES)
        key = rms_norm(key, own["key_norm"], config.eps, FEATURES)
    return transformer.turned(query, turn, 1), transformer.turned(key, turn, 1), value


def multiplied(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention [kv_heads, group, head_dim, B] of one token of each row: a query of that shape to the slots that are
    `seen` [S, B], by batched products; key and value [S, kv_heads, head_dim, B]."""
    scores = jnp.einsum("kgdb,skdb->skgb", query, key, preferred_element_type=jnp.float32)
    return jnp.einsum("skgb,skdb->kgdb", _shares(scores, seen, query.shape[2]).astype(value.dtype), value)


def written_out(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention like `multiplied`, by sums written out term by term.

    On a CPU XLA does not multiply or add along an outer axis for all rows at once by itself; written out, each of these
    sums is one loop over rows. With 64 rows and 64 slots a step takes 0.3 ms; `multiplied` takes 1.0, sums by `jnp.sum`
    11. Values of many slots are added up piece by piece.
    """
    slots, size = key.shape[0], key.shape[2]
    key = key.astype(jnp.float32)
    scores = sum((query[None, :, :, d] * key[:, :, None, d] for d in range(size)), jnp.zeros((), jnp.float32))
    weights = _shares(scores, seen, size).astype(value.dtype)

    def piece(first: jax.Array | int, total: jax.Array) -> jax.Array:
        count = min(slots, PIECE)
        share, of = (jax.lax.dynamic_slice_in_dim(x, first, count) for x in (weights, value))
        return sum((share[s, :, :, None] * of[s, :, None] for s in range(count)), total)

    nothing = jnp.zeros(query.shape, value.dtype)
    if slots <= PIECE:
        return piece(0, nothing)
    return jax.lax.fori_loop(0, slots // PIECE, lambda i, total: piece(i * PIECE, total), nothing)


def _shares(scores: jax.Array, seen: jax.Array, size: int) -> jax.Array:
    """Softmax over slots of scores [S, kv_heads, group, B] of heads of `size`."""
    return jax.nn.softmax(jnp.where(seen[:, None, None], scores / math.sqrt(size), transformer.NEVER), axis=0)
