"""Log of no real place, for which all but the smallest kernels of this package have work.

Numba compiles on the first call, and keeps what it compiled on disk. The generator's workers all run the same code in
the same order, so that each would compile all of it, at the same time. One that compiles this package by this log,
while another compiles the generator, saves both half of that minute.
"""

from __future__ import annotations

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.log import Feature, Lights, Log, Tracks

STEPS = 30


def made_up_log() -> Log:
    """Log of two lanes, one behind the other, with a light, a stop sign, a crosswalk, edges and a line; the ego and
    another vehicle drive along them, and a pedestrian stands beside."""
    times = np.arange(STEPS) * log.STEP
    begins = np.array([[-40.0, 0.0], [-20.0, 0.2], [-15.0, 4.0]])
    speed = np.array([10.0, 9.0, 0.0])
    position = np.zeros((3, STEPS, 3))
    position[..., :2] = begins[:, None]
    position[..., 0] += speed[:, None] * times
    velocity = np.zeros((3, STEPS, 2), np.float32)
    velocity[..., 0] = speed[:, None]
    sizes = np.array([[4.5, 2.0, 1.5], [4.5, 2.0, 1.5], [0.5, 0.5, 1.7]], np.float32)
    tracks = Tracks(
        id=np.arange(3),
        kind=np.array([log.VEHICLE, log.VEHICLE, log.PEDESTRIAN], np.int8),
        position=position,
        heading=np.zeros((3, STEPS), np.float32),
        velocity=velocity,
        size=np.repeat(sizes[:, None], STEPS, axis=1),
        valid=np.ones((3, STEPS), bool),
    )

    def line(begin: float, end: float, y: float, bend: float = 0.0) -> np.ndarray:
        x = np.linspace(begin, end, 61)
        return np.stack([x, y + bend * np.sin(x / 9.0), 0.0 * x], 1)

    def feature(number: int, kind: int, points: np.ndarray, exit: tuple[int, ...] = ()) -> Feature:
        return Feature(number, kind, points, exit=exit, speed_limit=13.0)

    box = np.array([[-1.5, -4.0, 0.0], [1.5, -4.0, 0.0], [1.5, 6.0, 0.0], [-1.5, 6.0, 0.0]])
    features = (
        feature(1, log.LANE_STREET, line(-60.0, 0.0, 0.0), (2, 3)),
        feature(2, log.LANE_STREET, line(0.0, 80.0, 0.0)),
        feature(3, log.LANE_STREET, line(0.0, 80.0, 0.0, 3.0)),
        feature(4, log.EDGE_BOUNDARY, line(80.0, -60.0, 6.0, 0.3)),
        feature(5, log.EDGE_BOUNDARY, line(-60.0, 80.0, -6.0, 0.3)),
        feature(6, log.ROAD_LINES[0], line(-60.0, 80.0, 2.0)),
        feature(7, log.CROSSWALK, box),
        feature(8, log.STOP_SIGN, np.array([[60.0, -3.0, 0.0]])),
    )
    lights = Lights(
        lane=np.array([1]),
        position=np.array([[-0.5, 0.0, 0.0]]),
        state=np.full((1, STEPS), log.LIGHT_GO, np.int8),
        valid=np.ones((1, STEPS), bool),
    )
    return Log("made up", "generated", times, 10, tracks, 0, (), features, lights)
