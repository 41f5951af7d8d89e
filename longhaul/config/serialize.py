"""JSON form of a Run: `to_dict` and its inverse."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from longhaul.algorithms.config import NAMES
from longhaul.config.run import Driving, Named
from longhaul.reasoning.config import Reasoning

KINDS: dict[type, str] = {Named: "Named", Driving: "Driving", Reasoning: "Reasoning"} | NAMES
"""Names of classes in JSON, where a field may have several; a value without a name is of the field's first class."""


def to_dict(value: Any) -> Any:
    """A dataclass as JSON can hold it; `kind` names the class where a field may have several."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": KINDS[type(value)], **fields} if type(value) in KINDS else fields
    return [to_dict(v) for v in value] if isinstance(value, (list, tuple)) else value


def from_dict(kind: Any, value: Any) -> Any:
    """The inverse of `to_dict`. Raises TypeError where a field is missing, unknown or of another type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if isinstance(value, dict) and "kind" in value:
            named_kind = {KINDS[o]: o for o in options if o in KINDS}.get(value["kind"])
            if named_kind is None:
                raise TypeError(f"kind {value['kind']!r} is unknown")
            return from_dict(named_kind, {k: v for k, v in value.items() if k != "kind"})
        if value is None:
            return None
        return from_dict(next(o for o in options if o is not type(None)), value)
    if (dataclasses.is_dataclass(kind), typing.get_origin(kind) is tuple) != (type(value) is dict, type(value) is list):
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = {f.name for f in dataclasses.fields(kind)}
        if set(value) != names:
            odd = sorted(set(value) ^ names)
            raise TypeError(f"fields {', '.join(odd)} do not fit")
        return typing.cast(Any, kind)(**{name: from_dict(hints[name], value[name]) for name in names})
    if typing.get_origin(kind) is tuple:
        return tuple(from_dict(typing.get_args(kind)[0], v) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
