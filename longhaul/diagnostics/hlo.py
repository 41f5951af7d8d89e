"""A compiled program read from its text (`compiled.as_text()`, HLO): collectives, host transfers, operations and bytes.

Instructions stand in computations; computations call others, and loops call their bodies. So a collective's cost in an
update is its bytes times the trips of all loops around it. XLA writes a loop's number of trips where it is known; the
loop over updates, whose length is an argument, has none.

Operations are counted for matrix products and convolutions only, the subject of a roofline. Bytes are those read and
written, as if nothing stayed in a cache; of a large operand of which a fusion takes or changes a part, the part counts.
Of both, loop bodies count once; `runs` has the trips where XLA knows them, and a trace has all of them.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    *("all-reduce", "all-gather", "all-to-all", "ragged-all-to-all", "reduce-scatter", "collective-permute"),
    "collective-broadcast",
)

CONTROL = {
    "while", "call", "conditional", "tuple", "get-tuple-element", "parameter", "bitcast", "constant", "after-all",
    "async-start", "async-update", "async-done", "opt-barrier", "partition-id", "replica-id",
}  # fmt: skip
"""Opcodes that move no data themselves."""

SLICES = ("dynamic-slice", "gather", "slice")

IN_PLACE = ("dynamic-update-slice", "scatter")
"""Opcodes that change a part of an operand, whose memory the result takes over."""

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
"""Bits of an element by type; in types like f8e4m3fn the number after the first letter."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"^([a-z][\w\-]*)(\(.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
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
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CALL_CONTRACTED = re.compile(r'"?lhs_contracting_dimensions"?:\s*\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")
_HOST_TARGET = re.compile(r"callback|HostExecute|MoveToHost", re.IGNORECASE)

HOST_SPACE = "S(5)"
"""Mark of a layout in the host's memory."""


class Line(NamedTuple):
    """An instruction as it is written."""

    name: str
    opcode: str
    result: str  # its type, "f32[1024,64]{1,0}"
    operands: tuple[str, ...]
    number: int  # of a parameter, else -1
    rest: str  # the attributes

    def first(self, pattern: re.Pattern[str]) -> str:
        """First group of `pattern` in the attributes, "" without a match."""
        match = pattern.search(self.rest)
        return match.group(1) if match else ""


def computations(text: str) -> dict[str, list[Line]]:
    """Instructions of each computation; the entry computation is also named ""."""
    bodies: dict[str, list[Line]] = {}
    lines: list[Line] | None = None
    for row in text.splitlines():
        head = _HEAD.match(row)
        if head:
            lines = bodies.setdefault(head.group(2), [])
            if head.group(1):
                bodies[""] = lines
        elif lines is not None and (match := _LINE.match(row)):
            name, typed = match.groups()
            result, rest = _balanced(typed) if typed.startswith("(") else typed.partition(" ")[::2]
            opcode = _OPCODE.match(rest.lstrip())
            if opcode:
                operands, attributes = _balanced(opcode.group(2))
                number = int(operands[1:-1]) if opcode.group(1) == "parameter" else -1
                names = tuple(_NAME.findall(operands))
                lines.append(Line(name, opcode.group(1), result, names, number, attributes))
    return bodies


def _balanced(text: str) -> tuple[str, str]:
    """A text that starts with a parenthesis -> (up to the matching one, the rest)."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return text[: match.end()], text[match.end() :]
    return text, ""


def size(result: str) -> int:
    """Bytes of a type: "(f32[4]{0}, pred[])" -> 17."""
    return sum(_array_bytes(kind, dims) for kind, dims in _arrays(result))


@functools.cache
def _arrays(result: str) -> list[tuple[str, str]]:
    """(kind, sizes) of a type's arrays; layouts, whose tiles look like arrays, are left out."""
    return _ARRAY.findall(re.sub(r"\{[^}]*\}", "", result))


def _array_bytes(kind: str, dims: str) -> int:
    number = re.match(r"f(\d+)", kind)
    bits = BITS.get(kind, int(number.group(1)) if number else 0)  # tokens and opaque handles hold no data
    return -(-bits * math.prod(_sizes(dims)) // 8)


def _sizes(dims: str | None) -> list[int]:
    return [int(each) for each in (dims or "").split(",") if each]


# ---------------------------------------------------------------------------- collectives and transfers to the host


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
    listed = []
    for line, loops in _visit(computations(text)):
        operation = line.opcode.removesuffix("-start")
        if operation in COLLECTIVES:
            moved = size(line.result)
            if line.opcode != operation != "all-reduce":  # an asynchronous start may hold its operand too, in a pair
                moved = max((_array_bytes(*each) for each in _arrays(line.result)), default=0)
            listed.append(Crossing(operation, moved, loops, _group(line)))
    return listed


def _group(line: Line) -> tuple[int, ...]:
    """First replica group. XLA writes "{{0,2},{1,3}}", a table whose rows are groups, "[2,2]<=[2,2]T(1,0)", or a table
    with the axes of the groups, "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}": all of these give (0, 2)."""
    if listed := line.first(_GROUPS):
        return tuple(_sizes(listed))
    table = _TABLE.search(line.rest)
    if table:
        shape, sizes, order = (_sizes(text) for text in table.groups())
        return tuple(_devices(shape, sizes, order)[0].tolist())
    mesh = _MESH.search(line.rest)
    if mesh is None:
        return ()
    axes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
    shape, along = [int(size) for size in axes.values()], re.findall(r"'([^']+)'", mesh.group(4))
    devices = _devices(shape, _sizes(mesh.group(2)) or [math.prod(shape)], _sizes(mesh.group(3)))
    return tuple(devices[tuple(slice(None) if name in along else 0 for name in axes)].reshape(-1).tolist())


def _devices(shape: list[int], sizes: list[int], order: list[int]) -> np.ndarray:
    """Device numbers as a table of `sizes` with axes in `order`, reshaped to `shape`."""
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return (devices.transpose(order) if order else devices).reshape(shape)


def host_calls(text: str) -> list[str]:
    """Transfers between a program and the host while it runs, without its arguments and results."""
    calls = []
    for line, _ in _visit(computations(text)):
        if line.opcode in ("infeed", "outfeed"):
            calls.append(line.opcode)
        elif line.opcode in ("send", "recv") and "is_host_transfer=true" in line.rest:
            calls.append(f"{line.opcode} of the host")
        elif line.opcode == "custom-call" and _HOST_TARGET.search(line.first(_TARGET)):
            calls.append(line.first(_TARGET))
        elif line.opcode in ("copy", "copy-start") and HOST_SPACE in line.result:
            calls.append(f"{line.opcode} to the host's memory")
    return calls


def _visit(parts: dict[str, list[Line]], name: str = "", loops: tuple[int | None, ...] = ()) -> Iterator[
    tuple[Line, tuple[int | None, ...]]
]:  # fmt: skip
    """Every instruction that `name` runs, with the trips of the loops around it."""
    for line in parts.get(name, ()):
        yield line, loops
        if line.opcode.removesuffix("-start") in COLLECTIVES or line.opcode.endswith(("-done", "-update")):
            continue  # they name a reduction, or a computation that their start has run
        if line.opcode == "while":
            trips = line.first(_TRIPS)
            for _, inner in _LOOP.findall(line.rest):
                yield from _visit(parts, inner, (*loops, int(trips) if trips else None))
            continue
        branches = [each.strip().lstrip("%") for each in line.first(_BRANCHES).split(",") if each]
        for inner in (*_CALLED.findall(line.rest), *branches):
            yield from _visit(parts, inner, loops)


def runs(text: str) -> dict[str, float]:
    """Instruction name -> its runs in one trip of the loops of unknown length, without what is inside a fusion.

    Each branch of a condition is taken equally often. A loop of known length runs without its condition.
    """
    parts = computations(text)
    counts: defaultdict[str, float] = defaultdict(float)

    def visit(name: str, times: float) -> None:
        for line in parts.get(name, ()):
            counts[line.name] += times
            branches = [each.strip().lstrip("%") for each in line.first(_BRANCHES).split(",") if each]
            if line.opcode == "while":
                trips = line.first(_TRIPS)
                for part, inner in _LOOP.findall(line.rest):
                    if part == "body" or not trips:
                        visit(inner, times * int(trips or 1))
            elif line.opcode in ("call", "conditional"):
                branches += _CALLED.findall(line.rest)
                for inner in branches:
                    visit(inner, times / len(branches))

    visit("", 1.0)
    return counts


# ------------------------------------------------------------------------------------------------ operations and bytes


class Instruction(NamedTuple):
    name: str
    opcode: str
    scope: str  # origin, "jit(run)/.../learning/dot_general"; "" if unknown
    result: str  # its type, "f32[1024,64]{1,0}"
    operations: float  # of its products and convolutions, each run
    bytes: float  # read and written, each run


def read(text: str) -> dict[str, Instruction]:
    """Instruction name -> instruction, of all computations of a program; names are unique within it."""
    inside = {name: {line.name: line for line in lines} for name, lines in computations(text).items() if name}
    instructions = {}
    for lines in inside.values():
        types = {line.name: line.result for line in lines.values()}
        for line in lines.values():
            called = inside.get(line.first(_CALLED), {})
            operations = _operations(line, types)
            if line.opcode in ("fusion", "call"):
                shapes = {name: each.result for name, each in called.items()}
                operations = sum(_operations(each, shapes) for each in called.values())
            moved = (
                0.0 if line.opcode in CONTROL else _bytes_moved(line, types, called if line.opcode == "fusion" else {})
            )
            scopes = [scope for each in called.values() if (scope := each.first(_SCOPE))]
            scope = line.first(_SCOPE) or max(scopes, key=scopes.count, default="")  # the most frequent inside
            instructions[line.name] = Instruction(line.name, line.opcode, scope, line.result, operations, moved)
    return instructions


def _operations(line: Line, types: Mapping[str, str]) -> float:
    """Operations: a multiplication and an addition for each element of each sum of a product."""
    shapes = [_sizes(dims) for _, dims in _arrays(line.result)]
    if not shapes or not line.operands:
        return 0.0
    outcome, left = math.prod(shapes[0]), _shape(types.get(line.operands[0], ""))
    if line.opcode == "dot":
        axes = _sizes(line.first(_CONTRACTED))
    elif line.opcode == "custom-call" and re.search(r"gemm|matmul", line.first(_TARGET), re.IGNORECASE):
        axes = [int(axis) for axis in re.findall(r"\d+", line.first(_CALL_CONTRACTED))] or [len(left) - 1]
    elif line.opcode == "convolution" and len(line.operands) > 1:
        kernel = _shape(types.get(line.operands[1], ""))
        layout = line.first(_LABELS)
        outputs = kernel[layout.index("o")] if "o" in layout and len(layout) == len(kernel) else 1
        return 2.0 * outcome * math.prod(kernel) / max(outputs, 1)
    else:
        return 0.0
    return 2.0 * outcome * math.prod(left[axis] for axis in axes if axis < len(left))


def _shape(result: str) -> list[int]:
    arrays = _arrays(result)
    return _sizes(arrays[0][1]) if arrays else []


def _bytes_moved(line: Line, types: Mapping[str, str], called: Mapping[str, Line]) -> float:
    """Bytes that an instruction reads and writes; `called` is the inside of a fusion."""
    if line.opcode in SLICES:
        return 2.0 * size(line.result)
    if line.opcode in IN_PLACE:
        return 2.0 * sum(size(types.get(name, "")) for name in _updates(line))
    parameters = {each.number: name for name, each in called.items() if each.opcode == "parameter"}
    total = _result_bytes(line, called)
    for i, operand in enumerate(line.operands):
        whole = size(types.get(operand, ""))
        total += min(whole, _parameter_bytes(parameters[i], called)) if i in parameters else whole
    return total


def _operands_in_place(line: Line) -> tuple[str, ...]:
    """Operands that an instruction of `IN_PLACE` changes; a scatter may have several."""
    return line.operands[: len(line.operands) // 2 if line.opcode == "scatter" else 1]


def _updates(line: Line) -> tuple[str, ...]:
    """Operands that it writes into them: a scatter has the indices between the two."""
    return line.operands[len(line.operands) // 2 + 1 :] if line.opcode == "scatter" else line.operands[1:2]


def _parameter_bytes(parameter: str, called: Mapping[str, Line]) -> float:
    """Bytes read of a fusion's parameter, if it is only sliced, or changed in place; else infinity."""
    taken = 0.0
    users = [each for each in called.values() if parameter in each.operands]
    for each in users:
        if each.opcode in SLICES and each.operands[0] == parameter:
            taken += size(each.result)
        elif each.opcode not in IN_PLACE or parameter not in _operands_in_place(each):
            return math.inf
    return taken if users else math.inf


def _result_bytes(line: Line, called: Mapping[str, Line]) -> float:
    """Bytes of the result, or of the parts of it that a fusion writes in place."""
    inside = {name: each.result for name, each in called.items()}
    in_place = [each for each in called.values() if each.opcode in IN_PLACE]
    changed = sum(size(inside.get(name, "")) for each in in_place for name in _updates(each))
    whole = sum(size(each.result) for each in in_place)
    return max(size(line.result) - whole, 0.0) + changed if in_place else size(line.result)
