"""Content of driving logs: the counts and ranges that each source has, before any padding or thinning.

`road_points` are the points of polylines, outlines and lists of points as the source keeps them; the bare position of
a stop sign (Scenario protos and ScenarioNet have it apart) is none. Features are counted by distinct id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.driving.datasets import log as kinds
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData, Log
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.shards import shard

FEATURES = {
    "lanes": (kinds.LANE_FREEWAY, kinds.LANE_STREET, kinds.LANE_BIKE),
    "road_lines": kinds.ROAD_LINES,
    "road_edges": (kinds.EDGE_BOUNDARY, kinds.EDGE_MEDIAN),
    "crosswalks": (kinds.CROSSWALK,),
    "stop_signs": (kinds.STOP_SIGN,),
    "speed_bumps": (kinds.SPEED_BUMP,),
}

BARE_SIGNS = (readers.WOMD_SCENARIO, readers.SCENARIONET)
"""Formats that keep a stop sign's position apart from the points of the road."""

COUNTS = (
    *("id", "steps", "tracks", "vehicles", "pedestrians", "cyclists", "others", "valid_steps", "sdc_index"),
    *("road_points", *FEATURES, "lights_max", "tracks_to_predict"),
)
"""Counts of each scenario, in this order."""

ABSENT = {readers.ARGOVERSE: ("stop_signs", "speed_bumps"), readers.NUPLAN: ("tracks_to_predict",)}
"""Counts that a format does not have."""

FLAT = (readers.ARGOVERSE, readers.NUPLAN)
"""Formats without heights."""

NAMES = {kinds.VEHICLE: "vehicle", kinds.PEDESTRIAN: "pedestrian", kinds.CYCLIST: "cyclist", kinds.OTHER: "other"}

RANGES = ("duration", "dt", "x", "y", "z", "speed", "sizes", "valid_share", "speed_limit", "track_ids", "feature_ids")
"""Ranges of each scenario: s, m (of valid steps), m/s; sizes by kind as {"length": [m, m], ...}. A range
is [least, greatest], and null where there is nothing."""


def inspect(paths: Sequence[str], seen_each: Callable[[Path, Log | Scenario], None] | None = None) -> dict[str, Any]:
    """The report of `longhaul data inspect`: {"files": [...], "scenarios": how many, "errors": how many}.

    `seen_each` is called with every log, or scenario of a shard, and its file. Never raises `BadData` of its own. A
    file that cannot be read, or a path that means nothing, has its message in `error`; scenarios before the fault are
    kept.
    """
    files: list[dict[str, Any]] = []
    seen: set[Path] = set()
    for given in paths:
        try:
            logs = readers.expand([given])
        except BadData as error:
            files.append({"path": str(given), "format": None, "scenarios": [], "error": str(error)})
            continue
        fresh = [path for path in logs if path.resolve() not in seen]
        seen.update(path.resolve() for path in fresh)
        files += [_inspect_file(path, seen_each) for path in fresh]
    return {
        "files": files,
        "scenarios": sum(len(file["scenarios"]) for file in files),
        "errors": sum(file["error"] is not None for file in files),
    }


