"""nuPlan: a log's .db and the map of its city -> many `Log`s, with Python's own sqlite3.

Source: the schema that the nuPlan devkit documents. A .db holds minutes of driving; each of its scenes (at most 20 s)
is a `Log`, without history: its current step is its first. What belongs to no scene, or lasts longer, is cut into
windows of 20 s; below 2 s nothing is kept. Point clouds come at 20 Hz; steps are those 0.1 s apart. A log's id is the
token of its first point cloud, as nuPlan names scenarios.

The ego's pose is that of its rear axle, its velocity is in its own frame, and its size is not in the file: it is that
of the one vehicle that recorded all of nuPlan. The map (`nuplan_map`) has no heights, so all z are 0. Lights are states
of lane connectors; each stands where its connector begins.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.datasets import geopackage, nuplan_map
from longhaul.driving.datasets.log import (
    CYCLIST,
    LIGHT_CAUTION,
    LIGHT_GO,
    LIGHT_STOP,
    LIGHT_UNKNOWN,
    OTHER,
    PEDESTRIAN,
    STEP,
    VEHICLE,
    BadData,
    Lights,
    Log,
    Malformed,
    Tracks,
    by_lane,
    check,
    no_lights,
    told,
)

EGO_SIZE = (5.176, 2.297, 1.777)
"""Length, width, height, metres, of the recording vehicle."""

EGO_CENTRE = 1.461
"""Metres from its rear axle forward to the centre of its box."""

KINDS = {"vehicle": VEHICLE, "bicycle": CYCLIST, "pedestrian": PEDESTRIAN}
"""Categories of tracks; cones, barriers, signs and generic objects are others."""

STATES = {"green": LIGHT_GO, "yellow": LIGHT_CAUTION, "red": LIGHT_STOP}

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
    "FROM lidar_pc AS p JOIN ego_pose AS e ON e.token = p.ego_pose_token ORDER BY p.timestamp"
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
        named = [row for part in _rows(connection, ["log"], "SELECT map_version, location FROM log") for row in part]
        frames = _frames(connection)
        boxes = _boxes(connection, frames)
        signals = _signals(connection, frames)
    where = nuplan_map.find(path, [str(name).removesuffix(".gpkg") for row in named[:1] for name in row if name])
    seen = np.concatenate([frames.ego[window, :2] for window in frames.windows])
    try:
        chart = nuplan_map.read(where, seen.min(0) - MARGIN, seen.max(0) + MARGIN)
    except Malformed as error:
        raise BadData(f"{where}: no usable map of nuPlan: {told(error)}; fetch it again") from error
    for window in frames.windows:
        yield check(_log(window, frames, boxes, signals, chart))


def _rows(connection: sqlite3.Connection, names: Sequence[str], query: str) -> Iterator[list[tuple]]:
    return geopackage.rows(connection, names, query)


def _numbers(part: Sequence[Sequence[Any]], columns: slice, what: str) -> np.ndarray:
    """float64 [rows, columns]; what is NULL is NaN."""
    try:
        return np.array([row[columns] for row in part], np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"table {what} holds something else than numbers: {error}") from error


def _frames(connection: sqlite3.Connection) -> Frames:
    """Steps 0.1 s apart within each scene."""
    rows = [row for part in _rows(connection, ["lidar_pc", "ego_pose"], FRAMES) for row in part]
    if not rows:
        raise Malformed("it has no point clouds with poses")
    values = _numbers(rows, slice(2, None), "lidar_pc or ego_pose")
    if not np.isfinite(values).all() or np.abs(values[:, 1:3]).max() > 1e8:
        raise Malformed("a time or pose of the ego is not finite, or far beyond any map")
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
        due = begin + STEP * (round((time[index] - begin) / STEP) + 1)
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
    for part in _rows(connection, ["lidar_box"], BOXES):
        kept = [row for row in part if row[0] in steps]
        if kept:
            step.append(np.array([steps[row[0]] for row in kept]))
            track.append(np.array([tracks.setdefault(row[1], len(tracks)) for row in kept]))
            values.append(_numbers(kept, slice(2, None), "lidar_box"))
    named = {row[0]: str(row[1]) for part in _rows(connection, ["track", "category"], CATEGORIES) for row in part}
    kinds = np.array([KINDS.get(named.get(name, ""), OTHER) for name in tracks], np.int8)
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
        (steps[token], lane, STATES.get(str(status).lower(), LIGHT_UNKNOWN))
        for part in _rows(connection, ["traffic_light_status"], SIGNALS)
        for token, lane, status in part
        if token in steps and isinstance(lane, int)
    ]
    columns = np.array(sorted(found, key=lambda row: row[0]), np.int64).reshape(-1, 3)
    return Signals(*columns.T)


def _log(window: slice, frames: Frames, boxes: Boxes, signals: Signals, chart: nuplan_map.Map) -> Log:
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
    flat = np.zeros((*valid.shape, 1))
    return Tracks(
        id=np.array([-1, *(_identity(boxes.names[index]) for index in order)], np.int64),
        kind=np.concatenate([[VEHICLE], boxes.kinds[order]]).astype(np.int8),
        position=np.concatenate([columns[..., :2], flat], axis=-1),
        heading=columns[..., 2].astype(np.float32),
        velocity=columns[..., 6:].astype(np.float32),
        size=columns[..., 3:6].astype(np.float32),
        valid=valid,
    )


def _identity(token: Any) -> int:
    """A track's token, eight bytes, as a number."""
    data = token if isinstance(token, bytes) else str(token).encode()
    return int.from_bytes(data[:8], "big", signed=True)


def _lights(window: slice, signals: Signals, chart: nuplan_map.Map, steps: int) -> Lights:
    """The states of the connectors that the map has there; the others have no place."""
    part = slice(*np.searchsorted(signals.step, (window.start, window.stop)))
    lane = signals.lane[part]
    placed = np.array([each in chart.starts for each in lane.tolist()], bool)
    if not placed.any():
        return no_lights(steps)
    position = np.stack([chart.starts[each] for each in lane[placed].tolist()])
    step, state = signals.step[part][placed] - window.start, signals.state[part][placed]
    return by_lane(lane[placed], step, state, position, steps)
