"""Routes: the logged path of an agent as points one metre apart, how it goes on after the log, and the lights that it
meets.

Progress along a route is an arc length s, metres, from where the agent stands at the first step. P points of a
polyline, T steps, R route points, L lights. Everything here is local (near the origin), float64.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""How far beside a lane, and how turned against it, a path may end to go on along it."""
BLEND = 15.0
"""Metres in which a route that goes on along a lane moves over to its centre."""
LIGHT_AWAY, LIGHT_TURN = 3.0, np.radians(60.0)
"""How far beside the route a light's stop point may lie, and how turned against it its lane."""
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
    """Where a polyline [P, 2+] is nearest to `place` [2+]: (arc length, distance, direction there, index of the
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


def follow(lane: Lane, s: float, distance: float, lanes: dict[int, Lane]) -> np.ndarray:
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
    """By how much a lane turns between its ends, rad."""
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
