"""The metrics of driving once more, slowly: NumPy, float64, one agent after the other, written from the definitions.

Nothing of `longhaul.driving` is used. A `World` is raw data: what an agent did at each step and what was around it.
`measure` gives each metric as (value, valid). Its thresholds can be moved by `slack`, in metres, seconds and shares of
a limit alike, so that a caller can tell a verdict that lies on a threshold from one that is wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MERGED = 0.1
"""Metres by which lanes may have been moved when they were simplified: a slack in what is said about lanes."""

PEDESTRIAN, CYCLIST = 2, 3
RED = 1
Box = tuple[float, float, float, float, float]  # x, y, heading, half length, half width


class Lane(NamedTuple):
    points: np.ndarray  # [P, 2]
    limit: float  # m/s; 0 unknown
    inferred: bool
    bike: bool


class World(NamedTuple):
    """T + 1 moments dt apart, of which the first is the beginning; N others."""

    dt: float
    kind: int
    size: tuple[float, float]  # length, width
    pose: np.ndarray  # [T+1, 3]: x, y, heading
    speed: np.ndarray  # [T+1]
    counts: np.ndarray  # bool [T+1]: which steps count
    others: np.ndarray  # [T+1, N, 3]
    velocities: np.ndarray  # [T+1, N, 2]
    present: np.ndarray  # bool [T+1, N]
    sizes: np.ndarray  # [N, 2]
    kinds: np.ndarray  # [N]
    route: np.ndarray  # [R, 3], x, y, heading, 1 m apart, the logged way from its beginning on
    start: float  # m along it, of the log's beginning
    length: float  # and of its end
    light_s: np.ndarray  # [L], m along it
    light_state: np.ndarray  # [L, T+1]
    lanes: list[Lane]
    road: np.ndarray | None  # [H, W], m: signed distance to the road's edge every 0.5 m; None: unknown
    road_origin: np.ndarray  # [2]
    expert: np.ndarray  # [T+1, 2]: where the log has the agent
    known: np.ndarray  # bool [T+1]: whether it has
    top: float  # m/s: the log's highest speed


Found = dict[str, tuple[float, bool]]


def turn(angle: np.ndarray | float) -> np.ndarray:
    return (np.asarray(angle) + np.pi) % (2 * np.pi) - np.pi


def corners(box: Box) -> np.ndarray:
    """[4, 2]: front left, front right, rear right, rear left."""
    x, y, h, length, width = box
    forward, left = np.array([np.cos(h), np.sin(h)]), np.array([-np.sin(h), np.cos(h)])
    return np.array([x, y]) + np.array([a * length * forward + b * width * left for a, b in _SIGNS])


_SIGNS = ((1, 1), (1, -1), (-1, -1), (-1, 1))


def gap(one: np.ndarray, other: np.ndarray) -> float:
    """Distance between two convex polygons [P, 2] along the best of the normals of their sides; negative: they overlap.
    A line has two points."""
    best = -np.inf
    for shape in (one, other):
        for a, b in zip(shape, np.roll(shape, -1, 0), strict=True):
            normal = np.array([b[1] - a[1], a[0] - b[0]])
            size = np.hypot(*normal)
            if size < 1e-12:
                continue
            p, q = one @ normal / size, other @ normal / size
            best = max(best, q.min() - p.max(), p.min() - q.max())
            if len(shape) == 2:  # along a line, too
                along = (b - a) / size
                p, q = one @ along, other @ along
                best = max(best, q.min() - p.max(), p.min() - q.max())
    return float(best)


def box_of(world: World, t: int) -> Box:
    x, y, h = world.pose[t]
    return float(x), float(y), float(h), world.size[0] / 2, world.size[1] / 2


def other_of(world: World, t: int, n: int, ahead: float = 0.0) -> Box:
    x, y, h = world.others[t, n]
    vx, vy = world.velocities[t, n]
    return float(x + ahead * vx), float(y + ahead * vy), float(h), world.sizes[n, 0] / 2, world.sizes[n, 1] / 2


def bearing(world: World, t: int, n: int) -> float:
    """The angle from the agent's axis to another's centre."""
    dx, dy = world.others[t, n, :2] - world.pose[t, :2]
    return float(abs(turn(np.arctan2(dy, dx) - world.pose[t, 2])))


# ------------------------------------------------------------------------------------------------------------- route


def follow(world: World) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arc length, offset and heading of the route [T+1], looked for around where the agent was a step before."""
    line, s = world.route, world.start
    straight = np.array([np.cos(line[-1, 2]), np.sin(line[-1, 2])]) * np.arange(1, 61)[:, None]
    back = -np.array([np.cos(line[0, 2]), np.sin(line[0, 2])]) * np.arange(4, 0, -1)[:, None]
    points = np.concatenate([line[0, :2] + back, line[:, :2], line[-1, :2] + straight])
    headings = np.concatenate([np.full(4, line[0, 2]), line[:, 2], np.full(60, line[-1, 2])])
    out = []
    for x, y in world.pose[:, :2]:
        best = (np.inf, 0.0, 0.0, 0.0)
        first = max(0, int(s) - 10 + 4)
        for i in range(first, min(len(points) - 1, int(s) + 60 + 4)):
            a, way = points[i], points[i + 1] - points[i]
            part = np.clip(((np.array([x, y]) - a) @ way) / max(way @ way, 1e-12), 0.0, 1.0)
            foot = np.array([x, y]) - a - part * way
            away = float(np.hypot(*foot))
            side = way[0] * foot[1] - way[1] * foot[0]
            if away < best[0] - 1e-9:
                best = (away, i - 4 + part, float(np.copysign(away, side)), float(headings[i]))
        s = best[1]
        out.append(best[1:])
    s, lateral, heading = np.array(out).T
    return s, lateral, heading


