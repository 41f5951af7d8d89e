"""Distributions of policies over actions: masked categorical, multi-categorical, tanh-Gaussian.

A distribution works on a *raw* action, to which log-probabilities belong; `action(raw)` is the environment's action.
For choices they are the same. For a bounded vector the raw action is the Gaussian's sample before tanh: keeping it
avoids the inverse of tanh, which loses all precision where tanh saturates.

Leading axes are free: parameters [..., size], masks bool [..., n] (or None), raw actions int32 [...], int32 [..., k]
or float32 [..., d]. At least one action of a mask must be legal.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.spaces import Action, Box, Discrete, MultiDiscrete
from longhaul.types import Key

FEW = 8
"""Largest number of choices computed one by one. A sum along so short an axis would be a kernel of its own on a GPU and
a loop of its own on a CPU."""

WITHIN = 0.999
"""Share of a vector's range within which a foreign action is clipped, so that its raw action is finite."""


class Distribution(NamedTuple):
    size: int  # parameters from the network
    free: int  # parameters independent of the observation (a Gaussian's log standard deviations), appended to them
    sample: Callable[[jax.Array, jax.Array | None, Key], jax.Array]  # (parameters, mask, key) -> raw
    mode: Callable[[jax.Array, jax.Array | None], jax.Array]  # (parameters, mask) -> raw
    log_prob: Callable[[jax.Array, jax.Array | None, jax.Array], jax.Array]  # (parameters, mask, raw) -> float32 [...]
    entropy: Callable[[jax.Array, jax.Array | None], jax.Array]  # (parameters, mask) -> float32 [...], nats
    action: Callable[[jax.Array], jax.Array]  # raw -> the environment's action
    raw: Callable[[jax.Array], jax.Array]  # the inverse, for foreign actions: vectors are clipped by `WITHIN`
    from_noise: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    #     of vectors: (parameters, standard normal noise) -> raw, differentiable (the reparameterised `sample`)


def distribution(action: Action) -> Distribution:
    """Distribution for a space of actions."""
    match action:
        case Discrete(n):
            return _multi_categorical((n,), scalar=True)
        case MultiDiscrete(sizes):
            return _multi_categorical(sizes, scalar=False)
        case Box(low, high):
            return _tanh_gaussian(np.asarray(low, np.float32), np.asarray(high, np.float32))


def k3(log_ratio: jax.Array) -> jax.Array:
    """Estimate of the KL divergence, unbiased and never negative (Schulman 2020): exp(x) - 1 - x, of each x.

    `log_ratio`, any shape, is log q - log p at samples of p: the mean estimates KL(p || q).
    """
    return jnp.expm1(log_ratio) - log_ratio


