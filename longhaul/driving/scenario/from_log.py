"""Compilation of a log to a scenario: the ego's frame, routes with the log's own progress, lights, distance to edges.

`Log` says what a source holds, `Scenario` what a simulator needs; nothing else of the package knows both. The work is
done once, on the host, in NumPy, and may be done in many processes.

A route is the logged path as points one metre apart, and its continuation after the log. Progress along it is an arc
length s, metres, from where the agent stands at the first step. The logged path is the default, because everything is
exact on it: log replay has no lateral offset, reaches the end of the route just when the log ends, and a lane change of
the log is no offset. `guide` makes a route along something else: a given path, or the centres of the lanes that the log
followed. There `lateral` is the driver's offset in its lane, and the route ahead is that of the road. A guided route
exists only if the log stays within AWAY metres of the line from beginning to end; otherwise the route remains the
logged path. The progress of the log is measured along the guided route too, so that the goal is still where the log
ends.

P points of a polyline, T steps, R route points, L lights, K knots of a logged path. All local (near the origin),
float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets import log as kinds
from longhaul.driving.datasets.log import BadData, Feature, Log
from longhaul.driving.scenario.distance_field import distance_field, edges_of, make_edges
from longhaul.driving.scenario.lane_graph import BRIDGE, LEVEL, SLOPE, lay_grid, make_road
from longhaul.driving.scenario.scenario import CONTROLS, ONWARD, ONWARD_SPACING, ROUTE_SPACING, Scenario

NOISE = 0.3
"""Metres between two points of a logged path; below, a standing vehicle's noise would give directions."""
REPEATED = 1e-3
"""Metres within which a lane's point repeats the one before."""
STANDING = 0.5
"""Metres of path below which a vehicle counts as standing."""
BEYOND = 50.0
"""Metres that a route goes on at least after the logged path."""
LANE_AWAY, LANE_TURN = 2.0, np.radians(30.0)
"""Distance beside a lane and angle to it at which a path may end to go on along it."""
BLEND = 15.0
"""Metres in which a route that goes on along a lane moves over to its centre."""
LIGHT_AWAY, LIGHT_TURN = 3.0, np.radians(60.0)
"""Distance beside the route at which a light's stop point may lie, and how turned against it its lane."""
LANE_SHARED, LANE_SCORE, LANE_TIE, SAME_STOP = 20.0, 2.0, 0.5, 8.0
"""Metres: how far a light's lane is compared with the route; the mean deviation allowed; how much worse than the best
one another light at the same stop may be; how far apart along the route lights belong to the same stop."""

STATES = np.array([0, 1, 2, 3, 1, 2, 3, 0, 0], np.int8)
"""`Scenario.light_state` of a log's states. A flashing light has no phase to wait for: a flashing stop is a stop
sign, and a flashing caution asks for care. As red and yellow they would hold traffic for ever."""


class Lane(NamedTuple):
    id: int
    points: np.ndarray  # [P, 3], P >= 2, no point repeated
    s: np.ndarray  # [P], arc length in the plane
    exit: tuple[int, ...]


class Lanes(NamedTuple):
    """Lanes for motor vehicles: W of them by id, and the points of all, one lane behind the other."""

    by_id: dict[int, Lane]
    points: np.ndarray  # [P, 3]
    s: np.ndarray  # [P]
    starts: np.ndarray  # int64 [W + 1]: where each lane's points begin
    box: np.ndarray  # [W, 4]: least x and y, most x and y
    turn: np.ndarray  # [W]: angle by which each turns between its ends, rad
    exits: np.ndarray  # int64: indices of the lanes into which each leads
    exit_starts: np.ndarray  # int64 [W + 1]


class Route(NamedTuple):
    points: np.ndarray  # [R, 4]: x, y, z, heading; s = ROUTE_SPACING * index
    length: float  # of the logged path
    expert_s: np.ndarray  # [T]


