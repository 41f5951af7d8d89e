"""Features over time of agents in rollouts of one world: how they move, what is near, where the road ends.

The features of the Waymo Open Sim Agents Challenge (arXiv 2305.12032), measured on trajectories alone, so that the log
and any simulator are measured alike: speed and yaw rate and their change by central differences, the exact distance
between boxes, time to collision with who is followed, the signed distance of a box to the road's edge, and whether
a box ever overlapped another, left the road or passed a red light. Time to collision and red lights are those of
vehicles.

R rollouts, T frames, N objects, A simulated agents. Metres, radians, seconds. NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import VEHICLE
from longhaul.driving.scenario.scenario import CELL, ROUTE_SPACING, Scenario
from longhaul.spaces import Measure

HORIZON = 5.0
"""Time to collision, s, of who nears nobody: more than this is not looked at."""

ALIGNED = np.cos(np.deg2rad(45.0))
"""An object ahead counts as followed where its heading differs by less than 45 degrees."""

BEYOND_LINE = 5.0
"""A stop line holds for who passes within this lateral distance, m, of its route, as in `driving.features`."""

RED = 1

CHUNK = 1 << 19
"""Pairs of an agent and an object that are looked at together."""


class Scene(NamedTuple):
    """Constants of all rollouts, and which objects are simulated."""

    dt: float
    size: np.ndarray  # float [N, 2]: length, width
    agents: np.ndarray  # int [A], index into N
    vehicle: np.ndarray  # bool [A]
    stops: np.ndarray  # float [A, L, 3]: x, y, heading where the route meets a stop line; NaN is padding
    lights: np.ndarray  # int8 [A, L, T]
    field: np.ndarray  # int16 [H, W] as in Scenario
    origin: np.ndarray  # float [2]


class Features(NamedTuple):
    """Features of agents' motion."""

    series: dict[str, Measure]  # [R, T, A] each, by the names of `realism.BINS`
    events: dict[str, Measure]  # [R, A] each: "collision", "offroad", "red_light"


def scene(scenario: Scenario) -> Scene:
    """The scene of a scenario whose controlled agents are simulated."""
    slots = np.flatnonzero(scenario.controlled >= 0)
    agents = scenario.controlled[slots]
    s = scenario.light_s[slots]
    on = np.isfinite(s) & (s >= 0.0) & (s <= ROUTE_SPACING * (scenario.route_points[slots, None] - 1))
    s = np.where(on, s, 0.0)
    index = (s / ROUTE_SPACING).astype(int)
    stops = scenario.route[slots[:, None], index].astype(float)
    rest = s - ROUTE_SPACING * index
    stops[..., 0] += rest * np.cos(stops[..., 2])
    stops[..., 1] += rest * np.sin(stops[..., 2])
    return Scene(
        dt=float(scenario.dt),
        size=scenario.size.astype(float),
        agents=agents,
        vehicle=scenario.kind[agents] == VEHICLE,
        stops=np.where(on[..., None], stops, np.nan),
        lights=scenario.light_state[slots],
        field=scenario.field,
        origin=np.asarray(scenario.field_origin, float),
    )


def measure(stage: Scene, pose: np.ndarray, present: np.ndarray) -> Features:
    """The features of rollouts [R, T, N, 3]. Frame 0 tells nothing: all begin there."""
    dt, own = stage.dt, stage.agents
    pose = pose.astype(np.float64)
    velocity = _rate(pose[..., :2], present[..., None], dt)
    speed = Measure(np.hypot(*np.moveaxis(velocity.value, -1, 0)), velocity.valid[..., 0])
    turn = _rate(pose[..., 2], present, dt, angle=True)
    acceleration, angular = (_rate(m.value[..., own], m.valid[..., own], dt) for m in (speed, turn))
    later = np.arange(pose.shape[1]) > 0
    there = present[..., own] & later[:, None]
    distance, time = _neighbours(stage, pose, present, velocity)
    off = clearance(stage, pose)
    edge = Measure(off, there & (stage.field.size > 0))
    near = Measure(np.where(np.isfinite(distance), distance, 1e3), there & np.isfinite(distance))
    series = {
        "linear_speed": Measure(speed.value[..., own], speed.valid[..., own]),
        "linear_acceleration": acceleration,
        "angular_speed": Measure(turn.value[..., own], turn.valid[..., own]),
        "angular_acceleration": angular,
        "distance_to_object": near,
        "time_to_collision": Measure(time.value, time.valid & stage.vehicle & later[:, None]),
        "distance_to_road_edge": edge,
    }
    played = np.any(there, axis=1)
    events = {
        "collision": Measure((there & (distance < 0.0)).any(1), played),
        "offroad": Measure((edge.valid & (off > 0.0)).any(1), edge.valid.any(1)),
        "red_light": _ran_red(stage, pose, present, played),
    }
    return Features(series, events)


