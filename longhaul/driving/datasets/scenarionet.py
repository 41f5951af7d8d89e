"""ScenarioNet's pickles (MetaDrive's ScenarioDescription; also of ScenarioMax): one scenario a file -> `Log`.

Source: the ScenarioNet documentation and example files; `safe_pickle` reads them without running them. ids of tracks
and map features are strings: numeric ones are kept; if one is not, the map's features are numbered in order. Sizes
and valid flags come in several shapes and types; polylines have two or three coordinates, a missing height is 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.gpudrive import number
from longhaul.driving.datasets.lane_boundaries import flat
from longhaul.driving.datasets.log import Feature, Lights, Log, Malformed, Tracks, check, no_lights, times_of
from longhaul.driving.datasets.safe_pickle import WRONG, Array, unpickle

SUMMARIES = ("dataset_summary.pkl", "dataset_mapping.pkl")
"""Files of a ScenarioNet folder that hold no scenario."""

MOST_STATES = 1 << 22
"""Tracks times steps, points of the map, lights times steps: what a file could repeat by reference."""

KINDS = {"VEHICLE": log.VEHICLE, "PEDESTRIAN": log.PEDESTRIAN, "CYCLIST": log.CYCLIST}

FEATURES = {
    "LANE_FREEWAY": log.LANE_FREEWAY,
    "LANE_SURFACE_STREET": log.LANE_STREET,
    "LANE_BIKE_LANE": log.LANE_BIKE,
    "ROAD_LINE_BROKEN_SINGLE_WHITE": 6,
    "ROAD_LINE_SOLID_SINGLE_WHITE": 7,
    "ROAD_LINE_SOLID_DOUBLE_WHITE": 8,
    "ROAD_LINE_BROKEN_SINGLE_YELLOW": 9,
    "ROAD_LINE_BROKEN_DOUBLE_YELLOW": 10,
    "ROAD_LINE_SOLID_SINGLE_YELLOW": 11,
    "ROAD_LINE_SOLID_DOUBLE_YELLOW": 12,
    "ROAD_LINE_PASSING_DOUBLE_YELLOW": 13,
    "ROAD_EDGE_BOUNDARY": log.EDGE_BOUNDARY,
    "ROAD_EDGE_MEDIAN": log.EDGE_MEDIAN,
    "STOP_SIGN": log.STOP_SIGN,
    "CROSSWALK": log.CROSSWALK,
    "SPEED_BUMP": log.SPEED_BUMP,
    "DRIVEWAY": log.DRIVEWAY,
}
PREFIXES = {"LANE": log.LANE_STREET, "ROAD_LINE": log.ROAD_LINES[0], "ROAD_EDGE": log.EDGE_BOUNDARY}
"""Types by their prefix, where `FEATURES` does not have it; any other is 0, which means nothing."""

STATES = {f"LANE_STATE_{name.upper()}": state for state, name in enumerate(log.LIGHT_STATES)} | {
    "TRAFFIC_LIGHT_RED": log.LIGHT_STOP,
    "TRAFFIC_LIGHT_YELLOW": log.LIGHT_CAUTION,
    "TRAFFIC_LIGHT_GREEN": log.LIGHT_GO,
}


def read(data: bytes) -> Log:
    """The log of one pickle; `Malformed` where it is none."""
    document = unpickle(data)
    if not isinstance(document, dict) or not isinstance(document.get("tracks"), dict) or "map_features" not in document:
        raise Malformed("it is a pickle, but has no `tracks` and `map_features` as a ScenarioNet scenario has")
    try:
        return check(_log(document))
    except Malformed:
        raise
    except (MemoryError, ArithmeticError, *WRONG) as error:
        raise Malformed(f"it has not ScenarioNet's structure: {type(error).__name__}: {str(error)[:200]}") from error


def _log(document: dict[str, Any]) -> Log:
    metadata, named = document["metadata"], document["tracks"]
    steps = int(document["length"])
    places = {str(key): index for index, key in enumerate(named)}
    ego = places.get(str(metadata.get("sdc_id")), number(metadata.get("sdc_track_index"), -1))
    predict = metadata.get("tracks_to_predict") or ()
    lights, stamps = document.get("dynamic_map_states"), metadata.get("ts")
    return Log(
        id=str(document["id"]),
        source="scenarionet",
        times=times_of(np.zeros(0) if stamps is None else values(stamps), steps),
        current=number(metadata.get("current_time_index"), 0),
        tracks=_tracks(named, steps),
        sdc=ego,
        # each is given by its id or as {"track_index": ...}
        predict=tuple(
            int(each["track_index"]) if isinstance(each, dict) else places[str(each)] for each in listed(predict)
        ),
        features=_features(document["map_features"]),
        lights=no_lights(steps) if lights is None else _lights(lights, steps),
        has_lights=lights is not None,
    )


def listed(value: Any) -> list[Any]:
    """A list, a tuple, the keys of a dictionary or an array as a list; None as the empty one."""
    return value.plain() if isinstance(value, Array) else list(value or ())


def values(value: Any) -> np.ndarray:
    """An array, a list of numbers or a list of lists of numbers as float64."""
    if isinstance(value, Array):
        return value.real().astype(np.float64)
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        # to floats one by one: nested references could stand for more numbers than there is memory
        if len(value) * max(map(len, value)) > MOST_STATES:
            raise Malformed(f"a list of {len(value)} lists: too many numbers")
        return np.array([[float(each) for each in row] for row in value])
    if isinstance(value, list | tuple):
        return np.array([float(each) for each in value])
    return np.array(float(value))


def _tracks(named: dict[Any, Any], steps: int) -> Tracks:
    n = len(named)
    if not n or steps < 1 or n * steps > MOST_STATES:
        raise Malformed(f"it has {n} tracks over {steps} steps")
    states = [track["state"] for track in named.values()]
    # first of all the shapes: nothing is allocated for steps that are not there
    valid = np.stack([_column(state, "valid", steps, 1)[:, 0] == 1 for state in states])

    def column(name: str, width: int) -> np.ndarray:
        return np.where(valid[..., None], np.stack([_column(state, name, steps, width) for state in states]), 0.0)

    kind = np.array([KINDS.get(str(track["type"]), log.OTHER) for track in named.values()], np.int8)
    size = np.concatenate([column(name, 1) for name in ("length", "width", "height")], axis=-1)
    # The nuScenes converter writes the ego's width as its length: no vehicle is wider than it is long.
    crosswise = (kind == log.VEHICLE)[:, None] & (size[..., 0] < size[..., 1])
    size[..., :2] = np.where(crosswise[..., None], size[..., 1::-1], size[..., :2])
    return Tracks(
        id=np.array([number(key, index) for index, key in enumerate(named)], np.int64),
        kind=kind,
        position=column("position", 3),
        heading=column("heading", 1)[..., 0].astype(np.float32),
        velocity=column("velocity", 2).astype(np.float32),
        size=size.astype(np.float32),
        valid=valid,
    )


def _column(state: dict[str, Any], name: str, steps: int, width: int) -> np.ndarray:
    """One entry of a track's state as [steps, width]; a missing z is 0, a single number serves for all steps."""
    if name not in state and name in ("length", "width", "height"):
        return np.zeros((steps, 1))
    array = values(state[name])
    if array.ndim < 2:
        array = array.reshape(-1, 1)
    if len(array) == 1 and width == 1:
        array = np.repeat(array, steps, axis=0)
    if array.shape == (steps, 2) and width == 3:
        array = flat(array)
    if array.shape[0] != steps or array.shape[1] < width:
        raise Malformed(f"a track's {name} has shape {array.shape}, not ({steps}, {width})")
    return array[:, :width]