def find_lanes(features: Sequence[Feature], origin: np.ndarray) -> Lanes:
    """The lanes for motor vehicles, relative to `origin` [3]."""
    found = [f for f in features if f.kind in (kinds.LANE_FREEWAY, kinds.LANE_STREET) and len(f.points)]
    if not found:
        return gather([])
    from longhaul.driving.scenario import kernels

    points = np.concatenate([f.points for f in found]) - origin
    points, ends = kernels.distinct(points, np.cumsum([len(f.points) for f in found]), REPEATED)
    s = kernels.arcs_of(points, ends)
    lanes, begin = [], 0
    for feature, end in zip(found, ends.tolist(), strict=True):
        if end - begin > 1:
            lanes.append(Lane(feature.id, points[begin:end], s[begin:end], feature.exit))
        begin = end
    return gather(lanes)


def gather(each: Sequence[Lane]) -> Lanes:
    """The lanes `each` together; of one id the last counts."""
    from longhaul.driving.scenario import kernels

    by_id = {lane.id: lane for lane in each}
    lanes, index = list(by_id.values()), {i: k for k, i in enumerate(by_id)}
    exits = [[index[i] for i in lane.exit if i in index] for lane in lanes]
    points = np.concatenate([np.zeros((0, 3)), *(lane.points for lane in lanes)])
    starts = np.array([0, *itertools.accumulate(len(lane.points) for lane in lanes)])
    box = np.concatenate([ends.reduceat(points[:, :2], starts[:-1]) for ends in (np.minimum, np.maximum)], 1)
    return Lanes(
        by_id,
        points,
        np.concatenate([np.zeros(0), *(lane.s for lane in lanes)]),
        starts,
        box,
        kernels.turns(points, starts),
        np.array([k for some in exits for k in some], np.int64),
        np.array([0, *itertools.accumulate(map(len, exits))]),
    )


def arc_length(points: np.ndarray) -> np.ndarray:
    """Arc length [P] in the plane along a polyline [P, 2+]."""
    return np.append(0.0, np.cumsum(np.hypot(*np.diff(points[:, :2], axis=0).T)))


def at(line: np.ndarray, s: np.ndarray, where: np.ndarray) -> np.ndarray:
    """The points [..., D] of a polyline [P, D] with arc lengths `s` [P] at `where`; its ends beyond them."""
    return np.stack([np.interp(where, s, column) for column in line.T], -1)


def make_lane(identity: int, points: np.ndarray, exit: tuple[int, ...] = ()) -> Lane | None:
    """The lane with `points` [P, 3] in which none is repeated; None if fewer than two are left."""
    if len(points) < 2:
        return None
    points = points[np.append(True, np.hypot(*np.diff(points[:, :2], axis=0).T) > REPEATED)]
    return Lane(identity, points, arc_length(points), exit) if len(points) > 1 else None


def make_route(
    position: np.ndarray,
    heading: np.ndarray,
    valid: np.ndarray,
    lanes: Lanes,
    paths: Sequence[Lane] = (),
) -> Route:
    """The route of an agent that was at `position` [T, 3] with `heading` [T] where `valid` [T]; it must be valid at
    step 0. After the log it goes on along one of `paths`, if one fits, else along a lane."""
    knots, expert_s = trace(position, heading, valid)
    length, end = float(expert_s[-1]), float(heading[np.flatnonzero(valid)[-1]])
    if length < STANDING:
        ahead = np.array([np.cos(heading[0]), np.sin(heading[0]), 0.0])
        return lay(np.stack([position[0], position[0] + (BEYOND + 2.0) * ahead]), length, expert_s)
    ways = gather(paths) if paths else lanes
    found = lane_at(knots[-1], end, ways)
    if found is None and paths:
        ways, found = lanes, lane_at(knots[-1], end, lanes)
    line = np.concatenate([knots, continuation(knots[-1], end, ways, found)[1:]])
    route = lay(line, length, expert_s)
    if length < 2.0:
        where = ROUTE_SPACING * np.arange(len(route.points))
        turns = np.interp(where, expert_s[valid], np.unwrap(heading[valid]))
        route.points[:, 3] = np.where(where < length, turns, route.points[:, 3])
    return route


