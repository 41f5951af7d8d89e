"""Proximal policy optimisation (Schulman et al. 2017), with generalised advantage estimation.

Where we differ from the usual code: V(s) and V(successor) never come from two networks, because values are computed
here, all at once and from the current parameters. Where acting computes them at no cost (a shared torso), its values
are used if the rollout's version is that of the current parameters. A truncated step bootstraps from its own successor;
advantages are normalised once over the whole batch; minibatch.py describes its steps of the optimiser.

With memory, minibatches are whole columns, replayed from the memory at the rollout's beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul import returns
from longhaul.algorithms import actor_critic, minibatch, values
from longhaul.algorithms.actor_critic import Policy as Policy
from longhaul.algorithms.actor_critic import State as State
from longhaul.algorithms.actor_critic import advanced, explained_variance, look, normalised
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import Distribution
from longhaul.networks import actor_critic as networks
from longhaul.types import Algorithm, Key, Metrics, Params, PyTree, Rollout, Spec


class Batch(NamedTuple):
    """Rows of a rollout, [rows, ...]; with memory: whole columns, [T, columns, ...]."""

    observation: PyTree
    mask: jax.Array | None  # bool [rows, n]: legal actions
    raw: jax.Array  # raw actions (distributions.py)
    log_prob: jax.Array  # float32 [rows], by the acting policy
    value: jax.Array  # float32 [rows], of the parameters before the update
    advantage: jax.Array  # float32 [rows], normalised
    target: jax.Array  # float32 [rows]: lambda-return, for the value
    weight: jax.Array | None  # float32; None where every row counts alike
    begins: jax.Array | None  # bool [T, columns]: an episode begins here, so memory is reset
    memory: PyTree  # [columns, width] or ()


PARTS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
"""Reported parts of the loss."""


def _loss(
    network: networks.ActorCritic, policy: Distribution, config: PPOConfig
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Function (params, batch, entropy weight) -> sums over rows of the loss (equation 9) and of its parts."""

    def loss(params: Params, batch: Batch, entropy_weight: jax.Array) -> tuple[jax.Array, Metrics]:
        if batch.begins is None:
            parameters, value, _ = network.both(params, (), batch.observation)
        else:
            parameters, value, _ = values.along_time(network, params, batch.memory, batch.observation, batch.begins)
        log_ratio = policy.log_prob(parameters, batch.mask, batch.raw) - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - config.clip_eps, 1.0 + config.clip_eps)
        surrogate = -jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
        error = jnp.square(value - batch.target)
        if config.clip_value:
            near = batch.value + jnp.clip(value - batch.value, -config.clip_eps, config.clip_eps)
            error = jnp.maximum(error, jnp.square(near - batch.target))
        entropy = policy.entropy(parameters, batch.mask)
        total = surrogate + config.vf_coef * 0.5 * error - entropy_weight * entropy
        parts = {
            "policy_loss": surrogate,
            "value_loss": 0.5 * error,
            "entropy": entropy,
            "approx_kl": (ratio - 1.0) - log_ratio,
            "clip_fraction": (jnp.abs(ratio - 1.0) > config.clip_eps).astype(jnp.float32),
        }
        if batch.weight is not None:
            total, parts = jax.tree.map(lambda x: x * batch.weight, (total, parts))
        return jnp.sum(total), jax.tree.map(jnp.sum, parts)

    return loss


def ppo(spec: Spec, config: PPOConfig, context: RunContext) -> Algorithm:
    """PPO for environments of `spec`."""
    parts = actor_critic.parts(spec, config)
    network = parts.network
    optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    optimise = minibatch.optimiser_steps(
        _loss(network, parts.policy, config), network.live, optimiser, config, context, PARTS
    )

    def see(state: State, data: Rollout) -> Batch:
        """Batch of one shard, advantages not yet normalised."""
        visible, mask = look(state.moments, data.observation)
        others = [look(state.moments, o)[0] for o in data.successors]
        value, successor = values.estimates(
            network, state.params, data, (visible, *others), config.chunk, state.updates
        )
        estimate = jax.vmap(
            lambda r, v, s, end, cut: returns.gae(r, v, s, end, cut, gamma=config.gamma, lam=config.gae_lambda),
            in_axes=1, out_axes=1,
        )  # fmt: skip
        advantage = estimate(data.reward * config.reward_scale, value, successor, data.terminated, data.truncated)
        weight = data.valid.astype(jnp.float32) if spec.agents is not None else None
        begins = values.begins(data) if config.network.memory else None
        return Batch(
            visible, mask, data.extras["raw"], data.extras["log_prob"], value, advantage, advantage + value, weight,
            begins, data.memory,
        )  # fmt: skip

    def learn(state: State, data: Rollout, key: Key) -> tuple[State, Metrics]:
        batch = context.isolated(see)(state, data)
        weight = batch.weight
        explained = explained_variance(batch.advantage, batch.target, weight, context)
        if config.normalise_advantage:
            batch = batch._replace(advantage=normalised(batch.advantage, weight, context))
        params, opt_state, metrics = optimise(state.params, state.opt_state, state.updates, batch, key)
        metrics["explained_variance"] = explained
        after = advanced(state, params, opt_state, data, weight, context)
        return after, {f"ppo/{k}": v for k, v in metrics.items()}

    return Algorithm(
        actor_critic.starting(parts, config, optimiser), lambda state: Policy(state.params, state.moments),
        network.memory, actor_critic.acting(parts, config), learn,
    )  # fmt: skip
