"""Waymo Open Motion Dataset: TFRecord files, and the tf.Example or Scenario in each record -> `Log`. Needs protobuf.

A TFRecord file is a row of records: length (uint64), masked CRC-32C of the length, the payload, masked CRC-32C of the
payload. Both checksums are always verified. The messages are made from `SCHEMA` at run time, without generated code;
fields that it lacks (lidar and camera tokens) are passed over. Sources: tensorflow.org/tutorials/load_data/tfrecord,
tensorflow/core/example/{example,feature}.proto, waymo.com/open/data/motion/tfexample, and the published scenario.proto
and map.proto of the waymo-open-dataset (field numbers only).

A tf.Example is a map from names to lists. Tracks are [slots, T] with past, current and future apart; lights are
time-major [T, slots], and a lane may change its slot; the map is one list of points with (id, type). The number of
slots, points and steps is whatever the file has; the test split has no future. Indices of tracks stay those of the
file: only slots behind the last used one are dropped, so `Log.sdc` is the file's own. `path_samples` (from 1.3.1 on):
[paths, points] of the ego, of which `arc_length` and `id` are passed over.

A Scenario has any number of tracks, and the lanes' topology.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.log import (
    MOST_STEPS,
    MPH,
    BadData,
    Feature,
    LibraryMissing,
    Lights,
    Log,
    Malformed,
    Tracks,
    by_lane,
    check,
    no_lights,
    times_of,
)

EXAMPLE, SCENARIO = "womd-example", "womd-scenario"
"""Formats of a record."""

Example = dict[str, "np.ndarray | list[bytes]"]
"""int64 [n], float32 [n], or a list of bytes; an empty list of no kind is float32 [0]."""

SCHEMA = {
    "Point": "double x = 1; double y = 2; double z = 3",
    "State": "double x = 2; double y = 3; double z = 4; float length = 5; float width = 6; float height = 7; "
    "float heading = 8; float velocity_x = 9; float velocity_y = 10; int64 valid = 11",
    "Track": "int64 id = 1; int64 kind = 2; repeated State states = 3",
    "Light": "int64 lane = 1; int64 state = 2; Point stop = 3",
    "LightStep": "repeated Light lights = 1",
    "Lane": "double speed_limit = 1; int64 kind = 2; int64 interpolating = 3; repeated Point points = 8; "
    "repeated int64 entry = 9; repeated int64 exit = 10",
    "Line": "int64 kind = 1; repeated Point points = 2",
    "Area": "repeated Point points = 1",
    "MapFeature": "int64 id = 1; oneof Lane lane = 3; oneof Line line = 4; oneof Line edge = 5; oneof Line stop = 7; "
    "oneof Area crosswalk = 8; oneof Area bump = 9; oneof Area driveway = 10",
    "Predicted": "int64 track = 1",
    "Scenario": "repeated double times = 1; repeated Track tracks = 2; bytes id = 5; int64 ego = 6; "
    "repeated LightStep lights = 7; repeated MapFeature features = 8; int64 current = 10; "
    "repeated Predicted predict = 11",
    "Floats": "repeated float values = 1",
    "Ints": "repeated int64 values = 1",
    "Texts": "repeated bytes values = 1",
    "Values": "oneof Texts texts = 1; oneof Floats floats = 2; oneof Ints ints = 3",
    "Named": "bytes name = 1; Values values = 2",
    "Features": "repeated Named named = 1",
    "Example": "Features features = 1",
    "Outer": "repeated bytes tracks = 2; bytes id = 5; int64 ego = 6; repeated bytes features = 8",
}
"""The fields that are read. Whole numbers of any width are int64, texts are bytes: nothing is cut or refused."""

SHAPES = {
    "lane": 0,
    "line": 5,
    "edge": 14,
    "stop": log.STOP_SIGN,
    "crosswalk": log.CROSSWALK,
    "bump": log.SPEED_BUMP,
    "driveway": log.DRIVEWAY,
}
"""The kind of a map feature by the field that holds its shape; of the first three, what their own kinds count from."""

UNDEFINED = {0: log.LANE_STREET, 5: log.ROAD_LINES[0], 14: log.EDGE_BOUNDARY}
"""Lanes, lines and edges of undefined type become the kind that is most usual, or binds least."""

EPOCHS = ("past", "current", "future")

REMEDY = "fetch or write the file again"


def masked_crc(data: bytes) -> int:
    """The checksum as TFRecord stores it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def begins(head: bytes) -> bool:
    """True if `head`, the first bytes of a file, is the start of a TFRecord."""
    return len(head) >= 12 and masked_crc(head[:8]) == struct.unpack_from("<I", head, 8)[0]


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """(byte offset of the record, payload) of every record, one at a time; `BadData` where the file is damaged."""
    try:
        import google.protobuf  # noqa: F401
    except ImportError as error:
        raise LibraryMissing(f'{path}: Waymo\'s files need protobuf: pip install "longhaul-rl[data]"') from error
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise BadData(f"{path}: is empty; {REMEDY}")
            offset = number = 0
            while offset < size:
                payload = _record(file, f"{path}: record {number} at byte {offset}", size - offset - 12)
                yield offset, payload
                offset += 16 + len(payload)
                number += 1
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror or error}") from error


