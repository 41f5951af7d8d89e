"""Flags of a command as a plain table, parsed by tyro, each error one line.

tyro parses and writes the help. Its errors are boxes of several lines, so all that a user can get wrong is found here
or in the readers of values: an unknown flag, a missing value, a bad one. No JAX here, so that
`longhaul data inspect` starts fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple


class FlagError(ValueError):
    """Words of a command line that mean nothing; the message is one line."""


class Kind(NamedTuple):
    """Kind of a flag's value: its words, and how they are read."""

    metavar: str
    allowed: str  # "a whole number"
    read: Callable[[str], Any]  # raises ValueError
    choices: tuple[str, ...] = ()


class Flag(NamedTuple):
    """One flag: "seed" is `--seed`. A positional argument has a name in capitals."""

    name: str
    kind: Kind
    default: Any
    help: str
    many: bool = False
    shown: str | None = None  # what the help says of the default, where its value does not say it
    aliases: tuple[str, ...] = ()  # other words for it: "total-timesteps"
    bare: tuple[str, ...] = ()  # what --name without a value, or with true, and --no-name, or false, mean

    @property
    def positional(self) -> bool:
        return self.name.isupper()


class Parsed(NamedTuple):
    values: dict[str, Any]  # by the flag's name
    given: frozenset[str]  # the names of flags that the user wrote


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        value = float(word)  # 1e6
        if not value.is_integer():
            raise
        return int(value)


def _real(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(word)
    return value


INT = Kind("INT", "a whole number", _whole)
FLOAT = Kind("NUMBER", "a finite number", _real)
TEXT = Kind("TEXT", "text", str)
PATH = Kind("PATH", "a path", str)
SWITCH = Kind("", "", str)
"""A pair of flags without a value, --name and --no-name."""

ALONE = Kind("", "", str)
"""--name without a value; False where it is not given."""


def choice(names: Sequence[str]) -> Kind:
    """One of `names`."""

    def read(word: str) -> str:
        if word not in names:
            raise ValueError(word)
        return word

    return Kind("{" + ",".join(names) + "}", f"one of {', '.join(names)}", read, tuple(names))


def optional(kind: Kind) -> Kind:
    """`kind`, or the word "none"."""
    return Kind(kind.metavar, f"{kind.allowed}, or none", lambda word: None if word == "none" else kind.read(word))


def nearest(word: str, names: Iterable[str]) -> list[str]:
    """The names most like `word`, at most three: those that begin with it, else by `difflib`."""
    names = list(names)
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    return longer[:3] or difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.6)


def suggestion(word: str, names: Sequence[str], otherwise: str) -> str:
    near = nearest(word, names)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


DEBUG = Flag("debug", ALONE, False, "on an error, show the whole traceback", shown="")


