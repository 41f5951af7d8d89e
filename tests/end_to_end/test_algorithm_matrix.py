"""Algorithm x topology x probe: every learner finds every probe's known values, wherever it runs.

This is where new algorithms and topologies are entered; a reward curve would not show most of what it finds. At the
end: learners whose rollouts are by older policies, two updates older throughout, or that of the beginning for ever. The
probes' known values are those of the best policy. Where a policy chooses evenly for ever, values learnt as if the
learner had acted are that policy's; V-trace finds the best one's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import registry
from longhaul.algorithms.config import AlgorithmConfig, IMPALAConfig, PPOConfig, PQNConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.environment import vectorise
from longhaul.envs.probes import PROBES, Probe
from longhaul.rollout import collector, play, starts
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import replaced
from longhaul.topologies import fused
from longhaul.types import Algorithm
from tests.helpers.quick import quick

UPDATES = 150

Config = Callable[[Probe], AlgorithmConfig]

SMALL: dict[str, Any] = {"lr": 1e-2, "hidden_dim": 32, "num_layers": 1}


def ppo(**options: Any) -> Config:
    settings = SMALL | {"ent_coef": 0.0, "clip_value": False, "num_minibatches": 2, "max_grad_norm": 1.0} | options
    return lambda probe: replaced(PPOConfig(gamma=probe.gamma, gae_lambda=probe.gae_lambda), **settings)


def impala(**options: Any) -> Config:
    settings = SMALL | {"ent_coef": 0.0, "max_grad_norm": 1.0} | options
    return lambda probe: replaced(IMPALAConfig(gamma=probe.gamma, vtrace_lambda=probe.gae_lambda), **settings)


def pqn(**options: Any) -> Config:
    settings = SMALL | {"epsilon_final": 0.0, "exploration": 0.5} | options
    return lambda probe: replaced(PQNConfig(gamma=probe.gamma, q_lambda=probe.gae_lambda), **settings)


APPO: dict[str, Any] = {
    "optimiser": "adam", "clip_eps": 0.2, "num_minibatches": 2, "update_epochs": 4, "normalise_advantage": True
}  # fmt: skip

LEARNERS = {
    "ppo": ppo(),
    "ppo-gru": ppo(memory=16),
    "ppo-bf16": ppo(precision="bf16"),
    "ppo-normalised": ppo(normalise_observation=True, ent_coef_final=0.001),
    "impala": impala(),
    "impala-gru": impala(memory=16, **APPO),
    "appo": impala(**APPO),
    "pqn": pqn(),
    "pqn-gru": pqn(memory=16, duelling=True),
}


def make(probe: Probe, config: Config, mean: Callable) -> Algorithm:
    return registry.make(probe.environment.spec, config(probe), RunContext(UPDATES, mean))


def run_fused(probe: Probe, config: Config, devices: int) -> tuple[Any, Algorithm]:
    mesh = meshes.make_mesh(devices)
    algorithm = make(probe, config, meshes.mean_over_data)
    worlds = vectorise(probe.environment, 64 // devices)
    collect = collector(worlds, algorithm.act, algorithm.memory, steps=16)
    progress = fused.start(algorithm, fused.entering(lambda _: collect, mesh), (), jax.random.key(0), mesh)
    program = fused.compiled(algorithm, lambda _: collect, progress, (), mesh, block=50)
    for progress, _, metrics in fused.fused(program, progress, (), updates=UPDATES, block=50):
        losses = [v for k, v in jax.device_get(metrics).items() if k.endswith("/value_loss")]
        assert losses
        assert np.all(np.isfinite(losses))
    return jax.device_get(algorithm.policy(progress.state)), algorithm


TOPOLOGIES = {
    "fused": lambda probe, config: run_fused(probe, config, 1),
    "fused-4-devices": lambda probe, config: run_fused(probe, config, 4),
}

FEW = {
    "ppo-gru": ("memory", "masked", "time_limit"),
    "ppo-bf16": ("masked", "time_limit"),
    "ppo-normalised": ("masked", "agents", "time_limit"),
    "impala": ("time_limit", "action", "successor", "agents"),
    "impala-gru": ("memory",),
    "appo": ("masked", "multi_discrete"),
    "pqn": ("constant", "time_limit", "terminal_reward", "two_step", "action", "successor", "agents"),
    "pqn-gru": ("memory",),
}
"""The probes that a variant sees. A recurrent critic is asked for the values of first observations only, and it never
meets what follows a truncation with the memory of what went before: most probes tell nothing of it."""

ON_MANY = {"impala": ("agents",), "impala-gru": (), "appo": (), "pqn": ("agents",), "pqn-gru": ()}
"""Where a learner shares with another what meets across devices, the probes that it sees there, too."""

DAILY = {"ppo": ("time_limit",), "impala": ("successor",), "pqn": ("two_step",)}
"""Probes of a variant that are not slow on one device: one for each algorithm. On several devices all are:
diagnostics/test_checks.py compares what PPO learns on one and on two."""


def cell(name: str, topology: str, probe: str) -> Any:
    daily = topology == "fused" and probe in DAILY.get(name, ())
    return pytest.param(name, topology, probe, marks=() if daily else pytest.mark.slow)


CELLS = [
    cell(name, topology, probe)
    for name in LEARNERS
    for topology in TOPOLOGIES
    for probe in FEW.get(name, [probe for probe in PROBES if probe != "memory"])  # that one is below
    if topology == "fused" or probe in ON_MANY.get(name, PROBES)
]


def check(probe: Probe, config: Config, algorithm: Algorithm, policy: Any) -> None:
    value = registry.critic(probe.environment.spec, config(probe))
    observations, expected = zip(*probe.value, strict=True)
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *observations)
    found = quick(value)(policy, algorithm.memory(len(expected)), batch)
    scale = max(1.0, max(abs(worth) for worth in expected))
    np.testing.assert_allclose(found, expected, atol=0.05 * scale)
    if probe.policy is None and not probe.memory:
        return  # the return would only say which starts were drawn
    environment = probe.environment
    run = play(environment, algorithm.act, algorithm.memory, steps=environment.spec.max_steps)

    def score_of_64(policy: Any) -> Any:
        return run(policy, starts(environment, jax.random.key(1), 64), None, jax.random.key(2))[0]

    episodes = quick(score_of_64)(policy)
    score = np.asarray(episodes.scores["return"].value)[np.asarray(episodes.valid)]
    assert abs(score.mean() - probe.best_return) <= 0.05 * max(1.0, abs(probe.best_return))


@pytest.mark.parametrize(("name", "topology", "probe"), CELLS)
def test_learner_finds_the_known_values(name, topology, probe):
    made, config = PROBES[probe](), LEARNERS[name]
    policy, algorithm = TOPOLOGIES[topology](made, config)
    check(made, config, algorithm, policy)


@pytest.mark.slow
def test_without_memory_the_memory_probe_stays_unsolved():
    """The check above can fail: a blind guess earns half."""
    made = PROBES["memory"]()
    policy, algorithm = run_fused(made, LEARNERS["ppo"], 1)
    with pytest.raises(AssertionError):
        check(made, LEARNERS["ppo"], algorithm, policy)


# ----------------------------------------------------------------------------------------------------- older policies

FROZEN = -1
"""Instead of an age: the policy of version 0 acts throughout."""


def run_old(probe: Probe, config: Config, age: int) -> tuple[Any, Algorithm, dict[str, jax.Array]]:
    """(the last policy, the algorithm, the metrics of every update), with data by the policy of `age` updates ago."""
    algorithm = make(probe, config, meshes.identity)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "probe", "age"), [("impala", "action", 2), ("impala", "action", FROZEN), ("appo", "masked", FROZEN)]
)
def test_values_are_known_from_what_older_policies_did(name: str, probe: str, age: int) -> None:
    made, config = PROBES[probe](), LEARNERS[name]
    policy, algorithm, metrics = run_old(made, config, age)
    expected = jnp.arange(UPDATES) if age == FROZEN else jnp.minimum(jnp.arange(UPDATES), age)
    assert jnp.array_equal(metrics["impala/staleness"], expected)
    assert jnp.max(metrics["impala/approx_kl"]) > 1e-3, "the policies must differ"
    check(made, config, algorithm, policy)


@pytest.mark.slow
def test_without_ratios_they_are_not() -> None:
    """The check above can fail: PPO takes what the first policy earned, -1 as often as 1, for its own."""
    made, config = PROBES["action"](), LEARNERS["ppo"]
    policy, algorithm, _ = run_old(made, config, FROZEN)
    with pytest.raises(AssertionError):
        check(made, config, algorithm, policy)
