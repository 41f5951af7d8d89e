"""Procedural roads: lanes, their edges, lines and crosswalks, and the paths that traffic takes over them.

Traffic drives on the right. A map has either one road (lanes from end to end) or one junction: there each path is an
approach lane, a connector through the junction, and an exit lane. Local coordinates, metres, [P, 2]; lanes run in the
direction of travel, edges with the road on their left.
"""

from __future__ import annotations

import bisect
import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets import log

KINDS = ("straight", "curve", "crossing", "tee", "merge", "roundabout")
SHARES = (0.12, 0.24, 0.28, 0.16, 0.10, 0.10)
"""Frequency with which each kind is drawn."""
WHITE_BROKEN, WHITE_SOLID, YELLOW_SOLID_DOUBLE = 6, 7, 12
"""Kinds of road line, numbered as in the Waymo Open Motion Dataset."""
CROSSWALK_ROOM = 5.0
"""Metres between the stop line and where a junction's corners begin: the crosswalk lies there."""


class Path(NamedTuple):
    lanes: tuple[int, ...]  # (approach, connector, exit), or one lane
    leg: int  # of the approach; -1 where there is no junction
    turn: int  # 1 left, 0 straight on, -1 right
    priority: int  # at conflicts the lower one yields


class World(NamedTuple):
    kind: str
    lanes: list[np.ndarray]  # [P, 2] each
    paths: list[Path]
    edges: list[tuple[int, np.ndarray]]
    lines: list[tuple[int, np.ndarray]]
    crosswalks: list[np.ndarray]  # [4, 2]: two points on one side of the road, two on the other
    kerbs: list[np.ndarray]  # parking lane or shoulder, in travel direction; for parked cars and cyclists
    walks: list[np.ndarray]  # pavements
    signals: tuple[int, ...] | None  # phase group of each leg; None without lights
    limit: float  # m/s
    shoulder: float  # m


class Profile(NamedTuple):
    """The cross-section of a two-way road; offsets from its middle."""

    width: float  # of a lane
    median: float
    shoulder: float
    right: int  # lanes in the direction of the reference line
    left: int  # lanes against it
    raised: bool = True  # a median with edges, not a painted one

    def lane(self, i: int) -> float:
        return self.median / 2 + (i + 0.5) * self.width

    def half(self, lanes: int) -> float:
        return self.median / 2 + lanes * self.width + self.shoulder if lanes else 0.6


def draw_index(rng: np.random.Generator, shares: tuple[float, ...]) -> int:
    """A random index with these probabilities: `rng.choice(len(shares), p=shares)` in a tenth of its time."""
    return bisect.bisect_right(cumulated(shares), rng.random())


@lru_cache(maxsize=32)
def cumulated(shares: tuple[float, ...]) -> list[float]:
    total = np.cumsum(shares)
    return (total / total[-1]).tolist()


def draw_world(rng: np.random.Generator) -> World:
    """A map of a random kind, for a log of nine seconds."""
    kind = KINDS[draw_index(rng, SHARES)]
    if kind in ("straight", "curve"):
        return link(rng, kind)
    if kind == "merge":
        return merge(rng)
    return roundabout(rng) if kind == "roundabout" else crossing(rng, kind)


def draw_profile(rng: np.random.Generator, lanes: int, *, one_way: bool = False) -> Profile:
    """A random cross-section with up to `lanes` lanes a direction."""
    right = int(rng.integers(1, lanes + 1))
    left = 0 if one_way else int(np.clip(right + rng.integers(-1, 2), 1, lanes))
    median = float(rng.uniform(1.2, 5.0)) if rng.random() < 0.45 and not one_way else 0.0
    raised = rng.random() < 0.6
    return Profile(float(rng.uniform(2.75, 4.3)), median, draw_shoulder(rng), right, left, raised)


def draw_shoulder(rng: np.random.Generator) -> float:
    """Metres between the outer lane and the edge: hardly any, some, room to park, or a wide apron."""
    low, high = ((0.15, 0.8), (0.8, 2.0), (2.3, 3.4), (3.4, 8.0))[draw_index(rng, (0.3, 0.2, 0.35, 0.15))]
    return float(rng.uniform(low, high))


