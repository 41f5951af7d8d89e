"""nuPlan: projection, shapes, borders of areas, windows, maps, and damage; fixtures to the published schema."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longhaul.driving import inspect_logs
from longhaul.driving.datasets import geopackage, lane_boundaries, nuplan, readers
from longhaul.driving.datasets.geopackage import transverse_mercator, utm
from longhaul.driving.datasets.log import CROSSWALK, EDGE_BOUNDARY, STOP_SIGN, BadData, Log, Malformed
from longhaul.driving.scenario.distance_field import make_edges, signed_distance
from longhaul.driving.scenario.from_log import scenario_from_log
from tests.helpers import log_files as made
from tests.helpers import nuplan_files as fixture
from tests.helpers.short_logs import sample


@pytest.fixture(autouse=True)
def no_maps_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nuplan.FOLDER, raising=False)


@pytest.mark.parametrize(
    ("longitude", "latitude", "epsg", "easting", "northing"),
    [
        (-115.1728, 36.1147, 32611, 664450.9751, 3998216.3353),
        (-79.9428, 40.4119, 32617, 589698.5359, 4474012.2310),
        (-71.0430, 42.3478, 32619, 331724.7107, 4690414.6430),
        (103.7874, 1.2996, 32648, 365092.3276, 143677.4771),
        (151.2153, -33.8568, 32756, 334900.5697, 6252288.7529),
        (-3.0, 0.0, 32630, 500000.0, 0.0),
        (179.9, 10.0, 32601, *utm(np.array(-180.1), np.array(10.0), 32601)),
    ],
)
def test_places_that_the_proj_library_knows(
    longitude: float, latitude: float, epsg: int, easting: float, northing: float
) -> None:
    found = utm(np.array(longitude), np.array(latitude), epsg)
    np.testing.assert_allclose(found, (easting, northing), rtol=0, atol=1e-4)


def test_the_projection_gives_snyders_example() -> None:
    """Snyder, "Map projections: a working manual", USGS 1395, 1987, p. 269: UTM on Clarke's ellipsoid of 1866."""
    flattening = 1 - np.sqrt(1 - 0.00676866)
    x, y = transverse_mercator(np.radians(1.5), np.radians(40.5), 6378206.4, flattening)
    assert (0.9996 * x, 0.9996 * y) == pytest.approx((127106.5, 4484124.4), abs=0.06)


def test_the_central_meridian_is_as_long_as_it_is() -> None:
    """y on the meridian is the integral of its radius of curvature; the projection is conformal beside it."""
    radius, flattening = 6378137.0, 1 / 298.257223563
    squared = flattening * (2 - flattening)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    for latitude in (0.3, 0.8, 1.3):
        at = latitude * (nodes + 1) / 2
        arc = (weights * radius * (1 - squared) / (1 - squared * np.sin(at) ** 2) ** 1.5).sum() * latitude / 2
        assert float(transverse_mercator(0.0, latitude, radius, flattening)[1]) == pytest.approx(arc, abs=1e-5)
        step, curve = 1e-5, np.sqrt(1 - squared * np.sin(latitude) ** 2)
        here, north, east = (
            np.array(transverse_mercator(0.05 + right, latitude + up, radius, flattening))
            for right, up in ((0, 0), (0, step), (step, 0))
        )
        up = (north - here) / (radius * (1 - squared) / curve**3)
        right = (east - here) / (radius / curve * np.cos(latitude))
        assert np.linalg.norm(up) == pytest.approx(np.linalg.norm(right), rel=1e-4)
        assert abs(up @ right) < 1e-4 * np.linalg.norm(up) ** 2


def test_other_projections_are_refused() -> None:
    for epsg in (4326, 32600, 32661, 32700, 32761, 3857):
        with pytest.raises(ValueError, match=f"EPSG:{epsg} is no zone"):
            utm(np.zeros(1), np.zeros(1), epsg)


