"""Operations and bytes of a compiled program's instructions, read from its text (`compiled.as_text()`, XLA's HLO).

Operations are counted for matrix products and convolutions only, the subject of a roofline. Bytes are those read and
written, as if nothing stayed in a cache; of a large operand of which a fusion takes a slice, the slice counts. Loop
bodies count once: only a trace has the number of trips.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CONTROL = {
    "while", "call", "conditional", "tuple", "get-tuple-element", "parameter", "bitcast", "constant", "after-all",
    "async-start", "async-update", "async-done", "opt-barrier", "partition-id", "replica-id",
}  # fmt: skip
"""Opcodes that move no data themselves."""

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "s16": 16, "u16": 16, "f16": 16,
    "bf16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip

_HEAD = re.compile(r"^(?:ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_OPCODE = re.compile(r"^([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_NAME = re.compile(r"%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CALL_CONTRACTED = re.compile(r'"?lhs_contracting_dimensions"?:\s*\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


class Instruction(NamedTuple):
    name: str
    opcode: str
    scope: str  # origin, "jit(run)/.../learning/dot_general"; "" if unknown
    result: str  # its type, "f32[1024,64]{1,0}"
    operations: float  # of its products and convolutions, each run
    bytes: float  # read and written, each run


class _Raw(NamedTuple):
    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    rest: str  # the text after the operands
    number: int  # of a parameter


def read(text: str) -> dict[str, Instruction]:
    """Instruction name -> instruction, of all computations of a program; names are unique within it."""
    computations = _computations(text)
    inside = {name: {raw.name: raw for raw in raws} for name, raws in computations.items()}
    found = {}
    for raws in computations.values():
        types = {raw.name: raw.result for raw in raws}
        for raw in raws:
            called = inside.get(_first(_CALLS, raw.rest), {})
            operations = _operations(raw, types)
            if raw.opcode in ("fusion", "call"):
                shapes = {name: each.result for name, each in called.items()}
                operations = sum(_operations(each, shapes) for each in called.values())
            moved = 0.0 if raw.opcode in CONTROL else _moved(raw, types, called if raw.opcode == "fusion" else {})
            scope = _first(_SCOPE, raw.rest) or _inner_scope(called)
            found[raw.name] = Instruction(raw.name, raw.opcode, scope, raw.result, operations, moved)
    return found


def size(result: str) -> float:
    """Bytes of a type: "(f32[4]{0}, pred[])" -> 17."""
    return sum(BITS.get(kind, 32) / 8 * math.prod(_sizes(dims)) for kind, dims in _ARRAY.findall(result))


def _sizes(dims: str) -> list[int]:
    return [int(each) for each in dims.split(",") if each]


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match.group(1) if match else ""


def _computations(text: str) -> dict[str, list[_Raw]]:
    found: dict[str, list[_Raw]] = {}
    current: list[_Raw] | None = None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            current = found.setdefault(head.group(1), [])
        elif current is not None and (match := _LINE.match(line)):
            raw = _raw(match.group(1), match.group(2))
            if raw is not None:
                current.append(raw)
    return found


def _raw(name: str, text: str) -> _Raw | None:
    """Instruction from the text after "name = ": a type, "opcode(operands)", attributes."""
    result, rest = _balanced(text) if text.startswith("(") else text.partition(" ")[::2]
    match = _OPCODE.match(rest.strip())
    if match is None:
        return None
    inner, after = _balanced("(" + match.group(2))
    index = int(inner[1:-1]) if match.group(1) == "parameter" else -1
    return _Raw(name, match.group(1), result, tuple(_NAME.findall(inner)), after, index)


def _balanced(text: str) -> tuple[str, str]:
    """A text that starts with a parenthesis -> (up to the matching one, the rest)."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""


def _operations(raw: _Raw, types: Mapping[str, str]) -> float:
    """Operations: a multiplication and an addition for each element of each sum of a product."""
    shapes = [_sizes(dims) for _, dims in _ARRAY.findall(raw.result)]
    if not shapes or not raw.operands:
        return 0.0
    made, left = math.prod(shapes[0]), _shape(types.get(raw.operands[0], ""))
    if raw.opcode == "dot":
        axes = _sizes(_first(_CONTRACTED, raw.rest))
    elif raw.opcode == "custom-call" and re.search(r"gemm|matmul", _first(_TARGET, raw.rest), re.IGNORECASE):
        axes = [int(axis) for axis in re.findall(r"\d+", _first(_CALL_CONTRACTED, raw.rest))] or [len(left) - 1]
    elif raw.opcode == "convolution" and len(raw.operands) > 1:
        kernel = _shape(types.get(raw.operands[1], ""))
        layout = _first(_LABELS, raw.rest)
        outputs = kernel[layout.index("o")] if "o" in layout and len(layout) == len(kernel) else 1
        return 2.0 * made * math.prod(kernel) / max(outputs, 1)
    else:
        return 0.0
    return 2.0 * made * math.prod(left[axis] for axis in axes if axis < len(left))


def _shape(result: str) -> list[int]:
    match = _ARRAY.search(result)
    return _sizes(match.group(2)) if match else []


def _moved(raw: _Raw, types: Mapping[str, str], called: Mapping[str, _Raw]) -> float:
    """Bytes that an instruction reads and writes; `called` is the inside of a fusion."""
    if raw.opcode in ("dynamic-slice", "gather", "slice"):
        return 2.0 * size(raw.result)
    if raw.opcode in ("dynamic-update-slice", "scatter"):
        changed = raw.operands[1 if raw.opcode == "dynamic-update-slice" else -1 :][:1]
        return 2.0 * sum(size(types.get(name, "")) for name in changed)
    parameters = {each.number: name for name, each in called.items() if each.opcode == "parameter"}
    total = _written(raw, called)
    for i, operand in enumerate(raw.operands):
        whole = size(types.get(operand, ""))
        total += min(whole, _taken(parameters[i], called)) if i in parameters else whole
    return total


def _taken(parameter: str, called: Mapping[str, _Raw]) -> float:
    """Bytes read of a fusion's parameter, if only slices are; else infinity."""
    users = [each for each in called.values() if parameter in each.operands]
    slices: Sequence[str] = ("dynamic-slice", "gather", "slice")
    if users and all(each.opcode in slices and each.operands[0] == parameter for each in users):
        return sum(size(each.result) for each in users)
    if users and all(each.opcode == "dynamic-update-slice" and each.operands[0] == parameter for each in users):
        return 0.0  # written in place
    return math.inf


def _written(raw: _Raw, called: Mapping[str, _Raw]) -> float:
    """Bytes of the result, or of the slices of it that a fusion writes in place."""
    updates = [each for each in called.values() if each.opcode == "dynamic-update-slice"]
    inside = {name: each.result for name, each in called.items()}
    changed = sum(size(inside.get(each.operands[1], "")) for each in updates if len(each.operands) > 1)
    whole = sum(size(each.result) for each in updates)
    return max(size(raw.result) - whole, 0.0) + changed if updates else size(raw.result)


def _inner_scope(called: Mapping[str, _Raw]) -> str:
    """Most frequent scope inside a fusion without a scope."""
    scopes = [scope for each in called.values() if (scope := _first(_SCOPE, each.rest))]
    return max(scopes, key=scopes.count) if scopes else ""
