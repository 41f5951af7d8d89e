"""Routes along something else than the logged path: a given path, or the centres of the lanes that the log followed.

The logged path is the default route, for on it everything is exact: log replay is at the side of its route never, at
its end just when the log ends, and a lane change of the log is no offset. On a lane's centre, `lateral` is what a
driver's offset in its lane is, the same in all logs, and the way ahead is the road's rather than a driver's; but it
exists only where the log keeps to lanes: a route is guided only if the log stays within AWAY metres of the line from
its beginning to its end (a lane change within the log does not), else it remains the logged path. The log's progress
is measured along the guided route too, so that the goal is still where the log ends.

K knots of a logged path, T steps, P points of a line. All local, float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from longhaul.driving.scenario.routes import BEYOND, Lane, Route, arc_length, at, follow, lay, project, trace, wrap

AWAY, PATH_AWAY = 2.0, 5.0
"""Metres by which a log may be beside its line: of lanes, and of a given path (beyond, WOMD calls it off route)."""
TURN = np.radians(60.0)
"""By how much a lane may be turned against the log where a line begins."""
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
            parts.append(follow(lane, lane.s[-1] - 1e-3, BEYOND + 5.0, dict(lanes)))
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
