"""The recipes for `parametrize`, those marked that need what is not in every installation: they skip without it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from longhaul.algorithms.config import GRPOConfig
from longhaul.config import recipes
from longhaul.config.run import Named

ATARI = pytest.mark.skipif(
    find_spec("ale_py") is None or find_spec("gymnasium") is None,
    reason="ale_py and gymnasium, of the extra host, are not installed",
)
"""Of recipes whose Runs can't be resolved without Atari's own sizes."""

FETCHED = pytest.mark.skipif(
    not Path("smollm2-135m").is_dir(), reason="the model is not here; longhaul fetch smollm2-135m writes it"
)
"""Of recipes whose Runs can't be resolved without a model's files."""


def marks(recipe: str) -> Iterator[pytest.MarkDecorator]:
    """Those of a recipe."""
    run = recipes.recipe(recipe)
    task = run.environment
    if isinstance(run.algorithm, GRPOConfig) and run.algorithm.model_folder:
        yield FETCHED
    if isinstance(task, Named) and task.env.startswith("ale/"):
        yield ATARI


RECIPES = [pytest.param(name, marks=[*marks(name)]) for name in recipes.RECIPES]
"""Each recipe's name, for `parametrize`."""
