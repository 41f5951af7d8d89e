"""A Gymnasium environment inside a compiled program: the contract, and the course that it takes outside."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from longhaul.environment import vectorise
from longhaul.envs import registry
from tests.helpers import own_environments as own
from tests.helpers.environment_contract import check_environment

HERE = "callback/tests.helpers.own_environments"


def test_the_contract_holds() -> None:
    environment = registry.make(f"{HERE}:GymCorridor?max_steps=8")
    assert environment.spec.max_steps == 8
    check_environment(environment, steps=24)


def test_worlds_in_a_program_take_the_course_that_gymnasium_takes() -> None:
    worlds = vectorise(registry.make(f"{HERE}:GymCorridor"), 3)
    state, seen = worlds.reset(jax.random.key(0))
    places = np.asarray(seen).argmax(1)
    assert len(set(places.tolist())) > 1  # each world has a seed of its own
    key, tally = jax.random.key(1), worlds.tally()
    starts = worlds.fresh(key, 1)
    step = jax.jit(worlds.step)
    for t in range(30):
        action = np.array([(t * 7 + i) % 3 > 0 for i in range(3)], np.int32)
        state, tally, led_to = step(state, tally, action, key, starts)
        places = np.clip(places + 2 * action - 1, 0, own.LENGTH - 1)
        won = places == own.LENGTH - 1
        np.testing.assert_array_equal(np.asarray(led_to.successor).argmax(1), places)
        np.testing.assert_array_equal(led_to.terminated, won)
        np.testing.assert_allclose(led_to.reward, np.where(won, 1.0, -0.1), rtol=1e-6)
        places = np.where(
            np.asarray(led_to.terminated | led_to.truncated), np.asarray(led_to.observation).argmax(1), places
        )
    assert float(tally.episodes.sum()) >= 6


def test_an_environment_without_a_snapshot_names_its_attribute() -> None:
    with pytest.raises(
        ValueError, match=r"attributes that no snapshot holds \(visited: list\); choose --topology actors"
    ):
        registry.make(f"{HERE}:ListCorridor")


def test_a_space_that_lies_is_named() -> None:
    with pytest.raises(ValueError, match=r"the observation of reset is float32\[4\]; its space says float32\[5\]"):
        registry.make(f"{HERE}:LyingCorridor")
