"""The road as rows and a grid: against the features they come from, and the routes that follow lanes and paths."""

from __future__ import annotations

import dataclasses
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from longhaul.driving.datasets import log as logs
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import Feature, Log, Malformed
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario import lane_graph
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import CANDIDATES, NO_ROAD, Road, Scenario
from longhaul.driving.shards import shard
from tests.helpers import log_files as made
from tests.helpers.segments import segment_distance
from tests.helpers.short_logs import ORIGIN, make_log, straight

DATA = Path(os.environ.get("LONGHAUL_DATA", Path(__file__).resolve().parents[3] / "../shared/data"))
OVERPASS = "scenarionet/sd_waymo_v1.2_eb4b91b10ca94ff2.pkl"
REAL = ("womd/motion_data_one_example.tfrecord", "womd/motion_data_one_scenario.tfrecord", OVERPASS)
WOMD = (REAL[0], pytest.param(REAL[1], marks=pytest.mark.slow))
ROUNDING = 2 * lane_graph.PLACE_UNIT
"""Metres: of a middle and a half."""


@lru_cache
def case(name: str, agents: int = 16) -> tuple[Log, Scenario]:
    """A log and its scenario: "generated N", or a real file's first; skipped where there is none."""
    if name.startswith("generated"):
        found = generate(int(name.split()[1]))
    else:
        if not (DATA / name).exists():
            pytest.skip(f"no real log {name}: set LONGHAUL_DATA")
        found = next(readers.read(DATA / name))
    return found, scenario_from_log(found, agents=agents)


def polyline(feature: Feature, log: Log) -> np.ndarray:
    """A feature's points in the scenario's frame, float64 [P, 3], closed where it is an outline."""
    points = feature.points - log.tracks.position[log.sdc, log.current]
    closed = feature.kind in (logs.CROSSWALK, logs.SPEED_BUMP)
    return np.concatenate([points, points[:1]]) if closed or len(points) == 1 else points


def segments(road: Road) -> tuple[np.ndarray, np.ndarray]:
    """Starts of rows, and the way to their ends, float64 [M, 2]."""
    middle, half = lane_graph.middles(road).astype(float), lane_graph.halves(road).astype(float)
    return middle - half, 2 * half


