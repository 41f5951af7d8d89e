"""Conditions that every log must satisfy, whatever its source; each reader's last step.

A log that passes has consistent shapes and finite numbers, so that nothing behind the readers needs to ask again.
"""

from __future__ import annotations

import numpy as np

from longhaul.driving.datasets.log import Log, Malformed

FARTHEST = 1e8
"""Metres from the origin of the source's coordinates. Map projections stay below 2e7."""

LARGEST, FASTEST = 1e3, 1e3
"""Metres of a box's side, and m/s: far beyond what drives, and small enough for float32 arithmetic."""

MOST_STEPS = 1 << 16


def check(log: Log) -> Log:
    """`log` itself, or `Malformed` with what is wrong."""
    tracks, lights = log.tracks, log.lights
    n, t = tracks.valid.shape
    if not 1 <= t <= MOST_STEPS:
        raise Malformed(f"it has {t} steps; 1 to {MOST_STEPS} are possible")
    if n == 0:
        raise Malformed("it has no tracks")
    expected = {
        "id": (n,),
        "kind": (n,),
        "position": (n, t, 3),
        "heading": (n, t),
        "velocity": (n, t, 2),
        "size": (n, t, 3),
    }
    for name, shape in expected.items():
        if getattr(tracks, name).shape != shape:
            raise Malformed(f"the tracks' {name} has shape {getattr(tracks, name).shape}, not {shape}")
    if log.times.shape != (t,) or not np.isfinite(log.times).all() or (np.diff(log.times) <= 0).any():
        raise Malformed("the times of its steps do not grow")
    if not 0 <= log.current < t:
        raise Malformed(f"its current step {log.current} is not one of its {t} steps")
    if not 0 <= log.sdc < n:
        raise Malformed(f"the ego's index {log.sdc} is not one of its {n} tracks")
    if not tracks.valid[log.sdc].any():
        raise Malformed(f"the ego (track {log.sdc}) is valid at no step")
    for index in log.predict:
        if not 0 <= index < n:
            raise Malformed(f"the index {index} of a track to predict is not one of its {n} tracks")
    _bounded(tracks.position[tracks.valid], FARTHEST, "a track's position")
    _bounded(tracks.heading[tracks.valid], 1e4, "a track's heading")
    _bounded(tracks.velocity[tracks.valid], FASTEST, "a track's velocity")
    _bounded(tracks.size[tracks.valid], LARGEST, "a track's size")
    if (tracks.size[tracks.valid] < 0).any():
        raise Malformed("a track's size is negative")
    for feature in log.features:
        if feature.points.ndim != 2 or feature.points.shape[1] != 3 or len(feature.points) == 0:
            raise Malformed(
                f"the points of map feature {feature.id} have shape {feature.points.shape}, not (1 or more, 3)"
            )
        if feature.speed_limit is not None and not 0 <= feature.speed_limit <= FASTEST:
            raise Malformed(f"the speed limit of map feature {feature.id} is {feature.speed_limit} m/s")
    if log.features:
        _bounded(np.concatenate([feature.points for feature in log.features]), FARTHEST, "a point of the map")
    for path in log.paths:
        if path.points.ndim != 2 or path.points.shape[1] != 3 or len(path.points) < 2:
            raise Malformed(f"the points of a path have shape {path.points.shape}, not (2 or more, 3)")
        _bounded(path.points, FARTHEST, "a point of a path")
    rows = len(lights.lane)
    if lights.state.shape != (rows, t) or lights.valid.shape != (rows, t) or lights.position.shape != (rows, 3):
        raise Malformed(f"its lights have shapes {lights.state.shape} and {lights.position.shape}, not ({rows}, {t})")
    if ((lights.state < 0) | (lights.state > 8)).any():
        raise Malformed("a light's state is outside 0 .. 8")
    _bounded(lights.position, FARTHEST, "a light's position")
    return log


def _bounded(values: np.ndarray, bound: float, what: str) -> None:
    wrong = ~(np.abs(values) <= bound)  # NaN is wrong too
    if wrong.any():
        raise Malformed(f"{what} is {values[wrong][0]:g}: not finite, or beyond {bound:g}")
