"""Packed shards: files of many compiled scenarios, read through a memory map, checked record by record.

A shard (`*.lhs`, little-endian throughout):

    head      40 bytes: magic, version (uint32), scenarios (uint32), index offset, index bytes (uint64), checksum of the
              index, 4 bytes of zeros, checksum of the head's other bytes
    records   one behind the other, as `pack` writes them
    index     of each scenario: offset (uint64), bytes, checksum (uint32), dt (float64), who is controlled (an index
              into `CONTROLS`), sizes (uint32 each, as `LETTERS` names them), extents (likewise, as `Extents` does);
              then the ids, a JSON list in UTF-8

Checksums are CRC-32C. A file is written whole beside its place and then renamed, so that a shard under its own name is
complete, whatever was killed. The same scenarios give the same bytes. There is no appending: shards are many and small.

A record is a compiled scenario as whole numbers of small units, as differences, byte by byte, under zlib. Numbers are
stored as 16-bit integers, or as 32-bit ones where a scenario is larger than these hold; never as short floats. What a
round trip may change, beside float32's own rounding:

    pose, route, drawing: x, y        0.5 cm        units of 1 cm
    velocity                          0.5 cm/s      1 cm/s
    pose, route: heading              0.00005 rad   2 pi / 65536 rad
    size, route_length, expert_s      0.5 mm        1 mm
    everything else                   nothing

Positions are the coarsest: the change of a pose from step to step is off by up to 1 cm, so that accelerations are
better taken from `velocity`. A record that is unpacked and packed again has the same bytes.

The differences follow the way in which a column is smooth (along time, along a route, the distance field along both its
axes) and are folded, so that small ones of either sign become small numbers; a column's low bytes stand before its
high ones. The field takes an eighth of its size so. Whether the bytes are intact the checksum knows; but whatever they
are, `unpack` gives a scenario or says `Malformed`, in bounded memory.

Example:
    shard.write(path, scenarios)
    opened = shard.open(path)
    opened.ids[0], opened[0]
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from longhaul.driving.datasets.log import BadData, Malformed
from longhaul.driving.datasets.readers import SHARD_MAGIC, SHARD_SUFFIX
from longhaul.driving.scenario import from_log
from longhaul.driving.scenario import scenario as scenarios
from longhaul.driving.scenario.bank import Extents, extents
from longhaul.driving.scenario.lane_graph import (
    FINE,
    HALF_MOST,
    JUNCTION,
    LIMIT_INFERRED,
    LIMIT_MOST,
    LIMIT_UNIT,
    MOST_BLOCKS,
    MOST_ROWS,
    NEAREST,
    look_around,
)
from longhaul.driving.scenario.scenario import NO_ROAD, ONWARD, Road, Scenario
from longhaul.runtime import bounded_json, files

LEVEL = 6
"""zlib's: 9 takes 1 % less room and several times as long."""

LARGEST = 1 << 26
"""Bytes of a record before compression: far above any scenario; it bounds what damaged data can ask of the memory."""

MOST_STEPS = 1 << 16

FARTHEST, SLOWEST = 1e6, 3600.0
"""Metres from a scenario's origin, and seconds of a step, beyond which a record is damaged."""

METRE, MILLI, TURN = 0.01, 0.001, 2 * math.pi / 65536


class Column(NamedTuple):
    """Storage of an array; letters of `shape` as in `Scenario`, M rows, V lanes, B blocks with Q parts and Y rows by
    X columns of cells of the road, K ways after the log's with E points together, and G polylines with P points drawn.
    """

    shape: str
    dtype: str
    unit: tuple[float, ...] = ()  # of each place of the last axis, or of all; () stores the bytes as they are
    order: tuple[int, ...] = ()  # the array's axes as they are stored, the smoothest last; () as they are
    along: tuple[int, ...] = ()  # stored axes along which differences are taken


