"""Damaged and hostile inputs of every format, each following from a seed: what `benchmarks/fuzz.py` feeds
to the readers.

Half of the damage is to bytes (bits, cuts, blocks that are swapped, doubled or lost, lengths far too large), half to
what the bytes mean: a field, a cell or a value replaced by what should not be there. Checksums are made anew, so that
they find nothing: whoever writes a file on purpose can do the same.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sqlite3
import struct
import subprocess
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from longhaul.driving.datasets import readers, womd
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.shards import shard
from tests.helpers import argoverse_files, nuplan_files
from tests.helpers import log_files as made

Files = dict[str, bytes]
"""Names within a folder and their bytes; the first one is what is read."""

KINDS = ("womd-example", "womd-scenario", "scenarionet", "gpudrive", "argoverse2", "nuplan", "shard")

STEPS, CURRENT = 12, 4

PIECES = (
    *(b"\xff" * 9 + b"\x01", b"\xff" * 8, b"\x00" * 8, b"\x7f\xf0", b"\xff\xff\xff\x7f", b"\x80" * 200),
    *(b"NaN", b"1e999", b"-1", b"[]", b"{}", b"null", b'"', b"\x80\x80\x80\x80\x10", b"[" * 5000, b'{"a":' * 3000),
)
"""Bytes that are put in somewhere."""

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e300, 1e7, 1e38, float("nan"), float("inf")),
    *("", "text", "x" * 5000, "\x1b[31m\n", "\ud800", b"\x00\xff", [], {}, [[]], [None], [1e308] * STEPS, [0] * 3),
)
"""Values that take the place of a value."""


def damage(payload: bytes, random: np.random.Generator) -> bytes:
    """One to four places of `payload` damaged."""
    data = bytearray(payload)
    for _ in range(random.integers(1, 5)):
        if not data:
            break
        where, other = (int(place) for place in random.integers(0, len(data), 2))
        size = int(random.integers(1, 200))
        match random.integers(0, 12):
            case 0 | 1 | 2 | 3:
                data[where] ^= 1 << int(random.integers(0, 8))
            case 4:
                data[where] = int(random.integers(0, 256))
            case 5:
                piece = PIECES[random.integers(0, len(PIECES))]
                data[where : where + int(random.integers(0, 2)) * len(piece)] = piece
            case 6:
                del data[where : where + size]
            case 7:
                data[where:where] = data[where : where + size]
            case 8:
                data[other:other] = data[where : where + size]
            case 9:
                data[where : where + size], data[other : other + size] = (
                    data[other : other + size],
                    data[where : where + size],
                )
            case 10:
                data[where : where + size] = bytes(random.integers(0, 256, size, np.uint8))
            case _:
                if random.integers(0, 3) == 0:
                    del data[where:]
    return bytes(data)


def damage_fields(payload: bytes, random: np.random.Generator) -> bytes:
    """One field of a Waymo message, at any depth, doubled, lost, of another value or type; lengths around it fit."""
    message = womd.parse("Example" if womd.kind_of(payload) == womd.EXAMPLE else "Scenario", payload)
    holder = message
    for _ in range(random.integers(0, 5)):
        parts = [(field, value) for field, value in holder.ListFields() if field.message_type]
        inner = [each for field, value in parts for each in (value if field.is_repeated else [value])]
        inner = [each for each in inner if each.ListFields()]
        if not inner:
            break
        holder = inner[int(random.integers(0, len(inner)))]
    known = holder.ListFields()
    field = known[int(random.integers(0, len(known)))][0]
    number = int(random.choice([field.number, field.number + 1, 1, 2, 2**28]))
    whole = holder.SerializeToString()
    match random.integers(0, 10):
        case 0:
            holder.ClearField(field.name)
        case 1 if field.is_repeated:
            del getattr(holder, field.name)[int(random.integers(0, len(getattr(holder, field.name)))) :]
        case choice:
            added: list[bytes] = [
                *(made.encode(number, whole) * count for count in (1, 200)),
                made.encode(number, int(random.integers(-(2**62), 2**62))),
                made.encode(number, float(random.choice([np.nan, np.inf, 1e308, -1e8, 0.0]))),
                made.encode(number, np.float32(random.choice([np.nan, np.inf, 1e30, -1.0]))),
                made.encode(number, b"\x80" * int(random.choice([1, 1000]))),
            ]
            with suppress(DecodeError):
                holder.MergeFromString(added[choice % len(added)])
    return message.SerializeToString()


def bomb(depth: int) -> Any:
    """A value of `depth` references that stands for 2 ** depth numbers."""
    value: Any = (0.0, 0.0)
    for _ in range(depth - 1):
        value = (value, value)
    return value


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document, containers of containers too, at most the first 40 of a list."""
    found, left, seen = [], [document], set()
    while left:
        holder = left.pop()
        if id(holder) in seen:  # a swap may have put it into itself
            continue
        seen.add(id(holder))
        keys = list(holder) if isinstance(holder, dict) else range(min(len(holder), 40))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                left.append(holder[key])
    return found


