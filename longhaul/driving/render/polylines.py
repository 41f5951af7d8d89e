"""Polylines for pictures: cut to a box, thinned, dashed; and the boxes of agents. P points, [P, 2], metres."""

from __future__ import annotations

import numpy as np


def clip(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """The runs of segments whose own boxes meet the box `low` .. `high`; points stay, so ends may stand out."""
    if len(points) < 2:
        inside = len(points) == 1 and bool(np.all((points[0] >= low) & (points[0] <= high)))
        return [points] if inside else []
    first, second = points[:-1], points[1:]
    meets = np.all((np.minimum(first, second) <= high) & (np.maximum(first, second) >= low), axis=-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], meets, [False]]).astype(np.int8)))
    return [points[start : stop + 1] for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def simplify(points: np.ndarray, tolerance: float) -> np.ndarray:
    """Fewer points, nowhere further than `tolerance` metres from the line (Ramer, 1972; Douglas and Peucker, 1973)."""
    keep = np.zeros(len(points), bool)
    keep[[0, -1]] = True
    stack = [(0, len(points) - 1)]
    while stack:
        start, stop = stack.pop()
        if stop - start < 2:
            continue
        along = points[stop] - points[start]
        away = points[start + 1 : stop] - points[start]
        share = np.clip(away @ along / max(float(along @ along), 1e-12), 0.0, 1.0)
        distance = np.linalg.norm(away - share[:, None] * along, axis=-1)
        worst = int(np.argmax(distance))
        if distance[worst] > tolerance:
            middle = start + 1 + worst
            keep[middle] = True
            stack += [(start, middle), (middle, stop)]
    return points[keep]


def dashes(points: np.ndarray, on: float, off: float) -> list[np.ndarray]:
    """The line's pieces of `on` metres with gaps of `off` metres."""
    length = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=-1))])
    pieces = []
    for start in np.arange(0.0, length[-1], on + off):
        stop = min(start + on, length[-1])
        inner = points[(length > start) & (length < stop)]
        ends = np.stack([np.interp([start, stop], length, points[:, axis]) for axis in (0, 1)], -1)
        pieces.append(np.concatenate([ends[:1], inner, ends[1:]]))
    return pieces


def box(pose: np.ndarray, length: float, width: float) -> np.ndarray:
    """[4, 2]: the corners of a box at `pose` (x, y, heading): front left, rear left, rear right, front right."""
    cos, sin = np.cos(pose[2]), np.sin(pose[2])
    corners = 0.5 * np.array([[length, width], [-length, width], [-length, -width], [length, -width]])
    return pose[:2] + corners @ np.array([[cos, sin], [-sin, cos]])