COLUMNS = {
    "pose": Column("TN3", "<f4", (METRE, METRE, TURN), (2, 1, 0), (2,)),
    "velocity": Column("TN2", "<f4", (METRE,), (2, 1, 0), (2,)),
    "present": Column("TN", "?", (), (1, 0)),
    "size": Column("N2", "<f4", (MILLI,), (1, 0)),
    "kind": Column("N", "|i1"),
    "controlled": Column("A", "<i4"),
    "route": Column("AR3", "<f4", (METRE, METRE, TURN), (0, 2, 1), (2,)),
    "route_length": Column("A", "<f4", (MILLI,)),
    "route_points": Column("A", "<i4"),
    "expert_s": Column("AT", "<f4", (MILLI,), (), (1,)),
    "light_s": Column("AL", "<f4"),
    "light_state": Column("ALT", "|i1"),
    "field": Column("HW", "<i2", (1.0,), (), (0, 1)),
    "field_origin": Column("2", "<f4"),
    "road_origin": Column("2", "<f4"),
    "road_place": Column("M2", "<i2", (1.0,), (1, 0), (1,)),
    "road_half": Column("M2", "<i2", (1.0,), (1, 0), (1,)),
    "road_kind": Column("M", "|i1"),
    "road_lane": Column("M", "<i2", (1.0,), (), (0,)),
    "road_lane_limit": Column("V", "<f4", (LIMIT_UNIT,)),
    "road_lane_flags": Column("V", "|i1"),
    "road_corner": Column("2", "<f4"),
    "road_cells": Column("B2", "<i2", (1.0,), (1, 0), (1,)),
    "road_directory": Column("YX", "<i2", (1.0,), (), (1,)),
    "road_near_lanes": Column("Q9", "<i2", (1.0,)),
    "onward_of": Column("K", "<i2"),
    "onward": Column("E2", "<f4", (METRE,), (1, 0), (1,)),
    "drawn_kind": Column("G", "<i4"),
    "drawn_count": Column("G", "<i4"),
    "drawn": Column("P2", "<f4", (METRE,), (1, 0), (1,)),
}
"""The arrays of a record in their order. Another table is another version of the format, `VERSION`."""

LETTERS = "TNARLHWMVBYXQKEGP"

STORED = tuple(name for name in Road._fields if name != "near")
"""Stored fields of a road; the rest follows from it."""

CONTROLS = (*scenarios.CONTROLS, from_log.CHOSEN)
"""A record has the number of `Scenario.control` here."""

RECORD_HEAD = struct.Struct(f"<{len(LETTERS)}I{len(Extents._fields)}IIdIIH")
"""Sizes in the order of `LETTERS`, extents, who is controlled, dt, bytes before compression, a bit for each column of
32 bits, bytes of the id."""

LONGEST_ID = 1 << 12


