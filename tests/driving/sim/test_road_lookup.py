"""The road on the device, against brute force in float64 over all segments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.driving.datasets.log import LANE_BIKE, LANE_STREET, Feature
from longhaul.driving.scenario import lane_graph
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.lane_graph import Roadmap
from longhaul.driving.scenario.scenario import NO_ROAD, Road
from longhaul.driving.sim import road_lookup
from longhaul.driving.sim.geometry import FREE
from tests.driving.scenario.test_lane_graph import REAL, ROUNDING, away, case, places, polyline, segments
from tests.helpers.short_logs import ORIGIN, make_log, straight


def on_device(*roads: Road) -> Roadmap:
    return jax.tree.map(jnp.asarray, lane_graph.join(roads))


@jax.jit
def lanes_at(road: Roadmap, scenario: Any, points: Any) -> road_lookup.LanesHere:
    return jax.vmap(lambda p: road_lookup.lanes_at(road, scenario, p[0], p[1]))(points)


def query(road: Roadmap, points: np.ndarray, scenario: int = 0) -> road_lookup.LanesHere:
    found = lanes_at(road, jnp.int32(scenario), jnp.asarray(points, jnp.float32))
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("name", ["generated 3", "generated 8", *REAL])
def test_the_nearest_lane_is_that_of_brute_force(name: str) -> None:
    log, scenario = case(name)
    road = scenario.road
    points = places(scenario, 1000, 2.0)
    found = query(on_device(road), points)
    start, vector = segments(road)
    rows = road.lane >= 0
    gaps = away(points, start[rows], vector[rows])
    nearest = found.distance.argmin(1)
    every = np.arange(len(points))
    error = found.distance[every, nearest] - gaps.min(1)
    assert error.min() > -1e-3
    assert np.mean(error < 1e-3) > 0.995  # in the densest junctions more lanes meet than a cell lists
    assert error.max() < 0.7
    exact = (error < 1e-3) & (gaps.min(1) < 20.0)
    # whose direction, side, number and limit are those of a nearest segment (there may be several)
    same = gaps <= gaps.min(1, keepdims=True) + 1e-3
    length = np.hypot(*vector[rows].T)
    cos, sin = (vector[rows] / length[:, None]).T
    turn = found.cos[every, nearest, None] * cos + found.sin[every, nearest, None] * sin
    assert np.where(same, turn, -1.0).max(1)[exact].min() > 0.99999
    number = road.lane[rows]
    assert (same & (number == found.lane[every, nearest, None])).any(1)[exact].all()
    np.testing.assert_allclose(found.limit, np.where(found.lane >= 0, road.lane_limit[found.lane], 0.0), atol=1e-4)
    inferred = road.lane_flags[found.lane] & lane_graph.LIMIT_INFERRED > 0
    np.testing.assert_array_equal(found.inferred, (found.lane >= 0) & inferred)
    # the source's own lanes are as near, but for merging
    lines = [polyline(feature, log)[:, :2] for feature in log.features if feature.kind in (1, 2, 3)]
    begin = np.concatenate([line[:-1] for line in lines])
    chord = np.concatenate([np.diff(line, axis=0) for line in lines])
    if name.startswith("generated"):  # without other levels
        true = away(points, begin, chord).min(1)
        assert np.abs(found.distance[every, nearest] - true)[exact].max() < lane_graph.MERGE + ROUNDING


@pytest.mark.parametrize("name", ["generated 3", *REAL])
def test_lanes_that_overlap_are_all_found(name: str) -> None:
    scenario = case(name)[1]
    road = scenario.road
    points = places(scenario, 300, 1.0)
    found = query(on_device(road), points)
    start, vector = segments(road)
    rows = road.lane >= 0
    gaps, number = away(points, start[rows], vector[rows]), road.lane[rows]
    missed = total = 0
    for i in range(len(points)):
        inside = set(number[gaps[i] < road_lookup.HALF_WIDTH - 0.01].tolist())
        given = found.lane[i][found.distance[i] <= road_lookup.HALF_WIDTH].tolist()
        assert len(given) == len(set(given))
        assert set(given) <= set(number[gaps[i] < road_lookup.HALF_WIDTH + 0.01].tolist())
        known = found.lane[i] >= 0
        true = [gaps[i][number == lane].min() for lane in found.lane[i][known]]
        assert (found.distance[i][known] > np.array(true) - 1e-3).all()
        total += len(inside)
        missed += len(inside - set(given))
    assert total > 200
    assert missed <= 0.02 * total


def features() -> tuple[Feature, ...]:
    """A lane along x, one against it 3.5 m to its left, a cycle lane 3 m to its right; the first ends at x = 40 m."""
    x = np.arange(-40.0, 41.0, 8.0)
    line = [np.stack([x, np.full(len(x), y), 0.0 * x], 1) + ORIGIN for y in (0.0, 3.5, -3.0)]
    return (
        Feature(5, LANE_STREET, line[0], speed_limit=11.176, junction=True),
        Feature(6, LANE_STREET, line[1][::-1]),
        Feature(7, LANE_BIKE, line[2]),
    )


def test_lanes_around_a_point_have_distance_direction_and_limit() -> None:
    road = scenario_from_log(make_log(straight(), features=features())).road
    found = query(on_device(road), np.array([[3.0, 0.7], [43.0, 4.0], [3.0, 3.5]]))
    order = np.argsort(found.lane, axis=1)[:, ::-1][:, 2::-1]
    assert (np.take_along_axis(found.lane, order, 1) == [0, 1, 2]).all()
    assert (np.sort(found.lane, 1)[:, :-3] == -1).all()
    distance, lateral, cos = (np.take_along_axis(getattr(found, n), order, 1) for n in ("distance", "lateral", "cos"))
    np.testing.assert_allclose(distance[0], [0.7, 2.8, 3.7], atol=0.02)
    np.testing.assert_allclose(lateral[0], [0.7, 2.8, 3.7], atol=0.02)  # left of the second is y < 3.5
    np.testing.assert_allclose(cos[0], [1.0, -1.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(
        distance[1], [5.0, np.hypot(3.0, 0.5), np.hypot(3.0, 7.0)], atol=0.03
    )  # beyond their ends
    np.testing.assert_allclose(lateral[1, 1], -0.5, atol=0.02)
    limit, bike, inferred = (np.take_along_axis(getattr(found, n), order, 1) for n in ("limit", "bike", "inferred"))
    np.testing.assert_allclose(limit[0], [11.18, lane_graph.SLOWEST, 0.0], atol=0.011)  # traffic drives at 10 m/s
    assert bike[0].tolist() == [False, False, True]
    assert (road.lane_flags & lane_graph.JUNCTION > 0).tolist() == [True, False, False]
    assert inferred[0].tolist() == [False, True, False]


def test_far_away_and_without_a_road() -> None:
    road = scenario_from_log(make_log(straight(), features=features())).road
    both = on_device(NO_ROAD, road)
    nothing = query(both, np.array([[0.0, 0.0], [1e5, -1e5]]), 0)
    assert (nothing.distance == FREE).all()
    assert (nothing.lane == -1).all()
    assert not (nothing.bike | nothing.inferred | (nothing.limit > 0)).any()
    far = query(both, np.array([[3.0, 300.0], [3.0, 0.7]]), 1)
    assert far.distance[0].min() == pytest.approx(296.5, abs=0.1)  # true, though of the nearest cell's lanes
    assert far.distance[1].min() == pytest.approx(0.7, abs=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_each_scenario_of_a_bank_has_its_own_road() -> None:
    roads = [case(name)[1].road for name in ("generated 3", "generated 8")]
    points = places(case("generated 8")[1], 50, 2.0)
    alone, among = query(on_device(roads[1]), points), query(on_device(*roads), points, 1)
    jax.tree.map(np.testing.assert_array_equal, alone, among)


@pytest.mark.parametrize("name", ["generated 3", REAL[0]])
def test_pieces_of_road_are_those_around_in_the_agents_frame(name: str) -> None:
    scenario = case(name)[1]
    road, count = scenario.road, 200
    points = places(scenario, 40, 1.0)
    heading = np.random.default_rng(1).uniform(-np.pi, np.pi, len(points))
    packed = on_device(road)

    @jax.jit
    @jax.vmap
    def see(x: Any, y: Any, angle: Any) -> Any:
        seen = road_lookup.pieces(packed, jnp.int32(0), x, y, jnp.cos(angle), jnp.sin(angle), count)
        return road_lookup.describe(seen)

    found = np.asarray(see(*(jnp.asarray(v, jnp.float32) for v in (*points.T, heading)))).astype(float)
    assert found.shape == (len(points), count, road_lookup.ROAD)
    assert np.abs(found).max() <= 1.3
    start, vector = segments(road)
    middle = start + 0.5 * vector
    cell = np.clip(((points - road.corner) / lane_graph.BLOCK).astype(int), 0, np.array(road.directory.shape[::-1]) - 1)
    for i, rows in enumerate(road.near[road.directory[cell[:, 1], cell[:, 0]]][:, :count]):
        there = rows >= 0
        np.testing.assert_array_equal(found[i, :, -1], there)
        assert (found[i][~there] == 0.0).all()
        seen, rows = found[i][there], rows[there]
        place = road_lookup.NEAR * seen[:, :2] / (1.0 - np.abs(seen[:, :2]))  # the inverse of squashing
        half = road_lookup.HALF_SCALE * seen[:, 2:4]
        c, s = np.cos(heading[i]), np.sin(heading[i])
        turned = np.array([[c, s], [-s, c]])  # from the agent's frame
        near = np.hypot(*place.T) < 60.0
        np.testing.assert_allclose((place @ turned + points[i])[near], middle[rows][near], atol=0.01)
        np.testing.assert_allclose(half @ turned, 0.5 * vector[rows], atol=1e-4)
        code = np.rint(3 * seen[:, 4:7]).astype(int) @ [1, 4, 16]
        np.testing.assert_array_equal(code, road.kind[rows])