def _record(file: BinaryIO, where: str, left: int) -> bytes:
    """The payload of the next record, of a file with `left` bytes behind the record's head."""
    head = file.read(12)
    if len(head) < 12:
        raise BadData(f"{where}: the file ends within the record's header ({len(head)} of 12 bytes); {REMEDY}")
    if not begins(head):
        raise BadData(f"{where}: the length's checksum is wrong: no TFRecord, or damaged here; {REMEDY}")
    (length,) = struct.unpack_from("<Q", head)
    if length + 4 > left:
        raise BadData(
            f"{where}: the file is cut off: the record needs {length + 4} bytes more, {left} are left; {REMEDY}"
        )
    body = file.read(length + 4)
    if len(body) != length + 4:
        raise BadData(f"{where}: the file became shorter while it was read; {REMEDY}")
    if masked_crc(body[:length]) != struct.unpack_from("<I", body, length)[0]:
        raise BadData(f"{where}: the checksum of its {length} bytes is wrong: the data are damaged; {REMEDY}")
    return body[:length]


@functools.cache
def messages() -> dict[str, Any]:
    """The message classes of `SCHEMA`, by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="longhaul_womd.proto", package="longhaul", syntax="proto2")
    for name, text in SCHEMA.items():
        message = file.message_type.add(name=name)
        for rule, kind, field, number in re.findall(r"(repeated |oneof |)(\w+) (\w+) = (\d+)", text):
            added = message.field.add(name=field, number=int(number), label=field_type.LABEL_OPTIONAL)
            if kind in SCHEMA:
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".longhaul.{kind}"
            else:
                added.type = field_type.Type.Value(f"TYPE_{kind.upper()}")
            if rule == "repeated ":
                added.label = field_type.LABEL_REPEATED
            elif rule:
                added.oneof_index = 0
        if "oneof" in text:
            message.oneof_decl.add(name="shape")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"longhaul.{name}")) for name in SCHEMA}


def parse(name: str, payload: bytes) -> Any:
    """The message `name` of `SCHEMA` that `payload` holds; `Malformed` where it is none."""
    from google.protobuf.message import DecodeError

    try:
        return messages()[name].FromString(payload)
    except DecodeError as error:
        raise Malformed(f"its {len(payload)} bytes are no message {name}: a field is cut off, or unknown") from error


def kind_of(payload: bytes) -> str:
    """The format of a record, "" for neither: a tf.Example is a map from names, which no list of times looks like."""
    for name, kind in (("Example", EXAMPLE), ("Outer", SCENARIO)):
        with suppress(Malformed):
            message = parse(name, payload)
            if message.features.named if kind == EXAMPLE else message.ListFields():
                return kind
    return ""


def parse_example(payload: bytes) -> Example:
    """The features of a tf.Example; `Malformed` where it is none. Of equal names the last counts."""
    example: Example = {}
    for entry in parse("Example", payload).features.named:
        kind = entry.values.WhichOneof("shape")
        values = getattr(entry.values, kind).values if kind else []
        try:
            name = entry.name.decode()
        except UnicodeDecodeError as error:
            raise Malformed("a feature's name is not UTF-8") from error
        example[name] = (
            list(values) if kind == "texts" else np.array(values, np.int64 if kind == "ints" else np.float32)
        )
    return example


def read_example(payload: bytes) -> Log:
    """The log of one tf.Example; `Malformed` where it is none."""
    example = parse_example(payload)
    identity = example.get("scenario/id")
    tracks, current = _example_tracks(example)
    n, steps = tracks.valid.shape
    ego = np.flatnonzero(_ints(example, "state/is_sdc")[:n] == 1)
    if len(ego) != 1:
        raise Malformed(f"{len(ego)} tracks are the ego (state/is_sdc = 1), not one")
    predict = (
        _ints(example, "state/tracks_to_predict")[:n] if "state/tracks_to_predict" in example else np.zeros(0, int)
    )
    stamps = np.zeros(0)
    if _has(example, "state/current/timestamp_micros"):
        slots = len(_ints(example, "state/is_sdc"))
        stamps = np.concatenate(_epochs(example, "state", "timestamp_micros", slots), axis=1)[ego[0]]
    lights = _example_lights(example, steps)
    return check(
        Log(
            id=identity[0].decode(errors="replace") if isinstance(identity, list) and identity else "",
            source="womd",
            times=times_of(stamps, steps, 1e-6),
            current=current,
            tracks=tracks,
            sdc=int(ego[0]),
            predict=tuple(np.flatnonzero(predict == 1).tolist()),
            features=_example_features(example),
            lights=no_lights(steps) if lights is None else lights,
            has_lights=lights is not None,
            paths=_paths(example),
        )
    )


def _ints(example: Example, name: str) -> np.ndarray:
    """A list of numbers as int64; what an int64 cannot hold is -1 (ids and kinds come as floats)."""
    values = _numbers(example, name)
    return values if values.dtype.kind == "i" else np.where(np.abs(values) < 2**53, values, -1).astype(np.int64)


def _numbers(example: Example, name: str) -> np.ndarray:
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


def _epochs(example: Example, group: str, name: str, rows: int | None) -> list[np.ndarray]:
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


def _example_tracks(example: Example) -> tuple[Tracks, int]:
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


def _has(example: Example, name: str) -> bool:
    """True if the feature is there and not empty."""
    return len(example.get(name, ())) > 0


def _example_features(example: Example) -> tuple[Feature, ...]:
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


def _known(kind: int) -> int:
    """The kind of a map feature; 0, which means nothing, for what no byte holds."""
    kind = UNDEFINED.get(kind, kind)
    return kind if 0 <= kind < 128 else 0


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
        Feature(int(identity[part[0]]), _known(int(kind[part[0]])), points[part]) for part in np.split(order, bounds)
    )


def _paths(example: Example) -> tuple[log.Path, ...]:
    """The ego's ways, without their invalid points; those of fewer than two points are left out."""
    if not _has(example, "path_samples/xyz"):
        return ()
    points = _numbers(example, "path_samples/xyz").astype(np.float64)
    valid, on_route = _ints(example, "path_samples/valid"), _ints(example, "path_samples/on_route")
    count = len(on_route)
    if len(points) != 3 * len(valid) or count == 0 or len(valid) % count:
        raise Malformed(f"path_samples has {len(points)} / 3 points, {len(valid)} valids, {count} paths")
    rows = zip(points.reshape(count, -1, 3), valid.reshape(count, -1) == 1, on_route == 1, strict=True)
    return tuple(log.Path(row[known], bool(on)) for row, known, on in rows if known.sum() > 1)