def _features(named: dict[Any, Any]) -> tuple[Feature, ...]:
    numeric = all(str(key).isascii() and str(key).isdigit() for key in named)
    ids = {str(key): number(key, index) if numeric else index for index, key in enumerate(named)}
    features, total = [], 0
    for key, each in named.items():
        points = _shape(each)
        total += len(points)
        if total > MOST_STATES:
            raise Malformed(f"its map has more than {MOST_STATES} points")
        kind = str(each["type"])
        if len(points):
            features.append(
                Feature(
                    id=ids[str(key)],
                    kind=FEATURES.get(kind, next((PREFIXES[start] for start in PREFIXES if kind.startswith(start)), 0)),
                    points=points,
                    entry=tuple(ids[str(lane)] for lane in listed(each.get("entry_lanes")) if str(lane) in ids),
                    exit=tuple(ids[str(lane)] for lane in listed(each.get("exit_lanes")) if str(lane) in ids),
                    speed_limit=_limit(each),
                    junction=each.get("interpolating") is True,
                )
            )
    if {feature.speed_limit for feature in features} <= {None, FILL_IN}:
        features = [replace(feature, speed_limit=None) for feature in features]
    return tuple(features)


def _shape(feature: dict[str, Any]) -> np.ndarray:
    """A feature's points, float64 [P, 3]: its polyline, else its outline, else its position."""
    for name in ("polyline", "polygon", "position"):
        if feature.get(name) is not None:
            points = values(feature[name])
            points = points.reshape(1, -1) if points.ndim == 1 and len(points) else points
            if points.ndim != 2 or points.shape[1] not in (2, 3):
                return np.zeros((0, 3))
            return points if points.shape[1] == 3 else flat(points)
    return np.zeros((0, 3))