def _rate(values: np.ndarray, valid: np.ndarray, dt: float, angle: bool = False) -> Measure:
    """The central difference along axis 1; valid where both neighbours and the step itself are."""
    change, known = np.zeros_like(values), np.zeros(valid.shape, bool)
    known[:, 1:-1] = valid[:, :-2] & valid[:, 1:-1] & valid[:, 2:]
    if angle:  # the turn of each step by itself, so that half a turn in two steps is not taken for its opposite
        step = np.diff(values, axis=1)
        step = np.arctan2(np.sin(step), np.cos(step))
        change[:, 1:-1] = (step[:, :-1] + step[:, 1:]) / (2 * dt)
    else:
        change[:, 1:-1] = (values[:, 2:] - values[:, :-2]) / (2 * dt)
    return Measure(np.where(known, change, 0.0), known)


def clearance(stage: Scene, pose: np.ndarray) -> np.ndarray:
    """[R, T, A]: the signed distance to the road's edge of the corner that is farthest out, m; 0 without a field."""
    if stage.field.size == 0:
        return np.zeros((*pose.shape[:2], len(stage.agents)))
    body = pose[:, :, stage.agents]
    half = stage.size[stage.agents] / 2
    cos, sin = np.cos(body[..., 2]), np.sin(body[..., 2])
    rows, columns = stage.field.shape
    worst = np.full(cos.shape, -np.inf)
    for along, beside in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        u, v = along * half[:, 0], beside * half[:, 1]
        place = np.stack([body[..., 0] + u * cos - v * sin, body[..., 1] + u * sin + v * cos], -1)
        at = (np.nan_to_num(place) - stage.origin) / CELL
        inside = np.clip(at, 0.0, (columns - 1, rows - 1))
        beyond = CELL * np.abs(at - inside).sum(-1)
        corner = np.minimum(inside.astype(int), (columns - 2, rows - 2))
        x, y = corner[..., 0], corner[..., 1]
        across, up = inside[..., 0] - x, inside[..., 1] - y
        low = stage.field[y, x] * (1 - across) + stage.field[y, x + 1] * across
        high = stage.field[y + 1, x] * (1 - across) + stage.field[y + 1, x + 1] * across
        worst = np.maximum(worst, 0.01 * (low * (1 - up) + high * up) + beyond)
    return worst


def _ran_red(stage: Scene, pose: np.ndarray, present: np.ndarray, played: np.ndarray) -> Measure:
    """[R, A]: whether the front bumper passed a stop line, red before and after; valid for vehicles that meet one."""
    passed = np.zeros(played.shape, bool)
    for a, agent in enumerate(stage.agents):
        body, there = pose[:, :, agent], present[:, :, agent]
        forward = np.stack([np.cos(body[..., 2]), np.sin(body[..., 2])], -1)
        front = body[..., :2] + stage.size[agent, 0] / 2 * forward
        for (x, y, heading), lights in zip(stage.stops[a], stage.lights[a], strict=True):
            if not np.isfinite(x):
                continue
            way = np.array([np.cos(heading), np.sin(heading)])
            offset = front - np.array([x, y])
            along, beside = offset @ way, offset @ np.array([-way[1], way[0]])
            red = lights[: pose.shape[1]] == RED
            over = (along[:, :-1] < 0.0) & (along[:, 1:] >= 0.0) & (red[:-1] & red[1:])
            over &= (np.abs(beside[:, 1:]) <= BEYOND_LINE) & ((forward @ way)[:, 1:] > 0.0)
            passed[:, a] |= np.any(over & there[:, :-1] & there[:, 1:], axis=1)
    meets = stage.vehicle & np.isfinite(stage.stops[..., 0]).any(1)
    return Measure(passed, played & meets)


