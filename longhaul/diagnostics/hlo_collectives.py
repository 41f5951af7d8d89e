"""Collectives and host transfers of a compiled program, read from its text (`compiled.as_text()`, HLO).

Instructions stand in computations; computations call others, and loops call their bodies. So an operation's cost in an
update is its bytes times the trips of all loops around it. XLA writes a loop's number of trips where it is known; the
loop over updates, whose length is an argument, has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    *("all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter", "collective-permute"),
    "collective-broadcast",
)

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
"""Bits of an element by type; in types like f8e4m3fn the number after the first letter."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")
_TABLE = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'[^':]+',?)+)\}"
)
_HOST_TARGET = re.compile(r"callback|HostExecute|MoveToHost", re.IGNORECASE)
HOST_SPACE = "S(5)"
"""Mark of a layout in the host's memory."""


class Line(NamedTuple):
    name: str
    opcode: str
    result: str  # its type: "f32[4,64]{1,0}"
    rest: str  # operands and attributes


class Crossing(NamedTuple):
    operation: str  # one of COLLECTIVES
    bytes: int  # of its result on one device, each time
    loops: tuple[int | None, ...]  # trips of the loops around it, the outermost first; None where XLA knows none
    group: tuple[int, ...] = ()  # devices of the first group that meets, by their number in the mesh; () is all

    def times(self) -> int:
        """Runs within one trip of the loops of unknown length."""
        return math.prod(trips for trips in self.loops if trips is not None)

    def over_shards(self, model: int) -> bool:
        """True if devices of different shards take part, where `model` neighbouring devices make a shard."""
        return model == 1 or len({device // model for device in self.group or (0, model)}) > 1


def crossings(text: str) -> list[Crossing]:
    """All collectives of a program in order; one in both branches of a condition counts twice."""
    found = []
    for line, loops in _visit(computations(text)):
        operation = line.opcode.removesuffix("-start")
        if operation in COLLECTIVES:
            found.append(Crossing(operation, _moved(line, operation), loops, _group(line)))
    return found


def _group(line: Line) -> tuple[int, ...]:
    """First replica group. XLA writes "{{0,2},{1,3}}", a table whose rows are groups, "[2,2]<=[2,2]T(1,0)", or a table
    with the axes of the groups, "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}": all of these give (0, 2)."""
    listed = _GROUPS.search(line.rest)
    if listed:
        return tuple(int(each) for each in listed.group(1).split(","))
    table = _TABLE.search(line.rest)
    if table:
        shape, sizes, order = (_elements_of(text) for text in table.groups())
        return tuple(_devices(shape, sizes, order)[0].tolist())
    mesh = _MESH.search(line.rest)
    if mesh is None:
        return ()
    axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
    shape, along = [int(size) for size in axes.values()], re.findall(r"'([^']+)'", mesh.group(4))
    devices = _devices(shape, _elements_of(mesh.group(2)) or [math.prod(shape)], _elements_of(mesh.group(3)))
    return tuple(devices[tuple(slice(None) if name in along else 0 for name in axes)].reshape(-1).tolist())


def _elements_of(text: str | None) -> list[int]:
    return [int(each) for each in (text or "").split(",") if each]


def _devices(shape: list[int], sizes: list[int], order: list[int]) -> np.ndarray:
    """Device numbers as a table of `sizes` with axes in `order`, reshaped to `shape`."""
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return (devices.transpose(order) if order else devices).reshape(shape)


def host_calls(text: str) -> list[str]:
    """Transfers between a program and the host while it runs, without its arguments and results."""
    found = []
    for line, _ in _visit(computations(text)):
        target = _TARGET.search(line.rest)
        if line.opcode in ("infeed", "outfeed"):
            found.append(line.opcode)
        elif line.opcode in ("send", "recv") and "is_host_transfer=true" in line.rest:
            found.append(f"{line.opcode} of the host")
        elif line.opcode == "custom-call" and target and _HOST_TARGET.search(target.group(1)):
            found.append(target.group(1))
        elif line.opcode in ("copy", "copy-start") and HOST_SPACE in line.result:
            found.append(f"{line.opcode} to the host's memory")
    return found


def size(result: str) -> int:
    """Bytes of a type: "(f32[4]{0}, pred[])" -> 17."""
    return sum(-(-_bits(kind) * _elements(dims) // 8) for kind, dims in _ARRAY.findall(_plain(result)))


def computations(text: str) -> dict[str, list[Line]]:
    """Instructions of each computation; the entry computation is also named ""."""
    found: dict[str, list[Line]] = {}
    lines: list[Line] | None = None
    for row in text.splitlines():
        head = _HEAD.match(row)
        if head:
            lines = found.setdefault(head.group(2), [])
            if head.group(1):
                found[""] = lines
        elif lines is not None and (match := _LINE.match(row)):
            result, rest = _split(match.group(2))
            opcode = _OPCODE.match(rest)
            if opcode:
                lines.append(Line(match.group(1), opcode.group(1), result, rest))
    return found


def _split(text: str) -> tuple[str, str]:
    """Text after "name = " -> (type, the rest)."""
    if not text.startswith("("):
        result, _, rest = text.partition(" ")
        return result, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :].lstrip()
    return text, ""


def _visit(parts: dict[str, list[Line]], name: str = "", loops: tuple[int | None, ...] = ()) -> Iterator[
    tuple[Line, tuple[int | None, ...]]
]:  # fmt: skip
    """Every instruction that `name` runs, with the trips of the loops around it."""
    for line in parts.get(name, ()):
        yield line, loops
        if line.opcode.removesuffix("-start") in COLLECTIVES or line.opcode.endswith(("-done", "-update")):
            continue  # they name a reduction, or a computation that their start has run
        if line.opcode == "while":
            trips = _TRIPS.search(line.rest)
            for _, inner in _LOOP.findall(line.rest):
                yield from _visit(parts, inner, (*loops, int(trips.group(1)) if trips else None))
            continue
        branches = _BRANCHES.search(line.rest)
        called = [each.strip().lstrip("%") for each in branches.group(1).split(",")] if branches else []
        for inner in (*_CALLED.findall(line.rest), *called):
            yield from _visit(parts, inner, loops)


def _moved(line: Line, operation: str) -> int:
    """Bytes of a collective's result. An asynchronous start may hold its operand too, in a pair."""
    if line.opcode == operation or operation == "all-reduce":
        return size(line.result)
    return max((size(f"{kind}[{dims}]") for kind, dims in _ARRAY.findall(_plain(line.result))), default=0)


def _plain(result: str) -> str:
    """A type without its layouts, whose tiles look like arrays."""
    return re.sub(r"\{[^}]*\}", "", result)


def _elements(dims: str) -> int:
    return math.prod(int(each) for each in dims.split(",") if each)


def _bits(kind: str) -> int:
    if kind in BITS:
        return BITS[kind]
    number = re.match(r"f(\d+)", kind)
    return int(number.group(1)) if number else 0  # tokens and opaque handles hold no data
