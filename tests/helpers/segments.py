"""Distance to segments in plain NumPy: the oracle of kernels that measure it."""

from __future__ import annotations

import numpy as np


def segment_distance(points: np.ndarray, start: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Distance, m, of points [..., 2] to the segments from `start` along `vector` [..., 2]."""
    # by components: a sum over an axis of two takes ten times as long
    vx, vy = vector[..., 0], vector[..., 1]
    x, y = points[..., 0] - start[..., 0], points[..., 1] - start[..., 1]
    length2 = np.maximum(vx * vx + vy * vy, 1e-18)
    along = np.clip((x * vx + y * vy) / length2, 0.0, 1.0)
    x, y = x - along * vx, y - along * vy
    return np.sqrt(x * x + y * y)
