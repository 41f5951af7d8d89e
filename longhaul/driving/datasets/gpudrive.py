"""GPUDrive's JSON (also written by ScenarioMax and read by PufferDrive): one scenario a file -> `Log`.

Source: the converter of the GPUDrive repository (MIT) and its example files. Steps are 0.1 s. Two spellings of
headings exist: radians, and degrees in files of the older converter; a file in which a valid heading is beyond 7 is
taken to be in degrees. Invalid steps are filled with -10000 (or 1e-4). Lights are a dictionary by lane, each with
lists of states, stop points and, in `time_index`, steps (without it, one state a step); a list of such dictionaries,
one a step, is read too. Files that name no ego are read, too (Nocturne's, and GPUDrive's from before it had
`metadata`): of the vehicles seen at the current step, the one seen at the most steps stands for it, and of several the
one that drives furthest.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.log import Feature, Lights, Log, Malformed, Tracks, by_lane, check, no_lights
from longhaul.driving.datasets.safe_pickle import WRONG
from longhaul.runtime import bounded_json

CURRENT = 10
"""The current step of a WOMD scenario, which the format does not repeat."""

FILLER = -10000.0
"""The coordinates of invalid steps."""

RADIANS = 7.0
"""Headings beyond this are degrees: WOMD's lie within -2 pi .. 2 pi."""

KINDS = {"vehicle": log.VEHICLE, "pedestrian": log.PEDESTRIAN, "cyclist": log.CYCLIST, "other": log.OTHER}

ROADS: dict[str, tuple[int, ...]] = {
    "lane": (log.LANE_STREET, log.LANE_FREEWAY, log.LANE_BIKE),
    "road_line": log.ROAD_LINES,
    "road_edge": (log.EDGE_BOUNDARY, log.EDGE_MEDIAN),
    "stop_sign": (log.STOP_SIGN,),
    "crosswalk": (log.CROSSWALK,),
    "speed_bump": (log.SPEED_BUMP,),
    "driveway": (log.DRIVEWAY,),
}
"""The kinds that a road of each type may have in `map_element_id`; the first where it has none of them."""


def read(text: bytes, path: Path) -> Log:
    """The log of one JSON document; `Malformed` where it is none. Its id is the file's name where it has none."""
    try:
        document = bounded_json.parse(text)
    except ValueError as error:
        raise Malformed(str(error)) from error
    if not isinstance(document, dict) or not isinstance(document.get("objects"), list):
        raise Malformed("it is JSON, but has no list `objects` as GPUDrive's has")
    try:
        return check(_log(document, path))
    except Malformed:
        raise
    except WRONG as error:
        raise Malformed(f"it has not GPUDrive's structure: {type(error).__name__}: {error}") from error


def _log(document: dict[str, Any], path: Path) -> Log:
    tracks = _tracks(document["objects"])
    steps = tracks.valid.shape[1]
    metadata = document.get("metadata") or {}
    current = min(int(metadata.get("current_time_index", CURRENT)), steps - 1)
    predict = metadata.get("tracks_to_predict") or []
    lights = document.get("tl_states")
    return Log(
        id=str(document.get("scenario_id") or document.get("name") or path.stem),
        source="gpudrive",
        times=np.arange(steps) * log.STEP,
        current=current,
        tracks=tracks,
        sdc=_ego(document["objects"], metadata, tracks, current),
        predict=tuple(int(each["track_index"]) if isinstance(each, dict) else int(each) for each in predict),
        features=tuple(
            _feature(index, road) for index, road in enumerate(document.get("roads") or []) if road["geometry"]
        ),
        lights=no_lights(steps) if lights is None else _lights(lights, steps),
        has_lights=lights is not None,
    )


def _ego(objects: list[Any], metadata: dict[str, Any], tracks: Tracks, current: int) -> int:
    """The track that the file names as the ego; in files that name none, as Nocturne's, a vehicle that could be it."""
    if "sdc_track_index" in metadata:
        return int(metadata["sdc_track_index"])
    marked = [index for index, each in enumerate(objects) if each.get("is_sdc")]
    if len(marked) == 1:
        return marked[0]
    if marked:
        raise Malformed(f"it names {len(marked)} egos: objects {marked[0]} and {marked[1]} both have is_sdc")
    able = (tracks.kind == log.VEHICLE) & tracks.valid[:, current]
    if not able.any():
        raise Malformed(
            "it names no ego, neither by metadata.sdc_track_index nor by is_sdc, and at step "
            f"{current} no vehicle is seen that could be it"
        )
    moved = np.linalg.norm(np.diff(tracks.position[..., :2], axis=1), axis=-1)
    way = np.where(tracks.valid[:, 1:] & tracks.valid[:, :-1], moved, 0.0).sum(axis=1)
    seen = tracks.valid.sum(axis=1)
    return int(np.lexsort((way, seen, able))[-1])


