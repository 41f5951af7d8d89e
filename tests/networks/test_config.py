"""Names of networks/config.py against the functions behind them."""

from __future__ import annotations

from longhaul.networks import actor_critic, config, precision


def test_each_name_has_its_function() -> None:
    assert tuple(actor_critic.ACTIVATIONS) == config.ACTIVATIONS
    assert tuple(precision.PRECISIONS) == config.PRECISIONS
    assert ("none", *precision.POLICIES) == config.REMATS
