"""PPO against oracles: the objective in NumPy, advantages replay of memory, one gradient however it is cut."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul import normalise
from longhaul.algorithms import ppo, registry
from longhaul.algorithms.actor_critic import Policy, State
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.ppo import Batch
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import distribution
from longhaul.environment import vectorise
from longhaul.networks import actor_critic as networks
from longhaul.networks.actor_critic import actor_critic
from longhaul.networks.config import NetworkConfig
from longhaul.replay import Sizes
from longhaul.rollout import collector
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import replaced
from longhaul.spaces import Discrete, Masked
from longhaul.types import Algorithm, Rollout, Spec
from tests.helpers.checkable_environment import BOX, PAIR, Chaos
from tests.helpers.quick import quick, zeros

STEPS, WORLDS = 12, 8
SMALL = PPOConfig(
    num_minibatches=2, update_epochs=2, gamma=0.9, gae_lambda=0.8, network=NetworkConfig(hidden_dim=8, num_layers=1)
)


@cache
def rolling(environment: Chaos, network: NetworkConfig) -> Any:
    """Program of a policy to the second rollout of a fresh run, which begins in the middle of episodes."""
    algorithm = ppo.ppo(environment.spec, replace(SMALL, network=network), RunContext(10, meshes.identity))
    collect = collector(vectorise(environment, WORLDS), algorithm.act, algorithm.memory, steps=STEPS)

    def second(policy: Policy) -> Rollout:
        def one(carry: Any, key: jax.Array) -> tuple[Any, Rollout]:
            return collect.collect(policy, carry, key, jnp.int32(0))[:2]

        rollouts = jax.lax.scan(one, collect.start(jax.random.key(0)), jax.random.split(jax.random.key(1), 2))[1]
        return jax.tree.map(lambda x: x[1], rollouts)

    return quick(second)


def stirred(algorithm: Algorithm, config: PPOConfig) -> State:
    """A state with life in it: a new policy's last layer is almost zero, and so would be all its gradients."""
    state = zeros(algorithm.init, jax.random.key(3))
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.5, size=x.shape), jnp.float32), state.params)
    moments = state.moments
    if config.normalise_observation:
        moments = normalise.start(Chaos().spec.observation)
        batch = jnp.asarray(rng.normal(0.5, 1.0, size=(9, 5, 2)), jnp.float32)
        moments = normalise.update(moments, batch, None, meshes.identity)
    return state._replace(params=params, moments=moments)


NORMALISED = replace(SMALL, normalise_observation=True, reward_scale=0.5)
KINDS = {
    "categorical": (Chaos(interval=4), SMALL),
    "masked-shared": (Chaos(masked=True), replaced(SMALL, shared=True)),
    "multi_categorical-normalised": (Chaos(PAIR), NORMALISED),
    "tanh_gaussian-memory": (Chaos(BOX), replaced(SMALL, memory=6)),
    "agents-memory": (Chaos(agents=2), replaced(SMALL, memory=6)),
}


@cache
def case(kind: str) -> tuple[Chaos, PPOConfig, Algorithm, State, Rollout, Any]:
    """A kind of learner with learning rate 0, its data, and its compiled `learn`."""
    environment, config = KINDS[kind]
    config = replace(config, lr=0.0)
    algorithm = ppo.ppo(environment.spec, config, RunContext(10, meshes.identity))
    state = stirred(algorithm, config)
    data = rolling(environment, config.network)(algorithm.policy(state))
    return environment, config, algorithm, state, data, quick(algorithm.learn)


