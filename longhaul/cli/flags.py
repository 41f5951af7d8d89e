"""Flags of a command as a plain table, parsed by argparse; each error is one line.

No JAX here, so that `longhaul data inspect` starts fast.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from longhaul.runtime.config_fields import plain
from longhaul.runtime.errors import answer, did_you_mean
from longhaul.runtime.user_modules import is_named


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
    shown: str | None = None  # what the help says of the default; None: its value, or nothing where there is none
    aliases: tuple[str, ...] = ()  # other words for it: "total-timesteps"
    bare: tuple[str, ...] = ()  # what --name without a value, or with true, and --no-name, or false, mean

    least: float | None = None  # smallest value
    most: float | None = None  # largest value

    @property
    def positional(self) -> bool:
        return self.name.isupper()

    @property
    def option(self) -> str:
        """The flag as one writes it: --num-envs; RUN where it is positional."""
        return self.name if self.positional else f"--{self.name.replace('_', '-')}"


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
PATH = Kind("PATH", "a path", os.path.expanduser)
"""~ is the home folder here, too: a shell leaves it alone behind the = of --runs-dir=~/runs."""

SWITCH = Kind("", "", str)
"""A pair of flags without a value, --name and --no-name."""

ALONE = Kind("", "", str)
"""--name without a value; False where it is not given."""


def _output(word: str) -> str:
    word = os.path.expanduser(word)
    if word != "-" and (Path(word).is_dir() or not Path(word).absolute().parent.is_dir()):
        raise ValueError(word)
    return word


OUTPUT = Kind("PATH", "a file in a folder that exists, or - for stdout", _output)


def choice(names: Sequence[str], own: bool = False) -> Kind:
    """One of `names`; with `own` a "package.module:name", too."""

    def read(word: str) -> str:
        if word not in names and not (own and is_named(word)):
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
    return did_you_mean(near, otherwise)


DEBUG = Flag("debug", ALONE, False, "on an error, show the whole traceback")


def parse(
    command: str, about: str, groups: Mapping[str, Sequence[Flag]], argv: Sequence[str], *,
    few: Sequence[str] = (), answers: Mapping[str, str] = MappingProxyType({}),
) -> Parsed:  # fmt: skip
    """The flags of `longhaul COMMAND` as `argv` sets them; `groups` are headings of the help, "" for none.

    Prints the help and raises SystemExit(0) if asked to: with `few`, the names of flags that matter, of these alone,
    and of all on --help-all. `answers` are sentences on flags that other programs have. Raises FlagError, one line.
    """
    flags = [flag for group in groups.values() for flag in group]
    positional = [flag for flag in flags if flag.positional]
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, formatter_class=_Formatter, description=about,
        usage=" ".join([f"longhaul {command}", "[OPTIONS]", *(f"[{_metavar(flag)}]" for flag in positional)]),
    )  # fmt: skip
    parser._negative_number_matcher = re.compile(r"-[\d.]")  # -1e-3 is a value, too
    if {"-h", "--help", "--help-all"} & set(argv):
        print(_short_help(parser, command, flags, few) if few and "--help-all" not in argv else _help(parser, groups))
        raise SystemExit(0)
    typed = {_dashed(word).partition("=")[0]: word.partition("=")[0] for word in argv}  # our form -> the user's
    values: dict[str, Any] = {flag.name: flag.default for flag in flags}
    given: dict[str, tuple[str, Any]] = {}  # flag -> the name that the user wrote, and its value
    for flag in flags:
        if not flag.positional:
            _add(parser, flag, given, typed)
    try:
        _, rest = parser.parse_known_args([_dashed(word) for word in argv])
    except argparse.ArgumentError as error:
        names = str(error.argument_name).split("/")
        flag = next(flag for flag in flags if flag.option == names[0])
        raise FlagError(_without_value(flag, next(typed[name] for name in names if name in typed))) from None
    unknown = [word for word in rest if word.startswith("-") and word != "-" and not re.match(r"-[\d.]", word)]
    if unknown:
        written = typed[unknown[0].partition("=")[0]]
        if known := answer(_dashed(written)[2:], answers):
            raise FlagError(f"longhaul {command} has no flag {written}; {known}")
        raise FlagError(_unknown(command, flags, written))
    for flag in positional:
        words, rest = (rest, []) if flag.many else (rest[:1], rest[1:])
        if words:
            read = tuple(_read(flag, word, flag.name) for word in words)
            values[flag.name] = read if flag.many else read[0]
    if rest:
        raise FlagError(f"{rest[0]!r} is one word too many; {_setting_hint(flags, rest[0], command)}")
    return Parsed(values | {name: value for name, (_, value) in given.items()}, frozenset(given))


def of_group(
    name: str, commands: Mapping[str, Callable[[Sequence[str]], int]], usage: Sequence[str], argv: Sequence[str],
    answers: Mapping[str, str] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Exit code of one of the commands `longhaul NAME ...`; `usage` has a line of each.

    `answers` are sentences on commands that other programs have.
    """
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    if argv and argv[0] in ("-h", "--help"):
        print("usage: " + "\n       ".join(usage))
        return 0
    problem = f"longhaul {name} has no command {argv[0]!r}" if argv else "a command is missing"
    known = answer(argv[0], answers) if argv else None
    raise FlagError(f"{problem}; {known or 'there are ' + ', '.join(usage)}")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar)


def _metavar(flag: Flag) -> str:
    return (flag.name if flag.positional else flag.kind.metavar) + "..." * flag.many


