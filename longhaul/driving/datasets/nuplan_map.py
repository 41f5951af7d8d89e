"""nuPlan's maps, map.gpkg -> features and where lights stand, in the metres of the logs (UTM).

Source: the tables and columns as the nuPlan devkit documents and reads them. Shapes are in degrees and are projected as
the layer `meta` says. What becomes what:

    baseline_paths                         lanes, by lane_fid (lanes_polygons) or lane_connector_fid (lane_connectors)
    boundaries                             lines: broken (boundary_type_fid 0) or solid (2) white; others are virtual
    crosswalks, speed_bumps                as they are
    stop_polygons of type 1                stop signs, at their middle
    road_segments, intersections,
    generic_drivable_areas, carpark_areas  road edges: the border of their union

A connector leaves the lane `exit_lane_fid` and enters the lane `entry_lane_fid`. The maps have no heights: z is 0. Ids
are those of the layers; lanes and connectors share one numbering, the other layers have their own.
"""

from __future__ import annotations

import math
import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.datasets import geopackage
from longhaul.driving.datasets.geopackage import Shape, utm
from longhaul.driving.datasets.lane_boundaries import edges
from longhaul.driving.datasets.log import (
    CROSSWALK,
    FASTEST,
    LANE_BIKE,
    LANE_STREET,
    SPEED_BUMP,
    STOP_SIGN,
    BadData,
    Feature,
    Malformed,
)

FOLDER = "LONGHAUL_NUPLAN_MAPS"
"""The environment variable that says where the maps are."""

BESIDE = ("", "maps", "nuplan-maps-v1.0", "nuplan-maps-v1.1")
"""Else: these, in the folder of a log or one of the four above it."""

DEGREES = 4326

BIKE = 1
"""`lane_type_fid` of a lane for bicycles."""

LINES = {0: 6, 2: 7}
"""`boundary_type_fid` as kinds of road line."""

STOP_TYPE = 1
"""`stop_polygon_type_fid` of a stop sign; the others are lights, crossings, turns and yields."""

DRIVABLE = ("road_segments", "intersections", "generic_drivable_areas", "carpark_areas")


class Map(NamedTuple):
    features: tuple[Feature, ...]
    boxes: np.ndarray  # float64 [features, 4]: least x, least y, greatest x, greatest y
    starts: dict[int, np.ndarray]  # of each lane: float64 [3]


class Row(NamedTuple):
    """One row of a layer: its values by column, and its shapes in metres."""

    values: dict[str, Any]
    shapes: list[Shape]


def find(log: Path, names: Sequence[str]) -> Path:
    """The map.gpkg of the first of `names` (of maps or places) that has one, for the log at `log`; `BadData`
    where none is found. Of several versions the highest."""
    named = [name for name in names if re.fullmatch(r"[\w-][\w.-]{0,100}", name)]
    told = os.environ.get(FOLDER)
    if told:
        folders = [Path(told).expanduser()]
    else:
        folders = [parent / each for parent in list(log.resolve().parents)[:5] for each in BESIDE]
    for folder in folders:
        for name in named:
            found = [*folder.glob(f"{name}/*/map.gpkg"), *folder.glob(f"{name}/map.gpkg"), *folder.glob(f"{name}.gpkg")]
            if found:
                return max(found, key=_version)
    where = f"in {told}, which {FOLDER} names" if told else "beside it"
    raise BadData(
        f"{log}: its map {' or '.join(map(repr, named)) or '(the log names none)'} is not {where}: "
        f"set {FOLDER} to the folder that holds nuPlan's maps"
    )


def _version(path: Path) -> tuple[list[int], str]:
    return [int(part) for part in re.findall(r"\d+", path.parent.name)], str(path)


def read(path: Path, low: np.ndarray, high: np.ndarray) -> Map:
    """Content of the map at `path` within, or reaching into, the box `low` .. `high` (metres, [2]); `Malformed` where
    it
    is no map."""
    with closing(geopackage.connect(path)) as connection:
        layers = geopackage.layers(connection)
        reader = _Reader(connection, layers, _projection(connection), low, high)
        features = [*_lanes(reader), *_lines(reader), *_areas(reader), *_edges(reader)]
    boxes = [(*each.points[:, :2].min(0), *each.points[:, :2].max(0)) for each in features]
    starts = {each.id: each.points[0] for each in features if each.kind in (LANE_STREET, LANE_BIKE)}
    return Map(tuple(features), np.array(boxes).reshape(-1, 4), starts)


class _Reader(NamedTuple):
    connection: sqlite3.Connection
    layers: dict[str, tuple[str, int]]
    projection: int  # EPSG
    low: np.ndarray
    high: np.ndarray


def _projection(connection: sqlite3.Connection) -> int:
    for part in geopackage.rows(connection, ["meta"], "SELECT key, value FROM meta"):
        for key, value in part:
            number = re.fullmatch(r"epsg:(\d{1,6})", str(value).strip().lower())
            if key == "projectedCoordSystem" and number:
                return int(number[1])
    raise Malformed("its table meta does not name the projection (projectedCoordSystem)")


