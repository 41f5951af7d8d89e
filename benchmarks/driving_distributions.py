"""Generated scenarios beside recorded ones, measure by measure: where the generator does not cover what logs have.

    python -m benchmarks.driving_distributions LOGS... [--generated 300] [--first SEED] [--json FILE]

One JSON object a measure, the largest mismatch first: number of samples, and 5th, 50th, 95th percentile of both; `ks`
is the largest distance between their distribution functions (Kolmogorov and Smirnov), 0 where they are alike and 1
where they share nothing; `outside` the share of the logs' samples beyond the generator's 1st and 99th percentile, which
training never shows. Only aggregates are printed: the terms of the logs bind what is derived from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.spatial import cKDTree
from scipy.stats import ks_2samp

from benchmarks import results
from longhaul.driving.datasets import log as logs
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import Log
from longhaul.driving.generator.generate import generate
from longhaul.driving.sim.config import HELD_OUT

MOVES = 0.5  # m/s: who is slower stands
NEAR = 30.0  # m around the ego
SPACING = 2.0  # m between samples of a line
EDGES = (logs.EDGE_BOUNDARY, logs.EDGE_MEDIAN)
LANES = (logs.LANE_FREEWAY, logs.LANE_STREET)

Samples = dict[str, list[float]]


def resampled(points: np.ndarray) -> np.ndarray:
    """float64 [P, 2]: a line's points SPACING apart."""
    points = points[:, :2]
    s = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
    at = np.arange(0.0, s[-1], SPACING)
    return np.stack([np.interp(at, s, points[:, i]) for i in range(2)], -1)


def bends(line: np.ndarray) -> np.ndarray:
    """Curvature, 1/m, along a resampled line, over 3 of its steps each."""
    step = np.diff(line, axis=0)
    heading = np.unwrap(np.arctan2(step[:, 1], step[:, 0]))
    return np.abs(heading[3:] - heading[:-3]) / (3 * SPACING)