def pack(scenario: Scenario) -> bytes:
    """The record of `scenario`. `ValueError` where its arrays do not fit together or hold what is not finite."""
    arrays = {name: np.asarray(getattr(scenario, name)) for name in COLUMNS if name in Scenario._fields}
    arrays |= {f"road_{name}": np.asarray(getattr(scenario.road, name)) for name in STORED}
    arrays["road_near_lanes"] = arrays["road_near_lanes"].reshape(-1, NEAREST)
    lines = [np.asarray(points, np.float32).reshape(-1, 2) for _, points in scenario.drawing]
    arrays["drawn_kind"] = np.array([kind for kind, _ in scenario.drawing], np.int32)
    arrays["drawn_count"] = np.array([len(line) for line in lines], np.int32)
    arrays["drawn"] = np.concatenate([np.zeros((0, 2), np.float32), *lines])
    sizes: dict[str, int] = {"T": scenario.steps}
    wide, parts = 0, []
    for place, (name, column) in enumerate(COLUMNS.items()):
        array = arrays[name]
        shape = [sizes.setdefault(x, n) if x in LETTERS else int(x) for x, n in zip(column.shape, array.shape)]
        if list(array.shape) != shape or array.ndim != len(column.shape):
            raise ValueError(
                f"scenario {scenario.id}: {name} has shape {array.shape}, not {column.shape}, {tuple(shape)}: "
                "compile it again"
            )
        if column.unit and not np.isfinite(array).all():
            raise ValueError(f"scenario {scenario.id}: {name} is not finite everywhere: leave this scenario out")
        try:
            part, is_wide = _packed(array, column)
        except OverflowError as error:
            raise ValueError(f"scenario {scenario.id}: {name} {error}: leave this scenario out") from error
        parts.append(part)
        wide |= is_wide << place
    body = b"".join(parts)
    if len(body) > LARGEST:
        raise ValueError(f"scenario {scenario.id} has {len(body)} bytes, above {LARGEST}: compile a shorter horizon")
    if scenario.control not in CONTROLS:
        raise ValueError(f"scenario {scenario.id}: control is {scenario.control!r}, not one of {', '.join(CONTROLS)}")
    identity = scenario.id.encode(errors="replace")[:LONGEST_ID]
    unit = np.array(COLUMNS["pose"].unit)
    known = extents(scenario, (np.rint(arrays["pose"] / unit) * unit).astype(np.float32))
    about = CONTROLS.index(scenario.control), scenario.dt, len(body), wide, len(identity)
    head = RECORD_HEAD.pack(*(sizes[letter] for letter in LETTERS), *known, *about)
    return head + identity + zlib.compress(body, LEVEL)


def _packed(array: np.ndarray, column: Column) -> tuple[bytes, bool]:
    """-> (the bytes of one column, whether its numbers have 32 bits)."""
    if column.unit:
        array = np.rint(array / np.array(column.unit))
    if column.order:
        array = array.transpose(column.order)
    if column.dtype == "?":
        return np.packbits(array.astype(bool)).tobytes(), False
    if not column.unit:
        return np.ascontiguousarray(array, column.dtype).tobytes(), False
    low, high = array.min(initial=0), array.max(initial=0)
    if low < -(1 << 31) or high >= 1 << 31:
        raise OverflowError(f"has {max(-low, high):g} units of {column.unit[0]:g}; 32 bits hold {1 << 31}")
    wide = bool(low < -(1 << 15) or high >= 1 << 15)
    values = array.astype(np.int64).astype("<u4" if wide else "<u2")
    for axis in column.along:  # modulo 2^16 or 2^32, which summing takes back exactly
        values = np.diff(values, axis=axis, prepend=values.dtype.type(0))
    folded = (values << 1) ^ (0 - (values >> (31 if wide else 15)))
    return folded.reshape(-1, 1).view(np.uint8).T.tobytes(), wide


