"""The recipes for `parametrize`, those marked that need what is not in every installation: they skip without it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from longhaul.config import recipes
from longhaul.config.run import Named

ATARI = pytest.mark.skipif(
    find_spec("ale_py") is None or find_spec("gymnasium") is None,
    reason="ale_py and gymnasium, of the extra host, are not installed",
)
"""Of recipes whose Runs can't be resolved without Atari's own sizes."""


def marks(recipe: str) -> Iterator[pytest.MarkDecorator]:
    """Those of a recipe."""
    task = recipes.recipe(recipe).environment
    if isinstance(task, Named) and task.env.startswith("ale/"):
        yield ATARI


RECIPES = [pytest.param(name, marks=[*marks(name)]) for name in recipes.RECIPES]
"""Each recipe's name, for `parametrize`."""
