"""What a check found: a verdict, what was measured, the bound, and what to do; as a row, as JSON, as an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
VERDICTS = (PASS, WARN, FAIL, SKIP)
"""`SKIP`: it was not measured, and `remedy` says what that takes."""

HEADER = ("check", "verdict", "value", "bound", "remedy")


class Check(NamedTuple):
    """One row of `longhaul doctor`."""

    name: str
    verdict: str  # one of VERDICTS
    value: str  # what was measured, in words with its unit
    bound: str = ""
    remedy: str = ""  # one sentence, where the verdict is not `pass`
    figures: Mapping[str, Any] = {}  # the same for machines

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**dict(zip(HEADER, self[:5])), "figures": dict(self.figures)}


def failed(checks: Iterable[Check]) -> list[str]:
    """The names of the checks that fail."""
    return [check.name for check in checks if check.verdict == FAIL]


def within(name: str, value: str, bound: str, remedy: str, *, good: bool, **figures: Any) -> Check:
    """`pass` without a remedy, or `fail` with it."""
    return Check(name, PASS if good else FAIL, value, bound, "" if good else remedy, figures)


def skipped(name: str, why: str, remedy: str, **figures: Any) -> Check:
    return Check(name, SKIP, why, "", remedy, figures)
