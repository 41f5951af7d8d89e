"""Translation of a JAX function into an ONNX program whose first axis, the batch, has any length.

The function is traced to a jaxpr with a symbolic batch, and each of its primitives becomes nodes of ONNX's standard
operators. Calls are inlined and loops of a known length unrolled. What depends on constants alone is computed here.
Equal nodes are made once. ONNX runtimes lack kernels of some types: small integers are computed as int64, and bfloat16
as float32 that is rounded after each operation.

https://github.com/onnx/onnx/blob/main/docs/Operators.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend import core

from longhaul.runtime.errors import RunError

OPSET, IR = 18, 8
"""Versions of ONNX's operators and of its file, of December 2022: the first with bitwise operators."""

MOST_FOLDED = 4096
"""Most numbers of a constant that is larger than what it is computed from: the rest stays a computation."""

MOST_STEPS = 512
"""Most steps of a loop that is unrolled."""

BATCH = "batch"
"""Name of the first axis in the program."""

BFLOAT16 = 16
"""The type's number in ONNX, whose NumPy has none."""


class Ref(NamedTuple):
    """Result of a node, or an input, by its name in the program."""

    name: str


Value = np.ndarray | Ref
"""A constant, or what the program computes."""


class Node(NamedTuple):
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...]


class Graph:
    """Nodes and constants of a program in the making."""

    def __init__(self, first: str, batch: Any) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self._made: dict[Any, tuple[str, ...]] = {}
        self._batch = batch
        self._size = self.node("Shape", Ref(first), start=0, end=1)

    def name(self, value: Value) -> str:
        if isinstance(value, Ref):
            return value.name
        value = np.asarray(value, np.float32) if value.dtype == jnp.bfloat16 else np.asarray(value, order="C")
        key = (value.dtype.str, value.shape, value.tobytes())
        if key not in self._made:
            self._made[key] = (f"c{len(self.constants)}",)
            self.constants[self._made[key][0]] = value
        return self._made[key][0]

    def node(self, operator: str, *inputs: Value, **attributes: Any) -> Ref:
        return self.many(operator, inputs, 1, **attributes)[0]

    def many(self, operator: str, inputs: Sequence[Value], outputs: int, **attributes: Any) -> list[Ref]:
        """Results of a node; of an equal one if there is one."""
        names = tuple(map(self.name, inputs))
        fixed = tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in sorted(attributes.items()))
        key = (operator, names, fixed)
        if key not in self._made:
            self._made[key] = tuple(f"n{len(self.nodes)}_{i}" for i in range(outputs))
            self.nodes.append(Node(operator, names, self._made[key], fixed))
        return [Ref(name) for name in self._made[key]]

    def shape(self, sizes: Sequence[Any]) -> Value:
        """Vector int64 of sizes, some of which may be multiples of the batch's."""
        if all(isinstance(size, int) for size in sizes):
            return np.array(sizes, np.int64)
        parts = [
            np.array([size], np.int64) if isinstance(size, int)
            else self._size if size // self._batch == 1
            else self.node("Mul", self._size, np.array([int(size // self._batch)], np.int64))
            for size in sizes
        ]  # fmt: skip
        return self.node("Concat", *parts, axis=0)

    def reshape(self, x: Value, sizes: Sequence[Any]) -> Value:
        symbolic = [size for size in sizes if not isinstance(size, int)]
        if isinstance(x, np.ndarray):
            return x.reshape(sizes)
        if len(symbolic) == 1:
            return self.node("Reshape", x, np.array([-1 if size is symbolic[0] else size for size in sizes], np.int64))
        return self.node("Reshape", x, self.shape(sizes))

    def cast(self, x: Value, dtype: Any) -> Value:
        target = np.dtype(dtype)
        if target == jnp.bfloat16:
            return self.rounded(self.cast(x, np.float32))
        if isinstance(x, np.ndarray):
            return x.astype(target)
        from onnx import helper

        return self.node("Cast", x, to=helper.np_dtype_to_tensor_dtype(target))

    def rounded(self, x: Value) -> Value:
        """float32 with the precision of bfloat16."""
        if isinstance(x, np.ndarray):
            return x.astype(jnp.bfloat16).astype(np.float32)
        return self.node("Cast", self.node("Cast", x, to=BFLOAT16), to=1)

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        if isinstance(x, np.ndarray):
            return x.transpose(order)
        return x if list(order) == sorted(order) else self.node("Transpose", x, perm=list(order))

    def call(self, closed: Any, inputs: Sequence[Value], wanted: Sequence[bool]) -> list[Any]:
        """Results of a jaxpr, None for those that are not wanted."""
        jaxpr, consts = (closed.jaxpr, closed.consts) if isinstance(closed, core.ClosedJaxpr) else (closed, ())
        held: dict[Any, Value] = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
        held |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            form: Any = atom.aval
            return np.asarray(atom.val, form.dtype) if isinstance(atom, core.Literal) else held[atom]

        for equation, used in _live(jaxpr, wanted):
            results = self.equation(equation, [read(x) for x in equation.invars], used)
            held |= {out: x for out, x, use in zip(equation.outvars, results, used, strict=True) if use}
        return [read(x) if use else None for x, use in zip(jaxpr.outvars, wanted, strict=True)]

    def equation(self, equation: Any, inputs: list[Value], used: list[bool]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            return _scan(self, equation, inputs)
        for inner in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if inner in params:
                return self.call(params[inner], inputs, used)
        out = equation.outvars[0].aval
        known = [x for x in inputs if isinstance(x, np.ndarray)]
        fixed = len(known) == len(inputs) and all(isinstance(size, int) for size in out.shape)
        if fixed and math.prod(out.shape) <= max([MOST_FOLDED, *(x.size for x in known)]):
            outputs = equation.primitive.bind(*map(jnp.asarray, known), **params)
            return [np.asarray(x) for x in (outputs if equation.primitive.multiple_results else [outputs])]
        if name not in RULES:
            raise RunError(f"this policy computes {name}, which --to onnx does not translate; take --to jax")
        outputs = RULES[name](self, equation, *inputs)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        return [
            self.rounded(x) if var.aval.dtype == jnp.bfloat16 else x
            for x, var in zip(outputs, equation.outvars, strict=True)
        ]


def _live(jaxpr: Any, wanted: Sequence[bool]) -> list[tuple[Any, list[bool]]]:
    """(equation, which of its results are used) of the equations that the wanted results need."""
    needed = {id(x) for x, use in zip(jaxpr.outvars, wanted, strict=True) if use}
    live = []
    for equation in reversed(jaxpr.eqns):
        used = [id(x) in needed for x in equation.outvars]
        if any(used):
            live.append((equation, used))
            needed |= {id(x) for x in equation.invars}
    return live[::-1]


def _scan(graph: Graph, equation: Any, inputs: list[Value]) -> list[Value]:
    """A loop of a known length, unrolled."""
    params, length = equation.params, equation.params["length"]
    if "ft_in" in params:  # of JAX 0.12
        fixed, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    else:
        fixed, carried = params["num_consts"], params["num_carry"]
    if length > MOST_STEPS:
        raise RunError(f"this policy has a loop of {length} steps; --to onnx takes {MOST_STEPS}; take --to jax")
    carry, rows = inputs[fixed : fixed + carried], inputs[fixed + carried :]
    stacks: list[list[Value]] = []
    for i in reversed(range(length)) if params["reverse"] else range(length):
        each = [x[i] if isinstance(x, np.ndarray) else graph.node("Gather", x, np.array(i), axis=0) for x in rows]
        results = graph.call(params["jaxpr"], [*inputs[:fixed], *carry, *each], [True] * len(equation.outvars))
        carry = results[:carried]
        stacks.append([graph.node("Unsqueeze", x, np.array([0])) for x in results[carried:]])
    columns = zip(*(stacks[::-1] if params["reverse"] else stacks), strict=True)
    return [*carry, *(graph.node("Concat", *column, axis=0) for column in columns)]


# --------------------------------------------------------------------------------------------------------------- rules


KERNELS = tuple(map(np.dtype, (np.bool_, np.int32, np.int64, np.float32)))
"""Types that runtimes have all operators for."""


def _plain(operator: str, **attributes: Any) -> Callable[..., Any]:
    """Rule of an operator that computes element by element, small integers as int64."""

    def rule(graph: Graph, equation: Any, *inputs: Value) -> Value:
        dtype, out = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        if dtype in KERNELS or dtype == jnp.bfloat16:
            return graph.node(operator, *inputs, **attributes)
        wide = graph.node(operator, *(graph.cast(x, np.int64) for x in inputs), **attributes)
        return wide if out == np.bool_ else graph.cast(wide, out)

    return rule


def _logical(of_bool: str, of_bits: str) -> Callable[..., Any]:
    def rule(graph: Graph, equation: Any, *inputs: Value) -> Value:
        return graph.node(of_bool if equation.invars[0].aval.dtype == np.bool_ else of_bits, *inputs)

    return rule


def _negated(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda graph, equation, *inputs: graph.node("Not", rule(graph, equation, *inputs))


def _power(graph: Graph, equation: Any, x: Value) -> Value:
    y = equation.params["y"]
    if y < 1:
        return _plain("Pow")(graph, equation, x, np.array(y, equation.invars[0].aval.dtype))
    product = x
    for _ in range(y - 1):
        product = _plain("Mul")(graph, equation, product, x)
    return product


def _round(graph: Graph, equation: Any, x: Value) -> Value:
    if int(equation.params["rounding_method"]) == 1:
        return graph.node("Round", x)
    away = graph.node("Floor", graph.node("Add", graph.node("Abs", x), np.array(0.5, np.float32)))
    return graph.node("Mul", graph.node("Sign", x), away)


def _shift(graph: Graph, equation: Any, x: Value, shift: Value) -> Value:
    """Shift of bits: to the left, or to the right with zeros, as uint32."""
    dtype = equation.invars[0].aval.dtype
    if dtype.itemsize > 4 or (dtype.kind == "i" and dtype.itemsize < 4):
        raise RunError(f"this policy shifts the bits of {dtype}, which --to onnx does not translate; take --to jax")
    left = equation.primitive.name == "shift_left"
    operands = (graph.cast(value, np.uint32) for value in (x, shift))
    return graph.cast(graph.node("BitShift", *operands, direction="LEFT" if left else "RIGHT"), dtype)


def _shift_signed(graph: Graph, equation: Any, x: Value, shift: Value) -> Value:
    """Division by a power of two towards minus infinity; ONNX shifts unsigned numbers alone."""
    x, two = graph.cast(x, np.int64), np.array(2, np.int64)
    shift = graph.cast(shift, np.int64)
    whole = two**shift if isinstance(shift, np.ndarray) else graph.node("Pow", two, shift)
    floor = graph.node("Div", graph.node("Sub", x, graph.node("Mod", x, whole)), whole)
    return graph.cast(floor, equation.outvars[0].aval.dtype)


def _select(graph: Graph, equation: Any, which: Value, *cases: Value) -> Value:
    selector_dtype, dtype = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    held = np.dtype(np.int32) if dtype == np.bool_ else dtype if dtype in KERNELS or dtype == jnp.bfloat16 else np.int64
    cases = tuple(x if held == dtype else graph.cast(x, held) for x in cases)
    selected = cases[0]
    for i, case in enumerate(cases[1:], 1):
        chosen = which if selector_dtype == np.bool_ else graph.node("Equal", which, np.array(i, selector_dtype))
        selected = graph.node("Where", chosen, case, selected)
    return selected if held == dtype else graph.cast(selected, dtype)


def _clamp(graph: Graph, equation: Any, low: Value, x: Value, high: Value) -> Value:
    return graph.node("Min", graph.node("Max", x, low), high)


def _reduce(operator: str) -> Callable[..., Any]:
    def rule(graph: Graph, equation: Any, x: Value) -> Value:
        axes, dtype = equation.params["axes"], equation.invars[0].aval.dtype
        if not axes:
            return x
        held = x if dtype in KERNELS[1:] or dtype == jnp.bfloat16 else graph.cast(x, np.int32)
        reduced = graph.node(operator, held, np.array(axes, np.int64), keepdims=0)
        return reduced if held is x else graph.cast(reduced, equation.outvars[0].aval.dtype)

    return rule


def _argument(operator: str) -> Callable[..., Any]:
    def rule(graph: Graph, equation: Any, x: Value) -> Value:
        (axis,) = equation.params["axes"]
        held = x if equation.invars[0].aval.dtype in KERNELS[1:] else graph.cast(x, np.float32)
        return graph.cast(graph.node(operator, held, axis=axis, keepdims=0), equation.params["index_dtype"])

    return rule


def _accumulate(graph: Graph, equation: Any, x: Value) -> Value:
    reverse = int(equation.params["reverse"])
    return graph.node("CumSum", x, np.array(equation.params["axis"], np.int64), reverse=reverse)


def _broadcast(graph: Graph, equation: Any, x: Value, *_: Value) -> Value:
    shape, sizes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    middle: list[Any] = [1] * len(sizes)
    for axis, size in zip(equation.params["broadcast_dimensions"], shape, strict=True):
        middle[axis] = size
    x = x if tuple(middle) == tuple(shape) else graph.reshape(x, middle)
    return x if tuple(middle) == tuple(sizes) else graph.node("Expand", x, graph.shape(sizes))


def _reshape(graph: Graph, equation: Any, x: Value, *_: Value) -> Value:
    return graph.reshape(x, equation.outvars[0].aval.shape)


def _slice(graph: Graph, equation: Any, x: Value) -> Value:
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(starts)
    return _cut(graph, x, equation.invars[0].aval.shape, starts, limits, strides)


def _cut(graph: Graph, x: Value, sizes: Any, starts: Any, limits: Any, strides: Any) -> Value:
    """Part of an array along the axes of which not all is taken."""
    rows = enumerate(zip(sizes, starts, limits, strides, strict=True))
    parts = [(axis, *cut) for axis, (size, *cut) in rows if cut != [0, size, 1]]
    if not parts:
        return x
    axes, first, last, step = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    return graph.node("Slice", x, first, last, axes, step)


def _clamped(graph: Graph, index: Value, most: Any) -> Value:
    """Index int64 within 0 .. most, a number or a vector."""
    return graph.node("Min", graph.node("Max", index, np.array(0, np.int64)), np.asarray(most, np.int64))


def _concatenate(graph: Graph, equation: Any, *inputs: Value) -> Value:
    return graph.node("Concat", *inputs, axis=equation.params["dimension"])


def _stack(graph: Graph, equation: Any, *inputs: Value) -> Value:
    axis = equation.params["axis"]
    rows = (graph.node("Unsqueeze", x, np.array([axis])) for x in inputs)
    return graph.node("Concat", *rows, axis=axis)


def _unstack(graph: Graph, equation: Any, x: Value) -> list[Ref]:
    axis = equation.params["axis"]
    return [graph.node("Gather", x, np.array(i), axis=axis) for i in range(len(equation.outvars))]


def _tile(graph: Graph, equation: Any, x: Value) -> Value:
    return graph.node("Tile", x, np.array(equation.params["reps"], np.int64))


def _split(graph: Graph, equation: Any, x: Value) -> list[Ref]:
    sizes = np.array(equation.params["sizes"], np.int64)
    return graph.many("Split", (x, sizes), len(sizes), axis=equation.params["axis"])


def _pad(graph: Graph, equation: Any, x: Value, filler: Value) -> Value:
    before, after, inside = zip(*equation.params["padding_config"], strict=True)
    if any(inside):
        raise RunError("this policy pads between numbers, which --to onnx does not translate; take --to jax")
    return graph.node("Pad", x, np.array([*before, *after], np.int64), filler)


def _reverse(graph: Graph, equation: Any, x: Value) -> Value:
    axes = np.array(equation.params["dimensions"], np.int64)
    least = np.full(len(axes), np.iinfo(np.int64).min)
    return graph.node("Slice", x, np.full(len(axes), -1), least, axes, np.full(len(axes), -1))


def _iota(graph: Graph, equation: Any, *_: Value) -> Value:
    sizes, axis = equation.outvars[0].aval.shape, equation.params["dimension"]
    shape = [-1 if i == axis else 1 for i in range(len(sizes))]
    if isinstance(sizes[axis], int):
        row: Value = np.arange(sizes[axis]).reshape(shape)
    else:
        last = graph.node("Squeeze", graph.shape([sizes[axis]]))
        row = graph.node("Reshape", graph.node("Range", np.array(0), last, np.array(1)), np.array(shape))
    return graph.cast(graph.node("Expand", row, graph.shape(sizes)), equation.outvars[0].aval.dtype)


def _convert(graph: Graph, equation: Any, x: Value) -> Value:
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    if before == after or (before == jnp.bfloat16 and after == np.float32):
        return x
    return graph.cast(x, after)


def _precision(graph: Graph, equation: Any, x: Value) -> Value:
    kept = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    if kept not in ((8, 7), (8, 23)):
        raise RunError(f"this policy rounds to {kept} bits, which --to onnx does not translate; take --to jax")
    return graph.rounded(x) if kept == (8, 7) else x


def _product(graph: Graph, equation: Any, a: Value, b: Value) -> Value:
    (of_a, of_b), (rows_a, rows_b) = equation.params["dimension_numbers"]
    rank_a, rank_b = (len(x.aval.shape) for x in equation.invars)
    dtype = equation.outvars[0].aval.dtype
    if equation.invars[0].aval.dtype not in (dtype, jnp.bfloat16):
        a, b = graph.cast(a, dtype), graph.cast(b, dtype)
    if not rows_a and rank_b == 2 and of_a == (rank_a - 1,) and of_b == (0,):
        return graph.node("MatMul", a, b)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(letters) for _ in range(rank_a)]
    shared = dict(zip((*of_b, *rows_b), (left[i] for i in (*of_a, *rows_a)), strict=True))
    right = [shared.get(i) or next(letters) for i in range(rank_b)]
    out = [left[i] for i in rows_a]
    out += [left[i] for i in range(rank_a) if i not in (*of_a, *rows_a)]
    out += [right[i] for i in range(rank_b) if i not in (*of_b, *rows_b)]
    return graph.node("Einsum", a, b, equation=f"{''.join(left)},{''.join(right)}->{''.join(out)}")


def _convolution(graph: Graph, equation: Any, x: Value, kernel: Value) -> Value:
    params = equation.params
    seen, weights, out = params["dimension_numbers"]
    if any(step != 1 for step in params["lhs_dilation"]) or params["batch_group_count"] != 1:
        raise RunError("this policy has a transposed convolution, which --to onnx does not translate; take --to jax")
    before, after = zip(*params["padding"], strict=True)
    convolved = graph.node(
        "Conv", graph.transpose(x, seen), graph.transpose(kernel, weights), strides=list(params["window_strides"]),
        pads=[*before, *after], dilations=list(params["rhs_dilation"]), group=params["feature_group_count"],
    )  # fmt: skip
    return graph.transpose(convolved, np.argsort(out).tolist())


def _window_max(graph: Graph, equation: Any, x: Value) -> Value:
    """Maximum over windows; axes without a window are the rows of ONNX's pool."""
    params, sizes = equation.params, equation.invars[0].aval.shape
    windows = list(zip(params["window_dimensions"], params["window_strides"], params["padding"], strict=True))
    inner = [i for i, window in enumerate(windows) if window != (1, 1, (0, 0))]
    order = [*(i for i in range(len(sizes)) if i not in inner), *inner]
    sides, strides, padding = zip(*(windows[i] for i in inner), strict=True)
    before, after = zip(*padding, strict=True)
    flat = graph.node("Reshape", graph.transpose(x, order), np.array([-1, 1, *(sizes[i] for i in inner)], np.int64))
    pooled = graph.node(
        "MaxPool", flat, kernel_shape=list(sides), strides=list(strides), pads=[*before, *after],
    )  # fmt: skip
    out = equation.outvars[0].aval.shape
    return graph.transpose(graph.reshape(pooled, [out[i] for i in order]), np.argsort(order).tolist())


def _gather(graph: Graph, equation: Any, x: Value, index: Value) -> Value:
    """Look-up of single places along some axes, whole along the others. Places outside are the nearest inside."""
    dims, taken = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    sizes, of_index = (var.aval.shape for var in equation.invars)
    looked, rows, rows_index = dims.start_index_map, dims.operand_batching_dims, dims.start_indices_batching_dims
    computed = [k for k, axis in enumerate(looked) if taken[axis] != sizes[axis]]  # a whole axis begins at 0
    if len(computed) < len(looked):
        index = graph.node("Gather", index, np.array(computed), axis=len(of_index) - 1)
        looked = tuple(looked[k] for k in computed)
    if any(taken[axis] != 1 for axis in looked):
        raise RunError("this policy looks up slices at places that it computes; take --to jax")
    rest = [axis for axis in range(len(sizes)) if axis not in (*looked, *rows)]
    limits = [taken[axis] if axis in rest else size for axis, size in enumerate(sizes)]
    x = _cut(graph, x, sizes, [0] * len(sizes), limits, [1] * len(sizes))
    x = graph.transpose(x, [*rows, *looked, *rest])
    others = [axis for axis in range(len(of_index) - 1) if axis not in rows_index]
    index = graph.transpose(graph.cast(index, np.int64), [*rows_index, *others, len(of_index) - 1])
    index = _clamped(graph, index, [sizes[axis] - 1 for axis in looked])
    gathered: Value = graph.node("GatherND", x, index, batch_dims=len(rows))
    out = equation.outvars[0].aval.shape
    places = iter(np.argsort([*rows_index, *others]).tolist())
    kept = iter(range(len(of_index) - 1, len(of_index) - 1 + len(rest)))
    whole = [a for a in range(len(sizes)) if a not in (*dims.collapsed_slice_dims, *rows)]  # axes of the offsets
    offsets = dict(zip(dims.offset_dims, whole, strict=True))
    order = [next(places) if i not in offsets else next(kept) for i in range(len(out)) if offsets.get(i) not in looked]
    gathered = graph.transpose(gathered, order)
    return gathered if len(order) == len(out) else graph.reshape(gathered, out)


def _sort(graph: Graph, equation: Any, *inputs: Value) -> list[Value]:
    axis = equation.params["dimension"]
    if equation.params["num_keys"] != 1:
        raise RunError("this policy sorts by several keys, which --to onnx does not translate; take --to jax")
    dtype, size = equation.invars[0].aval.dtype, equation.invars[0].aval.shape[axis]
    key = inputs[0] if dtype in KERNELS[1:] or dtype == jnp.bfloat16 else graph.cast(inputs[0], np.int64)
    _, places = graph.many("TopK", (key, np.array([size])), 2, axis=axis, largest=0)
    return [graph.node("GatherElements", x, places, axis=axis) for x in inputs]


def _top(graph: Graph, equation: Any, x: Value) -> list[Value]:
    axis = equation.params.get("axis", len(equation.invars[0].aval.shape) - 1)
    values, places = graph.many("TopK", (x, np.array([equation.params["k"]])), 2, axis=axis)
    return [values, graph.cast(places, equation.outvars[1].aval.dtype)]


def _same(graph: Graph, equation: Any, *inputs: Value) -> list[Value]:
    return list(inputs)


ONE = np.array(1, np.float32)

RULES: dict[str, Callable[..., Any]] = {
    **{name: _plain(name.capitalize()) for name in ("neg", "exp", "log", "tanh", "erf", "sqrt", "abs", "sign")},
    **{name: _plain(name.capitalize()) for name in ("floor", "ceil", "add", "sub", "mul", "div", "max", "min")},
    **{
        name: _plain(name.capitalize()) for name in ("pow", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")
    },
    "logistic": _plain("Sigmoid"),
    "square": lambda graph, equation, x: _plain("Mul")(graph, equation, x, x),
    "integer_pow": _power,
    "rsqrt": lambda graph, _, x: graph.node("Reciprocal", graph.node("Sqrt", x)),
    "log1p": lambda graph, _, x: graph.node("Log", graph.node("Add", x, ONE)),
    "expm1": lambda graph, _, x: graph.node("Sub", graph.node("Exp", x), ONE),
    "exp2": lambda graph, _, x: graph.node("Pow", np.array(2, np.float32), x),
    "erfc": lambda graph, _, x: graph.node("Sub", ONE, graph.node("Erf", x)),
    "is_finite": lambda graph, _, x: graph.node(
        "Not", graph.node("Or", graph.node("IsInf", x), graph.node("IsNaN", x))
    ),
    "rem": _plain("Mod", fmod=1),
    "round": _round,
    "not": _logical("Not", "BitwiseNot"),
    "and": _logical("And", "BitwiseAnd"),
    "or": _logical("Or", "BitwiseOr"),
    "xor": _logical("Xor", "BitwiseXor"),
    "eq": _plain("Equal"),
    "ne": _negated(_plain("Equal")),
    "lt": _plain("Less"),
    "le": _plain("LessOrEqual"),
    "gt": _plain("Greater"),
    "ge": _plain("GreaterOrEqual"),
    "shift_left": _shift,
    "shift_right_logical": _shift,
    "shift_right_arithmetic": _shift_signed,
    "select_n": _select,
    "clamp": _clamp,
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_and": _reduce("ReduceMin"),
    "reduce_or": _reduce("ReduceMax"),
    "argmax": _argument("ArgMax"),
    "argmin": _argument("ArgMin"),
    "cumsum": _accumulate,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": lambda graph, equation, x: graph.transpose(x, equation.params["permutation"]),
    "slice": _slice,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "split": _split,
    "pad": _pad,
    "rev": _reverse,
    "iota": _iota,
    "convert_element_type": _convert,
    "reduce_precision": _precision,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "reduce_window_max": _window_max,
    "gather": _gather,
    "sort": _sort,
    "top_k": _top,
    **{name: _same for name in ("copy", "optimization_barrier", "name", "stop_gradient")},
}
"""Primitive of JAX -> (graph, equation, inputs) -> its result, or a list of them."""


# --------------------------------------------------------------------------------------------------------------- model


def translate(
    function: Callable[[dict[str, Any]], dict[str, Any]], inputs: Mapping[str, jax.ShapeDtypeStruct], about: str
) -> bytes:
    """A serialised ONNX model of `function`, which maps arrays by name to arrays by name, all [B, ...].

    `inputs` are shapes and types without the batch. Raises RunError for a primitive without a rule.
    """
    try:
        from onnx import checker, helper, numpy_helper
    except ImportError as error:
        raise RunError("--to onnx needs onnx; pip install 'longhaul-rl[export]', or take --to jax") from error
    (batch,) = export.symbolic_shape("b")
    whole = {name: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype) for name, x in inputs.items()}
    traced = jax.jit(function).trace(whole)
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree.leaves_with_path(traced.out_info)]
    graph = Graph(next(iter(whole)), batch)
    ordered = [Ref(name) for name in sorted(whole)]  # as JAX orders a dict's leaves
    results = graph.call(traced.jaxpr, ordered, [True] * len(names))
    for name, x in zip(names, results, strict=True):
        graph.nodes.append(Node("Identity", (graph.name(x),), (name,), ()))
    needed, nodes = set(names), []
    for node in reversed(graph.nodes):
        if needed & set(node.outputs):
            needed |= set(node.inputs)
            nodes.append(helper.make_node(node.operator, node.inputs, node.outputs, **dict(node.attributes)))

    def form(name: str, aval: Any) -> Any:
        shape = [size if isinstance(size, int) else BATCH for size in aval.shape]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(aval.dtype)), shape)

    model = helper.make_model(
        helper.make_graph(
            nodes[::-1], "policy", [form(name, whole[name]) for name in sorted(whole)],
            [form(*pair) for pair in zip(names, traced.jaxpr.out_avals, strict=True)],
            [numpy_helper.from_array(x, name) for name, x in graph.constants.items() if name in needed],
        ),
        producer_name="longhaul", doc_string=about, ir_version=IR, opset_imports=[helper.make_opsetid("", OPSET)],
    )  # fmt: skip
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())
