"""The kernels against plain NumPy, and against every segment in place of the nearest ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from longhaul.driving.scenario import kernels
from longhaul.driving.scenario.distance_field import make_edges
from longhaul.driving.scenario.lane_graph import (
    BLOCK,
    FARTHEST,
    FINE,
    NEAREST,
    PROBES,
    RANGE,
    SECOND,
    candidates,
    nearest_lanes,
)
from longhaul.driving.scenario.scenario import CANDIDATES, NEARBY
from tests.helpers.segments import segment_distance


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
    got = kernels.field(origin, cell, 151, 97, 8, 64, 2000.0, *edges)
    grid = np.stack(np.meshgrid(np.arange(151), np.arange(97)), -1).reshape(-1, 2)
    want = kernels.signed_distances(origin + cell * grid, *edges)
    away = segment_distance((origin + cell * grid)[:, None], edges.start[None], edges.vector[None]).min(1)
    np.testing.assert_allclose(np.abs(want), away, rtol=0, atol=1e-9)
    rounded = np.clip(np.rint(np.abs(want) * 100.0), 1, 2000)
    assert (rounded == 2000).any()
    np.testing.assert_array_equal(got.reshape(-1), np.where(want > 0.0, rounded, -rounded))


def test_simplified_lines_stay_near_and_keep_their_ends() -> None:
    rng = np.random.default_rng(8)
    lines = [np.cumsum(rng.normal(0, 1, (n, 2)), 0) for n in (1, 2, 3, 50, 200)]
    lines += [np.concatenate([lines[-1], lines[-1][:1]]), np.stack([np.arange(50.0), np.zeros(50)], -1)]  # closed, flat
    ends = np.cumsum([len(line) for line in lines])
    points, whole = np.concatenate(lines), np.zeros(ends[-1], bool)
    for begin, end in itertools.pairwise([0, *ends]):
        kernels.thin(points, begin, end - 1, 0.8, whole, np.empty((len(points) + 1, 2), np.int64))
    keep = np.split(whole, ends[:-1])
    for line, stays in zip(lines, keep, strict=True):
        assert stays[[0, -1]].all()
        if len(line) > 1:
            left = line[stays]
            assert segment_distance(line[:, None], left[:-1], np.diff(left, axis=0)).min(1).max() <= 0.8 + 1e-12
    assert 2 < keep[4].sum() < 150
    assert keep[6].sum() == 2


def test_lines_are_cut_into_pieces_of_about_equal_length() -> None:
    """The pieces of a straight line are its rows; each of an outline, which is closed, is shorter than the longest."""
    line = np.stack([np.arange(100.0), np.zeros(100), np.ones(100)], -1)
    outline = np.array([[0.0, 5.0, 0.0], [4.0, 5.0, 0.0], [4.0, 8.0, 0.0]])
    lines, how = [line, outline, outline, line[:1], line, line[:1]], np.array([1, 2, 1, 3, 0, 1])
    start, end, of = kernels.rows(np.concatenate(lines), np.cumsum([len(each) for each in lines]), how, 10.0, 0.1)
    assert np.bincount(of).tolist() == [10, 3, 2, 1]
    np.testing.assert_array_equal(start[:10, 0], 10.0 * np.arange(10))
    np.testing.assert_array_equal(end[:10, 0], [*10.0 * np.arange(1, 10), 99.0])
    np.testing.assert_array_equal(end[10:13], outline[[1, 2, 0]])
    np.testing.assert_array_equal(start[15], end[15])


def test_interpolation_is_that_of_numpy() -> None:
    rng = np.random.default_rng(4)
    line = np.cumsum(rng.uniform(-1, 2, (40, 2)), 0)
    got = kernels.spaced(line, 0.7, 60)
    s = np.append(0.0, np.cumsum(np.hypot(*np.diff(line, axis=0).T)))
    for i in (0, 1):
        np.testing.assert_array_equal(got[:, i], np.interp(0.7 * np.arange(1, 61), s, line[:, i]))


def test_the_candidates_of_a_block_are_its_nearest_rows() -> None:
    """Within reach in order of their distance, of equal ones the first; beyond so many two of three are the nearest."""
    rng = np.random.default_rng(5)
    middle = rng.uniform(-80, 80, (900, 2)).astype(np.float32)
    middle[500:510] = middle[5]
    half = np.zeros((900, 2), np.float32)
    half[:400] = rng.uniform(-4, 4, (400, 2))
    centre = np.array([[0.0, 0.0], [-110.0, 60.0], [400.0, 0.0]], np.float32)
    got = candidates(middle, half, centre)
    sizes = []
    for g, place in enumerate(centre):
        away = segment_distance(place, middle - half, 2 * half)
        near = np.flatnonzero(away < RANGE)
        order = near[np.argsort(away[near], kind="stable")]
        sizes.append(len(order))
        if len(order) <= CANDIDATES:
            assert got[g].tolist() == [*order, *[-1] * (CANDIDATES - len(order))]
            continue
        spread = np.arange(CANDIDATES) % 3 == 2
        np.testing.assert_array_equal(got[g, ~spread], order[:NEARBY])
        rest = order[NEARBY + (len(order) - NEARBY) * np.arange(CANDIDATES - NEARBY) // (CANDIDATES - NEARBY)]
        np.testing.assert_array_equal(np.sort(got[g, spread]), np.sort(rest))
        assert got[g, spread][:2].tolist() == [rest[0], rest[len(rest) // 2]]
    assert sizes[0] > CANDIDATES > sizes[1] > sizes[2] == 0


def ranked(values: np.ndarray, lane: np.ndarray, extra: float) -> np.ndarray:
    """Indices of the `NEAREST` smallest, those that are not the nearest of their lane `extra` later."""
    least = np.array([values[lane == lane[k]].min() for k in range(len(lane))])
    return np.argsort(np.where(values <= least, values, values + np.float32(extra)), kind="stable")[:NEAREST]


@pytest.mark.parametrize(("rows", "lanes"), [(30, 12), (90, 40), (60, 5), (6, 6)])
def test_the_lanes_of_a_cell_are_those_nearest_at_its_probes(rows: int, lanes: int) -> None:
    rng = np.random.default_rng(2)
    middle = rng.uniform(-20, 20, (rows, 2)).astype(np.float32)
    half = rng.uniform(-4, 4, (rows, 2)).astype(np.float32)
    middle[1::2], half[1::2] = middle[::2] + 2.0 * half[::2], half[::2]  # every second one goes on from the one before
    lane = np.sort(rng.integers(0, lanes, rows))
    centre = np.array([[-8.0, 3.0], [30.0, 11.0]], np.float32)
    got = nearest_lanes(middle, half, lane, centre)
    size, start, vector = BLOCK / FINE, middle - half, 2 * half
    for g, place in enumerate(centre):
        away = segment_distance(place, start, vector)
        near = np.flatnonzero(away <= float(away.min()) + BLOCK * np.sqrt(2.0))
        for c in range(FINE * FINE):
            corner = size * (np.array([c % FINE, c // FINE]) - 0.5 * (FINE - 1))
            probes = place + (corner + np.array(PROBES) * 0.5 * size).astype(np.float32)
            rank = np.full(len(near), NEAREST, np.float32)
            for probe in probes:
                gap = segment_distance(probe, start[near], vector[near])
                for at, k in enumerate(ranked(gap, lane[near], FARTHEST)):
                    rank[k] = min(rank[k], at)
            gap = segment_distance(probes[0], start[near], vector[near])
            worth = (rank * np.float32(FARTHEST) + np.minimum(gap, np.float32(0.9 * FARTHEST))).astype(np.float32)
            few = near[ranked(worth, lane[near], SECOND * FARTHEST)]
            np.testing.assert_array_equal(got[g, c, : len(few)], few)
            assert (got[g, c, len(few) :] == -1).all()
