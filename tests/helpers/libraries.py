"""Libraries that few tests use, each imported where one does: every worker imports all files of tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class Library:
    """A module that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks each name of a file for marks
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def library(name: str, reason: str | None = None) -> Any:
    """Module `name`, not yet imported; where it is not installed, the tests of the file that asks are skipped."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(reason or f"{name} is not installed", allow_module_level=True)
    return Library(name)
