"""Routes of agents: the logged path as points one metre apart, its continuation after the log, and its traffic lights.

Progress along a route is an arc length s, metres, from where the agent stands at the first step.

The logged path is the default, because everything is exact on it: log replay has no lateral offset, reaches the end of
the route just when the log ends, and a lane change of the log is no offset. `guide` makes a route along something else:
a given path, or the centres of the lanes that the log followed. There `lateral` is the driver's offset in its lane, and
the route ahead is that of the road. A guided route exists only if the log stays within AWAY metres of the line from
beginning to end; otherwise the route remains the logged path. The progress of the log is measured along the guided
route too, so that the goal is still where the log ends.

P points of a polyline, T steps, R route points, L lights, K knots of a logged path. All local (near the origin),
float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets.log import LANE_FREEWAY, LANE_STREET, LIGHT_GREEN, LIGHT_RED, LIGHT_YELLOW, Feature
from longhaul.driving.scenario.scenario import ROUTE_SPACING

NOISE = 0.3
"""Metres between two points of a logged path that are told apart; below, a standing vehicle's noise would give
directions."""
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

STATES = np.zeros(9, np.int8)
STATES[list(LIGHT_RED)], STATES[list(LIGHT_YELLOW)], STATES[list(LIGHT_GREEN)] = 1, 2, 3
"""From a log's states to `Scenario.light_state`."""


class Lane(NamedTuple):
    id: int
    points: np.ndarray  # [P, 3], P >= 2, no point repeated
    s: np.ndarray  # [P], arc length in the plane
    exit: tuple[int, ...]


class Route(NamedTuple):
    points: np.ndarray  # [R, 4]: x, y, z, heading; s = ROUTE_SPACING * index
    length: float  # of the logged path
    expert_s: np.ndarray  # [T]


def find_lanes(features: Sequence[Feature], origin: np.ndarray) -> dict[int, Lane]:
    """The lanes for motor vehicles, by id, relative to `origin` [3]."""
    lanes = {}
    for feature in features:
        if feature.kind not in (LANE_FREEWAY, LANE_STREET):
            continue
        lane = make_lane(feature.id, feature.points - origin, feature.exit)
        if lane is not None:
            lanes[lane.id] = lane
    return lanes


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
    step = np.hypot(*np.diff(points[:, :2], axis=0).T)
    points = points[np.append(True, step > 1e-3)]
    return Lane(identity, points, arc_length(points), exit) if len(points) > 1 else None


def make_route(
    position: np.ndarray,
    heading: np.ndarray,
    valid: np.ndarray,
    lanes: dict[int, Lane],
    paths: Sequence[Lane] = (),
) -> Route:
    """The route of an agent that was at `position` [T, 3] with `heading` [T] where `valid` [T]; it must be valid at
    step 0. After the log it goes on along one of `paths`, if one fits, else along a lane."""
    knots, expert_s = trace(position, heading, valid)
    length = float(expert_s[-1])
    last = int(np.flatnonzero(valid)[-1])
    if length < STANDING:
        ahead = np.array([np.cos(heading[0]), np.sin(heading[0]), 0.0])
        line = np.stack([position[0], position[0] + (BEYOND + 2.0) * ahead])
    else:
        ways = {path.id: path for path in paths}
        ways = ways if lane_at(knots[-1], float(heading[last]), ways) is not None else lanes
        line = np.concatenate([knots, continuation(knots[-1], float(heading[last]), ways)])
    route = lay(line, length, expert_s)
    if STANDING <= length < 2.0:
        where = ROUTE_SPACING * np.arange(len(route.points))
        turns = np.interp(where, expert_s[valid], np.unwrap(heading[valid]))
        route.points[:, 3] = np.where(where < length, turns, route.points[:, 3])
    return route


