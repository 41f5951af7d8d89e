"""Procedural driving logs: roads, traffic and an ego that drives well, from a seed alone.

A `Log` like one of a recorder: everything downstream treats the two alike. The ego is driven like all other vehicles,
and its log is clean: it touches nobody, stays on the road, and passes no red light; a draw for which this fails is
thrown away and drawn again from the same random stream. The same seed gives the same arrays: tables and results are
rounded to micrometres, which hides that machines differ in the last bit of a sine.

The check of boxes is exact and the host's own; the simulator has another, for many worlds at once, in `geometry`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.log import Feature, Lights, Log, Tracks
from longhaul.driving.generator import bystanders, roads, traffic
from longhaul.driving.generator.bystanders import Bystanders
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


def clean(bodies: Bodies, known: tuple[np.ndarray, ...], edges: Edges) -> bool:
    """True if the ego touches nobody and keeps all its corners on the road, at every step; `known` are the `boxes` of
    `bodies`."""
    from longhaul.driving.generator import kernels

    touched = kernels.any_near_first(*known, CLEARANCE)  # type: ignore[call-arg]
    if touched or not bodies.valid[0].all():
        return False
    outline = corners(bodies.pose[0], np.broadcast_to(bodies.size[0, :2], (bodies.pose.shape[1], 2)))
    return bool(signed_distance(outline, edges).max() < -OFF_EDGE)


def sift(bodies: Bodies, known: tuple[np.ndarray, ...]) -> Bodies:
    """Bodies without those, other than the ego, that touch one that stays; `known` are their `boxes`."""
    from longhaul.driving.generator import kernels

    keep = kernels.sifted(*known)
    return bodies if keep.all() else Bodies(*(a[keep] for a in bodies))


def boxes(bodies: Bodies) -> tuple[np.ndarray, ...]:
    """Arguments of the kernels: poses, cosines and sines of their headings, sizes, validity."""
    heading = bodies.pose[..., 2]
    return bodies.pose, np.cos(heading), np.sin(heading), bodies.size, bodies.valid


STEPS, CURRENT = 91, 10
"""Steps of a log, and the one at which driving begins."""
DENSITIES, DENSITY_SHARES = (0.0, 0.25, 0.5, 1.0), (0.08, 0.27, 0.35, 0.3)
"""0 is an empty road, 1 a full one: a vehicle each 25 m of lane or so."""
NEAR, MOST, MOST_TRACKS = 120.0, 44, 64
"""Vehicles start within so many metres of the ego, and are so many at most; all tracks together; the nearest are
kept."""
WANDER, WAVE = (0.08, 0.3), (40.0, 120.0)
"""Metres: the deviation of how far drivers stray from the middle of their path, at most 2.5 times as far, and the
length of the wave in which they do. The deviation itself differs from log to log."""
STANDS, QUEUES, RECORDER = 0.05, 0.5, 0.4
"""Shares of logs: those in which the ego stands throughout, for no reason that one sees; of those before a red light,
those in which it stands there from the start; and those that a wide car recorded."""
JAMS, CUTS, CHANGES, SETTLES, OBSTACLES = 0.1, 0.2, 0.15, 0.35, 0.1
"""Shares of logs: those with stop and go; those in which somebody cuts in before the ego, and in which the ego changes
its lane, both where there is a lane beside; those which begin with the ego beside its lane and at an angle to it; and
those with a vehicle that stands in a lane."""
CYCLES = 0.04
"""Share of vehicles that are cyclists, in the lane."""
UNLIMITED, LIGHTLESS, PARTLY, ARROWS, FLASHES = 0.35, 0.15, 0.5, 0.5, 0.15
"""Shares of logs: those that tell no speed limit; of those with lights, those that do not tell of them, those that
tell a part of their states, and those with arrows; of junctions without lights, those where lights flash."""
SLOW = 0.3
"""Share of logs in which all traffic is slower than the road allows, for a reason that one does not see."""
MANNERS = ((1.2, 2.3), (1.6, 2.8), (0.9, 1.8), (1.3, 3.0))
"""Bounds of `traffic.Manner`, which differs from log to log."""
REACH = (45.0, 110.0)
"""Metres within which half of the recorders see others."""
TRIES = 60
"""Draws for one seed before giving up; two or three are usual."""

PLAIN, CUTTER, OBSTACLE, FIRST = range(4)
"""Roles of vehicles: PLAIN; one that cuts in before the ego; one that stands in the lane; the ego."""

GREEN, RED_GREEN, GREEN_RED, RED = range(4)
"""Phases that the lights show to the ego while its log lasts."""


class Scene(NamedTuple):
    """One draw of traffic; the ego is vehicle 0."""

    cars: traffic.Vehicles
    kind: np.ndarray  # int8 [N]
    size: np.ndarray  # [N, 3]
    wave: np.ndarray  # [N, 3]: how far each strays from its path's middle, m; radians a metre; phase
    shift: np.ndarray  # [N, 3]: m beside its path at first; arc length where it begins to close up; metres that takes
    lights: np.ndarray | None  # int8 [legs, T]
    walkers: Bystanders  # who cross
    least: float  # m that the ego must go
    manner: traffic.Manner


def generate(seed: int) -> Log:
    """The log of `seed`, of nine seconds."""
    rng = np.random.Generator(np.random.PCG64(seed))
    density = DENSITIES[roads.draw_index(rng, DENSITY_SHARES)]
    for attempt in range(TRIES):
        if attempt % 8 == 0:
            world = roads.draw_world(rng)
            net, edges = traffic.tabulate(world), make_edges([line for _, line in world.edges])
            level = density
        elif attempt % 3 == 2:
            level *= 0.6
        scene = draw_scene(rng, world, net, level)
        s, v = traffic.run(net, scene.cars, scene.lights, scene.walkers.pose[..., :2], scene.manner)
        if not fit(net, scene, s, v):
            continue
        beside = draw_beside(rng, world, scene, traffic.pose(net, scene.cars.path[:1], s[:1, 0]))
        bodies = embody(net, scene, s, beside)
        known = boxes(bodies)
        if clean(bodies, known, edges):
            return write(rng, f"generated-{seed}-{world.kind}", world, scene, sift(bodies, known))
    raise RuntimeError(f"no clean log in {TRIES} draws for seed {seed}, density {density}: choose another seed")


class Placed(NamedTuple):
    """Vehicles at the first step, the ego first, and what is about to happen."""

    path: np.ndarray  # int [N]
    s: np.ndarray  # [N]: arc length, m
    role: np.ndarray  # int [N]
    lights: np.ndarray | None  # int8 [legs, T]
    phase: int  # that the lights show to the ego: GREEN, RED_GREEN, GREEN_RED or RED
    aside: np.ndarray  # [K]: lanes beside the ego's, m to the left; none where nobody changes its lane
    stands: bool  # the ego, throughout
    queues: bool  # the ego, before a red light
    jams: bool
    changes: bool  # the ego, its lane


def draw_scene(rng: np.random.Generator, world: World, net: traffic.Network, level: float) -> Scene:
    """Traffic at the first step, the lights' programme, and who walks and stands beside the road."""
    placed = draw_places(rng, world, net, level)
    kind, size = draw_sizes(rng, placed.role)
    cars, shift = draw_intents(rng, net, placed, kind, size[:, 0])
    count = len(placed.path)
    spread = float(rng.uniform(*WANDER))
    amount = np.clip(rng.normal(0.0, spread, count), -2.5 * spread, 2.5 * spread)
    wave = np.stack([amount, 2.0 * np.pi / rng.uniform(*WAVE, count), rng.uniform(0.0, 2.0 * np.pi, count)], -1)
    walkers = bystanders.draw_crossing(rng, world, placed.lights, level, STEPS)
    if placed.stands or placed.phase == RED:
        least = 0.0
    elif placed.jams:
        least = 4.0
    else:
        least = 10.0 if OBSTACLE in placed.role else 25.0 if placed.lights is None else 12.0
    manner = traffic.Manner(*(float(rng.uniform(*bounds)) for bounds in MANNERS))
    return Scene(cars, kind, size, wave, shift, placed.lights, walkers, least, manner)


