"""A log to a scenario: the ego's local frame, routes with the log's own progress, their lights, and the road's
distance field.

`Log` says what a source holds, `Scenario` what a simulator needs; nothing else of the package knows both. The work is
done once, on the host, in NumPy, and may be done in many processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import (
    CROSSWALK,
    DRIVEWAY,
    EDGE_BOUNDARY,
    EDGE_MEDIAN,
    SPEED_BUMP,
    VEHICLE,
    BadData,
    Log,
)
from longhaul.driving.scenario.lane_graph import BRIDGE, LEVEL, SLOPE, lay_grid, make_road
from longhaul.driving.scenario.road_edges import distance_field, make_edges, simplify
from longhaul.driving.scenario.routes import (
    STATES,
    Lane,
    Route,
    arc_length,
    at,
    continuation,
    find_lanes,
    guide,
    lane_at,
    lights_disputed,
    make_lane,
    make_route,
    meet_lights,
)
from longhaul.driving.scenario.scenario import CONTROLS, ONWARD, ONWARD_SPACING, ROUTE_SPACING, Scenario

CHOSEN = "chosen"
"""Mark of scenarios whose tracks were chosen by number."""


MOVES = 2.0
"""Metres that an agent beside the ego must travel in the log to be worth controlling."""


ROUTES = ("log", "lanes")
"""Along what routes may run."""


FAR = 100.0
"""Metres from the ego's path beyond which a standing agent is left out."""


FIELD_BEYOND = 15.0
"""Metres of a route after its logged part that the distance field still covers."""


DRAWN, DRAWN_TOLERANCE = 80.0, 0.1
"""Metres around the routes that are drawn, and by how much drawn lines may be simplified."""


LONGEST, MOST_AREA = 2e4, 4e6
"""Metres of one agent's path, and square metres of the box around all routes: who is farther is no traffic, but an
error of the source, and would take the memory of thousands of scenarios."""


UNDER_WAY = 0.3
"""Metres within the last half second before a vehicle is lost, above which it goes on."""


PAIRS = 1 << 20
"""Pairs of points that are looked at together."""


class Signals(NamedTuple):
    """The lights that one route meets."""

    s: np.ndarray  # float64 [L]
    state: np.ndarray  # int8 [L, T], unknown throughout where disputed
    disputed: np.ndarray  # bool [L]


def compile_log(
    log: Log,
    *,
    agents: int = 1,
    route_margin: float = 25.0,
    horizon: int | None = None,
    objects: int = 128,
    routes: str = "log",
    control: str | Sequence[int] = "vehicles",
) -> Scenario:
    """The scenario of `log`, from its current step on, for at most `horizon` steps (None: as long as the ego is known).

    `agents` are controlled: the ego, then others that are there from the start and move, nearest first: vehicles, with
    `control` "all" cyclists and pedestrians too, or of the log's tracks those of these indices. At most `objects`
    agents are kept. The distance field reaches `route_margin` metres beyond the box around the routes.
    `routes` run along the agents' logged ways ("log"), or with "lanes" along the ego's given path or the lanes that
    they followed, where these fit (`guides` says why this is not the rule). Raises `BadData` for a log that nothing can
    be driven in.
    """
    if routes not in ROUTES:
        raise ValueError(f"routes is {routes!r}: choose from {', '.join(ROUTES)}")
    if isinstance(control, str) and control not in CONTROLS:
        raise ValueError(f"control is {control!r}: choose from {', '.join(CONTROLS)}")
    if agents < 1 or objects < agents:
        raise ValueError(f"agents is {agents}, objects {objects}: there must be 1 <= agents <= objects")
    steps = usable_steps(log, horizon)
    window = slice(log.current, log.current + steps)
    tracks = log.tracks
    valid = tracks.valid[:, window]
    origin = tracks.position[log.sdc, log.current].astype(np.float64)
    position = fill(tracks.position[:, window] - origin, valid)
    heading = fill(tracks.heading[:, window].astype(np.float64), valid)
    chosen = choose(position, valid, log.sdc, objects)
    if isinstance(control, str):
        fit = np.isin(tracks.kind[chosen], CONTROLS[control])
    else:
        fit = np.isin(chosen, control)
    driven = controlled(position[chosen], valid[chosen], fit, agents)
    lanes = find_lanes(log.features, origin)
    found = [
        route_of(position[i], heading[i], valid[i], lanes, given(log, origin) if i == log.sdc else [], routes)
        for i in chosen[driven]
    ]
    size = first_size(tracks.size[chosen][:, window], valid[chosen])
    signals = [signals_of(log, window, r, size[i, 0] / 2, origin, lanes) for r, i in zip(found, driven, strict=True)]
    field, field_origin = road_field(log, found, origin, route_margin)
    pose = np.concatenate([position[chosen, :, :2], heading[chosen][..., None]], -1)
    ways = pad_routes(found, signals, agents, steps)
    road = make_road(log.features, np.concatenate([r.points[:, :3] for r in found]), origin)
    return Scenario(
        id=log.id,
        steps=steps,
        dt=float(np.median(np.diff(log.times))),
        pose=pose.transpose(1, 0, 2).astype(np.float32),
        velocity=(tracks.velocity[chosen, window] * valid[chosen][..., None]).transpose(1, 0, 2).astype(np.float32),
        present=np.ascontiguousarray(valid[chosen].T),
        size=size.astype(np.float32),
        kind=tracks.kind[chosen].astype(np.int8),
        controlled=np.array(driven + [-1] * (agents - len(driven)), np.int32),
        **ways,
        field=field,
        field_origin=field_origin.astype(np.float32),
        drawing=draw(log, found, origin),
        road=lay_grid(road, ways["route"], ways["route_length"], ways["route_points"]),
        **onward(position[chosen], heading[chosen], valid[chosen], tracks.kind[chosen], lanes),
        control=control if isinstance(control, str) else CHOSEN,
    )


