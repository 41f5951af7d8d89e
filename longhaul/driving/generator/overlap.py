"""Boxes that move, and whether they touch each other or leave the road: the host's exact check of a generated log.

N bodies, T steps; NumPy float64. (The simulator has its own, for many worlds at once, in `geometry`.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.scenario.road_edges import Edges, signed_distance

CLEARANCE, OFF_EDGE = 0.15, 0.15
"""Metres that the ego's log keeps from other boxes, and from the edge of the road."""


class Bodies(NamedTuple):
    """All that moves or stands, the ego first."""

    kind: np.ndarray  # int8 [N]
    pose: np.ndarray  # [N, T, 3]
    speed: np.ndarray  # [N, T]
    size: np.ndarray  # [N, 3]
    valid: np.ndarray  # bool [N, T]


def corners(pose: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The corners [..., 4, 2] of boxes at `pose` [..., 3] of `size` [..., 2]."""
    cos, sin = np.cos(pose[..., 2])[..., None], np.sin(pose[..., 2])[..., None]
    x, y = (np.array(a) * size[..., i, None] / 2 for i, a in enumerate(([1, 1, -1, -1], [1, -1, -1, 1])))
    return pose[..., None, :2] + np.stack([x * cos - y * sin, x * sin + y * cos], -1)


def touch(pose: np.ndarray, size: np.ndarray, other_pose: np.ndarray, other_size: np.ndarray) -> np.ndarray:
    """bool [...]: whether two boxes overlap, by the separating axis theorem."""
    boxes = corners(pose, size), corners(other_pose, other_size)
    apart = np.zeros(pose.shape[:-1], bool)
    for angle in (pose[..., 2], pose[..., 2] + np.pi / 2, other_pose[..., 2], other_pose[..., 2] + np.pi / 2):
        axis = np.stack([np.cos(angle), np.sin(angle)], -1)[..., None, :]
        a, b = ((box * axis).sum(-1) for box in boxes)
        apart |= (a.max(-1) < b.min(-1)) | (b.max(-1) < a.min(-1))
    return ~apart


def contacts(bodies: Bodies, first: np.ndarray, clearance: float) -> np.ndarray:
    """bool [N]: who comes within `clearance` of one of the bodies `first` at some step."""
    hit = np.zeros(len(bodies.kind), bool)
    reach = np.hypot(bodies.size[:, 0], bodies.size[:, 1]) / 2
    for i in first:
        away = np.hypot(*(bodies.pose[:, :, :2] - bodies.pose[i, :, :2]).transpose(2, 0, 1))
        near = (away < (reach + reach[i] + clearance)[:, None]) & bodies.valid & bodies.valid[i]
        near[i] = False
        who, when = np.nonzero(near)
        size = bodies.size[i, :2] + 2.0 * clearance
        both = touch(
            bodies.pose[i, when], np.broadcast_to(size, (len(when), 2)), bodies.pose[who, when], bodies.size[who, :2]
        )
        hit[who[both]] = True
    return hit


def clean(bodies: Bodies, edges: Edges) -> bool:
    """True if the ego touches nobody and keeps all its corners on the road, at every step."""
    if contacts(bodies, np.array([0]), CLEARANCE).any() or not bodies.valid[0].all():
        return False
    outline = corners(bodies.pose[0], np.broadcast_to(bodies.size[0, :2], (bodies.pose.shape[1], 2)))
    return bool(signed_distance(outline, edges).max() < -OFF_EDGE)


def sift(bodies: Bodies) -> Bodies:
    """Without those bodies, other than the ego, that touch one that stays."""
    keep = np.ones(len(bodies.kind), bool)
    for i in range(1, len(bodies.kind)):
        few = Bodies(*(a[keep] for a in bodies))
        place = int(keep[:i].sum())
        if contacts(few, np.array([place]), 0.0)[:place].any():
            keep[i] = False
    return Bodies(*(a[keep] for a in bodies))
