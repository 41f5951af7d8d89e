"""Encoders by attention over the tokens of an observation: latent queries, Wayformer and MTR.

Every leaf of rank 2 [items, features] is a set: an item is a token, and its last feature marks it as present (above 0)
or padding, to which nothing attends. Every other leaf is a vector and one token. Each leaf has a projection of its own
to the common width, and an embedding that tells its tokens from those of other leaves (early fusion).

- `latent`: a few latents attend to all tokens, then to each other; their mean is the result (Perceiver, Jaegle et al.
  2021, arXiv 2103.03206). Each token is read once: the cheapest.
- `wayformer`: twice as many latents, pooled by the attention of one query (Wayformer, Nayakanti et al. 2022, arXiv
  2207.05844, its early fusion with latent queries). There is no axis of time: our observation is of one moment.
- `mtr`: tokens stay tokens; each attends to the NEIGHBOURS tokens nearest to it, and one query pools them (MTR, Shi et
  al. 2022, arXiv 2209.13508, its context encoder). A token's position is its first two features, x and y in the agent's
  frame in one scale for all sets; vectors lie at the origin. Relative positions enter by rotating queries and keys (Su
  et al. 2021, arXiv 2104.09864) instead of by sinusoids added to keys: the logits then depend on differences alone, and
  there is no array [tokens, tokens, features].

Where we differ from all three: latents and queries begin small, and the tokens of the vectors (the agent itself, its
route) are added to them, so that they reach the heads without any attention. Without both, an untrained encoder gave
nearly the same features for all observations (measured: deviation 0.03 at size 1).

Blocks are pre-norm with GELU and a feed-forward layer four times as wide; residual branches begin scaled down by
sqrt(2 x blocks). The blocks' parameters are stacked and scanned, so that compiling costs the same at any depth.
Normalisation and softmax are always in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.networks.config import ENCODERS
from longhaul.networks.layers import Encoder, affine, along_last, init_norm, layer_norm, rematerialised
from longhaul.types import Key, Params, PyTree

HEAD = 32
"""Features of an attention head."""

NEIGHBOURS = 16
"""Tokens that a token of `mtr` attends to, itself among them."""

WIDEN = 4
"""Width of a feed-forward layer as a multiple of the encoder's."""

FAINT = 0.02
"""Initial deviation of latents and queries."""

ABSENT = -1e30
"""Logit of a token that is absent; finite, so that no row becomes NaN."""