def onward(
    position: np.ndarray, heading: np.ndarray, valid: np.ndarray, kind: np.ndarray, lanes: dict[int, Lane]
) -> dict[str, np.ndarray]:
    """Continuation of vehicles along the lanes from where the log sees them last; those that stand, or are on no
    lane, do
    not."""
    which, ways = [], []
    where = ONWARD_SPACING * np.arange(1, ONWARD + 1)
    for i in np.flatnonzero(kind == VEHICLE):
        last = valid.shape[1] - 1 - int(valid[i, ::-1].argmax())
        end, turn = position[i, last], float(heading[i, last])
        before = position[i, max(last - 5, 0)]
        if np.hypot(*(end - before)[:2]) < UNDER_WAY or lane_at(end, turn, lanes) is None:
            continue
        line = np.concatenate([end[None], continuation(end, turn, lanes)])[:, :2]
        which.append(i)
        ways.append(at(line, arc_length(line), where))
    points = np.concatenate([np.zeros((0, 2)), *ways]).astype(np.float32)
    return {"onward_of": np.array(which, np.int16), "onward": points}


def route_of(
    position: np.ndarray,
    heading: np.ndarray,
    valid: np.ndarray,
    lanes: dict[int, Lane],
    paths: list[Lane],
    routes: str,
) -> Route:
    """One agent's route; see `compile_log`."""
    guided = guide(position, heading, valid, lanes, paths) if routes == "lanes" else None
    return guided or make_route(position, heading, valid, lanes, paths)


def given(log: Log, origin: np.ndarray) -> list[Lane]:
    """The ego's paths that lead where it went, relative to `origin`."""
    made = [make_lane(i, path.points - origin) for i, path in enumerate(log.paths) if path.on_route]
    return [lane for lane in made if lane is not None]


