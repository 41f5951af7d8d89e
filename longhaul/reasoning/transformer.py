"""Transformers, decoder-only: Llama 2 and 3, Qwen2 and Qwen3 (dense), as plain functions over a dict of stacked arrays.

Llama: Touvron et al. 2023 (arXiv 2307.09288), Dubey et al. 2024 (2407.21783); rotary positions: Su et al. 2021
(2104.09864); grouped queries: Ainslie et al. 2023 (2305.13245).

Each parameter of the layers is one array with a leading axis L, so that the layers are one scan, a rule of
`partition.py` needs one name, and a checkpoint is a flat dict. Logits are always float32 (MiniMax-M1 and ScaleRL, arXiv
2506.13585 and 2510.13786, measured the loss in lower precision), and prompts are read as the learner reads them.

Where we differ: prompts are padded on the left and a cache has one index for all rows, so that a decode step writes
one slice; positions count a row's own tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul import prng
from longhaul.networks.layers import PRECISIONS, affine, along_last, rematerialised, rms_norm
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import config_fields
from longhaul.runtime.errors import FieldError
from longhaul.types import Key, Params, PyTree

UNROLLED = 4
"""Most layers that are compiled one by one: a loop over few small layers costs more than the layers."""

TOGETHER = 2**20
"""Most parameters drawn at once, which compiles faster; larger models draw each array in its place."""

NEVER = -1e30
"""Score of a token outside the mask; finite, so that a row without any token does not become NaN."""


KeyValue = tuple[jax.Array, jax.Array]
"""Keys and values [B, T, kv_heads, head_dim] of a layer; [L, B, T, kv_heads, head_dim] of all."""


def check(config: ModelConfig) -> None:
    """Raises FieldError for an impossible model."""
    config_fields.check(config)
    if config.vocabulary < 1:
        raise FieldError("vocabulary", config.vocabulary, "it must be at least 1")
    if config.heads % config.kv_heads:
        raise FieldError("kv_heads", config.kv_heads, f"it must divide heads, {config.heads}")
    if config.head_dim % 2:
        raise FieldError("head_dim", config.head_dim, "it must be even, as rotary positions turn pairs")
    if config.rope_scaling is not None and config.rope_scaling.kind not in ("linear", "llama3"):
        raise FieldError("rope_scaling", repr(config.rope_scaling.kind), "it must be linear or llama3")


def shapes(config: ModelConfig) -> dict[str, Any]:
    """Names and shapes of a model's parameters; kernels are [inputs, outputs]. `layers` have a leading axis L."""
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (config.width,),
        "query": (config.width, wide),
        "key": (config.width, narrow),
        "value": (config.width, narrow),
        "out": (wide, config.width),
        "mlp_norm": (config.width,),
        "gate": (config.width, config.hidden),
        "up": (config.width, config.hidden),
        "narrow": (config.hidden, config.width),
    }
    if config.biased:
        layer |= {"query_bias": (wide,), "key_bias": (narrow,), "value_bias": (narrow,)}
    if config.normed:
        layer |= {"query_norm": (config.head_dim,), "key_norm": (config.head_dim,)}
    whole: dict[str, Any] = {"embedding": (config.vocabulary, config.width), "final_norm": (config.width,)}
    if not config.tied:
        whole["unembedding"] = (config.width, config.vocabulary)
    return whole | {"layers": {name: (config.layers, *shape) for name, shape in layer.items()}}


def init(key: Key, config: ModelConfig) -> Params:
    """Initial parameters, float32 and normal; kernels that add to the residual are scaled by 1 / sqrt(2 L) as in GPT-2.

    Deviations are 1 / sqrt(inputs), of the embedding 1 / sqrt(width). Where we differ: GPT-2's deviation is 0.02 for
    any width, which is this one's at 2,500; a model of width 64 then needs hundreds of updates before it learns.
    """
    check(config)
    flat, tree = jax.tree.flatten_with_path(shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    named = [(number, path[-1].key, shape) for number, (path, shape) in enumerate(flat)]
    kernels = [(number, shape) for number, name, shape in named if not name.endswith(("norm", "bias"))]
    drawn = dict(zip((number for number, _ in kernels), _normals(key, kernels), strict=True))
    arrays = []
    for number, name, shape in named:
        if name.endswith("norm"):
            arrays.append(jnp.ones(shape, jnp.float32))
        elif name.endswith("bias"):
            arrays.append(jnp.zeros(shape, jnp.float32))
        else:
            deviation = 1.0 / math.sqrt(shape[-1] if name == "embedding" else shape[-2])
            deviation /= math.sqrt(2 * config.layers) if name in ("out", "narrow") else 1.0
            arrays.append(deviation * drawn[number])
    return jax.tree.unflatten(tree, arrays)


def _normals(key: Key, kernels: list[tuple[int, tuple[int, ...]]]) -> list[jax.Array]:
    """Standard normal arrays of (number, shape) pairs, each by `key` with its number folded in."""
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.array([number for number, _ in kernels]))
    wanted = [shape for _, shape in kernels]
    if sum(map(math.prod, wanted)) <= TOGETHER:
        return prng.normals(keys, wanted)
    return [jax.random.normal(each, shape) for each, shape in zip(keys, wanted, strict=True)]


