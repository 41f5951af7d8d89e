"""Procedural driving logs: roads, traffic and an ego that drives well, from a seed alone.

A `Log` like one of a recorder: everything downstream treats the two alike. The ego is driven like all other vehicles,
and its log is clean: it touches nobody, stays on the road, and passes no red light; a draw for which this fails is
thrown away and drawn again from the same random stream. The same seed gives the same arrays: tables and results are
rounded to micrometres, which hides that machines differ in the last bit of a sine.

The check of boxes is exact and the host's own; the simulator has another, for many worlds at once, in `geometry`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.log import Feature, Lights, Log, Tracks
from longhaul.driving.generator import roads, traffic
from longhaul.driving.generator.roads import World
from longhaul.driving.generator.traffic import DT
from longhaul.driving.scenario.distance_field import Edges, make_edges, signed_distance

CLEARANCE, OFF_EDGE = 0.15, 0.05
"""Metres that the ego's log keeps from other boxes, and from the edge of the road."""


class Bodies(NamedTuple):
    """All that moves or stands, the ego first."""

    kind: np.ndarray  # int8 [N]
    pose: np.ndarray  # [N, T, 3]
    speed: np.ndarray  # [N, T]
    size: np.ndarray  # [N, 3]
    valid: np.ndarray  # bool [N, T]