def _inspect_file(path: Path, seen_each: Callable[[Path, Log | Scenario], None] | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": str(path), "format": None, "scenarios": [], "error": None}
    try:
        with readers.limited(path):
            entry["format"] = readers.detect(path)
            if entry["format"] == readers.SHARD:
                for scenario in shard.open(path):
                    entry["scenarios"].append(compiled(scenario))
                    if seen_each:
                        seen_each(path, scenario)
                return entry
            for kind, log in readers.scan(path):
                entry["format"] = kind
                entry["scenarios"].append(summary(log, kind))
                if seen_each:
                    seen_each(path, log)
    except BadData as error:
        entry["error"] = str(error)
    return entry


def compiled(scenario: Scenario) -> dict[str, Any]:
    """The counts of a scenario in a shard: steps from the current one on, agents that were kept; None for the rest."""
    kept = scenario.kind[scenario.kind > 0]
    known: dict[str, Any] = {"id": scenario.id, "steps": scenario.steps, "tracks": len(kept), "sdc_index": 0}
    known |= _by_kind(kept)
    known["valid_steps"] = scenario.present.sum().item()
    present, real = scenario.present[:, : len(scenario.kind)], scenario.kind > 0
    place, velocity = scenario.pose[..., :2][present], scenario.velocity[present]
    ranges: dict[str, Any] = dict.fromkeys(RANGES) | {
        "duration": round(scenario.dt * (scenario.steps - 1), 6),
        "dt": span(np.array([scenario.dt])),
        "x": span(place[:, 0]),
        "y": span(place[:, 1]),
        "speed": span(np.hypot(*velocity.T)),
        "sizes": _sizes(scenario.size[real], scenario.kind[real]),
        "valid_share": round(float(present[:, real].mean()), 6) if real.any() else None,
    }
    return dict.fromkeys(COUNTS) | known | {"ranges": ranges}


def _by_kind(kind: np.ndarray) -> dict[str, int]:
    return {f"{name}s": (kind == number).sum().item() for number, name in NAMES.items()}


def span(values: np.ndarray) -> list[float] | None:
    """[least, greatest], rounded to a micrometre; None where there are no values."""
    if not values.size:
        return None
    return [round(float(values.min()), 6), round(float(values.max()), 6)]


def _sizes(size: np.ndarray, kind: np.ndarray) -> dict[str, Any]:
    """Ranges of the sides [M, 2 or 3] of M boxes, by kind."""
    sides = ("length", "width", "height")
    return {
        name: {side: span(column) for side, column in zip(sides, size[kind == number].T)}
        for number, name in NAMES.items()
        if (kind == number).any()
    }


def ranges_of(log: Log, kind: str) -> dict[str, Any]:
    """The ranges of one log of the format `kind`; see `RANGES`."""
    tracks, valid = log.tracks, log.tracks.valid
    used = valid.any(axis=1)
    place = tracks.position[valid]
    row = np.nonzero(valid)[0]
    x, y, z = (span(place[:, axis]) for axis in range(3))
    limits = [each.speed_limit for each in log.features if each.speed_limit is not None]
    values = (
        round(float(log.times[-1] - log.times[0]), 6),
        span(np.diff(log.times)),
        *(x, y, None if kind in FLAT else z),
        span(np.hypot(*tracks.velocity[valid].astype(np.float64).T)),
        _sizes(tracks.size[valid], tracks.kind[row]),
        round(float(valid[used].mean()), 6) if used.any() else None,
        span(np.array(limits)),
        [int(tracks.id[used].min()), int(tracks.id[used].max())] if used.any() else None,
        [min(f.id for f in log.features), max(f.id for f in log.features)] if log.features else None,
    )
    return dict(zip(RANGES, values, strict=True))


def summary(log: Log, kind: str) -> dict[str, Any]:
    """The counts of one log of the format `kind`; None where the format has no such thing."""
    used = log.tracks.valid.any(axis=1)
    kept = log.tracks.kind[used]
    points = sum(len(each.points) for each in log.features if kind not in BARE_SIGNS or each.kind != kinds.STOP_SIGN)
    report: dict[str, Any] = {
        "id": log.id,
        "steps": len(log.times),
        "tracks": used.sum().item(),
        **_by_kind(np.where(np.isin(kept, list(NAMES)), kept, kinds.OTHER)),
        "valid_steps": log.tracks.valid.sum().item(),
        "sdc_index": log.sdc,
        "road_points": points,
    }
    for name, group in FEATURES.items():
        report[name] = len({feature.id for feature in log.features if feature.kind in group})
    report["lights_max"] = log.lights.valid.sum(axis=0).max(initial=0).item() if log.has_lights else None
    report["tracks_to_predict"] = len(log.predict)
    return report | dict.fromkeys(ABSENT.get(kind, ())) | {"ranges": ranges_of(log, kind)}
