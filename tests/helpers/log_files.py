"""A small log made by hand, and writers of it in the formats that are one file (Argoverse: argoverse_files.py).

The road runs from x = 0 to 200 m, one lane each way (y = -1.75 eastwards, +1.75 westwards), with a light at x = 120 m.
All numbers can be held by float32, so that what a format stores as float32 comes back unchanged.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from longhaul.driving.datasets.log import (
    CROSSWALK,
    CYCLIST,
    DRIVEWAY,
    EDGE_BOUNDARY,
    EDGE_MEDIAN,
    LANE_STREET,
    OTHER,
    PEDESTRIAN,
    SPEED_BUMP,
    STOP_SIGN,
    VEHICLE,
    Feature,
    Lights,
    Log,
    Path,
    Tracks,
)
from longhaul.driving.datasets.womd import masked_crc

LENGTH = 200.0
EAST, WEST = -1.75, 1.75
FILLER = -10000.0

ROAD_NAMES = {
    LANE_STREET: "lane",
    12: "road_line",
    EDGE_BOUNDARY: "road_edge",
    EDGE_MEDIAN: "road_edge",
    STOP_SIGN: "stop_sign",
    CROSSWALK: "crosswalk",
    SPEED_BUMP: "speed_bump",
    DRIVEWAY: "driveway",
}
SIGNALS = (
    *("unknown", "arrow_stop", "arrow_caution", "arrow_go", "stop", "caution", "go"),
    *("flashing_stop", "flashing_caution"),
)


def single(values: Any) -> np.ndarray:
    """`values` rounded to float32, as float64."""
    return np.asarray(values, np.float32).astype(np.float64)


def make_log(steps: int = 91, current: int = 10, cyclist: float = -3.5) -> Log:
    """Three vehicles, a pedestrian, a cyclist and a cone; the ego is track 2, at 10 m/s; track 0 is hidden a while.

    `cyclist` is the lateral place of the cyclist, m; the ego passes it, and hits it from -3 on.
    """
    times = single(np.arange(steps) * 0.1)
    kind = np.array([VEHICLE, PEDESTRIAN, VEHICLE, VEHICLE, CYCLIST, OTHER], np.int8)
    places = [[20, EAST, 1], [60, -5, 1], [0, EAST, 1], [200, WEST, 1], [10, cyclist, 1], [150, 3, 1]]
    start = np.array(places, np.float64)
    speed = np.array([[9, 0], [0, 1.5], [10, 0], [-8, 0], [4, 0], [0, 0]], np.float64)
    position = np.repeat(start[:, None], steps, axis=1)
    position[..., :2] += speed[:, None] * times[:, None]
    valid = np.ones((len(kind), steps), bool)
    valid[0, 30:40] = False
    valid[3, : min(5, steps - 1)] = False
    heading = np.arctan2(speed[:, 1], speed[:, 0])[:, None] + np.zeros(steps)
    size = np.array([[4.5, 2, 1.5], [0.5, 0.5, 1.75], [5, 2, 1.5], [12, 2.5, 3], [1.75, 0.5, 1.75], [0.5, 0.5, 1]])
    tracks = Tracks(
        id=np.array([7, 1000, 3, 12, 5, 1 << 30]),
        kind=kind,
        position=np.where(valid[..., None], single(position), 0.0),
        heading=np.where(valid, heading, 0.0).astype(np.float32),
        velocity=np.where(valid[..., None], speed[:, None] + np.zeros((steps, 1)), 0.0).astype(np.float32),
        size=np.where(valid[..., None], size[:, None], 0.0).astype(np.float32),
        valid=valid,
    )
    state, known = np.zeros((2, steps), np.int8), np.zeros((2, steps), bool)
    state[0, 5:40], state[0, 40:] = 4, 6
    known[0, 5:] = True
    state[1, 20:], known[1, 20:] = 7, True
    lights = Lights(np.array([102, 101]), np.array([[120.0, EAST, 1.0], [60.0, WEST, 1.0]]), state, known)
    return Log(
        id="straight",
        source="womd",
        times=times,
        current=current,
        tracks=tracks,
        sdc=2,
        predict=(0, 3),
        features=make_features(),
        lights=lights,
    )


def make_features() -> tuple[Feature, ...]:
    """Lanes, a line, edges with the road on their left, and one of each kind of area."""

    def line(x: np.ndarray, y: float) -> np.ndarray:
        return np.stack([x, np.full(len(x), y), np.full(len(x), 0.5)], axis=1)

    def box(x: float, y: float, length: float, width: float) -> np.ndarray:
        return np.array([[x, y, 0.5], [x + length, y, 0.5], [x + length, y + width, 0.5], [x, y + width, 0.5]])

    east = np.arange(0.0, LENGTH + 1, 2.0)
    return (
        Feature(101, LANE_STREET, line(east[:51], EAST), exit=(102,), speed_limit=20.1168),
        Feature(102, LANE_STREET, line(east[50:], EAST), entry=(101,), speed_limit=20.1168, junction=True),
        Feature(103, LANE_STREET, line(east[::-1], WEST)),
        Feature(104, 12, line(east, 0.0)),
        Feature(105, EDGE_BOUNDARY, line(east, -3.5)),
        Feature(106, EDGE_MEDIAN, line(east[::-1], 3.5)),
        Feature(107, STOP_SIGN, np.array([[118.0, -4.5, 2.0]])),
        Feature(108, CROSSWALK, box(121.0, -3.5, 3.0, 7.0)),
        Feature(109, SPEED_BUMP, box(40.0, -3.5, 0.5, 7.0)),
        Feature(110, DRIVEWAY, box(80.0, 3.5, 4.0, 3.0)),
    )


def bare(log: Log) -> Log:
    """The log without what tf.Example and GPUDrive's JSON cannot hold: topology and speed limits."""
    return replace(log, features=tuple(Feature(each.id, each.kind, each.points) for each in log.features))


