"""Likelihood of the log among what a simulator does: realism in the manner of the Waymo Open Sim Agents Challenge.

The world is simulated R times from one beginning. Of each simulated agent a few features are measured, their
distribution over the rollouts is estimated, and the log's own values are looked up in it (Montali et al., "The Waymo
Open Sim Agents Challenge", arXiv 2305.12032). As the paper has it, steps are samples of one distribution (an agent
need not do at the same second what the log did), a component is the exponential of the log-likelihood averaged over the
valid steps, and the meta metric is a weighted mean. Weights are those of the challenge of 2025.

Ours, where the paper leaves it open: the ranges and numbers of bins (`BINS`; values beyond count in the outermost),
one sample's weight spread over the bins so that nothing is impossible, central differences over two steps, the mean
over agents after the exponential, and that a component which no agent of a scenario has is left out with its weight.
Whether there was a collision, a corner off the road or a red light passed is one verdict for an episode. Time to
collision and red lights are those of vehicles. So the numbers tell simulators apart that were measured here; they
can't be set beside the challenge's table.

Even the log itself does not score 1: a feature that changes during the log is spread over several bins.

R rollouts, T frames, N objects, A simulated agents. Metres, radians, seconds. NumPy only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import VEHICLE
from longhaul.driving.scenario.scenario import CELL, RED, ROUTE_SPACING, Scenario
from longhaul.spaces import Measure

HORIZON = 5.0
"""Time to collision, s, of an object that approaches no other; larger ones are not distinguished."""

ALIGNED = np.cos(np.deg2rad(45.0))
"""An object ahead counts as followed where its heading differs by less than 45 degrees."""

BEYOND_LINE = 5.0
"""A stop line holds for who passes within this lateral distance, m, of its route, as in `sim.features`."""

CHUNK = 1 << 19
"""Pairs of an agent and an object that are compared together."""


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
    on_route = np.isfinite(s) & (s >= 0.0) & (s <= ROUTE_SPACING * (scenario.route_points[slots, None] - 1))
    s = np.where(on_route, s, 0.0)
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
        stops=np.where(on_route[..., None], stops, np.nan),
        lights=scenario.light_state[slots],
        field=scenario.field,
        origin=np.asarray(scenario.field_origin, float),
    )


def measure(stage: Scene, pose: np.ndarray, present: np.ndarray) -> Features:
    """Features of rollouts [R, T, N, 3]. Frame 0 counts nowhere: all rollouts begin there."""
    dt, own = stage.dt, stage.agents
    pose = pose.astype(np.float64)
    velocity = _rate(pose[..., :2], present[..., None], dt)
    speed = Measure(np.hypot(*np.moveaxis(velocity.value, -1, 0)), velocity.valid[..., 0])
    turn = _rate(pose[..., 2], present, dt, angle=True)
    acceleration, angular = (_rate(m.value[..., own], m.valid[..., own], dt) for m in (speed, turn))
    later = np.arange(pose.shape[1]) > 0
    counted = present[..., own] & later[:, None]
    distance, time = _neighbours(stage, pose, present, velocity)
    distance_off = clearance(stage, pose)
    edge = Measure(distance_off, counted & (stage.field.size > 0))
    near = Measure(np.where(np.isfinite(distance), distance, 1e3), counted & np.isfinite(distance))
    series = {
        "linear_speed": Measure(speed.value[..., own], speed.valid[..., own]),
        "linear_acceleration": acceleration,
        "angular_speed": Measure(turn.value[..., own], turn.valid[..., own]),
        "angular_acceleration": angular,
        "distance_to_object": near,
        "time_to_collision": Measure(time.value, time.valid & stage.vehicle & later[:, None]),
        "distance_to_road_edge": edge,
    }
    played = np.any(counted, axis=1)
    events = {
        "collision": Measure((counted & (distance < 0.0)).any(1), played),
        "offroad": Measure((edge.valid & (distance_off > 0.0)).any(1), edge.valid.any(1)),
        "red_light": _red_light_violations(stage, pose, present, played),
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


def _red_light_violations(stage: Scene, pose: np.ndarray, present: np.ndarray, played: np.ndarray) -> Measure:
    """[R, A]: whether the front bumper passed a stop line, red before and after; valid for vehicles that meet one."""
    passed = np.zeros(played.shape, bool)
    for a, agent in enumerate(stage.agents):
        body, body_present = pose[:, :, agent], present[:, :, agent]
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
            passed[:, a] |= np.any(over & body_present[:, :-1] & body_present[:, 1:], axis=1)
    meets = stage.vehicle & np.isfinite(stage.stops[..., 0]).any(1)
    return Measure(passed, played & meets)


def _neighbours(
    stage: Scene, pose: np.ndarray, present: np.ndarray, velocity: Measure
) -> tuple[np.ndarray, Measure]:  # fmt: skip
    """(distance to the nearest object, m, inf where there is none; time to collision, s), each [R, T, A]."""
    rollouts, frames, objects = present.shape
    agents = len(stage.agents)
    flat = rollouts * frames
    poses, there = pose.reshape(flat, objects, 3), present.reshape(flat, objects)
    moves = velocity.value.reshape(flat, objects, 2)
    known = velocity.valid[..., 0].reshape(flat, objects)
    block = max(1, CHUNK // max(1, agents * objects))
    parts = [
        _frame_neighbours(stage, poses[i : i + block], there[i : i + block], moves[i : i + block], known[i : i + block])
        for i in range(0, flat, block)
    ]
    distance, time, valid = (
        np.concatenate(part).reshape(rollouts, frames, agents) for part in zip(*parts, strict=True)
    )
    return distance, Measure(time, valid)


def _frame_neighbours(
    stage: Scene, pose: np.ndarray, present: np.ndarray, velocity: np.ndarray, known: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distance, time to collision, whether that is known) [F, A] of frames [F, N, ...]."""
    own, half = stage.agents, stage.size / 2
    cos, sin = np.cos(pose[..., 2]), np.sin(pose[..., 2])
    offset = pose[:, None, :, :2] - pose[:, own][:, :, None, :2]
    dx, dy = offset[..., 0], offset[..., 1]
    c0, s0 = cos[:, own, None], sin[:, own, None]
    x, y = dx * c0 + dy * s0, dy * c0 - dx * s0
    c, s = cos[:, None] * c0 + sin[:, None] * s0, sin[:, None] * c0 - cos[:, None] * s0
    seen = present[:, None, :] & present[:, own, None] & (own[:, None] != np.arange(pose.shape[1]))

    # Boxes lie between their inner and outer circles: only objects that can be the nearest by these are measured.
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
    valid = present[:, own] & known[:, own] & (~np.isfinite(at) | known[frame, leader])
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


