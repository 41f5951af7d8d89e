"""Waymo Open Motion Dataset, the tf.Example form: payload of one record -> `Log`.

Source: waymo.com/open/data/motion/tfexample. Tracks are [slots, T] with past, current and future apart; lights are
time-major [T, slots], and a lane may change its slot; the map is one list of points with (id, type). The number of
slots, points and steps is whatever the file has; the test split has no future. Indices of tracks stay those of the
file: only slots behind the last used one are dropped, so `Log.sdc` is the file's own. `path_samples` (from 1.3.1 on):
[paths, points] of the ego, of which `arc_length` and `id` are passed over.
"""

from __future__ import annotations

import numpy as np

from longhaul.driving.datasets import tfrecord
from longhaul.driving.datasets.log import (
    EDGE_BOUNDARY,
    LANE_STREET,
    LIGHT_UNKNOWN,
    ROAD_LINES,
    Feature,
    Lights,
    Log,
    Malformed,
    Path,
    Tracks,
)
from longhaul.driving.datasets.validate import MOST_STEPS, check

STEP = 0.1
"""Seconds between steps where the file does not say."""

UNDEFINED = {0: LANE_STREET, 5: ROAD_LINES[0], 14: EDGE_BOUNDARY}
"""Lanes, lines and edges of undefined type become the kind that is most usual, or binds least."""

MOST_SIGHTINGS = 1 << 26

EPOCHS = ("past", "current", "future")


def read(payload: bytes) -> Log:
    """The log of one tf.Example; `Malformed` where it is none."""
    example = tfrecord.parse(payload)
    identity = example.get("scenario/id")
    tracks, current = _tracks(example)
    n, steps = tracks.valid.shape
    ego = np.flatnonzero(_ints(example, "state/is_sdc")[:n] == 1)
    if len(ego) != 1:
        raise Malformed(f"{len(ego)} tracks are the ego (state/is_sdc = 1), not one")
    predict = (
        _ints(example, "state/tracks_to_predict")[:n] if "state/tracks_to_predict" in example else np.zeros(0, int)
    )
    lights = _lights(example, steps)
    return check(
        Log(
            id=identity[0].decode(errors="replace") if isinstance(identity, list) and identity else "",
            source="womd",
            times=_times(example, int(ego[0]), steps),
            current=current,
            tracks=tracks,
            sdc=int(ego[0]),
            predict=tuple(np.flatnonzero(predict == 1).tolist()),
            features=_features(example),
            lights=no_lights(steps) if lights is None else lights,
            has_lights=lights is not None,
            paths=_paths(example),
        )
    )


def no_lights(steps: int) -> Lights:
    """No lights over `steps` steps."""
    empty = np.zeros((0, steps))
    return Lights(np.zeros(0, np.int64), np.zeros((0, 3)), empty.astype(np.int8), empty.astype(bool))


def _ints(example: tfrecord.Example, name: str) -> np.ndarray:
    """A list of numbers as int64; what an int64 cannot hold is -1 (ids and kinds come as floats)."""
    values = _numbers(example, name)
    return values if values.dtype.kind == "i" else np.where(np.abs(values) < 2**53, values, -1).astype(np.int64)


def _numbers(example: tfrecord.Example, name: str) -> np.ndarray:
    """A list of numbers, float or int as the file has it."""
    values = example.get(name)
    if values is None:
        raise Malformed(f"it has no {name}")
    if isinstance(values, list):
        raise Malformed(f"{name} holds bytes, not numbers")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        # invalid steps may hold anything; what counts is checked where it is valid
        values = np.where(np.isfinite(values), values, np.float32(3e38))
    return values


def _epochs(example: tfrecord.Example, group: str, name: str, rows: int | None) -> list[np.ndarray]:
    """Past, current and future of `group`/`name`, [rows, steps] each; flat where `rows` is None."""
    parts = []
    for epoch in EPOCHS:
        key = f"{group}/{epoch}/{name}"
        values = example.get(key)
        if (values is None or len(values) == 0) and epoch != "current":
            continue
        values = _numbers(example, key)
        if rows is not None and (rows == 0 or len(values) % rows):
            raise Malformed(f"{key} has {len(values)} values, which {rows} tracks do not divide")
        parts.append(values.reshape(rows, -1) if rows is not None else values)
    return parts


def _tracks(example: tfrecord.Example) -> tuple[Tracks, int]:
    """-> (tracks, the current step)."""
    slots = len(_ints(example, "state/is_sdc"))
    valid_parts = _epochs(example, "state", "valid", slots)
    valid = np.concatenate(valid_parts, axis=1) == 1
    steps = valid.shape[1]
    if steps > MOST_STEPS:
        raise Malformed(f"it has {steps} steps; {MOST_STEPS} are possible")
    past = sum(part.shape[1] for part in valid_parts[: 1 if _has(example, "state/past/valid") else 0])

    def column(name: str) -> np.ndarray:
        values = np.concatenate(_epochs(example, "state", name, slots), axis=1)
        if values.shape != (slots, steps):
            raise Malformed(f"state/*/{name} has {values.shape[1]} steps, state/*/valid has {steps}")
        return np.where(valid, values, 0)

    def slot(name: str) -> np.ndarray:
        values = _ints(example, name)
        if len(values) != slots:
            raise Malformed(f"{name} has {len(values)} values for {slots} tracks")
        return values

    used = np.flatnonzero(valid.any(axis=1))
    keep = int(used[-1]) + 1 if len(used) else 0
    tracks = Tracks(
        id=slot("state/id") if "state/id" in example else np.arange(slots),
        kind=np.clip(slot("state/type"), 0, 127).astype(np.int8),
        position=np.stack([column(name) for name in "xyz"], axis=-1).astype(np.float64),
        heading=column("bbox_yaw").astype(np.float32),
        velocity=np.stack([column("velocity_x"), column("velocity_y")], axis=-1).astype(np.float32),
        size=np.stack([column(name) for name in ("length", "width", "height")], axis=-1).astype(np.float32),
        valid=valid,
    )
    return Tracks(*(getattr(tracks, name)[:keep] for name in Tracks.__dataclass_fields__)), past