def away(points: np.ndarray, start: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Distances [P, M] of points [P, 2] to segments [M, 2]."""
    return segment_distance(points[:, None], start, vector)


def places(scenario: Scenario, count: int, spread: float) -> np.ndarray:
    """Random places [count, 2] around the driven parts of the routes."""
    rng = np.random.default_rng(0)
    ways = [line[: int(length) + 10, :2] for line, length in zip(scenario.route, scenario.route_length, strict=True)]
    ways = np.concatenate([way for way, a in zip(ways, scenario.controlled, strict=True) if a >= 0])
    return ways[rng.integers(0, len(ways), count)] + rng.normal(0.0, spread, (count, 2))


@pytest.mark.parametrize("name", ["generated 3", "generated 8", *WOMD, OVERPASS])
def test_rows_lie_on_their_features_and_run_their_way(name: str) -> None:
    log, scenario = case(name)
    start, vector = segments(scenario.road)
    kinds = {
        code: [f for f in log.features if lane_graph.CODES.get(f.kind) == code]
        for code in set(lane_graph.CODES.values())
    }
    assert set(scenario.road.kind.tolist()) <= {code for code, features in kinds.items() if features}
    for code, features in kinds.items():
        rows = np.flatnonzero(scenario.road.kind == code)
        if not len(rows):
            continue
        lines = [polyline(feature, log)[:, :2] for feature in features]
        begin = np.concatenate([line[:-1] for line in lines])
        chord = np.concatenate([np.diff(line, axis=0) for line in lines])
        for part in (0.0, 0.5, 1.0):
            gap = away(start[rows] + part * vector[rows], begin, chord)
            assert gap.min(1).max() < lane_graph.MERGE + ROUNDING
        length = np.hypot(*vector[rows].T)
        assert length.max() <= 1.6 * lane_graph.LONGEST
        if code == lane_graph.STOP:
            assert (length == 0.0).all()
            continue
        # of the source's segments at a row's middle one runs its way
        direction = vector[rows] / np.maximum(length, 1e-9)[:, None]
        beside = away(start[rows] + 0.5 * vector[rows], begin, chord) < lane_graph.MERGE + ROUNDING
        turn = direction @ (chord / np.maximum(np.hypot(*chord.T), 1e-9)[:, None]).T
        assert (np.where(beside, turn, -1.0).max(1)[length > 1.0] > 0.8).all()


@pytest.mark.parametrize("name", ["generated 3", *WOMD])
def test_no_part_of_a_lane_near_the_routes_is_left_out(name: str) -> None:
    """On flat ground, where no other level is in the way."""
    log, scenario = case(name)
    start, vector = segments(scenario.road)
    points = np.concatenate([polyline(f, log) for f in log.features if f.kind in (1, 2, 3) and len(f.points) > 1])
    ways = np.concatenate([line[:n, :2] for line, n in zip(scenario.route, scenario.route_points, strict=True)])
    near = points[:, :2][away(points[:, :2], ways[:-1], np.zeros((len(ways) - 1, 2))).min(1) < 50.0]
    assert len(near) > 100
    lane = scenario.road.lane >= 0
    assert (away(near, start[lane], vector[lane]).min(1) < lane_graph.MERGE + ROUNDING).all()


def test_lanes_have_their_kind_limit_and_number() -> None:
    log = made.make_log()
    freeway = Feature(120, logs.LANE_FREEWAY, log.features[0].points + np.array([0.0, -3.5, 0.0]))
    bike = Feature(121, logs.LANE_BIKE, log.features[0].points + np.array([0.0, -6.0, 0.0]))
    log = dataclasses.replace(log, features=(*log.features, freeway, bike))
    fast = dataclasses.replace(log.tracks, velocity=log.tracks.velocity * 0.0 + 25.0)  # as if traffic knew no limit
    road = scenario_from_log(dataclasses.replace(log, tracks=fast)).road
    # the five lanes in the order of the features
    assert road.lane.max() == 4
    assert (np.diff(road.lane[road.lane >= 0]) >= 0).all()
    assert (road.lane[: (road.lane >= 0).sum()] >= 0).all()
    np.testing.assert_allclose(road.lane_limit, [20.12, 20.12, 31.30, 31.30, 0.0], atol=0.011)
    inferred = (road.lane_flags & lane_graph.LIMIT_INFERRED) > 0
    assert inferred.tolist() == [False, False, True, True, False]  # at most 70 mph; nothing is known of bicycles
    # a street's inferred limit follows its traffic until driving begins, and nobody after that
    later = np.where(np.arange(len(log.times))[:, None] <= log.current, [[9.0, 12.0]], 30.0)
    for moving, expected in ((1.0, 15.0), (0.5, lane_graph.SLOWEST), (0.0, 20.12), (1.8, 27.0), (3.0, 31.3)):
        slow = dataclasses.replace(log.tracks, velocity=(0.0 * log.tracks.velocity + later) * np.float32(moving))
        road = scenario_from_log(dataclasses.replace(log, tracks=slow)).road
        np.testing.assert_allclose(road.lane_limit, [20.12, 20.12, expected, 31.30, 0.0], atol=0.011)
    assert (road.lane_flags & lane_graph.JUNCTION).tolist() == [0, lane_graph.JUNCTION, 0, 0, 0]
    found = {code: int((road.kind == code).sum()) for code in set(road.kind.tolist())}
    assert found[lane_graph.STOP] == 1
    assert found[lane_graph.CROSSING] == found[lane_graph.BUMP] == 4  # outlines are closed
    assert {lane_graph.BIKE, lane_graph.STREET, lane_graph.FREEWAY, lane_graph.EDGE, lane_graph.SOLID} <= set(found)


@pytest.mark.parametrize(("height", "kept"), [(0.0, True), (2.0, True), (6.0, False)])
def test_other_levels_are_left_out(height: float, kept: bool) -> None:
    x = np.arange(-60.0, 61.0, 4.0)
    own = np.stack([x, 0.0 * x, 0.0 * x], 1)
    across = np.stack([0.0 * x + 10.0, x, np.full(len(x), height)], 1)
    features = tuple(Feature(i, logs.LANE_STREET, line + ORIGIN) for i, line in enumerate((own, across)))
    road = scenario_from_log(make_log(straight(), features=features)).road
    assert len(road.lane_limit) == 1 + kept


def test_the_overpass_keeps_the_level_of_the_route() -> None:
    """Below the ego's road another one passes: its lanes are not there, though they are as near as others that are."""
    log = dataclasses.replace(case(OVERPASS, 1)[0], sdc=21)  # who drives right past the crossing
    scenario = scenario_from_log(log)
    ego = (log.tracks.position[log.sdc] - log.tracks.position[log.sdc, log.current])[log.current :]
    start, vector = segments(scenario.road)
    lane = scenario.road.lane >= 0
    points = np.concatenate([polyline(f, log) for f in log.features if f.kind in (1, 2)])
    gap = away(points[:, :2], ego[:, :2], np.zeros((len(ego), 2)))
    closest = gap.argmin(1)
    known = (gap.min(1) < 40.0) & (closest > 0) & (closest < len(ego) - 1)  # beside the ego's way
    lower = np.abs(points[:, 2] - ego[closest, 2])
    found = away(points[:, :2], start[lane], vector[lane]).min(1)
    assert (found[known & (lower < lane_graph.LEVEL - 0.5)] < lane_graph.MERGE + ROUNDING).all()
    other = known & (lower > lane_graph.BRIDGE + 0.5)
    above = points[lower <= lane_graph.BRIDGE + 0.5]
    crossing = away(points[other, :2], above[:, :2], np.zeros((len(above), 2))).min(1) < 2.0
    assert (~crossing).sum() > 200
    assert (found[other][~crossing] > 1.0).all()


@pytest.mark.parametrize("name", ["generated 3", "generated 8", *REAL])
def test_candidates_hold_nearly_all_of_the_nearest_and_reach_far(name: str) -> None:
    scenario = case(name)[1]
    road = scenario.road
    start, vector = segments(road)
    points = places(scenario, 100, 1.0)
    gaps = away(points, start, vector)
    cell = np.clip(((points - road.corner) / lane_graph.BLOCK).astype(int), 0, np.array(road.directory.shape[::-1]) - 1)
    block = road.directory[cell[:, 1], cell[:, 0]]
    held, reach, spare = [], [], []
    for gap, rows in zip(gaps, road.near[block], strict=True):
        nearest = np.argsort(gap)[:200]
        held.append(np.isin(nearest[gap[nearest] < lane_graph.RANGE - lane_graph.BLOCK], rows).mean())
        listed = rows[rows >= 0]
        assert len(set(listed.tolist())) == len(listed)
        reach.append(gap[listed[:200]].max())
        spare.append((gap < lane_graph.RANGE).sum() > CANDIDATES + 50)
    assert np.mean(held) > 0.95
    assert min(held) > 0.85
    assert np.array(reach)[spare].min(initial=np.inf) > 45.0  # where many lie around, the first 200 are thinned


def test_cells_without_a_block_use_the_nearest_one() -> None:
    road = case("generated 3")[1].road
    row, column = np.indices(road.directory.shape)
    every = np.stack([column, row], -1).reshape(-1, 2)
    square = ((every[:, None] - road.cells) ** 2).sum(-1)
    chosen = np.take_along_axis(square, road.directory.reshape(-1, 1).astype(int), 1)[:, 0]
    np.testing.assert_array_equal(chosen, square.min(1))
    own = road.directory[road.cells[:, 1], road.cells[:, 0]]
    np.testing.assert_array_equal(own, np.arange(len(road.cells)))


def test_long_sparse_and_broken_lines() -> None:
    point = np.array([[5.0, 1.0, 0.0]])
    features = (
        Feature(1, logs.LANE_STREET, np.array([[-50.0, 0.0, 0.0], [150.0, 0.0, 0.0]]) + ORIGIN),
        Feature(2, logs.LANE_STREET, point + ORIGIN),
        Feature(3, logs.EDGE_BOUNDARY, np.repeat(point, 3, 0) + ORIGIN),
        Feature(4, logs.CROSSWALK, np.zeros((0, 3))),
        Feature(5, logs.DRIVEWAY, np.repeat(point, 3, 0) + ORIGIN),
        Feature(6, logs.LANE_STREET, np.array([[1e6, 0.0, 0.0], [1e6, 9.0, 0.0]]) + ORIGIN),
    )
    scenario = scenario_from_log(make_log(straight(), features=features))
    road = scenario.road
    assert road.lane_limit.shape == (1,)
    start, vector = segments(road)
    end = start + vector
    np.testing.assert_allclose(start[1:], end[:-1], atol=ROUNDING)  # nothing is missing between its parts
    assert (np.hypot(*vector.T) <= lane_graph.LONGEST + ROUNDING).all()
    far = scenario.route[0, : scenario.route_points[0], 0].max() + lane_graph.REACH
    assert end[-1, 0] == pytest.approx(min(150.0, far), abs=lane_graph.LONGEST)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("half", 4096, "a piece of road that is too long"),
        ("kind", -1, "a kind of road that does not exist"),
        ("lane", 9999, "a lane that does not exist"),
        ("directory", 9999, "a block that does not exist"),
        ("lane_limit", 99.0, "a speed limit that cannot be"),
        ("lane_flags", 4, "a flag of a lane that does not exist"),
        ("corner", np.inf, "a grid nowhere"),
    ],
)
def test_damaged_roads_are_refused(column: str, value: float, message: str) -> None:
    scenario = case("generated 3")[1]
    array = getattr(scenario.road, column).copy()
    array.reshape(-1)[-1] = value
    record = shard.pack(scenario._replace(road=scenario.road._replace(**{column: array})))
    with pytest.raises(Malformed, match=message):
        shard.unpack(record)
    backwards = scenario.road._replace(lane=scenario.road.lane[::-1].copy())
    with pytest.raises(Malformed, match="lanes that are out of order"):
        shard.unpack(shard.pack(scenario._replace(road=backwards)))


def test_a_bank_of_roads_and_of_none() -> None:
    one, other = (case(name)[1].road for name in ("generated 3", "generated 8"))
    found = lane_graph.join([one, NO_ROAD, other])
    assert found.head.shape == (3, 6)
    assert found.head[:, 0].tolist() == [1, 0, 1 + len(one.kind)]
    assert found.head[:, 5].tolist() == [1, 0, 1 + len(one.cells)]
    assert len(found.place) == 1 + len(one.kind) + len(other.kind)
    assert (found.points[0] == -1).all()
    assert (found.lanes[: lane_graph.FINE**2] == -1).all()
    low = (found.place[found.head[2, 0] :].astype(np.int64) << 48 >> 48).astype(int)
    np.testing.assert_array_equal(low, other.place[:, 0])
    np.testing.assert_array_equal(found.place[found.head[2, 0] :] >> 16, other.place[:, 1])


def test_a_scenario_has_few_bytes_of_road() -> None:
    found = lane_graph.join([case(REAL[0], 64)[1].road])
    assert sum(column.nbytes for column in found) < 120_000
