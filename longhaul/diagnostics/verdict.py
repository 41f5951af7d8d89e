"""Result of a check: verdict, measured value, bound and remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
VERDICTS = (PASS, WARN, FAIL, SKIP)
"""Verdicts of a check. `SKIP` means not measured; `remedy` says what is needed."""

HEADER = ("check", "verdict", "value", "bound", "remedy")


class Check(NamedTuple):
    """One row of `longhaul doctor`."""

    name: str
    verdict: str  # one of VERDICTS
    value: str  # measured value in words with its unit
    bound: str = ""
    remedy: str = ""  # one sentence, unless the verdict is `pass`
    figures: Mapping[str, Any] = {}  # the value for programs

    def plain(self) -> dict[str, Any]:
        """The check as JSON can hold it."""
        return {**dict(zip(HEADER, self[:5])), "figures": dict(self.figures)}


def failed(checks: Iterable[Check]) -> list[str]:
    """Names of failed checks."""
    return [check.name for check in checks if check.verdict == FAIL]


def within(name: str, value: str, bound: str, remedy: str, *, good: bool, **figures: Any) -> Check:
    """Check that passes without a remedy, or fails with it."""
    return Check(name, PASS if good else FAIL, value, bound, "" if good else remedy, figures)


def skipped(name: str, why: str, remedy: str, **figures: Any) -> Check:
    return Check(name, SKIP, why, "", remedy, figures)
