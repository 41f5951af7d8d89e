"""nuPlan: a log's .db and the map of its city -> many `Log`s, with Python's own sqlite3.

Source: the schema and the maps' layers as the nuPlan devkit documents and reads them. A .db holds minutes of driving;
each of its scenes (at most 20 s) is a `Log`, without history: its current step is its first. What belongs to no scene,
or lasts longer, is cut into windows of 20 s; below 2 s nothing is kept. Point clouds come at 20 Hz; steps are those
0.1 s apart. A log's id is the token of its first point cloud, as nuPlan names scenarios.

The ego's pose is that of its rear axle, its velocity is in its own frame, and its size is not in the file: it is that
of the one vehicle that recorded all of nuPlan. Lights are states of lane connectors; each stands where its connector
begins.

Shapes of the map (map.gpkg) are in degrees and are projected to the metres of the logs (UTM) as the layer `meta` says:

    baseline_paths                         lanes, by lane_fid (lanes_polygons) or lane_connector_fid (lane_connectors)
    boundaries                             lines: broken (boundary_type_fid 0) or solid (2) white; others are virtual
    crosswalks, speed_bumps                as they are
    stop_polygons of type 1                stop signs, at their middle
    road_segments, intersections,
    generic_drivable_areas, carpark_areas  road edges: the border of their union

A connector leaves the lane `exit_lane_fid` and enters the lane `entry_lane_fid`. The maps have no heights: all z are 0.
Ids are those of the layers; lanes and connectors share one numbering, the other layers have their own.
"""

from __future__ import annotations

