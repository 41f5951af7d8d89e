"""Argoverse 2 motion forecasting: a scenario's parquet and the map beside it -> `Log`. Needs pyarrow.

Source: the Argoverse 2 paper (arXiv 2301.00493) and the format as published with it. 10 Hz; the current step is the
last observed one. The source has no sizes: boxes take those of `SIZES` by type. It has no heights of tracks either,
so the map's are dropped and all z are 0. Edges are the outlines of the drivable areas, road on their left, without
the stretches where two areas meet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from longhaul.driving.datasets import log
from longhaul.driving.datasets.gpudrive import coordinates, number
from longhaul.driving.datasets.lane_boundaries import edges, flat
from longhaul.driving.datasets.log import BadData, Feature, LibraryMissing, Log, Malformed, Tracks, check, no_lights
from longhaul.driving.datasets.safe_pickle import WRONG
from longhaul.runtime import bounded_json

MAP_PREFIX = "log_map_archive_"

EGO = "AV"


SIZES = {
    "vehicle": (4.6, 1.9, 1.7),
    "bus": (11.5, 2.6, 3.2),
    "motorcyclist": (2.1, 0.8, 1.7),
    "cyclist": (1.8, 0.7, 1.7),
    "riderless_bicycle": (1.8, 0.6, 1.1),
    "pedestrian": (0.6, 0.6, 1.75),
}
"""Length, width, height in metres by type: usual ones, for the source gives none."""

SMALL = (0.6, 0.6, 1.0)
"""The size of whatever is not in `SIZES`: static, background, construction, unknown."""

KINDS = {
    "vehicle": log.VEHICLE,
    "bus": log.VEHICLE,
    "motorcyclist": log.CYCLIST,
    "cyclist": log.CYCLIST,
    "pedestrian": log.PEDESTRIAN,
}

SCORED = 2
"""Tracks of this category and above are to be predicted: 2 scored, 3 focal."""

MARKS = {
    "DASHED_WHITE": 6,
    "SOLID_WHITE": 7,
    "DOUBLE_SOLID_WHITE": 8,
    "DOUBLE_DASH_WHITE": 6,
    "DASH_SOLID_WHITE": 7,
    "SOLID_DASH_WHITE": 7,
    "DASHED_YELLOW": 9,
    "DOUBLE_DASH_YELLOW": 10,
    "SOLID_YELLOW": 11,
    "DOUBLE_SOLID_YELLOW": 12,
    "DASH_SOLID_YELLOW": 13,
    "SOLID_DASH_YELLOW": 13,
    "SOLID_BLUE": 7,
}
"""Marks of a lane's boundary as kinds of road line."""

COLUMNS = (
    *("track_id", "object_type", "object_category", "timestep", "position_x", "position_y", "heading"),
    *("velocity_x", "velocity_y", "observed", "scenario_id"),
)

MOST_STEPS, MOST_STATES, MOST_ROWS = 1 << 16, 1 << 22, 1 << 18
"""A real scenario has 110 steps, some 100,000 states and as many rows at most."""

MOST_TEXT = 64 << 20
"""Bytes of the text of all rows; a parquet stores a text once for any number of them."""


def read(path: Path) -> Log:
    """The log of one parquet; `Malformed` where it is none, `BadData` where pyarrow or the map is missing."""
    columns = _parquet(path)
    try:
        names = set(columns["scenario_id"])
        if len(names) != 1:
            raise Malformed(f"it has {len(names)} scenarios, not one")
        identity = str(names.pop())
        document = _map(path, identity)
        log = _log(columns, identity, document)
    except (Malformed, BadData):
        raise
    except WRONG as error:
        raise Malformed(f"it, or its map, has not Argoverse 2's structure: {type(error).__name__}: {error}") from error
    return check(log)


def _parquet(path: Path) -> dict[str, list[Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise LibraryMissing(f'{path}: Argoverse 2 needs pyarrow: pip install "longhaul-rl[data]"') from error
    try:
        with parquet.ParquetFile(path) as file:
            _check_sizes(file)
            texts = [field.name for field in file.schema_arrow if pa.types.is_string(field.type)]
        with parquet.ParquetFile(path, read_dictionary=texts) as file:  # so that a repeated text is held once
            table = file.read(columns=list(COLUMNS), use_threads=False)
        if (size := sum(map(_text_bytes, table.columns))) > MOST_TEXT:
            raise Malformed(f"its rows have {size:,} bytes of text; {MOST_TEXT:,} are possible")
        columns = table.to_pydict()
    except Malformed:
        raise
    except (pa.ArrowException, MemoryError, OSError, *WRONG) as error:
        raise Malformed(f"it is no usable parquet: {str(error)[:200]}") from error
    missing = [name for name in COLUMNS if name not in columns]
    if missing or not columns["track_id"]:
        raise Malformed(f"it has no column {', '.join(missing)}" if missing else "it has no rows")
    return columns


def _check_sizes(file: Any) -> None:
    """`Malformed` where a parquet's own numbers are beyond any scenario's: few bytes can stand for many equal rows."""
    from pyarrow import types

    if (rows := file.metadata.num_rows) > MOST_ROWS:
        raise Malformed(f"it has {rows} rows; {MOST_ROWS} are possible")
    nested = [field.name for field in file.schema_arrow if field.name in COLUMNS and types.is_nested(field.type)]
    if nested:
        raise Malformed(f"its column {nested[0]} holds lists, and no values")
    size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups))
    if size > MOST_TEXT:
        raise Malformed(f"it has {size:,} bytes before compression; {MOST_TEXT:,} are possible")