LINE = np.array([[1.0, 2.0], [3.0, 4.5], [5.0, -6.0]])


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("z", [False, True])
def test_shapes_come_back(big: bool, z: bool) -> None:
    hole = LINE / 10
    for box in (None, (1.0, 5.0, -6.0, 4.5)):
        for kind, parts, expected in (
            (2, LINE, [[LINE]]),
            (3, [LINE, hole], [[LINE, hole]]),
            (5, [LINE, hole], [[LINE], [hole]]),
            (6, [[LINE], [hole, LINE]], [[LINE], [hole, LINE]]),
        ):
            data = fixture.blob(fixture.wkb(kind, parts, big=big, z=z), box, big=big)
            found = geopackage.shapes(data)
            assert [len(each) for each in found] == [len(each) for each in expected]
            for one, other in zip(found, expected):
                np.testing.assert_array_equal(np.concatenate(one), np.concatenate(other))
            assert geopackage.envelope(data) == box
            for cut in range(len(data)):
                with pytest.raises(Malformed):
                    geopackage.shapes(data[:cut])


def test_odd_shapes_are_read_or_refused() -> None:
    flags = bytearray(fixture.blob(fixture.wkb(2, LINE)))
    flags[3] |= 0x10
    assert geopackage.shapes(bytes(flags)) == []  # marked as empty
    older = fixture.blob(struct.pack("<BII", 1, 0xC0000002, 1) + struct.pack("<4d", 1, 2, 3, 4))
    np.testing.assert_array_equal(geopackage.shapes(older), [[[[1, 2]]]])  # z and m as flags
    point = fixture.blob(struct.pack("<BIdd", 1, 1, 7, 8))
    np.testing.assert_array_equal(geopackage.shapes(point), [[[[7, 8]]]])
    nested = b"".join(struct.pack("<BII", 1, 7, 1) for _ in range(5000))
    for wrong in (nested, struct.pack("<BII", 1, 6, 2**32 - 1), struct.pack("<BII", 1, 2, 2**31), b"\x07\0\0\0\0\0"):
        with pytest.raises(Malformed):
            geopackage.shapes(fixture.blob(wrong))
    with pytest.raises(Malformed, match="does not begin"):
        geopackage.shapes("text")  # type: ignore[arg-type]


def test_the_border_of_areas_that_overlap_and_have_holes() -> None:
    """Signs of points against the areas themselves, away from all borders."""
    square, other = fixture.ring(0, 40, 0, 40), fixture.ring(30, 60, 10, 50)
    areas = [[square, fixture.ring(5, 15, 5, 15)], [other[::-1], fixture.ring(45, 50, 30, 35)[::-1]], [square[:2]]]
    found = lane_boundaries.edges([1, 2, 3], areas)
    assert {each.id for each in found} == {1, 2}
    assert {each.kind for each in found} == {EDGE_BOUNDARY}
    points = np.random.default_rng(0).uniform(-10, 70, (3000, 2))
    edges = make_edges([each.points for each in found])
    distance = signed_distance(points, edges)
    clear = np.abs(distance) > 1.5  # where outlines cross, borders end within a piece of a metre
    closed = [[np.concatenate([ring, ring[:1]]) for ring in area] for area in areas[:2]]
    on_road = np.logical_or.reduce([lane_boundaries.inside(points, area) for area in closed])
    assert clear.sum() > 1500
    np.testing.assert_array_equal(distance[clear] < 0, on_road[clear])


def test_areas_that_cost_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_boundaries, "MOST_PAIRS", 1000)
    with pytest.raises(Malformed, match="overlap too much"):
        lane_boundaries.edges(range(9), [[fixture.ring(each, each + 100, each, each + 100)] for each in range(9)])


SHORT = made.make_log(31, 0)

ORDER = [2, 0, 1, 4, 5, 3]
"""Tracks of the made log as the reader gives them: the ego, then by first sight."""


def expected_log(log: Log) -> Log:
    """What the reader can know of it: sizes of the ego are the format's, heights are gone."""
    tracks = log.tracks
    position = np.where(tracks.valid[..., None], tracks.position + fixture.ORIGIN, 0.0)
    position[..., 2] = 0.0
    size = tracks.size.copy()
    size[log.sdc] = nuplan.EGO_SIZE
    fields = {"id": tracks.id.copy(), "kind": tracks.kind, "position": position, "heading": tracks.heading}
    fields |= {"velocity": tracks.velocity, "size": size, "valid": tracks.valid}
    fields["id"][log.sdc] = -1
    return replace(log, tracks=replace(tracks, **{name: values[ORDER] for name, values in fields.items()}))


