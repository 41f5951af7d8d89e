"""Road users beside the flow of traffic: parked rows, cyclists at the kerb, people on pavements and people who cross.

Whoever is beside the road keeps one pace along a line, or stands. People who cross are known to traffic, which stops
for them (`traffic.foresee`); where there are lights, they cross a leg only while it has red.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.generator import roads
from longhaul.driving.generator.roads import World
from longhaul.driving.generator.traffic import DT

CAR, PERSON, BICYCLE = (4.6, 1.85, 1.6), (0.6, 0.6, 1.75), (1.8, 0.7, 1.7)
"""Metres: the usual length, width and height."""
PARKING = 2.0
"""Metres of shoulder from which on vehicles park there."""


class Bystanders(NamedTuple):
    """M road users over T steps."""

    kind: np.ndarray  # int8 [M]
    pose: np.ndarray  # [M, T, 3]
    speed: np.ndarray  # [M, T], m/s
    size: np.ndarray  # [M, 3]

    def take(self, which: np.ndarray) -> Bystanders:
        return Bystanders(*(a[which] for a in self))


def gather(parts: list[Bystanders], steps: int) -> Bystanders:
    """All of `parts` as one."""
    if not parts:
        return Bystanders(np.zeros(0, np.int8), np.zeros((0, steps, 3)), np.zeros((0, steps)), np.zeros((0, 3)))
    return Bystanders(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def draw_beside(rng: np.random.Generator, world: World, steps: int) -> Bystanders:
    """All who park, ride and walk beside the road."""
    parts = draw_parked(rng, world, steps), draw_cyclists(rng, world, steps), draw_people(rng, world, steps)
    return gather([each for part in parts for each in part], steps)


def glide(line: np.ndarray, begin: np.ndarray, pace: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Poses [M, T, 3] and speeds [M, T] of those that start at arc length `begin` [M] of `line` and keep `pace` [M];
    they stop at its end."""
    from longhaul.driving.generator import kernels

    return kernels.glide(np.ascontiguousarray(line), begin, pace, steps, DT)


def sizes(rng: np.random.Generator, usual: tuple[float, float, float], spread: float, count: int) -> np.ndarray:
    """Sizes [M, 3] around the `usual` one."""
    return np.array(usual) * rng.uniform(1.0 - spread, 1.0 + spread, (count, 3))


def draw_parked(rng: np.random.Generator, world: World, steps: int) -> list[Bystanders]:
    """Rows of parked vehicles on wide shoulders, and of others at an angle on lots beyond the road's edge."""
    out = []
    lots = rng.random() < 0.35
    for kerb in world.kerbs:
        on_road = world.shoulder > PARKING and rng.random() < 0.7
        if not on_road and not (lots and rng.random() < 0.6):
            continue
        gap, begin = (0.6, 2.0, 8.0, 25.0)[rng.integers(4)], float(rng.uniform(0.0, 40.0))
        if on_road:
            pitch = 5.8 + rng.exponential(gap, 24)
            turn, away = (0.0, np.pi)[rng.integers(2)], 0.0
        else:
            pitch = 2.7 + rng.exponential(0.5 * gap, 24)
            turn, away = (0.5, 1.0, 1.5)[rng.integers(3)] * np.pi, world.shoulder / 2 + float(rng.uniform(4.5, 14.0))
        spots = begin + np.cumsum(pitch)
        spots = spots[spots < len_of(kerb) - 4.0]
        pose, speed = glide(kerb, spots, np.zeros(len(spots)), steps)
        size = sizes(rng, CAR, 0.1, len(spots))
        if on_road:  # each beside the row's middle, and not quite along it
            room = max(world.shoulder - 2.1, 0.0) / 2
            aside = rng.uniform(-room, room, (len(spots), 1)) + rng.normal(0.0, 0.08, (len(spots), 1))
        else:
            aside = np.full((len(spots), 1), -away) + rng.normal(0.0, 0.3, (len(spots), 1))
        heading = pose[..., 2]
        pose[..., 0] -= aside * np.sin(heading)
        pose[..., 1] += aside * np.cos(heading)
        pose[..., 2] += turn + rng.normal(0.0, 0.03, (len(spots), 1))
        out.append(Bystanders(np.full(len(spots), log.VEHICLE, np.int8), pose, speed, size))
    return out