def legal_only(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Values of choices [..., n], the least float where `mask`, bool of this shape, is False; None: all are legal."""
    return values if mask is None else jnp.where(mask, values, jnp.finfo(jnp.float32).min)


def at_choice(values: jax.Array, choice: jax.Array) -> jax.Array:
    """The choice's own of the values [..., n], as a masked sum, whose gradient is no scatter; choice int [...]."""
    return jnp.sum(jnp.where(jax.nn.one_hot(choice, values.shape[-1], dtype=bool), values, 0.0), axis=-1)


def _choose(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Choice whose cumulated probability first passes `uniform`: one random number, never an impossible choice."""
    n = logits.shape[-1]
    if n <= FEW:
        each = [logits[..., i] for i in range(n)]
        most = functools.reduce(jnp.maximum, each)
        *before, total = itertools.accumulate(jnp.exp(logit - most) for logit in each)
        nothing = jnp.zeros_like(total, jnp.int32)
        return sum(((part <= uniform * total).astype(jnp.int32) for part in before), nothing)
    weight = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    cumulated = jnp.matmul(weight, jnp.triu(jnp.ones((n, n), jnp.float32)), precision=jax.lax.Precision.HIGHEST)
    passed = cumulated[..., :-1] <= uniform[..., None] * cumulated[..., -1:]
    return jnp.sum(passed, axis=-1, dtype=jnp.int32)


def _log_softmax(logits: jax.Array) -> list[jax.Array]:
    """Log-probabilities of a few choices, one array each."""
    each = [logits[..., i] for i in range(logits.shape[-1])]
    most = jax.lax.stop_gradient(functools.reduce(jnp.maximum, each))
    each = [logit - most for logit in each]
    total = jnp.log(functools.reduce(jnp.add, (jnp.exp(logit) for logit in each)))
    return [logit - total for logit in each]


def _log_of(logits: jax.Array, choice: jax.Array) -> jax.Array:
    """Log-probability of a choice."""
    if logits.shape[-1] <= FEW:
        each = enumerate(_log_softmax(logits))
        return sum((jnp.where(choice == i, log_p, 0.0) for i, log_p in each), jnp.float32(0.0))
    return at_choice(jax.nn.log_softmax(logits), choice)


def _entropy_of(logits: jax.Array) -> jax.Array:
    def term(log_p: jax.Array) -> jax.Array:
        p = jnp.exp(log_p)
        return jnp.where(p > 0.0, p * log_p, 0.0)

    if logits.shape[-1] <= FEW:
        return -functools.reduce(jnp.add, map(term, _log_softmax(logits)))
    return -jnp.sum(term(jax.nn.log_softmax(logits)), axis=-1)


def _multi_categorical(sizes: tuple[int, ...], scalar: bool) -> Distribution:
    """Distribution of independent choices; `scalar`: one choice, whose action has no axis of its own."""
    edges = (0, *itertools.accumulate(sizes))

    def parts(parameters: jax.Array, mask: jax.Array | None) -> list[jax.Array]:
        logits = legal_only(parameters, mask)
        return [logits[..., a:b] for a, b in itertools.pairwise(edges)]

    def join(choices: list[jax.Array]) -> jax.Array:
        return choices[0] if scalar else jnp.stack(choices, axis=-1)

    def sample(parameters: jax.Array, mask: jax.Array | None, key: Key) -> jax.Array:
        uniform = prng.uniform(key, (len(sizes), *parameters.shape[:-1]))
        return join([_choose(logits, uniform[i]) for i, logits in enumerate(parts(parameters, mask))])

    def mode(parameters: jax.Array, mask: jax.Array | None) -> jax.Array:
        return join([jnp.argmax(logits, axis=-1).astype(jnp.int32) for logits in parts(parameters, mask)])

    def log_prob(parameters: jax.Array, mask: jax.Array | None, raw: jax.Array) -> jax.Array:
        choices = [raw] if scalar else [raw[..., i] for i in range(len(sizes))]
        each = zip(parts(parameters, mask), choices, strict=True)
        return sum((_log_of(logits, choice) for logits, choice in each), jnp.float32(0.0))

    def entropy(parameters: jax.Array, mask: jax.Array | None) -> jax.Array:
        return sum(map(_entropy_of, parts(parameters, mask)), jnp.float32(0.0))

    return Distribution(edges[-1], 0, sample, mode, log_prob, entropy, lambda raw: raw, lambda action: action)


def _along(constant: np.ndarray, values: jax.Array) -> jax.Array:
    """Vector [d] broadcast over the leading axes of values [..., d]."""
    return jnp.broadcast_to(constant, values.shape)


def _tanh_gaussian(low: np.ndarray, high: np.ndarray) -> Distribution:
    """Diagonal Gaussian squashed into low .. high (Haarnoja et al. 2018, appendix C).

    Entropy has no closed form: E[log(1 - tanh(x)^2)] is computed by Gauss-Hermite quadrature, without sampling noise.
    """
    d = low.size
    centre, half = (high + low) / 2, (high - low) / 2
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)
    weights = weights / weights.sum()

    def split(parameters: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = parameters[..., :d], parameters[..., d:]
        return mean, jnp.clip(log_std, -10.0, 2.0)

    def log_slope(raw: jax.Array) -> jax.Array:
        """log d action / d raw = log half + log(1 - tanh(raw)^2), stable for any raw."""
        return _along(np.log(half), raw) + 2.0 * (math.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))

    def sample(parameters: jax.Array, mask: jax.Array | None, key: Key) -> jax.Array:
        return from_noise(parameters, prng.normal(key, (*parameters.shape[:-1], d)))

    def from_noise(parameters: jax.Array, noise: jax.Array) -> jax.Array:
        mean, log_std = split(parameters)
        return mean + jnp.exp(log_std) * noise

    def log_prob(parameters: jax.Array, mask: jax.Array | None, raw: jax.Array) -> jax.Array:
        mean, log_std = split(parameters)
        z = (raw - mean) * jnp.exp(-log_std)
        gaussian = -0.5 * z * z - log_std - 0.5 * math.log(2.0 * math.pi)
        return jnp.sum(gaussian - log_slope(raw), axis=-1)

    def entropy(parameters: jax.Array, mask: jax.Array | None) -> jax.Array:
        mean, log_std = split(parameters)
        gaussian = log_std + 0.5 * math.log(2.0 * math.pi * math.e)
        std = jnp.exp(log_std)
        terms = (w * log_slope(mean + x * std) for x, w in zip(nodes.tolist(), weights.tolist(), strict=True))
        slope = sum(terms, jnp.float32(0.0))
        return jnp.sum(gaussian + slope, axis=-1)

    return Distribution(
        size=d,
        free=d,
        sample=sample,
        mode=lambda parameters, mask: split(parameters)[0],
        log_prob=log_prob,
        entropy=entropy,
        action=lambda raw: _along(centre, raw) + _along(half, raw) * jnp.tanh(raw),
        raw=lambda action: jnp.arctanh(
            jnp.clip((action - _along(centre, action)) / _along(half, action), -WITHIN, WITHIN)
        ),
        from_noise=from_noise,
    )