def _text_bytes(column: Any) -> int:
    """Bytes of a column's texts, a repeated one counted each time."""
    import pyarrow as pa
    from pyarrow import compute

    total = 0
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            lengths = compute.binary_length(chunk.dictionary)
            total += compute.sum(lengths.take(chunk.indices)).as_py() or 0
        elif chunk.type in (pa.binary(), pa.large_binary(), pa.large_string()):
            total += compute.sum(compute.binary_length(chunk)).as_py() or 0
    return int(total)


def _map(path: Path, identity: str) -> dict[str, Any]:
    where = path.with_name(f"{MAP_PREFIX}{identity}.json")
    try:
        return bounded_json.read(where)
    except OSError as error:
        raise BadData(
            f"{path}: its map {where.name} cannot be read: {error.strerror}; put it beside the parquet"
        ) from error
    except ValueError as error:
        raise BadData(f"{error}; fetch it again") from error


def _log(columns: dict[str, list[Any]], identity: str, document: dict[str, Any]) -> Log:
    step = np.array(columns["timestep"], np.int64)
    names = list(dict.fromkeys(columns["track_id"]))
    rows = {name: index for index, name in enumerate(names)}
    row = np.array([rows[name] for name in columns["track_id"]])
    steps = int(step.max()) + 1
    if step.min() < 0 or steps > MOST_STEPS or steps * len(names) > MOST_STATES:
        raise Malformed(f"it has {len(names)} tracks at steps {step.min()} to {step.max()}")
    if EGO not in rows:
        raise Malformed(f"it has no track {EGO}, the recording vehicle")
    types = dict(zip(columns["track_id"], columns["object_type"]))
    categories = dict(zip(columns["track_id"], columns["object_category"]))
    observed = step[np.array(columns["observed"], bool)]
    valid = np.zeros((len(names), steps), bool)
    valid[row, step] = True

    def column(*parts: str) -> np.ndarray:
        values = np.zeros((len(names), steps, len(parts)))
        values[row, step] = np.array([columns[part] for part in parts], np.float64).T
        return values

    sizes = np.array([SIZES.get(str(types[name]), SMALL) for name in names], np.float32)
    tracks = Tracks(
        id=np.array([number(name, -1) for name in names], np.int64),
        kind=np.array([KINDS.get(str(types[name]), log.OTHER) for name in names], np.int8),
        position=np.concatenate([column("position_x", "position_y"), np.zeros((len(names), steps, 1))], axis=-1),
        heading=column("heading")[..., 0].astype(np.float32),
        velocity=column("velocity_x", "velocity_y").astype(np.float32),
        size=np.where(valid[..., None], sizes[:, None], np.float32(0)),
        valid=valid,
    )
    return Log(
        id=identity,
        source="argoverse2",
        times=np.arange(steps) * log.STEP,
        current=int(observed.max(initial=0)),
        tracks=tracks,
        sdc=rows[EGO],
        predict=tuple(rows[name] for name in names if int(categories[name]) >= SCORED),
        features=_features(document),
        lights=no_lights(steps),
        has_lights=False,
    )


def _outline(points: Any) -> np.ndarray:
    """A list of {x, y, z} as float64 [P, 3] with z = 0."""
    return flat(coordinates(points, ("x", "y")))


def _features(document: dict[str, Any]) -> tuple[Feature, ...]:
    """Lanes, marked boundaries (numbered -1, -2, ... : the source has no ids for them), edges and crossings."""
    features: list[Feature] = []
    lines = 0
    for lane in document["lane_segments"].values():
        left, right = (
            _outline(lane["left_lane_boundary"]),
            _outline(lane["right_lane_boundary"]),
        )
        features.append(
            Feature(
                id=int(lane["id"]),
                kind=log.LANE_BIKE if lane["lane_type"] == "BIKE" else log.LANE_STREET,
                points=_outline(lane["centerline"]) if lane.get("centerline") else _between(left, right),
                entry=tuple(int(each) for each in lane["predecessors"]),
                exit=tuple(int(each) for each in lane["successors"]),
                junction=lane.get("is_intersection") is True,
            )
        )
        for points, mark in ((left, lane["left_lane_mark_type"]), (right, lane["right_lane_mark_type"])):
            if mark in MARKS:
                lines += 1
                features.append(Feature(-lines, MARKS[mark], points))
    areas = document["drivable_areas"].values()
    features += edges([int(area["id"]) for area in areas], [[_outline(area["area_boundary"])[:, :2]] for area in areas])
    for crossing in document["pedestrian_crossings"].values():
        points = np.concatenate([_outline(crossing["edge1"]), _outline(crossing["edge2"])[::-1]])
        features.append(Feature(int(crossing["id"]), log.CROSSWALK, points))
    return tuple(features)


def _between(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The line midway between two boundaries, as many points as the longer list has."""
    count = max(len(left), len(right), 2)

    def spread(points: np.ndarray) -> np.ndarray:
        lengths = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1))])
        at = np.linspace(0.0, lengths[-1], count)
        return np.stack([np.interp(at, lengths, points[:, axis]) for axis in range(3)], axis=1)

    return (spread(left) + spread(right)) / 2
