"""One driving log as its source has it: the meeting point of all readers, the generator, and the simulator's compiler.

Nothing is padded, thinned, rotated or shifted here. Metres, radians, seconds; world coordinates in float64.
N tracks, T steps, P points of one road feature, L lights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

VEHICLE, PEDESTRIAN, CYCLIST, OTHER = 1, 2, 3, 4
"""Kinds of track, numbered as in the Waymo Open Motion Dataset."""

LANE_FREEWAY, LANE_STREET, LANE_BIKE = 1, 2, 3
ROAD_LINES = tuple(range(6, 14))
EDGE_BOUNDARY, EDGE_MEDIAN = 15, 16
STOP_SIGN, CROSSWALK, SPEED_BUMP, DRIVEWAY = 17, 18, 19, 20
"""Kinds of road feature, likewise."""

LIGHT_UNKNOWN, LIGHT_STOP, LIGHT_CAUTION, LIGHT_GO = 0, 4, 5, 6
LIGHT_RED = (1, 4, 7)
LIGHT_YELLOW = (2, 5, 8)
LIGHT_GREEN = (3, 6)
"""States of a light, likewise: 1-3 arrow stop, caution, go; 4-6 the same without arrow; 7, 8 flashing stop, caution."""


@dataclass(frozen=True)
class Tracks:
    """Tracks of all objects. Values of invalid steps mean nothing (readers write zeros)."""

    id: np.ndarray  # int64 [N]
    kind: np.ndarray  # int8 [N]
    position: np.ndarray  # float64 [N, T, 3], centre of the box
    heading: np.ndarray  # float32 [N, T]
    velocity: np.ndarray  # float32 [N, T, 2]
    size: np.ndarray  # float32 [N, T, 3]: length, width, height
    valid: np.ndarray  # bool [N, T]


@dataclass(frozen=True)
class Feature:
    """One feature of the map: a polyline, a polygon's outline (crosswalk, speed bump) or a point (stop sign).

    Road edges run with the road on their left, so that a point to the right of its nearest edge is off the road. Lane
    centres run in the direction of travel.
    """

    id: int
    kind: int
    points: np.ndarray  # float64 [P, 3]
    entry: tuple[int, ...] = ()  # lanes that lead into this one, where the source knows
    exit: tuple[int, ...] = ()
    speed_limit: float | None = None  # m/s
    junction: bool = False  # a lane within an intersection, where the source says so


@dataclass(frozen=True)
class Path:
    """A way on which the ego could go, as WOMD's `path_samples` has them (from 1.3.1 on; ScenarioMax too)."""

    points: np.ndarray  # float64 [P, 3]
    on_route: bool  # whether it leads where the ego went


@dataclass(frozen=True)
class Lights:
    """Traffic lights, one row a controlled lane. `valid` says at which steps the source knew of it."""

    lane: np.ndarray  # int64 [L], the `Feature.id` of the lane it controls
    position: np.ndarray  # float64 [L, 3], the stop point
    state: np.ndarray  # int8 [L, T]
    valid: np.ndarray  # bool [L, T]


@dataclass(frozen=True)
class Log:
    id: str
    source: str  # "womd", "gpudrive", "generated", ...
    times: np.ndarray  # float64 [T], seconds from the first step
    current: int  # the step at which simulation starts; before it is history
    tracks: Tracks
    sdc: int  # index of the recording vehicle (the ego) in tracks
    predict: tuple[int, ...]  # indices of the tracks that the source asks to predict
    features: tuple[Feature, ...]
    lights: Lights
    has_lights: bool = True  # False where the format has no such thing
    paths: tuple[Path, ...] = ()  # of the ego, where the source has any


class BadData(ValueError):
    """A data file that can't be used. The message is one line: the path, what is wrong, what to do."""


class Malformed(ValueError):
    """Bytes that are no such message. Readers of files turn it into `BadData` with the path."""


def told(error: Malformed) -> str:
    """Description of a fault on one line: a file's own words may be long, or control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(error)[:300])
