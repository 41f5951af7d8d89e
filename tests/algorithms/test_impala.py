"""IMPALA and APPO against oracles: what older policies did, judged step by step; PPO where nothing is old."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul.algorithms import actor_critic, impala, ppo, registry
from longhaul.algorithms.actor_critic import State
from longhaul.algorithms.config import IMPALAConfig, PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import distribution
from longhaul.networks.config import NetworkConfig
from longhaul.replay import Sizes
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import replaced
from longhaul.telemetry import health
from longhaul.telemetry.trackers import wandb
from longhaul.types import Algorithm, Rollout
from tests.algorithms.test_ppo import STEPS, WORLDS, assert_close, gradient, rolling, stirred, values_by_hand
from tests.helpers.checkable_environment import BOX, Chaos
from tests.helpers.quick import quick, zeros
from tests.test_returns import papers_sum

SMALL = IMPALAConfig(
    lr=0.0, gamma=0.9, vtrace_lambda=0.9, rho_clip=1.2, c_clip=0.8, network=NetworkConfig(hidden_dim=8, num_layers=1)
)
KINDS = {
    "categorical": (Chaos(interval=4), replace(SMALL, reward_scale=0.5)),
    "shared-appo": (Chaos(masked=True), replaced(SMALL, shared=True, clip_eps=0.2, num_minibatches=2, update_epochs=2)),
    "tanh_gaussian-memory": (Chaos(BOX), replaced(SMALL, memory=6, rho_clip=None, c_clip=None)),
    "agents-memory": (Chaos(agents=2), replaced(SMALL, memory=6, clip_eps=0.3)),
}
DAILY = [
    pytest.param(kind, marks=() if kind in ("shared-appo", "agents-memory") else pytest.mark.slow) for kind in KINDS
]
"""The kinds; two have all that the others have, but for IMPALA's own loss, whose gradient is compared below."""

VERSION = 2
"""Updates that made the parameters that learn; those that acted had none."""


class Case(NamedTuple):
    environment: Chaos
    config: IMPALAConfig
    algorithm: Algorithm
    state: State
    own: Rollout  # by the state's own policy
    old: Rollout  # by another one
    learn: Any  # at learning rate 0, compiled


@cache
def case(kind: str) -> Case:
    environment, config = KINDS[kind]
    algorithm = impala.impala(environment.spec, config, RunContext(updates=10, mean=meshes.identity))
    state = stirred(algorithm, config)._replace(updates=jnp.int32(VERSION))
    rng = np.random.default_rng(3)
    before = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(scale=0.2, size=x.shape), jnp.float32), state.params)
    second = rolling(environment, config.network)
    own = second(algorithm.policy(state))._replace(version=jnp.int32(VERSION))
    old = second(algorithm.policy(state._replace(params=before)))
    return Case(environment, config, algorithm, state, own, old, quick(algorithm.learn))


@pytest.mark.parametrize("kind", DAILY)
def test_at_learning_rate_zero_nothing_moves_and_who_acts_is_who_learns(kind: str) -> None:
    """Log-probabilities of acting are reproduced exactly, over ends inside the rollout, by memory too."""
    made = case(kind)
    after, metrics = made.learn(made.state, made.own, jax.random.key(2))
    assert abs(metrics["impala/approx_kl"]) < 1e-6
    assert metrics["impala/rho"] == pytest.approx(1.0, abs=1e-5)
    assert (metrics["impala/rho_clipped"], metrics["impala/staleness"]) == (0.0, 0.0)
    assert metrics["impala/grad_norm"] > 1e-3, "without a gradient nothing is tested"
    jax.tree.map(np.testing.assert_array_equal, after.params, made.state.params)
    assert after.updates == VERSION + 1