# ------------------------------------------------------------------------------------------------------------- lanes


class Here(NamedTuple):
    near: bool
    along: float
    against: bool
    straddles: bool
    limit: float
    inferred: bool


def on_lanes(world: World, t: int, slack: float) -> Here:
    """The lanes around the agent's centre, each by its nearest segment."""
    x, y, h, length, width = box_of(world, t)
    forward = np.array([np.cos(h), np.sin(h)])
    near, along, limit, inferred = np.inf, np.inf, 0.0, False
    opposed = other = False
    offsets = []
    for lane in world.lanes:
        if lane.bike and world.kind != CYCLIST:
            continue
        a, way = lane.points[:-1], np.diff(lane.points, axis=0)
        size = np.hypot(*way.T)
        a, way, size = a[size > 1e-9], way[size > 1e-9], size[size > 1e-9]
        if not len(size):
            continue
        part = np.clip(((np.array([x, y]) - a) * way).sum(1) / size**2, 0.0, 1.0)
        feet = np.array([x, y]) - a - part[:, None] * way
        away = np.hypot(*feet.T)
        i = int(away.argmin())
        direction = way[i] / size[i]
        cos = float(direction @ forward)
        sin = float(abs(direction[0] * forward[1] - direction[1] * forward[0]))
        near = min(near, away[i])
        if cos > 0.0 and away[i] < along:
            along, limit, inferred = float(away[i]), lane.limit, lane.inferred
        opposed |= away[i] <= 1.75 + slack and cos < -0.5
        other |= away[i] <= 1.75 - slack and cos >= -0.5
        reach = length * sin + width * abs(cos)
        if abs(cos) >= 0.8 - slack:
            to_point = np.array([x, y]) - a[i]
            left = float(direction[0] * to_point[1] - direction[1] * to_point[0])
            offsets.append((float(away[i]), left if cos > 0.0 else -left, float(away[i]) - reach))
    owns = [left for away, left, _ in offsets if away <= min(offsets)[0] + abs(slack)]  # which is nearest may be open
    gaps = [[(abs(left - own), nearest) for _, left, nearest in offsets] for own in owns]
    either = any if slack > 0.0 else all
    straddles = bool(owns) and either(
        any(apart >= 2.0 - slack and nearest < min(apart / 2, 1.75) + slack for apart, nearest in each) for each in gaps
    )
    known = along <= 5.0
    limit, inferred = (limit, inferred) if known else (0.0, False)
    return Here(near <= 5.0 - slack, along, opposed and not other, straddles, limit, inferred)


# ------------------------------------------------------------------------------------------------------------ others


def time_to_collision(world: World, t: int, slack: float, horizon: float = 5.0, fine: float = 0.02) -> float:
    """The first of moments `fine` apart at which boxes that go on as they are overlap; infinite beyond `horizon`."""
    if world.speed[t] < 0.05:
        return np.inf
    x, y, h, length, width = box_of(world, t)
    velocity = world.speed[t] * np.array([np.cos(h), np.sin(h)])
    first = np.inf
    for n in np.flatnonzero(world.present[t]):
        if bearing(world, t, n) > np.deg2rad(30.0) + slack:
            continue
        distance = np.hypot(*(world.others[t, n, :2] - world.pose[t, :2]))
        radii = np.hypot(length, width) + np.hypot(*world.sizes[n]) / 2
        closing = np.hypot(*(world.velocities[t, n] - velocity))
        if distance - radii > closing * horizon:
            continue
        begin = max(0.0, (distance - radii) / max(closing, 1e-9) - 2 * fine)
        for ahead in np.arange(np.floor(begin / fine) * fine, min(horizon, first) + fine / 2, fine):
            mine = (x + ahead * velocity[0], y + ahead * velocity[1], h, length, width)
            if gap(corners(mine), corners(other_of(world, t, n, ahead))) < slack:
                first = min(first, float(ahead))
                break
    return first