DAILY = ("categorical", "masked-shared", "tanh_gaussian-memory")
"""Kinds that are not slow; test_impala.py has agents with memory, of which some are not there, every day."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DAILY else pytest.mark.slow) for kind in KINDS]
)
def test_at_learning_rate_zero_nothing_moves(kind):
    """Log-probabilities of acting are reproduced exactly, over ends inside the rollout, by memory too."""
    _, config, _, state, data, learn = case(kind)
    after, metrics = learn(state, data, jax.random.key(2))
    assert abs(metrics["ppo/approx_kl"]) < 1e-6
    assert metrics["ppo/clip_fraction"] == 0.0
    assert metrics["ppo/grad_norm"] > 1e-3, "without a gradient nothing is tested"
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(one, other)
    assert after.updates == state.updates + 1
    if config.normalise_observation:
        assert after.moments.samples == state.moments.samples + STEPS * WORLDS


def values_by_hand(
    environment: Chaos, config: PPOConfig, algorithm: Algorithm, state: State, data: Rollout
) -> tuple[np.ndarray, np.ndarray]:
    """V(observation), V(successor) [T, B], one step after the other, with acting's own memory."""
    policy, critic, data = (
        algorithm.policy(state),
        quick(registry.critic(environment.spec, config)),
        jax.device_get(data),
    )
    act = quick(lambda memory, seen: algorithm.act(policy, memory, seen, None)[1])
    memory, used = data.memory, np.zeros(data.reward.shape[1], int)
    value, successor = [], []
    for t in range(STEPS):
        seen = jax.tree.map(lambda x: x[t], data.observation)  # noqa: B023
        value.append(critic(policy, memory, seen))
        memory = act(memory, seen) if config.network.memory else memory
        following = data.successors.last
        if t + 1 < STEPS:
            following = jax.tree.map(lambda x: x[t + 1], data.observation)  # noqa: B023
        cut, columns = np.asarray(data.truncated[t]), np.arange(len(used))

        def pick(slots: Any, others: Any) -> jax.Array:
            own = np.asarray(slots)[np.minimum(used, len(slots) - 1), columns]  # noqa: B023
            return jnp.asarray(np.where(cut[:, None], own, others))  # noqa: B023

        successor.append(critic(policy, memory, jax.tree.map(pick, data.successors.truncated, following)))
        used = used + cut
        over = np.asarray(data.terminated[t]) | cut | ~np.asarray(data.valid[t])
        memory = jax.tree.map(lambda x: jnp.where(over[:, None], 0.0, x), memory)  # noqa: B023
    return np.array(value, np.float64), np.array(successor, np.float64)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in DAILY else pytest.mark.slow) for kind in KINDS],
)
def test_advantages_and_targets_are_those_of_a_step_by_step_oracle(kind):
    """Through what `learn` reports at learning rate 0, where the value loss is half the mean squared advantage."""
    environment, config, algorithm, state, data, learn = case(kind)
    metrics = learn(state, data, jax.random.key(2))[1]
    value, successor = values_by_hand(environment, config, algorithm, state, data)
    valid, terminated = np.asarray(data.valid), np.asarray(data.terminated)
    ended = terminated | np.asarray(data.truncated)
    assert np.asarray(data.truncated).sum(0).max() > 1, "one slot would do"
    advantage, following = np.zeros_like(value), np.zeros(value.shape[1])
    for t in reversed(range(STEPS)):
        bootstrap = np.where(terminated[t], 0.0, config.gamma * successor[t])
        delta = np.asarray(data.reward[t]) * config.reward_scale + bootstrap - value[t]
        following = delta + config.gamma * config.gae_lambda * np.where(ended[t], 0.0, following)
        advantage[t] = following
    found = float(metrics["ppo/value_loss"])
    np.testing.assert_allclose(found, 0.5 * np.mean(advantage[valid] ** 2), rtol=2e-4)
    target = (advantage + value)[valid]
    expected = 1.0 - np.var(advantage[valid]) / np.var(target)
    np.testing.assert_allclose(float(metrics["ppo/explained_variance"]), expected, rtol=1e-3, atol=1e-4)
    scaled = (advantage[valid] - advantage[valid].mean()) / advantage[valid].std()
    # At ratio 1 the policy's loss is minus the mean of the normalised advantages: zero, whatever the minibatches.
    np.testing.assert_allclose(float(metrics["ppo/policy_loss"]), -scaled.mean(), atol=1e-5)


