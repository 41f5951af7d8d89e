"""Drives measured by the simulator and by a slow reference that shares no code, and where they may differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from longhaul.driving.datasets.log import LANE_BIKE, Feature
from longhaul.driving.scenario.lane_graph import INFERRED
from longhaul.driving.scenario.scenario import Scenario
from tests.helpers import reference_driving_metrics as reference

SLACK = 0.015
"""Metres (and seconds, and shares of limits) around a threshold within which a verdict may differ: logs are kept in
16 bits on the device, to about a centimetre."""


def world_of(
    made: Scenario, motion: np.ndarray, agent: int, lanes: list[reference.Lane], playing: np.ndarray, replays: bool
) -> reference.World:
    """Deeds of agent `agent` of a scenario. `motion` [T+1, A, 4]: x, y, heading, speed of those controlled."""
    me, steps = int(made.controlled[agent]), len(motion)
    pose, velocity = made.pose[:steps].astype(float).copy(), made.velocity[:steps].astype(float).copy()
    present = made.present[:steps].copy()
    for a, n in enumerate(made.controlled):
        if n < 0 or a >= motion.shape[1]:
            continue
        x, y, heading, speed = motion[:, a].T
        pose[:, n] = np.stack([x, y, heading], -1)
        velocity[:, n] = (speed * np.stack([np.cos(heading), np.sin(heading)])).T
        present[:, n] = playing[:, a] & (present[:, n] if replays else True)
    others = np.arange(len(made.kind)) != me
    count, known = int(made.route_points[agent]), made.present[:steps, me]
    s = made.expert_s[agent]
    span = min(5, made.steps - 1)
    top = 0.0 if made.route_length[agent] < 0.5 else max(1.1 * np.max(s[span:] - s[:-span]) / (span * made.dt), 3.0)
    return reference.World(
        dt=float(made.dt), kind=int(made.kind[me]), size=(float(made.size[me, 0]), float(made.size[me, 1])),
        pose=pose[:, me], speed=motion[:, agent, 3].astype(float),
        counts=(known & np.append(False, known[:-1])) if replays else np.ones(steps, bool),
        others=pose[:, others], velocities=velocity[:, others], present=present[:, others],
        sizes=made.size[others].astype(float), kinds=made.kind[others],
        route=made.route[agent, :count].astype(float), start=float(s[0]), length=float(made.route_length[agent]),
        light_s=made.light_s[agent], light_state=made.light_state[agent][:, :steps], lanes=lanes,
        road=made.field / 100.0 if min(made.field.shape) >= 2 else None, road_origin=made.field_origin.astype(float),
        expert=made.pose[:steps, me, :2].astype(float), known=known, top=top / 1.1,
    )  # fmt: skip


LOOSE = {"smallest_ttc": 0.04, "comfort": 0.05, "progress": 5e-3, "progression": 5e-3, "speed_limit": 5e-3}
LOOSE |= {"log_divergence": 0.01, "final_divergence": 0.02}
"""Amount by which a number may differ from the reference, beside what SLACK explains; others may not."""

ON_LANES = {"wrong_way", "off_route", "speed_limit", "lanes", "driving_direction", "at_fault_collision"}
"""Metrics that depend on lanes."""


def compare(found: dict[str, tuple[float, bool]], world: reference.World, where: str, mapped: bool = True) -> int:
    """Fails where a metric is not the reference's; -> how many differ, but lie on a threshold. Unless it stayed where
    lanes are `mapped`, nothing is said of ON_LANES."""
    here = reference.measure(world)
    assert found.keys() >= here.keys()
    here = {name: value for name, value in here.items() if mapped or name not in ON_LANES}

    def same(name: str) -> bool:
        (mine, known), (value, valid) = found[name], here[name]
        return known == valid and (not valid or abs(mine - value) <= LOOSE.get(name, 1e-6))

    differ = [name for name in here if not same(name)]
    if not differ:
        return 0
    low, high = (reference.measure(world, slack) for slack in (-SLACK, SLACK))
    for name in differ:
        mine, known = found[name]
        if low[name][1] == high[name][1]:
            about = f"{where}: {name} is {mine}, valid: {known}; the reference says {here[name]}"
            assert known == here[name][1], about
        if known and here[name][1]:
            values, room = [f[name][0] for f in (low, here, high)], LOOSE.get(name, 1e-6)
            assert min(values) - room <= mine <= max(values) + room, f"{where}: {name} is {mine}; reference: {values}"
    return len(differ)


def motions(first: Any, rest: Any) -> np.ndarray:
    """[T+1, A, 4] of states before and after each step."""
    parts = [np.concatenate([np.asarray(a)[None], np.asarray(b)]) for a, b in zip(first, rest, strict=True)]
    return np.stack(parts, -1)


def lane_of(feature: Feature, origin: np.ndarray) -> reference.Lane:
    known = bool(feature.speed_limit)
    limit = float(feature.speed_limit or INFERRED.get(feature.kind, 0.0))
    points = (feature.points - origin)[:, :2]
    return reference.Lane(points, limit, not known and limit > 0.0, feature.kind == LANE_BIKE)
