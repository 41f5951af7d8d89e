"""Plane geometry of driving, in JAX: oriented boxes, the road's distance field, routes.

Everything works on scalars or arrays that broadcast; batches come from `jax.vmap`. A frame is a point with a heading:
x forward, y to the left. Boxes are compared by the separating axes of both (Gottschalk, Lin and Manocha, "OBBTree",
1996) in the frame of one of them, where half of the work is an absolute value; so no cheaper test stands before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.driving.scenario.distance_field import BITS, TILE, UNIT
from longhaul.driving.scenario.scenario import CELL, ROUTE_SPACING

OPEN = 10.0
"""Metres to the road's edge where a scenario has no edges: the clearance is -OPEN everywhere."""

FREE = 1e3
"""Metres to what is ahead, where nothing is."""


class Field(NamedTuple):
    """Signed distance to the road's edge of one scenario, a part of `distance_field.Tiles`; negative on the road."""

    cells: jax.Array  # int8, of all scenarios
    tiles: jax.Array  # int32, of all scenarios
    start: jax.Array  # int32 scalar, the first of this scenario's tiles
    shape: jax.Array  # int32 [2]: rows (y), columns (x) of samples; less than 2 where there are no edges
    origin: jax.Array  # float32 [2]: x, y of the first sample


class Relative(NamedTuple):
    """Boxes in the frame of another box, arrays that broadcast."""

    x: jax.Array  # of the centre, m
    y: jax.Array
    cos: jax.Array  # of the difference of headings
    sin: jax.Array
    own: tuple[jax.Array, jax.Array]  # half length and half width of the box whose frame it is
    half: tuple[jax.Array, jax.Array]  # and of these
    vx: Any = 0.0  # relative velocity, m/s; not needed for where boxes are
    vy: Any = 0.0


class Projection(NamedTuple):
    """Position of a pose along a route."""

    s: jax.Array  # arc length, m
    lateral: jax.Array  # offset to the left, m
    heading: jax.Array  # of the route there, rad


def wrap(angle: jax.Array) -> jax.Array:
    """Angle within [-pi, pi) that points the same way, rad."""
    return angle - np.float32(2 * np.pi) * jnp.floor(angle * np.float32(0.5 / np.pi) + 0.5)  # `mod` is a call on a CPU


