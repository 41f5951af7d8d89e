"""Packed shards: files of many compiled scenarios, read through a memory map, checked record by record.

A shard (`*.lhs`, little-endian throughout):

    head      40 bytes: magic, version (uint32), scenarios (uint32), index offset, index bytes (uint64), checksum of the
              index, 4 bytes of zeros, checksum of the head's other bytes
    records   one behind the other, as `packing` writes them
    index     of each scenario: offset (uint64), bytes, checksum (uint32), dt (float64), who is controlled (an index
              into `packing.CONTROLS`), sizes (uint32 each, as `packing.LETTERS` names them), extents (likewise, as
              `Extents` does); then the ids, a JSON list in UTF-8

Checksums are CRC-32C. A file is written whole beside its place and then renamed, so that a shard under its own name is
complete, whatever was killed. The same scenarios give the same bytes. There is no appending: shards are many and small.

Example:
    shards.write(path, scenarios)
    shard = shards.open(path)
    shard.ids[0], shard[0]
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from longhaul.driving.datasets.log import BadData, Malformed
from longhaul.driving.datasets.readers import SHARD_MAGIC, SHARD_SUFFIX
from longhaul.driving.scenario.bank import Extents
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.shards.record import LETTERS, outline, pack, unpack

VERSION = 4
"""Version of the file and of the records: grows with every change of `packing.COLUMNS`."""

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
        """The bytes of record `index`, their checksum verified."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path}: scenario {index} of {len(self)}")
        index %= len(self)
        offset, length, crc = (int(self.entries[name][index]) for name in ("offset", "length", "crc"))
        record = self.view[offset : offset + length]
        if google_crc32c.value(record) != crc:
            raise BadData(
                f"{self.path}: record {index} of {len(self)} at byte {offset}: the checksum of its {length} bytes is "
                f"wrong: the file is damaged; copy it again, or {REMEDY}"
            )
        return record

    def close(self) -> None:
        """Gives the memory map back; the shard can't be read any more."""
        self.view.close()


def write(path: Path, scenarios: Iterable[Scenario]) -> int:
    """Writes a shard of `scenarios`; -> its size in bytes. `ValueError` where one can't be stored."""
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
                known, crc = outline(record), google_crc32c.value(record)
                entries.append((offset, len(record), crc, known.dt, known.control, known.sizes, known.extents))
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
    settle(path.parent)
    return offset + len(index)


def settle(folder: Path) -> None:
    """Makes renames in `folder` last through a loss of power, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open(path: Path) -> Shard:
    """The shard at `path`; `BadData` where it is none, of another version, damaged or cut. Records are checked when
    they are read."""
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
        ids = json.loads(index[count * ENTRY.itemsize :])
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}: its index is no index: {error}; {REMEDY}") from error
    named = isinstance(ids, list) and len(ids) == count and all(isinstance(each, str) for each in ids)
    # the offsets of a shard follow from its lengths, which leaves nothing that could point elsewhere
    ends = HEAD_BYTES + np.cumsum(entries["length"], dtype=np.uint64)
    if not named or (entries["offset"] != ends - entries["length"]).any() or (count and int(ends[-1]) != offset):
        raise BadData(f"{path}: its index does not fit to its records; {REMEDY}")
    return tuple(ids), entries