def unpack(record: bytes) -> Scenario:
    """The scenario of a record; `Malformed` where it is none."""
    if len(record) < RECORD_HEAD.size:
        raise Malformed(f"it has {len(record)} bytes, fewer than a record's head")
    *counts, control, dt, total, wide, letters = RECORD_HEAD.unpack_from(record)
    if control >= len(CONTROLS):
        raise Malformed(f"it has agents that are controlled in a way that does not exist, {control}")
    sizes = dict(zip(LETTERS, counts))
    if not (2 <= sizes["T"] <= MOST_STEPS and sizes["N"] >= 1 and sizes["A"] >= 1 and sizes["R"] >= 1):
        raise Malformed(f"it has {sizes['T']} steps, {sizes['N']} agents, {sizes['A']} controlled, {sizes['R']} points")
    shapes = {
        name: tuple(sizes[x] if x in LETTERS else int(x) for x in column.shape) for name, column in COLUMNS.items()
    }
    lengths = []  # in bytes, before compression
    for place, (name, column) in enumerate(COLUMNS.items()):
        width = (4 if wide >> place & 1 else 2) if column.unit else np.dtype(column.dtype).itemsize
        count = math.prod(shapes[name])
        lengths.append(-(-count // 8) if column.dtype == "?" else count * width)
    if sum(lengths) != total or total > LARGEST:
        raise Malformed(f"its arrays have {sum(lengths)} bytes; it says {total}, and {LARGEST} are possible")
    identity = record[RECORD_HEAD.size : RECORD_HEAD.size + letters].decode(errors="ignore")
    body = _inflate(record[RECORD_HEAD.size + letters :], total)
    ends = np.cumsum([0, *lengths]).tolist()
    arrays = {
        name: _unpacked(body[begin:end], column, shapes[name], bool(wide >> place & 1))
        for place, ((name, column), (begin, end)) in enumerate(zip(COLUMNS.items(), pairwise(ends)))
    }
    _check(arrays, dt)
    kinds, count, drawn = (arrays.pop(name) for name in ("drawn_kind", "drawn_count", "drawn"))
    lines = np.split(drawn, np.cumsum(count)[:-1]) if len(count) else []
    drawing = tuple(zip(kinds.tolist(), lines))
    arrays["road_near_lanes"] = arrays["road_near_lanes"].reshape(-1, FINE * FINE, NEAREST)
    road = NO_ROAD._replace(**{name: arrays.pop(f"road_{name}") for name in STORED})
    road, chosen = look_around(road, road.near_lanes), CONTROLS[control]
    return Scenario(id=identity, steps=sizes["T"], dt=dt, drawing=drawing, road=road, control=chosen, **arrays)


def _inflate(data: bytes, total: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(data, total + 1)  # one more, so that what is too long is seen and goes no further
    except zlib.error as error:
        raise Malformed(f"its compressed part is damaged: {error}") from error
    if len(body) != total or not stream.eof or stream.unused_data:
        raise Malformed(f"its compressed part does not hold {total} bytes")
    return body


def _unpacked(data: bytes, column: Column, shape: tuple[int, ...], wide: bool) -> np.ndarray:
    order = column.order or tuple(range(len(shape)))
    stored = tuple(shape[axis] for axis in order)
    dtype = np.dtype(column.dtype).newbyteorder("=")
    if column.dtype == "?":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=math.prod(shape))
        values = bits.view(bool).reshape(stored)
    elif not column.unit:
        values = np.frombuffer(data, column.dtype).reshape(stored)
    else:
        planes = np.frombuffer(data, np.uint8).reshape(4 if wide else 2, -1)
        folded = np.ascontiguousarray(planes.T).view("<u4" if wide else "<u2").reshape(stored)
        values = (folded >> 1) ^ (0 - (folded & 1))
        for axis in column.along:
            values = np.cumsum(values, axis=axis, dtype=values.dtype)
        values = values.view("<i4" if wide else "<i2")
    values = values.transpose(np.argsort(order))
    if dtype.kind == "f" and column.unit:
        values = values * np.array(column.unit)
    return np.ascontiguousarray(values, dtype) if values.dtype != dtype else values.copy()


def _check(arrays: dict[str, np.ndarray], dt: float) -> None:
    """Checks of what the simulator relies on, so that no index of damaged data leads anywhere."""
    agents, points = len(arrays["kind"]), arrays["route"].shape[1]
    lane, cells, directory = arrays["road_lane"], arrays["road_cells"], arrays["road_directory"]
    near = arrays["road_near_lanes"]
    for wrong, fault in [
        (not 0 < dt <= SLOWEST, f"a time step that is not above 0, and up to {SLOWEST:g} s"),
        (_outside(arrays["kind"], 0, 4), "a kind of agent that does not exist"),
        (_outside(arrays["controlled"], -1, agents - 1), "a controlled agent that does not exist"),
        (_outside(arrays["route_points"], 0, points), "a route longer than its points"),
        (_outside(arrays["light_state"], 0, 3), "a state of a light that does not exist"),
        (np.isnan(arrays["light_s"]).any(), "a light nowhere"),
        (_outside(arrays["onward_of"], 0, agents - 1), "the way of an agent that does not exist"),
        (len(arrays["onward"]) != ONWARD * len(arrays["onward_of"]), "ways of another length"),
        (not (np.abs(arrays["field_origin"]) <= FARTHEST).all(), "a distance field nowhere"),
        (not (np.abs(arrays["road_origin"]) <= FARTHEST).all(), "a road nowhere"),
        (_outside(arrays["road_half"], -HALF_MOST, HALF_MOST), "a piece of road that is too long"),
        (_outside(arrays["road_kind"], 0, 63), "a kind of road that does not exist"),
        (_outside(lane, -1, len(arrays["road_lane_limit"]) - 1), "a lane that does not exist"),
        (len(lane) > MOST_ROWS or (np.diff(lane >= 0) & (lane[1:] >= 0)).any(), "lanes that are out of order"),
        (_outside(arrays["road_lane_limit"], 0.0, LIMIT_UNIT * LIMIT_MOST + 0.01), "a speed limit that cannot be"),
        (len(cells) > MOST_BLOCKS or _outside(directory, 0, max(len(cells) - 1, 0)), "a block that does not exist"),
        (len(near) != FINE * FINE * len(cells), "blocks without their lanes"),
        (_outside(near, -1, int((lane >= 0).sum()) - 1), "a lane near a block that does not exist"),
        (not directory.size or not (np.abs(arrays["road_corner"]) <= FARTHEST).all(), "a grid nowhere"),
        (_outside(arrays["road_lane_flags"], 0, LIMIT_INFERRED | JUNCTION), "a flag of a lane that does not exist"),
        ((arrays["drawn_count"] < 0).any(), "a polyline of fewer than 0 points"),
        (arrays["drawn_count"].sum(dtype=np.int64) != len(arrays["drawn"]), "polylines that miss points"),
    ]:
        if wrong:
            raise Malformed(f"it has {fault}")


def _outside(values: np.ndarray, low: float, high: float) -> bool:
    return bool((values < low).any() or (values > high).any())


VERSION = 4
"""Version of the file and of the records: grows with every change of `COLUMNS`."""

HEAD = struct.Struct("<8sIIQQI")
HEAD_BYTES = HEAD.size + 4

ENTRY = np.dtype(
    [
        *(("offset", "<u8"), ("length", "<u4"), ("crc", "<u4"), ("dt", "<f8"), ("control", "<u4")),
        *(("sizes", "<u4", (len(LETTERS),)), ("extents", "<u4", (len(Extents._fields),))),
    ]
)

REMEDY = "convert the logs again"


@dataclass(frozen=True)
class Shard:
    """An open shard: `len(shard)`, `shard[i]`, `shard.ids`. May be read by several threads at once."""

    path: Path
    ids: tuple[str, ...]
    entries: np.ndarray  # ENTRY [scenarios]
    view: mmap.mmap

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Scenario:
        """The scenario `index`, with arrays of its own; `BadData` where its record is damaged."""
        record = self.record(index)
        try:
            return unpack(record)
        except Malformed as error:
            raise BadData(f"{self.path}: record {index} of {len(self)}: {error}; {REMEDY}") from error

    def __iter__(self) -> Iterator[Scenario]:
        return (self[index] for index in range(len(self)))

    def record(self, index: int) -> bytes:
        """Bytes of record `index`, their checksum verified. Raises IndexError; BadData for a wrong checksum."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path}: scenario {index} of {len(self)}")
        index %= len(self)
        offset, length, crc = (int(self.entries[name][index]) for name in ("offset", "length", "crc"))
        record = self.view[offset : offset + length]
        self.view.madvise(mmap.MADV_DONTNEED)  # pages stay in the system's cache, and leave this process's memory
        if google_crc32c.value(record) != crc:
            raise BadData(
                f"{self.path}: record {index} of {len(self)} at byte {offset}: the checksum of its {length} bytes is "
                f"wrong: the file is damaged; copy it again, or {REMEDY}"
            )
        return record

    def close(self) -> None:
        """End of the memory map; the shard can't be read any more."""
        self.view.close()


def write(path: Path, scenarios: Iterable[Scenario]) -> int:
    """Size in bytes of a new shard of `scenarios`. `ValueError` where one can't be stored."""
    return write_records(path, ((scenario.id, pack(scenario)) for scenario in scenarios))


def write_records(path: Path, records: Iterable[tuple[str, bytes]]) -> int:
    """Shard of (id, record) pairs that are packed already; see `write`."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(bytes(HEAD_BYTES))
            ids, entries, offset = [], [], HEAD_BYTES
            for identity, record in records:
                ids.append(identity.encode(errors="replace").decode())
                *counts, control, dt, _, _, _ = RECORD_HEAD.unpack_from(record)
                sizes, known = counts[: len(LETTERS)], counts[len(LETTERS) :]
                entries.append((offset, len(record), google_crc32c.value(record), dt, control, sizes, known))
                file.write(record)
                offset += len(record)
            index = np.array(entries, ENTRY).tobytes() + json.dumps(ids, ensure_ascii=False).encode()
            file.write(index)
            head = HEAD.pack(SHARD_MAGIC, VERSION, len(ids), offset, len(index), google_crc32c.value(index))
            file.seek(0)
            file.write(head + struct.pack("<I", google_crc32c.value(head)))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    files.sync(path.parent)
    return offset + len(index)


def open(path: Path) -> Shard:
    """The shard at `path`; `BadData` where it is none, damaged or of another version. Records are checked when read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES)
            if len(head) < HEAD_BYTES:
                raise BadData(f"{path}: has {size} bytes, fewer than a shard's head: it is cut off; {REMEDY}")
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror or error}; check the path") from error
    try:
        return Shard(path, *_index(path, head, size, view), view)
    except BaseException:
        view.close()
        raise