def draw_places(rng: np.random.Generator, world: World, net: traffic.Network, level: float) -> Placed:
    """Places of the ego and of those within NEAR metres, with their roles; of MOST vehicles the nearest."""
    turns = np.array([p.turn for p in world.paths])
    weight = np.choose(turns + 1, (1.8, 1.0, 2.6)) * np.where(net.priority < net.priority.max(), 1.2, 1.0)
    ego = roads.draw_index(rng, tuple((weight / weight.sum()).tolist()))
    if np.isfinite(net.bound[ego, 0]):
        ego_s = net.bound[ego, 0] - float(rng.uniform(6.0, 36.0))
    else:
        ego_s = float(rng.uniform(20.0, 110.0))
    lights, phase = draw_lights(rng, world, net.leg[ego])
    stands, jams = rng.random() < STANDS, level > 0.0 and rng.random() < JAMS
    queues = not stands and phase in (RED_GREEN, RED) and rng.random() < QUEUES
    if queues:
        ego_s = net.bound[ego, 0] - 2.7 - float(rng.uniform(0.3, 4.0))
    lane_s = place_traffic(rng, net, level, ego, ego_s, jams)
    if queues and level > 0.0 and rng.random() < 0.5:  # behind another one
        lane_s.append((ego, ego_s))
        ego_s -= 5.2 + float(rng.uniform(1.2, 3.0))
        lane_s = [(p, s) for p, s in lane_s if p != ego or s > ego_s + 5.0 or s < ego_s - 8.0]
    others = [(p, s, PLAIN) for p, s in lane_s]
    cuts, changes = rng.random() < CUTS, rng.random() < CHANGES
    aside = beside(net, ego, ego_s) if cuts or changes else np.zeros(0)
    crowded = level > 0.0 and not queues
    if crowded and cuts and len(aside):
        others.insert(0, (ego, ego_s + float(rng.uniform(-2.0, 25.0)), CUTTER))
    if crowded and rng.random() < OBSTACLES:
        p = ego if rng.random() < 0.5 else int(rng.integers(len(turns)))
        there = ego_s + float(rng.uniform(25.0, 80.0))
        others = [o for o in others if o[0] != p or abs(o[1] - there) > 8.0]
        others.insert(0, (p, there, OBSTACLE))
    path = np.array([ego, *(o[0] for o in others)])
    s = np.array([ego_s, *(o[1] for o in others)])
    role = np.array([FIRST, *(o[2] for o in others)])
    start = traffic.pose(net, path[:1], s[:1])[0, :2]
    away = np.hypot(*(traffic.pose(net, path, s)[:, :2] - start).T)
    count = min(MOST, int((away < NEAR).sum()))
    keep = np.sort(np.argsort(np.where(away < NEAR, away, np.inf), kind="stable")[:count])
    return Placed(path[keep], s[keep], role[keep], lights, phase, aside, stands, queues, jams, changes)