def _example_lights(example: Example, steps: int) -> Lights | None:
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


def read_scenario(payload: bytes) -> Log:
    """The log of one Scenario; `Malformed` where it is none."""
    message = parse("Scenario", payload)
    if not message.HasField("ego") or message.ego < 0:
        raise Malformed("it names no ego (sdc_track_index)")
    tracks = _scenario_tracks(message.tracks)
    steps = tracks.valid.shape[1]
    sightings = [(light, step) for step, lights in enumerate(message.lights[:steps]) for light in lights.lights]
    lane, state = (np.array([getattr(light, name) for light, _ in sightings], np.int64) for name in ("lane", "state"))
    stops = _columns([[light.stop for light, _ in sightings]], "x", "y", "z")
    at = np.array([step for _, step in sightings], np.int64)
    return check(
        Log(
            id=message.id.decode(errors="replace"),
            source="womd",
            times=times_of(np.array(message.times), steps),
            current=message.current,
            tracks=tracks,
            sdc=message.ego,
            predict=tuple(each.track for each in message.predict),
            features=_scenario_features(message.features),
            lights=by_lane(lane, at, state, stops, steps),
        )
    )


def _columns(groups: Iterable[Iterable[Any]], *names: str) -> np.ndarray:
    """Fields of groups of messages as float64 [messages, names], 0 where they are absent. No message is kept: many
    thousands would keep the garbage collector busy."""
    rows = map(attrgetter(*names), chain.from_iterable(groups))
    return np.fromiter(chain.from_iterable(rows), np.float64).reshape(-1, len(names))