def _help(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Flag]]) -> str:
    for title, flags in sorted(groups.items(), key=lambda group: group[0] != ""):
        name, _, about = title.partition(":")
        group = parser.add_argument_group(f"{name} options".strip(), about.strip() or None)
        if not title:
            group.add_argument("-h", "--help", action="help", help="show this help and exit")
        for flag in flags:
            shown = flag.shown
            if shown is None and flag.kind is not ALONE and flag.default is not None:
                shown = " ".join(map(str, flag.default)) if flag.many else plain(flag.default)
            default = {None: "", "": "", "needed": " (needed)"}.get(shown, f" (default: {shown})")
            text = (flag.help + default).replace("%", "%%")
            if flag.positional:
                group.add_argument(flag.name, metavar=_metavar(flag), help=text)
            else:
                rest = {"action": "store_true"} if flag.kind in (SWITCH, ALONE) else {"metavar": _metavar(flag)}
                group.add_argument(*_names(flag), help=text, **rest)  # type: ignore[arg-type]
    return parser.format_help().rstrip()


def _short_help(parser: argparse.ArgumentParser, command: str, flags: Sequence[Flag], few: Sequence[str]) -> str:
    """Help on the flags that matter, a line or two each, in the order of `few`."""
    named = {flag.name: flag._replace(aliases=()) for flag in flags}
    shown = [named[name] for name in few if name in named]
    short = [
        flag._replace(kind=flag.kind._replace(metavar="NAME")) if len(flag.kind.metavar) > 12 else flag
        for flag in shown
    ]
    text = _help(parser, {"": short})
    return f"{text}\n\nlonghaul {command} --help-all shows all {len(flags)} flags, by topic."


def _names(flag: Flag) -> list[str]:
    return [flag.option, *(f"--{name}" for name in flag.aliases), *([_negation(flag)] if flag.kind is SWITCH else [])]


def _negation(flag: Flag) -> str:
    return f"--no-{flag.option[2:]}"


def _add(
    parser: argparse.ArgumentParser, flag: Flag, given: dict[str, tuple[str, Any]], typed: Mapping[str, str]
) -> None:
    """Adds a flag whose values go into `given`; `typed` are flags as the user wrote them."""

    class Take(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, words: Any, name: str | None = None) -> None:
            written, flag_word = str(name).removeprefix("--"), typed.get(str(name), str(name))
            if flag.kind in (SWITCH, ALONE):
                value: Any = not written.startswith("no-")
            elif flag.bare and (words is None or self.nargs == 0 or words in ("true", "false")):
                value = flag.bare[written.startswith("no-") or words == "false"]
            elif words == "":
                raise FlagError(_without_value(flag, flag_word))
            else:
                value = (
                    tuple(_read(flag, word, flag_word) for word in words)
                    if flag.many
                    else _read(flag, words, flag_word)
                )
            before, known = given.get(flag.name, (written, value))
            if flag.many and flag.name in given:
                raise FlagError(f"{flag_word} is given twice; write it once, with all its values after it")
            if before != written and known != value and flag.aliases:
                raise FlagError(
                    f"--{before} is {plain(known)} and --{written}, another word for it, is {plain(value)}; give one "
                    "of them"
                )
            given[flag.name] = (written, value)

    nargs: Any = 0 if flag.kind in (SWITCH, ALONE) else "+" if flag.many else "?" if flag.bare else None
    parser.add_argument(*_names(flag), action=Take, nargs=nargs)
    if flag.bare:
        parser.add_argument(_negation(flag), action=Take, nargs=0)


def _dashed(word: str) -> str:
    """ "--num_envs=a_b" -> "--num-envs=a_b"."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _read(flag: Flag, word: str, name: str) -> Any:
    """The value of one word; FlagError, naming the flag as it was `name`, value and what is allowed."""
    try:
        value = flag.kind.read(word)
    except (ValueError, OverflowError):
        near = nearest(word, flag.kind.choices)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise FlagError(f"{name} is {word!r}; it must be {flag.kind.allowed}{hint}") from None
    low, high = flag.least, flag.most
    if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
        bound = f"be at least {plain(low)}" if high is None else f"lie in {plain(low)} to {plain(high)}"
        raise FlagError(f"{name} is {plain(value)}; it must {bound}")
    return value


def _without_value(flag: Flag, name: str) -> str:
    """Error line on a flag that lacks its value, or has one that it must not."""
    if flag.kind in (SWITCH, ALONE):
        return f"{name} takes no value; write {flag.option}" + f" or {_negation(flag)}" * (flag.kind is SWITCH)
    return f"{name} has no value; it must be {flag.kind.allowed}"


def _setting_hint(flags: Sequence[Flag], word: str, command: str) -> str:
    """Remedy for a word too many: the flag that lr=0.001 or algorithm.lr=0.001 means."""
    setting, equals, value = word.partition("=")
    name = setting.rpartition(".")[2].replace("_", "-")
    known = next((flag for flag in flags if name in (flag.name, *flag.aliases) and not flag.positional), None)
    return f"write {known.option} {value}" if equals and known else f"see longhaul {command} --help"


def _unknown(command: str, flags: Sequence[Flag], word: str) -> str:
    """Error line on a flag that the command has not."""
    written = word.partition("=")[0]
    names = [name[2:] for flag in flags if not flag.positional for name in _names(flag)]
    near = nearest(_dashed(written).lstrip("-").rpartition(".")[2], names)
    hint = f"did you mean --{' or --'.join(near)}?" if near else f"see longhaul {command} --help"
    return f"longhaul {command} has no flag {written}; {hint}"