def _index(path: Path, head: bytes, size: int, view: mmap.mmap) -> tuple[tuple[str, ...], np.ndarray]:
    magic, version, count, offset, length, crc = HEAD.unpack_from(head)
    if magic != SHARD_MAGIC:
        raise BadData(
            f"{path}: is no shard of compiled scenarios; give a {SHARD_SUFFIX} file that `data convert` wrote"
        )
    if version != VERSION:
        raise BadData(f"{path}: is of version {version}; this program reads version {VERSION}: {REMEDY}")
    if struct.pack("<I", google_crc32c.value(head[: HEAD.size])) != head[HEAD.size :]:
        raise BadData(f"{path}: the checksum of its head is wrong: the file is damaged; copy it again, or {REMEDY}")
    if offset + length != size:
        raise BadData(f"{path}: has {size} bytes, not {offset + length}: it is cut off or grown; copy it again")
    index = view[offset : offset + length]
    if google_crc32c.value(index) != crc:
        raise BadData(f"{path}: the checksum of its index is wrong: the file is damaged; copy it again, or {REMEDY}")
    try:
        entries = np.frombuffer(index, ENTRY, count)
        ids = bounded_json.parse(index[count * ENTRY.itemsize :])
    except ValueError as error:
        raise BadData(f"{path}: its index is no index: {error}; {REMEDY}") from error
    named = isinstance(ids, list) and len(ids) == count and all(isinstance(each, str) for each in ids)
    # the offsets of a shard follow from its lengths, which leaves nothing that could point elsewhere
    ends = HEAD_BYTES + np.cumsum(entries["length"], dtype=np.uint64)
    if not named or (entries["offset"] != ends - entries["length"]).any() or (count and int(ends[-1]) != offset):
        raise BadData(f"{path}: its index does not fit to its records; {REMEDY}")
    return tuple(ids), entries
