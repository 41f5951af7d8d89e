"""The kernels against plain NumPy, and against every segment in place of the nearest ones."""

from __future__ import annotations

import numpy as np

from longhaul.driving.scenario import kernels
from longhaul.driving.scenario.distance_field import make_edges, segment_distance
from longhaul.driving.scenario.lane_graph import BLOCK, FARTHEST, FINE, NEAREST, PROBES, SECOND, nearest_lanes


def test_the_nearest_points_are_the_nearest_of_all() -> None:
    rng = np.random.default_rng(0)
    points, near = rng.uniform(-50, 50, (300, 2)), rng.uniform(-50, 50, (40, 2))
    away = ((points[:, None] - near) ** 2).sum(-1)
    np.testing.assert_array_equal(kernels.nearest_points(points, near), away.argmin(1))


def test_a_field_by_patches_is_the_field_by_all_segments() -> None:
    rng = np.random.default_rng(1)
    lines = [np.cumsum(rng.normal(0, 4, (40, 2)), 0) + rng.uniform(-40, 40, 2) for _ in range(6)]
    edges = make_edges(lines)
    origin, cell = np.array([-60.0, -45.0]), 0.5
    got = kernels.field(origin, cell, 151, 97, 8, 64, *edges)
    grid = np.stack(np.meshgrid(np.arange(151), np.arange(97)), -1).reshape(-1, 2)
    want = kernels.signed_distances(origin + cell * grid, *edges)
    away = segment_distance((origin + cell * grid)[:, None], edges.start[None], edges.vector[None]).min(1)
    np.testing.assert_allclose(np.abs(want), away, rtol=0, atol=1e-9)
    np.testing.assert_allclose(got.reshape(-1), want, rtol=0, atol=1e-9)


def ranked(values: np.ndarray, lane: np.ndarray, extra: float) -> np.ndarray:
    """Indices of the `NEAREST` smallest, those that are not the nearest of their lane `extra` later."""
    least = np.array([values[lane == lane[k]].min() for k in range(len(lane))])
    return np.argsort(np.where(values <= least, values, values + np.float32(extra)), kind="stable")[:NEAREST]


def test_the_lanes_of_a_cell_are_those_nearest_at_its_probes() -> None:
    rng = np.random.default_rng(2)
    middle = rng.uniform(-20, 20, (30, 2)).astype(np.float32)
    half = rng.uniform(-4, 4, (30, 2)).astype(np.float32)
    lane = np.sort(rng.integers(0, 12, 30))
    centre = np.array([[-8.0, 3.0], [30.0, 11.0]], np.float32)
    got = nearest_lanes(middle, half, lane, centre)
    size, start, vector = BLOCK / FINE, middle - half, 2 * half
    for g, place in enumerate(centre):
        away = segment_distance(place, start, vector)
        rows = np.flatnonzero(away <= float(away.min()) + BLOCK * np.sqrt(2.0))
        for c in range(FINE * FINE):
            corner = size * (np.array([c % FINE, c // FINE]) - 0.5 * (FINE - 1))
            probes = place + (corner + np.array(PROBES) * 0.5 * size).astype(np.float32)
            rank = np.full(len(rows), NEAREST, np.float32)
            for probe in probes:
                gap = segment_distance(probe, start[rows], vector[rows])
                for at, k in enumerate(ranked(gap, lane[rows], FARTHEST)):
                    rank[k] = min(rank[k], at)
            gap = segment_distance(probes[0], start[rows], vector[rows])
            worth = (rank * np.float32(FARTHEST) + np.minimum(gap, np.float32(0.9 * FARTHEST))).astype(np.float32)
            few = rows[ranked(worth, lane[rows], SECOND * FARTHEST)]
            np.testing.assert_array_equal(got[g, c, : len(few)], few)
            assert (got[g, c, len(few) :] == -1).all()