def lay(line: np.ndarray, length: float, expert_s: np.ndarray) -> Route:
    """The route on a line [P, 3] from its beginning on, whose goal is after `length` metres; straight on beyond the
    line."""
    s = arc_length(line)
    missing = length + BEYOND + 2.0 - s[-1]
    if missing > 0.0:
        chord = (line[-1] - line[-2]) * np.array([1.0, 1.0, 0.0])
        line = np.concatenate([line, line[-1:] + missing * chord / max(float(np.hypot(*chord[:2])), 1e-9)])
        s = np.append(s, s[-1] + missing)
    where = ROUTE_SPACING * np.arange(int(np.ceil((length + BEYOND) / ROUTE_SPACING)) + 1)
    after, before = (at(line[:, :2], s, np.clip(where + d, 0.0, s[-1])) for d in (1.0, -1.0))
    turn = np.arctan2(*(after - before).T[::-1])
    return Route(np.concatenate([at(line, s, where), turn[:, None]], -1), length, expert_s)


def trace(position: np.ndarray, heading: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The path of an agent without noise at rest, [K, 3], and its arc length over time, [T], monotone.

    A point belongs to the path when it lies `NOISE` or more from the one before, ahead of it as the agent looks:
    while it reverses, the arc length stands still, and the path goes on where the agent gets ahead of it again.
    """
    steps = np.flatnonzero(valid)
    kept = [0]
    x, y = position[steps, 0].tolist(), position[steps, 1].tolist()
    cos, sin = np.cos(heading[steps]).tolist(), np.sin(heading[steps]).tolist()
    for i in range(1, len(steps)):
        dx, dy = x[i] - x[kept[-1]], y[i] - y[kept[-1]]
        away = float(np.hypot(dx, dy))
        ahead = dx * cos[i] + dy * sin[i] > 0.3 * away
        if ahead and away >= NOISE:
            kept.append(i)
        elif ahead and i == len(steps) - 1:
            kept = [*kept[: max(len(kept) - 1, 1)], i]  # the log's end replaces the point just before it
    knot = np.searchsorted(kept, np.arange(len(steps)), side="right") - 1
    knots = position[steps[kept]]
    s = arc_length(knots)
    begin, chord = knots[knot, :2], (np.append(knots[1:], knots[-1:], 0) - knots)[knot, :2]
    size = np.maximum(np.hypot(*chord.T), 1e-9)
    along = np.clip(((position[steps, :2] - begin) * chord).sum(-1) / size, 0.0, size)
    reached = np.maximum.accumulate(np.where(knot + 1 < len(knots), s[knot] + along, s[-1]))
    latest = np.maximum(np.cumsum(valid) - 1, 0)
    return knots, reached[latest]


def continuation(end: np.ndarray, heading: float, lanes: dict[int, Lane]) -> np.ndarray:
    """Points [P, 3] after `end` [3], for more than `BEYOND` metres: along the lane there, if one fits, else straight
    on."""
    line, wanted = end[None], BEYOND + 5.0
    found = lane_at(end, heading, lanes)
    if found is not None:
        lane, s = found
        ahead = follow(lane, s, wanted, lanes)
        along = arc_length(ahead)
        share = np.clip(1.0 - along / BLEND, 0.0, 1.0)
        ahead = ahead + (share * share * (3.0 - 2.0 * share))[:, None] * (end - ahead[0])
        line = np.concatenate([line, ahead[along > 0.5]])
        if len(line) > 1:
            heading = float(np.arctan2(*(line[-1] - line[-2])[1::-1]))
    missing = wanted - arc_length(line)[-1]
    if missing > 0.0:
        line = np.concatenate([line, line[-1:] + missing * np.array([[np.cos(heading), np.sin(heading), 0.0]])])
    return line[1:]


def lane_at(place: np.ndarray, heading: float, lanes: dict[int, Lane]) -> tuple[Lane, float] | None:
    """The lane nearest to `place` [3] that runs along `heading`, and the arc length there; None if none is near."""
    best, found = LANE_AWAY, None
    for lane in lanes.values():
        low, high = lane.points[:, :2].min(0) - LANE_AWAY, lane.points[:, :2].max(0) + LANE_AWAY
        if not ((place[:2] >= low) & (place[:2] <= high)).all():
            continue
        s, away, turn, i = project(lane.points, lane.s, place)
        if away < best and abs(wrap(turn - heading)) < LANE_TURN and abs(lane.points[i, 2] - place[2]) < 3.0:
            best, found = away, (lane, s)
    return found


def project(line: np.ndarray, s: np.ndarray, place: np.ndarray) -> tuple[float, float, float, int]:
    """Point where a polyline [P, 2+] is nearest to `place` [2+]: (arc length, distance, direction there, index of the
    segment)."""
    start, chord = line[:-1, :2], np.diff(line[:, :2], axis=0)
    relative = place[:2] - start
    share = np.clip((relative * chord).sum(-1) / np.maximum((chord**2).sum(-1), 1e-12), 0.0, 1.0)
    away = np.hypot(*(relative - share[:, None] * chord).T)
    i = int(away.argmin())
    direction = float(np.arctan2(chord[i, 1], chord[i, 0]))
    return float(s[i] + share[i] * (s[i + 1] - s[i])), float(away[i]), direction, i


def wrap(angle: float) -> float:
    """`angle` in -pi .. pi."""
    return float((angle + np.pi) % (2.0 * np.pi) - np.pi)


def follow(lane: Lane, s: float, distance: float, lanes: Mapping[int, Lane]) -> np.ndarray:
    """Points [P, 3] along `lane` from arc length `s` on, and along the straightest of its exits, for `distance` m if
    they reach."""
    parts, seen = [at(lane.points, lane.s, np.array([s]))], {lane.id}
    while True:
        parts.append(lane.points[lane.s > s + 1e-6])
        distance -= lane.s[-1] - s
        onward = [lanes[i] for i in lane.exit if i in lanes and i not in seen]
        if distance <= 0.0 or not onward:
            return np.concatenate(parts)
        lane, s = min(onward, key=lambda other: abs(turn_of(other))), 0.0
        seen.add(lane.id)


def turn_of(lane: Lane) -> float:
    """Angle by which a lane turns between its ends, rad."""
    first, last = lane.points[1] - lane.points[0], lane.points[-1] - lane.points[-2]
    return wrap(float(np.arctan2(last[1], last[0]) - np.arctan2(first[1], first[0])))


def meet_lights(
    route: Route, lane_ids: np.ndarray, stops: np.ndarray, lanes: dict[int, Lane]
) -> list[tuple[int, float]]:
    """(index, arc length of the stop point) of the lights that hold for `route`, of those at `stops` [L, 3] for
    `lane_ids` [L].

    A light holds if its stop point lies beside the route and its lane then follows the route: at one stop there are
    often several, for straight on and for turns. A light whose lane the source does not have counts by its stop point
    alone.
    """
    line = route.points
    s = ROUTE_SPACING * np.arange(len(line))
    met = []
    for i, (lane_id, stop) in enumerate(zip(lane_ids.tolist(), stops, strict=True)):
        where, away, turn, near = project(line, s, stop)
        if not np.isfinite(away) or away > LIGHT_AWAY or not 0.0 < where < s[-1] or abs(line[near, 2] - stop[2]) > 4.0:
            continue
        score, lane = away, lanes.get(lane_id)
        if lane is not None:
            begin, _, direction, _ = project(lane.points, lane.s, stop)
            end = min(begin + LANE_SHARED, lane.s[-1])
            shared = at(lane.points[:, :2], lane.s, np.linspace(begin, end, 11))
            gaps = np.hypot(*(shared[:, None] - line[None, :, :2]).transpose(2, 0, 1)).min(1)
            score = float(gaps.mean())
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
    for lines, away in ((path_lines(knots, paths), PATH_AWAY), (lane_lines(knots, begin, lanes), AWAY)):
        measured = [(offsets(knots, line), line) for line in lines]
        fitting = [(float(offset.mean()), line) for offset, line in measured if offset.max() < away]
        if fitting:
            found = along(position, valid, expert_s, min(fitting, key=lambda pair: pair[0])[1])
            if found is not None:
                return found
    return None


def path_lines(knots: np.ndarray, paths: Sequence[Lane]) -> Iterator[np.ndarray]:
    """The paths [P, 3] that go on to where the log ends and farther."""
    for path in paths:
        if project(path.points, path.s, knots[-1])[0] < path.s[-1] - 0.01:
            yield path.points


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
    """The route on `line` of an agent at `position` [T, 3] that has come `travelled` [T] metres; None if its progress
    along the line is not about that."""
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
