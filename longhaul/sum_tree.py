"""Sum tree: random choice among many by weights that change.

The nodes of this tree (Schaul et al. 2016, arXiv 1511.05952) are wide: a binary tree over ten million weights takes 24
dependent look-ups. Where we differ further: each level is a random choice of its own, instead of one number reduced
from level to level, whose float32 could not tell ten million weights apart; and sums are computed again from their
segment, not corrected by differences, whose errors would add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from longhaul import prng
from longhaul.types import Key

FANOUT = 64
"""Weights of a segment."""


class Tree(NamedTuple):
    """Weights, at least 0, and levels of sums of `FANOUT` each, up to a level of at most `FANOUT` numbers."""

    leaves: jax.Array  # float32 [n, rounded up to whole segments]
    sums: tuple[jax.Array, ...]  # float32, whole segments each, except the last


def start(n: int) -> Tree:
    """Tree of n weights 0."""
    widths = [-(-n // FANOUT) * FANOUT]
    while widths[-1] > FANOUT:
        widths.append(-(-(widths[-1] // FANOUT) // FANOUT) * FANOUT)
    leaves, *sums = (jnp.zeros(width, jnp.float32) for width in widths)
    return Tree(leaves, tuple(sums))


Rows = tuple[jax.Array, jax.Array]
"""(the first of k places, weights [k])"""


def change(
    tree: Tree, rows: Sequence[Rows] = (), index: jax.Array | None = None, weights: jax.Array | float = 0.0
) -> Tree:
    """Tree with new weights in `rows`, one after the other, and then `weights` in the places `index` [k].

    Of equal places in `index` any one's weight wins. A level is written completely before any of it is read: otherwise
    the compiler would copy the level.
    """
    below = tree.leaves
    for at, new in rows:
        below = jax.lax.dynamic_update_slice(below, new, (at,))
    if index is not None:
        below = below.at[index].set(weights)
    levels, places = [below], [(at, len(new)) for at, new in rows]
    for above in tree.sums:
        segments = len(below) // FANOUT
        # The segments that k places can touch; the others that are summed again do not change.
        counts = [min(count // FANOUT + 2, segments) for _, count in places]
        places = [(jnp.minimum(at // FANOUT, segments - n), n) for (at, _), n in zip(places, counts, strict=True)]
        sums = [
            jnp.sum(jax.lax.dynamic_slice(below, (at * FANOUT,), (n * FANOUT,)).reshape(n, FANOUT), axis=1)
            for at, n in places
        ]
        if index is not None:
            index = index // FANOUT
            above = above.at[index].set(jnp.sum(_segments(below, index), axis=1))
        for (at, _), new in zip(places, sums, strict=True):
            above = jax.lax.dynamic_update_slice(above, new, (at,))
        levels.append(above)
        below = above
    return Tree(levels[0], tuple(levels[1:]))


def draw(tree: Tree, key: Key, n: int) -> tuple[jax.Array, jax.Array]:
    """Places int32 [n], each with a chance in proportion to its weight, and their weights float32 [n].

    The first level is stratified. Where all weights are 0, places mean nothing.
    """
    uniform = prng.uniform(key, (1 + len(tree.sums), n))
    spread = (jnp.arange(n) + uniform[0]) / n
    index = jnp.zeros(n, jnp.int32)
    for level, number in zip((*reversed(tree.sums), tree.leaves), (spread, *uniform[1:]), strict=True):
        weights = _segments(level, index)
        index = index * FANOUT + _choose(weights, number)
    return index, tree.leaves[index]


def _segments(level: jax.Array, index: jax.Array) -> jax.Array:
    """Segments float32 [k, FANOUT] of these numbers."""
    return level.reshape(-1, FANOUT)[index]


def _choose(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Place int32 [k] where the running sum of weights [k, FANOUT] first passes the share `uniform` [k] of all."""
    triangle = jnp.triu(jnp.ones((FANOUT, FANOUT), jnp.float32))
    cumulated = jnp.matmul(weights, triangle, precision=jax.lax.Precision.HIGHEST)
    # Bounded below the total: a stratified number may round up to 1, and the last weight may be 0.
    wanted = jnp.minimum(uniform * cumulated[:, -1], cumulated[:, -1] * (1.0 - 2.0**-23))
    return jnp.sum(cumulated[:, :-1] <= wanted[:, None], axis=1, dtype=jnp.int32)