def draw_intents(
    rng: np.random.Generator, net: traffic.Network, placed: Placed, kind: np.ndarray, length: np.ndarray
) -> tuple[traffic.Vehicles, np.ndarray]:
    """(vehicles with the speeds that they have and want, their `Scene.shift`)."""
    path, s, role, lights = placed.path, placed.s, placed.role, placed.lights
    urge = np.repeat(np.clip(rng.normal(0.92, 0.12, (len(path), 1)), 0.6, 1.15), STEPS, 1)
    if rng.random() < SLOW:
        urge *= float(rng.uniform(0.45, 0.9))
    provoke(rng, path, s, urge)
    urge[kind == log.CYCLIST] *= float(rng.uniform(0.25, 0.5))
    if placed.jams:
        urge *= jam(rng, len(path))
    joins, shift = np.full(len(path), -np.inf), np.tile([0.0, -np.inf, 1.0], (len(path), 1))
    speed = first_speeds(net, path, s, length, urge[:, 0].copy(), lights, role == CUTTER)
    speed *= np.where(rng.random(len(path)) < 0.2, rng.uniform(0.0, 1.0, len(path)), 1.0)  # some are just setting off
    urge[role == OBSTACLE], speed[role == OBSTACLE] = 0.0, 0.0
    top = float(net.speed[path[0], int(s[0])] * urge[0].max())
    if placed.stands:
        urge[0], speed[0] = 0.0, 0.0
    elif placed.queues and lights is not None:
        queue = (net.lane[path, 0] == net.lane[path[0], 0]) & (s >= s[0])
        speed[queue] = 0.0
        urge[queue] *= lights[net.leg[path[0]]] == log.LIGHT_GO
    elif placed.changes and len(placed.aside):
        lane = float(placed.aside[rng.integers(len(placed.aside))])
        shift[0] = change_lane(rng, lane, s[0], speed[0], (-1.0, 3.0), top)
    elif rng.random() < SETTLES:
        shift[0] = change_lane(rng, float(rng.normal(0.0, 0.7)), s[0], speed[0], (-1.5, 0.5), top)
    for i in np.flatnonzero(role == CUTTER):
        speed[i] = max(float(speed[0]) * float(rng.uniform(0.6, 1.3)), 1.0)
        lane = float(placed.aside[rng.integers(len(placed.aside))])
        shift[i] = change_lane(rng, lane, s[i], speed[i], (0.2, 5.0), speed[i])
        joins[i] = shift[i, 1] + 0.3 * shift[i, 2]
    shift[kind == log.CYCLIST, :2] = -0.9, np.inf  # they keep right
    return traffic.Vehicles(path, s, speed, length, urge, joins), shift


