"""Boxes and the road's edges by brute force in float64: oracles that know no separating axes and no grid."""

from __future__ import annotations

import numpy as np


def corners(boxes: np.ndarray) -> np.ndarray:
    """[..., 4, 2], counter-clockwise, of boxes [..., 5]: x, y, heading, length, width."""
    x, y, heading, length, width = np.moveaxis(np.asarray(boxes, np.float64), -1, 0)
    own = np.stack([length + 1j * width, -length + 1j * width, -length - 1j * width, length - 1j * width], -1) / 2
    place = (x + 1j * y)[..., None] + own * np.exp(1j * heading)[..., None]
    return np.stack([place.real, place.imag], -1)


def overlap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """bool [...]: whether polygons [..., P, 2], counter-clockwise, share a point: two edges cross, or one has a corner
    of the other within."""

    def side(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1]) - (b[..., 1] - a[..., 1]) * (c[..., 0] - a[..., 0])

    p, q = (points[..., :, None, :] for points in (one, np.roll(one, -1, -2)))
    r, s = (points[..., None, :, :] for points in (other, np.roll(other, -1, -2)))
    crosses = (side(p, q, r) * side(p, q, s) < 0) & (side(r, s, p) * side(r, s, q) < 0)
    within = (side(p, q, r) >= 0).all(-2).any(-1) | (side(r, s, p) >= 0).all(-1).any(-1)
    return crosses.any((-2, -1)) | within


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[...]: the least distance of polygons [..., P, 2], of all corners to all edges; 0 where they overlap."""

    def to_edges(points: np.ndarray, polygon: np.ndarray) -> np.ndarray:
        start, along = (values[..., None, :, :] for values in (polygon, np.roll(polygon, -1, -2) - polygon))
        relative = points[..., :, None, :] - start
        share = np.clip((relative * along).sum(-1) / (along**2).sum(-1), 0.0, 1.0)
        return np.linalg.norm(relative - share[..., None] * along, axis=-1).min((-2, -1))

    return np.where(overlap(one, other), 0.0, np.minimum(to_edges(one, other), to_edges(other, one)))


def segments(lines: list[np.ndarray]) -> np.ndarray:
    """[M, 2, 2]: beginning and end of each segment of lines [P, 2]."""
    return np.concatenate([np.stack([line[:-1], line[1:]], 1) for line in lines])


def distances(points: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[P, M]: distances of points [P, 2] to segments [M, 2, 2]."""
    start, chord = edges[:, 0], edges[:, 1] - edges[:, 0]
    to = points[:, None] - start
    share = np.clip((to * chord).sum(-1) / (chord**2).sum(-1), 0.0, 1.0)
    return np.linalg.norm(to - share[..., None] * chord, axis=-1)


def signed_distance(points: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """[P]: distance of points [P, 2] to the nearest of segments [M, 2, 2], negative on its left. Where segments tie, as
    at a joint, the one of the farthest line decides."""
    start, chord = edges[:, 0], edges[:, 1] - edges[:, 0]
    size = np.hypot(*chord.T)
    parts = []
    for some in np.array_split(points, len(points) // 1024 + 1):
        away, to = distances(some, edges), some[:, None] - start
        side = (chord[:, 0] * to[..., 1] - chord[:, 1] * to[..., 0]) / size
        best = away.min(1, keepdims=True)
        decides = np.where(away < best + 1e-7, np.abs(side), -1.0).argmax(1)
        parts.append(-np.sign(np.take_along_axis(side, decides[:, None], 1)[:, 0]) * best[:, 0])
    return np.concatenate(parts)
