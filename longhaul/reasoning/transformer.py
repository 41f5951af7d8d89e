"""Transformers, decoder-only: Llama 2 and 3, Qwen2 and Qwen3 (dense), as plain functions over a dict of stacked arrays.

Llama: Touvron et al. 2023 (arXiv 2307.09288), Dubey et al. 2024 (2407.21783); rotary positions: Su et al. 2021
(2104.09864); grouped queries: Ainslie et al. 2023 (2305.13245); LoRA: Hu et al. 2021 (2106.09685).

Each parameter of the layers is one array with a leading axis L, so that the layers are one scan, a rule of
`partition.py` needs one name, and a checkpoint is a flat dict. Logits are always float32 (MiniMax-M1 and ScaleRL, arXiv
2506.13585 and 2510.13786, measured the loss in lower precision), and prompts are read as the learner reads them.

Where we differ: prompts are padded on the left and a cache has one index for all rows, so that a decode step writes
one slice; positions count a row's own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul import prng
from longhaul.networks.layers import PRECISIONS, affine, along_last, rematerialised, rms_norm
from longhaul.reasoning.config import ModelConfig
from longhaul.runtime import config_fields, partition
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import FieldError
from longhaul.types import Key, Params, PyTree

UNROLLED = 4
"""Most layers that are compiled one by one: a loop over few small layers costs more than the layers."""

TOGETHER = 2**20
"""Most parameters drawn at once, which compiles faster; larger models draw each array in its place."""

NEVER = -1e30
"""Score of a token outside the mask; finite, so that a row without any token does not become NaN."""

ADAPTED = ("query", "key", "value", "out", "gate", "up", "narrow")
"""Kernels that LoRA adds to: all of a layer (Schulman et al. 2025 found attention alone worse)."""

ALPHA = 32.0
"""LoRA's factor is ALPHA / rank."""

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
    if config.lora:
        for name in ADAPTED:
            inputs, outputs = layer[name]
            layer |= {f"{name}_down": (inputs, config.lora), f"{name}_up": (config.lora, outputs)}
    whole: dict[str, Any] = {"embedding": (config.vocabulary, config.width), "final_norm": (config.width,)}
    if not config.tied:
        whole["unembedding"] = (config.width, config.vocabulary)
    return whole | {"layers": {name: (config.layers, *shape) for name, shape in layer.items()}}


def init(key: Key, config: ModelConfig, *, blank: bool = False) -> Params:
    """Initial parameters, normal; kernels that add to the residual are scaled by 1 / sqrt(2 L) as in GPT-2.

    Deviations are 1 / sqrt(inputs), of the embedding 1 / sqrt(width). Where we differ: GPT-2's deviation is 0.02 for
    any width, which is this one's at 2,500; a model of width 64 then needs hundreds of updates before it learns.

    With `blank` all but LoRA's factors are zeros, for files to fill: drawing takes five times the model's memory.
    """
    check(config)
    flat, tree = jax.tree.flatten_with_path(shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    named = [(number, path[-1].key, shape) for number, (path, shape) in enumerate(flat)]
    own = [(number, name, shape) for number, name, shape in named if not blank or name.endswith("_down")]
    kernels = [(number, shape) for number, name, shape in own if not name.endswith(("norm", "bias", "_up"))]
    drawn = dict(zip((number for number, _ in kernels), _normals(key, kernels) if kernels else [], strict=True))
    arrays = []
    for number, name, shape in named:
        if name.endswith(("bias", "_up")) or (blank and number not in drawn):
            arrays.append(jnp.zeros(shape, parameter_dtype(config, name)))
        elif name.endswith("norm"):
            arrays.append(jnp.ones(shape, jnp.float32))
        else:
            deviation = 1.0 / math.sqrt(shape[-1] if name == "embedding" else shape[-2])
            deviation /= math.sqrt(2 * config.layers) if name in ("out", "narrow") else 1.0
            arrays.append(deviation * drawn[number])
    typed = [x.astype(parameter_dtype(config, name)) for x, (_, name, _) in zip(arrays, named, strict=True)]
    return jax.tree.unflatten(tree, typed)


def parameter_dtype(config: ModelConfig, name: str) -> Any:
    """Type in which the parameter `name` is kept: float32, but for the frozen kernels of LoRA."""
    rounded = config.lora and name in (*ADAPTED, "embedding", "unembedding")
    return PRECISIONS[config.frozen] if rounded else jnp.float32


def _normals(key: Key, kernels: list[tuple[int, tuple[int, ...]]]) -> list[jax.Array]:
    """Standard normal arrays of (number, shape) pairs, each by `key` with its number folded in."""
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.array([number for number, _ in kernels]))
    sizes = [shape for _, shape in kernels]
    if sum(map(math.prod, sizes)) <= TOGETHER:
        return prng.normals(keys, sizes)
    return [jax.random.normal(each, shape) for each, shape in zip(keys, sizes, strict=True)]