FREQUENCIES = np.geomspace(1.0, 64.0, HEAD // 4).astype(np.float32)
"""Rotation of a head's pairs in radians per unit of position: a quarter of a head for x, a quarter for y."""


class Tokens(NamedTuple):
    """S tokens of an observation."""

    value: jax.Array  # [..., S, width]
    present: jax.Array  # bool [..., S]
    position: jax.Array  # float32 [..., S, 2]


def heads_of(width: int) -> int:
    """Number of heads of HEAD features each that fit a width; at least one."""
    return max(1, round(width / HEAD))


def latents_of(kind: str, depth: int) -> int:
    """Number of learned latents of an encoder with `depth` blocks."""
    return {"latent": 4, "wayformer": 8, "mtr": 0}[kind] * depth


def encoder(observation: PyTree, kind: str, width: int, depth: int, *, dtype: Any, remat: str = "none") -> Encoder:
    """Encoder for observations like `observation` (a pytree of ShapeDtypeStruct); its features are float32.

    `width` features of a token, `depth` blocks of self-attention. Computing is in `dtype`, parameters are float32.
    `remat`, one of config.REMATS: parts of tokens and blocks that are computed again for the gradient. Raises
    ValueError for an unknown `kind`.
    """
    if kind not in ENCODERS:
        raise ValueError(f"encoder is {kind!r}; it must be one of {', '.join(ENCODERS)}")
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(observation)]
    latents, inner = latents_of(kind, depth), heads_of(width) * HEAD
    branch = 1.0 / math.sqrt(2 * depth)

    def init(key: Key) -> Params:
        keys = iter(jax.random.split(key, len(shapes) + 4))
        params: dict[str, Any] = {
            f"embed_{i}": _init_embedding(next(keys), shape[-1] if len(shape) == 2 else math.prod(shape), width)
            for i, shape in enumerate(shapes)
        }
        if latents:
            params["latents"] = _scaled(next(keys), (latents, width), FAINT, fan=1)
            params["reduce"] = _init_block(next(keys), width, inner, 1.0, cross=True)
        each = jax.random.split(next(keys), depth)
        params["blocks"] = jax.vmap(lambda k: _init_block(k, width, inner, branch, cross=False))(each)
        if kind != "latent":
            first, second = jax.random.split(next(keys))
            params["query"] = _scaled(first, (1, width), FAINT, fan=1)
            params["pool"] = _init_block(second, width, inner, 1.0, cross=True)
        params["norm"] = init_norm(width)
        return params

    def apply(params: Params, observed: PyTree) -> jax.Array:
        seen, block = _tokens(params, jax.tree.leaves(observed), shapes, dtype, remat), rematerialised(_block, remat)
        ends = np.cumsum([shape[0] if len(shape) == 2 else 1 for shape in shapes])[:-1].tolist()
        leaves = zip(jnp.split(seen.value, ends, axis=-2), shapes, strict=True)
        vectors = [part for part, shape in leaves if len(shape) != 2]
        value, near, turn = seen.value, None, None

        def queries(name: str, count: int) -> jax.Array:
            """Learned queries, to each of which the vectors are added."""
            learned = jnp.broadcast_to(params[name].astype(dtype), (*seen.value.shape[:-2], count, width))
            return sum((jnp.broadcast_to(vector, learned.shape) for vector in vectors), start=learned)

        if latents:
            value = block(params["reduce"], queries("latents", latents), value, seen.present[..., None, None, :])
        else:
            near, turn = _neighbour_mask(seen)[..., None, :, :], _rope_cos_sin(seen.position)

        def body(carried: jax.Array, own: Params) -> tuple[jax.Array, None]:
            return _block(own, carried, None, near, turn), None

        value = jax.lax.scan(rematerialised(body, remat, scanned=True), value, params["blocks"])[0]
        if kind == "latent":
            pooled = jnp.mean(value.astype(jnp.float32), axis=-2)
        else:
            mask = None if latents else seen.present[..., None, None, :]
            pooled = block(params["pool"], queries("query", 1), value, mask)[..., 0, :]
        return layer_norm(params["norm"], pooled).astype(jnp.float32)

    return Encoder(init, apply)


def _tokens(params: Params, leaves: list[jax.Array], shapes: list[tuple[int, ...]], dtype: Any, remat: str) -> Tokens:
    """The tokens of all leaves, one leaf after the other."""
    values, presents, positions, embed = [], [], [], rematerialised(_embed, remat)
    for i, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
        lead = leaf.shape[: leaf.ndim - len(shape)]
        if len(shape) == 2:
            x = leaf.astype(jnp.float32)
            present = x[..., -1] > 0.0
            position = x[..., :2] if shape[1] > 2 else jnp.zeros((*x.shape[:-1], 2), jnp.float32)
            # Padding gives no token and no gradient, whatever numbers it holds.
            x, position = (jnp.where(present[..., None], part, 0.0) for part in (x, position))
        else:
            x = leaf.astype(jnp.float32).reshape(*lead, 1, math.prod(shape))
            present, position = jnp.ones((*lead, 1), bool), jnp.zeros((*lead, 1, 2), jnp.float32)
        values.append(embed(params[f"embed_{i}"], x.astype(dtype)))
        presents.append(present)
        positions.append(position)
    where = jax.lax.stop_gradient(jnp.concatenate(positions, -2))
    return Tokens(jnp.concatenate(values, -2), jnp.concatenate(presents, -1), where)


