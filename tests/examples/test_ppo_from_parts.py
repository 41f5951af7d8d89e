"""The example of the architecture learns CartPole."""

from __future__ import annotations

import pytest

from examples import ppo_from_parts


@pytest.mark.slow
def test_ppo_from_parts_learns_cartpole() -> None:
    returns = ppo_from_parts.train()
    assert returns[0] < 100
    assert max(returns) > 400