def log_probs_by_hand(made: Case, data: Rollout) -> np.ndarray:
    """log pi(a | s) [T, B] of the state's policy, one step after the other, with acting's own memory."""
    network = actor_critic.network(made.environment.spec, made.config)
    policy = distribution(made.environment.action)
    acting, data = made.algorithm.policy(made.state), jax.device_get(data)

    @quick
    def step(memory: Any, seen: Any, raw: jax.Array) -> tuple[jax.Array, Any]:
        mask = seen.mask if made.environment.masked else None
        parameters, _, memory = network.apply(acting, memory, seen)
        return policy.log_prob(parameters, mask, raw), memory

    found, memory = [], data.memory
    for t in range(STEPS):
        seen, raw = jax.tree.map(lambda x: x[t], (data.observation, data.extras["raw"]))  # noqa: B023
        log_prob, memory = step(memory, seen, raw)
        found.append(log_prob)
        over = data.terminated[t] | data.truncated[t] | ~data.valid[t]
        memory = jax.tree.map(lambda x: jnp.where(over[:, None], 0.0, x), memory)  # noqa: B023
    return np.array(found, np.float64)


def judged_by_hand(made: Case, data: Rollout) -> tuple[np.ndarray, ...]:
    """(log pi, log of the ratio, V, V-trace's target, its advantage), [T, B] each."""
    value, successor = values_by_hand(made.environment, made.config, made.algorithm, made.state, data)
    log_prob = log_probs_by_hand(made, data)
    log_ratio = log_prob - np.asarray(data.extras["log_prob"], np.float64)
    reward = np.asarray(data.reward, np.float64) * made.config.reward_scale
    rho, c = (math.inf if clip is None else clip for clip in (made.config.rho_clip, made.config.c_clip))
    ends = np.asarray(data.terminated), np.asarray(data.truncated)
    columns = []
    for b in range(value.shape[1]):
        column = tuple(x[:, b] for x in (log_ratio, reward, value, successor, *ends))
        columns.append(papers_sum(column, made.config.gamma, made.config.vtrace_lambda, rho, c, rho))
    target, advantage = (np.stack(each, axis=1) for each in zip(*columns, strict=True))
    return log_prob, log_ratio, value, target, advantage


@pytest.mark.parametrize("kind", DAILY)
def test_log_probabilities_and_v_trace_equal_those_computed_step_by_step(kind: str) -> None:
    """Through what `learn` reports at learning rate 0."""
    made = case(kind)
    data, valid = made.old, np.asarray(made.old.valid)
    metrics = {
        k.removeprefix("impala/"): float(v) for k, v in made.learn(made.state, data, jax.random.key(2))[1].items()
    }
    log_prob, log_ratio, value, target, advantage = (x[valid] for x in judged_by_hand(made, data))
    ratio = np.exp(log_ratio)
    assert np.std(log_ratio) > 0.03, "policies that hardly differ test nothing"
    assert np.asarray(data.truncated).sum(0).max() > 1, "one slot would do"
    clip = math.inf if made.config.rho_clip is None else made.config.rho_clip
    expected = {
        "value_loss": 0.5 * np.mean((target - value) ** 2),
        "approx_kl": np.mean(ratio - 1 - log_ratio),
        "rho": np.mean(ratio),
        "rho_clipped": np.mean(ratio > clip),
        "staleness": VERSION,
        "explained_variance": 1 - np.var(target - value) / np.var(target),
        # The ratio of a clipped surrogate is over this very policy: 1 as long as nothing moved.
        "policy_loss": -np.mean((log_prob if made.config.clip_eps is None else 1.0) * advantage),
    }
    for name, number in expected.items():
        assert metrics[name] == pytest.approx(number, rel=5e-4, abs=2e-5), name


def test_values_of_acting_are_used_only_by_the_same_version() -> None:
    """Values and log-probabilities of another version are computed anew; the version tells."""
    made = case("shared-appo")
    value = made.own.extras["value"]
    wrong = made.own._replace(extras=made.own.extras | {"value": value + 1.0})
    losses = [float(made.learn(made.state, d, jax.random.key(2))[1]["impala/value_loss"]) for d in (made.own, wrong)]
    assert abs(losses[0] - losses[1]) > 1e-3, "taken where they are these parameters' own"
    older = [d._replace(version=jnp.int32(0)) for d in (made.own, wrong)]
    computed, others = (made.learn(made.state, d, jax.random.key(2))[1] for d in older)
    jax.tree.map(np.testing.assert_array_equal, computed, others)
    np.testing.assert_allclose(computed["impala/value_loss"], losses[0], rtol=1e-4)


