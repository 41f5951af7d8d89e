"""Description of a setting beside its field: help, choices, bounds, and whether a resumed run may change it.

A config is a frozen dataclass. `setting(default, help, ...)` makes a field with a description, `nested` one that is a
config itself. Flags, help texts and validation are read from these descriptions by `walk`. A field without a
description is no flag.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from longhaul.runtime.errors import FieldError

FIXED, FREE, CHANGEABLE = "fixed", "free", "changeable"
"""Rules of a resume: the value stays; it may differ, since no number depends on it; it may differ and changes numbers,
since it says how much is done, how much at once, or how it is learnt, not what."""

Config = TypeVar("Config")


class Setting(NamedTuple):
    """Description of a field. Bounds hold for each element of a tuple, and not for None."""

    help: str
    choices: tuple[str, ...] = ()  # (): any value
    own: bool = False  # "package.module:name" is taken beside the choices
    least: float | None = None  # smallest value
    above: float | None = None  # the value is larger
    most: float | None = None  # largest value
    why: str = ""  # reason of a bound, in the error
    resume: str = FIXED
    topologies: tuple[str, ...] = ()  # the only ones that have it; (): all
    flag: str = ""  # name of the flag where it is not the field's
    group: str = ""  # heading of the help where it is not the config's
    auto: bool = False  # None is decided by `resolve`
    path: bool = False  # the value is a path, or several
    bare: tuple[str, ...] = ()  # values of the flag and of its negation without a value

    def field(self, default: Any) -> Any:
        """A field of this description."""
        return dataclasses.field(default=default, metadata={"setting": self})

    def check(self, name: str, value: Any) -> None:
        """Raises FieldError where a value of the field `name` is no choice or out of bounds."""
        if isinstance(value, tuple):
            for element in value:
                self.check(name, element)
            return
        if value is None:
            return
        if self.choices and value not in self.choices and not (self.own and ":" in value):
            raise FieldError(name, repr(value), f"it must be one of {', '.join(self.choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise FieldError(name, value, "it must be finite")
        if self.above is not None and not value > self.above:
            raise FieldError(name, value, f"it must be above {self.above:g}{self.why}")
        low, high = self.least, self.most
        if (low is None or value >= low) and (high is None or value <= high):
            return
        bound = f"at least {low}" if high is None else f"at most {high}" if low is None else ""
        raise FieldError(
            name, value, (f"it must be {bound}" if bound else f"it must lie in {low} to {high}") + self.why
        )


def setting(default: Any, help: str, **rest: Any) -> Any:
    """A field with a default and its description, `Setting(help, **rest)`."""
    return Setting(help, **rest).field(default)


def nested(default: Any, prefix: str = "", without: Sequence[str] = ()) -> Any:
    """A field that is a config itself, frozen; `prefix` stands before the names of its flags.

    Fields `without` are no flags here and keep their default.
    """
    return dataclasses.field(default=default, metadata={"prefix": prefix, "without": without})


class Leaf(NamedTuple):
    """One described field of a config, at any depth."""

    name: str  # of its flag, with underscores: "gate_threshold"
    path: tuple[str, ...]  # fields that lead to it
    setting: Setting
    value: Any
    owner: type  # config that has it


def walk(config: Any, path: Sequence[str] = (), prefix: str = "") -> Iterator[Leaf]:
    """The described fields of a config and of the configs in it, in order."""
    for field in dataclasses.fields(config):
        value, where = getattr(config, field.name), (*path, field.name)
        described: Setting | None = field.metadata.get("setting")
        if described is not None:
            yield Leaf(described.flag or prefix + field.name, where, described, value, type(config))
        elif dataclasses.is_dataclass(value):
            without, inner = field.metadata.get("without", ()), field.metadata.get("prefix", prefix)
            yield from (leaf for leaf in walk(value, where, inner) if leaf.path[-1] not in without)


def values(config: Any) -> dict[str, Any]:
    """Values of the described fields, at any depth, by the names of their flags."""
    return {leaf.name: leaf.value for leaf in walk(config)}


def replaced(config: Config, **changes: Any) -> Config:
    """A config with other values of described fields, at any depth, by the names of their flags; else KeyError."""
    paths = {leaf.name: leaf.path for leaf in walk(config)}
    for name, value in changes.items():
        config = _with(config, paths[name], value)
    return config


def _with(config: Any, path: Sequence[str], value: Any) -> Any:
    inner = _with(getattr(config, path[0]), path[1:], value) if len(path) > 1 else value
    return dataclasses.replace(config, **{path[0]: inner})


def check(config: Any) -> None:
    """Raises FieldError where a described field is no choice or out of bounds."""
    for leaf in walk(config):
        leaf.setting.check(leaf.name, leaf.value)
    for field in dataclasses.fields(config):
        for name in field.metadata.get("without", ()):
            value, default = (getattr(inner, name) for inner in (getattr(config, field.name), field.default))
            if value != default:
                raise FieldError(name, repr(value), f"{type(config).__name__} takes {default!r} alone")


def plain(value: Any) -> str:
    """A value as one would type it: 1000000, 0.00025, none, a b."""
    if type(value) is tuple:
        return " ".join(map(plain, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