def test_values_of_acting_count_only_if_these_parameters_gave_them():
    """A rollout of an older version brings values that are not looked at."""
    *_, state, data, learn = case("masked-shared")
    wrong = data._replace(extras=data.extras | {"value": data.extras["value"] + 1.0})
    losses = [float(learn(state, d, jax.random.key(2))[1]["ppo/value_loss"]) for d in (data, wrong)]
    assert abs(losses[0] - losses[1]) > 1e-3, "taken where they are these parameters' own"
    later = state._replace(updates=data.version + 1)
    computed, metrics = learn(later, data, jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, learn(later, wrong, jax.random.key(2)), (computed, metrics))
    np.testing.assert_allclose(metrics["ppo/value_loss"], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_invalid_steps_change_no_bit():
    """Other rewards and actions in invalid steps change nothing, bit for bit."""
    *_, state, data, learn = case("agents-memory")
    valid = data.valid
    assert 0.1 < jnp.mean(valid) < 0.9
    poisoned = data._replace(
        reward=jnp.where(valid, data.reward, 1e6),
        action=jnp.where(valid, data.action, 0),
        extras=data.extras | {"raw": jnp.where(valid, data.extras["raw"], 0)},
    )
    for one, other in zip(
        jax.tree.leaves(learn(state, data, jax.random.key(2))),
        jax.tree.leaves(learn(state, poisoned, jax.random.key(2))),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    better = data._replace(reward=data.reward + 1.0)
    losses = [float(learn(state, d, jax.random.key(2))[1]["ppo/value_loss"]) for d in (data, better)]
    assert losses[0] != losses[1], "rewards of valid steps must count"


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


@pytest.mark.parametrize("clip_value", [True, False])
def test_the_objective_is_the_papers(clip_value):
    """Sums of equation 9 over rows, against NumPy in float64 on fixed numbers far on both sides of the clips."""
    rng = np.random.default_rng(0)
    rows, n = 64, 3
    observation = rng.normal(size=(rows, 4))
    raw, mask = np.zeros(rows, np.int32), rng.random((rows, n)) < 0.7
    mask[:, 0] = True
    raw = np.array([rng.choice(np.flatnonzero(m)) for m in mask], np.int32)
    network = actor_critic(jax.ShapeDtypeStruct((4,), jnp.float32), n, sizes=(5,))
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.7, size=x.shape), jnp.float32), shapes)
    np64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    hidden = {
        k: np.tanh(observation @ np64[k]["layer_0"]["kernel"] + np64[k]["layer_0"]["bias"]) for k in ("actor", "critic")
    }
    logits = hidden["actor"] @ np64["policy"]["kernel"] + np64["policy"]["bias"]
    value = (hidden["critic"] @ np64["value"]["kernel"] + np64["value"]["bias"])[:, 0]
    p = softmax(np.where(mask, logits, -np.inf))
    log_prob = np.log(p[np.arange(rows), raw])
    old = log_prob + rng.normal(scale=0.3, size=rows)
    advantage, target = rng.normal(size=rows), value + rng.normal(size=rows)
    before, weight = value + rng.normal(scale=0.3, size=rows), (rng.random(rows) < 0.8).astype(np.float64)

    ratio = np.exp(log_prob - old)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    error = (value - target) ** 2
    if clip_value:
        error = np.maximum(error, (before + np.clip(value - before, -0.2, 0.2) - target) ** 2)
    entropy = -np.sum(np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0.0), -1)
    expected = {
        "policy_loss": -surrogate,
        "value_loss": 0.5 * error,
        "entropy": entropy,
        "approx_kl": ratio - 1 - np.log(ratio),
        "clip_fraction": np.abs(ratio - 1) > 0.2,
    }
    expected = {name: np.sum(part * weight) for name, part in expected.items()}
    total = expected["policy_loss"] + 0.7 * expected["value_loss"] - 0.03 * expected["entropy"]

    def f32(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x, jnp.float32)

    batch = Batch(
        f32(observation), jnp.asarray(mask), jnp.asarray(raw), f32(old), f32(before), f32(advantage), f32(target),
        f32(weight), None, (),
    )  # fmt: skip
    config = PPOConfig(clip_eps=0.2, clip_value=clip_value, vf_coef=0.7)
    found, parts = ppo._loss(network, distribution(Discrete(n)), config)(params, batch, jnp.float32(0.03))
    np.testing.assert_allclose(found, total, rtol=1e-5)
    for name, number in expected.items():
        np.testing.assert_allclose(parts[name], number, rtol=1e-5, err_msg=name)


ONE_STEP = replace(
    SMALL, num_minibatches=1, update_epochs=1, max_grad_norm=1e9, lr=1e-2, ent_coef=0.3, ent_coef_final=0.0
)
"""Single step on the whole batch: Adam's first moment is then a tenth of the gradient."""