def test_invalid_steps_change_no_bit() -> None:
    """Other rewards, actions and log-probabilities in invalid steps change nothing, bit for bit."""
    made = case("agents-memory")
    data, valid = made.old, made.old.valid
    assert 0.1 < jnp.mean(valid) < 0.9
    poisoned = data._replace(
        reward=jnp.where(valid, data.reward, 1e6),
        extras={
            "raw": jnp.where(valid, data.extras["raw"], 0),
            "log_prob": jnp.where(valid, data.extras["log_prob"], -1e6),
        },
    )
    one, other = (made.learn(made.state, d, jax.random.key(2)) for d in (data, poisoned))
    jax.tree.map(np.testing.assert_array_equal, one, other)


ONE_STEP = replace(
    SMALL, optimiser="adam", max_grad_norm=1e9, lr=1e-2, anneal=False, ent_coef=0.3, vf_coef=0.7, rho_clip=1.0,
    c_clip=1.0, vtrace_lambda=1.0,
)  # fmt: skip
"""Single step on the whole batch: Adam's first moment is then a tenth of the gradient."""


@cache
def learning(config: Any) -> tuple[Algorithm, Any]:
    """The algorithm of a config in the world of "categorical", and its compiled `learn`."""
    make = impala.impala if isinstance(config, IMPALAConfig) else ppo.ppo
    algorithm = make(Chaos(interval=4).spec, config, RunContext(10, meshes.identity))
    return algorithm, quick(algorithm.learn)


def step_of(config: Any, data: Rollout) -> State:
    """The state of "categorical" after one update by `config`."""
    algorithm, learn = learning(config)
    state = zeros(algorithm.init, jax.random.key(0))
    state = state._replace(params=case("categorical").state.params, updates=jnp.int32(VERSION))
    return learn(state, data, jax.random.key(2))[0]


@cache
def one_step() -> State:
    return step_of(ONE_STEP, case("categorical").old)