def _neighbours(
    stage: Scene, pose: np.ndarray, present: np.ndarray, velocity: Measure
) -> tuple[np.ndarray, Measure]:  # fmt: skip
    """(distance to the nearest object, m, inf where there is none; time to collision, s), each [R, T, A]."""
    rollouts, frames, objects = present.shape
    agents = len(stage.agents)
    flat = rollouts * frames
    poses, here = pose.reshape(flat, objects, 3), present.reshape(flat, objects)
    moves = velocity.value.reshape(flat, objects, 2)
    known = velocity.valid[..., 0].reshape(flat, objects)
    block = max(1, CHUNK // max(1, agents * objects))
    parts = [
        _look_around(stage, poses[i : i + block], here[i : i + block], moves[i : i + block], known[i : i + block])
        for i in range(0, flat, block)
    ]
    distance, time, valid = (
        np.concatenate(part).reshape(rollouts, frames, agents) for part in zip(*parts, strict=True)
    )
    return distance, Measure(time, valid)


def _look_around(
    stage: Scene, pose: np.ndarray, here: np.ndarray, velocity: np.ndarray, known: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distance, time to collision, whether that is known) [F, A] of frames [F, N, ...]."""
    own, half = stage.agents, stage.size / 2
    cos, sin = np.cos(pose[..., 2]), np.sin(pose[..., 2])
    offset = pose[:, None, :, :2] - pose[:, own][:, :, None, :2]
    dx, dy = offset[..., 0], offset[..., 1]
    c0, s0 = cos[:, own, None], sin[:, own, None]
    x, y = dx * c0 + dy * s0, dy * c0 - dx * s0
    c, s = cos[:, None] * c0 + sin[:, None] * s0, sin[:, None] * c0 - cos[:, None] * s0
    seen = here[:, None, :] & here[:, own, None] & (own[:, None] != np.arange(pose.shape[1]))

    # Boxes lie between their inner and outer circles: only who can be the nearest by these is measured exactly.
    centre, outer, inner = np.hypot(x, y), np.hypot(*half.T), half.min(-1)
    farthest = np.where(seen, centre - inner[own, None] - inner, np.inf).min(-1, keepdims=True)
    close = seen & (centre - outer[own, None] - outer <= farthest)
    distance = np.full(x.shape, np.inf)
    f, a, n = np.nonzero(close)
    distance[f, a, n] = boxes_apart(x[f, a, n], y[f, a, n], c[f, a, n], s[f, a, n], half[own[a]], half[n])

    long, wide = half[:, 0] * np.abs(c) + half[:, 1] * np.abs(s), half[:, 0] * np.abs(s) + half[:, 1] * np.abs(c)
    followed = seen & (x > 0.0) & (c > ALIGNED) & (np.abs(y) < half[own, 1, None] + wide)
    gap = np.where(followed, x - half[own, 0, None] - long, np.inf)
    leader = gap.argmin(-1)
    at = np.take_along_axis(gap, leader[..., None], -1)[..., 0]
    frame = np.arange(len(pose))[:, None]
    relative = velocity[:, own] - velocity[frame, leader]
    closing = relative[..., 0] * cos[:, own] + relative[..., 1] * sin[:, own]
    nearing = np.isfinite(at) & (closing > 1e-6)
    time = np.where(nearing, np.maximum(np.where(nearing, at, 0.0), 0.0) / np.where(nearing, closing, 1.0), HORIZON)
    valid = here[:, own] & known[:, own] & (~np.isfinite(at) | known[frame, leader])
    return distance.min(-1), np.minimum(time, HORIZON), valid


def boxes_apart(
    x: np.ndarray, y: np.ndarray, cos: np.ndarray, sin: np.ndarray, half: np.ndarray, other: np.ndarray
) -> np.ndarray:
    """[P]: the distance of pairs of boxes, m; where they overlap, minus the shortest way that would part them.

    `x`, `y`: the other's centre in the frame of the one; `cos`, `sin`: of the difference of headings; `half` and
    `other` [P, 2]: half lengths and widths. Disjoint boxes are nearest at a corner of one of them.
    """
    u, v = -(x * cos + y * sin), x * sin - y * cos  # the one's centre in the frame of the other
    c, s = np.abs(cos), np.abs(sin)
    reach = (other[:, 0] * c + other[:, 1] * s, other[:, 0] * s + other[:, 1] * c)
    back = (half[:, 0] * c + half[:, 1] * s, half[:, 0] * s + half[:, 1] * c)
    overlap = np.stack([np.abs(x) - half[:, 0] - reach[0], np.abs(y) - half[:, 1] - reach[1],
                        np.abs(u) - other[:, 0] - back[0], np.abs(v) - other[:, 1] - back[1]]).max(0)  # fmt: skip
    apart = np.full(len(x), np.inf)
    for px, py, sine, box, corners in ((x, y, sin, half, other), (u, v, -sin, other, half)):
        for i, j in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            cx = px + i * corners[:, 0] * cos - j * corners[:, 1] * sine
            cy = py + i * corners[:, 0] * sine + j * corners[:, 1] * cos
            outside = np.maximum(np.abs(np.stack([cx, cy], -1)) - box, 0.0)
            apart = np.minimum(apart, np.hypot(outside[:, 0], outside[:, 1]))
    return np.where(overlap < 0.0, overlap, apart)
