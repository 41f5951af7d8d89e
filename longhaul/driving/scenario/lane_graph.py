"""The road of a scenario as short directed segments, and a grid that says which of them are near.

A row is a segment of at most `LONGEST` metres: a part of a lane's centre, of a line or an edge, of a crosswalk's or a
speed bump's outline; or a stop sign, which has no length. Polylines are merged within `MERGE` metres. Only what lies
within `REACH` of the routes and on their level is kept: rows of other levels of an overpass are left out as the edges
of the distance field are.

The grid has blocks of `BLOCK` metres along the routes, as a list; a directory tells the block of each cell, and where
a cell has none, the nearest one. A block holds candidates for an observation, and for each of its FINE x FINE cells
the lane segments that are nearest somewhere in it. The candidates follow from the rest, so shards do not store them.

M rows, lanes' rows first, W lanes, G blocks. No JAX here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.log import Feature
from longhaul.driving.scenario.scenario import CANDIDATES, NEARBY, NO_ROAD, Road

Array = Any  # numpy.ndarray or jax.Array


LONGEST, MERGE = 10.0, 0.1
"""Metres of the longest row (a little more where the source's points lie so), and by which merging may move it."""

REACH = 70.0
"""Metres from the routes beyond which rows are left out."""

PLACE_UNIT, HALF_UNIT = 0.02, 0.002
"""Metres: the units of a row's middle (int16, from the origin) and of its half (13 bits)."""

HALF_MOST = 4095

LIMIT_UNIT, LIMIT_MOST = 0.02, 4095
"""The unit, m/s, of a speed limit (12 bits)."""

MOST_ROWS, MOST_PLACE, MOST_PARTS = 32767, 32700, 1 << 20

SHORTEST = 0.02
"""Metres of a row below which it is left out."""

LEVEL, SLOPE, BRIDGE = 3.0, 0.08, 5.0
"""Objects on another level of the road: its height differs from the nearest route point's by more than `LEVEL` metres
and `SLOPE` of the distance to it, since roads climb; in any case by more than `BRIDGE`."""

MPH = 0.44704

INFERRED = {log.LANE_FREEWAY: 70.0 * MPH, log.LANE_STREET: 45.0 * MPH}
"""Speed limits, m/s, by a lane's kind where the source has none (as V-Max takes them)."""

SLOWEST = 25.0 * MPH
"""m/s: the lowest speed limit of a street that is inferred from its traffic."""

BIKE, STREET, FREEWAY = 1, 2, 3

BROKEN, SOLID, EDGE = 1 << 2, 2 << 2, 3 << 2

CROSSING, BUMP, STOP = 1 << 4, 2 << 4, 3 << 4

CODES = {
    log.LANE_BIKE: BIKE,
    log.LANE_STREET: STREET,
    log.LANE_FREEWAY: FREEWAY,
    **{kind: BROKEN if kind in (6, 9, 10, 13) else SOLID for kind in log.ROAD_LINES},
    log.EDGE_BOUNDARY: EDGE,
    log.EDGE_MEDIAN: EDGE,
    log.CROSSWALK: CROSSING,
    log.SPEED_BUMP: BUMP,
    log.STOP_SIGN: STOP,
}
"""Kinds of a row, three numbers of two bits: lane, barrier, special; of each, a larger one binds more. A passing line
(13) may be crossed like a broken one. Driveways are left out."""

LIMIT_INFERRED, JUNCTION = 1, 2
"""Bits of `Road.lane_flags`."""

BLOCK, FINE = 16.0, 5
"""Metres of a block; cells along its side."""

PROBES = ((0.0, 0.0), *((i, j) for i in (-1.0, 0.0, 1.0) for j in (-1.0, 0.0, 1.0) if i or j))
"""Points from which the lanes nearest to a cell are searched, in halves of its side from its middle."""

MARGIN = 8.0
"""Metres around the routes that have blocks."""

GOES_ON = 20.0
"""Metres of a route after its goal that still have blocks."""

RANGE = 60.0
"""Metres from a block's middle within which its candidates lie."""

NEAREST, SECOND = 9, 3
"""Rows of a cell's list of lanes; by how many ranks a lane's second row comes later."""

MOST_LANES = 512
"""Lanes' rows of a block that are looked at; the densest junctions have some 200."""

FARTHEST, MOST_BLOCKS = 720.0, 1024
"""Metres from the rows' origin beyond which there are no blocks; and the most of them: the ego's come first."""


class Roadmap(NamedTuple):
    """The roads of S scenarios, one behind the other. Rows count from a scenario's first row, blocks from its first
    block. All that has no road share one empty block, the first; so every look-up is legal."""

    place: Array  # int32 [rows]: x in the low 16 bits, y in the high ones; PLACE_UNIT from the origin
    shape: Array  # int32 [rows]: half x, half y (13 bits each, HALF_UNIT), kind (6 bits)
    lane: Array  # int32 [lanes' rows]: number (15 bits), limit (12 bits, LIMIT_UNIT), flags (2 bits)
    directory: Array  # int16 [cells]
    points: Array  # int16 [blocks, CANDIDATES]
    lanes: Array  # int16 [blocks * FINE * FINE, NEAREST]
    head: Array  # int32 [S, 6]: first row, first lane's row, first cell, the directory's rows, columns, first block
    corner: Array  # float32 [S, 4]: corner of the directory, origin of the rows


def make_road(features: Sequence[Feature], near: np.ndarray, origin: np.ndarray, flow: float | None = None) -> Road:
    """The rows of `features` around the points `near` [Q, 3] of routes, relative to `origin` [3]; without a grid yet.
    `flow` is how fast traffic drives, m/s, None where nobody knows; see `limit`.

    Where there are more than `MOST_ROWS`, or rows farther than 650 m from the middle of the routes, the farthest are
    left out.
    """
    from longhaul.driving.scenario import kernels

    # one point from each box of 4 x 4 x 2 m is enough
    near = near[kernels.boxes(near, np.array([4.0, 4.0, 2.0]))]
    low, high = near[:, :2].min(0), near[:, :2].max(0)
    centre = np.round(0.5 * (low + high))
    order = [i for i, feature in enumerate(features) if feature.kind in CODES and len(feature.points)]
    order.sort(key=lambda i: features[i].kind > log.LANE_BIKE)  # lanes first
    if not order:
        return NO_ROAD._replace(origin=centre.astype(np.float32))
    points = np.concatenate([features[i].points for i in order]) - origin
    ends = np.cumsum([len(features[i].points) for i in order])
    code = np.array([CODES[features[i].kind] for i in order], np.int8)
    how = np.array([kernels.OPEN, kernels.OUTLINE, kernels.OUTLINE, kernels.SIGN])[code // CROSSING]
    first = np.append(0, ends[:-1])
    least, most = (some.reduceat(points[:, :2], first) for some in (np.minimum, np.maximum))
    how[((most < low - REACH) | (least > high + REACH)).any(1)] = 0
    start, end, of = kernels.rows(points, ends, how, LONGEST, MERGE)
    cut = kernels.pieces(start, end, of, how, LONGEST, SHORTEST, MOST_PARTS)
    lane = np.where(code <= FREEWAY, order, -1)

    def within(reach: float) -> tuple[np.ndarray, ...]:
        units = LEVEL, SLOPE, BRIDGE, PLACE_UNIT, float(MOST_PLACE), HALF_UNIT, float(HALF_MOST)
        return kernels.packed(*cut, code, lane, near, centre, reach, *units)  # type: ignore[call-arg]

    place, half, kind, number, away, used = within(REACH)
    if len(away) > MOST_ROWS:
        place, half, kind, number, away, used = within(float(np.sort(away)[MOST_ROWS - 1]))
    about = [features[i] for i in used.tolist()]
    return NO_ROAD._replace(
        origin=centre.astype(np.float32),
        place=place,
        half=half,
        kind=kind,
        lane=number,
        lane_limit=np.array([limit(feature, flow) for feature in about], np.float32),
        lane_flags=np.array([flags(feature) for feature in about], np.int8),
    )


def limit(feature: Feature, flow: float | None = None) -> float:
    """A lane's speed limit, m/s: the source's, else that of its kind; 0 where nothing is known.

    Where the source tells none, a street's is the `flow` of traffic, at least SLOWEST and at most a motorway's: nobody
    would know better who drives there. Without traffic it is that of its kind. Scores still go by the kind, as V-Max's
    do (`sim.metrics`).
    """
    known = feature.speed_limit or INFERRED.get(feature.kind, 0.0)
    if not feature.speed_limit and feature.kind == log.LANE_STREET and flow is not None:
        known = min(INFERRED[log.LANE_FREEWAY], max(flow, SLOWEST))
    return LIMIT_UNIT * min(round(known / LIMIT_UNIT), LIMIT_MOST)


def flags(feature: Feature) -> int:
    inferred = not feature.speed_limit and feature.kind in INFERRED
    return LIMIT_INFERRED * inferred + JUNCTION * bool(feature.junction)


def middles(road: Road) -> np.ndarray:
    """The middles of a road's rows, float32 [M, 2], m."""
    return road.place * np.float32(PLACE_UNIT) + road.origin


def halves(road: Road) -> np.ndarray:
    """From a row's middle to its end, float32 [M, 2], m."""
    return road.half * np.float32(HALF_UNIT)


def lay_grid(road: Road, route: np.ndarray, route_length: np.ndarray, route_points: np.ndarray) -> Road:
    """`road` with its grid along the routes [A, R, 3] of `Scenario`."""
    ways = [
        line[: min(count, int(length + GOES_ON) + 1), :2]
        for line, length, count in zip(route, route_length, route_points, strict=True)
        if count > 0
    ]
    along = np.concatenate([np.zeros((0, 2)), *ways])
    along = along[(np.abs(along - road.origin) < FARTHEST).all(1)]
    if not len(road.kind) or not len(along):
        return NO_ROAD
    from longhaul.driving.scenario import kernels

    corner, cells, directory = kernels.blocks(along, MARGIN, BLOCK, MOST_BLOCKS)
    laid = {"corner": corner.astype(np.float32), "cells": cells.astype(np.int16), "directory": directory}
    return look_around(road._replace(**laid))


def look_around(road: Road, near_lanes: np.ndarray | None = None) -> Road:
    """`road`, which has cells, with the lists of what is near them; `near_lanes`, most of the work, if known."""
    if not len(road.cells):
        return NO_ROAD
    centre = road.corner + np.float32(BLOCK) * (road.cells + np.float32(0.5))
    middle, half = middles(road), halves(road)
    if near_lanes is None:
        near_lanes = nearest_lanes(middle, half, road.lane, centre)
    return road._replace(near=candidates(middle, half, centre), near_lanes=near_lanes)


def candidates(middle: np.ndarray, half: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Rows within RANGE of each block's middle [G, 2], nearest first or thinned: int16 [G, CANDIDATES]; -1: none."""
    from longhaul.driving.scenario import kernels

    return kernels.candidates(middle - half, 2 * half, centre, RANGE, CANDIDATES, NEARBY, spread())


@cache
def spread() -> np.ndarray:
    """The order in which the spread candidates are taken, bits reversed: int64 [CANDIDATES - NEARBY]."""
    count = CANDIDATES - NEARBY
    return np.array([int(f"{i:0{count.bit_length() - 1}b}"[::-1], 2) for i in range(count)])


def nearest_lanes(middle: np.ndarray, half: np.ndarray, lane: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """The lanes' rows nearest to each cell of each block: int16 [G, FINE * FINE, NEAREST], -1 is none."""
    count = int((lane >= 0).sum())
    if not count:
        return np.full((len(centre), FINE * FINE, NEAREST), -1, np.int16)
    from longhaul.driving.scenario import kernels

    number = lane[:count].astype(np.int64)
    points, at = probes()
    return kernels.nearest_lanes(
        (middle - half)[:count], 2 * half[:count], number, int(number.max()) + 1, centre, points, at,
        BLOCK / FINE * np.sqrt(0.5), BLOCK * np.sqrt(2.0), MOST_LANES, NEAREST, np.float32(SECOND),
        np.float32(FARTHEST),
    )  # fmt: skip


@cache
def probes() -> tuple[np.ndarray, np.ndarray]:
    """Places in a block from which its cells' lanes are searched, float32 [U, 2], and those of each cell, [C, P]."""
    size = BLOCK / FINE
    offsets = size * (np.arange(FINE) - 0.5 * (FINE - 1))
    cell = np.stack(np.meshgrid(offsets, offsets), -1).reshape(-1, 1, 2)  # row by row
    places = (cell + np.array(PROBES) * 0.5 * size).astype(np.float32)
    points, at = np.unique(places.reshape(-1, 2), axis=0, return_inverse=True)
    return points, at.reshape(places.shape[:2])


def join(roads: Sequence[Road]) -> Roadmap:
    """The roads of a bank's scenarios, packed; NumPy arrays."""
    roads = [road if len(road.cells) else NO_ROAD for road in roads]
    none = Roadmap(
        place=np.zeros(1, np.int32),
        shape=np.zeros(1, np.int32),
        lane=np.zeros(1, np.int32),
        directory=np.zeros(1, np.int16),
        points=np.full((1, CANDIDATES), -1, np.int16),
        lanes=np.full((FINE * FINE, NEAREST), -1, np.int16),
        head=np.zeros(6, np.int32),
        corner=np.zeros(4, np.float32),
    )
    parts = [none, *(pack(road) for road in roads)]
    sizes = np.array([[len(p.place), len(p.lane), len(p.directory), len(p.points)] for p in parts])
    first = np.where(sizes[1:, 3:] > 0, np.cumsum(sizes, 0)[:-1], 0)
    shape = [road.directory.shape for road in roads]  # (1, 1) where there is no road
    head = np.concatenate([first[:, :3], np.array(shape).reshape(-1, 2), first[:, 3:]], 1)
    flat = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Roadmap._fields[:6]}
    return Roadmap(**flat, head=head.astype(np.int32), corner=np.stack([part.corner for part in parts[1:]]))


def pack(road: Road) -> Roadmap:
    """One road as in `Roadmap`, without a head."""
    place, half = road.place.astype(np.int64), road.half.astype(np.int64)
    known = road.lane >= 0
    lane = road.lane[known].astype(np.int64)
    about = np.rint(road.lane_limit / LIMIT_UNIT).astype(np.int64) << 15 | road.lane_flags.astype(np.int64) << 27
    shape = half[:, 0] & 0x1FFF | (half[:, 1] & 0x1FFF) << 13 | road.kind.astype(np.int64) << 26

    def packed(word: np.ndarray) -> np.ndarray:
        return word.astype(np.uint32).view(np.int32)

    return Roadmap(
        place=packed(place[:, 0] & 0xFFFF | (place[:, 1] & 0xFFFF) << 16),
        shape=packed(shape),
        lane=packed(lane | about[lane]),
        directory=road.directory.reshape(-1) if len(road.cells) else np.zeros(0, np.int16),
        points=road.near.reshape(-1, CANDIDATES),
        lanes=road.near_lanes.reshape(-1, NEAREST),
        head=np.zeros(6, np.int32),
        corner=np.concatenate([road.corner, road.origin]),
    )