def size(config: ModelConfig) -> int:
    """Number of a model's parameters."""
    return sum(math.prod(shape) for shape in jax.tree.leaves(shapes(config), is_leaf=lambda x: isinstance(x, tuple)))


def merged(config: ModelConfig, layers: PyTree) -> dict[str, jax.Array]:
    """Parameters of the layers with LoRA's factors multiplied and added to their kernels."""
    if not config.lora:
        return dict(layers)
    kept = {name: x for name, x in layers.items() if not name.endswith(("_down", "_up"))}
    return kept | {
        name: kept[name] + ALPHA / config.lora * layers[f"{name}_down"] @ layers[f"{name}_up"] for name in ADAPTED
    }


def split(config: ModelConfig, params: Params) -> tuple[Params, Params]:
    """(parameters that are learnt, the rest): LoRA's factors, or all; `joined` is the inverse."""
    if not config.lora:
        return params, {}
    adapters = {name: x for name, x in params["layers"].items() if name.endswith(("_down", "_up"))}
    layers = {name: x for name, x in params["layers"].items() if name not in adapters}
    return {"layers": adapters}, {**params, "layers": layers}


def joined(learnt: Params, rest: Params) -> Params:
    return {**rest, "layers": {**rest["layers"], **learnt["layers"]}} if rest else learnt


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


class Places(NamedTuple):
    """Tokens [B, T] of several texts in each row."""

    position: jax.Array  # int32 [B, T], within a token's own text
    seen: jax.Array  # bool [B, T, T]: tokens (last axis) that each one attends to


def trunk(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    mask: jax.Array | Places,
    *,
    keeps: bool = False,
    laid: Callable[[PyTree], PyTree] = partition.fetched,
) -> tuple[jax.Array, KeyValue | None]:
    """(the last layer's normalised output [B, T, width], which `unembed` takes; with `keeps`, keys and values).

    `mask` bool [B, T] is False at padding. Where devices share the parameters (`--fsdp`), `laid` says how they compute
    with a layer's kernels: by default each gathers them, for its part of the rows (ZeRO); with
    `partition.tensor_parallel` each takes its part of the heads and of the wide layer, for all rows.
    """
    places = mask if isinstance(mask, Places) else _single_text(mask)
    turn = _turn(config, places.position)
    split = meshes.rows if laid is partition.fetched else meshes.whole

    def block(own: _Kernels, x: jax.Array) -> tuple[jax.Array, KeyValue | None]:
        x, kept = _block(config, own, x, places.seen, turn, None)
        return split(x), kept if keeps else None

    x, kept = _through(config, params, split(_embedded(config, params, tokens)), block, laid)
    return rms_norm(x, params["final_norm"], config.eps), kept


