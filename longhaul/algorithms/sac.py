"""SAC (Haarnoja et al. 2018, arXiv 1812.05905): off-policy, twin critics, a temperature that keeps the policy random.

For a Box the policy is a tanh-Gaussian and critics take its action, within -1 to 1. For choices (Christodoulou 2019,
arXiv 1910.07207) critics give the value of each, and expectations over them are exact.

With `imitation` it is BC-SAC (Lu et al. 2022, arXiv 2212.11419): an expert drives in a share of the worlds, and its
negative log-likelihood joins the actor's loss. Where we differ from it: the expert's steps lie in the same replay as
the policy's own, and actor and critics learn from both by SAC too.

Where we differ: actor, critics and temperature step together, by one gradient at the same parameters, so that shards
meet once a step; the paper updates one after the other. The target entropy of choices is half of the maximum of the
legal ones in each state; Christodoulou's 0.98 of it leaves little to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng, replay
from longhaul.algorithms import off_policy
from longhaul.algorithms.config import SACConfig
from longhaul.algorithms.off_policy import Parts, Policy, Preprocessor, State
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import Distribution, at_choice, distribution, legal_only
from longhaul.networks import actor_critic
from longhaul.replay import Transitions
from longhaul.runtime.errors import FieldError
from longhaul.spaces import Box, Discrete
from longhaul.types import Act, Algorithm, Guided, Key, Metrics, Params, PyTree, Rollout, Spec


def check(config: SACConfig, *, shards: int, columns: int, steps: int) -> None:
    """Raises FieldError for impossible sizes."""
    off_policy.check(config, shards=shards, columns=columns, steps=steps)
    if config.imitation and config.expert_share == 0.0:
        raise FieldError("expert_share", "0.0, and imitation needs worlds that the expert drives", "take 0.25")


class _Networks:
    """Networks of a config for environments of `spec`: the actor's, and one critic's."""

    def __init__(self, spec: Spec, config: SACConfig) -> None:
        self.preprocessor: Preprocessor = off_policy.preprocessor(spec)
        self.policy: Distribution = distribution(spec.action)
        inputs = self.preprocessor.shape
        match spec.action:
            case Box(low, _):
                size = self.policy.size + self.policy.free  # a deviation of its own for each observation
                action = jax.ShapeDtypeStruct((len(low),), jnp.float32)
                self.actor = off_policy.tower(config, inputs, size, 0.01)
                self.critic = off_policy.tower(config, (inputs, action), 1)
            case Discrete(n):
                self.actor = off_policy.tower(config, inputs, n, 0.01)
                self.critic = off_policy.tower(config, inputs, n)
            case _:
                raise ValueError(
                    f"SAC learns one choice or a vector, and this environment takes {spec.action}; "
                    "choose --algorithm ppo"
                )


def _twin_values(critic: actor_critic.Tower, params: tuple[Params, Params], inputs: PyTree) -> jax.Array:
    """Values float32 [2, ..., n] of both critics."""
    return jnp.stack([critic.apply(each, inputs) for each in params])


RowLoss = Callable[[dict[str, Params], dict[str, Params], Transitions, PyTree], tuple[jax.Array, Metrics, jax.Array]]
"""(params, target, batch, noise) -> (loss, metrics, absolute error of the critics) of each row, [n] each."""


def _temperature(config: SACConfig, params: dict[str, Params]) -> jax.Array:
    if config.temperature is not None:
        return jnp.float32(config.temperature)
    return jax.lax.stop_gradient(jnp.exp(params["temperature"]))


def _row_losses(
    config: SACConfig, params: dict[str, Params], q: jax.Array, q_target: jax.Array, actor_loss: jax.Array,
    surplus: jax.Array,
) -> tuple[jax.Array, Metrics, jax.Array]:  # fmt: skip
    """Loss of each row: both critics' q [2, n] against `q_target`, the actor's own, and the temperature's, by the
    policy's `surplus` of entropy over the target entropy."""
    error = q - jax.lax.stop_gradient(q_target)[None]
    critic_loss = 0.5 * jnp.sum(jnp.square(error), axis=0)
    total = critic_loss + actor_loss
    if config.temperature is None:
        total = total + params["temperature"] * jax.lax.stop_gradient(surplus)
    alpha = jnp.broadcast_to(_temperature(config, params), critic_loss.shape)
    metrics = {"value_loss": critic_loss, "policy_loss": actor_loss, "q": jnp.mean(q, axis=0), "temperature": alpha}
    return total, metrics, jnp.mean(jnp.abs(error), axis=0)