def offset(line: np.ndarray, distance: float) -> np.ndarray:
    """The line [P, 2] `distance` metres to the left of `line`."""
    from longhaul.driving.generator import kernels

    return kernels.offset(np.ascontiguousarray(line), float(distance))


def ray(angle: float, near: float, far: float, left: float, spacing: float = 4.0) -> np.ndarray:
    """A straight line at `angle` from the middle, from radius `near` to `far`, `left` metres beside it."""
    from longhaul.driving.generator import kernels

    count = max(2, int(abs(far - near) / spacing))
    return kernels.ray(float(angle), float(near), float(far), float(left), count)


def bend(start: np.ndarray, start_direction: np.ndarray, end: np.ndarray, end_direction: np.ndarray) -> np.ndarray:
    """A smooth curve between two directed points: a cubic Bezier, nearly a circle where one fits."""
    from longhaul.driving.generator import kernels

    ends = start, start_direction, end, end_direction
    return kernels.bend(*(float(x) for pair in ends for x in pair))


def joined(line: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`line`, a bend, `other`."""
    from longhaul.driving.generator import kernels

    return kernels.joined(np.ascontiguousarray(line), np.ascontiguousarray(other))


def island(line: np.ndarray, half: float) -> np.ndarray:
    """A closed outline around `line`, clockwise: its inside is no road."""
    from longhaul.driving.generator import kernels

    return kernels.island(np.ascontiguousarray(line), float(half))


def circle(radius: float, first: float, last: float) -> np.ndarray:
    """An arc around the middle between two angles, a point a metre."""
    angle = np.linspace(first, last, max(3, int(abs(last - first) * radius)))
    return radius * np.stack([np.cos(angle), np.sin(angle)], -1)


def link(rng: np.random.Generator, kind: str) -> World:
    """One road, straight or with curves of radius 25 to 150 m."""
    curved = kind == "curve"
    profile = draw_profile(rng, 2 if curved else 4, one_way=rng.random() < 0.15)
    limit = float(rng.uniform(8.0, 18.0) if curved else rng.uniform(7.0, 28.0))
    half = profile.half(max(profile.right, profile.left))
    middle = reference(rng, 330.0, half + 13.0) if curved else ray(0.0, 0.0, max(330.0, 120.0 + 10.0 * limit), 0.0)
    lanes = [offset(middle, -profile.lane(i)) for i in range(profile.right)]
    lanes += [offset(middle, profile.lane(i))[::-1] for i in range(profile.left)]
    right, left = -profile.half(profile.right), profile.half(profile.left)
    edges = [(log.EDGE_BOUNDARY, offset(middle, right)), (log.EDGE_BOUNDARY, offset(middle, left)[::-1])]
    if profile.median and profile.raised:
        edges.append((log.EDGE_MEDIAN, island(middle, profile.median / 2 - 0.3)))
    kerbs = [offset(middle, right + profile.shoulder / 2)]
    kerbs += [offset(middle, left - profile.shoulder / 2)[::-1]] if profile.left else []
    walks = [offset(middle, right - 2.0), offset(middle, left + 2.0)[::-1]]
    paths = [Path((i,), -1, 0, 0) for i in range(len(lanes))]
    return World(kind, lanes, paths, edges, marks(middle, profile), [], kerbs, walks, None, limit, profile.shoulder)


def reference(rng: np.random.Generator, length: float, least: float) -> np.ndarray:
    """A curving middle line whose heading stays within 75 degrees, so that it never meets itself."""
    curvature: list[np.ndarray] = [np.zeros(int(rng.uniform(20, 70)))]
    heading = 0.0
    while sum(map(len, curvature)) < length:
        radius = max(float(rng.uniform(25.0, 60.0) if rng.random() < 0.5 else rng.uniform(60.0, 150.0)), least)
        side = -np.sign(heading) if abs(heading) > 0.5 else (1.0 if rng.random() < 0.5 else -1.0)
        room = np.radians(75.0) - side * heading
        turn = float(rng.uniform(0.5, 1.0)) * min(room, 110.0 / radius)
        heading += side * turn
        curvature += [np.full(max(3, int(turn * radius)), side / radius), np.zeros(int(rng.uniform(10, 50)))]
    bends = np.concatenate(curvature)[: int(length)]
    smooth = np.convolve(np.pad(bends, 6, mode="edge"), np.full(13, 1 / 13), mode="valid")
    angle = np.cumsum(smooth)
    return np.cumsum(np.stack([np.cos(angle), np.sin(angle)], -1), 0)


def marks(middle: np.ndarray, profile: Profile) -> list[tuple[int, np.ndarray]]:
    """The painted lines of a road along `middle`."""
    lines = [(WHITE_BROKEN, offset(middle, -profile.median / 2 - i * profile.width)) for i in range(1, profile.right)]
    lines += [(WHITE_BROKEN, offset(middle, profile.median / 2 + i * profile.width)) for i in range(1, profile.left)]
    if profile.shoulder > 1.0:
        lines.append((WHITE_SOLID, offset(middle, profile.shoulder - profile.half(profile.right))))
        lines += [(WHITE_SOLID, offset(middle, profile.half(profile.left) - profile.shoulder))] if profile.left else []
    if profile.left and not profile.median:
        lines.append((YELLOW_SOLID_DOUBLE, middle))
    return lines


def stop_radii(angles: np.ndarray, legs: list[Profile], corner: float) -> list[float]:
    """Distance from the middle at which each leg's stop line lies, so that every corner has room for its radius."""
    reach = [corner + 6.0] * len(legs)
    for k in range(len(legs)):
        j = (k + 1) % len(legs)
        between = (angles[j] - angles[k]) % (2 * np.pi)
        if np.sin(between) < 0.3:
            continue
        # where the edge of leg k's approach meets the edge of leg j's exit
        a, b = legs[k].half(legs[k].left), legs[j].half(legs[j].right)
        reach[k] = max(reach[k], (b + a * np.cos(between)) / np.sin(between) + corner)
        reach[j] = max(reach[j], (a + b * np.cos(between)) / np.sin(between) + corner)
    return [r + CROSSWALK_ROOM for r in reach]


class Leg(NamedTuple):
    """A road that leaves a junction; the profile's `right` lanes lead out, its `left` lanes in."""

    angle: float
    profile: Profile
    stop: float
    far: float

    def inward(self, i: int) -> np.ndarray:
        return ray(self.angle, self.far, self.stop, self.profile.lane(i))

    def outward(self, i: int) -> np.ndarray:
        return ray(self.angle, self.stop, self.far, -self.profile.lane(i))


def dress(legs: list[Leg], *, crosswalks: bool) -> dict[str, list]:
    """Details of legs beside lanes: medians, lines, crosswalks, kerbs, pavements."""
    out: dict[str, list] = {"edges": [], "lines": [], "crosswalks": [], "kerbs": [], "walks": []}
    for leg in legs:
        p = leg.profile
        middle = ray(leg.angle, leg.stop + 1.0, leg.far, 0.0)
        out["lines"] += marks(middle, p)
        if p.median and p.raised:
            out["edges"].append((log.EDGE_MEDIAN, island(middle, p.median / 2 - 0.3)))
        into, outof = p.half(p.left), p.half(p.right)
        out["kerbs"] += [ray(leg.angle, leg.far, leg.stop + 12.0, into - p.shoulder / 2)]
        out["kerbs"] += [ray(leg.angle, leg.stop + 12.0, leg.far, p.shoulder / 2 - outof)]
        out["walks"] += [ray(leg.angle, leg.far, leg.stop, into + 2.0), ray(leg.angle, leg.stop, leg.far, -outof - 2.0)]
        if crosswalks:
            near, far = leg.stop - 4.2, leg.stop - 1.2
            sides = [ray(leg.angle, near, far, side, 99.0) for side in (into, -outof)]
            out["crosswalks"].append(np.concatenate([sides[0], sides[1][::-1]]))
    return out


def turn_of(leg: Leg, other: Leg) -> int:
    """1 left, 0 straight, -1 right: from one leg to another."""
    angle = float((other.angle - leg.angle - np.pi + np.pi) % (2 * np.pi) - np.pi)
    return 0 if abs(angle) < np.radians(40) else int(np.sign(angle))


def crossing(rng: np.random.Generator, kind: str) -> World:
    """A junction of four legs, or of three: with lights, or with a main road that has priority."""
    count = 4 if kind == "crossing" else 3
    jitter = rng.uniform(-0.3, 0.3, 2)
    angles = np.array([0.0, np.pi / 2 + jitter[0], np.pi, 3 * np.pi / 2 + jitter[1]])[:count]
    main, side = draw_profile(rng, 4), draw_profile(rng, 3)
    main = main._replace(left=main.right)
    side = side._replace(left=side.right)
    profiles = [main, side, main, side][:count]
    stops = stop_radii(angles, profiles, float(rng.uniform(3.5, 13.0)))
    legs = [Leg(float(a), p, s, s + 140.0) for a, p, s in zip(angles, profiles, stops, strict=True)]
    lights = rng.random() < (0.8 if kind == "crossing" else 0.6)
    split = rng.random() < 0.3
    groups = tuple(range(count)) if split else tuple(k % 2 for k in range(count))
    lanes: list[np.ndarray] = []
    paths: list[Path] = []
    entrances = [[add(lanes, leg.inward(i)) for i in range(leg.profile.left)] for leg in legs]
    exits = [[add(lanes, leg.outward(i)) for i in range(leg.profile.right)] for leg in legs]
    for k, leg in enumerate(legs):
        for j, other in enumerate(legs):
            if j == k:
                continue
            turn = turn_of(leg, other)
            ways = [(0, 0)] if turn > 0 else [(leg.profile.left - 1, other.profile.right - 1)]
            ways = [(i, i) for i in range(min(leg.profile.left, other.profile.right))] if turn == 0 else ways
            base = 0 if lights else 3 * (k % 2 == 0)
            for i, o in ways:
                connector = add(lanes, through(lanes[entrances[k][i]], lanes[exits[j][o]]))
                paths.append(Path((entrances[k][i], connector, exits[j][o]), k, turn, base + (2, 0, 1)[turn]))
    furniture = dress(legs, crosswalks=lights or rng.random() < 0.3)
    for leg, following in zip(legs, [*legs[1:], legs[0]], strict=True):  # around each corner, counter-clockwise
        into, outof = leg.profile.half(leg.profile.left), following.profile.half(following.profile.right)
        approach = ray(leg.angle, leg.far, leg.stop - CROSSWALK_ROOM, into)
        edge = joined(approach, ray(following.angle, following.stop - CROSSWALK_ROOM, following.far, -outof))
        furniture["edges"].append((log.EDGE_BOUNDARY, edge))
    limit, shoulder = float(rng.uniform(7.0, 18.0)), min(main.shoulder, side.shoulder)
    return World(kind, lanes, paths, **furniture, signals=groups if lights else None, limit=limit, shoulder=shoulder)


def add(lanes: list[np.ndarray], line: np.ndarray) -> int:
    """Appends a lane; its index."""
    lanes.append(line)
    return len(lanes) - 1


def through(approach: np.ndarray, leaving: np.ndarray) -> np.ndarray:
    """A connector: straight over the crosswalk, a bend, straight over the other crosswalk."""
    from longhaul.driving.generator import kernels

    return kernels.through(np.ascontiguousarray(approach), np.ascontiguousarray(leaving), CROSSWALK_ROOM)


def merge(rng: np.random.Generator) -> World:
    """A one-way road that a ramp joins from the right, over an acceleration lane."""
    count, width, limit = int(rng.integers(1, 4)), float(rng.uniform(3.1, 4.0)), float(rng.uniform(12.0, 26.0))
    room, radius = float(rng.uniform(50.0, 80.0)), float(rng.uniform(90.0, 150.0))
    right, far = -count * width - 0.5, 240.0
    lanes: list[np.ndarray] = []
    paths: list[Path] = []
    for i in range(count):
        y = -(i + 0.5) * width
        cut = (-170.0, 0.0, room + 45.0, far)
        sections = [np.linspace(a, b, int((b - a) / 4)) for a, b in itertools.pairwise(cut)]
        parts = [np.stack([x, np.full(len(x), y)], -1) for x in sections]
        paths.append(Path((add(lanes, parts[0]), add(lanes, parts[1]), add(lanes, parts[2])), 0, 0, 3))
    angle = np.linspace(0.35, 0.0, 40)
    arc = np.stack([-radius * np.sin(angle), -radius * (1 - np.cos(angle))], -1)
    back = arc[0] - np.linspace(110.0, 3.0, 28)[:, None] * np.array([np.cos(0.35), np.sin(0.35)])
    ramp = np.concatenate([back, arc]) + np.array([0.0, right - width / 2 - 0.3])
    shift = bend(np.array([room - 5.0, ramp[-1, 1]]), np.array([1.0, 0.0]), lanes[-1][0], np.array([1.0, 0.0]))
    outer = [add(lanes, ramp), add(lanes, np.concatenate([ramp[-1:], shift])), paths[-1].lanes[2]]
    paths.append(Path((outer[0], outer[1], outer[2]), 1, 0, 1))
    ramp_right, ramp_left = offset(ramp, -width / 2 - 0.6), offset(ramp, width / 2 + 0.3)
    low = ramp_right[-1, 1]
    taper = np.array([[room + 10.0, low], [room + 45.0, right], [far, right]])
    gore = [np.array([[-170.0, right], [-14.0, right]]), ramp_left[ramp_left[:, 0] < -14.0][::-1]]
    top = np.array([[far, 0.6], [-170.0, 0.6]])
    edges = [np.concatenate([ramp_right, taper]), np.concatenate(gore), top]
    lines = [(WHITE_BROKEN, np.array([[-170.0, -i * width], [far, -i * width]])) for i in range(1, count)]
    lines.append((WHITE_BROKEN, np.array([[0.0, right], [room + 10.0, right]])))
    return World("merge", lanes, paths, [(log.EDGE_BOUNDARY, e) for e in edges], lines, [], [], [], None, limit, 0.5)


def roundabout(rng: np.random.Generator) -> World:
    """A roundabout of one lane with three or four legs; each connector is an entry, a part of the ring, and an exit."""
    count, width = int(rng.integers(3, 5)), float(rng.uniform(3.3, 4.2))
    angles = np.arange(count) * 2 * np.pi / count + rng.uniform(-0.1, 0.1, count)
    ring, swing = float(rng.uniform(13.0, 20.0)), 0.55
    profile = Profile(width, 0.0, 0.6, 1, 1)
    stop = ring + 12.0
    legs = [Leg(float(a), profile, stop, stop + 130.0) for a in angles]
    lanes: list[np.ndarray] = []
    paths: list[Path] = []
    entrances = [add(lanes, leg.inward(0)) for leg in legs]
    exits = [add(lanes, leg.outward(0)) for leg in legs]
    for k, leg in enumerate(legs):
        for j, other in enumerate(legs):
            first = leg.angle + swing
            last = first + (other.angle - swing - first) % (2 * np.pi)
            if j == k:
                continue
            arc = circle(ring, first, last)
            connector = joined(joined(lanes[entrances[k]][-2:], arc), lanes[exits[j]][:2])[1:-1]
            paths.append(Path((entrances[k], add(lanes, connector), exits[j]), k, turn_of(leg, other), 0))
    furniture = dress(legs, crosswalks=False)
    for k, leg in enumerate(legs):
        other = legs[(k + 1) % count]
        outer = ring + width / 2 + 0.8
        arc = circle(outer, leg.angle + swing, leg.angle + swing + (other.angle - leg.angle - 2 * swing) % (2 * np.pi))
        approach = ray(leg.angle, leg.far, leg.stop, profile.half(1))
        edge = joined(joined(approach, arc), ray(other.angle, other.stop, other.far, -profile.half(1)))
        furniture["edges"].append((log.EDGE_BOUNDARY, edge))
    furniture["edges"].append((log.EDGE_MEDIAN, circle(ring - width / 2 - 0.8, 2 * np.pi, 0.0)))
    limit = float(rng.uniform(8.0, 12.0))
    return World("roundabout", lanes, paths, **furniture, signals=None, limit=limit, shoulder=0.6)