def assert_same(found: Log, expected: Log, *, times: float = 1e-6) -> None:
    """Every value of two logs is equal, times within `times` seconds."""
    for name in ("id", "source", "current", "sdc", "predict", "has_lights"):
        assert getattr(found, name) == getattr(expected, name), name
    np.testing.assert_allclose(found.times, expected.times, rtol=0, atol=times)
    for part in ("tracks", "lights"):
        for field in fields(getattr(expected, part)):
            one, other = (getattr(getattr(log, part), field.name) for log in (found, expected))
            assert one.dtype == other.dtype, (part, field.name)
            np.testing.assert_array_equal(one, other, err_msg=f"{part}.{field.name}")
    assert len(found.features) == len(expected.features)
    for one, other in zip(found.features, expected.features):
        assert (one.id, one.kind, one.entry, one.exit) == (other.id, other.kind, other.entry, other.exit)
        assert one.junction == other.junction
        assert one.speed_limit == other.speed_limit or abs(one.speed_limit - other.speed_limit) < 1e-9
        np.testing.assert_array_equal(one.points, other.points)


def encode_varint(value: int) -> bytes:
    """An int64 or uint64 as a varint."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encode(number: int, value: int | float | bytes | np.float32) -> bytes:
    """One field: an int as a varint, a float as fixed64, np.float32 as fixed32, bytes with their length.

    Written by hand (protobuf.dev/programming-guides/encoding), as an oracle for what protobuf reads.
    """
    if isinstance(value, bytes):
        return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value
    if isinstance(value, np.float32):
        return encode_varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, float):
        return encode_varint(number << 3 | 1) + struct.pack("<d", value)
    return encode_varint(number << 3) + encode_varint(int(value))


def framed(payloads: Iterable[bytes]) -> bytes:
    """A TFRecord file of `payloads`."""
    out = bytearray()
    for payload in payloads:
        for part in (struct.pack("<Q", len(payload)), payload):
            out += part + struct.pack("<I", masked_crc(part))
    return bytes(out)


def write_records(path: FilePath, payloads: Iterable[bytes]) -> None:
    path.write_bytes(framed(payloads))


def serialise(features: Mapping[str, np.ndarray | Sequence[bytes]]) -> bytes:
    """A tf.Example of `features`, names sorted: float arrays as float32, other arrays as int64, lists of bytes."""
    entries = bytearray()
    for name in sorted(features):
        values = features[name]
        if isinstance(values, np.ndarray) and values.dtype.kind == "f":
            kind = encode(2, encode(1, values.astype("<f4").tobytes()))
        elif isinstance(values, np.ndarray):
            kind = encode(3, encode(1, b"".join(map(encode_varint, values.reshape(-1).tolist()))))
        else:
            kind = encode(1, b"".join(encode(1, value) for value in values))
        entries += encode(1, encode(1, name.encode()) + encode(2, kind))
    return encode(1, bytes(entries))


def example(log: Log, *, spare: int = 3, slots: int = 4) -> dict[str, np.ndarray | list[bytes]]:
    """The features of a WOMD tf.Example, with `spare` unused tracks, `slots` light slots and unused road points."""
    tracks, lights, steps = log.tracks, log.lights, len(log.times)
    n = len(tracks.id)

    def padded(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([values, np.full((spare, *values.shape[1:]), fill, values.dtype)])

    def flags(indices: tuple[int, ...]) -> np.ndarray:
        return padded(np.isin(np.arange(n), indices).astype(np.int64), -1)

    features: dict[str, np.ndarray | list[bytes]] = {
        "scenario/id": [log.id.encode()],
        "state/id": padded(tracks.id.astype(np.float32), -1),
        "state/type": padded(tracks.kind.astype(np.float32), -1),
        "state/is_sdc": flags((log.sdc,)),
        "state/tracks_to_predict": flags(log.predict),
    }
    columns = dict(zip("xyz", np.moveaxis(tracks.position, -1, 0).astype(np.float32)))
    columns |= dict(zip(("length", "width", "height"), np.moveaxis(tracks.size, -1, 0)))
    columns |= dict(zip(("velocity_x", "velocity_y"), np.moveaxis(tracks.velocity, -1, 0)))
    columns |= {"bbox_yaw": tracks.heading}
    columns = {
        name: padded(np.where(tracks.valid, values, -1).astype(np.float32), -1) for name, values in columns.items()
    }
    columns["valid"] = padded(tracks.valid.astype(np.int64), 0)
    stamps = np.round(log.times * 1e6).astype(np.int64)
    columns["timestamp_micros"] = padded(np.where(tracks.valid, stamps, -1), -1)
    # the light in row r is in slot (r + t) % slots at step t: a lane may change its slot
    row, step = np.nonzero(lights.valid)
    seen = {name: np.full((steps, slots), -1.0, np.float32) for name in "xyz"}
    seen |= {name: np.full((steps, slots), -1) for name in ("id", "state")} | {
        "valid": np.zeros((steps, slots), np.int64)
    }
    place = step, (row + step) % slots
    for axis, name in enumerate("xyz"):
        seen[name][place] = lights.position[row, axis]
    seen["id"][place], seen["state"][place], seen["valid"][place] = lights.lane[row], lights.state[row, step], 1
    spans = {
        "past": slice(0, log.current),
        "current": slice(log.current, log.current + 1),
        "future": slice(log.current + 1, None),
    }
    for epoch, span in spans.items():
        features |= {f"state/{epoch}/{name}": values[:, span].reshape(-1) for name, values in columns.items()}
        features |= {f"traffic_light_state/{epoch}/{name}": values[span].reshape(-1) for name, values in seen.items()}
    points = np.concatenate([each.points for each in log.features] + [np.full((5, 3), -1.0)])
    counts = [len(each.points) for each in log.features]
    features["roadgraph_samples/xyz"] = points.astype(np.float32).reshape(-1)
    for name, values in {
        "id": [each.id for each in log.features],
        "type": [each.kind for each in log.features],
    }.items():
        features[f"roadgraph_samples/{name}"] = np.concatenate([np.repeat(values, counts), np.full(5, -1)])
    features["roadgraph_samples/valid"] = np.concatenate([np.ones(sum(counts), np.int64), np.zeros(5, np.int64)])
    return features | path_samples(log.paths) if log.paths else features


def path_samples(paths: tuple[Path, ...], *, count: int = 3, points: int = 300) -> dict[str, np.ndarray | list[bytes]]:
    """WOMD's `path_samples` of `count` paths with room for `points`; what is not used is invalid."""
    xyz, valid = np.full((count, points, 3), -1.0, np.float32), np.zeros((count, points), np.int64)
    lengths, on_route = np.full((count, points), -1.0, np.float32), np.zeros((count, 1), np.int64)
    for i, path in enumerate(paths):
        used = len(path.points)
        xyz[i, :used], valid[i, :used], on_route[i] = path.points, 1, path.on_route
        step = np.linalg.norm(np.diff(path.points[:, :2], axis=0), axis=-1)
        lengths[i, :used] = np.append(0.0, np.cumsum(step))
    columns = {"xyz": xyz, "valid": valid, "id": valid * 7 - 1, "arc_length": lengths, "on_route": on_route}
    return {f"path_samples/{name}": values.reshape(-1) for name, values in columns.items()}