FILL_IN = 100 / 3.6
"""m/s: the speed limit that ScenarioNet writes for lanes of sources that have none, such as nuScenes. A map in which
no lane has another one is taken to have no speed limits."""


def _limit(feature: dict[str, Any]) -> float | None:
    """The speed limit, m/s."""
    for name, unit in (("speed_limit_mph", log.MPH), ("speed_limit_kmh", 1 / 3.6)):
        if feature.get(name) is not None:
            limit = float(values(feature[name]).reshape(-1)[0])
            return FILL_IN if name == "speed_limit_kmh" and limit == 100.0 else limit * unit
    return None


def _state(colour: Any) -> int:
    """Our number of a light's state, of its name or of WOMD's number."""
    if isinstance(colour, int | np.integer):
        return int(colour) if 0 <= colour < len(log.LIGHT_STATES) else 0
    return STATES.get(str(colour), 0)


def _first(by_step: Any) -> Any:
    """The first row of what is given by step that is not all 0, which fills steps without a value."""
    rows = values(by_step)
    known = np.flatnonzero(rows.reshape(len(rows), -1).any(axis=1))
    return rows[known[0] if len(known) else 0]


def _lights(named: dict[Any, Any], steps: int) -> Lights:
    """One light a lane; a step without a state is one at which the source knew nothing.

    MetaDrive's files from before ScenarioNet have lanes and stop points by step, and WOMD's numbers for states, with 0
    at steps of which the source knew nothing.
    """
    if not named:
        return no_lights(steps)
    if len(named) * steps > MOST_STATES:
        raise Malformed(f"it has {len(named)} lights over {steps} steps")
    states, valid = np.zeros((len(named), steps), np.int8), np.zeros((len(named), steps), bool)
    lanes, positions = [], []
    for row, (key, light) in enumerate(named.items()):
        state = light["state"]
        colours = listed(state["object_state"])
        if len(colours) != steps:
            raise Malformed(f"the light of lane {key} has {len(colours)} states, not {steps}")
        valid[row] = [colour not in (None, "", 0) for colour in colours]
        states[row] = [_state(colour) for colour in colours]
        lane = light["lane"] if "lane" in light else _first(state["lane"]) if "lane" in state else key
        lanes.append(number(lane, row))
        point = values(light["stop_point"]) if "stop_point" in light else _first(state["stop_point"])
        point = point if point.ndim == 1 else point.reshape(-1, point.shape[-1])[0]
        positions.append([*point[:3].tolist(), 0.0][:3])
    return Lights(np.array(lanes, np.int64), np.array(positions, np.float64), states, valid)