def test_the_gradient_is_that_of_the_papers_loss() -> None:
    """Gradient of the loss written out with the oracle's targets and advantages, from old data."""
    made = case("categorical")
    made = made._replace(config=replace(ONE_STEP, reward_scale=1.0))
    *_, target, advantage = (jnp.asarray(x, jnp.float32) for x in judged_by_hand(made, made.old))
    network = actor_critic.parts(made.environment.spec, ONE_STEP).network
    raw = made.old.extras["raw"]

    def loss(params: Any) -> jax.Array:
        logits, value, _ = network.apply(params, (), made.old.observation)
        log_p = jax.nn.log_softmax(logits)
        taken = jnp.take_along_axis(log_p, raw[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return jnp.mean(-taken * advantage + 0.7 * 0.5 * (value - target) ** 2 - 0.3 * entropy)

    expected = jax.flatten_util.ravel_pytree(quick(jax.grad(loss))(made.state.params))[0]
    assert float(jnp.abs(expected).max()) > 1e-2
    np.testing.assert_allclose(10.0 * np.asarray(gradient(one_step())), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_first_step_of_appo_is_that_of_impala() -> None:
    appo = step_of(replace(ONE_STEP, clip_eps=0.2), case("categorical").old)
    assert_close(gradient(appo), gradient(one_step()), 1e-6)


def test_on_policy_without_lambda_it_is_ppo_without_its_clips() -> None:
    """A reduction: with what this very policy did, ratios are 1, and V-trace's advantages GAE's."""
    data = case("categorical").own
    theirs = PPOConfig(
        lr=1e-2, anneal=False, gamma=0.9, gae_lambda=1.0, num_minibatches=1, update_epochs=1, clip_value=False,
        vf_coef=0.7, ent_coef=0.3, max_grad_norm=1e9, normalise_advantage=False, network=SMALL.network,
    )  # fmt: skip
    ours = step_of(ONE_STEP, data)
    reference = step_of(theirs, data)
    assert_close(gradient(ours), gradient(reference), 1e-5)
    assert_close(ours.params, reference.params, 1e-5)


def test_rmsprop_divides_by_the_root_of_its_moment() -> None:
    """First step: lr g / sqrt((1 - decay) g^2 + eps)."""
    config = replace(ONE_STEP, optimiser="rmsprop", rms_decay=0.9, rms_eps=1e-4)
    after = step_of(config, case("categorical").old)
    flat = jax.flatten_util.ravel_pytree
    before, moved = (np.asarray(flat(p)[0]) for p in (case("categorical").state.params, after.params))
    g = 10.0 * np.asarray(gradient(one_step()))
    np.testing.assert_allclose(before - moved, 1e-2 * g / np.sqrt(0.1 * g**2 + 1e-4), atol=2e-6)


@pytest.mark.slow
def test_two_shards_have_the_gradient_of_one_with_all_columns() -> None:
    made, config = case("categorical"), ONE_STEP
    data, columns, everywhere = made.old, PartitionSpec(None, "data"), PartitionSpec()
    layout = jax.tree.map(lambda _: columns, data)._replace(version=everywhere)
    layout = layout._replace(successors=layout.successors._replace(last=PartitionSpec("data")))
    algorithm = impala.impala(made.environment.spec, config, RunContext(updates=10, mean=meshes.mean_over_data))
    state = jax.tree.map(lambda x: jnp.zeros_like(x), one_step())
    state = state._replace(params=made.state.params, updates=jnp.int32(VERSION))
    learn = meshes.per_shard(algorithm.learn, meshes.make_mesh(2), (everywhere, layout, everywhere), everywhere)
    split, told = quick(learn)(state, data, jax.random.key(2))
    assert_close(gradient(split), gradient(one_step()), 1e-6)
    _, log_ratio, *_ = judged_by_hand(made, data)
    assert float(told["impala/rho"]) == pytest.approx(np.exp(log_ratio).mean(), rel=1e-4)


def test_rewards_are_shaped_as_the_paper_has_it() -> None:
    reward = jnp.array([-30.0, -0.5, 0.0, 0.5, 30.0])
    np.testing.assert_allclose(impala.shaped(reward, 2.0, "none"), reward * 2)
    np.testing.assert_allclose(impala.shaped(reward, 2.0, "unit"), [-1.0, -1.0, 0.0, 1.0, 1.0])
    half = math.tanh(0.5)
    np.testing.assert_allclose(impala.shaped(reward, 1.0, "asymmetric"), [-0.3, -0.3 * half, 0, 5 * half, 5], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimiser": "sgd"}, "optimiser is 'sgd'; it must be one of rmsprop, adam"),
        ({"reward_clip": "some"}, "reward_clip is 'some'; it must be one of none, unit, asymmetric"),
        ({"vtrace_lambda": 1.5}, "vtrace_lambda is 1.5; it must lie in 0 to 1"),
        ({"rms_decay": -0.1}, "rms_decay is -0.1; it must lie in 0 to 1"),
        ({"rho_clip": -1.0}, "rho_clip is -1.0; it must be at least 0"),
        ({"c_clip": float("nan")}, "c_clip is nan; it must be finite"),
        ({"clip_eps": -0.1}, "clip_eps is -0.1; it must be at least 0"),
        ({"rms_eps": 0.0}, "rms_eps is 0.0; it must be above 0"),
    ],
)
def test_impossible_settings_are_named_with_the_remedy(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        registry.check(replaced(SMALL, **change), Sizes(1, WORLDS, STEPS))
    assert "\n" not in str(error.value)


def test_possible_settings_pass() -> None:
    config = replaced(SMALL, rho_clip=None, c_clip=0.0, clip_eps=None, memory=4, num_minibatches=8)
    registry.check(config, Sizes(1, 8, 9))


def test_its_metrics_are_known_by_what_follows_the_slash() -> None:
    """Metrics for health, whose bounds are any algorithm's, and for dashboards."""
    records = [
        {"update": i, "agent_steps": i * 8, "impala/entropy": 0.001, "episode/entropy": 1.0, "impala/approx_kl": 0.5}
        for i in range(1, 100)
    ]
    found = health.review(records, health.Plan(100, 0.01), health.Bounds()).findings()
    assert {"entropy", "kl"} <= {each.check for each in found}
    told = wandb.renamed(records[0])
    assert (told["train/entropy"], told["train/ent_loss"], told["episode/entropy"]) == (0.001, -0.001, 1.0)