def contacts(world: World, t: int, slack: float) -> list[int]:
    out = []
    for n in np.flatnonzero(world.present[t]):
        reach = np.hypot(*world.sizes[n]) / 2 + np.hypot(*world.size) / 2
        near = np.hypot(*(world.others[t, n, :2] - world.pose[t, :2])) <= reach + 1.0
        if near and gap(corners(box_of(world, t)), corners(other_of(world, t, n))) < slack:
            out.append(int(n))
    return out


def to_blame(world: World, t: int, n: int, straddles: bool, slack: float) -> bool:
    """True where the agent is at fault for a contact with another."""
    if world.speed[t] < 0.05:
        return False
    if world.kinds[n] in (PEDESTRIAN, CYCLIST) or np.hypot(*world.velocities[t, n]) < 0.05:
        return True
    bumper = corners(box_of(world, t))[:2]
    if gap(bumper, corners(other_of(world, t, n))) <= slack:
        return True
    return straddles and bearing(world, t, n) < np.deg2rad(150.0)


# -------------------------------------------------------------------------------------------------------------- road


def clearance(world: World, point: np.ndarray) -> float:
    """The signed distance to the road's edge, bilinear; beyond the samples that of their border and the way to it."""
    assert world.road is not None
    place = (point - world.road_origin) / 0.5
    inside = np.clip(place, 0.0, np.array(world.road.shape[::-1]) - 1.0)
    i = np.minimum(inside.astype(int), np.array(world.road.shape[::-1]) - 2)
    u, v = inside - i
    r = world.road[i[1] : i[1] + 2, i[0] : i[0] + 2]
    value = (r[0, 0] * (1 - u) + r[0, 1] * u) * (1 - v) + (r[1, 0] * (1 - u) + r[1, 1] * u) * v
    return float(value + 0.5 * np.abs(place - inside).sum())


# ----------------------------------------------------------------------------------------------------------- metrics


def measure(world: World, slack: float = 0.0) -> Found:
    """Every metric. With a positive `slack` faults come sooner, with a negative one later."""
    steps = [t for t in range(1, len(world.pose)) if world.counts[t]]
    walks, dt, count = world.kind == PEDESTRIAN, world.dt, max(len(steps), 1)
    s, lateral, heading = follow(world)
    here = {t: on_lanes(world, t, slack + np.sign(slack) * MERGED) for t in steps}
    mean = {t: 0.5 * (world.speed[t] + world.speed[t - 1]) for t in steps}
    hits = {t: contacts(world, t, slack) for t in steps}
    blamed = any(to_blame(world, t, n, here[t].straddles, slack) for t in steps if not hits.get(t - 1) for n in hits[t])
    ttc = min((time_to_collision(world, t, slack) for t in steps), default=np.inf)
    off = world.road is not None and any(
        clearance(world, corner) > -slack for t in steps for corner in corners(box_of(world, t))
    )
    ran, lit = red_light(world, s, lateral, heading, steps, slack)
    still = world.length < 0.5
    tolerance = min(1.0, 0.02 * world.length)
    if still:
        last = len(world.pose) - 1
        goal = bool(world.counts[last] and abs(s[last]) <= 2.0 - slack and abs(lateral[last]) <= 2.0 - slack)
    else:
        goal = any(s[t] >= world.length - tolerance + slack for t in steps)
    progress = 1.0 if still or goal else float(np.clip(max(s[0], *s[steps]) / max(world.length, 0.5), 0.0, 1.0))
    crashed = any(hits.values())
    lost = [np.hypot(*(world.pose[t, :2] - world.expert[t])) for t in steps if world.known[t]]
    laned = any(here[t].near for t in steps) and not walks
    limits = {t: max(here[t].limit, world.top) if here[t].inferred else here[t].limit for t in steps}
    limits = {t: limit if here[t].limit > 0 or here[t].inferred else 0.0 for t, limit in limits.items()}
    beyond = sum(max(mean[t] - limits[t], 0.0) * dt for t in steps if limits[t] > 0.0)
    wide = sum(here[t].straddles for t in steps) * dt
    ways = {t: abs(lateral[t]) if np.cos(world.pose[t, 2] - heading[t]) > 0 else np.inf for t in steps}
    wrong = any(min(ways[t], here[t].along) > 3.5 - slack for t in steps)
    astray = any(abs(lateral[t]) > min(5.0, here[t].along + 2.0) - slack for t in steps)
    against = opposing(world, {t: here[t].against and ways[t] > 1.75 - slack for t in steps}, mean, steps)
    share, easy = comfort(world, mean, steps, slack)
    return {
        "accuracy": (float(not (crashed or (off and not walks) or ran)), True),
        "collision": (float(crashed), True),
        "at_fault_collision": (float(blamed), True),
        "offroad": (float(off and not walks), world.road is not None and not walks),
        "red_light": (float(ran), lit and not walks),
        "wrong_way": (float(wrong), laned),
        "off_route": (float(astray), True),
        "progress": (progress, True),
        "progression": (float((s[-1] - world.start) / max(world.length - world.start, 0.5)), not still),
        "making_progress": (float(progress >= 0.2), True),
        "goal": (float(goal), True),
        "time_to_collision": (float(ttc >= 0.95), True),
        "smallest_ttc": (float(ttc), ttc < 5.0),
        "comfort": (share, True),
        "comfortable": (float(easy), True),
        "speed_limit": (max(0.0, 1.0 - beyond / (2.23 * count * dt)), any(limits.values()) and not walks),
        "lanes": (_grade(wide, 3.4 + 1e-4, 5.7 + 1e-4), laned),
        "driving_direction": (_grade(against, 2.0 - slack, 6.0 - slack, at=True), laned),
        "log_divergence": (float(np.mean(lost)) if lost else 0.0, bool(lost)),
        "final_divergence": (float(lost[-1]) if lost else 0.0, bool(lost)),
        "kinematic_infeasibility": (float(infeasible(world, mean, steps, slack)), not walks),
    }