def usable_steps(log: Log, horizon: int | None) -> int:
    """Number of steps from the current one on can be simulated; `BadData` if it is fewer than 2."""
    total = log.tracks.valid.shape[1]
    if not (0 <= log.sdc < len(log.tracks.id) and 0 <= log.current < total):
        raise BadData(
            f"{log.id}: no ego {log.sdc} of {len(log.tracks.id)} tracks at step {log.current} of {total}; leave it out"
        )
    known = log.tracks.valid[log.sdc, log.current :]
    if not known[0]:
        raise BadData(f"{log.id}: the ego is not known at the current step, {log.current}; leave this log out")
    steps = len(known) if known.all() else int(known.argmin())
    if horizon is not None:
        if horizon < 2:
            raise ValueError(f"horizon is {horizon}: a scenario has at least 2 steps")
        steps = min(steps, horizon)
    if steps < 2:
        raise BadData(
            f"{log.id}: the ego is known for {steps} step from the current one, {log.current}, on, fewer than 2; "
            "leave this log out"
        )
    if not np.isfinite(log.tracks.position[log.sdc, log.current : log.current + steps]).all():
        raise BadData(
            f"{log.id}: the ego's position is not finite at a step that is said to be valid; leave this log out"
        )
    way = np.hypot(*np.diff(log.tracks.position[log.sdc, log.current : log.current + steps, :2], axis=0).T).sum()
    if way > LONGEST:
        raise BadData(f"{log.id}: the ego goes {way:.3g} m in {steps} steps, beyond {LONGEST:g}; leave this log out")
    return steps


