"""The road around a point, on the device: the nearest lanes, and a few hundred pieces of road for an observation.

Both read the grid of `lane_graph`: one look-up of the block in which the point lies, then a short list of rows, each a
segment packed into two numbers of 32 bits. Nothing is searched or sorted here. Everything is for one point (batches
come from `jax.vmap`), in the scenario's plane: compiling left out rows of other levels of an overpass.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longhaul.driving.scenario.lane_graph import (
    BIKE,
    BLOCK,
    FINE,
    FREEWAY,
    HALF_UNIT,
    LIMIT_INFERRED,
    LIMIT_UNIT,
    NEAREST,
    PLACE_UNIT,
    Roadmap,
)
from longhaul.driving.sim.geometry import FREE, into

ROAD = 8
"""Numbers of one piece of road in an observation."""

HALF_WIDTH = 1.75
"""Metres from a lane's centre within which a point is in the lane: half the usual width of a street's lanes, which
sources do not give."""

HALF_SCALE, NEAR = 5.0, 10.0
"""Metres: of a row's half that are 1 in an observation, and at which a distance counts half of an infinite one."""


class Place(NamedTuple):
    """Place of a point in the grid of its scenario."""

    head: jax.Array  # int32 [6], see `Roadmap`
    block: jax.Array  # int32
    cell: jax.Array  # int32, of the block's FINE * FINE
    x: jax.Array  # float32, from the rows' origin, m
    y: jax.Array


class LanesHere(NamedTuple):
    """The lane segments nearest to a point, K = NEAREST of them, in no order; at most one of each lane.

    Where there are fewer, the rest have `distance` FREE, `lane` -1, `limit` 0 and False. The nearest lane for motor
    traffic is `argmin(where(bike, FREE, distance))`. In the cell of some 3 m around the point, the K that are nearest
    somewhere in it were listed: in the densest junctions, where more than K lanes overlap, some are missing.
    Far from all routes (some 8 m and more), those of the nearest cell near one are given, with true distances.
    """

    distance: jax.Array  # float32 [K], m, to the segment (its ends count)
    lateral: jax.Array  # float32 [K], m, of the point to the left of the segment's line
    cos: jax.Array  # float32 [K], direction of travel
    sin: jax.Array  # float32 [K]
    lane: jax.Array  # int32 [K], number of the lane within the scenario: equal for segments of one lane; -1 none
    limit: jax.Array  # float32 [K], speed limit, m/s; 0 unknown
    inferred: jax.Array  # bool [K]: the limit is not the source's
    bike: jax.Array  # bool [K]: for bicycles
    freeway: jax.Array  # bool [K]: a lane of a freeway


def place(roadmap: Roadmap, scenario: jax.Array, x: jax.Array, y: jax.Array) -> Place:
    """Place of the point (x, y), m, in the grid of a scenario, all scalars; beyond the border, that at the border."""
    head, corner = roadmap.head[scenario], roadmap.corner[scenario]
    most = head[3:5].astype(jnp.float32) * np.float32(FINE) - 1.0
    row = jnp.clip(jnp.floor((y - corner[1]) * np.float32(FINE / BLOCK)), 0.0, most[0]).astype(jnp.int32)
    column = jnp.clip(jnp.floor((x - corner[0]) * np.float32(FINE / BLOCK)), 0.0, most[1]).astype(jnp.int32)
    block_row, block_column = row // FINE, column // FINE
    cell = roadmap.directory[head[2] + block_row * head[4] + block_column].astype(jnp.int32)
    inner = (row - FINE * block_row) * FINE + column - FINE * block_column
    return Place(head, head[5] + cell, inner, x - corner[2], y - corner[3])


