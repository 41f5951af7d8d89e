"""A log written as nuPlan does: a .db of its published schema, and the map of its city as a GeoPackage.

The road of fixtures_logs lies in Las Vegas: its origin is `ORIGIN` in UTM zone 11. Point clouds come at 20 Hz; those
that a reader at 10 Hz passes over hold nonsense.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.driving.datasets.geopackage import utm
from longhaul.driving.datasets.log import LANE_STREET, Log
from longhaul.driving.datasets.nuplan import EGO_CENTRE

ORIGIN = np.array([664_000.0, 3_998_000.0, 0.0])
EPSG = 32611
CITY = "us-nv-las-vegas-strip"
BEGIN = 1_620_000_000_000_000
"""The log's first time stamp, microseconds."""

SCHEMA = """
CREATE TABLE log (token BLOB NOT NULL, vehicle_name VARCHAR(64), date VARCHAR(64), timestamp INTEGER,
    logfile VARCHAR(64), location VARCHAR(64), map_version VARCHAR(64), PRIMARY KEY (token));
CREATE TABLE ego_pose (token BLOB NOT NULL, timestamp INTEGER, x FLOAT, y FLOAT, z FLOAT, qw FLOAT, qx FLOAT, qy FLOAT,
    qz FLOAT, vx FLOAT, vy FLOAT, vz FLOAT, acceleration_x FLOAT, acceleration_y FLOAT, acceleration_z FLOAT,
    angular_rate_x FLOAT, angular_rate_y FLOAT, angular_rate_z FLOAT, epsg INTEGER, log_token BLOB NOT NULL,
    PRIMARY KEY (token));
CREATE TABLE lidar_pc (token BLOB NOT NULL, next_token BLOB, prev_token BLOB, ego_pose_token BLOB NOT NULL,
    lidar_token BLOB NOT NULL, scene_token BLOB, filename VARCHAR(128), timestamp INTEGER, PRIMARY KEY (token));
CREATE TABLE scene (token BLOB NOT NULL, log_token BLOB NOT NULL, name TEXT, goal_ego_pose_token BLOB,
    roadblock_ids TEXT, PRIMARY KEY (token));
CREATE TABLE category (token BLOB NOT NULL, name VARCHAR(64), description TEXT, PRIMARY KEY (token));
CREATE TABLE track (token BLOB NOT NULL, category_token BLOB NOT NULL, width FLOAT, length FLOAT, height FLOAT,
    PRIMARY KEY (token));
CREATE TABLE lidar_box (token BLOB NOT NULL, lidar_pc_token BLOB NOT NULL, track_token BLOB NOT NULL, next_token BLOB,
    prev_token BLOB, x FLOAT, y FLOAT, z FLOAT, width FLOAT, length FLOAT, height FLOAT, vx FLOAT, vy FLOAT, vz FLOAT,
    yaw FLOAT, confidence FLOAT, PRIMARY KEY (token));
CREATE TABLE traffic_light_status (token BLOB NOT NULL, lidar_pc_token BLOB NOT NULL, lane_connector_id INTEGER,
    status VARCHAR(8), PRIMARY KEY (token));
"""

CATEGORIES = ("", "vehicle", "pedestrian", "bicycle", "traffic_cone")
STATUS = {0: "unknown", 4: "red", 6: "green", 7: "red"}


def token(kind: int, number: int) -> bytes:
    return struct.pack(">HIH", kind, number, 0xABCD)


def frame_token(step: int) -> bytes:
    """Token of the point cloud of a step of the log."""
    return token(1, 2 * step)