def draw_beside(rng: np.random.Generator, world: World, scene: Scene, start: np.ndarray) -> Bystanders:
    """Bystanders nearest to the ego's `start` [1, 3], as many as there is room for."""
    found = bystanders.draw_beside(rng, world, STEPS)
    away = np.hypot(*(found.pose[:, CURRENT, :2] - start[:, :2]).T)
    room = min(int((away < NEAR).sum()), MOST_TRACKS - len(scene.kind) - len(scene.walkers.kind))
    return found.take(np.argsort(away, kind="stable")[: max(room, 0)])


def draw_sizes(rng: np.random.Generator, role: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kinds [N] and sizes [N, 3] of who drives in lanes: cars, some vans and lorries, few cyclists; often the ego is a
    recorder."""
    count = len(role)
    what = rng.random(count)
    large, lorry = what < 0.14, what < 0.04
    cycle = (what > 1.0 - CYCLES) & (role == PLAIN)
    large, lorry = large & (role != FIRST), lorry & (role != FIRST)
    unit = rng.random((3, count))
    size = np.stack(
        [
            np.where(lorry, 8.5 + 4.0 * unit[0], np.where(large, 5.4 + 3.0 * unit[0], 3.9 + 1.3 * unit[0])),
            np.where(lorry, 2.4 + 0.25 * unit[1], np.where(large, 2.05 + 0.4 * unit[1], 1.7 + 0.4 * unit[1])),
            np.where(large, 2.0 + 1.2 * unit[2], 1.4 + 0.4 * unit[2]),
        ],
        -1,
    )
    size[cycle] = np.array(bystanders.BICYCLE) * (0.9 + 0.2 * unit[:, cycle].T)
    if rng.random() < RECORDER:
        size[0, :2] = rng.uniform(4.9, 5.4), rng.uniform(2.05, 2.4)
    return np.where(cycle, log.CYCLIST, log.VEHICLE).astype(np.int8), size


def beside(net: traffic.Network, path: int, s: float) -> np.ndarray:
    """Distances, m to the left, of the lanes beside place `s` of a path that run along it there and 30 m on."""
    found = []
    for ahead in (0.0, 30.0):
        place = traffic.pose(net, np.array([path]), np.array([s + ahead]))[0]
        away = net.xy - place[:2]
        near = (away**2).sum(-1).argmin(1)
        row = np.arange(len(near))
        aside = away[row, near, 1] * np.cos(place[2]) - away[row, near, 0] * np.sin(place[2])
        turn = (net.heading[row, near] - place[2] + np.pi) % (2 * np.pi) - np.pi
        found.append(np.where((np.abs(turn) < 0.15) & (np.abs(aside) > 2.2) & (np.abs(aside) < 4.8), aside, np.nan))
    aside = np.where(np.abs(found[0] - found[1]) < 0.5, found[0], np.nan)
    return np.unique(np.round(aside[np.isfinite(aside)], 3))


def change_lane(
    rng: np.random.Generator, aside: float, s: float, speed: float, when: tuple[float, float], top: float
) -> tuple[float, float, float]:
    """A vehicle's `shift`: it begins so many seconds from now to close up, and takes two to five more, at no more than
    2 m/s^2 to the side up to the speed `top`."""
    lasts = max(float(rng.uniform(2.2, 5.0)), (3.0 * abs(aside)) ** 0.5)
    return aside, s + speed * float(rng.uniform(*when)), max(top * lasts, 9.0 * abs(aside) ** 0.5)


def jam(rng: np.random.Generator, count: int) -> np.ndarray:
    """Factors [N, T] of the speeds that drivers want in stop and go: waves that run through traffic."""
    period, phase = float(rng.uniform(5.0, 12.0)), rng.uniform(0.0, 1.5, (count, 1))
    wave = np.sin(2.0 * np.pi * np.arange(STEPS) * DT / period + phase + float(rng.uniform(0.0, 2.0 * np.pi)))
    return float(rng.uniform(0.15, 0.5)) * np.clip(0.6 + 0.9 * wave, 0.0, 1.0)


def draw_lights(rng: np.random.Generator, world: World, leg: int) -> tuple[np.ndarray | None, int]:
    """States [legs, T] of a cycle, and what it shows to the ego's leg, one of GREEN, RED_GREEN, GREEN_RED and RED."""
    if world.signals is None:
        return None, GREEN
    groups = np.array(world.signals)
    count = int(groups.max()) + 1
    green, yellow, clear = float(rng.uniform(8.0, 15.0)), 3.0, 1.5
    period = count * (green + yellow + clear)
    phase_shown = roads.draw_index(rng, (0.38, 0.32, 0.18, 0.12))
    # where in its own group's green the ego's leg is at the first step
    low, high = ((0.0, max(green - 8.0, 1.0)), (-5.0, -1.5), (green - 3.0, green + 2.0), (-period / 2, -9.0))[
        phase_shown
    ]
    own = float(rng.uniform(low, high)) - groups[leg] * (-green - yellow - clear)
    time = np.arange(STEPS) * DT
    phase = (time[None] + own - groups[:, None] * (green + yellow + clear)) % period
    state = np.where(phase < green, log.LIGHT_GO, np.where(phase < green + yellow, log.LIGHT_CAUTION, log.LIGHT_STOP))
    return state.astype(np.int8), phase_shown


def place_traffic(
    rng: np.random.Generator, net: traffic.Network, level: float, ego: int, ego_s: float, jams: bool
) -> list[tuple[int, float]]:
    """(path, arc length) of the other vehicles: on approach and exit lanes, with room around the ego."""
    placed: list[tuple[int, float]] = []
    lead = rng.random() < 0.55 and level > 0.0
    least, mean = (6.5, 4.0) if jams else (10.0, 18.0 / max(level, 1e-3))
    for part in (0, 2) if np.isfinite(net.bound).all() else (0,):
        of_lane: dict[int, list[int]] = {}
        for p, lane in enumerate(net.lane[:, part].tolist()):
            of_lane.setdefault(lane, []).append(p)
        for lane, choices in sorted(of_lane.items()):
            p = choices[0]
            begin = 0.0 if part == 0 else float(net.bound[p, 1]) + 8.0
            end = float(net.bound[p, 0] if part == 0 and np.isfinite(net.bound[p, 0]) else net.length[p]) - 4.0
            own = lane == net.lane[ego, part] and part == 0
            if level <= 0.0:
                continue
            gaps = (least + rng.exponential(mean, 32)).tolist()
            back = gaps[0] * rng.random()
            spots = (begin + s - back for s in itertools.accumulate(gaps))
            picks = rng.integers(0, len(choices), 32).tolist()
            found = [(choices[i], s) for i, s in zip(picks, itertools.takewhile(end.__gt__, spots), strict=False)]
            if own:
                room = 9.0 + 4.0 * rng.random()
                found = [(q, s) for q, s in found if abs(s - ego_s) > room]
                if lead:
                    ahead = ego_s + room + float(rng.uniform(2.0, 18.0))
                    found = [(q, s) for q, s in found if s < ego_s or s > ahead + 11.0]
                    found.append((ego, ahead))
            placed += [(q, s) for q, s in found if s < end] if own else found
    return placed


def provoke(rng: np.random.Generator, path: np.ndarray, s: np.ndarray, urge: np.ndarray) -> None:
    """Often makes the vehicle ahead of the ego slow, or lets it brake, gently or hard, for a while or to a stop.

    Changes `urge` in place."""
    ahead = np.flatnonzero((path == path[0]) & (s > s[0]))
    what = rng.random()
    share, when, lasts = float(rng.uniform(0.12, 0.7)), int(rng.integers(5, 70)), int(rng.integers(8, 40))
    hard = float(rng.uniform(2.5, 6.0))
    if not len(ahead) or what > 0.75:
        return
    leader = ahead[s[ahead].argmin()]
    if what < 0.35:
        urge[leader] *= share
    elif what < 0.5:
        urge[leader, when:] = np.maximum(urge[leader, when:] - 0.035 * np.arange(urge.shape[1] - when), 0.0)
    else:  # below 0: braking, m/s^2
        urge[leader, when : when + lasts] = -hard
        if what > 0.65:
            urge[leader, when + lasts :] = 0.0


def first_speeds(
    net: traffic.Network,
    path: np.ndarray,
    s: np.ndarray,
    length: np.ndarray,
    urge: np.ndarray,
    lights: np.ndarray | None,
    unseen: np.ndarray,
) -> np.ndarray:
    """Speeds [N] that leave everybody room to brake gently: behind the one ahead on the lane, and before red lights.

    Who is `unseen` by others, beside its path, looks at nobody either.
    """
    from longhaul.driving.generator import kernels

    halt = np.zeros(len(path), bool)
    if lights is not None:
        halt = (s < net.bound[path, 0]) & (lights[net.leg[path], 0] != log.LIGHT_GO)
    return kernels.first_speeds(
        path, s, np.ascontiguousarray(length), urge, halt, unseen, net.speed, net.bound, net.lane, net.offset
    )


def fit(net: traffic.Network, scene: Scene, s: np.ndarray, v: np.ndarray) -> bool:
    """True if the ego's drive is worth having: it moves, brakes within reason, stays on the map, stops at red."""
    if s[0, -1] - s[0, CURRENT] < scene.least:
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


def embody(net: traffic.Network, scene: Scene, s: np.ndarray, beside: Bystanders) -> Bodies:
    """The scene's vehicles, walkers and bystanders as boxes over time."""
    cars = scene.cars
    pose, v = stray(net, cars.path, s, scene.wave, scene.shift)
    still = scene.walkers, beside
    there = s < net.length[cars.path][:, None] - cars.length[:, None] / 2
    return Bodies(
        np.concatenate([scene.kind, *(b.kind for b in still)]),
        np.concatenate([pose, *(b.pose for b in still)]),
        np.concatenate([v, *(b.speed for b in still)]),
        np.concatenate([scene.size, *(b.size for b in still)]),
        np.concatenate([there, *(np.ones(b.speed.shape, bool) for b in still)]),
    )


def stray(
    net: traffic.Network, path: np.ndarray, s: np.ndarray, wave: np.ndarray, shift: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Poses [N, T, 3] and speeds [N, T] of vehicles at arc lengths `s` [N, T] that stray from their paths by `wave`
    [N, 3] and `shift` [N, 3]: who is beside the middle goes farther, or less far, than the path."""
    from longhaul.driving.generator import kernels

    return kernels.strayed(net.xy, net.heading, path, s, wave, shift, DT)


def write(rng: np.random.Generator, name: str, world: World, scene: Scene, bodies: Bodies) -> Log:
    """The log, somewhere in the world and turned by some angle; the ego at a random place among the tracks."""
    from longhaul.driving.generator import kernels

    angle, height = float(rng.uniform(-np.pi, np.pi)), float(rng.uniform(-20.0, 20.0))
    frame = float(np.cos(angle)), float(np.sin(angle)), *rng.uniform(-5000.0, 5000.0, 2).tolist(), height
    seen = within_reach(rng, bodies)
    order = rng.permutation(np.flatnonzero(seen.any(1)))
    heading = np.round((bodies.pose[..., 2][order] + angle + np.pi) % (2 * np.pi) - np.pi, 6)
    position, heading32, velocity, size, valid = kernels.recorded(
        order, seen, bodies.pose, bodies.speed, bodies.size, heading, np.cos(heading), np.sin(heading), *frame
    )
    tracks = Tracks(
        np.arange(len(order), dtype=np.int64), bodies.kind[order], position, heading32, velocity, size, valid
    )
    ego = int(np.flatnonzero(order == 0)[0])
    limit = None if rng.random() < UNLIMITED else post(rng, world)
    told, state, known = tell_lights(rng, world, scene.lights)
    begins = np.array([world.lanes[world.paths[p].lanes[1]][0] for p in told]).reshape(-1, 2)
    lights = Lights(
        lane=np.array([world.paths[p].lanes[1] + 1 for p in told], np.int64),
        position=kernels.placed(begins, *frame),
        state=state,
        valid=known,
    )
    features = describe(world, frame, limit)
    return Log(
        name,
        "generated",
        np.arange(STEPS) * DT,
        CURRENT,
        tracks,
        ego,
        (),
        features,
        lights,
        has_lights=len(told) > 0 or scene.lights is None,
    )


def post(rng: np.random.Generator, world: World) -> float:
    """The posted speed limit, m/s: often higher than what traffic drives at most."""
    return world.limit if rng.random() < 0.6 else min(world.limit * float(rng.uniform(1.0, 1.8)), 31.0)


def within_reach(rng: np.random.Generator, bodies: Bodies) -> np.ndarray:
    """bool [N, T]: who is seen. Recorders see others for a part of the time: within their reach, and until something
    hides them."""
    if rng.random() < 0.5:
        return bodies.valid
    reach = float(rng.uniform(*REACH))
    away2 = ((bodies.pose[..., :2] - bodies.pose[:1, :, :2]) ** 2).sum(-1)
    seen = bodies.valid & (away2 < reach**2)
    rate = (0.0, 0.1, 0.3)[rng.integers(3)]
    first, last = np.sort(rng.integers(0, STEPS, (2, len(seen), 1)), 0)
    hidden = (rng.random((len(seen), 1)) < rate) & (away2.min(1, keepdims=True) > 15.0**2)
    step = np.arange(STEPS)
    seen &= ~hidden | ((step >= first) & (step <= last))
    seen[0] = True
    return seen & (seen.sum(1, keepdims=True) > 1)


def tell_lights(
    rng: np.random.Generator, world: World, lights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lights as a log tells of them: paths [L] that have one, its states [L, T] and whether they are known [L, T].

    Some logs have none of them; in others, a part of the states are unknown, throughout or for a while. Those for turns
    are arrows in many. Lights at a junction that goes by priority flash.
    """
    everyone = np.arange(len(world.paths))
    none = np.zeros((0, STEPS), np.int8)
    if lights is None:
        junction = np.array([len(p.lanes) == 3 for p in world.paths])
        if world.kind not in ("crossing", "tee") or rng.random() > FLASHES:
            return everyone[:0], none, none.astype(bool)
        main = np.array([p.priority for p in world.paths]) > 2
        code = np.where(main, FLASHING_CAUTION, FLASHING_STOP) if rng.random() < 0.7 else np.zeros(len(main))
        state = np.repeat(code[:, None].astype(np.int8), STEPS, 1)
        return everyone[junction], state[junction], np.ones((int(junction.sum()), STEPS), bool)
    if rng.random() < LIGHTLESS:
        return everyone[:0], none, none.astype(bool)
    state = lights[[p.leg for p in world.paths]].astype(np.int8)
    turn = np.array([p.turn for p in world.paths])
    if rng.random() < ARROWS:
        pointed = (turn > 0) | ((turn < 0) & (rng.random() < 0.4))
        state[pointed] -= log.LIGHT_STOP - ARROW_STOP
    known = np.ones(state.shape, bool)
    if rng.random() < PARTLY:
        leg = np.array([p.leg for p in world.paths])
        share = float(rng.uniform(0.2, 0.9))
        blind = rng.random(len(lights)) < share
        whole = rng.random(len(lights)) < 0.4
        first, last = np.sort(rng.integers(0, STEPS, (2, len(lights))), 0)
        step = np.arange(STEPS)
        dark = blind[:, None] & (whole[:, None] | ((step >= first[:, None]) & (step <= last[:, None])))
        if rng.random() < 0.6:
            state = np.where(dark[leg], np.int8(log.LIGHT_UNKNOWN), state)
        else:
            known = ~dark[leg]
    return everyone, state, known


ARROW_STOP, FLASHING_STOP, FLASHING_CAUTION = 1, 7, 8


def describe(world: World, frame: tuple[float, ...], limit: float | None) -> tuple[Feature, ...]:
    """The map's features in the log's `frame`, see `kernels.placed`; lane i has the id i + 1."""
    from longhaul.driving.generator import kernels

    entry: list[set[int]] = [set() for _ in world.lanes]
    leave: list[set[int]] = [set() for _ in world.lanes]
    for path in world.paths:
        for a, b in zip(path.lanes[:-1], path.lanes[1:], strict=True):
            leave[a].add(b + 1)
            entry[b].add(a + 1)
    others = [*world.edges, *world.lines, *((log.CROSSWALK, c) for c in world.crosswalks)]
    lines = [*world.lanes, *(line for _, line in others)]
    every, ends = kernels.placed(np.concatenate(lines), *frame), [0, *itertools.accumulate(map(len, lines))]
    points = [every[a:b] for a, b in itertools.pairwise(ends)]
    lanes = [
        Feature(i + 1, log.LANE_STREET, points[i], tuple(sorted(entry[i])), tuple(sorted(leave[i])), limit)
        for i in range(len(world.lanes))
    ]
    first = len(lanes)
    return (*lanes, *(Feature(first + 1 + i, kind, points[first + i]) for i, (kind, _) in enumerate(others)))