def corners(pose: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The corners [..., 4, 2] of boxes at `pose` [..., 3] of `size` [..., 2]."""
    cos, sin = np.cos(pose[..., 2])[..., None], np.sin(pose[..., 2])[..., None]
    x, y = (np.array(a) * size[..., i, None] / 2 for i, a in enumerate(([1, 1, -1, -1], [1, -1, -1, 1])))
    return pose[..., None, :2] + np.stack([x * cos - y * sin, x * sin + y * cos], -1)


def clean(bodies: Bodies, edges: Edges) -> bool:
    """True if the ego touches nobody and keeps all its corners on the road, at every step."""
    from longhaul.driving.generator import kernels

    touched = kernels.any_near_first(*boxes(bodies), CLEARANCE)  # type: ignore[call-arg]
    if touched or not bodies.valid[0].all():
        return False
    outline = corners(bodies.pose[0], np.broadcast_to(bodies.size[0, :2], (bodies.pose.shape[1], 2)))
    return bool(signed_distance(outline, edges).max() < -OFF_EDGE)


def sift(bodies: Bodies) -> Bodies:
    """Without those bodies, other than the ego, that touch one that stays."""
    from longhaul.driving.generator import kernels

    keep = kernels.sifted(*boxes(bodies))
    return Bodies(*(a[keep] for a in bodies))


def boxes(bodies: Bodies) -> tuple[np.ndarray, ...]:
    """Arguments of the kernels: poses, cosines and sines of their headings, sizes, validity."""
    heading = bodies.pose[..., 2]
    return bodies.pose, np.cos(heading), np.sin(heading), bodies.size, bodies.valid


STEPS, CURRENT = 91, 10
"""Steps of a log, and the one at which driving begins."""
DENSITIES, DENSITY_SHARES = (0.0, 0.25, 0.5, 1.0), (0.1, 0.3, 0.35, 0.25)
"""0 is an empty road, 1 a full one: a vehicle each 25 m of lane or so."""
NEAR, MOST, MOST_TRACKS = 120.0, 44, 64
"""Vehicles start within so many metres of the ego, and are so many at most; all tracks together; the nearest are
kept."""
WANDER, WAVE = 0.12, (60.0, 120.0)
"""Metres: the deviation of how far drivers stray from the middle of their path, at most 2.5 times as far, and the
length of the wave in which they do."""
STANDS, QUEUES, RECORDER = 0.04, 0.5, 0.25
"""Shares of logs: those in which the ego stands throughout, for no reason that one sees; of those before a red light,
those in which it stands there from the start; and those that a wide car recorded."""
TRIES = 60
"""Draws for one seed before giving up; two or three are usual."""


class Scene(NamedTuple):
    """One draw of traffic; the ego is vehicle 0."""

    cars: traffic.Vehicles
    width: np.ndarray  # [N]
    wave: np.ndarray  # [N, 3]: how far each strays from its path's middle, m; radians a metre; phase
    lights: np.ndarray | None  # int8 [legs, T]
    walkers: np.ndarray  # [M, T, 2], on crosswalks
    beside: list[tuple[int, np.ndarray, tuple[float, float, float]]]  # (kind, [T, 4]: x, y, heading, speed; size)
    waits: bool  # whether the ego may stand throughout


def generate(seed: int) -> Log:
    """The log of `seed`, of nine seconds."""
    rng = np.random.Generator(np.random.PCG64(seed))
    density = float(rng.choice(DENSITIES, p=DENSITY_SHARES))
    for attempt in range(TRIES):
        if attempt % 8 == 0:
            world = roads.draw_world(rng)
            net, edges = traffic.tabulate(world), make_edges([line for _, line in world.edges])
            level = density
        elif attempt % 3 == 2:
            level *= 0.6
        scene = draw_scene(rng, world, net, level)
        s, v = traffic.run(net, scene.cars, scene.lights, scene.walkers)
        if not fit(net, scene, s, v):
            continue
        bodies = embody(net, scene, s, v)
        if clean(bodies, edges):
            return write(rng, f"generated-{seed}-{world.kind}", world, scene, sift(bodies))
    raise RuntimeError(f"no clean log in {TRIES} draws for seed {seed}, density {density}: choose another seed")


def draw_scene(rng: np.random.Generator, world: World, net: traffic.Network, level: float) -> Scene:
    """Traffic at the first step, the lights' programme, and who walks and stands beside the road."""
    turns = np.array([p.turn for p in world.paths])
    weight = np.choose(turns + 1, (1.8, 1.0, 2.6)) * np.where(net.priority < net.priority.max(), 1.2, 1.0)
    ego = int(rng.choice(len(turns), p=weight / weight.sum()))
    if np.isfinite(net.bound[ego, 0]):
        ego_s = net.bound[ego, 0] - float(rng.uniform(6.0, 36.0))
    else:
        ego_s = float(rng.uniform(20.0, 110.0))
    lights, mode = draw_lights(rng, world, net.leg[ego])
    stands = rng.random() < STANDS
    queues = not stands and mode in (RED_GREEN, RED) and rng.random() < QUEUES
    wide = rng.random() < RECORDER
    first = np.array([rng.uniform(4.9, 5.4), rng.uniform(2.1, 2.35)] if wide else [0.0, 0.0])
    if queues:
        ego_s = net.bound[ego, 0] - 2.7 - float(rng.uniform(0.3, 4.0))
    lane_s = place_traffic(rng, world, net, level, ego, ego_s)
    if queues and rng.random() < 0.5:  # behind another one
        lane_s.append((ego, ego_s))
        ego_s -= 5.2 + float(rng.uniform(1.2, 3.0))
        lane_s = [(p, s) for p, s in lane_s if p != ego or s > ego_s + 5.0 or s < ego_s - 8.0]
    path = np.array([ego, *(p for p, _ in lane_s)])
    s = np.array([ego_s, *(x for _, x in lane_s)])
    away = np.hypot(*(traffic.pose(net, path, s)[:, :2] - traffic.pose(net, path[:1], s[:1])[0, :2]).T)
    keep = np.sort(
        np.argsort(np.where(away < NEAR, away, np.inf), kind="stable")[: min(MOST, int((away < NEAR).sum()))]
    )
    path, s = path[keep], s[keep]
    large = (rng.random(len(path)) < 0.1) & (np.arange(len(path)) > 0)
    length = np.where(large, rng.uniform(5.6, 8.5, len(path)), rng.uniform(4.2, 5.1, len(path)))
    width = np.where(large, rng.uniform(2.1, 2.45, len(path)), rng.uniform(1.75, 2.05, len(path)))
    length[0], width[0] = np.where(first > 0.0, first, [length[0], width[0]])
    urge = np.repeat(np.clip(rng.normal(0.92, 0.12, (len(path), 1)), 0.6, 1.15), STEPS, 1)
    provoke(rng, path, s, urge)
    speed = first_speeds(net, path, s, length, urge[:, 0], lights, world)
    speed *= np.where(rng.random(len(path)) < 0.2, rng.uniform(0.0, 1.0, len(path)), 1.0)  # some are just setting off
    if stands:
        urge[0], speed[0] = 0.0, 0.0
    elif queues and lights is not None:
        queue = (net.lane[path, 0] == net.lane[ego, 0]) & (s >= s[0])
        speed[queue] = 0.0
        urge[queue] *= lights[net.leg[ego]] == log.LIGHT_GO
    amount = np.clip(rng.normal(0.0, WANDER, len(path)), -2.5 * WANDER, 2.5 * WANDER)
    wave = np.stack([amount, 2.0 * np.pi / rng.uniform(*WAVE, len(path)), rng.uniform(0.0, 2.0 * np.pi, len(path))], -1)
    cars = traffic.Vehicles(path, s, speed, length, urge)
    walkers = draw_walkers(rng, world, lights, level)
    start = traffic.pose(net, path[:1], s[:1])[0, :2]
    beside = [b for b in draw_beside(rng, world, level) if np.hypot(*(b[1][0, :2] - start)) < NEAR]
    beside.sort(key=lambda b: float(np.hypot(*(b[1][0, :2] - start))))
    few = beside[: MOST_TRACKS - len(path) - len(walkers)]
    return Scene(cars, width, wave, lights, walkers, few, stands or mode == RED)


GREEN, RED_GREEN, GREEN_RED, RED = range(4)
"""Phases that the lights show to the ego while its log lasts."""


def draw_lights(rng: np.random.Generator, world: World, leg: int) -> tuple[np.ndarray | None, int]:
    """States [legs, T] of a cycle, and what it shows to the ego's leg, one of GREEN, RED_GREEN, GREEN_RED and RED."""
    if world.signals is None:
        return None, GREEN
    groups = np.array(world.signals)
    count = int(groups.max()) + 1
    green, yellow, clear = float(rng.uniform(8.0, 15.0)), 3.0, 1.5
    period = count * (green + yellow + clear)
    mode = int(rng.choice(4, p=[0.38, 0.32, 0.18, 0.12]))
    # where in its own group's green the ego's leg is at the first step
    low, high = ((0.0, max(green - 8.0, 1.0)), (-5.0, -1.5), (green - 3.0, green + 2.0), (-period / 2, -9.0))[mode]
    own = float(rng.uniform(low, high)) - groups[leg] * (-green - yellow - clear)
    time = np.arange(STEPS) * DT
    phase = (time[None] + own - groups[:, None] * (green + yellow + clear)) % period
    state = np.where(phase < green, log.LIGHT_GO, np.where(phase < green + yellow, log.LIGHT_CAUTION, log.LIGHT_STOP))
    return state.astype(np.int8), mode


def place_traffic(
    rng: np.random.Generator, world: World, net: traffic.Network, level: float, ego: int, ego_s: float
) -> list[tuple[int, float]]:
    """(path, arc length) of the other vehicles: on approach and exit lanes, with room around the ego."""
    placed: list[tuple[int, float]] = []
    lead = rng.random() < 0.45 and level > 0.0
    for part in (0, 2) if np.isfinite(net.bound).all() else (0,):
        for lane in np.unique(net.lane[:, part]):
            choices = np.flatnonzero(net.lane[:, part] == lane)
            p = int(choices[0])
            begin = 0.0 if part == 0 else net.bound[p, 1] + 8.0
            end = (net.bound[p, 0] if part == 0 and np.isfinite(net.bound[p, 0]) else net.length[p]) - 4.0
            own = lane == net.lane[ego, part] and part == 0
            if level <= 0.0:
                continue
            gaps = 10.0 + rng.exponential(18.0 / level, 32)
            spots = begin + np.cumsum(gaps) - gaps[0] * rng.random()
            picks = choices[rng.integers(0, len(choices), len(spots))]
            if own:
                room = 9.0 + 4.0 * rng.random()
                spots, picks = (a[np.abs(spots - ego_s) > room] for a in (spots, picks))
                if lead:
                    ahead = ego_s + room + float(rng.uniform(2.0, 18.0))
                    good = (spots < ego_s) | (spots > ahead + 11.0)
                    spots, picks = np.append(spots[good], ahead), np.append(picks[good], ego)
            placed += [(int(q), float(x)) for q, x in zip(picks, spots, strict=True) if x < end]
    return placed


def provoke(rng: np.random.Generator, path: np.ndarray, s: np.ndarray, urge: np.ndarray) -> None:
    """Often makes the vehicle ahead of the ego slow, or lets it stop on the way: changes `urge` in place."""
    ahead = np.flatnonzero((path == path[0]) & (s > s[0]))
    what = rng.random()
    share, when = float(rng.uniform(0.35, 0.7)), int(rng.integers(10, 60))
    if not len(ahead) or what > 0.65:
        return
    leader = ahead[s[ahead].argmin()]
    if what < 0.4:
        urge[leader] *= share
    else:
        urge[leader, when:] = np.maximum(urge[leader, when:] - 0.035 * np.arange(urge.shape[1] - when), 0.0)


def first_speeds(
    net: traffic.Network,
    path: np.ndarray,
    s: np.ndarray,
    length: np.ndarray,
    urge: np.ndarray,
    lights: np.ndarray | None,
    world: World,
) -> np.ndarray:
    """Speeds [N] that leave everybody room to brake gently: behind the one ahead on the lane, and before red lights."""
    speed = net.speed[path, np.clip(s.astype(int), 0, net.speed.shape[1] - 1)] * urge
    part = np.where(s < net.bound[path, 0], 0, 2)
    lane = net.lane[path, part]
    for group in np.unique(lane):
        members = np.flatnonzero(lane == group)
        members = members[np.argsort(-(s[members] - net.offset[path[members], group]), kind="stable")]
        for ahead, i in zip([-1, *members[:-1]], members, strict=True):
            if lights is not None and part[i] == 0 and lights[net.leg[path[i]], 0] != log.LIGHT_GO:
                room = net.bound[path[i], 0] - s[i] - length[i] / 2 - 1.5
                speed[i] = min(speed[i], np.sqrt(3.0 * max(room, 0.0)))
            if ahead >= 0:
                at = s[[ahead, i]] - net.offset[path[[ahead, i]], group]
                gap = max(at[0] - at[1] - (length[ahead] + length[i]) / 2 - 2.0, 0.0)
                speed[i] = min(speed[i], np.sqrt(speed[ahead] ** 2 + 2.5 * gap), gap / 0.9)
    return speed


def draw_walkers(rng: np.random.Generator, world: World, lights: np.ndarray | None, level: float) -> np.ndarray:
    """People [M, T, 2] who cross on crosswalks: where there are lights, only while that leg has red throughout."""
    time, out = np.arange(STEPS) * DT, []
    for leg, corners in enumerate(world.crosswalks):
        if rng.random() > 0.25 + 0.35 * level:
            continue
        share, begin, pace = rng.uniform(0.2, 0.8), float(rng.uniform(-5.0, 5.0)), float(rng.uniform(1.1, 1.6))
        a = corners[0] + share * (corners[1] - corners[0])
        b = corners[3] + share * (corners[2] - corners[3])
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        size = float(np.hypot(*(b - a)))
        direction = (b - a) / size
        way = np.clip((time - begin) * pace, 0.0, size + 5.0) - 2.5
        crossing = (way > -0.5) & (way < size + 0.5)
        if lights is not None and (lights[leg, crossing] != log.LIGHT_STOP).any():
            continue
        out.append(a + way[:, None] * direction)
    return np.array(out) if out else np.zeros((0, STEPS, 2))


def draw_beside(
    rng: np.random.Generator, world: World, level: float
) -> list[tuple[int, np.ndarray, tuple[float, float, float]]]:
    """Parked cars and cyclists on wide shoulders, people on pavements."""
    out: list[tuple[int, np.ndarray, tuple[float, float, float]]] = []
    for kerb in world.kerbs if world.shoulder > 2.0 else []:
        choice = rng.random()
        if choice < 0.5:
            spots = np.cumsum(6.5 + rng.exponential(25.0, 8)) + rng.uniform(0.0, 60.0)
            for spot in spots:
                size = (float(rng.uniform(4.1, 4.9)), float(rng.uniform(1.7, 1.9)), 1.6)
                out.append((log.VEHICLE, glide(kerb, spot, 0.0), size))
        elif choice < 0.75:
            ride = glide(kerb, float(rng.uniform(10.0, 90.0)), float(rng.uniform(3.0, 6.0)))
            out.append((log.CYCLIST, ride, (1.8, 0.7, 1.7)))
    for walk in world.walks:
        for _ in range(int(rng.integers(0, 1 + round(2 * level) + 1))):
            side = walk if rng.random() < 0.5 else walk[::-1]
            stroll = glide(side, float(rng.uniform(5.0, 120.0)), float(rng.uniform(0.9, 1.6)))
            out.append((log.PEDESTRIAN, stroll, (0.6, 0.6, 1.75)))
    return out


def glide(line: np.ndarray, begin: float, pace: float) -> np.ndarray:
    """[T, 4]: x, y, heading, speed of something at constant `pace` along `line`; it stops at the end."""
    s = np.append(0.0, np.cumsum(np.hypot(*np.diff(line, axis=0).T)))
    where = np.minimum(begin + pace * DT * np.arange(STEPS), s[-1])
    xy = np.stack([np.interp(where, s, c) for c in line.T], -1)
    segment = np.clip(np.searchsorted(s, where, side="right") - 1, 0, len(line) - 2)
    step = (line[1:] - line[:-1])[segment]
    return np.concatenate([xy, np.arctan2(step[:, 1], step[:, 0])[:, None], np.full((STEPS, 1), pace)], 1)


def fit(net: traffic.Network, scene: Scene, s: np.ndarray, v: np.ndarray) -> bool:
    """True if the ego's drive is worth having: it moves, brakes within reason, stays on the map, stops at red."""
    if not scene.waits and s[0, -1] - s[0, CURRENT] < (25.0 if scene.lights is None else 12.0):
        return False
    if np.diff(v[0]).min() < -4.5 * DT or s[0, -1] > net.length[scene.cars.path[0]] - 5.0:
        return False
    if scene.lights is None:
        return True
    front, stop = s[0] + scene.cars.length[0] / 2, net.bound[scene.cars.path[0], 0]
    state = scene.lights[net.leg[scene.cars.path[0]]]
    step = int((front >= stop).argmax())
    passes = front[0] < stop <= front[-1]
    return not (passes and log.LIGHT_STOP in state[max(step - 2, 0) : step + 2])


def embody(net: traffic.Network, scene: Scene, s: np.ndarray, v: np.ndarray) -> Bodies:
    """The scene's vehicles, walkers and bystanders as boxes over time."""
    cars = scene.cars
    path = np.broadcast_to(cars.path[:, None], s.shape)
    poses, speeds, kinds = [stray(traffic.pose(net, path, s), s, scene.wave)], [v], [log.VEHICLE] * len(s)
    sizes = [(float(a), float(b), 1.5 if a < 5.5 else 2.8) for a, b in zip(cars.length, scene.width, strict=True)]
    valids = [s < net.length[cars.path][:, None] - cars.length[:, None] / 2]
    for walk in scene.walkers:
        step = np.gradient(walk, axis=0) / DT
        ahead = walk[-1] - walk[0]
        heading = np.full((STEPS, 1), np.arctan2(ahead[1], ahead[0]))
        poses.append(np.concatenate([walk, heading], 1)[None])
        speeds.append(np.hypot(*step.T)[None])
        kinds, sizes = [*kinds, log.PEDESTRIAN], [*sizes, (0.6, 0.6, 1.75)]
    for kind, glided, size in scene.beside:
        poses.append(glided[None, :, :3])
        speeds.append(glided[None, :, 3])
        kinds, sizes = [*kinds, kind], [*sizes, size]
    valids.append(np.ones((len(kinds) - len(s), STEPS), bool))
    return Bodies(
        np.array(kinds, np.int8), np.concatenate(poses), np.concatenate(speeds), np.array(sizes), np.concatenate(valids)
    )


def stray(pose: np.ndarray, s: np.ndarray, wave: np.ndarray) -> np.ndarray:
    """Poses [N, T, 3] of vehicles at arc lengths `s` [N, T] that stray from their paths by `wave` [N, 3]."""
    amount, rate, phase = (wave[:, i, None] for i in range(3))
    aside = np.round(amount * np.sin(rate * s + phase), 6)
    turn = np.round(np.arctan(amount * rate * np.cos(rate * s + phase)), 6)
    x, y, heading = np.moveaxis(pose, -1, 0)
    return np.stack([x - aside * np.sin(heading), y + aside * np.cos(heading), heading + turn], -1)


def write(rng: np.random.Generator, name: str, world: World, scene: Scene, bodies: Bodies) -> Log:
    """The log, somewhere in the world and turned by some angle; the ego at a random place among the tracks."""
    angle, height = float(rng.uniform(-np.pi, np.pi)), float(rng.uniform(-20.0, 20.0))
    shift = rng.uniform(-5000.0, 5000.0, 2)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])

    def placed(points: np.ndarray) -> np.ndarray:
        flat = points[..., :1] * turn[0] + points[..., 1:] * turn[1] + shift
        return np.round(np.concatenate([flat, np.full((*points.shape[:-1], 1), height)], -1), 6)

    order = rng.permutation(len(bodies.kind))
    valid = bodies.valid[order]
    heading = np.round((bodies.pose[order][..., 2] + angle + np.pi) % (2 * np.pi) - np.pi, 6)
    direction = np.stack([np.cos(heading), np.sin(heading)], -1)
    position = placed(bodies.pose[order][..., :2])
    position[..., 2] += bodies.size[order][:, None, 2] / 2
    tracks = Tracks(
        id=np.arange(len(order), dtype=np.int64),
        kind=bodies.kind[order],
        position=np.where(valid[..., None], position, 0.0),
        heading=np.where(valid, heading, 0.0).astype(np.float32),
        velocity=np.where(valid[..., None], direction * bodies.speed[order][..., None], 0.0).astype(np.float32),
        size=np.where(valid[..., None], bodies.size[order][:, None], 0.0).astype(np.float32),
        valid=valid,
    )
    shown = np.zeros((0, STEPS), np.int8) if scene.lights is None else scene.lights
    signalled = world.paths if len(shown) else []
    lights = Lights(
        lane=np.array([p.lanes[1] + 1 for p in signalled], np.int64),
        position=placed(np.array([world.lanes[p.lanes[1]][0] for p in signalled]).reshape(-1, 2)),
        state=np.array([shown[p.leg] for p in signalled], np.int8).reshape(-1, STEPS),
        valid=np.ones((len(signalled), STEPS), bool),
    )
    ego = int(np.flatnonzero(order == 0)[0])
    return Log(name, "generated", np.arange(STEPS) * DT, CURRENT, tracks, ego, (), describe(world, placed), lights)


def describe(world: World, placed: Callable[[np.ndarray], np.ndarray]) -> tuple[Feature, ...]:
    """The map's features; lane i has the id i + 1."""
    entry: list[set[int]] = [set() for _ in world.lanes]
    leave: list[set[int]] = [set() for _ in world.lanes]
    for path in world.paths:
        for a, b in zip(path.lanes[:-1], path.lanes[1:], strict=True):
            leave[a].add(b + 1)
            entry[b].add(a + 1)
    lanes = [
        Feature(i + 1, log.LANE_STREET, placed(line), tuple(sorted(entry[i])), tuple(sorted(leave[i])), world.limit)
        for i, line in enumerate(world.lanes)
    ]
    others = [*world.edges, *world.lines, *((log.CROSSWALK, c) for c in world.crosswalks)]
    return (*lanes, *(Feature(len(lanes) + 1 + i, kind, placed(line)) for i, (kind, line) in enumerate(others)))
