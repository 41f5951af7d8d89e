"""Road users beside the flow: where they stand and walk, and who waits for whom."""

from __future__ import annotations

import numpy as np

from longhaul.driving.datasets.log import CYCLIST, LIGHT_GO, LIGHT_STOP, PEDESTRIAN, VEHICLE
from longhaul.driving.generator import bystanders, roads
from longhaul.driving.generator.traffic import DT

STEPS = 91


def test_who_glides_keeps_pace_and_stops_at_the_end() -> None:
    line = np.array([[0.0, 0.0], [3.0, 4.0], [3.0, 10.0]])  # 5 m, then 6 m to the north
    pose, speed = bystanders.glide(line, np.array([0.0, 2.0]), np.array([1.0, 0.0]), STEPS)
    s = np.minimum(DT * np.arange(STEPS), 11.0)
    np.testing.assert_allclose(pose[0, :51, :2], s[:51, None] * [0.6, 0.8], atol=1e-12)
    np.testing.assert_allclose(pose[0, 51:, :2], np.stack([0.0 * s[51:] + 3.0, s[51:] - 1.0], -1), atol=1e-12)
    np.testing.assert_allclose(pose[0, [10, 70], 2], [np.arctan2(4.0, 3.0), np.pi / 2])
    np.testing.assert_allclose(pose[1], np.tile([1.2, 1.6, np.arctan2(4.0, 3.0)], (STEPS, 1)))
    assert (speed == np.array([[1.0], [0.0]])).all()
    _, late = bystanders.glide(line, np.array([8.0]), np.array([1.0]), STEPS)
    assert (late[0] == (8.0 + DT * np.arange(STEPS) < 11.0)).all()


def test_nobody_beside_the_road_is_in_a_lane() -> None:
    kinds = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        world = roads.link(rng, "straight")
        found = bystanders.draw_beside(rng, world, STEPS)
        kinds |= set(found.kind.tolist())
        # the road is along x; how far everybody's box reaches to either side
        cos, sin = np.abs(np.cos(found.pose[..., 2])), np.abs(np.sin(found.pose[..., 2]))
        reach = (found.size[:, :1] * sin + found.size[:, 1:2] * cos) / 2
        lanes = np.array([line[0, 1] for line in world.lanes])
        outer = np.where(
            found.pose[..., 1] > lanes.mean(), found.pose[..., 1] - lanes.max(), lanes.min() - found.pose[..., 1]
        )
        assert (outer - reach > 0.9).all(), seed
        assert (found.speed[found.kind == VEHICLE] == 0.0).all()
    assert kinds == {VEHICLE, PEDESTRIAN, CYCLIST}


def test_people_cross_a_leg_while_it_has_red() -> None:
    rng = np.random.default_rng(0)
    world = next(w for w in (roads.crossing(rng, "crossing") for _ in range(20)) if w.signals and w.crosswalks)
    lights = np.full((4, STEPS), LIGHT_STOP, np.int8)
    lights[0] = LIGHT_GO
    counts = np.zeros(4, int)
    for _ in range(40):
        for walk in bystanders.draw_crossing(rng, world, lights, 1.0, STEPS).pose[..., :2]:
            centres = np.array([corner.mean(0) for corner in world.crosswalks])
            counts[np.hypot(*(walk.mean(0) - centres).T).argmin()] += (walk != walk[0]).any()
    assert counts[0] < 0.2 * counts[1:].min()
