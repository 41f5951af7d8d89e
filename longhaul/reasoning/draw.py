"""Draw of the next token from logits: temperature, top-k (Fan et al. 2018, arXiv 1805.04833), top-p (Holtzman et al.
2019, 1904.09751), min-p (Nguyen et al. 2024, 2407.01082), in this order, which is that of Hugging Face's generate.

Vocabularies lie along the first axis and rows along the last, as decode steps leave them. A token is found by two
uniform numbers: the first picks a block of the vocabulary by its mass, the second a token of the block. That is one
exponential a token, where the Gumbel trick takes random bits and two logarithms.

Where we differ: nothing is sorted. The least probability that is kept is found bit by bit, since floats of one sign
have the order of their bits; tokens of exactly that probability are all kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul.reasoning import tokenizer, transformer


class Rule(NamedTuple):
    """Distribution of the next token, given its logits."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # most tokens, the likeliest; 0: all
    top_p: float = 1.0  # the fewest likeliest tokens that have this probability together
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest one's

    @property
    def truncated(self) -> bool:
        """True where some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class Token(NamedTuple):
    """Tokens of B rows."""

    token: jax.Array  # int32 [B]
    log_prob: jax.Array  # float32 [B], before truncation
    behaviour: jax.Array  # float32 [B]: log-probability with which it was drawn


def scored(logits: jax.Array, temperature: float, pad: int = tokenizer.PAD) -> jax.Array:
    """Log-probabilities [..., V] of the next token. Padding is never sampled: it is not read as a token."""
    return jax.nn.log_softmax(_tempered(logits, temperature, -1, pad), axis=-1)


def _tempered(logits: jax.Array, temperature: float, axis: int, pad: int) -> jax.Array:
    logits = logits / temperature
    if pad == tokenizer.NONE:
        return logits
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, axis % logits.ndim)
    return jnp.where(places == pad, transformer.NEVER, logits)


def chosen(logits: jax.Array, uniforms: jax.Array, rule: Rule, pad: int = tokenizer.PAD) -> Token:
    """Tokens drawn from logits [V, B] by `uniforms` [B, 2] in [0, 1); both log-probabilities are 0 at temperature 0."""
    if rule.temperature == 0.0:
        token, zero = jnp.argmax(_tempered(logits, 1.0, 0, pad), axis=0), jnp.zeros(logits.shape[1])
        return Token(token.astype(jnp.int32), zero, zero)
    scores = _tempered(logits, rule.temperature, 0, pad)
    scores = scores - jnp.max(scores, axis=0, keepdims=True)
    mass = jnp.exp(scores)
    whole = jnp.sum(mass, axis=0)
    kept = truncated(mass, rule) if rule.truncated else mass
    token = drawn(kept, uniforms)
    score = jnp.take_along_axis(scores, token[None], axis=0)[0]
    log_prob = score - jnp.log(whole)
    return Token(token, log_prob, score - jnp.log(jnp.sum(kept, axis=0)) if rule.truncated else log_prob)


def drawn(mass: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Tokens int32 [B] with probabilities in proportion to `mass` [V, B]; one of mass 0 never."""
    size = 1 << math.ceil(math.log2(mass.shape[0]) / 2)
    blocks = jnp.pad(mass, ((0, -mass.shape[0] % size), (0, 0))).reshape(-1, size, mass.shape[1])
    block = _first_exceeding(jnp.sum(blocks, axis=1), uniforms[:, 0])
    within = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    return block * size + _first_exceeding(within, uniforms[:, 1])


def _first_exceeding(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """First places int32 [B] at which the sums of `mass` [N, B] exceed the share `uniform` [B] of all."""
    below = jnp.tril(jnp.ones((len(mass), len(mass)), mass.dtype))
    sums = jnp.where(mass > 0.0, jnp.matmul(below, mass, precision=jax.lax.Precision.HIGHEST), 0.0)
    return jnp.argmax(sums > uniform[None] * jnp.max(sums, axis=0, keepdims=True), axis=0).astype(jnp.int32)


def truncated(mass: jax.Array, rule: Rule) -> jax.Array:
    """Masses [V, B] of the tokens that `rule` keeps, 0 for the others; the largest of a row is 1."""
    if rule.top_k > 0:
        mass = _from(mass, _threshold(mass, lambda kept: jnp.sum(kept, axis=0, dtype=jnp.int32) >= rule.top_k))
    if rule.top_p < 1.0:
        most = rule.top_p * jnp.sum(mass, axis=0)
        mass = _from(mass, _threshold(mass, lambda kept: jnp.sum(jnp.where(kept, mass, 0.0), axis=0) >= most))
    return _from(mass, jnp.full(mass.shape[1], rule.min_p, mass.dtype)) if rule.min_p > 0.0 else mass


def _from(mass: jax.Array, least: jax.Array) -> jax.Array:
    return jnp.where(mass >= least[None], mass, 0.0)


def _threshold(mass: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Largest numbers float32 [B] such that the masses [V, B] of at least that much are `enough`; masses are in [0, 1].

    `enough`: flags [V, B] -> bool [B].
    """

    def number(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def bit(place: jax.Array, least: jax.Array) -> jax.Array:
        more = least | (jnp.int32(1) << (HIGHEST - place))
        return jnp.where(enough(mass >= number(more)[None]), more, least)

    return number(jax.lax.fori_loop(0, HIGHEST + 1, bit, jnp.zeros(mass.shape[1], jnp.int32)))


HIGHEST = 29
"""Highest bit of a float32 in [0, 1]."""