import math
import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.datasets import geopackage, log
from longhaul.driving.datasets.geopackage import Shape, utm
from longhaul.driving.datasets.lane_boundaries import edges, flat
from longhaul.driving.datasets.log import (
    BadData,
    Feature,
    Lights,
    Log,
    Malformed,
    Tracks,
    by_lane,
    check,
    no_lights,
    told,
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


def find_map(log: Path, names: Sequence[str]) -> Path:
    """The map.gpkg, of the highest version, of the first of `names` (maps or places) that has one; else `BadData`."""

    def version(path: Path) -> tuple[list[int], str]:
        return [int(part) for part in re.findall(r"\d+", path.parent.name)], str(path)

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
                return max(found, key=version)
    where = f"in {told}, which {FOLDER} names" if told else "beside it"
    raise BadData(
        f"{log}: its map {' or '.join(map(repr, named)) or '(the log names none)'} is not {where}: "
        f"set {FOLDER} to the folder that holds nuPlan's maps"
    )


def read_map(path: Path, low: np.ndarray, high: np.ndarray) -> Map:
    """The map at `path`, as far as it reaches into the box `low` .. `high`, m [2]; `Malformed` where it is none."""
    with closing(geopackage.connect(path)) as connection:
        layers = geopackage.layers(connection)
        reader = _Reader(connection, layers, _projection(connection), low, high)
        features = [*_map_lanes(reader), *_map_areas(reader)]
    boxes = [(*each.points[:, :2].min(0), *each.points[:, :2].max(0)) for each in features]
    starts = {each.id: each.points[0] for each in features if each.kind in (log.LANE_STREET, log.LANE_BIKE)}
    return Map(tuple(features), np.array(boxes).reshape(-1, 4), starts)


class _Reader(NamedTuple):
    connection: sqlite3.Connection
    layers: dict[str, tuple[str, int]]
    projection: int  # EPSG
    low: np.ndarray
    high: np.ndarray


def _projection(connection: sqlite3.Connection) -> int:
    for key, value in _all(connection, ["meta"], "SELECT key, value FROM meta"):
        number = re.fullmatch(r"epsg:(\d{1,6})", str(value).strip().lower())
        if key == "projectedCoordSystem" and number:
            return int(number[1])
    raise Malformed("its table meta does not name the projection (projectedCoordSystem)")


def _layer(reader: _Reader, layer: str, *, needed: bool = False) -> list[tuple[dict[str, Any], list[Shape]]]:
    """The rows of a layer that reach into the box: values by column, shapes in metres; none without such a layer."""
    if layer not in reader.layers:
        if needed:
            raise Malformed(f"it has no layer {layer}")
        return []
    column, system = reader.layers[layer]
    kept = []
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
            kept.append((values, found))
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
    rows = _all(connection, [name], f"SELECT rowid, * FROM {quoted}")
    return [dict(zip(columns, row[1:])) | {"fid": row[0]} for row in rows]


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


def _open(ring: np.ndarray) -> np.ndarray:
    """A ring without the repetition of its first point."""
    return ring[:-1] if len(ring) > 1 and (ring[0] == ring[-1]).all() else ring


def _map_lanes(reader: _Reader) -> list[Feature]:
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
    for values, shapes in _layer(reader, "baseline_paths", needed=True):
        identity = _whole(values.get("lane_fid"))
        if identity is None:
            identity = _whole(values.get("lane_connector_fid"))
        points = shapes[0][0]
        if identity is None or len(points) < 2:
            continue
        about = lanes.get(identity) or connectors.get(identity) or {}
        limit: Any = about.get("speed_limit_mps")
        sound = isinstance(limit, int | float) and math.isfinite(limit) and 0 < limit <= log.FASTEST
        features.append(
            Feature(
                id=identity,
                kind=log.LANE_BIKE if _whole(about.get("lane_type_fid")) == BIKE else log.LANE_STREET,
                points=flat(points),
                entry=tuple(entry[identity]),
                exit=tuple(leave[identity]),
                speed_limit=float(limit) if sound else None,
                junction=identity in connectors,
            )
        )
    return features


def _map_areas(reader: _Reader) -> list[Feature]:
    """Lines, outlines, stop signs and road edges."""
    features = []
    for values, shapes in _layer(reader, "boundaries"):
        mark = _whole(values.get("boundary_type_fid"))
        if mark in LINES:
            features += [Feature(values["fid"], LINES[mark], flat(line)) for (line, *_) in shapes]
    for layer, kind in (("crosswalks", log.CROSSWALK), ("speed_bumps", log.SPEED_BUMP)):
        for values, shapes in _layer(reader, layer):
            features += [Feature(values["fid"], kind, flat(_open(outline))) for (outline, *_) in shapes]
    for values, shapes in _layer(reader, "stop_polygons"):
        if _whole(values.get("stop_polygon_type_fid")) == STOP_TYPE:
            middle = _open(shapes[0][0]).mean(0, keepdims=True)
            features.append(Feature(values["fid"], log.STOP_SIGN, flat(middle)))
    areas = [(row["fid"], area) for layer in DRIVABLE for row, found in _layer(reader, layer) for area in found]
    return features + edges([identity for identity, _ in areas], [area for _, area in areas])


EGO_SIZE = (5.176, 2.297, 1.777)
"""Length, width, height, metres, of the recording vehicle."""

EGO_CENTRE = 1.461
"""Metres from its rear axle forward to the centre of its box."""

KINDS = {"vehicle": log.VEHICLE, "bicycle": log.CYCLIST, "pedestrian": log.PEDESTRIAN}
"""Categories of tracks; cones, barriers, signs and generic objects are others."""

STATES = {"green": log.LIGHT_GO, "yellow": log.LIGHT_CAUTION, "red": log.LIGHT_STOP}

EARLY = 0.02
"""Seconds by which a point cloud may come before its step is due."""

LONGEST, SHORTEST, GAP = 20.0, 2.0, 0.5
"""Seconds: of one log at most, of one at least, and between two point clouds that belong to one recording."""

MOST_STATES = 1 << 22
"""Tracks times steps of one log; real ones have some 100,000."""

MARGIN = 200.0
"""Metres around the ego's path of which a log has the map."""

FRAMES = (
    "SELECT p.token, p.scene_token, p.timestamp, e.x, e.y, e.qw, e.qx, e.qy, e.qz, e.vx, e.vy, e.angular_rate_z "
    "FROM lidar_pc AS p JOIN ego_pose AS e ON e.token = p.ego_pose_token"
)
BOXES = "SELECT lidar_pc_token, track_token, x, y, yaw, length, width, height, vx, vy FROM lidar_box"
CATEGORIES = "SELECT t.token, c.name FROM track AS t JOIN category AS c ON c.token = t.category_token"
SIGNALS = "SELECT lidar_pc_token, lane_connector_id, status FROM traffic_light_status"


class Frames(NamedTuple):
    """The steps of all logs of a file, F in all, and which of them make a log."""

    tokens: list[bytes]
    time: np.ndarray  # float64 [F], seconds
    ego: np.ndarray  # float64 [F, 5]: x, y of the box's centre, heading, velocity
    windows: list[slice]


class Boxes(NamedTuple):
    """Boxes that were seen, by step, M of them."""

    step: np.ndarray  # int64 [M], sorted
    track: np.ndarray  # int64 [M]
    values: np.ndarray  # float64 [M, 8]: x, y, heading, length, width, height, velocity
    names: list[Any]  # of each track: its token
    kinds: np.ndarray  # int8 [tracks]


class Signals(NamedTuple):
    """States of lane connectors by step, S sightings."""

    step: np.ndarray  # int64 [S], sorted
    lane: np.ndarray  # int64 [S]
    state: np.ndarray  # int64 [S]


def read(path: Path) -> Iterator[Log]:
    """The logs of one .db; `Malformed` where it, or its map, is none, `BadData` where the map is not found."""
    with closing(geopackage.connect(path)) as connection:
        named = _all(connection, ["log"], "SELECT map_version, location FROM log")
        frames = _frames(connection)
        boxes = _boxes(connection, frames)
        signals = _signals(connection, frames)
    where = find_map(path, [str(name).removesuffix(".gpkg") for row in named[:1] for name in row if name])
    seen = np.concatenate([frames.ego[window, :2] for window in frames.windows])
    try:
        chart = read_map(where, seen.min(0) - MARGIN, seen.max(0) + MARGIN)
    except Malformed as error:
        raise BadData(f"{where}: no usable map of nuPlan: {told(error)}; fetch it again") from error
    for window in frames.windows:
        yield check(_log(window, frames, boxes, signals, chart))


def _all(connection: sqlite3.Connection, names: Sequence[str], query: str) -> list[tuple]:
    return [row for part in geopackage.rows(connection, names, query) for row in part]


def _numbers(part: Sequence[Sequence[Any]], columns: slice, what: str) -> np.ndarray:
    """float64 [rows, columns]; what is NULL is NaN."""
    try:
        return np.array([row[columns] for row in part], np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"table {what} holds something else than numbers: {error}") from error


def _frames(connection: sqlite3.Connection) -> Frames:
    """Steps 0.1 s apart within each scene."""
    rows = _all(connection, ["lidar_pc", "ego_pose"], FRAMES)
    if not rows:
        raise Malformed("it has no point clouds with poses")
    values = _numbers(rows, slice(2, None), "lidar_pc or ego_pose")
    if not np.isfinite(values).all() or np.abs(values[:, 1:3]).max() > 1e8:
        raise Malformed("a time or pose of the ego is not finite, or far beyond any map")
    order = np.argsort(values[:, 0], kind="stable")  # by SQLite it could fill the disk
    rows, values = [rows[index] for index in order], values[order]
    time = (values[:, 0] - values[0, 0]) * 1e-6
    chosen: list[int] = []
    bounds: list[int] = []
    begin, due = 0.0, -np.inf
    for index in range(len(rows)):
        fresh = index == 0 or rows[index][1] != rows[index - 1][1] or time[index] - time[index - 1] > GAP
        if not fresh and time[index] < due - EARLY:
            continue
        if fresh or time[index] - begin > LONGEST + EARLY:
            bounds.append(len(chosen))
            begin = time[index]
        chosen.append(index)
        # steps keep their places, so that one that comes late does not delay the next
        due = begin + log.STEP * (round((time[index] - begin) / log.STEP) + 1)
    windows = [slice(first, last) for first, last in zip(bounds, [*bounds[1:], len(chosen)])]
    windows = [each for each in windows if time[chosen[each.stop - 1]] - time[chosen[each.start]] >= SHORTEST - EARLY]
    if not windows:
        raise Malformed(f"it has no recording of {SHORTEST:g} s or more without a gap")
    return Frames([rows[index][0] for index in chosen], time[chosen], _ego(values[chosen, 1:]), windows)


def _ego(values: np.ndarray) -> np.ndarray:
    """Poses and velocities of the box's centre from x, y, quaternion, velocity and turning rate of the rear axle."""
    x, y, qw, qx, qy, qz, forward, left, rate = values.T
    heading = np.arctan2(2 * (qw * qz + qx * qy), qw**2 + qx**2 - qy**2 - qz**2)
    cos, sin = np.cos(heading), np.sin(heading)
    left = left + rate * EGO_CENTRE
    columns = [x + EGO_CENTRE * cos, y + EGO_CENTRE * sin, heading, forward * cos - left * sin]
    return np.stack([*columns, forward * sin + left * cos], axis=1)


def _boxes(connection: sqlite3.Connection, frames: Frames) -> Boxes:
    steps = {token: index for index, token in enumerate(frames.tokens)}
    tracks: dict[Any, int] = {}
    step, track, values = [], [], []
    for part in geopackage.rows(connection, ["lidar_box"], BOXES):
        kept = [row for row in part if row[0] in steps]
        if kept:
            step.append(np.array([steps[row[0]] for row in kept]))
            track.append(np.array([tracks.setdefault(row[1], len(tracks)) for row in kept]))
            values.append(_numbers(kept, slice(2, None), "lidar_box"))
    named = {token: str(name) for token, name in _all(connection, ["track", "category"], CATEGORIES)}
    kinds = np.array([KINDS.get(named.get(name, ""), log.OTHER) for name in tracks], np.int8)
    if not step:
        return Boxes(np.zeros(0, int), np.zeros(0, int), np.zeros((0, 8)), [], kinds)
    at, seen, numbers = np.concatenate(step), np.concatenate(track), np.concatenate(values)
    numbers[:, 6:] = np.where(np.isfinite(numbers[:, 6:]), numbers[:, 6:], 0.0)  # what stands may have no velocity
    usable = np.flatnonzero(np.isfinite(numbers).all(1))
    order = usable[np.argsort(at[usable], kind="stable")]
    return Boxes(at[order], seen[order], numbers[order], list(tracks), kinds)


def _signals(connection: sqlite3.Connection, frames: Frames) -> Signals:
    steps = {token: index for index, token in enumerate(frames.tokens)}
    found = [
        (steps[token], lane, STATES.get(str(status).lower(), log.LIGHT_UNKNOWN))
        for token, lane, status in _all(connection, ["traffic_light_status"], SIGNALS)
        if token in steps and isinstance(lane, int)
    ]
    columns = np.array(sorted(found, key=lambda row: row[0]), np.int64).reshape(-1, 3)
    return Signals(*columns.T)


def _log(window: slice, frames: Frames, boxes: Boxes, signals: Signals, chart: Map) -> Log:
    steps = window.stop - window.start
    low, high = frames.ego[window, :2].min(0) - MARGIN, frames.ego[window, :2].max(0) + MARGIN
    near = (chart.boxes[:, :2] <= high).all(1) & (chart.boxes[:, 2:] >= low).all(1)
    first = frames.tokens[window.start]
    return Log(
        id=first.hex() if isinstance(first, bytes) else str(first),
        source="nuplan",
        times=frames.time[window] - frames.time[window.start],
        current=0,
        tracks=_tracks(window, frames, boxes),
        sdc=0,
        predict=(),
        features=tuple(chart.features[index] for index in np.flatnonzero(near)),
        lights=_lights(window, signals, chart, steps),
    )


def _tracks(window: slice, frames: Frames, boxes: Boxes) -> Tracks:
    """The ego, then what is seen in the window in the order of first sight."""
    steps = window.stop - window.start
    part = slice(*np.searchsorted(boxes.step, (window.start, window.stop)))
    known, first, inverse = np.unique(boxes.track[part], return_index=True, return_inverse=True)
    row = 1 + np.argsort(np.argsort(first))[inverse.reshape(-1)]
    step = boxes.step[part] - window.start
    order = known[np.argsort(first)]
    if (len(known) + 1) * steps > MOST_STATES:
        raise Malformed(f"it has {len(known)} tracks over {steps} steps; {MOST_STATES} states are possible")
    columns = np.zeros((len(known) + 1, steps, 8))
    valid = np.zeros((len(known) + 1, steps), bool)
    ego = frames.ego[window]
    columns[0] = np.concatenate([ego[:, :3], np.broadcast_to(EGO_SIZE, (steps, 3)), ego[:, 3:]], axis=1)
    valid[0] = True
    columns[row, step], valid[row, step] = boxes.values[part], True
    names = [boxes.names[index] for index in order]
    tokens = [name if isinstance(name, bytes) else str(name).encode() for name in names]
    height = np.zeros((*valid.shape, 1))
    return Tracks(
        id=np.array([-1, *(int.from_bytes(token[:8], "big", signed=True) for token in tokens)], np.int64),
        kind=np.concatenate([[log.VEHICLE], boxes.kinds[order]]).astype(np.int8),
        position=np.concatenate([columns[..., :2], height], axis=-1),
        heading=columns[..., 2].astype(np.float32),
        velocity=columns[..., 6:].astype(np.float32),
        size=columns[..., 3:6].astype(np.float32),
        valid=valid,
    )


def _lights(window: slice, signals: Signals, chart: Map, steps: int) -> Lights:
    """The states of the connectors that the map has there; the others have no place."""
    part = slice(*np.searchsorted(signals.step, (window.start, window.stop)))
    lane = signals.lane[part]
    placed = np.array([each in chart.starts for each in lane.tolist()], bool)
    if not placed.any():
        return no_lights(steps)
    position = np.stack([chart.starts[each] for each in lane[placed].tolist()])
    step, state = signals.step[part][placed] - window.start, signals.state[part][placed]
    return by_lane(lane[placed], step, state, position, steps)
