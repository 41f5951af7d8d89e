"""Recipes from outside the package: by module and name, and by entry points of an installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longhaul.cli import main
from longhaul.config import recipes
from longhaul.config.resolve import changed, resolve
from longhaul.config.run import Named
from longhaul.envs import external, registry
from longhaul.runtime.errors import RunError

MODULE = """
from longhaul.algorithms.config import PPOConfig
from longhaul.config.run import Named, Run
from tests.helpers.own_environments import Corridor

def recipe():
    return Run("any", Named("own_recipes_of_a_test:Corridor"), PPOConfig(lr=1e-3), num_envs=8, num_steps=16)

NUMBER = 3
"""

POINTS = """
[longhaul.recipes]
hall = own_recipes_of_a_test:recipe

[longhaul.environments]
hallway = own_recipes_of_a_test:Corridor
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_recipes_of_a_test.py").write_text(MODULE)
    about = tmp_path / "own_recipes-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-recipes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    external.installed.cache_clear()
    yield
    external.installed.cache_clear()
    sys.modules.pop("own_recipes_of_a_test", None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["own_recipes_of_a_test:recipe", "hall"])
def test_a_recipe_from_outside_is_a_run_under_its_own_name(name: str) -> None:
    run = resolve(recipes.recipe(name))
    assert (run.recipe, run.environment, run.algorithm.lr) == (name, Named("own_recipes_of_a_test:Corridor"), 1e-3)
    assert "outside the package" in recipes.about(name)


@pytest.mark.usefixtures("installed")
def test_an_installed_environment_is_kept_by_its_module_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run = resolve(changed(recipes.recipe("ppo"), {"env": "hallway"}))
    assert run.environment == Named("own_recipes_of_a_test:Corridor")
    assert registry.make("hallway") is registry.make("hallway")
    assert main.main(["recipes"]) == 0 and main.main(["envs"]) == 0
    out = capsys.readouterr().out
    assert "of own_recipes_of_a_test:recipe" in out and "hallway  own_recipes_of_a_test:Corridor" in out


def test_without_docstrings_names_describe_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under python -OO, where every command that lists them failed."""
    monkeypatch.setattr(recipes.RECIPES["cartpole"], "__doc__", None)
    monkeypatch.setattr(registry.probes.PROBES["memory"], "__doc__", None)
    assert dict(recipes.described())["cartpole"] == recipes.about("cartpole") == "cartpole"
    assert dict(registry.names())["probe/memory"] == "memory"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hal", "no recipe is named 'hal'; did you mean hall"),
        ("own_recipes_of_a_test:recipes", "has no recipes; did you mean recipe"),
        ("own_recipes_of_a_test:NUMBER", "gives a int; it must give a longhaul.config.run.Run"),
        ("own_nothing:recipe", "own_nothing can't be imported: ModuleNotFoundError"),
        ("driving-scaling", "is a grid of many runs"),
    ],
)
def test_a_name_that_is_no_recipe_is_one_line(name: str, says: str) -> None:
    with pytest.raises(RunError, match=says) as caught:
        recipes.recipe(name)
    assert "\n" not in str(caught.value)
