"""Geometry against brute force in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.scenario import CELL
from longhaul.driving.sim.geometry import (
    FREE,
    OPEN,
    Field,
    Relative,
    blocked,
    clearance,
    corners,
    into,
    nearest,
    out_of,
    project,
    separation,
    wrap,
)
from tests.helpers import polygons
from tests.helpers.short_logs import decoded, sample


def test_separation_is_negative_exactly_where_boxes_overlap_and_bounds_their_distance() -> None:
    rng = np.random.default_rng(0)
    own, other = rng.uniform([-5, -5, -4, 0.2, 0.2], [5, 5, 4, 3, 2], (2, 2000, 5))
    difference = other[:, 2] - own[:, 2]
    a = own.astype(np.float32)
    b = other.astype(np.float32)
    x, y = into(b[:, 0] - a[:, 0], b[:, 1] - a[:, 1], np.cos(a[:, 2]), np.sin(a[:, 2]))
    cos, sin = np.cos(difference).astype(np.float32), np.sin(difference).astype(np.float32)
    found = np.asarray(jax.jit(separation)(Relative(x, y, cos, sin, (a[:, 3], a[:, 4]), (b[:, 3], b[:, 4]))))
    whole = np.array([1.0, 1.0, 1.0, 2.0, 2.0])  # half lengths and widths
    away = polygons.distance(polygons.corners(own * whole), polygons.corners(other * whole))
    assert (((found < 0) == (away == 0.0)) | (np.abs(found) < 1e-5)).all()
    assert (found <= away + 1e-5).all()
    assert 300 < (away == 0.0).sum() < 1700  # both verdicts were put to the test


def test_corners_go_round_the_box_and_frames_undo_each_other() -> None:
    x, y = corners(np.float32(2.0), np.float32(1.0))
    assert x.tolist() == [2, 2, -2, -2]
    assert y.tolist() == [1, -1, -1, 1]
    turn = np.cos(np.float32(0.7)), np.sin(np.float32(0.7))
    back = into(*out_of(x, y, *turn), *turn)
    np.testing.assert_allclose(back[0], x, atol=1e-6)
    np.testing.assert_allclose(back[1], y, atol=1e-6)


def test_wrap_keeps_the_angle_and_stays_within_half_a_turn() -> None:
    angle = np.linspace(-20, 20, 1001, dtype=np.float32)
    wrapped = np.asarray(jax.jit(wrap)(angle))
    assert (np.abs(wrapped) <= np.pi + 1e-5).all()
    np.testing.assert_allclose(np.exp(1j * wrapped), np.exp(1j * angle.astype(np.float64)), atol=1e-5)


@pytest.fixture(scope="module")
def fields() -> tuple[Field, list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(1)
    grids = [rng.integers(-3000, 3000, shape).astype(np.int16) for shape in ((7, 13), (31, 5), (2, 2))]
    origins = [np.array(origin, np.float32) for origin in ((-3.0, 4.0), (10.0, -2.0), (0.0, 0.0))]
    packed = distance_field.tile(grids)
    shapes = np.array([g.shape for g in grids], np.int32)
    coded = [100.0 * decoded(distance_field.encode(0.01 * g)) for g in grids]
    flat = Field(*map(jnp.asarray, (packed.cells, packed.tiles, packed.start, shapes, np.stack(origins))))
    return flat, coded, origins


measure = jax.jit(clearance)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_clearance_is_bilinear_between_samples_and_grows_outside(fields, i: int) -> None:
    flat, grids, origins = fields
    grid, origin = grids[i], origins[i].astype(np.float64)
    top = origin + CELL * (np.array(grid.shape[::-1]) - 1)
    points = np.random.default_rng(2).uniform(origin - 2, top + 2, (500, 2))
    nearest = np.clip(points, origin, top)
    expected = sample(grid, origin, nearest) + np.abs(points - nearest).sum(-1)
    field = Field(flat.cells, flat.tiles, flat.start[i], flat.shape[i], flat.origin[i])
    points[0], expected[0] = origin + CELL, grid[1, 1] / 100
    found = measure(field, *points.T.astype(np.float32))
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert float(found[0]) == pytest.approx(expected[0], abs=1e-4)


def test_no_edges_means_on_the_road_everywhere() -> None:
    none = np.zeros(2, np.int32)
    empty = Field(np.zeros(1, np.int8), none[:1], np.int32(0), none, np.zeros(2, np.float32))
    assert measure(empty, np.float32([0.0, 1e3]), np.float32([5.0, -1e3])).tolist() == [-OPEN, -OPEN]


def test_projection_is_the_nearest_of_ten_thousand_points() -> None:
    s = np.arange(13.0)
    angle = 0.15 * s
    line = np.stack([np.cumsum(np.cos(angle)), np.cumsum(np.sin(angle))])  # points exactly one metre apart
    heading = np.arctan2(*np.diff(line, axis=1)[::-1])
    heading = np.append(heading, heading[-1])
    fine = np.linspace(0, 12, 120001)
    curve = np.stack([np.interp(fine, s, line[0]), np.interp(fine, s, line[1])])
    window = jnp.asarray(np.concatenate([line, heading[None]]), jnp.float32)
    rng = np.random.default_rng(3)
    at, side = rng.uniform(1.0, 11.0, 200), rng.uniform(-3.0, 3.0, 200)
    turn = heading[at.astype(int)]
    points = curve[:, np.searchsorted(fine, at)] + side * np.stack([-np.sin(turn), np.cos(turn)])
    places = jax.jit(jax.vmap(lambda x, y: project(window, jnp.int32(20), x, y)))(*points.astype(np.float32))
    for point, aside, s, lateral in zip(points.T, side, np.asarray(places.s), np.asarray(places.lateral), strict=True):
        away = np.hypot(*(curve - point[:, None]))
        assert s - 20 == pytest.approx(fine[away.argmin()], abs=5e-3)
        assert abs(lateral) == pytest.approx(away.min(), abs=5e-2)  # the line's, not the joint's
        assert np.sign(lateral) == np.sign(aside) or away.min() < 1e-3


def test_blocked_finds_the_first_point_of_a_way_in_each_enlarged_box() -> None:
    rng = np.random.default_rng(4)
    boxes = rng.uniform([-8, -8, -3, 0.3, 0.3], [8, 8, 3, 3, 1.5], (40, 5))
    points = rng.uniform(-10, 10, (3, 2, 30))
    along = np.sort(rng.uniform(-5, 40, (3, 30)), axis=1)
    x, y, heading, length, width = (jnp.asarray(c, jnp.float32) for c in boxes.T)
    way = (jnp.asarray(points[:, 0], jnp.float32), jnp.asarray(points[:, 1], jnp.float32))
    find = jax.jit(blocked)
    places = (x, y, jnp.cos(heading), jnp.sin(heading))
    found = np.asarray(find(way, jnp.asarray(along, jnp.float32), places, (length, width), (0.5, 1.0)))
    assert found.shape == (3, 40)
    for w in range(3):
        for n, (cx, cy, h, hl, hw) in enumerate(boxes):
            u = (points[w, 0] - cx) * np.cos(h) + (points[w, 1] - cy) * np.sin(h)
            v = -(points[w, 0] - cx) * np.sin(h) + (points[w, 1] - cy) * np.cos(h)
            inside = (np.abs(u) <= hl + 0.5) & (np.abs(v) <= hw + 1.0) & (along[w] > 0)
            expected = along[w][inside][0] if inside.any() else FREE
            assert found[w, n] == pytest.approx(expected, rel=1e-6)
    assert (found < FREE).any()
    assert (found == FREE).any()


def test_nearest_ranks_as_a_stable_sort_does_and_takes_zero_and_infinity() -> None:
    rng = np.random.default_rng(6)
    values = np.round(rng.uniform(0.0, 100.0, (50, 37)), 1).astype(np.float32)  # with ties
    values[:, rng.integers(0, 37, 4)] = np.inf
    values[:, 11] = 0.0
    found = np.asarray(jax.jit(jax.vmap(partial(nearest, count=8)))(values))
    np.testing.assert_array_equal(found, np.argsort(values, axis=1, kind="stable")[:, :8])
    assert np.asarray(jax.jit(partial(nearest, count=5))(jnp.array([3.0, jnp.inf, 1.0]))).tolist() == [2, 0, 1]
    assert np.asarray(nearest(jnp.array([7.0]), 1)).tolist() == [0]