def test_the_log_comes_back(tmp_path: Path) -> None:
    given = made.make_log()
    ((kind, log),) = readers.scan(fixture.write(given, tmp_path))
    expected = expected_log(given)
    assert (kind, log.source, log.current, log.sdc, log.predict) == ("nuplan", "nuplan", 0, 0, ())
    assert log.id == fixture.frame_token(0).hex()
    np.testing.assert_allclose(log.times, given.times, rtol=0, atol=1e-6)
    for name in ("id", "kind", "size", "valid"):
        np.testing.assert_array_equal(getattr(log.tracks, name), getattr(expected.tracks, name), err_msg=name)
    np.testing.assert_array_equal(log.tracks.position[1:], expected.tracks.position[1:])
    for name in ("position", "heading", "velocity"):
        one, other = getattr(log.tracks, name), getattr(expected.tracks, name)
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6, err_msg=name)
    assert log.lights.lane.tolist() == [102, 101]
    np.testing.assert_array_equal(log.lights.valid, given.lights.valid)
    states = np.where(given.lights.state == 7, 4, given.lights.state)
    np.testing.assert_array_equal(log.lights.state, np.where(given.lights.valid, states, 0))
    starts = np.array([[100.0, made.EAST, 0], [0.0, made.EAST, 0]]) + fixture.ORIGIN
    np.testing.assert_allclose(log.lights.position, starts, atol=1e-6)


def test_the_map_comes_with_it(tmp_path: Path) -> None:
    given = made.make_log()
    (log,) = readers.read(fixture.write(given, tmp_path))
    for lane in given.features[:3]:
        (found,) = (each for each in log.features if each.id == lane.id)
        np.testing.assert_allclose(found.points[:, :2], lane.points[:, :2] + fixture.ORIGIN[:2], atol=1e-6)
        assert found.kind == lane.kind
    about = {each.id: (each.entry, each.exit, each.speed_limit) for each in log.features if each.id in (101, 102, 103)}
    assert about == {101: ((), (102,), 20.1168), 102: ((101,), (120,), 20.1168), 103: ((), (), None)}
    assert [(each.id, each.kind) for each in log.features if each.kind in (6, 7)] == [(31, 7), (33, 6)]
    (sign,) = (each.points[0] - fixture.ORIGIN for each in log.features if each.kind == STOP_SIGN)
    np.testing.assert_allclose(sign, [99.0, -1.75, 0.0], atol=1e-6)
    (crossing,) = (each for each in log.features if each.kind == CROSSWALK)
    assert len(crossing.points) == 4
    edges = make_edges([each.points - fixture.ORIGIN for each in log.features if each.kind == EDGE_BOUNDARY])
    points = np.array(
        [[50, 0], [50, -3], [100, 0], [155, 2], [195, 0], [50, -4], [151, 0], [151, 5], [201, 0], [-1, 0]]
    )
    expected = [-3.5, -0.5, -3.5, -1.5, -3.5, 0.5, 1.0, 1.5, 1.0, 1.0]
    np.testing.assert_allclose(signed_distance(points.astype(float), edges), expected, atol=1e-4)


def test_it_compiles_to_a_scenario(tmp_path: Path) -> None:
    """The ego drives on the road, meets its light, and the road's field has its sign."""
    (log,) = readers.read(fixture.write(made.make_log(), tmp_path))
    scenario = scenario_from_log(log, agents=2)
    assert scenario.steps == 91
    assert scenario.route_length[0] == pytest.approx(90.0, abs=0.05)
    path = scenario.pose[4:, 0, :2]  # it begins at the road's end
    assert (sample(scenario.field, scenario.field_origin, path) < -1.5).all()
    off = path - [0.0, 4.0]
    assert (sample(scenario.field, scenario.field_origin, off) > 1.5).all()
    assert scenario.light_s.shape[1] > 0
    assert scenario.velocity[0, 0] == pytest.approx([10.0, 0.0], abs=1e-5)


def long_log(seconds: float) -> Log:
    """The made log for so long; the ego goes there and back."""
    log = made.make_log(round(seconds * 10) + 1, 0)
    position = log.tracks.position.copy()
    position[..., 0] = 100.0 - np.abs(position[..., 0] % 200.0 - 100.0)
    return replace(log, tracks=replace(log.tracks, position=position))


def windows(path: Path) -> Iterator[tuple[int, int]]:
    """First step and number of steps of each log of a file."""
    first = {fixture.frame_token(step).hex(): step for step in range(2000)}
    for log in readers.read(path):
        assert log.times[0] == 0
        np.testing.assert_allclose(np.diff(log.times), 0.1, atol=0.021)
        yield first[log.id], len(log.times)


