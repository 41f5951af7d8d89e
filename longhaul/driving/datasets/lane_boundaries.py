"""Outlines of areas where one may drive -> the edges of the road: the border of their union, road on the left.

An area is a list of closed or open rings [P, 2]: its outline, then its holes. Outlines are walked in pieces of `PIECE`
metres; a piece that has another area just outside of it is no edge of the road.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.log import Feature, Malformed

PIECE, ASIDE = 1.0, 0.25
"""Metres: edges are looked at in pieces of this length, so far beside them."""

LONGEST = 1e5
"""Metres of one ring."""

CHUNK, MOST_PAIRS = 1 << 17, 1 << 29
"""Pairs of a point and a side that are looked at together, and in all: far more than a city needs."""


def edges(ids: Sequence[int], areas: Sequence[Sequence[np.ndarray]]) -> list[Feature]:
    """The edges of the union of `areas`, with the id of the area that each belongs to; rings of fewer than three points
    are left out, z is 0."""
    shapes = [(identity, _oriented(rings)) for identity, rings in zip(ids, areas)]
    shapes = [(identity, rings) for identity, rings in shapes if rings]
    boxes = np.array([(*rings[0].min(0), *rings[0].max(0)) for _, rings in shapes]).reshape(-1, 4)
    features = []
    pairs = 0
    for place, (identity, rings) in enumerate(shapes):
        near = (boxes[:, :2] <= boxes[place, 2:] + ASIDE).all(1) & (boxes[:, 2:] >= boxes[place, :2] - ASIDE).all(1)
        others = [shapes[other][1] for other in np.flatnonzero(near) if other != place]
        for ring in rings:
            stretches, looked = _free(ring, others)
            features += [Feature(identity, log.EDGE_BOUNDARY, points) for points in stretches]
            pairs += looked
            if pairs > MOST_PAIRS:
                raise Malformed(f"its {len(shapes)} drivable areas overlap too much to find their border")
    return features


def flat(points: np.ndarray) -> np.ndarray:
    """Points [P, 2] as [P, 3] with z = 0."""
    return np.concatenate([points, np.zeros((len(points), 1))], axis=1)


def _oriented(rings: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rings closed, the area on the left: the outline counterclockwise, holes clockwise."""
    turned: list[np.ndarray] = []
    for ring in rings:
        if len(ring) < 3:
            if not turned:
                return []
            continue
        closed = ring if (ring[0] == ring[-1]).all() else np.concatenate([ring, ring[:1]])
        x, y = closed[:, 0] - closed[0, 0], closed[:, 1] - closed[0, 1]
        counterclockwise = (x[:-1] * y[1:] - x[1:] * y[:-1]).sum() > 0
        turned.append(closed if counterclockwise == (not turned) else closed[::-1])
    return turned


def _free(ring: np.ndarray, others: list[list[np.ndarray]]) -> tuple[list[np.ndarray], int]:
    """-> (the stretches [P, 3] of a closed ring that have none of the other areas on their right; how many pairs of a
    point and a side it took)."""
    begins, corner = _pieces(ring)
    ends = np.roll(begins, -1, axis=0)
    along = ends - begins
    length = np.maximum(np.linalg.norm(along, axis=1, keepdims=True), 1e-9)
    outside = (begins + ends) / 2 + ASIDE * np.stack([along[:, 1], -along[:, 0]], axis=1) / length
    within = np.zeros(len(begins), bool)
    pairs = 0
    for area in others:
        low, high = area[0].min(0), area[0].max(0)
        near = np.flatnonzero(~within & ((outside >= low) & (outside <= high)).all(1))
        within[near] = inside(outside[near], area)
        pairs += len(near) * sum(map(len, area))
    # start behind a piece that goes, so that no stretch is cut where the outline happens to begin
    order = np.roll(np.arange(len(begins)), -int(within.argmax()) - 1) if within.any() else np.arange(len(begins))
    stretches = []
    for run in np.split(order, np.flatnonzero(np.diff(within[order].astype(int))) + 1):
        if not within[run[0]]:
            kept = np.concatenate([run[:1], run[1:][corner[run[1:]]]])
            points = np.concatenate([begins[kept], ends[run[-1:]]])
            stretches.append(flat(points))
    return stretches, pairs


def _pieces(ring: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> (where pieces of at most `PIECE` begin on a closed ring [Q, 2]; which of these are points of the ring)."""
    lengths = np.linalg.norm(np.diff(ring, axis=0), axis=1)
    if not lengths.sum() < LONGEST:
        raise Malformed(f"a drivable area's outline is {lengths.sum():g} m long")
    counts = np.maximum(np.ceil(lengths / PIECE), 1).astype(int)
    start = np.repeat(np.arange(len(counts)), counts)
    step = np.arange(len(start)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ring[start] + (ring[start + 1] - ring[start]) * (step / counts[start])[:, None], step == 0


def inside(points: np.ndarray, rings: Sequence[np.ndarray]) -> np.ndarray:
    """True if points [P, 2] lie within the area of closed rings [R, 2]: by the parity of a ray's crossings."""
    result = np.zeros(len(points), bool)
    begin, end = (np.concatenate([ring[cut] for ring in rings]) for cut in (slice(None, -1), slice(1, None)))
    (x0, y0), (x1, y1) = begin.T, end.T
    rise = np.where(y1 == y0, 1.0, y1 - y0)  # level sides are crossed by no level ray
    block = max(1, CHUNK // len(begin))
    for first in range(0, len(points), block):
        part = slice(first, first + block)
        x, y = points[part, :1], points[part, 1:]
        crosses = ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / rise + x0)
        result[part] = crosses.sum(1) % 2 == 1
    return result