def write(log: Log, folder: Path, scenes: Sequence[int] | None = None) -> Path:
    """The log as a .db, its map under maps/ beside it; `scenes` numbers the scene of each step. -> the .db's path."""
    path = folder / "2021.05.12-log.db"
    path.unlink(missing_ok=True)
    steps = len(log.times)
    scenes = [0] * steps if scenes is None else scenes
    tables: dict[str, list[tuple]] = {
        name: [] for name in ("ego_pose", "lidar_pc", "lidar_box", "traffic_light_status")
    }
    for frame in range(2 * steps - 1):
        _frame(tables, log, frame, scenes[frame // 2])
    tables["log"] = [(token(9, 0), "g1p-veh-2", "2021-05-12", BEGIN, "a log", "las_vegas", CITY)]
    tables["scene"] = [(token(2, each), token(9, 0), f"scene-{each}", None, "1 2 3") for each in sorted(set(scenes))]
    tables["category"] = [(token(3, kind), name, "") for kind, name in enumerate(CATEGORIES) if name]
    tables["track"] = [
        (struct.pack(">q", each), token(3, kind), 2.0, 4.0, 1.5)
        for row, (each, kind) in enumerate(zip(log.tracks.id.tolist(), log.tracks.kind.tolist()))
        if row != log.sdc
    ]
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA synchronous = OFF")  # a test waits for no disk
        db.executescript(SCHEMA)
        for name, rows in tables.items():
            if rows:
                db.executemany(f"INSERT INTO {name} VALUES ({','.join('?' * len(rows[0]))})", rows)
    write_map(log, folder / "maps" / CITY / "9.15.1915" / "map.gpkg")
    return path


def _frame(tables: dict[str, list[tuple]], log: Log, frame: int, scene: int) -> None:
    """The rows of one point cloud; every second one is of no step."""
    tracks, step, odd = log.tracks, frame // 2, frame % 2
    stamp = BEGIN + round(float(log.times[step]) * 1e6) + 50_000 * odd
    name, pose = token(1, frame), token(4, frame)
    x, y, _ = tracks.position[log.sdc, step] + ORIGIN + 7.0 * odd
    heading = float(tracks.heading[log.sdc, step])
    forward = float(np.hypot(*tracks.velocity[log.sdc, step]))
    x, y = x - EGO_CENTRE * np.cos(heading), y - EGO_CENTRE * np.sin(heading)
    turn = (np.cos(heading / 2), 0.0, 0.0, np.sin(heading / 2))
    still = (0.0,) * 6
    tables["ego_pose"].append((pose, stamp + 333, x, y, 600.0, *turn, forward, 0.0, 0.0, *still, EPSG, token(9, 0)))
    tables["lidar_pc"].append((name, None, None, pose, token(5, 0), token(2, scene), "a.pcd", stamp))
    for row in np.flatnonzero(tracks.valid[:, step]):
        if row == log.sdc:
            continue
        x, y, z = (tracks.position[row, step] + ORIGIN + 7.0 * odd).tolist()
        length, width, height = tracks.size[row, step].tolist()
        vx, vy = tracks.velocity[row, step].tolist() if row != 5 else (None, None)  # what stands may have none
        box = (x, y, z, width, length, height, vx, vy, None, float(tracks.heading[row, step]), 0.9)
        number = len(tables["lidar_box"])
        tables["lidar_box"].append((token(6, number), name, struct.pack(">q", int(tracks.id[row])), None, None, *box))
    for row, lane in enumerate(log.lights.lane.tolist()):
        if log.lights.valid[row, step]:
            status = STATUS[int(log.lights.state[row, step])] if not odd else "green"
            tables["traffic_light_status"].append((token(7, len(tables["traffic_light_status"])), name, lane, status))
    tables["traffic_light_status"].append((token(7, len(tables["traffic_light_status"])), name, 999, "red"))


def degrees(points: np.ndarray) -> np.ndarray:
    """Longitude and latitude [P, 2] of UTM metres [P, 2], by Newton's method on `utm`."""
    guess = np.tile([-115.17, 36.11], (len(points), 1))
    for _ in range(8):
        here = np.stack(utm(*guess.T, EPSG), axis=1)
        slopes = [(np.stack(utm(*(guess + delta).T, EPSG), axis=1) - here) / 1e-6 for delta in 1e-6 * np.eye(2)]
        guess = guess + np.linalg.solve(np.stack(slopes, axis=-1), (points - here)[..., None])[..., 0]
    return guess


def wkb(kind: int, parts: Any, *, big: bool = False, z: bool = False) -> bytes:
    """Well-known binary: a line (2) from points [P, 2], a polygon (3) from rings, a multi-polygon (6) from polygons."""
    sign = ">" if big else "<"

    def points(values: np.ndarray) -> bytes:
        values = np.concatenate([values, np.full((len(values), 1), 600.0)], axis=1) if z else values
        return struct.pack(f"{sign}I", len(values)) + np.asarray(values, f"{sign}f8").tobytes()

    head = struct.pack(f"{sign}BI", not big, kind + (1000 if z else 0))
    if kind == 2:
        return head + points(parts)
    if kind == 3:
        return head + struct.pack(f"{sign}I", len(parts)) + b"".join(map(points, parts))
    return head + struct.pack(f"{sign}I", len(parts)) + b"".join(wkb(kind - 3, part, big=big, z=z) for part in parts)


def blob(binary: bytes, box: Iterable[float] | None = None, *, big: bool = False) -> bytes:
    """A GeoPackage's geometry, with an envelope (least x, greatest x, least y, greatest y) or without."""
    sign = ">" if big else "<"
    flags = (not big) | (0 if box is None else 2)
    head = b"GP" + struct.pack(f"{sign}BBi", 0, flags, 4326)
    return head + (b"" if box is None else struct.pack(f"{sign}4d", *box)) + binary


def shape(kind: int, parts: Any, **layout: bool) -> bytes:
    """The blob of metres on the log's road, in degrees, with an envelope."""

    def placed(values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return degrees(values[:, :2] + ORIGIN[:2])
        return [placed(each) for each in values]

    found = placed(parts)
    flat = found
    while isinstance(flat, list):
        flat = np.concatenate(flat) if isinstance(flat[0], np.ndarray) else [ring for each in flat for ring in each]
    box = np.stack([flat.min(0), flat.max(0)], axis=1).reshape(-1)
    return blob(wkb(kind, found, **layout), box, big=layout.get("big", False))


def ring(x0: float, x1: float, y0: float, y1: float) -> np.ndarray:
    return np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]])


