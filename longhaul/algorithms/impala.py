"""IMPALA (Espeholt et al. 2018): an actor-critic that learns from the actions of older policies by V-trace; and APPO.

With `clip_eps` the policy's gradient is that of a clipped surrogate (APPO, after Luo et al. 2020): its ratio is over
the policy at the update's beginning, its advantages are V-trace's, and so weighted by the ratio of that policy to the
acting one (the decoupled objective of Hilton et al. 2022). Its first step is IMPALA's.

Where we differ from the paper: losses are means over the batch where its code takes sums, so that nothing depends on
the batch's size; norms of gradients, and RMSProp's epsilon, are of that scale. Values, log-probabilities and V-trace
are computed once an update, from the parameters at its beginning, or taken from acting if acting computed both with the
same parameters. A truncated step bootstraps from its own successor.

With memory, minibatches are whole columns, replayed from the memory at the rollout's beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul import returns
from longhaul.algorithms import actor_critic, minibatch, values
from longhaul.algorithms.actor_critic import Policy, State, advanced, explained_variance, look, normalised
from longhaul.algorithms.config import IMPALAConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import Distribution, k3
from longhaul.networks import actor_critic as networks
from longhaul.types import Algorithm, Key, Metrics, Params, PyTree, Rollout, Spec

NOTICED = 1e-3
"""Relative excess of a ratio over its clip from which it counts as clipped: rounding alone does not."""


class Batch(NamedTuple):
    """Rows of a rollout, [rows, ...]; with memory: whole columns, [T, columns, ...]."""

    observation: PyTree
    mask: jax.Array | None  # bool [rows, n]: legal actions
    raw: jax.Array  # raw actions (distributions.py)
    behaviour_log_prob: jax.Array  # float32 [rows], by the acting policy
    old_log_prob: jax.Array  # float32 [rows], by the policy at the update's beginning
    advantage: jax.Array  # float32 [rows]: V-trace's, with its ratio
    target: jax.Array  # float32 [rows]: v_s of V-trace, for the value
    weight: jax.Array | None  # float32; None where every row counts alike
    begins: jax.Array | None  # bool [T, columns]: an episode begins here, so memory is reset
    memory: PyTree  # [columns, width] or ()


def _optimiser(config: IMPALAConfig) -> optax.GradientTransformation:
    if config.optimiser == "adam":
        steps = [optax.scale_by_adam(eps=config.adam_eps)]
    else:
        steps = [optax.scale_by_rms(decay=config.rms_decay, eps=config.rms_eps, eps_in_sqrt=True)]
        steps += [optax.trace(config.momentum)] * (config.momentum > 0.0)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), *steps)


def shaped(reward: jax.Array, scale: float, clip: str) -> jax.Array:
    """Rewards of any shape as the learner takes them: times `scale`, then clipped.

    `clip` is "none", "unit" (to -1 .. 1) or "asymmetric" (the paper's for DMLab-30: gains count more than losses).
    """
    reward = reward * scale
    if clip == "unit":
        return jnp.clip(reward, -1.0, 1.0)
    if clip == "asymmetric":
        squeezed = jnp.tanh(reward)
        return 0.3 * jnp.minimum(squeezed, 0.0) + 5.0 * jnp.maximum(squeezed, 0.0)
    return reward


def _loss(
    network: networks.ActorCritic, policy: Distribution, config: IMPALAConfig
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Function (params, batch, entropy weight) -> sums over rows of the loss and of its parts (section 4.2)."""

    def loss(params: Params, batch: Batch, entropy_weight: jax.Array) -> tuple[jax.Array, Metrics]:
        if batch.begins is None:
            parameters, value, _ = network.both(params, (), batch.observation)
        else:
            parameters, value, _ = values.along_time(network, params, batch.memory, batch.observation, batch.begins)
        log_prob = policy.log_prob(parameters, batch.mask, batch.raw)
        entropy = policy.entropy(parameters, batch.mask)
        log_ratio = log_prob - batch.behaviour_log_prob
        parts = {
            "value_loss": 0.5 * jnp.square(value - batch.target),
            "entropy": entropy,
            "approx_kl": k3(log_ratio),
        }
        if config.clip_eps is None:
            parts["policy_loss"] = -log_prob * batch.advantage
        else:
            ratio = jnp.exp(log_prob - batch.old_log_prob)
            clipped = jnp.clip(ratio, 1.0 - config.clip_eps, 1.0 + config.clip_eps)
            parts["policy_loss"] = -jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
            parts["clip_fraction"] = (jnp.abs(ratio - 1.0) > config.clip_eps).astype(jnp.float32)
        total = parts["policy_loss"] + config.vf_coef * parts["value_loss"] - entropy_weight * entropy
        if batch.weight is not None:
            total, parts = jax.tree.map(lambda x: x * batch.weight, (total, parts))
        return jnp.sum(total), jax.tree.map(jnp.sum, parts)

    return loss


def impala(spec: Spec, config: IMPALAConfig, context: RunContext) -> Algorithm:
    """IMPALA for environments of `spec`."""
    parts = actor_critic.parts(spec, config)
    network, policy = parts.network, parts.policy
    optimiser = _optimiser(config)
    reported = ["policy_loss", "value_loss", "entropy", "approx_kl"]
    reported += [] if config.clip_eps is None else ["clip_fraction"]
    loss = _loss(network, policy, config)
    optimise = minibatch.optimiser_steps(loss, network.live, optimiser, config, context, reported)
    rho_clip, c_clip = (math.inf if clip is None else clip for clip in (config.rho_clip, config.c_clip))

    def log_prob(parameters: jax.Array, taken: tuple[jax.Array | None, jax.Array]) -> jax.Array:
        return policy.log_prob(parameters, *taken)

    def trace(*columns: jax.Array) -> returns.VTrace:
        return returns.vtrace(
            *columns, gamma=config.gamma, lam=config.vtrace_lambda, rho_clip=rho_clip, c_clip=c_clip
        )  # fmt: skip

    def see(state: State, data: Rollout) -> tuple[Batch, jax.Array, jax.Array]:
        """(batch of one shard, advantages not yet normalised; V(s); logarithms of the ratios to the acting policy)."""
        visible, mask = look(state.moments, data.observation)
        others = [look(state.moments, o)[0] for o in data.successors]
        raw, behaviour = data.extras["raw"], data.extras["log_prob"]
        old, value, successor = values.log_probs_and_values(
            network, log_prob, state.params, data, (visible, *others), (mask, raw), config.chunk, state.updates
        )
        if spec.agents is not None:  # rows of absent agents hold no log-probability
            behaviour = jnp.where(data.valid, behaviour, old)
        log_ratio = old - behaviour
        reward = shaped(data.reward, config.reward_scale, config.reward_clip)
        target, advantage = jax.vmap(trace, in_axes=1, out_axes=1)(
            log_ratio, reward, value, successor, data.terminated, data.truncated
        )
        weight = data.valid.astype(jnp.float32) if spec.agents is not None else None
        begins = values.begins(data) if config.network.memory else None
        batch = Batch(visible, mask, raw, behaviour, old, advantage, target, weight, begins, data.memory)
        return batch, value, log_ratio

    def learn(state: State, data: Rollout, key: Key) -> tuple[State, Metrics]:
        batch, value, log_ratio = context.isolated(see)(state, data)
        weight = batch.weight
        errors = context.isolated(jnp.subtract)(batch.target, value)
        explained = explained_variance(errors, batch.target, weight, context)
        if config.normalise_advantage:
            batch = batch._replace(advantage=normalised(batch.advantage, weight, context))
        params, opt_state, metrics = optimise(state.params, state.opt_state, state.updates, batch, key)
        metrics["explained_variance"] = explained
        metrics |= _staleness(log_ratio, rho_clip, state.updates - data.version, weight, context)
        after = advanced(state, params, opt_state, data, weight, context)
        return after, {f"impala/{k}": v for k, v in metrics.items()}

    return Algorithm(
        actor_critic.starting(parts, config, optimiser), lambda state: Policy(state.params, state.moments),
        network.memory, actor_critic.acting(parts, config), learn,
    )  # fmt: skip


def _staleness(
    log_ratio: jax.Array, clip: float, age: jax.Array, weight: jax.Array | None, context: RunContext
) -> Metrics:
    """Distance of the policy at an update's beginning from the acting ones: in updates, and in ratios."""

    def local(log_ratio: jax.Array, age: jax.Array, weight: jax.Array | None) -> jax.Array:
        rho = jnp.exp(log_ratio)
        count = jnp.ones_like(rho) if weight is None else weight
        clipped = (rho > clip * (1.0 + NOTICED)).astype(jnp.float32)
        return jnp.stack([jnp.mean(x * count) for x in (rho, clipped, age.astype(jnp.float32), jnp.ones_like(rho))])

    sums = context.mean(context.isolated(local)(log_ratio, age, weight))
    rho, clipped, age = sums[:3] / jnp.maximum(sums[3], 1e-8)
    return {"rho": rho, "rho_clipped": clipped, "staleness": age}