def _scenario_tracks(rows: Sequence[Any]) -> Tracks:
    if not rows:
        raise Malformed("it has no tracks")
    counts = [len(track.states) for track in rows]
    steps = counts[0]
    if steps == 0 or set(counts) != {steps}:
        raise Malformed(f"its tracks have {min(counts)} to {max(counts)} states, not one number of steps")
    names = re.findall(r"(\w+) =", SCHEMA["State"])
    columns = _columns((track.states for track in rows), *names).reshape(len(rows), steps, -1)
    valid = columns[..., 9] == 1
    columns = np.where(valid[..., None], columns, 0.0)
    return Tracks(
        id=np.array([track.id for track in rows], np.int64),
        kind=np.array([min(max(track.kind, 0), 127) for track in rows], np.int8),
        position=columns[..., 0:3],
        heading=columns[..., 6].astype(np.float32),
        velocity=columns[..., 7:9].astype(np.float32),
        size=columns[..., 3:6].astype(np.float32),
        valid=valid,
    )


def _scenario_features(rows: Sequence[Any]) -> tuple[Feature, ...]:
    """The map features that have a shape with points."""
    named = [(row.id, field, getattr(row, field)) for row in rows if (field := row.WhichOneof("shape"))]
    named = [(identity, field, shape) for identity, field, shape in named if shape.points]
    points = _columns((shape.points for _, _, shape in named), "x", "y", "z")
    ends = np.cumsum([len(shape.points) for _, _, shape in named])[:-1]
    features = []
    for (identity, field, shape), part in zip(named, np.split(points, ends)):
        kind = SHAPES[field] + (shape.kind if field in ("lane", "line", "edge") else 0)
        feature = Feature(identity, _known(kind), part)
        if field == "lane":
            limit = shape.speed_limit * MPH if shape.HasField("speed_limit") else None
            more = tuple(shape.entry), tuple(shape.exit), limit, shape.interpolating != 0
            feature = Feature(identity, feature.kind, part, *more)
        features.append(feature)
    return tuple(features)