ISLAND = ring(150.0, 152.0, -1.0, 1.0)


def write_map(log: Log, path: Path) -> None:
    """Lanes 101 and 103, the connector 102 between 101 and a lane that is not there; the road in three areas."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    lanes = {each.id: each for each in log.features if each.kind == LANE_STREET}
    paths = [
        (
            number,
            shape(2, lane.points, z=lane.id == 103),
            *((None, 102.0) if lane.id == 102 else (float(lane.id), None)),
        )
        for number, lane in enumerate(lanes.values(), 1)
    ]
    far = np.array([[5000.0, 0.0], [5100.0, 0.0]])
    paths += [(9, shape(2, far), 120.0, None), (10, None, 121.0, None)]
    line = np.array([[0.0, 0.0], [200.0, 0.0]])
    layers = {
        "baseline_paths": ("lane_fid REAL, lane_connector_fid REAL", paths),
        "lanes_polygons": (
            "lane_fid INTEGER, speed_limit_mps REAL, lane_type_fid INTEGER",
            [(101, None, 101, 20.1168, 0), (103, None, 103, None, 0), (120, None, 120, 5.0, 1)],
        ),
        "lane_connectors": (
            "exit_lane_fid INTEGER, entry_lane_fid INTEGER, speed_limit_mps REAL",
            [(102, None, 101, 120, 20.1168)],
        ),
        "boundaries": (
            "boundary_type_fid INTEGER",
            [(31, shape(2, line), 2), (32, shape(2, line), 3), (33, shape(2, line + [0, 1.75], big=True), 0)],
        ),
        "crosswalks": ("intersection_fids TEXT", [(41, shape(3, [ring(121, 124, -3.5, 3.5)]), "")]),
        "stop_polygons": (
            "stop_polygon_type_fid INTEGER",
            [(51, shape(3, [ring(98, 100, -3.5, 0)]), 1), (52, shape(3, [ring(98, 100, -3.5, 0)]), 2)],
        ),
        "road_segments": ("creator_id TEXT", [(61, shape(3, [ring(0, 100, -3.5, 3.5)[::-1]]), "")]),
        "intersections": ("intersection_type_fid INTEGER", [(71, shape(6, [[ring(100, 160, -3.5, 3.5), ISLAND]]), 1)]),
        "generic_drivable_areas": ("creator_id TEXT", [(81, shape(3, [ring(150, 200, -3.5, 3.5), ISLAND]), "")]),
    }
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA application_id = 0x47504B47")
        db.executescript(
            "CREATE TABLE gpkg_spatial_ref_sys (srs_name TEXT, srs_id INTEGER PRIMARY KEY, organization TEXT,"
            " organization_coordsys_id INTEGER, definition TEXT, description TEXT);"
            "CREATE TABLE gpkg_geometry_columns (table_name TEXT, column_name TEXT, geometry_type_name TEXT,"
            " srs_id INTEGER, z TINYINT, m TINYINT);"
            "CREATE TABLE meta (fid INTEGER PRIMARY KEY, key TEXT, value TEXT);"
            "INSERT INTO gpkg_spatial_ref_sys VALUES ('WGS 84', 4326, 'EPSG', 4326, '', '');"
            f"INSERT INTO meta VALUES (1, 'mapName', '{CITY}'), (2, 'projectedCoordSystem', 'epsg:{EPSG}');"
        )
        for name, (columns, rows) in layers.items():
            db.execute(f"CREATE TABLE {name} (fid INTEGER PRIMARY KEY, geom BLOB, {columns})")
            db.execute("INSERT INTO gpkg_geometry_columns VALUES (?, 'geom', 'GEOMETRY', 4326, 0, 0)", (name,))
            db.executemany(f"INSERT INTO {name} VALUES ({','.join('?' * len(rows[0]))})", rows)
