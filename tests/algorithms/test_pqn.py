"""PQN's exploration, and what it refuses; its values are the matrix's matter, its returns test_returns.py's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import pqn, registry
from longhaul.algorithms.config import PQNConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.envs.probes import PROBES, Probe
from longhaul.replay import Sizes
from longhaul.runtime.config_fields import replaced
from tests.helpers.quick import quick, zeros


def made(probe: Probe, updates: int = 100, **changes: Any) -> Any:
    settings: dict[str, Any] = {"hidden_dim": 8, "num_layers": 1}
    places = {name: changes.pop(name) for name in ("first", "done") if name in changes}
    config = replaced(PQNConfig(), **(settings | changes))
    return pqn.pqn(probe.environment.spec, config, RunContext(updates=updates, mean=lambda x: x, **places))


def test_exploration_falls_with_the_share_of_the_run_that_is_past() -> None:
    changes = {"epsilon": 0.9, "epsilon_final": 0.1, "exploration": 0.5}
    for places, at, wanted in (
        ({}, (0, 25, 50, 99), (0.9, 0.5, 0.1, 0.1)),
        ({"first": 60, "done": 0.2}, (60, 75, 100), (0.58, 0.1, 0.1)),  # gone on with larger batches
    ):
        algorithm = made(PROBES["action"](), **changes, **places)
        state = zeros(algorithm.init, jax.random.key(0))
        found = [float(algorithm.policy(state._replace(updates=jnp.int32(n))).random) for n in at]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_choices_are_legal_and_as_random_as_is_told() -> None:
    probe = PROBES["masked"]()
    algorithm = made(probe)
    observation = jax.tree.map(lambda *x: np.stack(x), *[seen for seen, _ in probe.value])
    columns = observation.mask.shape[0]
    many = jax.tree.map(lambda x: np.tile(x, (2000, *[1] * (x.ndim - 1))), observation)
    policy = algorithm.policy(quick(algorithm.init)(jax.random.key(0)))
    act = quick(algorithm.act)
    best = quick(lambda policy, seen: algorithm.act(policy, (), seen, None)[0])(policy, observation)
    for share in (0.0, 0.5):
        action = np.asarray(act(policy._replace(random=jnp.float32(share)), (), many, jax.random.key(1))[0])
        action = action.reshape(2000, columns)
        for column in range(columns):
            mask = np.asarray(observation.mask[column])
            assert mask[action[:, column]].all()
            kept = (action[:, column] == int(best[column])).mean()
            assert abs(kept - (1.0 - share + share / mask.sum())) < 0.05


def test_settings_out_of_bounds_and_vectors_of_actions_are_refused() -> None:
    for changes, word in (
        ({"q_lambda": 1.5}, "q_lambda is 1.5"),
        ({"adam_eps": 0.0}, "adam_eps"),
        ({"lr": -1.0}, "lr"),
    ):
        with pytest.raises(ValueError, match=word):
            registry.check(replaced(PQNConfig(), **changes), Sizes(1, 8, 8))
    with pytest.raises(ValueError, match="PQN learns one choice"):
        made(PROBES["continuous"]())
