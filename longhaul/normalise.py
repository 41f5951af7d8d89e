"""Running mean and variance of observations, merged batch by batch (Chan, Golub and LeVeque 1983)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.types import PyTree

CLIP = 10.0
"""Bound of normalised values: one outlier must not dominate a network."""


class Moments(NamedTuple):
    """Statistics of all observations so far."""

    samples: jax.Array  # float32 scalar: their number
    mean: PyTree  # float32, in the shapes of one agent's observation
    variance: PyTree  # the same


def start(observation: PyTree) -> Moments:
    """Moments of no sample, for observations like `observation` (shapes of one agent)."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), observation)
    return Moments(jnp.float32(0.0), zeros, jax.tree.map(jnp.ones_like, zeros))


def update(
    moments: Moments, batch: PyTree, valid: jax.Array | None, mean: Callable[[PyTree], PyTree],
    isolated: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Moments:  # fmt: skip
    """Moments with a batch [T, B, ...] merged in; `valid` bool [T, B] leaves steps out, `mean` averages over shards.

    The sums of a shard are computed in isolation.
    """
    share, shifted, squares = mean(isolated(_sums)(moments, batch, valid))
    size = jax.tree.leaves(batch)[0].shape
    count = share * (size[0] * size[1])
    total = moments.samples + count
    weight = jnp.where(total > 0.0, count / jnp.maximum(total, 1e-6), 0.0)
    safe = jnp.maximum(share, 1e-8)

    def merge_mean(old: jax.Array, shift: jax.Array) -> jax.Array:
        return old + weight * shift / safe

    def merge_variance(old: jax.Array, shift: jax.Array, square: jax.Array) -> jax.Array:
        return (1.0 - weight) * old + weight * square / safe - (weight * shift / safe) ** 2

    new_mean = jax.tree.map(merge_mean, moments.mean, shifted)
    new_variance = jax.tree.map(merge_variance, moments.variance, shifted, squares)
    # No float32 count beyond 1e7 samples: the statistics then follow slow drifts instead of freezing.
    return Moments(jnp.minimum(total, 1e7), new_mean, new_variance)


def _sums(moments: Moments, batch: PyTree, valid: jax.Array | None) -> tuple[jax.Array, PyTree, PyTree]:
    """Share of a shard's steps that count, and their first and second moments about the running mean."""
    ones = jnp.ones(jax.tree.leaves(batch)[0].shape[:2], jnp.float32) if valid is None else valid.astype(jnp.float32)

    def average(leaf: jax.Array) -> jax.Array:
        weight = ones.reshape(*ones.shape, *([1] * (leaf.ndim - 2)))
        return jnp.sum(leaf * weight, axis=(0, 1)) / ones.size

    def spread(leaf: jax.Array, centre: jax.Array) -> jax.Array:
        return average((leaf - centre[None, None]) ** 2)

    share = jnp.sum(ones) / ones.size
    # Sums about the running mean rather than about zero: no cancellation for observations far from the origin.
    shifted = jax.tree.map(lambda leaf, centre: average(leaf - centre[None, None]), batch, moments.mean)
    squares = jax.tree.map(spread, batch, moments.mean)
    return share, shifted, squares


def apply(moments: Moments, observation: PyTree) -> PyTree:
    """Observation less the mean, divided by the deviation, clipped; leading axes are free."""

    def one(leaf: jax.Array, centre: jax.Array, variance: jax.Array) -> jax.Array:
        lead = leaf.ndim - centre.ndim
        centre = centre.reshape(*([1] * lead), *centre.shape)
        scale = jax.lax.rsqrt(variance + 1e-8).reshape(*([1] * lead), *variance.shape)
        return jnp.clip((leaf - centre) * scale, -CLIP, CLIP)

    return jax.tree.map(one, observation, moments.mean, moments.variance)
