"""One driving log as its source has it: the meeting point of all readers, the generator, and the simulator's compiler.

Nothing is padded, thinned, rotated or shifted here. Metres, radians, seconds; world coordinates in float64.
N tracks, T steps, P points of one road feature, L lights. Each reader's last step is `check`: a log that passes has
consistent shapes and finite numbers, so that nothing behind the readers needs to ask again.
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
"""States of a light, likewise: 1-3 arrow stop, caution, go; 4-6 the same without arrow; 7, 8 flashing stop, caution."""

STEP = 0.1
"""Seconds between steps where a file does not say."""

MPH = 0.44704
"""Metres per second in a mile per hour."""

LIGHT_STATES = (
    *("unknown", "arrow_stop", "arrow_caution", "arrow_go", "stop", "caution", "go"),
    *("flashing_stop", "flashing_caution"),
)
"""Their names, in files that write them."""

MOST_SIGHTINGS = 1 << 26
"""States of lights, seen or not, that one log may have."""

FARTHEST = 1e8
"""Metres from the origin of the source's coordinates. Map projections stay below 2e7."""

LARGEST, FASTEST = 1e3, 1e3
"""Metres of a box's side, and m/s: far beyond what drives, and small enough for float32 arithmetic."""

MOST_STEPS = 1 << 16


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


class LibraryMissing(BadData):
    """A file whose format needs a library that is not installed."""


class Malformed(ValueError):
    """Bytes that are no such message. Readers of files turn it into `BadData` with the path."""


def told(error: Malformed) -> str:
    """Description of a fault on one line: a file's own words may be long, or control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(error)[:300])


def no_lights(steps: int) -> Lights:
    """No lights over `steps` steps."""
    empty = np.zeros((0, steps))
    return Lights(np.zeros(0, np.int64), np.zeros((0, 3)), empty.astype(np.int8), empty.astype(bool))


def times_of(stamps: np.ndarray, steps: int, unit: float = 1.0) -> np.ndarray:
    """Seconds from the first of `steps` steps, by time stamps in `unit` s; STEP apart where they do not grow."""
    if stamps.shape == (steps,) and np.isfinite(stamps).all() and (np.diff(stamps) > 0).all():
        return (stamps - stamps[0]).astype(np.float64) * unit
    return np.arange(steps) * STEP


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


def check(log: Log) -> Log:
    """`log` itself, or `Malformed` with what is wrong."""
    tracks, lights = log.tracks, log.lights
    n, t = tracks.valid.shape
    if not 1 <= t <= MOST_STEPS:
        raise Malformed(f"it has {t} steps; 1 to {MOST_STEPS} are possible")
    if n == 0:
        raise Malformed("it has no tracks")
    expected = {
        "id": (n,),
        "kind": (n,),
        "position": (n, t, 3),
        "heading": (n, t),
        "velocity": (n, t, 2),
        "size": (n, t, 3),
    }
    for name, shape in expected.items():
        if getattr(tracks, name).shape != shape:
            raise Malformed(f"the tracks' {name} has shape {getattr(tracks, name).shape}, not {shape}")
    if log.times.shape != (t,) or not np.isfinite(log.times).all() or (np.diff(log.times) <= 0).any():
        raise Malformed("the times of its steps do not grow")
    if not 0 <= log.current < t:
        raise Malformed(f"its current step {log.current} is not one of its {t} steps")
    if not 0 <= log.sdc < n:
        raise Malformed(f"the ego's index {log.sdc} is not one of its {n} tracks")
    if not tracks.valid[log.sdc].any():
        raise Malformed(f"the ego (track {log.sdc}) is valid at no step")
    for index in log.predict:
        if not 0 <= index < n:
            raise Malformed(f"the index {index} of a track to predict is not one of its {n} tracks")
    _bounded(tracks.position[tracks.valid], FARTHEST, "a track's position")
    _bounded(tracks.heading[tracks.valid], 1e4, "a track's heading")
    _bounded(tracks.velocity[tracks.valid], FASTEST, "a track's velocity")
    _bounded(tracks.size[tracks.valid], LARGEST, "a track's size")
    if (tracks.size[tracks.valid] < 0).any():
        raise Malformed("a track's size is negative")
    for feature in log.features:
        if feature.points.ndim != 2 or feature.points.shape[1] != 3 or len(feature.points) == 0:
            raise Malformed(
                f"the points of map feature {feature.id} have shape {feature.points.shape}, not (1 or more, 3)"
            )
        if feature.speed_limit is not None and not 0 <= feature.speed_limit <= FASTEST:
            raise Malformed(f"the speed limit of map feature {feature.id} is {feature.speed_limit} m/s")
    if log.features:
        _bounded(np.concatenate([feature.points for feature in log.features]), FARTHEST, "a point of the map")
    for path in log.paths:
        if path.points.ndim != 2 or path.points.shape[1] != 3 or len(path.points) < 2:
            raise Malformed(f"the points of a path have shape {path.points.shape}, not (2 or more, 3)")
        _bounded(path.points, FARTHEST, "a point of a path")
    rows = len(lights.lane)
    if lights.state.shape != (rows, t) or lights.valid.shape != (rows, t) or lights.position.shape != (rows, 3):
        raise Malformed(f"its lights have shapes {lights.state.shape} and {lights.position.shape}, not ({rows}, {t})")
    if ((lights.state < 0) | (lights.state > 8)).any():
        raise Malformed("a light's state is outside 0 .. 8")
    _bounded(lights.position, FARTHEST, "a light's position")
    return log


def _bounded(values: np.ndarray, bound: float, what: str) -> None:
    wrong = ~(np.abs(values) <= bound)  # NaN is wrong too
    if wrong.any():
        raise Malformed(f"{what} is {values[wrong][0]:g}: not finite, or beyond {bound:g}")
