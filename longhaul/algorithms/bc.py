"""Behaviour cloning (Pomerleau 1991): maximum likelihood of an expert's actions.

The data are rollouts whose extras are `Guided`: the expert drives, or gives its action in each state, or was recorded.
If the expert drives only a share of the worlds, the policy drives the others and learns the expert's action in states
to which its own mistakes lead (DAgger; Ross et al. 2011, arXiv 1011.0686).

Where we differ: the data are generated on the device for every update and not kept. The network is that of PPO, whose
critic learns nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul.algorithms import actor_critic, minibatch, values
from longhaul.algorithms.actor_critic import Policy, State, advanced, look
from longhaul.algorithms.config import BCConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import Distribution
from longhaul.networks import actor_critic as networks
from longhaul.runtime.errors import FieldError
from longhaul.spaces import Action, Box, Discrete
from longhaul.types import Algorithm, Guided, Key, Metrics, Params, PyTree, Rollout, Spec


class Batch(NamedTuple):
    """Rows of a rollout, [rows, ...]; with memory: whole columns, [T, columns, ...]."""

    observation: PyTree
    mask: jax.Array | None  # bool [rows, n]: legal actions
    raw: jax.Array  # the expert's raw actions (distributions.py)
    weight: jax.Array  # float32 [rows]: 1, and 0 where the expert's action is not known
    begins: jax.Array | None  # bool [T, columns]: an episode begins here, so memory is reset
    memory: PyTree  # [columns, width] or ()


PARTS = ("policy_loss", "entropy", "error")
"""Reported parts of the loss. The first is the negative log-likelihood; the error is that of the likeliest action: the
share of choices that differ from the expert's, or the mean distance in a vector's numbers."""


def check(config: BCConfig, *, columns: int, steps: int) -> None:
    """Raises FieldError for impossible sizes of one shard."""
    actor_critic.check(config, columns=columns, steps=steps)
    if config.recorded and config.network.memory:
        raise FieldError("memory", f"{config.network.memory}, and what was recorded is drawn step by step", "take 0")


def _loss(
    network: networks.ActorCritic, policy: Distribution, action: Action
) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Function (params, batch, entropy weight) -> sums over rows of the loss and of its parts."""

    def loss(params: Params, batch: Batch, entropy_weight: jax.Array) -> tuple[jax.Array, Metrics]:
        if batch.begins is None:
            parameters, _, _ = network.apply(params, (), batch.observation)
        else:
            parameters, _, _ = values.along_time(network, params, batch.memory, batch.observation, batch.begins)
        parts = {
            "policy_loss": -policy.log_prob(parameters, batch.mask, batch.raw),
            "entropy": policy.entropy(parameters, batch.mask),
            "error": _error(policy, action, policy.mode(parameters, batch.mask), batch.raw),
        }
        parts = {name: jnp.where(batch.weight > 0.0, part, 0.0) for name, part in parts.items()}
        return jnp.sum(parts["policy_loss"] - entropy_weight * parts["entropy"]), jax.tree.map(jnp.sum, parts)

    return loss


def _error(policy: Distribution, action: Action, mode: jax.Array, raw: jax.Array) -> jax.Array:
    if isinstance(action, Box):
        return jnp.mean(jnp.abs(policy.action(mode) - policy.action(raw)), axis=-1)
    differs = (mode != raw).astype(jnp.float32)
    return differs if isinstance(action, Discrete) else jnp.mean(differs, axis=-1)


def bc(spec: Spec, config: BCConfig, context: RunContext) -> Algorithm:
    """Behaviour cloning for environments of `spec`."""
    parts = actor_critic.parts(spec, config)
    network, policy = parts.network, parts.policy
    optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    loss = _loss(network, policy, spec.action)
    optimise = minibatch.optimiser_steps(loss, network.live, optimiser, config, context, PARTS)

    def see(state: State, data: Rollout) -> Batch:
        assert isinstance(data.extras, Guided), "cloning without an expert: the collector has no guide"
        visible, mask = look(state.moments, data.observation)
        known = data.valid & data.extras.known
        raw = policy.raw(data.extras.action)
        # A value without meaning may be NaN, and so would 0 times its gradient.
        raw = jnp.where(known.reshape(*known.shape, *([1] * (raw.ndim - known.ndim))), raw, 0)
        weight, begins = known.astype(jnp.float32), values.begins(data) if config.network.memory else None
        return Batch(visible, mask, raw, weight, begins, data.memory)

    def learn(state: State, data: Rollout, key: Key) -> tuple[State, Metrics]:
        batch = context.isolated(see)(state, data)
        params, opt_state, metrics = optimise(state.params, state.opt_state, state.updates, batch, key)
        metrics["known"] = context.mean(context.isolated(jnp.mean)(batch.weight))
        after = advanced(state, params, opt_state, data, batch.weight, context)
        return after, {f"bc/{k}": v for k, v in metrics.items()}

    return Algorithm(
        actor_critic.starting(parts, config, optimiser), lambda state: Policy(state.params, state.moments),
        network.memory, actor_critic.acting(parts, config, extras=False), learn,
    )  # fmt: skip
