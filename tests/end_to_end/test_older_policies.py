"""Learners whose rollouts are by older policies: two updates older throughout, or that of the beginning for ever.

The probes' known values are those of the best policy. Where a policy chooses evenly for ever, values learnt as if the
learner had acted are that policy's; V-trace finds the best one's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from longhaul.environment import vectorise
from longhaul.envs.probes import PROBES, Probe
from longhaul.rollout import collector
from longhaul.runtime import mesh as meshes
from longhaul.types import Algorithm
from tests.end_to_end.test_algorithm_matrix import LEARNERS, UPDATES, Learner, check
from tests.helpers.quick import quick

FROZEN = -1
"""Instead of an age: the policy of version 0 acts throughout."""


def run_old(probe: Probe, learner: Learner, age: int) -> tuple[Any, Algorithm, dict[str, jax.Array]]:
    """(the last policy, the algorithm, the metrics of every update), with data by the policy of `age` updates ago."""
    algorithm = learner.make(probe, meshes.identity)
    collect = collector(vectorise(probe.environment, 64), algorithm.act, algorithm.memory, steps=16)

    def update(carried: Any, key: jax.Array) -> tuple[Any, Any]:
        state, carry, policies = carried  # the oldest first
        key_data, key_learn = jax.random.split(key)
        version = jnp.int32(0) if age == FROZEN else jnp.maximum(state.updates - age, 0)
        carry, data, _ = collect.collect(policies[0], carry, key_data, version)
        state, metrics = algorithm.learn(state, data, key_learn)
        policies = policies if age == FROZEN else [*policies[1:], algorithm.policy(state)]
        return (state, carry, policies), metrics

    def run() -> tuple[Any, dict[str, jax.Array]]:
        keys = jax.random.split(jax.random.key(0), UPDATES + 2)
        state = algorithm.init(keys[0])
        begun = state, collect.start(keys[1]), [algorithm.policy(state)] * max(age + 1, 1)
        (state, _, _), metrics = jax.lax.scan(update, begun, keys[2:])
        return algorithm.policy(state), metrics

    policy, metrics = quick(run)()
    return policy, algorithm, metrics


@pytest.mark.parametrize(
    ("name", "probe", "age"),
    [
        pytest.param("impala", "action", 2, marks=pytest.mark.slow),
        pytest.param("impala", "action", FROZEN, marks=pytest.mark.slow),
        pytest.param("appo", "masked", FROZEN, marks=pytest.mark.slow),
    ],
)
def test_values_are_known_from_what_older_policies_did(name: str, probe: str, age: int) -> None:
    made, learner = PROBES[probe](), LEARNERS[name]
    policy, algorithm, metrics = run_old(made, learner, age)
    expected = jnp.arange(UPDATES) if age == FROZEN else jnp.minimum(jnp.arange(UPDATES), age)
    assert jnp.array_equal(metrics["impala/staleness"], expected)
    assert jnp.max(metrics["impala/approx_kl"]) > 1e-3, "the policies must differ"
    check(made, algorithm, policy, learner.value(made))


def test_without_ratios_they_are_not() -> None:
    """The check above can fail: PPO takes what the first policy earned, -1 as often as 1, for its own."""
    made, learner = PROBES["action"](), LEARNERS["ppo"]
    policy, algorithm, _ = run_old(made, learner, FROZEN)
    with pytest.raises(AssertionError):
        check(made, algorithm, policy, learner.value(made))