def _embed(own: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Tokens [..., S, width] of one leaf's items [..., S, features]."""
    x = jax.nn.gelu(affine(x, own["kernel"], own["bias"]))
    return x + along_last(own["kind"].astype(x.dtype), x)


def _neighbour_mask(seen: Tokens) -> jax.Array:
    """Mask bool [..., S, S]: token j is present and among the NEIGHBOURS nearest of token i, or as near as the last."""
    x, y = seen.position[..., 0], seen.position[..., 1]
    square = jnp.square(x[..., :, None] - x[..., None, :]) + jnp.square(y[..., :, None] - y[..., None, :])
    present = jnp.broadcast_to(seen.present[..., None, :], square.shape)
    if square.shape[-1] <= NEIGHBOURS:
        return present
    square = jnp.where(present, square, jnp.inf)
    last = -jax.lax.top_k(-square, NEIGHBOURS)[0][..., -1:]
    # A compiler may round the distance differently here than above: the last neighbour must stay within its own bound.
    return present & (square <= last * (1.0 + 1e-6))


def _rope_cos_sin(position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [..., S, 1, HEAD / 2], of the rotation of a head's pairs."""
    angles = position[..., None] * jnp.broadcast_to(FREQUENCIES, (*position.shape, len(FREQUENCIES)))
    angles = angles.reshape(*position.shape[:-1], 1, HEAD // 2)
    return jnp.cos(angles), jnp.sin(angles)


def _rotated(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Heads [..., S, H, HEAD] with each pair (i, i + HEAD / 2) rotated by its token's angle."""
    cos, sin = (part.astype(x.dtype) for part in turn)
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _block(
    params: Params, x: jax.Array, context: jax.Array | None, mask: jax.Array | None,
    turn: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """x [..., Q, width] after attention to `context` [..., S, width] (None: to itself) and a feed-forward layer.

    `mask`, bool, broadcasts to [..., heads, Q, S].
    """
    queries = layer_norm(params["norm_query"], x)
    keys = queries if context is None else layer_norm(params["norm_key"], context)
    x = x + _attend(params, queries, keys, mask, turn)
    hidden = jax.nn.gelu(affine(layer_norm(params["norm_wide"], x), params["wide"], params["wide_bias"]))
    return x + affine(hidden, params["narrow"], params["narrow_bias"])


def _attend(
    params: Params, queries: jax.Array, keys: jax.Array, mask: jax.Array | None,
    turn: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:  # fmt: skip
    """Multi-head attention; zero for a query without any present key."""
    q, k, v = (
        affine(source, params[name]).reshape(*source.shape[:-1], -1, HEAD)
        for source, name in ((queries, "query"), (keys, "key"), (keys, "value"))
    )
    if turn is not None:
        q, k = _rotated(q, turn), _rotated(k, turn)
    logits = jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(HEAD)
    if mask is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        present = jnp.broadcast_to(mask, logits.shape)
        weights = jnp.where(present, jax.nn.softmax(jnp.where(present, logits, ABSENT), axis=-1), 0.0)
    out = jnp.einsum("...hqk,...khd->...qhd", weights.astype(v.dtype), v)
    return affine(out.reshape(*out.shape[:-2], -1), params["out"])


def _scaled(key: Key, shape: tuple[int, int], scale: float, *, fan: int | None = None) -> jax.Array:
    """Uniform numbers of mean 0 and variance scale^2 / fan; `fan` is the first axis where it is None."""
    most = scale * math.sqrt(3.0 / (fan or shape[0]))
    return most * (2.0 * prng.uniform(key, shape) - 1.0)


def _init_embedding(key: Key, features: int, width: int) -> Params:
    first, second = jax.random.split(key)
    return {
        "kernel": _scaled(first, (features, width), math.sqrt(2.0)),
        "bias": jnp.zeros(width, jnp.float32),
        "kind": _scaled(second, (1, width), 0.5)[0],
    }


def _init_block(key: Key, width: int, inner: int, branch: float, *, cross: bool) -> Params:
    """A block of attention (`cross`: to other tokens) and feed-forward; its branches begin scaled by `branch`."""
    keys = jax.random.split(key, 6)
    hidden = WIDEN * width
    return {
        **({"norm_key": init_norm(width)} if cross else {}),
        "norm_query": init_norm(width),
        "norm_wide": init_norm(width),
        "query": _scaled(keys[0], (width, inner), 1.0),
        "key": _scaled(keys[1], (width, inner), 1.0),
        "value": _scaled(keys[2], (width, inner), 1.0),
        "out": _scaled(keys[3], (inner, width), branch),
        "wide": _scaled(keys[4], (width, hidden), math.sqrt(2.0)),
        "wide_bias": jnp.zeros(hidden, jnp.float32),
        "narrow": _scaled(keys[5], (hidden, width), branch),
        "narrow_bias": jnp.zeros(width, jnp.float32),
    }