def _grade(amount: float, some: float, much: float, *, at: bool = False) -> float:
    reached = [amount >= bound if at else amount > bound for bound in (some, much)]
    return 0.0 if reached[1] else 0.5 if reached[0] else 1.0


def red_light(
    world: World, s: np.ndarray, lateral: np.ndarray, heading: np.ndarray, steps: list[int], slack: float
) -> tuple[bool, bool]:
    """True where the front bumper passed a stop line that was red before and after, and whether any light was known."""
    half, ran = world.size[0] / 2, False
    for at, state in zip(world.light_s, world.light_state, strict=True):
        for t in steps:
            passes = s[t - 1] + half < at + slack and at - slack <= s[t] + half
            on_it = abs(lateral[t]) <= 5.0 and np.cos(world.pose[t, 2] - heading[t]) > 0
            ran |= bool(passes and on_it and state[t] == RED and state[t - 1] == RED)
    known = np.isfinite(world.light_s)
    return ran, bool((world.light_state[known][:, steps] > 0).any())


def opposing(world: World, against: dict[int, bool], mean: dict[int, float], steps: list[int]) -> float:
    """The most that was driven against the traffic within a window of 1 s; windows begin every 0.2 s."""
    each = max(round(0.2 / world.dt), 1)
    window = round(1.0 / (each * world.dt)) * each
    driven = np.zeros(len(world.pose))
    for t in steps:
        driven[t] = against[t] * mean[t] * world.dt
    ends = range(each, len(driven), each)
    return max((driven[max(1, t - window + 1) : t + 1].sum() for t in ends if t in against), default=0.0)


def comfort(world: World, mean: dict[int, float], steps: list[int], slack: float) -> tuple[float, bool]:
    """The share of steps within V-Max's limits, and nuPlan's verdict, of accelerations smoothed over 0.3 s."""
    dt, fine, easy, before = world.dt, 0, True, None
    weight = 1.0 - np.exp(-dt / 0.3)
    felt = jerk = yaw = 0.0
    for t in steps:
        a = (world.speed[t] - world.speed[t - 1]) / dt
        w = float(turn(world.pose[t, 2] - world.pose[t - 1, 2])) / dt
        j = 0.0 if t == 1 else (a - (world.speed[t - 1] - world.speed[t - 2]) / dt) / dt
        fine += abs(w * mean[t]) <= 2.0 and -4.05 <= a <= 2.40 and abs(j) <= 8.3 and abs(w) <= 0.95
        change, turned = (0.0, 0.0) if before is None else (weight * (a - felt), weight * (w - yaw))
        felt, yaw = (a, w) if before is None else (felt + change, yaw + turned)
        jerk, before = jerk + weight * (change / dt - jerk), t
        share = 1.0 - slack
        easy &= -4.05 * share <= felt <= 2.40 * share and abs(jerk) <= 4.13 * share
        easy &= abs(yaw) <= 0.95 * share and abs(turned) / dt <= 1.93 * share and abs(yaw) * mean[t] <= 4.89 * share
    return fine / max(len(steps), 1), bool(easy)


def infeasible(world: World, mean: dict[int, float], steps: list[int], slack: float) -> bool:
    for t in steps:
        a = (world.speed[t] - world.speed[t - 1]) / world.dt
        w = abs(float(turn(world.pose[t, 2] - world.pose[t - 1, 2]))) / world.dt
        if abs(a) > 10.4 * (1.0 - slack) or (mean[t] >= 0.6 and w > 0.3 * (1.0 - slack) * mean[t]):
            return True
    return False