def size(config: ModelConfig) -> int:
    """Number of a model's parameters."""
    return sum(math.prod(shape) for shape in jax.tree.leaves(shapes(config), is_leaf=lambda x: isinstance(x, tuple)))


def frequencies(config: ModelConfig) -> jax.Array:
    """Radians a token of each pair of a head, float32 [head_dim / 2]."""
    pairs = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    plain = 1.0 / config.theta**pairs
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = scaling.original * plain / (2.0 * math.pi)  # within the context before
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - share) * plain / scaling.factor + share * plain


def forward(config: ModelConfig, params: Params, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits float32 [B, T, V] of each next token.

    `tokens` int32 [B, T] and `mask` bool [B, T], False at padding, to which nothing attends.
    """
    return unembed(config, params, trunk(config, params, tokens, mask)[0])


def unembed(config: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits float32 [..., V] of outputs of `trunk` [..., width]."""
    kernel = params["embedding"].T if config.tied else params["unembedding"]
    return jnp.matmul(hidden.astype(jnp.float32), kernel.astype(jnp.float32))


def trunk(
    config: ModelConfig, params: Params, tokens: jax.Array, mask: jax.Array, *, keeps: bool = False
) -> tuple[jax.Array, KeyValue | None]:
    """(the last layer's normalised output [B, T, width], which `unembed` takes; with `keeps`, keys and values)."""
    dtype = PRECISIONS[config.precision]
    steps = tokens.shape[1]
    positions = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    seen = jnp.tril(jnp.ones((steps, steps), bool))[None] & mask[:, None, :]
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)[None, None]
    turn = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]  # [B, T, 1, head_dim / 2]

    def layer(x: jax.Array, weights: PyTree) -> tuple[jax.Array, KeyValue | None]:
        own = _Kernels(weights, dtype)
        y = rms_norm(x, weights["attention_norm"], config.eps)
        mixed, kept = _attention(config, own, y, seen, turn)
        x = x + mixed
        y = rms_norm(x, weights["mlp_norm"], config.eps)
        x = x + own("narrow", jax.nn.silu(own("gate", y)) * own("up", y))
        return x, kept if keeps else None

    x = params["embedding"][tokens].astype(dtype)
    part = rematerialised(layer, config.remat, scanned=True)
    unroll = config.layers if config.layers <= UNROLLED else 1
    x, kept = jax.lax.scan(part, x, params["layers"], unroll=unroll)
    return rms_norm(x, params["final_norm"], config.eps), kept


class _Kernels(NamedTuple):
    """Kernels of one layer: (name, x [..., inputs]) -> [..., outputs], with bias if present."""

    weights: dict[str, jax.Array]
    dtype: Any

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        y = affine(x, self.weights[name])
        if f"{name}_bias" in self.weights:
            y = y + along_last(self.weights[f"{name}_bias"].astype(self.dtype), y)
        return y


def turned(x: jax.Array, turn: tuple[jax.Array, ...], axis: int = -1) -> jax.Array:
    """Heads rotated to their positions, features along `axis`: pairs are (i, i + head_dim / 2), as in Hugging Face's
    weights."""
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=axis)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=axis).astype(x.dtype)


def _attention(
    config: ModelConfig, own: _Kernels, x: jax.Array, seen: jax.Array, turn: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, KeyValue]:
    """Attention of one layer from x [B, T, width] to `seen` [B, T, T], and its keys and values."""
    rows, steps, _ = x.shape
    query, key, value = (own(name, x).reshape(rows, steps, -1, config.head_dim) for name in ("query", "key", "value"))
    if config.normed:
        query = rms_norm(query, own.weights["query_norm"], config.eps)
        key = rms_norm(key, own.weights["key_norm"], config.eps)
    query, key = turned(query, turn), turned(key, turn)
    group = config.heads // config.kv_heads
    query = query.reshape(rows, steps, config.kv_heads, group, config.head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores / math.sqrt(config.head_dim), NEVER)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(rows, steps, -1)
    return own("out", mixed), (key, value)