def draw_cyclists(rng: np.random.Generator, world: World, steps: int) -> list[Bystanders]:
    """Cyclists on the shoulder, alone or several."""
    out = []
    for kerb in world.kerbs if world.shoulder > 1.0 else []:
        count = (0, 1, 2, 4)[roads.draw_index(rng, (0.6, 0.25, 0.1, 0.05))]
        if count:
            pose, speed = glide(kerb, rng.uniform(5.0, 110.0, count), rng.uniform(2.5, 7.0, count), steps)
            out.append(Bystanders(np.full(count, log.CYCLIST, np.int8), pose, speed, sizes(rng, BICYCLE, 0.1, count)))
    return out


def draw_people(rng: np.random.Generator, world: World, steps: int) -> list[Bystanders]:
    """People on pavements: who walk, run, or stand, looking anywhere."""
    out = []
    crowd = (0.0, 1.0, 3.0, 8.0)[roads.draw_index(rng, (0.25, 0.3, 0.3, 0.15))]
    for walk in world.walks:
        count = min(int(rng.poisson(crowd)), 16)
        if not count:
            continue
        line = walk if rng.random() < 0.5 else walk[::-1]
        kind = rng.random(count)
        pace = np.where(
            kind < 0.3, 0.0, np.where(kind < 0.93, rng.uniform(0.7, 1.7, count), rng.uniform(1.8, 3.5, count))
        )
        pose, speed = glide(line, rng.uniform(0.0, 130.0, count), pace, steps)
        aside = rng.uniform(-1.3, 1.3, (count, 1))
        pose[..., 0] -= aside * np.sin(pose[..., 2])
        pose[..., 1] += aside * np.cos(pose[..., 2])
        about = np.where(kind < 0.3, rng.uniform(-np.pi, np.pi, count), np.where(rng.random(count) < 0.5, 0.0, np.pi))
        back = (kind >= 0.3) & (about == np.pi)
        pose[back], speed[back] = pose[back, ::-1], speed[back, ::-1]
        pose[..., 2] += about[:, None]
        out.append(Bystanders(np.full(count, log.PEDESTRIAN, np.int8), pose, speed, sizes(rng, PERSON, 0.2, count)))
    return out


def len_of(line: np.ndarray) -> float:
    return float(np.hypot(*np.diff(line, axis=0).T).sum())


def draw_crossing(
    rng: np.random.Generator, world: World, lights: np.ndarray | None, level: float, steps: int
) -> Bystanders:
    """People and cyclists who cross the road: on crosswalks, and now and then elsewhere."""
    ways: list[tuple[np.ndarray, np.ndarray, int]] = []
    for leg, corner in enumerate(world.crosswalks):
        if rng.random() > 0.3 + 0.4 * level:
            continue
        for _ in range(1 + int(rng.poisson(0.8))):
            share = float(rng.uniform(0.1, 0.9))
            ways.append((corner[0] + share * (corner[1] - corner[0]), corner[3] + share * (corner[2] - corner[3]), leg))
    if len(world.walks) > 1 and rng.random() < 0.15:
        pair = 2 * int(rng.integers(0, len(world.walks) // 2))
        one, other = world.walks[pair], world.walks[pair + 1][::-1]
        at = int(rng.integers(len(one) // 6, max(len(one) // 2, len(one) // 6 + 1)))
        from_, to = one[at], other[min(at, len(other) - 1)]
        chord = (to - from_) / np.hypot(*(to - from_))
        ways.append((from_ + 2.0 * chord, to - 2.0 * chord, -1))
    time, out = np.arange(steps) * DT, []
    for a, b, leg in ways:
        rides = rng.random() < 0.15
        begin = float(rng.uniform(-6.0, 7.0))
        pace = float(rng.uniform(2.0, 4.5)) if rides else float(rng.uniform(0.7, 2.2))
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        size = float(np.hypot(*(b - a)))
        direction = (b - a) / size
        way = np.clip((time - begin) * pace, 0.0, size + 5.0) - 2.5
        crosses = (way > -0.5) & (way < size + 0.5)
        if lights is not None and (leg < 0 or (lights[leg, crosses] != log.LIGHT_STOP).any()):
            continue
        pose = np.concatenate(
            [a + way[:, None] * direction, np.full((steps, 1), np.arctan2(direction[1], direction[0]))], 1
        )
        speed = np.where((way > -2.5) & (way < size + 2.5), pace, 0.0)
        kind, usual = (log.CYCLIST, BICYCLE) if rides else (log.PEDESTRIAN, PERSON)
        out.append(Bystanders(np.array([kind], np.int8), pose[None], speed[None], sizes(rng, usual, 0.1, 1)))
    return gather(out, steps)