def _has(example: tfrecord.Example, name: str) -> bool:
    """True if the feature is there and not empty."""
    return len(example.get(name, ())) > 0


def _times(example: tfrecord.Example, ego: int, steps: int) -> np.ndarray:
    """Seconds from the first step by the ego's time stamps; 0.1 s steps where they are missing or do not grow."""
    if _has(example, "state/current/timestamp_micros"):
        slots = len(_ints(example, "state/is_sdc"))
        stamps = np.concatenate(_epochs(example, "state", "timestamp_micros", slots), axis=1)[ego]
        if len(stamps) == steps and (np.diff(stamps) > 0).all():
            return (stamps - stamps[0]).astype(np.float64) * 1e-6
    return np.arange(steps) * STEP


def _features(example: tfrecord.Example) -> tuple[Feature, ...]:
    """The map's points joined to features by (id, type), both in the file's order."""
    if not _has(example, "roadgraph_samples/xyz"):
        return ()
    points = _numbers(example, "roadgraph_samples/xyz").astype(np.float64)
    identity, kind, valid = (_ints(example, f"roadgraph_samples/{name}") for name in ("id", "type", "valid"))
    if not len(identity) == len(kind) == len(valid) == len(points) / 3:
        raise Malformed(
            f"the map has {len(points)} / 3 points, {len(identity)} ids, {len(kind)} types, {len(valid)} valids"
        )
    return group(identity[valid == 1], kind[valid == 1], points.reshape(-1, 3)[valid == 1])


def group(identity: np.ndarray, kind: np.ndarray, points: np.ndarray) -> tuple[Feature, ...]:
    """Features from points [P, 3] that carry ids [P] and kinds [P]; both in the order of appearance."""
    if not len(points):
        return ()
    pairs = np.stack([identity, kind], axis=1)
    _, first, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first[inverse.reshape(-1)], kind="stable")
    firsts = first[inverse.reshape(-1)][order]
    bounds = np.flatnonzero(np.diff(firsts)) + 1
    return tuple(
        Feature(int(identity[part[0]]), UNDEFINED.get(int(kind[part[0]]), int(kind[part[0]])), points[part])
        for part in np.split(order, bounds)
    )


def _paths(example: tfrecord.Example) -> tuple[Path, ...]:
    """The ego's ways, without their invalid points; those of fewer than two points are left out."""
    if not _has(example, "path_samples/xyz"):
        return ()
    points = _numbers(example, "path_samples/xyz").astype(np.float64)
    valid, on_route = _ints(example, "path_samples/valid"), _ints(example, "path_samples/on_route")
    count = len(on_route)
    if len(points) != 3 * len(valid) or count == 0 or len(valid) % count:
        raise Malformed(f"path_samples has {len(points)} / 3 points, {len(valid)} valids, {count} paths")
    rows = zip(points.reshape(count, -1, 3), valid.reshape(count, -1) == 1, on_route == 1, strict=True)
    return tuple(Path(row[known], bool(on)) for row, known, on in rows if known.sum() > 1)


def _lights(example: tfrecord.Example, steps: int) -> Lights | None:
    if not _has(example, "traffic_light_state/current/valid"):
        return None

    def column(name: str) -> np.ndarray:
        values = np.concatenate(_epochs(example, "traffic_light_state", name, None))
        if len(values) % steps:
            raise Malformed(f"traffic_light_state/*/{name} has {len(values)} values, which {steps} steps do not divide")
        return values.reshape(steps, -1)

    valid = column("valid") == 1
    columns = {name: column(name) for name in ("id", "state", "x", "y", "z")}
    for name in ("id", "state"):
        if columns[name].dtype.kind != "i":
            raise Malformed(f"traffic_light_state/*/{name} holds no integers")
    for name, values in columns.items():
        if values.shape != valid.shape:
            raise Malformed(f"traffic_light_state/*/{name} has shape {values.shape}, valid has {valid.shape}")
    step = np.nonzero(valid)[0]
    position = np.stack([columns[name][valid] for name in "xyz"], axis=-1).astype(np.float64)
    return by_lane(columns["id"][valid], step, columns["state"][valid], position, steps)


def by_lane(lane: np.ndarray, step: np.ndarray, state: np.ndarray, position: np.ndarray, steps: int) -> Lights:
    """Lights from sightings [S] of (lane, step, state, stop point [S, 3]): one row a lane, in the order of appearance.

    Of two sightings at one step the later counts; of the stop points the first. States outside 0 .. 8 are unknown.
    """
    if not len(lane):
        return no_lights(steps)
    _, first, inverse = np.unique(lane, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    row = rank[inverse.reshape(-1)]
    order = np.sort(first)
    if len(order) * steps > MOST_SIGHTINGS:
        raise Malformed(f"it has {len(order)} lights over {steps} steps; {MOST_SIGHTINGS} states are possible")
    states = np.zeros((len(order), steps), np.int8)
    valid = np.zeros((len(order), steps), bool)
    states[row, step] = np.where((state >= 0) & (state <= 8), state, LIGHT_UNKNOWN)
    valid[row, step] = True
    return Lights(lane[order].astype(np.int64), position[order].astype(np.float64), states, valid)