def replace_values(document: Any, random: np.random.Generator, wrong: tuple[Any, ...]) -> None:
    """One to three values of a document become what they should not be; lost, or swapped, some of them."""
    for _ in range(random.integers(1, 4)):
        found = places(document)
        if not found:
            return
        # by depth first: there are few places near the root, and many numbers
        holder, key = found[int(len(found) * random.random() ** 3)]
        other, place = found[int(random.integers(0, len(found)))]
        match random.integers(0, 8):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1:
                holder[key] = other[place]
            case 2 if isinstance(holder[key], list):
                holder[key] = holder[key] * int(random.choice([0, 2, 50]))
            case _:
                holder[key] = wrong[int(random.integers(0, len(wrong)))]


class Call:
    """Pickled as the call of a function: (function, arguments)."""

    def __init__(self, *parts: Any):
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def hostile(canary: Path) -> list[Any]:
    """Objects that would run something while they are unpickled, were they let."""

    touch = f"touch {canary}"
    inner = pickle.dumps(Call(os.system, (touch,)))
    return [
        *(Call(os.system, (touch,)), Call(eval, (f"open({str(canary)!r}, 'w')",)), Call(pickle.loads, (inner,))),
        *(Call(subprocess.Popen, (["touch", str(canary)],)), Call(getattr, ("os", "x")), Call(open, (canary, "w"))),
        *(Call(exec, (f"open({str(canary)!r}, 'w')",)), Call(np.dtype, ("O",)), Call(bytearray, (1 << 40,))),
        *(np.array([Call(os.system, (touch,))], object), Call(__import__, ("antigravity",)), np.zeros(2, "M8[s]")),
        *(Call(np.zeros, ((1 << 20, 1 << 20),)), bomb(40), bomb(22), {1, 2}, os.system, len, np.float64(3), 3j),
        *(bytearray(b"x"), (bomb(12),), [bomb(40)] * 3, {"0": bomb(40)}),
    ]


