"""Errors that a user can fix, parts of their lines, and exit codes of the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FAILED, BAD_INPUT, STOPPED = 1, 2, 75
"""Exit codes: a run or a check failed; one line on stderr says what to mend; a signal stopped a run, which is saved and
can be resumed (EX_TEMPFAIL of sysexits.h)."""


class RunError(ValueError):
    """A run that cannot be created, found or resumed; the message is one line."""


class ModuleError(RunError):
    """A module of the user's own that can't be imported, or does not hold what its name promises."""


class FieldError(ValueError):
    """A setting out of bounds: the field, its value, what to do about it."""

    def __init__(self, field: str, value: Any, remedy: str) -> None:
        super().__init__(f"{field} is {value}; {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy

    def within(self, prefix: str) -> FieldError:
        """The error of a nested config, whose fields have a prefix outside."""
        return FieldError(prefix + self.field, self.value, self.remedy)

    def of_flag(self) -> RunError:
        """The error for a user who sets fields by flags."""
        return RunError(f"--{self.field.replace('_', '-')} is {self.value}; {self.remedy}")


def did_you_mean(near: Sequence[str], otherwise: str) -> str:
    """Remedy for a name that is not known: the question for the names `near`, or `otherwise` where there are none."""
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def answer(word: str, answers: Mapping[str, str]) -> str | None:
    """Remedy for another program's word, such as a flag or a command, among `answers` (words -> remedy); None for a
    word that is not there."""
    return next((line for words, line in answers.items() if word.lower().replace("_", "-") in words.split()), None)


REMOVED = "For simplicity, JAX has removed its internal frames"
"""Beginning of a line that JAX writes below a traceback."""


def one_line(error: BaseException) -> str:
    """Text of an error on one line, at most 200 characters; its kind where it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def first_line(error: BaseException) -> str:
    """First line of an error's text, where further lines are details; its kind where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def last_line(stderr: str) -> str:
    """Last line that a failed program wrote, at most 200 characters: of a traceback, the error. What JAX says of its
    own frames below one is left out."""
    said = [line for line in stderr.strip().splitlines() if line.strip("- ") and not line.startswith(REMOVED)]
    return next(reversed(said), "it said nothing")[:200]