def into(x: jax.Array, y: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(forward, left) of the vector (x, y) in the frame whose heading has this cosine and sine."""
    return x * cos + y * sin, y * cos - x * sin


def out_of(x: jax.Array, y: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(x, y) of the vector (forward, left) of a frame: `into` reversed."""
    return x * cos - y * sin, x * sin + y * cos


def corners(half_length: jax.Array, half_width: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x and y [4] of a box's corners in its own frame: front left, front right, rear right, rear left."""
    forward = np.array([1.0, 1.0, -1.0, -1.0], np.float32)
    left = np.array([1.0, -1.0, -1.0, 1.0], np.float32)
    return half_length * forward, half_width * left


def separation(boxes: Relative) -> jax.Array:
    """Largest gap along the four axes of two boxes, m: negative where they overlap, never above their distance."""
    (length, width), (other_length, other_width) = boxes.own, boxes.half
    c, s = jnp.abs(boxes.cos), jnp.abs(boxes.sin)
    along = jnp.abs(boxes.x) - length - other_length * c - other_width * s
    beside = jnp.abs(boxes.y) - width - other_length * s - other_width * c
    u, v = into(boxes.x, boxes.y, boxes.cos, boxes.sin)
    their_along = jnp.abs(u) - other_length - length * c - width * s
    their_beside = jnp.abs(v) - other_width - length * s - width * c
    return jnp.maximum(jnp.maximum(along, beside), jnp.maximum(their_along, their_beside))


def clearance(field: Field, x: jax.Array, y: jax.Array) -> jax.Array:
    """Signed distance to the road's edge, m, at points x and y of any shape, bilinear between samples.

    Within the sampled rectangle it is at most `distance_field.REACH`. Outside it is the value at the rectangle's border
    plus the distance from there, so that an agent that leaves the neighbourhood of all routes comes to be off the road.
    """
    rows, columns = jnp.maximum(field.shape[0], 2), jnp.maximum(field.shape[1], 2)
    column = (x - field.origin[0]) * np.float32(1.0 / CELL)
    row = (y - field.origin[1]) * np.float32(1.0 / CELL)
    inside_column = jnp.clip(column, 0.0, (columns - 1).astype(jnp.float32))
    inside_row = jnp.clip(row, 0.0, (rows - 1).astype(jnp.float32))
    beyond = CELL * (jnp.abs(column - inside_column) + jnp.abs(row - inside_row))
    left = jnp.minimum(inside_column.astype(jnp.int32), columns - 2)
    low = jnp.minimum(inside_row.astype(jnp.int32), rows - 2)
    tile = (low >> BITS) * ((columns + (TILE - 2)) >> BITS) + (left >> BITS)
    entry = pick(field.tiles, field.start + tile)
    coarse = entry & 1  # then samples lie two cells apart
    side = (TILE + 1) - (TILE // 2) * coarse
    tile_left, tile_low = left & (TILE - 1), low & (TILE - 1)
    within_left, within_low = tile_left >> coarse, tile_low >> coarse
    first = (entry >> 1) + within_low * side + within_left
    share = jnp.where(coarse > 0, 0.5, 1.0)
    across = (inside_column - (left - tile_left).astype(jnp.float32)) * share - within_left.astype(jnp.float32)
    up = (inside_row - (low - tile_low).astype(jnp.float32)) * share - within_low.astype(jnp.float32)

    # all four at once: a compiler repeats the way to an index in each gather
    columns_of, rows_of = (np.array(v, np.int32).reshape(4, *[1] * x.ndim) for v in ((0, 1, 0, 1), (0, 0, 1, 1)))
    around = first[None] + columns_of + rows_of * side[None]
    code = pick(field.cells, around).astype(jnp.float32)
    corner = code * jnp.abs(code)
    bottom = corner[0] * (1.0 - across) + corner[1] * across
    top = corner[2] * (1.0 - across) + corner[3] * across
    value = UNIT * (bottom * (1.0 - up) + top * up) + beyond
    return jnp.where(jnp.min(field.shape) >= 2, value, -OPEN)


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values` [N] at indices that are within 0 .. N - 1: the plain gather, without a check."""
    return values.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def nearest(values: jax.Array, count: int) -> jax.Array:
    """int32 [count]: where the smallest of `values` [N] >= 0 are, the smallest first, at most N of them.

    Each index is written into the last bits of its value, and a plain minimum finds both: on a CPU that is ten times as
    fast as a sort or an `argmin`. Values that differ by less than a part in 2^23 / N rank by index. NaN ranks anyhow.
    """
    size = values.shape[0]
    mask = (1 << (size - 1).bit_length()) - 1
    # from 1 on no number is denormal, and infinity with an index in it would be no number
    bits = lax.bitcast_convert_type(jnp.minimum(values + 1.0, 1e38), jnp.int32)
    key = lax.bitcast_convert_type((bits & ~mask) | np.arange(size, dtype=np.int32), jnp.float32)
    smallest = [jnp.min(key)]
    while len(smallest) < min(count, size):
        smallest.append(jnp.min(jnp.where(key > smallest[-1], key, jnp.inf)))
    return jnp.minimum(lax.bitcast_convert_type(jnp.stack(smallest), jnp.int32) & mask, size - 1)


def project(window: jax.Array, first: jax.Array, x: jax.Array, y: jax.Array) -> Projection:
    """Nearest place of a route to a point (x, y), among the segments of a window.

    `window`: float32 [3, W], rows x, y, heading of points ROUTE_SPACING apart; `first`: the index of the window's
    first point in the route. The heading is interpolated between the two points, the offset is measured from the
    segment's line.
    """
    ax, ay = window[0, :-1], window[1, :-1]
    dx, dy = window[0, 1:] - ax, window[1, 1:] - ay
    square = jnp.maximum(dx * dx + dy * dy, 1e-6)
    part = jnp.clip(((x - ax) * dx + (y - ay) * dy) / square, 0.0, 1.0)
    far_x, far_y = x - ax - part * dx, y - ay - part * dy
    best = nearest(far_x * far_x + far_y * far_y, 1)[0]
    left = (dx * (y - ay) - dy * (x - ax)) * lax.rsqrt(square)
    t = part[best]
    heading = window[2, best]
    turn = wrap(window[2, best + 1] - heading)
    s = ROUTE_SPACING * ((first + best).astype(jnp.float32) + t)
    return Projection(s, left[best], heading + t * turn)


def blocked(
    points: tuple[jax.Array, jax.Array],
    along: jax.Array,
    boxes: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    half: tuple[jax.Array, jax.Array],
    margin: tuple[float | jax.Array, float | jax.Array],
) -> jax.Array:
    """[..., N]: where each of N boxes first stands in each of many ways: `along` of its first point there, or FREE.

    `points`: x and y [..., M] of a way; `along` [..., M]: metres ahead, growing; points with none or less do not count.
    `boxes`: x, y, cosine and sine of the heading, each [N]; `half`: half lengths and widths [N]; `margin`: along and
    beside, m (each a number or [..., 1]), by which the boxes are larger. With half of a vehicle's width as the margin,
    these are the boxes that it would touch on its way. The loop over points is unrolled: every operation runs along N,
    which is several times faster on a CPU than a reduction over points.
    """
    rows = (1,) * (along.ndim - 1)
    x, y, cos, sin, half_length, half_width = (value.reshape(*rows, -1) for value in (*boxes, *half))
    own_u, own_v = into(x, y, cos, sin)
    length, width = half_length + margin[0], half_width + margin[1]
    near = jnp.full((*along.shape[:-1], x.shape[-1]), FREE)
    for j in reversed(range(along.shape[-1])):
        at = along[..., j, None]
        u, v = into(points[0][..., j, None], points[1][..., j, None], cos, sin)
        hit = (jnp.abs(u - own_u) <= length) & (jnp.abs(v - own_v) <= width) & (at > 0.0)
        near = jnp.where(hit, at, near)
    return near
