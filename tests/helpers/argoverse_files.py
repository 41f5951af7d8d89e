"""A log written as Argoverse 2 does: a parquet, and a map beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.driving.datasets.log import LANE_STREET, Log


def write(log: Log, folder: Path) -> Path:
    """An Argoverse 2 parquet with its map; the road is two areas that meet at x = 100. -> the parquet's path."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    tracks = log.tracks
    row, step = np.nonzero(tracks.valid)
    names = ["AV" if index == log.sdc else str(tracks.id[index]) for index in range(len(tracks.id))]
    kinds = ("", "vehicle", "pedestrian", "cyclist", "static")
    columns: dict[str, Any] = {
        "observed": step <= log.current,
        "track_id": [names[index] for index in row],
        "object_type": [kinds[tracks.kind[index]] for index in row],
        "object_category": np.where(np.isin(row, log.predict), 2, 1),
        "timestep": step,
        "position_x": tracks.position[row, step, 0],
        "position_y": tracks.position[row, step, 1],
        "heading": tracks.heading[row, step].astype(np.float64),
        "velocity_x": tracks.velocity[row, step, 0].astype(np.float64),
        "velocity_y": tracks.velocity[row, step, 1].astype(np.float64),
        "scenario_id": [log.id] * len(row),
    }
    path = folder / f"scenario_{log.id}.parquet"
    parquet.write_table(pa.table(columns), path)

    def points(values: Any) -> list[dict[str, float]]:
        return [{"x": float(x), "y": float(y), "z": 22.0} for x, y in np.asarray(values)[:, :2]]

    lanes = {}
    for each in log.features:
        if each.kind == LANE_STREET:
            half = np.array([0.0, 1.75 * np.sign(each.points[1, 0] - each.points[0, 0]), 0.0])
            lanes[str(each.id)] = {
                "id": each.id,
                "centerline": points(each.points),
                "left_lane_boundary": points(each.points + half),
                "right_lane_boundary": points(each.points - half),
                "left_lane_mark_type": "DOUBLE_SOLID_YELLOW",
                "right_lane_mark_type": "NONE",
                "lane_type": "VEHICLE",
                "predecessors": list(each.entry),
                "successors": list(each.exit),
            }
    # the first runs clockwise and is open, the second counterclockwise and closed: readers must take both
    first = [[0, -3.5], [0, 3.5], [100, 3.5], [100, -3.5]]
    second = [[100, -3.5], [200, -3.5], [200, 3.5], [100, 3.5], [100, -3.5]]
    document = {
        "lane_segments": lanes,
        "drivable_areas": {
            str(key): {"id": key, "area_boundary": points(area)} for key, area in ((1, first), (2, second))
        },
        "pedestrian_crossings": {
            "9": {"id": 9, "edge1": points([[121, -3.5], [121, 3.5]]), "edge2": points([[124, -3.5], [124, 3.5]])}
        },
    }
    (folder / f"log_map_archive_{log.id}.json").write_text(json.dumps(document))
    return path
