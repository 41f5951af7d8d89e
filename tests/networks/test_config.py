"""Names of networks/config.py against the functions behind them."""

from __future__ import annotations

from longhaul.networks import actor_critic, config, layers


def test_each_name_has_its_function() -> None:
    assert tuple(actor_critic.ACTIVATIONS) == config.ACTIVATIONS
    assert tuple(layers.PRECISIONS) == config.PRECISIONS
    assert ("none", *layers.POLICIES) == config.REMATS