def opcodes(canary: Path) -> tuple[bytes, ...]:
    """Bits of pickle programs, to be put in anywhere."""
    touch = f"touch {canary}".encode()
    return (
        b"cos\nsystem\n(S'" + touch + b"'\ntR",
        b"(S'" + touch + b"'\nios\nsystem\n",
        b"\x8c\x02os\x8c\x06system\x93\x8c" + bytes([min(len(touch), 255)]) + touch[:255] + b"\x85R",
        b"cbuiltins\neval\n(S'1'\ntR",
        b"(cos\nsystem\nS'" + touch + b"'\no",
        *(b"c__main__\nx\n)\x81", b"\x82\x01", b"\x84\xff\xff\xff\x7f", b"Pid\n", b"Q", b"\x97", b"\x98"),
        *(b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\x96" + b"\xff" * 7 + b"\x00"),
        *(b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"2\x86" * 45, b"}2\x86s" * 30),
        *(b"(" * 3000, b"]" * 3000 + b"a" * 2999, b"\x8a\xff" + b"\x7f" * 255, b"0", b"1", b"t", b"u", b"b", b"R"),
        b"\x95" + struct.pack("<Q", 1 << 62),
    )


def damage_pickle(random: np.random.Generator, canary: Path) -> bytes:
    """A ScenarioNet pickle with foreign names, wrong values or broken bytes."""
    document = made.scenarionet(made.make_log(STEPS, CURRENT))
    choice = int(random.integers(0, 4))
    protocol = int(random.integers(2, 6))
    if choice < 2:
        replace_values(document, random, tuple(hostile(canary)) if choice else WRONG)
    try:
        data = pickle.dumps(document, protocol)
    except (OverflowError, TypeError, UnicodeError, pickle.PicklingError):
        return pickle.dumps({"tracks": {}, "map_features": bomb(30)})
    if choice == 2:
        return damage(data, random)
    if choice == 3:
        pieces = opcodes(canary)
        where = int(random.integers(2, len(data)))
        data = data[:where] + pieces[int(random.integers(0, len(pieces)))] + data[where:]
    return data


def damage_json(document: Any, random: np.random.Generator) -> bytes:
    if random.integers(0, 2):
        replace_values(document, random, (*(each for each in WRONG if not isinstance(each, bytes)), 10**400))
    try:
        text = json.dumps(document).encode()
    except ValueError:  # lists that hold themselves, after a swap
        return b'{"objects": ' + b"[" * 100_000
    return text if random.integers(0, 2) else damage(text, random)


def damage_rows(data: bytes, random: np.random.Generator) -> bytes:
    """A cell, a row, a table or a view of an SQLite file changed; or its bytes."""
    if random.integers(0, 2):
        return damage(data, random)
    with closing(sqlite3.connect(":memory:")) as db:
        db.deserialize(data)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(random.integers(1, 4)):
            table = tables[int(random.integers(0, len(tables)))]
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            if not columns:
                continue
            column = columns[int(random.integers(0, len(columns)))]
            values: tuple[Any, ...] = (None, -1, 2**62, 1e308, float("inf"), "text", b"\x00\xff", "x" * 5000, 0, 1e7)
            wrong = values[int(random.integers(0, len(values)))]
            (rows,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
            one = f"SELECT rowid FROM {table} LIMIT 1 OFFSET {int(random.integers(0, max(rows, 1)))}"
            try:
                match random.integers(0, 8):
                    case 0:
                        db.execute(f"DELETE FROM {table} WHERE rowid IN ({one})")
                    case 1:
                        db.execute(f"ALTER TABLE {table} RENAME TO gone")
                        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
                        db.execute(f"CREATE VIEW {table} AS {endless}")
                        tables.remove(table)
                    case 2:
                        db.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
                    case 3:
                        db.execute(f"UPDATE {table} SET {column} = ?", (wrong,))
                    case choice:
                        blob = db.execute(f"SELECT {column} FROM {table} WHERE rowid IN ({one})").fetchone()
                        if choice == 4 and blob and isinstance(blob[0], bytes):
                            wrong = damage(blob[0], random)
                        db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid IN ({one})", (wrong,))
            except sqlite3.Error:
                continue
        db.commit()
        return bytes(db.serialize())


def damage_table(data: bytes, random: np.random.Generator) -> bytes:
    """A column of a parquet lost, of another type, or with another value; or its bytes damaged."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    if random.integers(0, 2):
        return damage(data, random)
    columns = parquet.read_table(io.BytesIO(data), use_threads=False).to_pydict()
    names = list(columns)
    for _ in range(random.integers(1, 3)):
        name = names[int(random.integers(0, len(names)))]
        wrong = (None, -1, 2**40, 1e308, float("nan"), "text", b"\xff", [1], 1e7, {"a": 1})[int(random.integers(0, 10))]
        match random.integers(0, 5):
            case 0:
                columns.pop(name, None)
            case 1:
                columns[name] = [wrong] * len(columns.get(name, [0]))
            case 2:
                columns = {key: values * 2 for key, values in columns.items()}
            case _:
                if columns.get(name):
                    columns[name][int(random.integers(0, len(columns[name])))] = wrong
    buffer = io.BytesIO()
    try:
        parquet.write_table(pa.table(columns), buffer)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return damage(data, random)
    return buffer.getvalue()


def damage_record(record: bytes, random: np.random.Generator) -> bytes:
    """A packed scenario: its head, its compressed part, or what is compressed."""
    choice = random.integers(0, 3)
    if choice == 0:
        return damage(record, random)
    size = shard.RECORD_HEAD.size
    if choice == 1:
        return damage(record[:size], random) + record[size:]
    letters = struct.unpack_from("<H", record, size - 2)[0]
    body = damage(zlib.decompress(record[size + letters :]), random)
    head = record[:size]
    if random.integers(0, 2):  # the head agrees about the length
        values = list(shard.RECORD_HEAD.unpack(head))
        values[-3] = len(body)
        head = shard.RECORD_HEAD.pack(*values)
    return head + record[size : size + letters] + zlib.compress(body, 1)


class Sources:
    """Sound files of every format, and one maker of damaged ones for each; `folder` is for what must be written."""

    def __init__(self, folder: Path, steps: int = STEPS):
        log = made.make_log(steps, CURRENT)
        self.canary = folder / "canary"
        self.payloads = made.payloads(log)
        self.document = json.dumps(made.gpudrive(log))
        self.record = shard.pack(scenario_from_log(log, agents=2, route_margin=3.0))
        where = folder / "sound"
        where.mkdir(exist_ok=True)
        argoverse = argoverse_files.write(log, where)
        self.table = argoverse.read_bytes()
        self.map = (where / f"log_map_archive_{log.id}.json").read_bytes()
        self.map_name = f"log_map_archive_{log.id}.json"
        longer = made.make_log(max(steps, 25), CURRENT)  # nuPlan keeps nothing below two seconds
        self.db = nuplan_files.write(longer, where).read_bytes()
        self.chart = next(where.rglob("*.gpkg")).read_bytes()
        self.chart_name = f"maps/{nuplan_files.CITY}/9.15.1915/map.gpkg"
        shard.write_records(where / "a.lhs", [("straight", self.record)])
        self.entry = shard.open(where / "a.lhs").entries[:1].tobytes()
        self.makers: dict[str, Callable[[np.random.Generator], Files]] = {
            "womd-example": self._records("womd-example"),
            "womd-scenario": self._records("womd-scenario"),
            "scenarionet": lambda random: {"a.pkl": damage_pickle(random, self.canary)},
            "gpudrive": lambda random: {"a.json": damage_json(json.loads(self.document), random)},
            "argoverse2": self._argoverse,
            "nuplan": self._nuplan,
            "shard": self._shard,
        }

    def make(self, kind: str, random: np.random.Generator) -> Files:
        """The files of one damaged input of a format."""
        return self.makers[kind](random)

    def _records(self, kind: str) -> Callable[[np.random.Generator], Files]:
        def make(random: np.random.Generator) -> Files:
            payload = self.payloads[kind]
            if random.integers(0, 20) == 0:  # the framing itself
                return {"a.tfrecord": damage(made.framed([payload]), random)}
            data = damage(payload, random) if random.integers(0, 2) else damage_fields(payload, random)
            return {"a.tfrecord": made.framed([data])}

        return make

    def _argoverse(self, random: np.random.Generator) -> Files:
        table, chart = self.table, self.map
        if random.integers(0, 2):
            table = damage_table(table, random)
        else:
            chart = damage_json(json.loads(chart), random)
        return {"a.parquet": table, self.map_name: chart}

    def _nuplan(self, random: np.random.Generator) -> Files:
        if random.integers(0, 2):
            return {"a.db": damage_rows(self.db, random), self.chart_name: self.chart}
        return {"a.db": self.db, self.chart_name: damage_rows(self.chart, random)}

    def _shard(self, random: np.random.Generator) -> Files:
        if random.integers(0, 4) == 0:
            return {"a.lhs": damage(shelved(self.record, self.entry), random)}
        entry = damage(self.entry, random)[: len(self.entry)].ljust(len(self.entry), b"\0")
        return {"a.lhs": shelved(damage_record(self.record, random), self.entry if random.integers(0, 4) else entry)}


def shelved(record: bytes, entry: bytes) -> bytes:
    """A shard of one record, whose place and checksums are right; what else the index says is `entry`'s."""
    row = np.frombuffer(entry, shard.ENTRY).copy()
    row["offset"], row["length"], row["crc"] = shard.HEAD_BYTES, len(record), google_crc32c.value(record)
    index = row.tobytes() + b'["straight"]'
    check, end = google_crc32c.value(index), shard.HEAD_BYTES + len(record)
    head = shard.HEAD.pack(readers.SHARD_MAGIC, shard.VERSION, 1, end, len(index), check)
    return head + struct.pack("<I", google_crc32c.value(head)) + record + index
