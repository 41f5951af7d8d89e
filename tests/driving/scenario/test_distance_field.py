"""The distance to the edge of the road: its field against an oracle, and the lines it is made of."""

from __future__ import annotations

import dataclasses

import numpy as np

from longhaul.driving.datasets.log import EDGE_BOUNDARY, Feature
from longhaul.driving.scenario.distance_field import distance_field, make_edges, signed_distance
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import CELL
from tests.helpers import polygons
from tests.helpers.short_logs import make_log, polyline, sample, straight


def star(rng: np.random.Generator, middle: np.ndarray, size: float, corners: int, *, road_inside: bool) -> np.ndarray:
    """A closed polygon with sharp corners both ways."""
    angle = np.sort(rng.uniform(0, 2 * np.pi, corners))
    line = middle + (size * rng.uniform(0.4, 1.0, corners))[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    line = np.concatenate([line, line[:1]])
    return line if road_inside else line[::-1]


def test_the_field_has_the_sign_and_the_distance_of_an_oracle() -> None:
    rng = np.random.default_rng(5)
    outer = star(rng, np.zeros(2), 60.0, 40, road_inside=True)
    inner = [star(rng, m, 4.0, 9, road_inside=False) for m in (np.array([12.0, 3.0]), np.array([-9.0, -8.0]))]
    # the outline arrives in pieces, as sources cut it
    pieces = [outer[:15], outer[14:30], outer[29:], *inner]
    field, origin = distance_field(make_edges(pieces), np.array([-70.0, -70.0]), np.array([70.0, 70.0]))
    y, x = rng.integers(0, field.shape[0], 12000), rng.integers(0, field.shape[1], 12000)
    true = polygons.signed_distance(origin + CELL * np.stack([x, y], -1), polygons.segments([outer, *inner]))
    got = field[y, x] / 100.0
    # never more than 1 cm of merging and half of rounding
    assert np.abs(np.abs(got) - np.abs(true)).max() < 0.016
    clear = np.abs(true) > 0.011
    assert (np.sign(got) == np.sign(true))[clear].mean() >= 0.9999
    assert 0.1 < (got < 0).mean() < 0.9


def test_the_interpolated_field_is_close_between_its_samples() -> None:
    rng = np.random.default_rng(6)
    lines = [star(rng, np.zeros(2), 40.0, 25, road_inside=True)]
    field, origin = distance_field(make_edges(lines), np.array([-45.0, -45.0]), np.array([45.0, 45.0]))
    points = rng.uniform(-44, 44, (4000, 2))
    error = np.abs(sample(field, origin, points) - polygons.signed_distance(points, polygons.segments(lines)))
    assert np.median(error) < 0.01
    assert np.percentile(error, 99) < 0.25


def test_tiles_leave_out_no_segment_that_is_nearest() -> None:
    rng = np.random.default_rng(7)
    lines = [rng.uniform(-80, 80, (2, 2)) + rng.normal(0, 3, (1, 2)) for _ in range(120)]
    edges = make_edges(lines)
    field, origin = distance_field(edges, np.array([-90.0, -60.0]), np.array([77.0, 90.0]))
    y, x = np.meshgrid(np.arange(0, field.shape[0], 3), np.arange(0, field.shape[1], 3), indexing="ij")
    true = signed_distance(origin + CELL * np.stack([x, y], -1).astype(float), edges)
    assert np.abs(np.abs(field[y, x] / 100.0) - np.abs(true)).max() < 0.0101


def test_the_road_is_left_of_its_edge_and_a_bridge_above_does_not_count() -> None:
    here = Feature(1, EDGE_BOUNDARY, polyline((-60, -4), (150, -4)))
    across = Feature(2, EDGE_BOUNDARY, polyline((25, 60), (25, -60), z=6.0))
    far_climb = Feature(3, EDGE_BOUNDARY, polyline((-60, 60, 4.0), (150, 60, 4.0))[::-1])
    scenario = scenario_from_log(make_log(straight(), features=(here, across, far_climb)))
    points = np.array([[20.0, 0.0], [30.0, 0.0], [30.0, -5.0], [30.0, 25.0]])
    got = sample(scenario.field, scenario.field_origin, points)
    np.testing.assert_allclose(got, [-4.0, -4.0, 1.0, -29.0], atol=0.02)
    level = dataclasses.replace(across, points=across.points - np.array([0.0, 0.0, 6.0]))
    crossed = scenario_from_log(make_log(straight(), features=(here, level)))
    beside = np.array([[24.0, 10.0], [26.0, 10.0]])
    np.testing.assert_allclose(sample(crossed.field, crossed.field_origin, beside), [1.0, -1.0], atol=0.02)


def test_the_field_covers_the_route_and_its_margin() -> None:
    edge = Feature(1, EDGE_BOUNDARY, polyline((-60, -4), (150, -4)))
    scenario = scenario_from_log(make_log(straight(10.0, 41), features=(edge,)), route_margin=30.0)
    high = scenario.field_origin + CELL * (np.array(scenario.field.shape[::-1]) - 1)
    assert (scenario.field_origin <= -30.0).all()
    assert high[0] >= 40.0 + 15.0 + 30.0 - 1.0
    assert high[1] >= 30.0
    assert high[0] <= 40.0 + 15.0 + 30.0 + 1.0