def gradient(state: State) -> jax.Array:
    """Adam's first moment as one vector: after one step, a tenth of the gradient."""
    found = next(
        part.mu for part in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
    )
    return jax.flatten_util.ravel_pytree(found)[0]


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


def learning(config: PPOConfig) -> Any:
    return quick(ppo.ppo(KINDS["categorical"][0].spec, config, RunContext(10, meshes.identity)).learn)


@pytest.fixture(scope="module")
def one_step() -> tuple[State, Rollout, State, Any]:
    """(state, data, the state after one optimiser step on all of the data, what made that step)."""
    *_, state, data, _ = case("categorical")
    learn = learning(ONE_STEP)
    after, _ = learn(state, data, jax.random.key(2))
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(gradient(after))) > 1e-3
    return state, data, after, learn


@pytest.mark.slow  # diagnostics/test_checks.py compares what one device and two learn
def test_two_shards_have_the_gradient_of_one_with_all_columns(one_step):
    state, data, after, _ = one_step
    mesh = meshes.make_mesh(2)
    columns, everywhere = PartitionSpec(None, "data"), PartitionSpec()
    layout = jax.tree.map(lambda _: columns, data)._replace(version=everywhere)
    layout = layout._replace(successors=layout.successors._replace(last=PartitionSpec("data")))
    learn = ppo.ppo(KINDS["categorical"][0].spec, ONE_STEP, RunContext(updates=10, mean=meshes.mean_over_data)).learn
    learn = meshes.per_shard(learn, mesh, (everywhere, layout, everywhere), everywhere)
    split, _ = quick(learn)(state, data, jax.random.key(2))
    assert_close(gradient(split), gradient(after), 1e-6)
    assert_close(split.params, after.params, 1e-5)


def test_kl_stop_ends_the_update(one_step):
    """Any change is too much, so three of four epochs are skipped: the state is that after one step."""
    state, data, after, _ = one_step
    stopped, _ = learning(replace(ONE_STEP, kl_stop=1e-9, update_epochs=4))(state, data, jax.random.key(2))
    assert_close(stopped.params, after.params, 1e-5)
    assert_close(stopped.opt_state, after.opt_state, 1e-5)
    counts = [x for x in jax.tree.leaves(stopped.opt_state) if x.dtype == jnp.int32]
    assert counts == [1]


def test_adam_adds_its_epsilon_to_the_root(one_step):
    """Adam's first step (Kingma and Ba 2015, algorithm 1): lr g / (|g| + eps), in NumPy."""
    state, data, _, _ = one_step
    config = replace(ONE_STEP, adam_eps=0.02, anneal=False)
    after, _ = learning(config)(state, data, jax.random.key(2))
    g = np.asarray(gradient(after), np.float64) / 0.1
    before, moved = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.params)]) for s in (state, after))
    np.testing.assert_allclose(before - moved, config.lr * g / (np.abs(g) + config.adam_eps), atol=2e-7)
    assert 0.1 < np.abs(before - moved).max() / config.lr < 0.999


def test_annealing_is_linear_and_falls_to_zero(one_step):
    """The learning rate as reported and as it moves parameters; the weight of entropy by its part of the gradient."""
    state, data, _, learn = one_step
    grads, moves = [], []
    for update, share in ((0, 1.0), (5, 0.5), (10, 0.0)):
        after, metrics = learn(state._replace(updates=jnp.int32(update)), data, jax.random.key(2))
        np.testing.assert_allclose(metrics["ppo/lr"], share * ONE_STEP.lr, rtol=1e-6)
        grads.append(gradient(after))
        pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True)
        moves.append(max(float(np.abs(a - b).max()) for a, b in pairs))
    # Adam's first step is as long as the learning rate in every direction.
    np.testing.assert_allclose(moves, [1e-2, 5e-3, 0.0], atol=1e-5)
    start, middle, end = grads
    assert_close(jax.tree.map(lambda a, b: 0.5 * (a + b), start, end), middle, 1e-6)
    assert max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(end))) > 1e-4


