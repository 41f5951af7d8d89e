"""Traffic that flows along the paths of a procedural road: followers, red lights, right of way, people on crosswalks.

Every vehicle keeps to its path and drives by the Intelligent Driver Model (Treiber, Hennecke, Helbing, "Congested
traffic states", 2000) behind the nearest of: the vehicle ahead on its path, a red light, a stretch shared with
another path that it must leave to others, somebody on the road. One loop over time (`kernels.drive`); N vehicles on P
paths sampled each metre.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.generator.roads import World

DT = 0.1
"""Seconds between two steps."""
CLOSE = 2.7
"""Metres between two paths' middles below which vehicles on them could touch."""
LATERAL, SLOWING = 1.9, 1.2
"""m/s^2: the lateral acceleration that curves are driven with, and the braking before them."""
PUSH, COMFORT, HARDEST = 1.6, 2.0, 7.0
"""m/s^2: the driver model's acceleration, its comfortable braking, and the brakes' limit."""
HEADWAY, ROOM, LINE_ROOM = 1.3, 2.0, 1.0
"""The driver model's time gap, s, and its distance at rest, m: to a vehicle, and to a line."""
PREVIEW = 0.5
"""Seconds ahead that the speed for curves is taken from."""
PATIENCE = 1.5
"""Seconds that must be left before a vehicle with right of way arrives."""
FORESEEN = 24
"""Steps ahead for which a driver sees where people walk."""
NEAR_WALKER = 2.2
"""Metres from a path's middle within which people on foot are on it."""


class Manner(NamedTuple):
    """Parameters of the driver model."""

    push: float = PUSH
    comfort: float = COMFORT
    headway: float = HEADWAY
    room: float = ROOM


USUAL = Manner()


class Network(NamedTuple):
    """Tables over P paths with K samples, one a metre; a path shorter than K repeats its end."""

    xy: np.ndarray  # [P, K, 2]
    heading: np.ndarray  # [P, K], unwrapped
    speed: np.ndarray  # [P, K], what curves and the limit allow, m/s
    length: np.ndarray  # [P]
    bound: np.ndarray  # [P, 2]: where the connector begins and ends; inf without one
    lane: np.ndarray  # int [P, 3]: approach, connector, exit
    offset: np.ndarray  # [P, lanes]: where a lane begins on a path; nan where it is no part of it
    enter: np.ndarray  # [P, P]: where path p comes close to path q of another approach; inf if never
    leave: np.ndarray  # [P, P]: where it has left it
    shared: np.ndarray  # [P, P]: up to where p and q, of one approach, are the same road; 0 for others
    leg: np.ndarray  # int [P]
    priority: np.ndarray  # int [P]


class Vehicles(NamedTuple):
    """Starts of N vehicles; `urge` [N, T] is the share of the allowed speed that each wants, or below 0 the braking
    that it does, m/s^2."""

    path: np.ndarray  # int [N]
    s: np.ndarray  # [N], of the middle
    speed: np.ndarray  # [N]
    length: np.ndarray  # [N]
    urge: np.ndarray  # [N, T]
    joins: np.ndarray | None = None  # [N]: arc length from which on others on its path see it ahead; None: always


def tabulate(world: World) -> Network:
    """The tables of a map's paths."""
    from longhaul.driving.generator import kernels

    lane = np.array([p.lanes if len(p.lanes) == 3 else p.lanes * 3 for p in world.paths])
    parts, starts, cuts = [], [0], []
    for path in world.paths:
        lines = [world.lanes[i] for i in path.lanes]
        sizes = [len(line) for line in lines]
        parts += [lines[0], *(line[1:] for line in lines[1:])]
        starts.append(starts[-1] + sum(sizes) - len(sizes) + 1)
        cuts.append((sizes[0] - 1, sum(sizes[:2]) - 2))
    xy, heading, speed, length, bound, offset = kernels.tables(
        np.concatenate(parts), np.array(starts), np.array(cuts), lane, len(world.lanes), world.limit, LATERAL, SLOWING
    )
    enter, leave, shared = meetings(xy, bound, lane)
    legs, priorities = (np.array([getattr(p, name) for p in world.paths]) for name in ("leg", "priority"))
    return Network(xy, heading, speed, length, bound, lane, offset, enter, leave, shared, legs, priorities)


def meetings(xy: np.ndarray, bound: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`enter`, `leave` and `shared` of a `Network`."""
    if not np.isfinite(bound).all():
        square = (len(xy), len(xy))
        return np.full(square, np.inf), np.full(square, -np.inf), np.zeros(square)
    from longhaul.driving.generator import kernels

    return kernels.meetings(xy, bound, lane, CLOSE)


def foresee(net: Network, path: np.ndarray, walkers: np.ndarray) -> np.ndarray:
    """[P, M, T]: where on each path that is one of `path` [N] each of `walkers` [M, T, 2] is on the road now or soon;
    inf if nowhere."""
    from longhaul.driving.generator import kernels

    used = np.zeros(len(net.xy), bool)
    used[path] = True
    return kernels.foresee(net.xy, used, np.ascontiguousarray(walkers), NEAR_WALKER, FORESEEN)


def pose(net: Network, path: np.ndarray, s: np.ndarray) -> np.ndarray:
    """x, y, heading [N, 3] or [N, T, 3] at arc lengths `s` [N] or [N, T] of the paths `path` [N]."""
    from longhaul.driving.generator import kernels

    found = kernels.poses(net.xy, net.heading, path, s.reshape(len(path), -1))
    return found.reshape(*s.shape, 3)


def run(
    net: Network, cars: Vehicles, lights: np.ndarray | None, walkers: np.ndarray, manner: Manner = USUAL
) -> tuple[np.ndarray, np.ndarray]:
    """Arc length and speed [N, T] of vehicles; `lights` [legs, T] as in a log. Past its path's end one waits unseen."""
    from longhaul.driving.generator import kernels

    shown = np.zeros((0, cars.urge.shape[1]), np.int8) if lights is None else lights
    joins = np.full(len(cars.s), -np.inf) if cars.joins is None else cars.joins
    walk, length = foresee(net, cars.path, walkers), np.ascontiguousarray(cars.length)
    return kernels.drive(
        cars.path, cars.s, cars.speed, length, cars.urge, joins, shown, net.leg, walk, net.speed, net.length,
        net.bound, net.lane, net.offset, net.shared, net.enter, net.leave, net.priority,
        DT, manner.push, manner.comfort, HARDEST, manner.headway, manner.room, LINE_ROOM, PREVIEW, PATIENCE,
    )  # fmt: skip