def scenario(log: Log) -> bytes:
    """A WOMD Scenario proto."""
    tracks, lights = log.tracks, log.lights
    out = encode(5, log.id.encode()) + encode(1, log.times.astype("<f8").tobytes())
    out += encode(6, log.sdc) + encode(10, log.current)
    for index, row in enumerate(tracks.valid):
        body = encode(1, int(tracks.id[index])) + encode(2, int(tracks.kind[index]))
        for step, valid in enumerate(row):
            body += encode(3, _state(tracks, index, step) if valid else encode(11, 0))
        out += encode(2, body)
    for step in range(len(log.times)):
        body = b""
        for index in np.flatnonzero(lights.valid[:, step]):
            light = encode(1, int(lights.lane[index])) + encode(2, int(lights.state[index, step]))
            body += encode(1, light + encode(3, _point(lights.position[index])))
        out += encode(7, body)
    for feature in log.features:
        out += encode(8, _feature(feature))
    return out + b"".join(encode(11, encode(1, index) + encode(2, 1)) for index in log.predict)


def _point(point: np.ndarray) -> bytes:
    return b"".join(encode(axis + 1, float(value)) for axis, value in enumerate(point))


def _state(tracks: Tracks, index: int, step: int) -> bytes:
    out = b"".join(encode(number, float(value)) for number, value in zip((2, 3, 4), tracks.position[index, step]))
    rest = (*tracks.size[index, step], tracks.heading[index, step], *tracks.velocity[index, step])
    return (
        out + b"".join(encode(number, np.float32(value)) for number, value in zip(range(5, 11), rest)) + encode(11, 1)
    )


