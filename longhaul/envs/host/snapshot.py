"""Snapshots of Gymnasium environments from their attributes, so that a run in a user's own environment resumes exactly.

An environment's state is taken to be what its attributes hold, in every wrapper around it: numbers, arrays, NumPy's
random generators. Anything else (a list, an object, a simulator behind it) can't be told apart from what it refers to;
such an environment has no snapshot, and a resumed run begins new episodes in it. Attributes that never change the state
(spaces, strings, functions) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from longhaul.envs.host.vector import LostState
from longhaul.spaces import Tree

NONE, BOOL, INT, FLOAT = range(4)
"""Kinds of a number: an attribute may be None before the first reset, or whole at first and a fraction later."""

TYPES = tuple(np.dtype(code) for code in "?bhilqBHILQefd")
"""Types of NumPy's scalars, whose kinds follow those of Python's numbers."""

WORD = 1 << 64


class Unknown(Exception):
    """An attribute whose value no snapshot holds."""


def take(environment: Any) -> dict[str, np.ndarray] | None:
    """Attributes as arrays of fixed shape, by "layer.form.name"; None where one can't be captured."""
    try:
        return {
            f"{depth}.{form}.{name}": packed
            for depth, layer in enumerate(_layers(environment))
            for name, value in sorted(vars(layer).items())
            if not _constant(name, value)
            for form, packed in [_packed(value)]
        }
    except Unknown:
        return None


def unknown(environment: Any) -> str:
    """Names of the attributes that no snapshot holds."""
    names = []
    for layer in _layers(environment):
        for name, value in vars(layer).items():
            try:
                if not _constant(name, value):
                    _packed(value)
            except Unknown as error:
                names.append(f"{name}: {error}")
    return ", ".join(names)


def restore(environment: Any, state: dict[str, np.ndarray]) -> None:
    """Puts an environment that was made alike into a state that `take` returned."""
    layers = _layers(environment)
    for path, packed in state.items():
        depth, form, name = path.split(".", 2)
        vars(layers[int(depth)])[name] = _unpacked(form, np.array(packed))


EXACT = "exact"
"""Entry of a state: False where an attribute has another form than in the first state, so that this one is lost."""


class Snapshots:
    """States of environments of one form, which the first state decides."""

    def __init__(self) -> None:
        self._blank: dict[str, np.ndarray] | None = None

    def take(self, environments: Sequence[Any]) -> Tree | None:
        """State of all, stacked; None where the first can't be captured."""
        each = [take(environment) for environment in environments]
        if self._blank is None:
            if each[0] is None:
                return None
            self._blank = {name: np.zeros_like(value) for name, value in each[0].items()}
        exact = [state is not None and _forms(state) == _forms(self._blank) for state in each]
        rows = [state if good and state is not None else self._blank for state, good in zip(each, exact, strict=True)]
        return {EXACT: np.array(exact)} | {name: np.stack([row[name] for row in rows]) for name in self._blank}

    def restore(self, environments: Sequence[Any], state: Tree) -> None:
        """Restoration of all states. Raises LostState where one is not exact."""
        if not np.all(state[EXACT]):
            raise LostState("an attribute of the environment changed its form, and its state could not be told")
        for i, environment in enumerate(environments):
            restore(environment, {name: values[i] for name, values in state.items() if name != EXACT})


def _forms(state: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: (value.shape, value.dtype) for name, value in state.items()}


def _layers(environment: Any) -> list[Any]:
    """The environment and all that it wraps, outermost first."""
    layers = [environment]
    while "env" in vars(layers[-1]):
        layers.append(vars(layers[-1])["env"])
    return layers


def _constant(name: str, value: Any) -> bool:
    from gymnasium import Space
    from gymnasium.envs.registration import EnvSpec

    fixed = str, bytes, type, Space, EnvSpec, FunctionType, MethodType, BuiltinFunctionType, ModuleType
    return name in ("env", "metadata", "spec", "_saved_kwargs", "_cached_spec") or isinstance(value, fixed)


def _packed(value: Any) -> tuple[str, np.ndarray]:
    """(form, array) of a value: a number as its kind and bits, an array as it is, a generator as its words."""
    if isinstance(value, np.random.Generator):
        inner = value.bit_generator.state
        if inner["bit_generator"] != "PCG64":
            raise Unknown(inner["bit_generator"])
        words = [part for name in ("state", "inc") for part in divmod(inner["state"][name], WORD)]
        return "generator", np.array([*words, inner["has_uint32"], inner["uinteger"]], np.uint64)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return "array", np.array(value)
    return "number", np.array(_number(value), np.int64)


def _number(value: Any) -> tuple[int, int]:
    """(kind, bits) of a number or None."""
    if isinstance(value, np.generic) and value.dtype in TYPES:
        bits = np.zeros(8, np.uint8)
        bits[: value.dtype.itemsize] = np.frombuffer(value.tobytes(), np.uint8)
        return FLOAT + 1 + TYPES.index(value.dtype), int(bits.view(np.int64)[0])
    if value is None:
        return NONE, 0
    if isinstance(value, bool):
        return BOOL, int(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return INT, value
    if isinstance(value, float):
        return FLOAT, int(np.float64(value).view(np.int64))
    raise Unknown(type(value).__name__)


def _unpacked(form: str, packed: np.ndarray) -> Any:
    if form == "array":
        return packed
    if form == "generator":
        high, low, inc_high, inc_low, has, word = (int(part) for part in packed)
        fresh = np.random.PCG64()
        fresh.state = {
            "bit_generator": "PCG64",
            "state": {"state": high * WORD + low, "inc": inc_high * WORD + inc_low},
            "has_uint32": has,
            "uinteger": word,
        }
        return np.random.Generator(fresh)
    kind, bits = (int(part) for part in packed)
    if kind > FLOAT:
        dtype = TYPES[kind - FLOAT - 1]
        return np.frombuffer(np.int64(bits).tobytes()[: dtype.itemsize], dtype)[0]
    if kind == FLOAT:
        return float(np.int64(bits).view(np.float64))
    return None if kind == NONE else bool(bits) if kind == BOOL else bits