def lanes_at(roadmap: Roadmap, scenario: jax.Array, x: jax.Array, y: jax.Array) -> LanesHere:
    """The lanes around the point (x, y) of a scenario; scalars in, [K] out."""
    cell = place(roadmap, scenario, x, y)
    rows = roadmap.lanes[cell.block * (FINE * FINE) + cell.cell].astype(jnp.int32)
    known, rows = rows >= 0, jnp.maximum(rows, 0)
    middle_x, middle_y = _centre_offset(roadmap.place.at[cell.head[0] + rows].get(mode="clip"))
    half_x, half_y, kind = _half_extent(roadmap.shape.at[cell.head[0] + rows].get(mode="clip"))
    about = roadmap.lane.at[cell.head[1] + rows].get(mode="clip")
    dx, dy = cell.x - middle_x, cell.y - middle_y
    square = jnp.maximum(half_x * half_x + half_y * half_y, 1e-8)
    part = jnp.clip((dx * half_x + dy * half_y) / square, -1.0, 1.0)
    distance = jnp.hypot(dx - part * half_x, dy - part * half_y)
    size = lax.rsqrt(square)
    cos, sin = half_x * size, half_y * size
    lane = jnp.where(known, about & 0x7FFF, -1)
    # of several segments of one lane the nearest counts, and of equally near ones the first
    same = lane[:, None] == lane[None, :]
    order = np.arange(NEAREST)
    before = jnp.asarray(order[None, :] < order[:, None])
    # in millimetres, and never with itself: a fused kernel computes a distance twice, and not to the last bit alike
    rank = jnp.round(distance * 1000.0)
    nearer = (rank[None, :] < rank[:, None]) | ((rank[None, :] == rank[:, None]) & before)
    known = known & ~jnp.any(same & nearer & jnp.asarray(order[None, :] != order[:, None]), axis=1)
    return LanesHere(
        distance=jnp.where(known, distance, FREE),
        lateral=dy * cos - dx * sin,
        cos=cos,
        sin=sin,
        lane=jnp.where(known, lane, -1),
        limit=jnp.where(known, ((about >> 15) & 0xFFF).astype(jnp.float32) * np.float32(LIMIT_UNIT), 0.0),
        inferred=known & ((about >> 27) & LIMIT_INFERRED > 0),
        bike=known & (kind & 3 == BIKE),
        freeway=known & (kind & 3 == FREEWAY),
    )


class Pieces(NamedTuple):
    """Pieces of road in an agent's frame, [P]."""

    x: jax.Array  # m, of the middle
    y: jax.Array
    half_x: jax.Array  # m, from the middle to the end
    half_y: jax.Array
    kind: jax.Array  # int32, see `lane_graph.CODES`
    there: jax.Array  # bool; where False the others mean nothing


def pieces(
    roadmap: Roadmap, scenario: jax.Array, x: jax.Array, y: jax.Array, cos: jax.Array, sin: jax.Array, count: int
) -> Pieces:
    """Pieces of road [P] around a pose, scalars: the first `count` candidates, P = `count`.

    `scenario.CANDIDATES`, the most there can be, says which these are.
    """
    cell = place(roadmap, scenario, x, y)
    rows = lax.dynamic_slice(roadmap.points, (cell.block, jnp.zeros_like(cell.block)), (1, count))[0].astype(jnp.int32)
    index = cell.head[0] + jnp.maximum(rows, 0)
    middle_x, middle_y = _centre_offset(roadmap.place.at[index].get(mode="clip"))
    half_x, half_y, kind = _half_extent(roadmap.shape.at[index].get(mode="clip"))
    u, v = into(middle_x - cell.x, middle_y - cell.y, cos, sin)
    along, beside = into(half_x, half_y, cos, sin)
    return Pieces(u, v, along, beside, kind, rows >= 0)


def describe(pieces: Pieces) -> jax.Array:
    """Float32 [P, ROAD], each: x, y of the middle, squashed; the half of the piece as a vector / 5 m; what it is, in
    three numbers of 0 .. 1: lane (bicycles, street, freeway), barrier (broken line, solid line, edge), special
    (crosswalk, speed bump, stop sign); and 1 where there is a piece (else all are 0)."""
    present = pieces.there.astype(jnp.float32)
    third, unit = present * np.float32(1.0 / 3.0), present * np.float32(1.0 / HALF_SCALE)
    values = [
        present * pieces.x / (NEAR + jnp.abs(pieces.x)),
        present * pieces.y / (NEAR + jnp.abs(pieces.y)),
        unit * pieces.half_x,
        unit * pieces.half_y,
        *(third * ((pieces.kind >> shift) & 3).astype(jnp.float32) for shift in (0, 2, 4)),
        present,
    ]
    return jnp.stack(values).T  # stacked along the minor axis it is several times as slow on a CPU


def _centre_offset(word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Metres from the origin to rows' middles."""
    unit = np.float32(PLACE_UNIT)
    return ((word << 16) >> 16).astype(jnp.float32) * unit, (word >> 16).astype(jnp.float32) * unit


def _half_extent(word: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Metres from rows' middles to their ends, and what they are."""
    unit = np.float32(HALF_UNIT)
    return (
        ((word << 19) >> 19).astype(jnp.float32) * unit,
        ((word << 6) >> 19).astype(jnp.float32) * unit,
        (word >> 26) & 63,
    )
