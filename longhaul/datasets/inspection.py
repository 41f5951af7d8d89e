"""What is in driving logs: the counts that each source has, before any padding or thinning.

`road_points` are the points of polylines, outlines and lists of points as the source keeps them; the bare position of
a stop sign (Scenario protos and ScenarioNet have it apart) is none. Features are counted by distinct id.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.datasets import shards, sources
from longhaul.datasets.log import (
    CROSSWALK,
    CYCLIST,
    EDGE_BOUNDARY,
    EDGE_MEDIAN,
    LANE_BIKE,
    LANE_FREEWAY,
    LANE_STREET,
    OTHER,
    PEDESTRIAN,
    ROAD_LINES,
    SPEED_BUMP,
    STOP_SIGN,
    VEHICLE,
    BadData,
    Log,
)
from longhaul.driving.scenario import Scenario

FEATURES = {
    "lanes": (LANE_FREEWAY, LANE_STREET, LANE_BIKE),
    "road_lines": ROAD_LINES,
    "road_edges": (EDGE_BOUNDARY, EDGE_MEDIAN),
    "crosswalks": (CROSSWALK,),
    "stop_signs": (STOP_SIGN,),
    "speed_bumps": (SPEED_BUMP,),
}

BARE_SIGNS = (sources.WOMD_SCENARIO, sources.SCENARIONET)
"""Formats that keep a stop sign's position apart from the points of the road."""

COUNTS = (
    *("id", "steps", "tracks", "vehicles", "pedestrians", "cyclists", "others", "valid_steps", "sdc_index"),
    *("road_points", *FEATURES, "lights_max", "tracks_to_predict"),
)
"""What is told of each scenario, in this order."""

ABSENT = {sources.ARGOVERSE: ("stop_signs", "speed_bumps"), sources.NUPLAN: ("tracks_to_predict",)}
"""What a format has no place for."""


def inspect(paths: Sequence[str]) -> dict[str, Any]:
    """The report of `longhaul data inspect`: {"files": [...], "scenarios": how many, "errors": how many}.

    Never raises `BadData`. A file that cannot be read, or a path that means nothing, has its message in
    `error`; scenarios before the fault are kept.
    """
    files: list[dict[str, Any]] = []
    seen: set[Path] = set()
    for given in paths:
        try:
            found = sources.expand([given])
        except BadData as error:
            files.append({"path": str(given), "format": None, "scenarios": [], "error": str(error)})
            continue
        fresh = [path for path in found if path.resolve() not in seen]
        seen.update(path.resolve() for path in fresh)
        files += [_file(path) for path in fresh]
    return {
        "files": files,
        "scenarios": sum(len(file["scenarios"]) for file in files),
        "errors": sum(file["error"] is not None for file in files),
    }


def _file(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": str(path), "format": None, "scenarios": [], "error": None}
    try:
        entry["format"] = sources.detect(path)
        if entry["format"] == sources.SHARD:
            for scenario in shards.open(path):
                entry["scenarios"].append(compiled(scenario))
            return entry
        for kind, log in sources.scan(path):
            entry["format"] = kind
            entry["scenarios"].append(summary(log, kind))
    except BadData as error:
        entry["error"] = str(error)
    return entry


def compiled(scenario: Scenario) -> dict[str, Any]:
    """The counts of a scenario in a shard: steps from the current one on, agents that were kept; None for the rest."""
    kinds = scenario.kind[scenario.kind > 0]
    known: dict[str, Any] = {"id": scenario.id, "steps": scenario.steps, "tracks": len(kinds), "sdc_index": 0}
    for name, kind in (("vehicles", VEHICLE), ("pedestrians", PEDESTRIAN), ("cyclists", CYCLIST), ("others", OTHER)):
        known[name] = (kinds == kind).sum().item()
    known["valid_steps"] = scenario.present.sum().item()
    return dict.fromkeys(COUNTS) | known


def summary(log: Log, kind: str) -> dict[str, Any]:
    """The counts of one log of the format `kind`; None where the format has no such thing."""
    used = log.tracks.valid.any(axis=1)
    kinds = log.tracks.kind[used]
    vehicles, pedestrians, cyclists = ((kinds == each).sum().item() for each in (VEHICLE, PEDESTRIAN, CYCLIST))
    points = sum(len(each.points) for each in log.features if kind not in BARE_SIGNS or each.kind != STOP_SIGN)
    report: dict[str, Any] = {
        "id": log.id,
        "steps": len(log.times),
        "tracks": used.sum().item(),
        "vehicles": vehicles,
        "pedestrians": pedestrians,
        "cyclists": cyclists,
        "others": len(kinds) - vehicles - pedestrians - cyclists,
        "valid_steps": log.tracks.valid.sum().item(),
        "sdc_index": log.sdc,
        "road_points": points,
    }
    for name, group in FEATURES.items():
        report[name] = len({feature.id for feature in log.features if feature.kind in group})
    report["lights_max"] = log.lights.valid.sum(axis=0).max(initial=0).item() if log.has_lights else None
    report["tracks_to_predict"] = len(log.predict)
    return report | dict.fromkeys(ABSENT.get(kind, ()))