def measure(log: Log, samples: Samples) -> None:
    """Adds the samples of one log. Ego and state are those from the step at which driving begins."""
    tracks, now = log.tracks, log.current
    dt = float(np.median(np.diff(log.times)))
    xy, valid, ego = tracks.position[..., :2], tracks.valid, log.sdc
    speed = np.hypot(tracks.velocity[..., 0], tracks.velocity[..., 1])
    cars = tracks.kind == logs.VEHICLE

    def add(name: str, values: Any) -> None:
        samples[name] += np.atleast_1d(np.asarray(values, float)).tolist()

    def lines(kinds: Iterable[int]) -> list[np.ndarray]:
        return [resampled(f.points) for f in log.features if f.kind in kinds and len(f.points) > 1]

    lanes, edges, marks = lines(LANES), lines(EDGES), lines((*logs.ROAD_LINES, *EDGES))
    lanes = [line for line in lanes if len(line) > 4]
    steps = np.flatnonzero(valid[ego, now:]) + now
    path, pace = xy[ego, steps], speed[ego, steps]
    # the ego
    add("ego speed at the start, m/s", pace[0])
    add("ego top speed, m/s", pace.max())
    add("ego way, m", np.sum(np.hypot(*np.diff(path, axis=0).T)))
    if len(steps) > 10:
        change = (pace[5:] - pace[:-5]) / (5 * dt)
        add("ego acceleration at the start, m/s^2", change[0])
        add("ego hardest braking, m/s^2", -change.min())
        add("ego hardest acceleration, m/s^2", change.max())
    if np.sum(np.hypot(*np.diff(path, axis=0).T)) > 15.0:
        add("ego sharpest bend, 1/m", bends(resampled(path)).max(initial=0.0))
    add("ego length, m", np.median(tracks.size[ego, steps, 0]))
    add("ego width, m", np.median(tracks.size[ego, steps, 1]))
    # the road
    for line in lanes:
        add("lane curvature, 1/m", bends(line)[::5])
    limits = [f.speed_limit for f in log.features if f.kind in LANES and f.speed_limit is not None]
    add("speed limit where known, m/s", limits)
    if lanes:
        tree, along = cKDTree(np.concatenate(lanes)), np.concatenate(lanes)
        ahead = np.concatenate([np.gradient(line, axis=0) for line in lanes])
        off, which = tree.query(path[0])
        if off < 5.0:
            add("ego beside a lane's middle at the start, m", off)
            turn = tracks.heading[ego, steps[0]] - np.arctan2(ahead[which, 1], ahead[which, 0])
            add("ego angle to the lane at the start, rad", abs(np.angle(np.exp(1j * turn))))
        near_ego = along[np.hypot(*(along - path[0]).T) < 60.0]
        add("lanes' length within 60 m, m", SPACING * len(near_ego))
        if marks:
            off = cKDTree(np.concatenate(marks)).query(near_ego[::5])[0] if len(near_ego) else np.zeros(0)
            add("lane width (twice to the nearest line), m", 2.0 * off[off < 4.0])
    if edges:
        tree = cKDTree(np.concatenate(edges))
        add("ego to the nearest road edge, m", tree.query(path[::5])[0])
        others = cars & valid[:, now] & (np.arange(len(cars)) != ego)
        add("other vehicles to the nearest road edge, m", tree.query(xy[others, now])[0] if others.any() else [])
    # the others
    around = valid[:, now] & (np.hypot(*(xy[:, now] - path[0]).T) < NEAR)
    around[ego] = False
    moves = (speed * valid).max(1) > MOVES
    add("vehicles within 30 m", np.sum(around & cars))
    add("moving vehicles within 30 m", np.sum(around & cars & moves))
    add("pedestrians", np.sum(tracks.kind == logs.PEDESTRIAN))
    add("cyclists", np.sum(tracks.kind == logs.CYCLIST))
    add("tracks", len(cars))
    add("share of vehicles that stand throughout", np.mean(~moves[cars]))
    add("speed of moving vehicles, m/s", speed[cars & moves & valid[:, now], now])
    add("speed of pedestrians, m/s", speed[(tracks.kind == logs.PEDESTRIAN) & valid[:, now], now])
    size = tracks.size[cars & valid[:, now], now]
    add("vehicle length, m", size[:, 0])
    add("vehicle width, m", size[:, 1])
    centre = xy[around & cars, now]
    gaps = np.hypot(*(centre[:, None] - xy[(around | (np.arange(len(cars)) == ego)) & cars, now][None]).T)
    add("vehicle to the nearest other, m", np.where(gaps < 0.1, np.inf, gaps).min(0) if len(centre) else [])
    add("share of its steps that a vehicle is seen", valid[cars, now:].mean(1))
    # the lights
    if log.has_lights:
        lights = log.lights
        seen = lights.state[:, now:][lights.valid[:, now:]]
        add("lights", len(lights.lane))
        if len(seen):
            for name, codes in LIGHTS.items():
                add(f"share of lights' steps: {name}", np.mean(np.isin(seen, codes)))
            changes = np.sum((np.diff(lights.state[:, now:]) != 0) & lights.valid[:, now + 1 :], axis=1)
            add("changes of a light", changes)


LIGHTS = {"red": (1, 4), "yellow": (2, 5), "green": (3, 6), "unknown": (0,), "arrow": (1, 2, 3), "flashing": (7, 8)}


def about(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(values, [5, 50, 95])
    return {"samples": len(values), "p5": round(low, 3), "p50": round(middle, 3), "p95": round(high, 3)}


def main() -> None:
    flags = results.parser(__doc__)
    flags.add_argument("logs", nargs="+")
    flags.add_argument("--generated", type=int, default=300, help="generated scenarios")
    flags.add_argument("--first", type=int, default=HELD_OUT, help="seed of the first")
    args = flags.parse_args()
    generated: Samples = defaultdict(list)
    real: Samples = defaultdict(list)
    for seed in range(args.first, args.first + args.generated):
        measure(generate(seed), generated)
    count = 0
    for path in readers.expand(args.logs):
        for log in readers.read(path):
            measure(log, real)
            count += 1
    rows = []
    for name in generated.keys() & real.keys():
        ours, theirs = np.array(generated[name]), np.array(real[name])
        if len(ours) and len(theirs):
            low, high = np.percentile(ours, [1, 99])
            outside = float(np.mean((theirs < low - 1e-6) | (theirs > high + 1e-6)))
            rows.append((float(ks_2samp(ours, theirs).statistic), outside, name, about(ours), about(theirs)))
    for ks, outside, name, ours, theirs in sorted(rows, reverse=True):
        results.emit(
            {
                "name": "driving-distributions", "measure": name, "ks": round(ks, 3), "outside": round(outside, 3),
                "generated": {"scenarios": args.generated, **ours}, "logs": {"scenarios": count, **theirs},
            },
            args.json,
        )  # fmt: skip


if __name__ == "__main__":
    main()