def _imitation(config: SACConfig, batch: Transitions, log_prob: Callable[[jax.Array], jax.Array]) -> Any:
    """(negative log-likelihood of the expert's action in each row, its metrics); 0 for rows of the policy.

    Its mean is the expectation over the expert's rows alone, for any number of them in the sample. `log_prob` takes the
    stored actions of all rows.
    """
    if not config.imitation:
        return jnp.float32(0.0), {}
    expert = (batch.action[..., -1] > 0.5) & (batch.weight > 0.0)
    rows = jnp.where(expert, -log_prob(batch.action[..., :-1]), 0.0)
    share = expert.astype(jnp.float32).mean()
    scaled = rows / jnp.maximum(share, 1.0 / rows.shape[0])
    return config.imitation * scaled, {"imitation_loss": scaled, "expert": expert.astype(jnp.float32)}


def _box_losses(config: SACConfig, networks: _Networks, box: Box) -> RowLoss:
    """Losses of Haarnoja et al., summed: with a, a' drawn by the policy for s, s',

        critics      1/2 sum_i (Q_i(s, a_stored) - r - gamma (min_i Q'_i(s', a') - alpha log pi(a' | s')))^2
        actor        alpha log pi(a | s) - min_i Q_i(s, a)
        temperature  log alpha (-log pi(a | s) - target entropy)

    Noise is that of (a, a'). Actions lie within -1 to 1, and entropies are of these.
    """
    policy, look = networks.policy, networks.preprocessor.look
    from_noise = policy.from_noise
    assert from_noise is not None, "a vector's distribution has it"
    half = (np.asarray(box.high, np.float32) - np.asarray(box.low, np.float32)) / 2
    shift = float(np.sum(np.log(half)))  # from the density in the environment's units to that within -1 to 1
    target_entropy = -float(len(box.low)) if config.target_entropy is None else config.target_entropy

    def drawn(parameters: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(action within -1 to 1, its log-probability)."""
        raw = from_noise(parameters, noise)
        return jnp.tanh(raw), policy.log_prob(parameters, None, raw) + shift

    def loss(params: dict[str, Params], target: dict[str, Params], batch: Transitions, noise: PyTree) -> Any:
        noise_now, noise_next = noise
        inputs, next_inputs = look(batch.observation)[0], look(batch.successor)[0]
        alpha = _temperature(config, params)
        action, log_prob = drawn(networks.actor.apply(params["actor"], next_inputs), noise_next)
        next_q = jnp.min(off_policy.q_values(networks.critic, target["critics"], next_inputs, action), axis=0)
        next_value = next_q - alpha * log_prob
        reward, discount = replay.discounted(batch, config.gamma)
        q_target = config.reward_scale * reward + discount * next_value
        q = off_policy.q_values(networks.critic, params["critics"], inputs, batch.action[..., : len(half)])
        parameters = networks.actor.apply(params["actor"], inputs)
        action, log_prob = drawn(parameters, noise_now)
        frozen = jax.lax.stop_gradient(params["critics"])
        min_q = jnp.min(off_policy.q_values(networks.critic, frozen, inputs, action), axis=0)
        actor_loss, surplus = alpha * log_prob - min_q, -log_prob - target_entropy
        rows, metrics, error = _row_losses(config, params, q, q_target, actor_loss, surplus)
        imitation, imitation_metrics = _imitation(
            config, batch,
            lambda stored: shift + policy.log_prob(parameters, None, policy.raw(off_policy.from_unit(box, stored))),
        )  # fmt: skip
        return rows + imitation, metrics | imitation_metrics | {"entropy": shift - log_prob}, error

    return loss


def _discrete_losses(config: SACConfig, networks: _Networks) -> RowLoss:
    """Losses of Christodoulou: those of `_box_losses` with expectations over the legal choices in place of draws."""
    look = networks.preprocessor.look

    def chances(params: Params, inputs: PyTree, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """(probabilities [n, choices], their logarithms, 0 where a choice is not legal)."""
        log_p = jax.nn.log_softmax(legal_only(networks.actor.apply(params, inputs), mask))
        return jnp.exp(log_p), log_p if mask is None else jnp.where(mask, log_p, 0.0)

    def loss(params: dict[str, Params], target: dict[str, Params], batch: Transitions, noise: PyTree) -> Any:
        inputs, mask = look(batch.observation)
        next_inputs, mask_next = look(batch.successor)
        alpha = _temperature(config, params)
        p, log_p = chances(params["actor"], next_inputs, mask_next)
        next_q = jnp.min(_twin_values(networks.critic, target["critics"], next_inputs), axis=0)
        reward, discount = replay.discounted(batch, config.gamma)
        q_target = config.reward_scale * reward + discount * jnp.sum(p * (next_q - alpha * log_p), axis=-1)
        all_q = _twin_values(networks.critic, params["critics"], inputs)
        q = at_choice(all_q, batch.action)
        p, log_p = chances(params["actor"], inputs, mask)
        min_q = jax.lax.stop_gradient(jnp.min(all_q, axis=0))
        actor_loss = jnp.sum(p * (alpha * log_p - min_q), axis=-1)
        entropy = -jnp.sum(p * log_p, axis=-1)
        legal = all_q.shape[-1] if mask is None else jnp.sum(mask, axis=-1)
        target_entropy = 0.5 * jnp.log(legal) if config.target_entropy is None else config.target_entropy
        rows, metrics, error = _row_losses(config, params, q, q_target, actor_loss, entropy - target_entropy)
        return rows, metrics | {"entropy": entropy}, error

    return loss


def sac(spec: Spec, config: SACConfig, context: RunContext) -> Algorithm:
    """SAC for environments of `spec`; without `context.sizes` it acts and cannot learn.

    Raises ValueError where actions are neither one choice nor a vector, or imitation is asked for without a vector.
    """
    networks = _Networks(spec, config)

    def init(key: Key) -> dict[str, Params]:
        actor, *critics = jax.random.split(key, 3)
        params = {"actor": networks.actor.init(actor), "critics": tuple(map(networks.critic.init, critics))}
        return params | ({"temperature": jnp.float32(0.0)} if config.temperature is None else {})

    if isinstance(spec.action, Box):
        box, size = spec.action, len(spec.action.low)

        def noise(key: Key, rows: int) -> tuple[jax.Array, jax.Array]:
            """Standard normal noise for the current actions and the next ones."""
            key_now, key_next = prng.split(key, 2)
            return prng.normal(key_now, (rows, size)), prng.normal(key_next, (rows, size))

        parts = Parts(
            init=init, targets=("critics",), loss=_box_losses(config, networks, box),
            store=lambda action: off_policy.to_unit(box, action), stored=jax.ShapeDtypeStruct((size,), jnp.float32),
            actor="actor", noise=noise,
        )  # fmt: skip
        if config.imitation:
            parts = parts._replace(stored=jax.ShapeDtypeStruct((size + 1,), jnp.float32), mark=_with_expert_flag)
    elif config.imitation:
        raise ValueError(f"imitation is {config.imitation}, and it needs a vector of actions: --actions continuous")
    else:
        assert isinstance(spec.action, Discrete)
        parts = Parts(
            init=init, targets=("critics",), loss=_discrete_losses(config, networks),
            store=lambda action: action, stored=off_policy.choice_type(spec.action), actor="actor",
        )  # fmt: skip
    return off_policy.algorithm(spec, config, parts, _acting(spec, networks), context)


def _with_expert_flag(stored: jax.Array, data: Rollout) -> jax.Array:
    """Vectors with one more number: 1 if the action was the expert's."""
    assert isinstance(data.extras, Guided), "imitation without an expert: the collector has no guide"
    return jnp.concatenate([stored, data.extras.followed[..., None].astype(stored.dtype)], axis=-1)


def _acting(spec: Spec, networks: _Networks) -> Act:
    """`Algorithm.act`, without extras: learning needs the action alone."""
    policy = networks.policy

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, PyTree]:
        inputs, mask = networks.preprocessor.look(observation)
        parameters = networks.actor.apply(acting.params, inputs)
        if key is None:
            return policy.action(policy.mode(parameters, mask)), memory, ()
        key_policy, key_uniform, key_explore = prng.split(key, 3)
        action = policy.action(policy.sample(parameters, mask, key_policy))
        rows = parameters.shape[0]
        explores = prng.uniform(key_explore, (rows,)) < acting.random
        if isinstance(spec.action, Box):
            uniform = off_policy.from_unit(spec.action, 2.0 * prng.uniform(key_uniform, action.shape) - 1.0)
            return jnp.where(explores[:, None], uniform, action), memory, ()
        uniform = off_policy.uniform_legal(key_uniform, mask, parameters.shape[-1], rows)
        return jnp.where(explores, uniform, action), memory, ()

    return act


def critic(spec: Spec, config: SACConfig) -> Callable[[State, PyTree], jax.Array]:
    """Function (state, observation [B, ...]) -> the smaller critic's value without entropy, float32 [B]: that of the
    policy's mode (a vector), or the mean over the policy (choices)."""
    networks = _Networks(spec, config)

    def value(state: State, observation: PyTree) -> jax.Array:
        inputs, mask = networks.preprocessor.look(observation)
        parameters = networks.actor.apply(state.params["actor"], inputs)
        if isinstance(spec.action, Box):
            action = jnp.tanh(networks.policy.mode(parameters, None))
            return jnp.min(off_policy.q_values(networks.critic, state.params["critics"], inputs, action), axis=0)
        p = jax.nn.softmax(legal_only(parameters, mask))
        return jnp.sum(p * jnp.min(_twin_values(networks.critic, state.params["critics"], inputs), axis=0), axis=-1)

    return value


def network(spec: Spec, config: SACConfig) -> actor_critic.ActorCritic:
    """Actor whose `apply` takes a `Policy`, as of `off_policy.actor_network`."""
    networks = _Networks(spec, config)
    return off_policy.actor_network(networks.actor, networks.preprocessor)