def _feature(feature: Feature) -> bytes:
    if feature.kind == LANE_STREET:
        body = b"" if feature.speed_limit is None else encode(1, feature.speed_limit / 0.44704)
        body += encode(3, 1) if feature.junction else b""
        body += encode(2, feature.kind) + b"".join(encode(8, _point(point)) for point in feature.points)
        body += encode(9, b"".join(map(encode_varint, feature.entry))) if feature.entry else b""
        body += b"".join(encode(10, lane) for lane in feature.exit)  # unpacked, which readers must take too
        number = 3
    elif feature.kind in (12, EDGE_BOUNDARY, EDGE_MEDIAN):
        number, offset = (4, 5) if feature.kind == 12 else (5, 14)
        body = encode(1, feature.kind - offset) + b"".join(encode(2, _point(point)) for point in feature.points)
    elif feature.kind == STOP_SIGN:
        number, body = 7, encode(1, 102) + encode(2, _point(feature.points[0]))
    else:
        number = {CROSSWALK: 8, SPEED_BUMP: 9, DRIVEWAY: 10}[feature.kind]
        body = b"".join(encode(1, _point(point)) for point in feature.points)
    return encode(1, feature.id) + encode(number, body)


def gpudrive(log: Log) -> dict[str, Any]:
    """GPUDrive's JSON; lights in its first layout."""

    def points(values: np.ndarray) -> list[dict[str, float]]:
        return [dict(zip("xyz", row)) for row in values.tolist()]

    objects = []
    tracks = log.tracks
    for index, valid in enumerate(tracks.valid):
        size = tracks.size[index][valid][-1].tolist()
        objects.append(
            {
                "position": points(np.where(valid[:, None], tracks.position[index], FILLER)),
                "velocity": points(np.where(valid[:, None], tracks.velocity[index], FILLER)),
                "heading": np.where(valid, tracks.heading[index], FILLER).tolist(),
                "valid": valid.tolist(),
                "length": size[0],
                "width": size[1],
                "height": size[2],
                "goalPosition": points(tracks.position[index][valid][-1:])[0],
                "type": ("", "vehicle", "pedestrian", "cyclist", "other")[tracks.kind[index]],
                "id": int(tracks.id[index]),
                "mark_as_expert": False,
            }
        )
    lights = {}
    for row, lane in enumerate(log.lights.lane.tolist()):
        steps = np.flatnonzero(log.lights.valid[row])
        x, y, z = ([value] * len(steps) for value in log.lights.position[row].tolist())
        states = [SIGNALS[state] for state in log.lights.state[row, steps]]
        lights[str(lane)] = {"state": states, "x": x, "y": y, "z": z, "time_index": steps.tolist()}
    return {
        "name": f"{log.id}.json",
        "scenario_id": log.id,
        "objects": objects,
        "roads": [
            {"geometry": points(each.points), "type": ROAD_NAMES[each.kind], "map_element_id": each.kind, "id": each.id}
            for each in log.features
        ],
        "tl_states": lights,
        "metadata": {
            "sdc_track_index": log.sdc,
            "objects_of_interest": [],
            "tracks_to_predict": [{"track_index": index, "difficulty": 0} for index in log.predict],
        },
    }


