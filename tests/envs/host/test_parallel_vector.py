"""PettingZoo's ParallelEnv: agents are columns; those that left wait for their world's end; a world resets whole."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.envs.host import registry
from tests.helpers import own_environments as own

NAME = "parallel/tests.helpers.own_environments:PairCorridor"


def test_agents_are_columns_and_wait_for_their_worlds_end() -> None:
    vector = registry.make(registry.describe(NAME), 2)
    assert (vector.worlds, vector.columns, vector.spec.agents) == (2, 4, 2)
    seen = vector.reset(0)
    assert seen.shape == (4, own.LENGTH) and seen.sum(1).tolist() == [1.0] * 4
    stay = np.zeros(4, np.int32)
    steps = [vector.step(stay) for _ in range(2)]
    third = vector.step(stay)
    assert all(step.valid.all() and not len(step.finals.columns) for step in steps)
    assert third.terminated.tolist() == [False, True, False, True] and third.finals.columns.tolist() == [1, 3]
    np.testing.assert_array_equal(third.finals.observation, np.eye(own.LENGTH)[[0, 0]])
    fourth = vector.step(stay)
    assert fourth.valid.tolist() == [True, False, True, False] and fourth.reward[1] == 0.0
    for _ in range(own.LIMIT - 5):
        assert not vector.step(stay).truncated.any()
    last = vector.step(stay)
    assert last.truncated.tolist() == [True, False, True, False] and last.finals.columns.tolist() == [0, 2]
    assert vector.step(stay).valid.all()  # all agents of the next episode


def test_agents_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnasium

    monkeypatch.setattr(
        own.PairCorridor, "action_space", lambda self, agent: gymnasium.spaces.Discrete(2 + (agent == "right"))
    )
    with pytest.raises(
        ValueError, match=r"the action_space of right is Discrete\(3\), and that of left is Discrete\(2\)"
    ):
        registry.make(registry.describe(NAME), 1)
