"""Runs of older versions: a field that was missing gets its old behaviour."""

from __future__ import annotations

import dataclasses

import pytest

from longhaul.config import recipes
from longhaul.config.run import Run, from_dict, to_dict
from longhaul.runtime import config_fields
from longhaul.training import legacy_runs


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_run_file_from_before_the_network_was_nested_is_read(recipe: str) -> None:
    run = recipes.recipe(recipe)
    written = to_dict(run)
    flags = {leaf.path[-1] for leaf in config_fields.walk(run.algorithm)}
    network = written["algorithm"].pop("network", {})
    written["algorithm"] |= {name: value for name, value in network.items() if name in flags}
    if gate := written["algorithm"].get("gate"):  # from before a gate on words, and tools
        assert gate.pop("verdict") is False and written["environment"].pop("tools") == ""
        assert written["algorithm"].pop("resample") == 0 and written["algorithm"]["model"].pop("frozen") == "fp32"
        if run.environment.in_words:
            looks = dataclasses.replace(run.algorithm.gate, verdict=True)
            run = dataclasses.replace(run, algorithm=dataclasses.replace(run.algorithm, gate=looks))
    assert from_dict(Run, legacy_runs.as_current(written)) == run


def test_a_run_of_driving_from_before_rewards_and_the_safety_check_had_neither() -> None:
    run = recipes.recipe("driving")
    written = to_dict(run)
    task = written["environment"]
    for name in ("reward", "speed_limit", "safety"):
        del task["simulator"][name]
    for name in ("speeding", "unease", "near_collision", "unsafe"):
        del task["simulator"]["weights"][name]
    del task["skip_bad_logs"], written["population"], written["algorithm"]["accumulate"]
    found = from_dict(Run, legacy_runs.as_current(written))
    simulator = found.environment.simulator
    assert (simulator.reward, simulator.speed_limit, simulator.safety) == (None, False, False)
    assert {simulator.weights.unease, simulator.weights.unsafe} == {0.0}
    assert found.population.seeds == 1 and found.algorithm.accumulate is None
    assert dataclasses.replace(found.environment, simulator=run.environment.simulator) == run.environment