def parse(command: str, about: str, groups: Mapping[str, Sequence[Flag]], words: Sequence[str]) -> Parsed:
    """The flags of `longhaul COMMAND` as `words` set them; `groups` are headings of the help, "" for none.

    Prints the help and raises SystemExit(0) if asked to. Raises FlagError, one line.
    """
    _keep_plain()
    import tyro

    flags = [flag for group in groups.values() for flag in group]
    asked = any(word in ("-h", "--help") for word in words)
    words = list(words) if asked else _without_aliases(flags, _with_values(flags, words))
    given = frozenset() if asked else _check(command, flags, words)
    made: Any = _dataclass(groups)
    try:
        parsed, unknown = tyro.cli(
            made, prog=f"longhaul {command}", description=about, args=["--help"] if asked else list(words),
            return_unknown_args=True, console_outputs=asked,
        )  # fmt: skip
    except _Refused as error:
        raise FlagError(str(error)) from None
    except SystemExit as end:
        if not asked or end.code:
            raise FlagError(f"these flags can't be read; see longhaul {command} --help") from None
        raise
    if unknown:
        raise FlagError(_unknown(command, flags, unknown))
    inner = {f.name: getattr(parsed, f.name) for f in dataclasses.fields(parsed)}
    for value in list(inner.values()):
        if dataclasses.is_dataclass(value):
            inner |= {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return Parsed({flag.name: inner[_identifier(flag)] for flag in flags}, given)


class _Refused(Exception):
    """A value that can't be read. No ValueError: tyro would make a box of it."""


def _keep_plain() -> None:
    """Tells tyro, before it is imported, that NO_COLOR is set; it knows of terminals by itself."""
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")


def _identifier(flag: Flag) -> str:
    return "flag_" + re.sub(r"[^a-z0-9]", "_", flag.name.lower())


def _dataclass(groups: Mapping[str, Sequence[Flag]]) -> type:
    """Dataclass of the flags for tyro, those of a group in one of their own."""
    import tyro

    root: list[tuple[str, Any, Any]] = []
    for title, flags in groups.items():
        fields = [(_identifier(f), _annotation(f), dataclasses.field(default=f.default)) for f in flags]
        if not title:
            root += fields
            continue
        name = title.split(":")[0]
        inner = dataclasses.make_dataclass(name.capitalize(), fields, frozen=True)
        inner.__doc__ = title.partition(":")[2].strip()
        kind: Any = Annotated[inner, tyro.conf.OmitArgPrefixes]
        root.append((name, kind, dataclasses.field(default_factory=inner)))
    return dataclasses.make_dataclass("Flags", root, frozen=True)


def _annotation(flag: Flag) -> Any:
    import tyro
    from tyro.constructors import PrimitiveConstructorSpec

    shown = flag.shown if flag.shown is not None else "none" if flag.default is None else None
    hint = None if shown is None else f"(default: {shown})" if shown else ""
    if flag.kind in (SWITCH, ALONE):
        argument = tyro.conf.arg(name=flag.name, help=flag.help, help_behavior_hint=hint)
        return Annotated[(bool, argument, *((tyro.conf.FlagCreatePairsOff,) if flag.kind is ALONE else ()))]

    def read(words: list[str]) -> Any:
        values = tuple(_read(flag, word) for word in words)
        return values if flag.many else values[0]

    def write(value: Any) -> list[str]:
        return [str(each) for each in value] if flag.many else [_plain(value)]

    metavar = flag.name if flag.positional else flag.kind.metavar
    spec = PrimitiveConstructorSpec(
        nargs="*" if flag.many else 1, metavar=f"{metavar}..." if flag.many else metavar, instance_from_str=read,
        is_instance=lambda value: True, str_from_instance=write,
    )  # fmt: skip
    name = None if flag.positional else flag.name
    others = tuple(f"--{alias}" for alias in flag.aliases) or None
    argument = tyro.conf.arg(name=name, aliases=others, help=flag.help, help_behavior_hint=hint)
    return Annotated[(Any, spec, argument, *((tyro.conf.Positional,) if flag.positional else ()))]


def _plain(value: Any) -> str:
    """A number as one would type it: 1000000, 0.00025."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read(flag: Flag, word: str) -> Any:
    """The value of one word; `_Refused`, naming flag, value and what is allowed."""
    try:
        return flag.kind.read(word)
    except (ValueError, OverflowError):
        name = flag.name if flag.positional else f"--{flag.name}"
        near = nearest(word, flag.kind.choices)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise _Refused(f"{name} is {word!r}; it must be {flag.kind.allowed}{hint}") from None


def _split(word: str) -> tuple[str, bool, str]:
    """ "--num_envs=4" -> ("num-envs", True, "4")."""
    name, equals, value = word[2:].partition("=")
    return name.replace("_", "-"), bool(equals), value


def _with_values(flags: Sequence[Flag], words: Sequence[str]) -> list[str]:
    """`words` with a value for each flag that can also be written as if it were a switch."""
    bare = {flag.name: flag.bare for flag in flags if flag.bare}
    plain: list[str] = []
    waits = ""  # the flag whose value comes next
    for i, word in enumerate(words):
        name, equals, value = _split(word) if word.startswith("--") else (waits, True, word)
        waits = ""
        positive = name.removeprefix("no-")
        if positive not in bare:
            plain.append(word)
            continue
        on, off = bare[positive]
        if name != positive and not equals:
            plain.append(f"--{positive}={off}")
        elif equals:
            plain.append(f"--{name}={ {'true': on, 'false': off}.get(value, value) }")
        elif _is_value(words[i + 1 : i + 2]):
            waits = name
        else:
            plain.append(f"--{name}={on}")
    return plain


def _without_aliases(flags: Sequence[Flag], words: Sequence[str]) -> list[str]:
    """`words` with each flag by its own name. Raises FlagError where two names of one are given different values."""
    own = {alias: flag for flag in flags for alias in flag.aliases}
    named = {flag.name: flag for flag in flags if flag.aliases} | own
    seen: dict[str, tuple[str, str]] = {}
    plain = list(words)
    for i, word in enumerate(words):
        name, equals, value = _split(word) if word.startswith("--") else ("", False, "")
        if name not in named:
            continue
        flag = named[name]
        plain[i] = f"--{flag.name}={value}" if equals else f"--{flag.name}"
        value = value if equals else "".join(words[i + 1 : i + 2])
        before, known = seen.setdefault(flag.name, (name, value))
        if before != name and known != value:
            raise FlagError(f"--{before} is {known} and --{name}, another word for it, is {value}; give one of them")
    return plain


def _check(command: str, flags: Sequence[Flag], words: Sequence[str]) -> frozenset[str]:
    """The names of the flags that `words` hold. Raises FlagError where one lacks its value, or has one it must not."""
    known = {flag.name: flag for flag in flags if not flag.positional}
    given: set[str] = set()
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = _split(word)
        inverse = known.get(name.removeprefix("no-"))
        if name not in known and name.startswith("no-") and inverse is not None and inverse.kind is SWITCH:
            name = inverse.name
        flag = known.get(name)
        if flag is None:
            continue  # tyro finds it
        bare = flag.kind in (SWITCH, ALONE)
        if bare and equals:
            raise FlagError(f"--{name} takes no value; write --{name}" + f" or --no-{name}" * (flag.kind is SWITCH))
        if not bare and (value == "" if equals else not _is_value(words[i + 1 : i + 2])):
            raise FlagError(f"--{name} has no value; it must be {flag.kind.allowed}")
        if flag.many and name in given:
            raise FlagError(f"--{name} is given twice; write it once, with all its values after it")
        given.add(name)
    return frozenset(given)


def _is_value(following: Sequence[str]) -> bool:
    """True if a word follows that is a value: "-" and "-0.5" are values."""
    return bool(following) and not re.match(r"-[^\d.]", following[0])


def _unknown(command: str, flags: Sequence[Flag], unknown: Sequence[str]) -> str:
    """Error line on the words that tyro did not take."""
    first = next((word for word in unknown if word.startswith("-")), None)
    if first is None:
        return f"{unknown[0]!r} is one word too many; see longhaul {command} --help"
    name = _split(first)[0] if first.startswith("--") else first[1:]
    names = [name for flag in flags if not flag.positional for name in (flag.name, *flag.aliases)]
    near = nearest(name, names)  # without "--", which is like any other
    hint = f"did you mean --{' or --'.join(near)}?" if near else f"see longhaul {command} --help"
    return f"longhaul {command} has no flag {first.partition('=')[0]}; {hint}"