WEIGHTS = {
    "linear_speed": 0.05, "linear_acceleration": 0.05, "angular_speed": 0.05, "angular_acceleration": 0.05,
    "distance_to_object": 0.1, "time_to_collision": 0.1, "distance_to_road_edge": 0.05,
    "collision": 0.25, "offroad": 0.25, "red_light": 0.05,
}  # fmt: skip
"""Weights of the challenge of 2025; they sum to 1."""

BINS = {
    "linear_speed": (0.0, 30.0, 30),  # m/s
    "linear_acceleration": (-10.0, 10.0, 20),  # m/s^2, the change of speed
    "angular_speed": (-1.0, 1.0, 20),  # rad/s
    "angular_acceleration": (-4.0, 4.0, 20),  # rad/s^2
    "distance_to_object": (-2.0, 38.0, 20),  # m between boxes, negative where they overlap
    "time_to_collision": (0.0, 5.0, 10),  # s
    "distance_to_road_edge": (-20.0, 10.0, 20),  # m, of the corner that is farthest out; negative on the road
}
"""Least value, greatest value and number of bins of what is measured at each step."""

PRIOR = 1.0
"""Samples that are spread over all bins before any is counted."""


def realism(scenario: Scenario, pose: np.ndarray, present: np.ndarray) -> dict[str, Measure]:
    """The likelihoods of a scenario's log in rollouts of its controlled agents, scalars.

    `pose` [R, T, N, 3] and `present` [R, T, N] are the rollouts, frame 0 being the log's. Gives each component of
    `WEIGHTS`, their weighted mean "realism", and "min_ade": of the rollouts' mean distances (m) to the log over all
    agents and steps, the least. Raises ValueError where shapes do not fit.
    """
    logged, logged_present = scenario.pose[None, : scenario.steps], scenario.present[None, : scenario.steps]
    if pose.ndim != 4 or pose.shape[1:] != logged.shape[1:] or present.shape != pose.shape[:3] or len(pose) == 0:
        needed = f"[R, {', '.join(map(str, logged.shape[1:]))}]"
        raise ValueError(f"rollouts of {scenario.id!r} have shapes {pose.shape} and {present.shape}; expected {needed}")
    stage = scene(scenario)
    simulated, real = measure(stage, pose, present), measure(stage, logged, logged_present)
    parts = {}
    for name, (low, high, bins) in BINS.items():
        parts[name] = _over_agents(histogram(simulated.series[name], real.series[name], low, high, bins))
    for name, event in simulated.events.items():
        parts[name] = _over_agents(bernoulli(event, real.events[name]))
    return parts | {"realism": weighted(parts), "min_ade": _min_ade(stage, pose, present, logged, logged_present)}


