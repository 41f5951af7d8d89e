"""SQLite files that others made, and the shapes in GeoPackages: read-only, without trust, with Python's own sqlite3.

Sources: sqlite.org/c3ref, the OGC GeoPackage encoding standard 1.3 (clause 2.1.3: the blob of a geometry), OGC 06-103r4
(well-known binary). A file may hold views, triggers, loops of pages, columns that it computes and defaults that no row
stores; so only real tables without computed columns are read, and the time, the rows and the bytes of text that a file
can cost are bounded by its size.

Projection of longitude and latitude to metres: the universal transverse Mercator projection (UTM) on WGS 84, by
Krueger's series in the third flattening n, to n^4, as in Karney, "Transverse Mercator with an accuracy of a few
nanometers", 2011 (arXiv 1002.1417), equations 7 to 12 and 35. The remainder within a zone is far below a millimetre.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from longhaul.driving.datasets.log import Malformed

MAGIC = b"SQLite format 3\x00"
APPLICATION = slice(68, 72)
"""Offset in a file's head of its application's id: "GPKG" in a GeoPackage."""

LONGEST_VALUE = 1 << 26
"""Bytes of one text or blob."""

FEWEST_STEPS, STEPS_PER_BYTE = 20_000_000, 100
"""Instructions of SQLite's machine that a file of no bytes may cost, and how many more for each byte."""

STEPS_PER_CALL, ROWS_PER_CALL = 100_000, 8192

ENVELOPES = {0: 0, 1: 4, 2: 6, 3: 6, 4: 8}
"""Number of doubles of envelope that follow a geometry's head, by its code."""

POINT, LINE, POLYGON, MULTI = 1, 2, 3, (4, 5, 6)

BROKEN = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)
"""Errors that sqlite3 raises for damaged files; UnicodeError where its own message quotes the damage."""

Shape = list[np.ndarray]
"""A line or a point as one array [P, 2]; a polygon as its rings: the outline, then its holes."""


def connect(path: Path) -> sqlite3.Connection:
    """The database at `path`, to be read; `Malformed` where it is none. Close it."""
    try:
        size = path.stat().st_size
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    except (OSError, *BROKEN) as error:
        raise Malformed(f"it cannot be opened: {error}") from error
    connection.text_factory = lambda data: data.decode(errors="replace")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    left = (FEWEST_STEPS + STEPS_PER_BYTE * size) // STEPS_PER_CALL

    def tired() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    connection.set_progress_handler(tired, STEPS_PER_CALL)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        tables(connection)
    except (*BROKEN, Malformed) as error:
        connection.close()
        raise Malformed(f"it is no usable SQLite file: {error}") from error
    return connection


def tables(connection: sqlite3.Connection) -> set[str]:
    """The names of the tables that hold rows of their own."""
    try:
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchmany(10_000)
    except BROKEN as error:
        raise Malformed(f"its list of tables cannot be read: {error}") from error
    return {str(name) for name, sql in found if not str(sql).upper().lstrip().startswith("CREATE VIRTUAL")}