def coordinates(points: Iterable[dict[str, float]], names: tuple[str, ...]) -> np.ndarray:
    """A list of {x, y, z} as float64 [points, len(names)]; a missing z is 0."""
    points = list(points)
    try:
        values = np.array(list(map(itemgetter(*names), points)), np.float64)
    except KeyError:
        values = np.array([[point[name] if name != "z" else point.get("z", 0.0) for name in names] for point in points])
    return values.astype(np.float64).reshape(len(points), len(names))


def _tracks(objects: list[Any]) -> Tracks:
    if not objects:
        raise Malformed("it has no objects")
    steps = len(objects[0]["position"])
    n = len(objects)
    for index, each in enumerate(objects):
        lengths = {name: len(each[name]) for name in ("position", "velocity", "heading", "valid")}
        if set(lengths.values()) != {steps}:
            raise Malformed(f"object {index} has {lengths}, not {steps} steps of each as the first object")
    position, velocity = np.zeros((n, steps, 3)), np.zeros((n, steps, 2), np.float32)
    heading, valid = np.zeros((n, steps)), np.zeros((n, steps), bool)
    size = np.zeros((n, steps, 3), np.float32)
    for index, each in enumerate(objects):
        position[index] = coordinates(each["position"], ("x", "y", "z"))
        velocity[index] = coordinates(each["velocity"], ("x", "y"))
        heading[index] = each["heading"]
        valid[index] = np.asarray(each["valid"], np.float64) == 1
        for axis, name in enumerate(("length", "width", "height")):
            size[index, :, axis] = np.asarray(each.get(name, 0.0), np.float32)
    valid &= ~(position[..., :2] == FILLER).all(axis=-1)
    if (np.abs(heading[valid]) > RADIANS).any():
        heading = np.deg2rad(heading)
    return Tracks(
        id=np.array([number(each.get("id"), index) for index, each in enumerate(objects)], np.int64),
        kind=np.array([KINDS.get(str(each.get("type")), log.OTHER) for each in objects], np.int8),
        position=np.where(valid[..., None], position, 0.0),
        heading=np.where(valid, heading, 0.0).astype(np.float32),
        velocity=np.where(valid[..., None], velocity, np.float32(0)),
        size=np.where(valid[..., None], size, np.float32(0)),
        valid=valid,
    )


def _feature(index: int, road: dict[str, Any]) -> Feature:
    geometry, element = road["geometry"], road.get("map_element_id")
    allowed = ROADS.get(str(road.get("type")), (0,))
    return Feature(
        id=number(road.get("id"), index),
        kind=int(element) if element in allowed else allowed[0],
        points=coordinates([geometry] if isinstance(geometry, dict) else geometry, ("x", "y", "z")),
    )


def number(value: object, default: int) -> int:
    """An id as int64, `default` where it is no such number."""
    try:
        result = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return default
    return result if -(2**63) <= result < 2**63 else default


def state(value: object) -> int:
    """A light's state by name ("arrow_stop", "LANE_STATE_ARROW_STOP") or number, alone or in a list; else unknown."""
    value = value[0] if isinstance(value, list) else value
    if isinstance(value, str):
        name = value.lower().removeprefix("lane_state_")
        return log.LIGHT_STATES.index(name) if name in log.LIGHT_STATES else 0
    result = number(value, 0)
    return result if 0 <= result < len(log.LIGHT_STATES) else 0


def _lights(document: Any, steps: int) -> Lights:
    """Lights by lane from either layout."""
    if isinstance(document, list):
        sightings = [(lane, step, light) for step, lights in enumerate(document) for lane, light in lights.items()]
        rows = [(number(lane, 0), step, state(light["state"]), _point(light, 0)) for lane, step, light in sightings]
    else:
        rows = []
        for index, (lane, light) in enumerate(document.items()):
            states = light["state"]
            when = light.get("time_index", range(len(states)))
            if len(when) != len(states):
                raise Malformed(f"the light of lane {lane} has {len(states)} states at {len(when)} steps")
            identity = number(lane, index)
            rows += [
                (identity, int(step), state(value), _point(light, place))
                for place, (step, value) in enumerate(zip(when, states))
            ]
    if not rows:
        return no_lights(steps)
    lane, step, states, points = zip(*rows)
    if not all(0 <= each < steps for each in step):
        raise Malformed(f"a light has a state at a step outside 0 .. {steps - 1}")
    return by_lane(np.array(lane, np.int64), np.array(step), np.array(states), np.array(points, np.float64), steps)


def _point(light: dict[str, Any], place: int) -> tuple[float, ...]:
    """The stop point at one of the light's entries; its coordinates are lists, or one number for all."""
    return tuple(
        float(value[min(place, len(value) - 1)] if isinstance(value, list) else value)
        for value in (light["x"], light["y"], light.get("z", 0.0))
    )