def weighted(parts: dict[str, Measure]) -> Measure:
    """The meta metric: the mean of the valid parts by `WEIGHTS`."""
    weight = sum(WEIGHTS[name] for name in WEIGHTS if parts[name].valid)
    total = sum(WEIGHTS[name] * float(parts[name].value) for name in WEIGHTS if parts[name].valid)
    return Measure(total / max(weight, 1e-9), weight > 0.0)


def histogram(simulated: Measure, logged: Measure, low: float, high: float, bins: int) -> Measure:
    """[A]: exp of the mean log-probability of an agent's logged values, by the histogram of its simulated ones.

    `simulated` is [R, T, A], `logged` [1, T, A].
    """
    agents = logged.value.shape[-1]

    def place(values: np.ndarray) -> np.ndarray:
        share = (np.nan_to_num(values, nan=low) - low) / (high - low)
        return np.clip((share * bins).astype(int), 0, bins - 1)

    cell = place(simulated.value) + bins * np.arange(agents)
    counts = np.bincount(cell[simulated.valid], minlength=agents * bins).reshape(agents, bins).astype(float)
    number = counts.sum(-1, keepdims=True)
    log_p = np.log((counts + PRIOR / bins) / (number + PRIOR))
    log_likelihood = np.where(logged.valid[0], log_p[np.arange(agents), place(logged.value[0])], 0.0)
    steps = logged.valid[0].sum(0)
    return Measure(np.exp(log_likelihood.sum(0) / np.maximum(steps, 1)), (steps > 0) & (number[:, 0] > 0))


def bernoulli(simulated: Measure, logged: Measure) -> Measure:
    """[A]: the probability of an agent's logged verdict, by how often the simulated ones [R, A] were so."""
    number = simulated.valid.sum(0)
    same = (simulated.valid & (simulated.value == logged.value)).sum(0)
    return Measure((same + PRIOR / 2) / (number + PRIOR), (number > 0) & logged.valid[0])


def _over_agents(measure: Measure) -> Measure:
    count = int(np.sum(measure.valid))
    return Measure(float(np.sum(measure.value[measure.valid])) / max(count, 1), count > 0)


def _min_ade(
    stage: Scene, pose: np.ndarray, present: np.ndarray, logged: np.ndarray, logged_present: np.ndarray
) -> Measure:  # fmt: skip
    away = np.linalg.norm((pose - logged)[:, 1:, stage.agents, :2], axis=-1)
    both_present = (present & logged_present)[:, 1:, stage.agents]
    count = both_present.sum((1, 2))
    mean = np.where(both_present, away, 0.0).sum((1, 2)) / np.maximum(count, 1)
    return Measure(float(mean[count > 0].min()) if np.any(count > 0) else 0.0, bool(np.any(count > 0)))