def _rows(reader: _Reader, layer: str, *, needed: bool = False) -> list[Row]:
    """The rows of a layer whose shapes reach into the box; none where there is no such layer."""
    if layer not in reader.layers:
        if needed:
            raise Malformed(f"it has no layer {layer}")
        return []
    column, system = reader.layers[layer]
    kept: list[Row] = []
    for values in _table(reader.connection, layer):
        blob = values.pop(column, None)
        if blob is None:
            continue
        around = geopackage.envelope(blob)
        if around is not None and np.isfinite(around).all():
            x0, x1, y0, y1 = around
            corners = _metres(np.array([[x0, y0], [x1, y0], [x0, y1], [x1, y1]]), system, reader.projection)
            if not _meet(corners, reader.low - 1.0, reader.high + 1.0):  # its sides may bend a little
                continue
        found = [[_metres(part, system, reader.projection) for part in shape] for shape in geopackage.shapes(blob)]
        found = [shape for shape in found if len(shape[0]) and _meet(shape[0], reader.low, reader.high)]
        if found:
            kept.append(Row(values, found))
    return kept


def _table(connection: sqlite3.Connection, name: str) -> list[dict[str, Any]]:
    """All rows of a table by column; its key is `fid`, whatever it is called."""
    if name not in geopackage.tables(connection):
        raise Malformed(f"it has no table {name}")
    quoted = '"' + name.replace('"', '""') + '"'
    try:
        columns = [str(row[1]) for row in connection.execute(f"PRAGMA table_info({quoted})")]
    except geopackage.BROKEN as error:
        raise Malformed(f"table {name} cannot be read: {error}") from error
    parts = geopackage.rows(connection, [name], f"SELECT rowid, * FROM {quoted}")
    return [dict(zip(columns, row[1:])) | {"fid": row[0]} for part in parts for row in part]


def _metres(points: np.ndarray, system: int, projection: int) -> np.ndarray:
    if system == projection or not len(points):
        return points
    if system != DEGREES:
        raise Malformed(f"a layer is in EPSG:{system}, not in degrees nor in EPSG:{projection}")
    if not (np.abs(points) <= [360.0, 89.0]).all():
        raise Malformed("a point of the map is nowhere on Earth")
    try:
        return np.stack(utm(points[:, 0], points[:, 1], projection), axis=1)
    except ValueError as error:
        raise Malformed(str(error)) from error


def _meet(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    return bool((points.max(0) >= low).all() and (points.min(0) <= high).all())


def _whole(value: Any) -> int | None:
    """A key, which may be stored as a real number or as text; None where there is none."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _flat(points: np.ndarray) -> np.ndarray:
    return np.concatenate([points, np.zeros((len(points), 1))], axis=1)


def _open(ring: np.ndarray) -> np.ndarray:
    """A ring without the repetition of its first point."""
    return ring[:-1] if len(ring) > 1 and (ring[0] == ring[-1]).all() else ring


def _lanes(reader: _Reader) -> list[Feature]:
    lanes = {each["fid"]: each for each in _table(reader.connection, "lanes_polygons")}
    connectors = {each["fid"]: each for each in _table(reader.connection, "lane_connectors")}
    entry: dict[int, list[int]] = defaultdict(list)
    leave: dict[int, list[int]] = defaultdict(list)
    for identity, values in connectors.items():
        before, after = _whole(values.get("exit_lane_fid")), _whole(values.get("entry_lane_fid"))
        if before is not None:
            entry[identity].append(before)
            leave[before].append(identity)
        if after is not None:
            leave[identity].append(after)
            entry[after].append(identity)
    features = []
    for row in _rows(reader, "baseline_paths", needed=True):
        identity = _whole(row.values.get("lane_fid"))
        if identity is None:
            identity = _whole(row.values.get("lane_connector_fid"))
        points = row.shapes[0][0]
        if identity is None or len(points) < 2:
            continue
        about = lanes.get(identity) or connectors.get(identity) or {}
        limit: Any = about.get("speed_limit_mps")
        sound = isinstance(limit, int | float) and math.isfinite(limit) and 0 < limit <= FASTEST
        features.append(
            Feature(
                id=identity,
                kind=LANE_BIKE if _whole(about.get("lane_type_fid")) == BIKE else LANE_STREET,
                points=_flat(points),
                entry=tuple(entry[identity]),
                exit=tuple(leave[identity]),
                speed_limit=float(limit) if sound else None,
                junction=identity in connectors,
            )
        )
    return features


def _lines(reader: _Reader) -> list[Feature]:
    features = []
    for row in _rows(reader, "boundaries"):
        kind = _whole(row.values.get("boundary_type_fid"))
        if kind in LINES:
            features += [Feature(row.values["fid"], LINES[kind], _flat(line)) for (line, *_) in row.shapes]
    return features


def _areas(reader: _Reader) -> list[Feature]:
    features = []
    for layer, kind in (("crosswalks", CROSSWALK), ("speed_bumps", SPEED_BUMP)):
        for row in _rows(reader, layer):
            features += [Feature(row.values["fid"], kind, _flat(_open(outline))) for (outline, *_) in row.shapes]
    for row in _rows(reader, "stop_polygons"):
        if _whole(row.values.get("stop_polygon_type_fid")) == STOP_TYPE:
            middle = _open(row.shapes[0][0]).mean(0, keepdims=True)
            features.append(Feature(row.values["fid"], STOP_SIGN, _flat(middle)))
    return features


def _edges(reader: _Reader) -> list[Feature]:
    ids: list[int] = []
    areas: list[Shape] = []
    for layer in DRIVABLE:
        for row in _rows(reader, layer):
            for shape in row.shapes:
                ids.append(row.values["fid"])
                areas.append(shape)
    return edges(ids, areas)
