"""Driving logs of a few lines, for what compiles them; far from the origin, as real ones are."""

from __future__ import annotations

import numpy as np

from longhaul.driving.datasets.log import VEHICLE, Feature, Lights, Log, Tracks, no_lights
from longhaul.driving.scenario import distance_field
from longhaul.driving.scenario.scenario import CELL, Scenario

ORIGIN = np.array([4321.5, -987.25, 12.0])


def make_log(
    xy: np.ndarray,
    heading: np.ndarray | None = None,
    *,
    features: tuple[Feature, ...] = (),
    lights: Lights | None = None,
    valid: np.ndarray | None = None,
    sdc: int = 0,
    current: int = 0,
    kind: int = VEHICLE,
) -> Log:
    """A log of tracks that were at `xy` [N, T, 2] or [T, 2], 4 m by 2 m, far away from the origin."""
    xy = xy if xy.ndim == 3 else xy[None]
    n, steps = xy.shape[:2]
    velocity = np.gradient(xy, 0.1, axis=1)
    if heading is None:
        heading = np.arctan2(velocity[..., 1], velocity[..., 0])
    position = np.concatenate([xy, np.zeros((n, steps, 1))], -1) + ORIGIN
    size = np.broadcast_to(np.array([4.0, 2.0, 1.5], np.float32), (n, steps, 3))
    known = np.ones((n, steps), bool) if valid is None else valid
    tracks = Tracks(
        np.arange(n), np.full(n, kind, np.int8), position, np.broadcast_to(heading, (n, steps)).astype(np.float32),
        velocity.astype(np.float32), size, known,
    )  # fmt: skip
    times = 0.1 * np.arange(steps)
    return Log("made", "test", times, current, tracks, sdc, (), features, lights or no_lights(steps))


def polyline(*points: tuple[float, ...], z: float = 0.0) -> np.ndarray:
    return np.array([(*p, z) if len(p) == 2 else p for p in points]) + ORIGIN


def straight(speed: float = 10.0, steps: int = 50) -> np.ndarray:
    return np.stack([speed * 0.1 * np.arange(steps), np.zeros(steps)], -1)


def on_route(scenario: Scenario, s: np.ndarray, a: int = 0) -> np.ndarray:
    route = scenario.route[a, : scenario.route_points[a]]
    return np.stack([np.interp(s, np.arange(len(route)), route[:, i]) for i in range(2)], -1)


def lights_at(stops: list[tuple[int, tuple[float, float], int]], steps: int) -> Lights:
    """Lights (lane, stop point, state throughout)."""
    return Lights(
        np.array([lane for lane, _, _ in stops]),
        np.concatenate([polyline(p) for _, p, _ in stops]),
        np.array([[state] * steps for _, _, state in stops], np.int8),
        np.ones((len(stops), steps), bool),
    )


def sample(field: np.ndarray, origin: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The signed distance, m [...], of `points` [..., 2] by bilinear interpolation in a scenario's `field`.

    Points outside of the field take the value of its border; an empty field is -320 m everywhere.
    """
    height, width = field.shape
    if height < 2 or width < 2:
        return np.full(points.shape[:-1], -320.0)
    place = (np.asarray(points, np.float64) - origin) / CELL
    place = np.clip(place, 0.0, np.array([width - 1, height - 1], np.float64))
    corner = np.minimum(place.astype(np.int64), np.array([width - 2, height - 2]))
    fx, fy = np.moveaxis(place - corner, -1, 0)
    x, y = np.moveaxis(corner, -1, 0)
    low = field[y, x] * (1 - fx) + field[y, x + 1] * fx
    high = field[y + 1, x] * (1 - fx) + field[y + 1, x + 1] * fx
    return (low * (1 - fy) + high * fy) / 100.0


def decoded(code: np.ndarray) -> np.ndarray:
    """float32: signed distances, m, of the codes of `distance_field.encode`."""
    value = code.astype(np.float32)
    return value * np.abs(value) * distance_field.UNIT