def test_acting_without_a_key_takes_the_mode_and_normalises():
    """A policy with moments acts as one without them does on observations normalised by hand."""
    environment, config = KINDS["multi_categorical-normalised"]
    algorithm = ppo.ppo(environment.spec, config, RunContext(10, meshes.identity))
    state, seen = stirred(algorithm, config), np.random.default_rng(1).normal(0.5, 1.0, (WORLDS, 2)).astype(np.float32)
    policy = algorithm.policy(state)
    action, memory, extras = quick(lambda policy, seen: algorithm.act(policy, (), seen, None))(policy, seen)
    assert memory == ()
    by_hand = (np.asarray(seen) - np.asarray(state.moments.mean)) / np.sqrt(np.asarray(state.moments.variance) + 1e-8)
    plain = ppo.ppo(environment.spec, replace(config, normalise_observation=False), RunContext(10, meshes.identity))
    act = quick(lambda policy, seen: plain.act(policy, (), seen, None))
    other, _, more = act(Policy(state.params, ()), jnp.asarray(by_hand, jnp.float32))
    np.testing.assert_array_equal(action, other)
    np.testing.assert_allclose(extras["log_prob"], more["log_prob"], rtol=1e-5)
    assert np.all(extras["log_prob"] >= np.log(1 / 6) - 1e-6), "the mode of six has at least a sixth"


def test_illegal_actions_are_never_taken():
    *_, data, _ = case("masked-shared")
    assert isinstance(data.observation, Masked)
    legal = jnp.take_along_axis(data.observation.mask, data.action[..., None], axis=-1)
    assert jnp.all(legal)
    assert not jnp.all(data.observation.mask)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_minibatches": 5}, "num_minibatches is 5, which does not divide the 96 steps of a batch"),
        ({"num_minibatches": 16, "memory": 4}, "num_minibatches is 16, which does not divide the 8 environments"),
        ({"num_minibatches": 0}, "num_minibatches is 0; it must be at least 1"),
        ({"update_epochs": 0}, "update_epochs is 0"),
        ({"chunk": -1}, "chunk is -1"),
        ({"hidden_dim": 0}, "hidden_dim is 0"),
        ({"gamma": 1.5}, "gamma is 1.5; it must lie in 0 to 1"),
        ({"gae_lambda": -0.1}, "gae_lambda is -0.1"),
        ({"lr": float("nan")}, "lr is nan; it must be finite"),
        ({"clip_eps": -1.0}, "clip_eps is -1.0"),
        ({"adam_eps": 0.0}, "adam_eps is 0.0; it must be above 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"model_size": 0.001}, "model_size is 0.001; it must lie in 0.01 to 1000"),
    ],
)
def test_impossible_settings_are_named_with_the_remedy(change, words):
    with pytest.raises(ValueError, match=words) as error:
        registry.check(replaced(SMALL, **change), Sizes(1, WORLDS, STEPS))
    assert "\n" not in str(error.value)


def test_possible_settings_pass():
    """Minibatches with memory are whole columns: their number divides them, one more does not."""
    registry.check(SMALL, Sizes(1, WORLDS, STEPS))
    registry.check(replaced(SMALL, memory=4, num_minibatches=WORLDS), Sizes(1, WORLDS, STEPS))
    with pytest.raises(ValueError, match="does not divide"):
        registry.check(replaced(SMALL, memory=4, num_minibatches=WORLDS + 1), Sizes(1, WORLDS, STEPS))


SET = Spec(
    {"ego": jax.ShapeDtypeStruct((3,), jnp.float32), "items": jax.ShapeDtypeStruct((4, 5), jnp.float32)}, Discrete(2)
)


def test_a_model_size_decides_width_and_depth():
    config = PPOConfig(network=NetworkConfig(torso="latent", model_size=0.3, hidden_dim=7, num_layers=9))
    algorithm = ppo.ppo(SET, config, RunContext(updates=1, mean=meshes.identity))
    state = jax.eval_shape(algorithm.init, jax.random.key(0))
    assert networks.count(state.params) == pytest.approx(0.3e6, rel=0.1)


def test_presence_is_not_normalised():
    """An item's last feature says whether it is there: normalised, one that always is would not be."""
    config = PPOConfig(normalise_observation=True, network=NetworkConfig(torso="deepset"))
    with pytest.raises(ValueError, match="normalise_observation is on, and torso deepset reads"):
        ppo.ppo(SET, config, RunContext(updates=1, mean=meshes.identity))
    ppo.ppo(SET, replaced(config, torso="mlp"), RunContext(updates=1, mean=meshes.identity))