def continued(
    config: ModelConfig, params: Params, prompt: jax.Array, mask: jax.Array, text: jax.Array, read: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Outputs like those of `trunk` of prompts [M, P] and of texts [B, T], B / M of which follow each prompt side by
    side. `mask` bool [M, P] and `read` bool [B, T] are False at padding.

    A prompt is read once for its texts, and each layer computes both: devices that share the parameters gather a kernel
    once for them.
    """
    asked, written = _single_text(mask), _single_text(read)
    before = jnp.sum(mask, axis=1, dtype=jnp.int32)
    turns = (
        _turn(config, asked.position),
        _turn(config, written.position + jnp.repeat(before, len(text) // len(prompt))[:, None]),
    )

    def block(own: _Kernels, both: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
        first, kept = _block(config, own, both[0], asked.seen, turns[0], None)
        rest, _ = _block(config, own, both[1], written.seen, turns[1], _Past(kept, mask))
        return meshes.rows((first, rest)), None

    begun = meshes.rows(tuple(_embedded(config, params, tokens) for tokens in (prompt, text)))
    both, _ = _through(config, params, begun, block, partition.fetched)
    first, rest = (rms_norm(x, params["final_norm"], config.eps) for x in both)
    return first, rest


def _embedded(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Embeddings [B, T, width] of tokens; devices that share the table look up their part of every token."""
    return meshes.spread(params["embedding"], 1)[tokens].astype(PRECISIONS[config.precision])


def _turn(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, T, 1, head_dim / 2] of tokens at these positions [B, T]."""
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)[None, None]
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def _through(
    config: ModelConfig,
    params: Params,
    x: PyTree,
    block: Callable[[_Kernels, Any], tuple[Any, Any]],
    laid: Callable[[PyTree], PyTree],
) -> tuple[Any, Any]:
    """(x after all layers, what the block of each layer keeps)."""
    dtype, shared = PRECISIONS[config.precision], meshes.parts()[1] > 1

    def layer(x: PyTree, weights: dict[str, jax.Array]) -> tuple[PyTree, Any]:
        weights = {name: _bitcast(x, jnp.uint16, jnp.bfloat16) for name, x in weights.items()}
        if shared:
            weights = laid({name: _narrowed(x, dtype) for name, x in weights.items()})
        return block(_Kernels(weights, dtype), x)

    widens = bool(config.lora) and PRECISIONS[config.frozen] != dtype
    part = rematerialised(layer, config.remat, scanned=True, widens=widens)
    unroll = config.layers if config.layers <= UNROLLED else 1
    layers = {name: _bitcast(x, jnp.bfloat16, jnp.uint16) for name, x in params["layers"].items()}
    return jax.lax.scan(part, x, layers, unroll=unroll)


def _block(
    config: ModelConfig,
    own: _Kernels,
    x: jax.Array,
    seen: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    past: _Past | None,
) -> tuple[jax.Array, KeyValue]:
    """(output [B, T, width] of a layer, its keys and values)."""
    mixed, kept = _attention(config, own, rms_norm(x, own.weights["attention_norm"], config.eps), seen, turn, past)
    x = x + mixed
    y = rms_norm(x, own.weights["mlp_norm"], config.eps)
    return x + own("narrow", jax.nn.silu(own("gate", y)) * own("up", y)), kept


def _single_text(mask: jax.Array) -> Places:
    """Places of one text a row, with padding where `mask` [B, T] is False."""
    steps = mask.shape[1]
    seen = jnp.tril(jnp.ones((steps, steps), bool))[None] & mask[:, None, :]
    return Places(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, seen)


def _narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """A layer's kernel in the type that it is computed with, if that is the smaller one: fewer bytes to gather."""
    return x.astype(dtype) if x.ndim == 2 and jnp.dtype(dtype).itemsize < x.dtype.itemsize else x


def _bitcast(x: jax.Array, dtype: Any, to: Any) -> jax.Array:
    """`x` read as another type, `to`, if it is of type `dtype`.

    A layer's frozen kernels in bfloat16 are sliced out of the stack as integers: else XLA widens the whole stack before
    the loop over layers, as a copy in float32.
    """
    return jax.lax.bitcast_convert_type(x, to) if x.dtype == dtype else x


class _Past(NamedTuple):
    """Prompts before texts in a layer: M of them, each before B / M rows side by side."""

    kept: KeyValue
    mask: jax.Array  # bool [M, P]


class _Kernels(NamedTuple):
    """Kernels of one layer: (name, x [..., inputs]) -> [..., outputs], with bias and LoRA's factors if present."""

    weights: dict[str, jax.Array]
    dtype: Any

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        y = affine(x, self.weights[name])
        if f"{name}_bias" in self.weights:
            y = y + along_last(self.weights[f"{name}_bias"].astype(self.dtype), y)
        if f"{name}_down" in self.weights:
            lora_down, lora_up = self.weights[f"{name}_down"], self.weights[f"{name}_up"]
            y = y + affine(affine(x, lora_down), ALPHA / lora_down.shape[-1] * lora_up)
        return y


def turned(x: jax.Array, turn: tuple[jax.Array, ...], axis: int = -1) -> jax.Array:
    """Heads rotated to their positions, features along `axis`: pairs are (i, i + head_dim / 2), as in Hugging Face's
    weights."""
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=axis)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=axis).astype(x.dtype)


def _attention(
    config: ModelConfig,
    own: _Kernels,
    x: jax.Array,
    seen: jax.Array,
    turn: tuple[jax.Array, jax.Array],
    past: _Past | None,
) -> tuple[jax.Array, KeyValue]:
    """Attention of one layer from x [B, T, width] to `seen` [B, T, T] and to the prompts, and its keys and values."""
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
    if past is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(rows, steps, -1)
        return own("out", mixed), (key, value)
    (first_key, first_value), count = past.kept, len(past.mask)
    asks = query.reshape(count, -1, *query.shape[1:])  # [M, B / M, T, ...]: a prompt is read once for its rows
    before = jnp.einsum("mrtkgd,mskd->mrkgts", asks, first_key, preferred_element_type=jnp.float32)
    before = jnp.where(past.mask[:, None, None, None, None], before / math.sqrt(config.head_dim), NEVER)
    whole = jnp.concatenate([before.reshape(rows, *before.shape[2:]), scores], axis=-1)
    weights = jax.nn.softmax(whole, axis=-1).astype(value.dtype)
    first, rest = jnp.split(weights, (past.mask.shape[1],), axis=-1)
    first = first.reshape(count, -1, *first.shape[1:])
    mixed = jnp.einsum("mrkgts,mskd->mrtkgd", first, first_value).reshape(rows, steps, -1)
    mixed = mixed + jnp.einsum("bkgts,bskd->btkgd", rest, value).reshape(rows, steps, -1)
    return own("out", mixed), (key, value)