def lay(line: np.ndarray, length: float, expert_s: np.ndarray) -> Route:
    """The route on a line [P, 3] from its beginning, with its goal after `length` m; straight on beyond the line."""
    from longhaul.driving.scenario import kernels

    return Route(kernels.laid(line, length, BEYOND, ROUTE_SPACING), length, expert_s)


def trace(position: np.ndarray, heading: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The path of an agent without noise at rest, [K, 3], and its arc length over time, [T], monotone.

    A point belongs to the path when it lies `NOISE` or more from the one before, ahead of it as the agent looks:
    while it reverses, the arc length stands still, and the path goes on where the agent gets ahead of it again.
    """
    from longhaul.driving.scenario import kernels

    return kernels.traced(position, heading, valid, NOISE)


def continuation(end: np.ndarray, heading: float, lanes: Lanes, found: tuple[int, float] | None) -> np.ndarray:
    """Points [P, 3] from `end` [3] on for more than `BEYOND` m: along the lane that `lane_at` has found there, else
    straight on."""
    from longhaul.driving.scenario import kernels

    lane, s = found or (-1, 0.0)
    ways = lanes.points, lanes.s, lanes.starts, lanes.turn, lanes.exits, lanes.exit_starts
    return kernels.continued(end, heading, lane, s, BEYOND + 5.0, BLEND, *ways)


def lane_at(place: np.ndarray, heading: float, lanes: Lanes) -> tuple[int, float] | None:
    """Index of the lane nearest to `place` [3] that runs along `heading`, and the arc length there; None if none is
    near."""
    return lanes_at(place[None], [heading], lanes)[0]


def lanes_at(places: np.ndarray, headings: Sequence[float], lanes: Lanes) -> list[tuple[int, float] | None]:
    """Lanes and arc lengths of several `places` [K, 3] with their headings, as `lane_at` has them of one."""
    from longhaul.driving.scenario import kernels

    found: list[tuple[int, float] | None] = [None] * len(headings)
    best = [LANE_AWAY] * len(headings)
    near = kernels.beside(places, LANE_AWAY, lanes.points, lanes.s, lanes.starts, lanes.box)
    for number, lane, s, turn, height, x, y in near.tolist():
        k, away = int(number), math.hypot(x, y)
        if away < best[k] and abs(wrap(turn - headings[k])) < LANE_TURN and abs(height) < 3.0:
            best[k], found[k] = away, (int(lane), s)
    return found


def project(line: np.ndarray, s: np.ndarray, place: np.ndarray) -> tuple[float, float, float, int]:
    """The point of a polyline [P, 2+] nearest to `place` [2+]: (arc length, distance, direction, segment's index)."""
    from longhaul.driving.scenario import kernels

    i, share, x, y = kernels.project(line, place)
    direction = math.atan2(line[i + 1, 1] - line[i, 1], line[i + 1, 0] - line[i, 0])
    return float(s[i] + share * (s[i + 1] - s[i])), math.hypot(x, y), direction, i


def wrap(angle: float) -> float:
    """`angle` in -pi .. pi."""
    return float((angle + np.pi) % (2.0 * np.pi) - np.pi)


def turn_of(lane: Lane) -> float:
    """Size of the angle by which a lane turns between its ends, rad."""
    first, last = lane.points[1] - lane.points[0], lane.points[-1] - lane.points[-2]
    return abs(wrap(float(np.arctan2(last[1], last[0]) - np.arctan2(first[1], first[0]))))


def follow(lane: Lane, s: float, distance: float, lanes: Mapping[int, Lane]) -> np.ndarray:
    """Points [P, 3] along `lane` from arc length `s` on and its straightest exits, for `distance` m if they reach."""
    parts, seen = [at(lane.points, lane.s, np.array([s]))], {lane.id}
    while True:
        parts.append(lane.points[lane.s > s + 1e-6])
        distance -= lane.s[-1] - s
        onward = [lanes[i] for i in lane.exit if i in lanes and i not in seen]
        if distance <= 0.0 or not onward:
            return np.concatenate(parts)
        lane, s = min(onward, key=turn_of), 0.0
        seen.add(lane.id)


def meet_lights(route: Route, lane_ids: np.ndarray, stops: np.ndarray, lanes: Lanes) -> list[tuple[int, float]]:
    """(index, arc length of the stop point) of the lights that hold for `route`, of those at `stops` [L, 3] for
    `lane_ids` [L].

    A light holds if its stop point lies beside the route and its lane then follows the route: at one stop there are
    often several, for straight on and for turns. A light whose lane the source does not have counts by its stop point
    alone.
    """
    from longhaul.driving.scenario import kernels

    line, end = route.points, ROUTE_SPACING * (len(route.points) - 1)
    met = []
    for number, segment, share, turn, height, x, y in kernels.near_line(line, stops, LIGHT_AWAY).tolist():
        i, where, away = int(number), ROUTE_SPACING * (segment + share), math.hypot(x, y)
        if away > LIGHT_AWAY or not 0.0 < where < end or abs(height) > 4.0:
            continue
        score, lane = away, lanes.by_id.get(int(lane_ids[i]))
        if lane is not None:
            shared, direction = kernels.beyond_stop(stops[i], LANE_SHARED, 11, lane.points, lane.s)
            score = float(kernels.gaps(shared, line).mean())
            if abs(wrap(direction - turn)) > LIGHT_TURN or score > LANE_SCORE:
                continue
        met.append((i, where, score))
    return [(i, w) for i, w, score in met if score <= LANE_TIE + min(c for _, v, c in met if abs(v - w) < SAME_STOP)]


def lights_disputed(front: np.ndarray, light_s: np.ndarray, light_state: np.ndarray) -> np.ndarray:
    """bool [L]: lights that the logged vehicle itself, its front at arc length `front` [T], passes while red.

    About one log of ten has lights that are out of step with its traffic; such a light can tell nothing about
    anybody. A step more on both sides is looked at, since the crossing falls between two steps.
    """
    crosses = (front[None, :-1] < light_s[:, None]) & (front[None, 1:] >= light_s[:, None])
    red = light_state == 1
    around = red[:, :-1] | red[:, 1:] | np.append(red[:, 2:], red[:, -1:], 1)
    return (crosses & around).any(1)


AWAY, PATH_AWAY = 2.0, 5.0
"""Metres by which a log may be beside its line: of lanes, and of a given path (beyond, WOMD calls it off route)."""
TURN = np.radians(60.0)
"""Angle by which a lane may be turned against the log where a line begins."""
SHORTEST = 5.0
"""Metres that a log must go to be guided."""
JOIN = 1.0
"""Metres from a lane's end within which another one's beginning follows it, where the source has no topology."""
MOST_LANES = 64
"""Lanes of one line."""
BACK, ON = 2.0, 6.0
"""Metres behind and ahead of the last place on a line in which a log is looked for at its next knot."""


def guide(
    position: np.ndarray,
    heading: np.ndarray,
    valid: np.ndarray,
    lanes: Mapping[int, Lane],
    paths: Sequence[Lane] = (),
) -> Route | None:
    """The route of an agent that was at `position` [T, 3] with `heading` [T] where `valid` [T], along the nearest of
    `paths` that fits, else along the lanes that it followed; None where neither fits."""
    knots, expert_s = trace(position, heading, valid)
    if expert_s[-1] < SHORTEST:
        return None
    begin = float(heading[0])
    ways = (each.points for each in paths if project(each.points, each.s, knots[-1])[0] < each.s[-1] - 0.01)
    for lines, away in ((ways, PATH_AWAY), (lane_lines(knots, begin, lanes), AWAY)):
        measured = [(offsets(knots, line), line) for line in lines]
        fitting = [(float(offset.mean()), line) for offset, line in measured if offset.max() < away]
        if fitting:
            found = along(position, valid, expert_s, min(fitting, key=lambda pair: pair[0])[1])
            if found is not None:
                return found
    return None


def lane_lines(knots: np.ndarray, heading: float, lanes: Mapping[int, Lane]) -> Iterator[np.ndarray]:
    """Lines [P, 3] of lane after lane from where the log begins: from each lane there, along the nearest to the log."""
    wanted = arc_length(knots)[-1]
    for first in lanes.values():
        s, away, turn, i = project(first.points, first.s, knots[0])
        level = abs(first.points[i, 2] - knots[0, 2]) < 3.0
        if away > AWAY or abs(wrap(turn - heading)) > TURN or not level:
            continue
        parts, lane, left = [first.points], first, wanted + s
        for _ in range(MOST_LANES):
            left -= lane.s[-1]
            onward = following(lane, lanes)
            if left < -1.0 or not onward:
                break
            lane = min(onward, key=lambda other: offsets(sampled(other), knots).mean())
            parts.append(lane.points)
        if left < 0.0:
            parts.append(follow(lane, lane.s[-1] - 1e-3, BEYOND + 5.0, lanes))
        line = np.concatenate(parts)
        keep = np.append(True, np.hypot(*np.diff(line[:, :2], axis=0).T) > 1e-3)
        yield line[keep]


def following(lane: Lane, lanes: Mapping[int, Lane]) -> list[Lane]:
    """The lanes into which `lane` leads: by the source, else those that begin where it ends and go on its way."""
    if lane.exit:
        return [lanes[i] for i in lane.exit if i in lanes]
    end = lane.points[-1]
    chord = end - lane.points[-2]
    direction = np.arctan2(chord[1], chord[0])
    found = []
    for other in lanes.values():
        begin = other.points[1] - other.points[0]
        near = np.hypot(*(other.points[0] - end)[:2]) < JOIN and abs(other.points[0, 2] - end[2]) < 3.0
        if near and other.id != lane.id and abs(wrap(float(np.arctan2(begin[1], begin[0]) - direction))) < TURN:
            found.append(other)
    return found


def sampled(lane: Lane) -> np.ndarray:
    """Points [11, 3] of a lane's first 30 metres."""
    return at(lane.points, lane.s, np.linspace(0.0, min(30.0, lane.s[-1]), 11))


def offsets(points: np.ndarray, line: np.ndarray) -> np.ndarray:
    """Distances [K], m, of `points` [K, 2+] from a line [P, 2+]."""
    start, chord = line[:-1, :2], np.diff(line[:, :2], axis=0)
    relative = points[:, None, :2] - start
    share = np.clip((relative * chord).sum(-1) / np.maximum((chord**2).sum(-1), 1e-12), 0.0, 1.0)
    return np.hypot(*(relative - share[..., None] * chord).transpose(2, 0, 1)).min(1)


def along(position: np.ndarray, valid: np.ndarray, travelled: np.ndarray, line: np.ndarray) -> Route | None:
    """The route on `line` of an agent at `position` [T, 3]; None if it is not about as long as `travelled` [T], m."""
    s = arc_length(line)
    begin = project(line, s, position[0])[0]
    reached, last, before = np.zeros(len(position)), begin, 0.0
    for t in np.flatnonzero(valid):
        low, high = np.searchsorted(s, [last - BACK, last + travelled[t] - before + ON])
        part = slice(max(min(int(low) - 1, len(s) - 2), 0), int(high) + 1)
        last, before = max(project(line[part], s[part], position[t])[0], last), travelled[t]
        reached[t] = last - begin
    reached = np.maximum.accumulate(reached)
    length = float(reached[-1])
    if not 0.8 * travelled[-1] - AWAY < length < 1.2 * travelled[-1] + AWAY:
        return None
    first = at(line, s, np.array([begin]))
    return lay(np.concatenate([first, line[s > begin + 1e-3]]), length, reached)


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


class Signals(NamedTuple):
    """The lights that one route meets."""

    s: np.ndarray  # float64 [L]
    state: np.ndarray  # int8 [L, T], unknown throughout where disputed


def scenario_from_log(
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
    they followed, where these fit (the module says why this is not the rule). Raises `BadData` for a log that nothing
    can be driven in.
    """
    if routes not in ROUTES:
        raise ValueError(f"routes is {routes!r}: choose from {', '.join(ROUTES)}")
    cast = cast_of(log, agents=agents, horizon=horizon, objects=objects, control=control)
    return scenario_of(log, cast, agents=agents, route_margin=route_margin, routes=routes, control=control)


class Cast(NamedTuple):
    """Cast of a scenario: its K agents, relative to where the ego is at the first step."""

    window: slice  # of the log's steps
    origin: np.ndarray  # float64 [3]
    track: np.ndarray  # int64 [K]: their tracks in the log
    driven: list[int]  # indices into K of the controlled ones, the ego first
    position: np.ndarray  # [K, T, 3]
    heading: np.ndarray  # [K, T]
    valid: np.ndarray  # bool [K, T]


def cast_of(
    log: Log, *, agents: int, horizon: int | None = None, objects: int = 128, control: str | Sequence[int] = "vehicles"
) -> Cast:
    """Cast of the scenario of `log`, which costs little beside compiling it; settings as there."""
    if isinstance(control, str) and control not in CONTROLS:
        raise ValueError(f"control is {control!r}: choose from {', '.join(CONTROLS)}")
    if agents < 1 or objects < agents:
        raise ValueError(f"agents is {agents}, objects {objects}: there must be 1 <= agents <= objects")
    from longhaul.driving.scenario import kernels

    steps = usable_steps(log, horizon)
    window = slice(log.current, log.current + steps)
    tracks = log.tracks
    valid = tracks.valid[:, window].copy()
    origin = tracks.position[log.sdc, log.current].astype(np.float64)
    position = np.ascontiguousarray(tracks.position[:, window] - origin)
    heading = tracks.heading[:, window].astype(np.float64, order="C")
    kernels.hold(position, heading, valid)
    index = choose(position, valid, log.sdc, objects)
    position, heading, valid = position[index], heading[index], valid[index]
    driven = [0]
    if agents > 1:
        fit = np.isin(tracks.kind[index], CONTROLS[control]) if isinstance(control, str) else np.isin(index, control)
        driven = controlled(position, valid, fit, agents)
    return Cast(window, origin, index, driven, position, heading, valid)


def scenario_of(
    log: Log, cast: Cast, *, agents: int, route_margin: float = 25.0, routes: str = "log",
    control: str | Sequence[int] = "vehicles",
) -> Scenario:  # fmt: skip
    """The scenario of `log` with this cast; settings as of `scenario_from_log`."""
    window, origin, index, driven, position, heading, valid = cast
    tracks, lanes, steps = log.tracks, find_lanes(log.features, origin), window.stop - window.start
    found = []
    for i in driven:
        agent, paths = (position[i], heading[i], valid[i]), given(log, origin) if index[i] == log.sdc else []
        guided = guide(*agent, lanes.by_id, paths) if routes == "lanes" else None
        found.append(guided or make_route(*agent, lanes, paths))
    size = tracks.size[index, log.current + valid.argmax(1), :2]  # at its first valid step
    stops = log.lights.position - origin
    signals = [signals_of(log, window, r, size[i, 0] / 2, stops, lanes) for r, i in zip(found, driven, strict=True)]
    field, field_origin = road_field(log, found, origin, route_margin)
    pose = np.empty((*valid.shape, 3), np.float32)
    pose[..., :2], pose[..., 2] = position[..., :2], heading
    velocity = (tracks.velocity[index, window] * valid[..., None]).astype(np.float32, copy=False)
    ways = pad_routes(found, signals, agents, steps)
    unlimited = any(f.kind == kinds.LANE_STREET and not f.speed_limit for f in log.features)
    near = np.concatenate([r.points[:, :3] for r in found])
    road = make_road(log.features, near, origin, flow(log) if unlimited else None)
    return Scenario(
        id=log.id,
        steps=steps,
        dt=float(np.median(np.diff(log.times))),
        pose=pose.transpose(1, 0, 2),
        velocity=velocity.transpose(1, 0, 2),
        present=np.ascontiguousarray(valid.T),
        size=size.astype(np.float32),
        kind=tracks.kind[index].astype(np.int8),
        controlled=np.array(driven + [-1] * (agents - len(driven)), np.int32),
        **ways,
        field=field,
        field_origin=field_origin.astype(np.float32),
        drawing=draw(log, found, origin),
        road=lay_grid(road, ways["route"], ways["route_length"], ways["route_points"]),
        **onward(position, heading, valid, tracks.kind[index], lanes),
        control=control if isinstance(control, str) else CHOSEN,
    )


def onward(
    position: np.ndarray, heading: np.ndarray, valid: np.ndarray, kind: np.ndarray, lanes: Lanes
) -> dict[str, np.ndarray]:
    """Ways of vehicles along the lanes from where the log sees them last; none for those that stand or are on none."""
    from longhaul.driving.scenario import kernels

    last = valid.shape[1] - 1 - valid[:, ::-1].argmax(1)
    every = np.arange(len(last))
    end, turn = position[every, last], heading[every, last]
    moved = np.hypot(*(end - position[every, np.maximum(last - 5, 0)])[:, :2].T) >= UNDER_WAY
    moving = np.flatnonzero((kind == kinds.VEHICLE) & moved)
    found = lanes_at(end[moving], turn[moving].tolist(), lanes)
    which, ways = [], [np.zeros((0, 2))]
    for i, place in zip(moving.tolist(), found, strict=True):
        if place is not None:
            which.append(i)
            line = continuation(end[i], float(turn[i]), lanes, place)
            ways.append(kernels.spaced(line, ONWARD_SPACING, ONWARD))
    return {"onward_of": np.array(which, np.int16), "onward": np.concatenate(ways).astype(np.float32)}


FLOW_SHARE, FLOW_MOVING = 95.0, 2.0
"""The percentile of vehicles' speeds until driving begins that counts as that of traffic; m/s from which one moves."""


def flow(log: Log) -> float | None:
    """Speed of traffic, m/s, as seen until driving begins; None where no vehicle moves."""
    cars = log.tracks.kind == kinds.VEHICLE
    seen = log.tracks.valid[cars, : log.current + 1]
    speed = np.hypot(*log.tracks.velocity[cars, : log.current + 1].transpose(2, 0, 1))
    fastest = np.where(seen, speed, 0.0).max(1, initial=0.0)
    fastest = fastest[fastest > FLOW_MOVING]
    return float(np.percentile(fastest, FLOW_SHARE)) if len(fastest) else None


def given(log: Log, origin: np.ndarray) -> list[Lane]:
    """The ego's paths that lead where it went, relative to `origin`."""
    made = [make_lane(i, path.points - origin) for i, path in enumerate(log.paths) if path.on_route]
    return [lane for lane in made if lane is not None]


def usable_steps(log: Log, horizon: int | None) -> int:
    """Number of steps from the current one on that can be simulated; `BadData` if it is fewer than 2."""
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


def choose(position: np.ndarray, valid: np.ndarray, sdc: int, objects: int) -> np.ndarray:
    """Indices of the agents to keep: the ego, then the nearest to its path; standing ones far from it are left out."""
    from longhaul.driving.scenario import kernels

    path = position[sdc, :: max(1, valid.shape[1] // 40), :2]
    away = kernels.nearness(position, valid, np.ascontiguousarray(path), FAR)
    away[sdc] = -1.0
    order = np.argsort(away, kind="stable")[:objects]
    return order[np.isfinite(away[order])]


def controlled(position: np.ndarray, valid: np.ndarray, fit: np.ndarray, agents: int) -> list[int]:
    """The ego, 0, and up to `agents` - 1 others that are `fit` [N], there at step 0, and move; nearest first."""
    path = np.hypot(*np.diff(position[..., :2], axis=1).transpose(2, 0, 1)).sum(1)
    far = np.hypot(*(position[:, -1, :2] - position[:, 0, :2]).T)
    fit = valid[:, 0] & fit & (np.minimum(path, far) >= MOVES) & (valid.sum(1) > 1) & (path < LONGEST)
    return [0, *(int(i) for i in np.flatnonzero(fit) if i > 0)][:agents]


def signals_of(log: Log, window: slice, route: Route, half_length: float, stops: np.ndarray, lanes: Lanes) -> Signals:
    """The lights, with their `stops` [L, 3], that `route` meets; those that the log's own vehicle disputes are unknown
    throughout."""
    lights = log.lights
    met = meet_lights(route, lights.lane, stops, lanes) if len(lights.lane) else []
    if not met:
        return Signals(np.zeros(0), np.zeros((0, window.stop - window.start), np.int8))
    index = [i for i, _ in met]
    s = np.array([s for _, s in met])
    known = np.where(lights.valid[index, window], lights.state[index, window], 0)
    state = STATES[np.clip(known, 0, len(STATES) - 1)]
    disputed = lights_disputed(route.expert_s + half_length, s, state)
    return Signals(s, np.where(disputed[:, None], np.int8(0), state))


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
        out["route"][a, :count, :2], out["route"][a, :count, 2] = route.points[:, :2], route.points[:, 3]
        out["route"][a, count:] = out["route"][a, count - 1]
        out["route_length"][a], out["route_points"][a], out["expert_s"][a] = route.length, count, route.expert_s
        if len(signal.s):
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
    edges = [f.points for f in log.features if f.kind in (kinds.EDGE_BOUNDARY, kinds.EDGE_MEDIAN) and len(f.points) > 1]
    points = np.concatenate([np.zeros((0, 3)), *edges]) - origin
    ends = np.array([0, *itertools.accumulate(map(len, edges))])
    height, over = points[:, 2], near[::5, 2]
    if len(points) and max(height.max() - over.min(), over.max() - height.min()) > LEVEL:
        away, closest = approach(points[:, :2], near[::5, :2])
        level = np.abs(height - over[closest]) <= np.minimum(LEVEL + SLOPE * away, BRIDGE)
        lines = [points[a:b][run] for a, b in itertools.pairwise(ends) for run in runs(level[a:b])]
        return distance_field(make_edges(lines), low, high)
    return distance_field(edges_of(points, ends[1:]), low, high)


def approach(points: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distance of `points` [P, 2] from the nearest of `near` [R, 2], and its index."""
    from longhaul.driving.scenario import kernels

    closest = kernels.nearest_points(points, near)
    return np.hypot(*(points - near[closest]).T), closest


def runs(flags: np.ndarray) -> list[slice]:
    """The stretches of True in `flags` [P]."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]


def draw(log: Log, routes: list[Route], origin: np.ndarray) -> tuple[tuple[int, np.ndarray], ...]:
    """The features within `DRAWN` metres of the routes, polygons whole, simplified: ((kind, float32 [P, 2]), ...)."""
    from longhaul.driving.scenario import kernels

    features = [feature for feature in log.features if len(feature.points)]
    if not features:
        return ()
    near = np.concatenate([r.points[::10, :2] for r in routes])
    points = np.concatenate([feature.points[:, :2] for feature in features]) - origin[:2]
    ends = np.cumsum([len(feature.points) for feature in features])
    whole = np.array([feature.kind in (kinds.CROSSWALK, kinds.SPEED_BUMP, kinds.DRIVEWAY) for feature in features])
    kept, bounds, of = kernels.drawn(points, ends, whole, near, DRAWN, DRAWN_TOLERANCE)
    lines, begins = points[kept].astype(np.float32), [0, *bounds.tolist()]
    drawn = zip(of.tolist(), itertools.pairwise(begins), strict=False)
    return tuple((features[i].kind, lines[a:b]) for i, (a, b) in drawn)