def scenarionet(log: Log) -> dict[str, Any]:
    """A ScenarioNet description: sizes as [T] and [T, 1], valid as bool and float, points as arrays and lists."""
    tracks, names = log.tracks, {}
    for index, valid in enumerate(tracks.valid):
        odd = index % 2
        state = {
            "position": tracks.position[index].astype(np.float32),
            "heading": tracks.heading[index],
            "velocity": tracks.velocity[index],
            "valid": valid.astype(float) if odd else valid,
        }
        for axis, name in enumerate(("length", "width", "height")):
            state[name] = tracks.size[index, :, axis : axis + 1] if odd else tracks.size[index, :, axis]
        kind = ("", "VEHICLE", "PEDESTRIAN", "CYCLIST", "TRAFFIC_CONE")[tracks.kind[index]]
        names[str(tracks.id[index])] = {"type": kind, "state": state, "metadata": {"object_id": str(tracks.id[index])}}
    types = {
        LANE_STREET: "LANE_SURFACE_STREET",
        12: "ROAD_LINE_SOLID_DOUBLE_YELLOW",
        EDGE_BOUNDARY: "ROAD_EDGE_BOUNDARY",
    }
    types |= {EDGE_MEDIAN: "ROAD_EDGE_MEDIAN", STOP_SIGN: "STOP_SIGN", CROSSWALK: "CROSSWALK"}
    types |= {SPEED_BUMP: "SPEED_BUMP", DRIVEWAY: "DRIVEWAY"}
    features: dict[str, dict[str, Any]] = {}
    for each in log.features:
        shape = "position" if each.kind == STOP_SIGN else "polyline" if each.kind < STOP_SIGN else "polygon"
        points = each.points[0] if each.kind == STOP_SIGN else each.points
        features[str(each.id)] = {"type": types[each.kind], shape: points.tolist() if each.id % 2 else points}
        if each.kind == LANE_STREET:
            limit = each.speed_limit and each.speed_limit / 0.44704
            features[str(each.id)] |= {
                "speed_limit_mph": limit,
                "entry_lanes": list(each.entry),
                "exit_lanes": list(each.exit),
                "interpolating": each.junction,
            }
    lights = {}
    for row, lane in enumerate(log.lights.lane.tolist()):
        known = zip(log.lights.valid[row], log.lights.state[row])
        states = [f"LANE_STATE_{SIGNALS[state].upper()}" if valid else None for valid, state in known]
        state = {"object_state": states}
        lights[str(lane)] = {
            "type": "TRAFFIC_LIGHT",
            "state": state,
            "lane": lane,
            "stop_point": log.lights.position[row],
        }
    ids = [str(tracks.id[index]) for index in log.predict]
    return {
        "id": log.id,
        "version": "test",
        "length": len(log.times),
        "tracks": names,
        "dynamic_map_states": lights,
        "map_features": features,
        "metadata": {
            "ts": log.times,
            "sdc_id": str(tracks.id[log.sdc]),
            "current_time_index": log.current,
            "tracks_to_predict": {name: {"track_id": name} for name in ids},
        },
    }


def payloads(log: Log) -> dict[str, bytes]:
    """The log as the payload of each format that fits into one."""
    buffer = io.BytesIO()
    pickle.dump(scenarionet(log), buffer, protocol=4)
    return {
        "womd-example": serialise(example(log)),
        "womd-scenario": scenario(log),
        "gpudrive": json.dumps(gpudrive(log)).encode(),
        "scenarionet": buffer.getvalue(),
    }


SUFFIXES = {
    "womd-example": ".tfrecord",
    "womd-scenario": ".tfrecord-00000-of-00001",
    "gpudrive": ".json",
    "scenarionet": ".pkl",
}


def write_all(log: Log, folder: FilePath) -> dict[str, FilePath]:
    """The log as a file of each of these formats -> format: path."""
    paths = {}
    for kind, payload in payloads(log).items():
        paths[kind] = folder / f"{kind}{SUFFIXES[kind]}"
        if "tfrecord" in SUFFIXES[kind]:
            write_records(paths[kind], [payload])
        else:
            paths[kind].write_bytes(payload)
    return paths
