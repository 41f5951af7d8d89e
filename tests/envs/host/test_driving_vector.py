"""Driving on the host: descriptions from which another process makes the same worlds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from longhaul.config import recipes
from longhaul.config.resolve import replaced
from longhaul.config.run import Driving
from longhaul.driving.sim import shared_bank, simulator
from longhaul.driving.sim.config import Config, Weights
from longhaul.envs.host import driving_vector, registry
from longhaul.envs.host.driving_vector import changes, compiled, configuration
from longhaul.envs.host.vector import Description
from longhaul.topologies.inference_server.actor import _plain
from longhaul.training import inference_server


@pytest.mark.parametrize("recipe", ["driving", "driving-sac", "driving-selfplay", "driving-best", "driving-large"])
def test_a_configuration_comes_back_from_its_settings(recipe: str) -> None:
    task = recipes.recipe(recipe).environment
    assert isinstance(task, Driving)
    found = changes(task.simulator)
    assert configuration(found) == task.simulator
    assert "neighbours" not in found or found["neighbours"] != Config().neighbours


def test_a_description_comes_back_from_what_an_actor_is_started_with() -> None:
    run = replaced(recipes.recipe("driving-best"), {"data": ("/logs/a*.bin", "/b"), "objects": 40, "horizon": 30})
    description = inference_server.description(run)
    assert registry.describe(registry.address(description)) == description
    assert dict(description.options)["more"] == ("/b",)
    assert '&weights={"progress": 0.15, ' in registry.address(description)
    kind, name, options = json.loads(json.dumps(description))
    assert Description(kind, name, tuple((key, _plain(value)) for key, value in options)) == description
    named = registry.describe("driving/generated", dynamics="jerk", control="None")
    assert registry.address(named) == "driving/generated?control='None'&dynamics=jerk"
    assert registry.describe(registry.address(named)) == named
    generated = inference_server.description(recipes.recipe("driving-selfplay"))
    assert str(generated) == "driving/generated"
    assert dict(generated.options) == {"agents": 16, "least": 12, "scenarios": 2048}


def test_a_setting_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"driving: .*unexpected keyword argument 'agent'"):
        configuration({"agent": 2})
    with pytest.raises(ValueError, match=r"driving: .*unexpected keyword argument 'goals'"):
        configuration({"weights": {"goals": 2.0}})
    assert configuration({"weights": {"goal": 3.0}}) == Config(weights=Weights(goal=3.0))


@pytest.mark.slow
def test_scenarios_of_another_process_are_driven_in_as_ones_own() -> None:
    settings = {"agents": 2, "neighbours": 2, "waypoints": 2, "horizon": 12, "scenarios": 3}
    own = registry.make(registry.describe("driving/generated", **settings), 2)
    bank, config = compiled(**settings)
    shell, tables = simulator.arranged(bank, config)
    with shared_bank.sharing(tables) as shared:
        data = shared_bank.digest(tables, shell.config)
        other = registry.make(driving_vector.shared(shared, shell, data), 2)
    assert own.spec == other.spec
    assert own.spec.data == data != ""
    np.testing.assert_equal(own.reset(7), other.reset(7))
    rng, ends = np.random.default_rng(0), 0
    for _ in range(24):
        action = rng.integers(0, 7, (4, 2))
        one, two = own.step(action), other.step(action)
        np.testing.assert_equal(one, two)
        ends += len(one.finals.columns)
    assert ends > 0