def fill(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """`values` [N, T, ...] with those of the nearest earlier valid step (else the first one) where not `valid` [N,
    T]."""
    step = np.where(valid, np.arange(valid.shape[1]), -1)
    last = np.maximum.accumulate(step, axis=1)
    last = np.where(last < 0, valid.argmax(1)[:, None], last)
    return values[np.arange(len(values))[:, None], last]


def choose(position: np.ndarray, valid: np.ndarray, sdc: int, objects: int) -> np.ndarray:
    """Indices of the agents to keep: the ego, then the nearest to its path; standing ones far from it are left out."""
    path = position[sdc, :, :2][:: max(1, valid.shape[1] // 40)]
    moved = np.hypot(*(position[..., :2].max(1) - position[..., :2].min(1)).T) > 1.0
    away = np.full(len(position), np.inf)
    for i in np.flatnonzero(valid.any(1) & np.isfinite(position).all((1, 2))):
        own = position[i, :, :2] if moved[i] else position[i, :1, :2]
        away[i] = np.hypot(*(own[:, None] - path[None]).transpose(2, 0, 1)).min()
    away[~moved & (away > FAR)] = np.inf
    away[sdc] = -1.0
    order = np.argsort(away, kind="stable")[:objects]
    return order[np.isfinite(away[order])]


def controlled(position: np.ndarray, valid: np.ndarray, fit: np.ndarray, agents: int) -> list[int]:
    """The ego, 0, and up to `agents` - 1 others, nearest to its path first, that are `fit` [N], there at step 0, and
    move."""
    path = np.hypot(*np.diff(position[..., :2], axis=1).transpose(2, 0, 1)).sum(1)
    far = np.hypot(*(position[:, -1, :2] - position[:, 0, :2]).T)
    fit = valid[:, 0] & fit & (np.minimum(path, far) >= MOVES) & (valid.sum(1) > 1) & (path < LONGEST)
    return [0, *(int(i) for i in np.flatnonzero(fit) if i > 0)][:agents]


def first_size(size: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Length and width [N, 2] at each agent's first valid step."""
    return size[np.arange(len(size)), valid.argmax(1), :2]


def signals_of(
    log: Log, window: slice, route: Route, half_length: float, origin: np.ndarray, lanes: dict[int, Lane]
) -> Signals:
    """The lights that `route` meets; those that the log's own vehicle disputes are unknown throughout."""
    lights = log.lights
    met = meet_lights(route, lights.lane, lights.position - origin, lanes) if len(lights.lane) else []
    index = [i for i, _ in met]
    s = np.array([s for _, s in met])
    known = np.where(lights.valid[index, window], lights.state[index, window], 0)
    state = STATES[np.clip(known, 0, len(STATES) - 1)]
    disputed = lights_disputed(route.expert_s + half_length, s, state)
    return Signals(s, np.where(disputed[:, None], np.int8(0), state), disputed)


def disputes(log: Log) -> tuple[int, int]:
    """Number of lights that the ego's route meets, and how many of them it disputes by driving through them while
    red."""
    steps = usable_steps(log, None)
    window = slice(log.current, log.current + steps)
    origin = log.tracks.position[log.sdc, log.current]
    lanes = find_lanes(log.features, origin)
    known = np.ones(steps, bool)
    heading = log.tracks.heading[log.sdc, window].astype(np.float64)
    route = make_route(log.tracks.position[log.sdc, window] - origin, heading, known, lanes)
    signals = signals_of(log, window, route, log.tracks.size[log.sdc, log.current, 0] / 2, origin, lanes)
    return len(signals.s), int(signals.disputed.sum())


def pad_routes(routes: list[Route], signals: list[Signals], agents: int, steps: int) -> dict[str, np.ndarray]:
    """The route and light fields of a scenario, padded to a common size."""
    points, lights = max(len(r.points) for r in routes), max(len(g.s) for g in signals)
    out: dict[str, np.ndarray] = {
        "route": np.zeros((agents, points, 3), np.float32),
        "route_length": np.zeros(agents, np.float32),
        "route_points": np.zeros(agents, np.int32),
        "expert_s": np.zeros((agents, steps), np.float32),
        "light_s": np.full((agents, lights), np.inf, np.float32),
        "light_state": np.zeros((agents, lights, steps), np.int8),
    }
    for a, (route, signal) in enumerate(zip(routes, signals, strict=True)):
        count = len(route.points)
        out["route"][a, :count] = route.points[:, [0, 1, 3]]
        out["route"][a, count:] = route.points[-1, [0, 1, 3]]
        out["route_length"][a], out["route_points"][a], out["expert_s"][a] = route.length, count, route.expert_s
        out["light_s"][a, : len(signal.s)], out["light_state"][a, : len(signal.s)] = signal.s, signal.state
    return out


def road_field(log: Log, routes: list[Route], origin: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """The distance field around `routes` and its origin; edges of other levels of the road (bridges) do not count."""
    parts = [r.points[: int((r.length + FIELD_BEYOND) / ROUTE_SPACING) + 1] for r in routes]
    near = np.concatenate(parts)
    low, high = near[:, :2].min(0) - margin, near[:, :2].max(0) + margin
    if (high - low).prod() > MOST_AREA:
        wide, tall = (high - low) / 1000.0
        raise BadData(
            f"{log.id}: its routes lie {wide:.3g} km by {tall:.3g} km apart, beyond {MOST_AREA * 1e-6:g} square km: "
            "control fewer agents, or leave this log out"
        )
    lines = []
    for feature in log.features:
        if feature.kind not in (EDGE_BOUNDARY, EDGE_MEDIAN) or len(feature.points) < 2:
            continue
        points = feature.points - origin
        away, closest = approach(points[:, :2], near[::5, :2])
        level = np.abs(points[:, 2] - near[::5, 2][closest]) <= np.minimum(LEVEL + SLOPE * away, BRIDGE)
        lines += [points[run] for run in runs(level)]
    return distance_field(make_edges(lines), low, high)


def approach(points: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distance of each of `points` [P, 2] is from the nearest of `near` [R, 2], and that one's index; in bounded
    memory."""
    block = max(1, PAIRS // len(near))
    parts = [points[begin : begin + block] for begin in range(0, len(points), block)]
    closest = np.concatenate([((part[:, None] - near[None]) ** 2).sum(-1).argmin(1) for part in parts])
    return np.hypot(*(points - near[closest]).T), closest


def runs(flags: np.ndarray) -> list[slice]:
    """The stretches of True in `flags` [P]."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]


def draw(log: Log, routes: list[Route], origin: np.ndarray) -> tuple[tuple[int, np.ndarray], ...]:
    """The features within `DRAWN` metres of the routes, polygons whole, simplified: ((kind, float32 [P, 2]), ...)."""
    near = np.concatenate([r.points[::10, :2] for r in routes])
    kinds, lines = [], []
    for feature in log.features:
        if not len(feature.points):
            continue
        points = feature.points[:, :2] - origin[:2]
        close = approach(points, near)[0] < DRAWN
        if feature.kind in (CROSSWALK, SPEED_BUMP, DRIVEWAY):
            close[:] = close.any()
        pieces = [points[run] for run in runs(close)]
        lines += pieces
        kinds += [feature.kind] * len(pieces)
    thin = simplify(lines, DRAWN_TOLERANCE)
    return tuple((int(kind), line.astype(np.float32)) for kind, line in zip(kinds, thin, strict=True))
