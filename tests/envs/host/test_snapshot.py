"""Snapshots: an environment put back goes on with the same bits, through wrappers and generators; what can't be told is
named."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from longhaul.envs.host import snapshot
from longhaul.envs.host.vector import LostState
from tests.helpers.own_environments import GymCorridor, ListCorridor


def course(environment: Any, steps: int) -> list[Any]:
    """Result of so many steps; an episode that ended begins anew."""
    seen = []
    for t in range(steps):
        observation, reward, terminated, truncated, _ = environment.step(t % 3 != 0)
        if terminated or truncated:
            observation, _ = environment.reset()
        seen.append((observation.tolist(), float(reward), terminated, truncated))
    return seen


@pytest.mark.parametrize(
    "make",
    [
        GymCorridor,
        lambda: gymnasium.wrappers.TimeLimit(GymCorridor(), 6),
        lambda: gymnasium.make("CartPole-v1", disable_env_checker=True),
    ],
)
def test_an_environment_put_back_goes_on_with_the_same_bits(make: Any) -> None:
    first, second = make(), make()
    first.reset(seed=3), second.reset(seed=8)
    course(first, 7)
    taken = snapshot.take(first)
    assert taken is not None
    after = course(first, 40)
    snapshot.restore(second, taken)
    assert course(second, 40) == after
    assert course(first, 1) != []  # and the first is not bound to the second
    again = snapshot.take(first)
    assert again is not None and any((again[name] != taken[name]).any() for name in taken)


class Odd:
    """Attributes of every kind."""

    def __init__(self) -> None:
        self.none, self.yes, self.whole, self.part = None, True, -7, 0.1
        self.scalar, self.small = np.float32(0.1), np.uint8(200)
        self.array, self.generator, self.name = np.arange(3.0), np.random.default_rng(4), "fixed"


def test_every_kind_of_attribute_comes_back_with_its_type() -> None:
    odd, other = Odd(), Odd()
    taken = snapshot.take(odd)
    assert taken is not None
    other.none, other.yes, other.whole, other.part = 3, None, 2.5, 0  # type: ignore[assignment]
    other.scalar, other.small, other.array = np.float32(9), np.uint8(1), np.zeros(3)
    other.generator.random(5)
    snapshot.restore(other, taken)
    for name in ("none", "yes", "whole", "part", "scalar", "small"):
        value, wanted = getattr(other, name), getattr(odd, name)
        assert type(value) is type(wanted) and value == wanted
    assert other.array.tolist() == [0.0, 1.0, 2.0] and other.generator.random() == odd.generator.random()


def test_a_list_has_no_snapshot_and_is_named() -> None:
    environment = ListCorridor()
    environment.reset(seed=0)
    assert snapshot.take(environment) is None and snapshot.unknown(environment) == "visited: list"
    assert snapshot.Snapshots().take([environment]) is None


def test_a_state_whose_form_changed_is_not_taken_for_exact() -> None:
    environments = [GymCorridor(), GymCorridor()]
    for environment in environments:
        environment.reset(seed=0)
    snapshots = snapshot.Snapshots()
    before = snapshots.take(environments)
    environments[1].path = np.zeros(4)
    after = snapshots.take(environments)
    assert before is not None and after is not None
    assert before["exact"].tolist() == [True, True] and after["exact"].tolist() == [True, False]
    assert {name: value.shape for name, value in before.items()} == {name: v.shape for name, v in after.items()}
    with pytest.raises(LostState, match="changed its form"):
        snapshots.restore(environments, after)
