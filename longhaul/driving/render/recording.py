"""One episode of driving as arrays, of which pictures are made; and the polylines that they draw: cut, thinned, dashed.

No JAX here: NumPy in, files out. T frames, N agents, R route points, L lights, P points of one polyline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longhaul.driving.scenario.from_log import runs
from longhaul.driving.scenario.scenario import ROUTE_SPACING, Scenario

GOOD_EVENTS = ("goal",)
"""Events that are no fault; every other name of `Recording.events` is drawn as one."""

ROLES = {
    "ground": ("#ebede8", "#15181c"), "road": ("#cbd0d6", "#2c3138"), "bike": ("#cfdacb", "#26302a"),
    "line": ("#ffffff", "#8b939c"), "yellow": ("#d6a100", "#b8902a"), "edge": ("#7b828a", "#68717b"),
    "crosswalk": ("#f4f6f8", "#4a525b"), "bump": ("#beb49f", "#4c473c"), "stop": ("#b5483b", "#c9655a"),
    "route": ("#93c3e4", "#1f4c6c"), "ego": ("#0072b2", "#4cb3f0"), "vehicle": ("#68717c", "#a2abb5"),
    "pedestrian": ("#d98c00", "#f0b429"), "cyclist": ("#b04a90", "#e38dc4"), "other": ("#94897a", "#b0a594"),
    "outline": ("#ffffff", "#15181c"), "ghost": ("#23272c", "#eef1f4"), "red": ("#d55e00", "#ff7a2e"),
    "amber": ("#e8b400", "#ffd23d"), "green": ("#009e73", "#2fd3a5"), "unknown": ("#9aa1a9", "#7d858e"),
    "fault": ("#d55e00", "#ff7a2e"), "good": ("#009e73", "#2fd3a5"), "ink": ("#1c1f23", "#e8eaed"),
    "muted": ("#5d656e", "#9aa3ad"), "panel": ("#ffffff", "#1d2126"),
}  # fmt: skip
"""Colour of each role on a light and on a dark page. They differ with the common kinds of colour blindness, too (most
are Okabe and Ito's)."""

LIGHT = {role: light for role, (light, _) in ROLES.items()}
DARK = {role: dark for role, (_, dark) in ROLES.items()}


class Verdict(NamedTuple):
    """Events and scores of an agent other than the ego."""

    agent: int  # index into N
    events: dict[str, int | None]  # as those of a Recording
    metrics: dict[str, float]


class Recording(NamedTuple):
    """An episode of one world. Metres, radians, seconds; x east, y north.

    Agents that are not `present` at a frame are not drawn at it; of an absent agent's pose nothing is read. The camera
    follows the agent `ego`. `events` gives the frame at which something happened, None where it did not.

    Example, from a simulator that drove the ego of a `Scenario` to poses `driven` [T, 3]::

        log = replay(scenario)
        pose = log.pose.copy()
        pose[:, log.ego] = driven
        picture = log._replace(pose=pose, label="trained", events={"collision": None}, metrics={"progress": 0.97})
    """

    id: str  # the scenario
    dt: float  # seconds between two frames
    pose: np.ndarray  # float32 [T, N, 3]: x, y, heading
    size: np.ndarray  # float32 [N, 2]: length, width
    kind: np.ndarray  # int8 [N]: 1 vehicle, 2 pedestrian, 3 cyclist, 4 other, 0 padding
    present: np.ndarray  # bool [T, N]
    controlled: np.ndarray  # bool [N], drawn in the strong colour
    expert: np.ndarray | None  # float32 [T, 3]: the ego's logged pose, drawn as an outline; rows of NaN are not drawn
    route: np.ndarray  # float32 [R, 2], R may be 0
    light_position: np.ndarray  # float32 [L, 2], L may be 0; rows of NaN are not drawn
    light_state: np.ndarray  # int8 [L, T]: 0 unknown, 1 red, 2 yellow, 3 green
    drawing: tuple[tuple[int, np.ndarray], ...]  # the map: kinds as in datasets/log.py, float32 [P, 2]
    events: dict[str, int | None]  # "collision", "offroad", "red_light", "goal", ...: the frame
    label: str  # the policy's name
    metrics: dict[str, float]
    ego: int = 0  # index into N
    others: tuple[Verdict, ...] = ()  # of further agents, those that are known


def check(recordings: Sequence[Recording]) -> None:
    """Raises ValueError, naming the recording and the array, where shapes do not fit or there is nothing to draw."""
    if not recordings:
        raise ValueError("nothing to draw: 0 recordings; give at least one")
    for recording in recordings:
        for fault in _faults(recording):
            raise ValueError(f"recording {recording.id!r} ({recording.label}): {fault}")


def _faults(r: Recording) -> Iterator[str]:
    frames, agents = r.present.shape if r.present.ndim == 2 else (0, 0)
    if frames == 0 or agents == 0:
        yield f"present has shape {r.present.shape}, expected [T, N], both > 0"
    if not 0 <= r.ego < agents:
        yield f"ego is {r.ego}, expected 0 .. {agents - 1}"
    if not r.dt > 0:
        yield f"dt is {r.dt}, expected seconds > 0"
    for verdict in r.others:
        if not 0 <= verdict.agent < agents:
            yield f"others has agent {verdict.agent}, expected 0 .. {agents - 1}"
    for events in (r.events, *(verdict.events for verdict in r.others)):
        for event, frame in events.items():
            if frame is not None and not 0 <= frame < frames:
                yield f"{event} at frame {frame}, expected 0 .. {frames - 1} or None"
    lights = len(r.light_position)
    shapes = {
        "pose": (frames, agents, 3),
        "size": (agents, 2),
        "kind": (agents,),
        "controlled": (agents,),
        "route": (len(r.route), 2),
        "light_position": (lights, 2),
        "light_state": (lights, frames),
    }
    if r.expert is not None:
        shapes["expert"] = (frames, 3)
    for name, shape in shapes.items():
        if getattr(r, name).shape != shape:
            yield f"{name} has shape {getattr(r, name).shape}, expected {shape}"
    if not (np.isfinite(r.pose[r.present]).all() and np.isfinite(r.route).all()):
        yield "route or pose of a present agent is not finite"


def replay(scenario: Scenario, label: str = "log") -> Recording:
    """The recording of the log itself: everyone where the log has them."""
    drivers = scenario.controlled[scenario.controlled >= 0]
    ego = int(drivers[0])
    controlled = np.zeros(scenario.kind.shape, bool)
    controlled[drivers] = True
    expert = np.where(scenario.present[:, ego, None], scenario.pose[:, ego], np.nan).astype(np.float32)
    points = int(scenario.route_points[0])
    real = np.isfinite(scenario.light_s[0])
    route, at = scenario.route[0, :points, :2], ROUTE_SPACING * np.arange(points)
    lights = np.stack([np.interp(scenario.light_s[0][real], at, xy) for xy in route.T], -1)
    return Recording(
        id=scenario.id, dt=scenario.dt, pose=scenario.pose, size=scenario.size, kind=scenario.kind,
        present=scenario.present & (scenario.kind > 0), controlled=controlled, expert=expert, route=route,
        light_position=lights.astype(np.float32),
        light_state=scenario.light_state[0][real],
        drawing=scenario.drawing, events={}, label=label, metrics={}, ego=ego,
    )  # fmt: skip


def speeds(recording: Recording) -> np.ndarray:
    """float32 [T]: the ego's speed at each frame, m/s, from where it is next; NaN where it is not present."""
    present = recording.present[:, recording.ego]
    position = np.where(present[:, None], recording.pose[:, recording.ego, :2], np.nan)
    speed = np.linalg.norm(np.diff(position, axis=0), axis=-1) / recording.dt
    speed = np.concatenate([speed, np.full(1, np.nan)])
    # the last frame before an end has no next one: it keeps the speed that it arrived with
    before = np.concatenate([np.full(1, np.nan), speed[:-1]])
    speed = np.where(np.isfinite(speed), speed, before)
    return np.where(present, np.where(np.isfinite(speed), speed, 0.0), np.nan).astype(np.float32)


def camera(recording: Recording) -> np.ndarray:
    """float32 [T, 2]: where to look: at the ego, or where it was last (first, before it came)."""
    present_steps = np.flatnonzero(recording.present[:, recording.ego])
    if len(present_steps) == 0:
        return np.zeros((len(recording.present), 2), np.float32)
    latest = np.searchsorted(present_steps, np.arange(len(recording.present)), side="right") - 1
    return recording.pose[present_steps[np.maximum(latest, 0)], recording.ego, :2]


# ---------------------------------------------------------------------------- polylines [P, 2] and boxes of pictures


def clip(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """The runs of segments whose own boxes meet the box `low` .. `high`; points stay, so ends may stand out."""
    if len(points) < 2:
        inside = len(points) == 1 and bool(np.all((points[0] >= low) & (points[0] <= high)))
        return [points] if inside else []
    first, second = points[:-1], points[1:]
    meets = np.all((np.minimum(first, second) <= high) & (np.maximum(first, second) >= low), axis=-1)
    return [points[run.start : run.stop + 1] for run in runs(meets)]


def simplify(points: np.ndarray, tolerance: float) -> np.ndarray:
    """Fewer points, nowhere further than `tolerance` metres from the line (Ramer, 1972; Douglas and Peucker, 1973)."""
    keep = np.zeros(len(points), bool)
    keep[[0, -1]] = True
    stack = [(0, len(points) - 1)]
    while stack:
        start, stop = stack.pop()
        if stop - start < 2:
            continue
        along = points[stop] - points[start]
        away = points[start + 1 : stop] - points[start]
        share = np.clip(away @ along / max(float(along @ along), 1e-12), 0.0, 1.0)
        distance = np.linalg.norm(away - share[:, None] * along, axis=-1)
        worst = int(np.argmax(distance))
        if distance[worst] > tolerance:
            middle = start + 1 + worst
            keep[middle] = True
            stack += [(start, middle), (middle, stop)]
    return points[keep]


def dashes(points: np.ndarray, on: float, off: float) -> list[np.ndarray]:
    """The line's pieces of `on` metres with gaps of `off` metres."""
    length = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=-1))])
    pieces = []
    for start in np.arange(0.0, length[-1], on + off):
        stop = min(start + on, length[-1])
        inner = points[(length > start) & (length < stop)]
        ends = np.stack([np.interp([start, stop], length, points[:, axis]) for axis in (0, 1)], -1)
        pieces.append(np.concatenate([ends[:1], inner, ends[1:]]))
    return pieces


def box(pose: np.ndarray, length: float, width: float) -> np.ndarray:
    """[4, 2]: the corners of a box at `pose` (x, y, heading): front left, rear left, rear right, front right."""
    cos, sin = np.cos(pose[2]), np.sin(pose[2])
    corners = 0.5 * np.array([[length, width], [-length, width], [-length, -width], [length, -width]])
    return pose[:2] + corners @ np.array([[cos, sin], [-sin, cos]])