def rows(connection: sqlite3.Connection, names: Sequence[str], query: str) -> Iterator[list[tuple]]:
    """Rows of a query on the tables `names`, some thousand at a time; `Malformed` where one is missing or damaged."""
    missing = set(names) - tables(connection)
    if missing:
        raise Malformed(f"it has no table {', '.join(sorted(missing))}")
    try:
        for name in names:
            about = connection.execute("SELECT name FROM pragma_table_xinfo(?) WHERE hidden > 1", (name,)).fetchone()
            if about is not None:
                raise Malformed(f"table {name} computes its column {about[0]}; such tables are not read")
        (pages,), (page,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        room = 2 * pages * page  # a stored row takes a byte, and more; a join repeats the other table's names
        part: list[tuple] = []
        for row in connection.execute(query):
            room -= 1 + sum([len(value) for value in row if value.__class__ in (str, bytes)])
            if room < 0:
                raise Malformed(f"table {names[0]} has more rows or text than the file has bytes")
            part.append(row)
            if len(part) == ROWS_PER_CALL:
                yield part
                part = []
        if part:
            yield part
    except BROKEN as error:
        raise Malformed(f"table {names[0]} cannot be read: {error}") from error


def layers(connection: sqlite3.Connection) -> dict[str, tuple[str, int]]:
    """The layers of a GeoPackage that have shapes: name -> (column of the shapes, EPSG number of their coordinates)."""
    systems: dict[int, int] = {}
    query = "SELECT srs_id, organization, organization_coordsys_id FROM gpkg_spatial_ref_sys"
    for part in rows(connection, ["gpkg_spatial_ref_sys"], query):
        systems |= {key: number for key, owner, number in part if str(owner).upper() == "EPSG"}
    found: dict[str, tuple[str, int]] = {}
    query = "SELECT table_name, column_name, srs_id FROM gpkg_geometry_columns"
    for part in rows(connection, ["gpkg_geometry_columns"], query):
        found |= {str(table): (str(column), systems.get(key, key)) for table, column, key in part}
    return found


def envelope(blob: bytes) -> tuple[float, float, float, float] | None:
    """Least x, greatest x, least y, greatest y of a geometry, where its head has them."""
    _, order, code = _head(blob)
    return struct.unpack_from(f"{order}4d", blob, 8) if code else None


def shapes(blob: bytes) -> list[Shape]:
    """The points, lines or polygons of a geometry; none where it is empty. z and m are left out."""
    start, _, _ = _head(blob)
    if blob[3] & 0x10:
        return []
    found, _ = _shapes(blob, start, 0)
    return found


def _head(blob: bytes) -> tuple[int, str, int]:
    """-> (where the well-known binary begins, byte order, code of the envelope)."""
    if not isinstance(blob, bytes) or len(blob) < 8 or blob[:2] != b"GP":
        raise Malformed("a shape does not begin as a GeoPackage's")
    code = blob[3] >> 1 & 7
    if code not in ENVELOPES or len(blob) < 8 + 8 * ENVELOPES[code]:
        raise Malformed(f"a shape's envelope, of kind {code}, is cut off or unknown")
    return 8 + 8 * ENVELOPES[code], "<" if blob[3] & 1 else ">", code


def _shapes(blob: bytes, at: int, depth: int) -> tuple[list[Shape], int]:
    """-> (what the well-known binary at byte `at` holds, where it ends)."""
    if at + 5 > len(blob) or blob[at] > 1:
        raise Malformed("a shape is cut off, or its byte order is unknown")
    order = "<" if blob[at] else ">"
    (kind,) = struct.unpack_from(f"{order}I", blob, at + 1)
    at += 5
    # z and m: as flags in the older way, as thousands in the newer one
    width = 2 + (kind >> 31 & 1) + (kind >> 30 & 1) + {1: 1, 2: 1, 3: 2}.get((kind & 0xFFFFFFF) // 1000, 0)
    kind = (kind & 0xFFFFFFF) % 1000
    if kind in (POINT, LINE):
        count, at = (1, at) if kind == POINT else _count(blob, at, order)
        points, at = _points(blob, at, order, count, width)
        return [[points]], at
    if kind == POLYGON:
        rings, (parts, at) = [], _count(blob, at, order)
        for _ in range(parts):
            count, at = _count(blob, at, order)
            points, at = _points(blob, at, order, count, width)
            rings.append(points)
        return [rings] if rings else [], at
    if kind in MULTI and depth == 0:
        found: list[Shape] = []
        parts, at = _count(blob, at, order)
        for _ in range(parts):
            part, at = _shapes(blob, at, 1)
            found += part
        return found, at
    raise Malformed(f"a shape is of kind {kind}; points, lines and polygons are known")


def _count(blob: bytes, at: int, order: str) -> tuple[int, int]:
    """-> (a number of parts, where they begin); each takes four bytes or more."""
    if at + 4 > len(blob):
        raise Malformed("a shape is cut off")
    (count,) = struct.unpack_from(f"{order}I", blob, at)
    if 4 * count > len(blob) - at - 4:
        raise Malformed(f"a shape has {count} parts, more than its bytes can hold")
    return count, at + 4


def _points(blob: bytes, at: int, order: str, count: int, width: int) -> tuple[np.ndarray, int]:
    end = at + 8 * count * width
    if end > len(blob):
        raise Malformed(f"a shape of {count} points is cut off")
    values = np.frombuffer(blob, f"{order}f8", count * width, at).reshape(count, width)
    return values[:, :2].astype(np.float64), end


WGS84 = (6378137.0, 1 / 298.257223563)
"""Equatorial radius, metres, and flattening."""

SCALE, EASTING, NORTHING_SOUTH = 0.9996, 500_000.0, 10_000_000.0
"""Scale on the central meridian, and what is added: to x, and to y on the southern half."""

ZONES_NORTH, ZONES_SOUTH = 32600, 32700
"""EPSG numbers of the zones of WGS 84 / UTM are these and the zone, 1 to 60."""


def utm(longitude: np.ndarray, latitude: np.ndarray, epsg: int) -> tuple[np.ndarray, np.ndarray]:
    """Easting and northing, m, of places in degrees, in EPSG:`epsg`; `ValueError` if that is no zone of UTM."""
    south = ZONES_SOUTH < epsg <= ZONES_SOUTH + 60
    zone = epsg - (ZONES_SOUTH if south else ZONES_NORTH)
    if not 1 <= zone <= 60:
        raise ValueError(f"EPSG:{epsg} is no zone of UTM on WGS 84 (EPSG:32601 to 32660, 32701 to 32760)")
    meridian = 6.0 * zone - 183.0
    away = (np.asarray(longitude, np.float64) - meridian + 180.0) % 360.0 - 180.0
    x, y = transverse_mercator(np.radians(away), np.radians(latitude), *WGS84)
    return EASTING + SCALE * x, (NORTHING_SOUTH if south else 0.0) + SCALE * y


def transverse_mercator(
    away: np.ndarray, latitude: np.ndarray, radius: float, flattening: float
) -> tuple[np.ndarray, np.ndarray]:
    """x, y, metres, of places `away` radians east of the central meridian, with scale 1 on it."""
    n = flattening / (2.0 - flattening)
    series = (
        n / 2 - n**2 * 2 / 3 + n**3 * 5 / 16 + n**4 * 41 / 180,
        n**2 * 13 / 48 - n**3 * 3 / 5 + n**4 * 557 / 1440,
        n**3 * 61 / 240 - n**4 * 103 / 140,
        n**4 * 49561 / 161280,
    )
    eccentricity = 2.0 * np.sqrt(n) / (1.0 + n)
    sine = np.sin(latitude)
    # the tangent of the conformal latitude
    conformal = np.sinh(np.arctanh(sine) - eccentricity * np.arctanh(eccentricity * sine))
    north = np.arctan2(conformal, np.cos(away))
    east = np.arctanh(np.sin(away) / np.hypot(1.0, conformal))
    x, y = east, north
    for order, factor in enumerate(series, 1):
        x = x + factor * np.cos(2 * order * north) * np.sinh(2 * order * east)
        y = y + factor * np.sin(2 * order * north) * np.cosh(2 * order * east)
    size = radius / (1.0 + n) * (1.0 + n**2 / 4 + n**4 / 64)
    return size * x, size * y
