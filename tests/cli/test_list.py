"""The commands `recipes` and `envs`."""

from __future__ import annotations

from typing import Any

from longhaul.config import recipes
from longhaul.envs import registry


def test_every_recipe_has_a_line(longhaul: Any) -> None:
    code, out, _ = longhaul("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [*recipes.RECIPES, *recipes.GRIDS]


def test_every_environment_has_a_line(longhaul: Any) -> None:
    code, out, _ = longhaul("envs")
    assert code == 0
    assert {name for name, _ in registry.names()} <= {line.split()[0] for line in out.splitlines() if line.strip()}