def test_windows_are_scenes_cut_at_20_seconds_and_at_gaps(tmp_path: Path) -> None:
    """Three scenes: 25 s, cut at 20; 1.5 s, too short; 4 s."""
    scenes = [0] * 250 + [1] * 15 + [2] * 41
    path = fixture.write(long_log(30.5), tmp_path, scenes)
    assert list(windows(path)) == [(0, 201), (201, 49), (265, 41)]
    with closing(sqlite3.connect(path)) as db, db:  # a gap of a second within the last
        db.execute(
            "UPDATE lidar_pc SET timestamp = timestamp + 1000000 WHERE timestamp > ?", (fixture.BEGIN + 28_480_000,)
        )
    assert list(windows(path)) == [(0, 201), (201, 49), (285, 21)]
    with closing(sqlite3.connect(path)) as db, db:  # no scenes at all
        db.execute("UPDATE lidar_pc SET scene_token = NULL")
    assert [count for _, count in windows(path)] == [201, 84, 21]


def test_uneven_times_and_ten_hertz(tmp_path: Path) -> None:
    log = long_log(8.0)
    path = fixture.write(log, tmp_path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE lidar_pc SET timestamp = timestamp + (timestamp / 50000 * 7919) % 17001 - 8500")
    ((_, count),) = windows(path)
    assert count == 81
    (jittered,) = readers.read(path)
    np.testing.assert_allclose(jittered.times, log.times, atol=0.018)
    seen = log.tracks.valid[0]
    expected = log.tracks.position[0, seen, 0] + fixture.ORIGIN[0]  # of the right point cloud, none 7 m beside it
    np.testing.assert_allclose(jittered.tracks.position[1, seen, 0], expected, atol=1e-6)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM lidar_pc WHERE (timestamp - ?) % 100000 BETWEEN 40000 AND 60000", (fixture.BEGIN,))
    ((_, count),) = windows(path)
    assert count == 81


def test_where_maps_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SHORT
    deep = tmp_path / "data" / "splits" / "mini"
    deep.mkdir(parents=True)
    path = fixture.write(log, deep)
    assert len(list(readers.read(path))) == 1
    maps = tmp_path / "data" / "maps"
    (deep / "maps").rename(maps)
    assert len(list(readers.read(path))) == 1  # above the log
    maps.rename(tmp_path / "elsewhere")
    with pytest.raises(
        BadData, match=rf"its map '{fixture.CITY}' or 'las_vegas' is not beside it: set LONGHAUL_NUPLAN"
    ):
        list(readers.read(path))
    monkeypatch.setenv(nuplan.FOLDER, str(tmp_path / "elsewhere"))
    assert len(list(readers.read(path))) == 1
    city = tmp_path / "elsewhere" / fixture.CITY
    for version in ("9.9.1", "9.17.2"):
        (city / version).mkdir()
        (city / version / "map.gpkg").write_bytes(b"")
    assert nuplan.find_map(path, [fixture.CITY]).parent.name == "9.17.2"
    with pytest.raises(BadData, match=r"9.17.2/map.gpkg: no usable map of nuPlan"):
        list(readers.read(path))
    monkeypatch.setenv(nuplan.FOLDER, str(tmp_path / "nowhere"))
    with pytest.raises(BadData, match=r"is not in .*nowhere, which LONGHAUL_NUPLAN_MAPS names"):
        list(readers.read(path))
    with pytest.raises(BadData, match="the log names none"):
        nuplan.find_map(path, ["../../etc", "/etc", ".", ""])


def test_a_log_is_counted_by_kinds(tmp_path: Path) -> None:
    path = fixture.write(made.make_log(), tmp_path)
    report = inspect_logs.inspect([str(tmp_path)])
    assert [(each["path"], each["format"], each["error"]) for each in report["files"]] == [(str(path), "nuplan", None)]
    (found,) = report["files"][0]["scenarios"]
    expected = {"steps": 91, "tracks": 6, "vehicles": 3, "pedestrians": 1, "cyclists": 1, "others": 1, "sdc_index": 0}
    expected |= {"valid_steps": 6 * 91 - 10 - 5, "lanes": 3, "road_lines": 2, "road_edges": 3, "crosswalks": 1}
    expected |= {"stop_signs": 1, "speed_bumps": 0, "lights_max": 2, "tracks_to_predict": None}
    assert {name: found[name] for name in expected} == expected


def test_a_map_is_no_log(tmp_path: Path) -> None:
    fixture.write(SHORT, tmp_path)
    (path,) = tmp_path.glob("maps/*/*/map.gpkg")
    with pytest.raises(BadData, match="is a GeoPackage, a map and no log"):
        list(readers.read(path))


CHANGES = {
    "DROP TABLE lidar_box": "it has no table lidar_box",
    "DELETE FROM lidar_pc": "no point clouds with poses",
    "DELETE FROM ego_pose": "no point clouds with poses",
    "DELETE FROM lidar_pc WHERE timestamp % 1000000 > 300000": "no recording of 2 s or more without a gap",
    "UPDATE lidar_pc SET timestamp = 'noon'": "table lidar_pc or ego_pose holds something else than numbers",
    "UPDATE ego_pose SET x = NULL": "not finite",
    "UPDATE ego_pose SET x = 9e99": "far beyond",
    "UPDATE lidar_box SET x = x'00ff'": "table lidar_box holds something else",
    "UPDATE lidar_box SET width = -3": "size is negative",
    "UPDATE lidar_box SET vx = 1e200": "velocity is",
    "UPDATE log SET map_version = NULL, location = NULL": "the log names none",
    "ALTER TABLE lidar_box RENAME COLUMN yaw TO roll": "table lidar_box cannot be read: no such column",
    # views that would never end, or run on every row
    "ALTER TABLE track RENAME TO t2; CREATE VIEW track AS WITH RECURSIVE n(token, category_token) AS (SELECT 1, 1 "
    "UNION ALL SELECT token + 1, 1 FROM n) SELECT * FROM n": "it has no table track",
    "DROP TABLE track; CREATE TABLE track (token BLOB, category_token BLOB GENERATED ALWAYS AS "
    "(hex(zeroblob(90000000)))); INSERT INTO track VALUES (1)": "table track computes its column category_token",
}

MAP_CHANGES = {
    "DROP TABLE meta": "it has no table meta",
    "DELETE FROM meta": "does not name the projection",
    "UPDATE meta SET value = 'epsg:3857' WHERE fid = 2": "EPSG:3857 is no zone",
    "DROP TABLE gpkg_geometry_columns": "no table gpkg_geometry_columns",
    "UPDATE gpkg_geometry_columns SET srs_id = 3857": "in EPSG:3857, not in degrees",
    "DELETE FROM gpkg_geometry_columns WHERE table_name = 'baseline_paths'": "no layer baseline_paths",
    "DROP TABLE lanes_polygons": "no table lanes_polygons",
    "UPDATE road_segments SET geom = x'00112233445566778899'": "does not begin as a GeoPackage's",
    "UPDATE road_segments SET geom = 'a text'": "does not begin",
}


@pytest.mark.parametrize(("change", "message"), [*CHANGES.items(), *MAP_CHANGES.items()])
def test_databases_that_are_no_logs_or_maps(tmp_path: Path, change: str, message: str) -> None:
    path = fixture.write(SHORT, tmp_path)
    (chart,) = tmp_path.glob("maps/*/*/map.gpkg")
    with closing(sqlite3.connect(chart if change in MAP_CHANGES else path)) as db, db:
        db.executescript(change)
    with pytest.raises(BadData, match=message) as caught:
        list(readers.read(path))
    start = f"{chart}: no usable map of nuPlan: " if change in MAP_CHANGES else str(path)
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_layers_that_a_map_may_lack(tmp_path: Path) -> None:
    path = fixture.write(SHORT, tmp_path)
    (where,) = tmp_path.glob("maps/*/*/map.gpkg")
    with closing(sqlite3.connect(where)) as db, db:
        for layer in ("crosswalks", "stop_polygons", "boundaries", *nuplan.DRIVABLE[:3]):
            db.execute("DELETE FROM gpkg_geometry_columns WHERE table_name = ?", (layer,))
    (log,) = readers.read(path)
    assert {each.id for each in log.features} == {101, 102, 103}


def test_a_query_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fixture.write(SHORT, tmp_path)
    monkeypatch.setattr(geopackage, "FEWEST_STEPS", 0)
    monkeypatch.setattr(geopackage, "STEPS_PER_BYTE", 0)
    monkeypatch.setattr(geopackage, "STEPS_PER_CALL", 1)
    with pytest.raises(BadData, match="interrupted"):
        list(readers.read(path))
