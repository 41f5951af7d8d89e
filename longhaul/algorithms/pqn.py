"""PQN (Gallici et al. 2024, arXiv 2407.04811): Q-learning from many worlds at once, without a replay or targets.

Their place is taken by a normalised network (Ba et al. 2016) and lambda-returns of the newest rollout.

Where we differ: values are computed once an update, from the parameters at its beginning, or taken from acting if it
used the same parameters. A truncated step looks ahead to its own successor. Minibatches, accumulation and memory are
those of PPO (minibatch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from longhaul import normalise, prng, returns
from longhaul.algorithms import actor_critic, minibatch, off_policy, values
from longhaul.algorithms.actor_critic import Parts, State, advanced, explained_variance
from longhaul.algorithms.config import PQNConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import at_choice, legal_only
from longhaul.networks import actor_critic as networks
from longhaul.spaces import Discrete
from longhaul.types import Act, Algorithm, Key, Metrics, Params, PyTree, Rollout, Spec


class Policy(NamedTuple):
    """Part of the state that acting needs."""

    params: Params
    moments: normalise.Moments | tuple[()]
    random: jax.Array  # float32: share of actions drawn uniformly from the legal ones


class Batch(NamedTuple):
    """Rows of a rollout, [rows, ...]; with memory: whole columns, [T, columns, ...]."""

    inputs: PyTree  # (input of the network, mask of legal choices or None)
    action: jax.Array  # int32 [rows]
    target: jax.Array  # float32 [rows]: Q(lambda)'s, for the value of the action
    weight: jax.Array | None  # float32; None where every row counts alike
    begins: jax.Array | None  # bool [T, columns]: an episode begins here, so memory is reset
    memory: PyTree  # [columns, width] or ()


def _q_parts(spec: Spec, config: PQNConfig) -> Parts:
    """Parts whose network takes (input, mask): the values of choices, the least float where one is not legal, and the
    greatest of them."""
    if not isinstance(spec.action, Discrete):
        raise ValueError(
            f"PQN learns one choice, and this environment takes {spec.action}; choose --algorithm ppo or sac"
        )
    parts = actor_critic.parts(spec, config, norm=config.layer_norm)
    inner = parts.network

    def apply(params: Params, memory: PyTree, looked: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        inputs, mask = looked
        q, value, memory = inner.apply(params, memory, inputs)
        if config.duelling:
            q = value[..., None] + q - jnp.mean(q, axis=-1, keepdims=True)
        q = legal_only(q, mask)
        return q, jnp.max(q, axis=-1), memory

    return parts._replace(network=inner._replace(apply=apply, both=apply))


def _loss(network: networks.ActorCritic) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Function (params, batch, unused) -> sums over rows of the loss (the paper's equation 14) and of its metrics."""

    def loss(params: Params, batch: Batch, _: jax.Array) -> tuple[jax.Array, Metrics]:
        if batch.begins is None:
            q, _, _ = network.apply(params, (), batch.inputs)
        else:
            q, _, _ = values.along_time(network, params, batch.memory, batch.inputs, batch.begins)
        q = at_choice(q, batch.action)
        total = 0.5 * jnp.square(q - batch.target)
        if batch.weight is not None:
            total, q = total * batch.weight, q * batch.weight
        return jnp.sum(total), {"value_loss": jnp.sum(total), "q": jnp.sum(q)}

    return loss


def pqn(spec: Spec, config: PQNConfig, context: RunContext) -> Algorithm:
    """PQN for environments of `spec`. Raises ValueError where an action is more than one choice."""
    updates, first, done = context.updates, context.first, context.done
    parts = _q_parts(spec, config)
    network = parts.network
    optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_radam(eps=config.adam_eps))
    optimise = minibatch.optimiser_steps(_loss(network), network.live, optimiser, config, context, ("value_loss", "q"))

    def see(state: State, data: Rollout) -> tuple[Batch, jax.Array]:
        """(batch of one shard, its errors before the update)."""
        inputs, *others = (actor_critic.look(state.moments, o) for o in (data.observation, *data.successors))
        value, successor = values.estimates(network, state.params, data, (inputs, *others), config.chunk, state.updates)
        lambda_return = jax.vmap(
            lambda r, s, end, cut: returns.q_lambda(r, s, end, cut, gamma=config.gamma, lam=config.q_lambda),
            in_axes=1, out_axes=1,
        )  # fmt: skip
        target = lambda_return(data.reward * config.reward_scale, successor, data.terminated, data.truncated)
        weight = data.valid.astype(jnp.float32) if spec.agents is not None else None
        begins = values.begins(data) if config.network.memory else None
        return Batch(inputs, data.action, target, weight, begins, data.memory), target - value

    def learn(state: State, data: Rollout, key: Key) -> tuple[State, Metrics]:
        batch, error = context.isolated(see)(state, data)
        explained = explained_variance(error, batch.target, batch.weight, context)
        params, opt_state, metrics = optimise(state.params, state.opt_state, state.updates, batch, key)
        metrics |= {"explained_variance": explained, "epsilon": explore(state.updates)}
        after = advanced(state, params, opt_state, data, batch.weight, context)
        return after, {f"pqn/{k}": v for k, v in metrics.items()}

    def explore(at: jax.Array) -> jax.Array:
        passed = done + (1.0 - done) * (at - first) / max(updates - first, 1)
        share = jnp.clip(passed / jnp.maximum(config.exploration, 1e-8), 0.0, 1.0)
        return config.epsilon + (config.epsilon_final - config.epsilon) * share

    def policy(state: State) -> Policy:
        return Policy(state.params, state.moments, explore(state.updates))

    starting = actor_critic.starting(parts, config, optimiser)
    return Algorithm(starting, policy, network.memory, _acting(parts, config, spec.action), learn)


def _acting(parts: Parts, config: PQNConfig, action: Any) -> Act:
    """`Algorithm.act`: the choice of the greatest value, or a random one. Its extra is that value, which costs nothing
    where there is no memory."""

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, Any]:
        looked = actor_critic.look(acting.moments, observation)
        q, greatest, memory = parts.network.apply(acting.params, memory, looked)
        best = jnp.argmax(q, axis=-1).astype(jnp.int32)
        extras = {} if config.network.memory else {"value": greatest}
        if key is None:
            return best, memory, extras
        rows = q.shape[0]
        key_uniform, key_explore = prng.split(key, 2)
        explores = prng.uniform(key_explore, (rows,)) < acting.random
        uniform = off_policy.uniform_legal(key_uniform, looked[1], action.n, rows)
        return jnp.where(explores, uniform, best), memory, extras

    return act


def network(spec: Spec, config: PQNConfig) -> networks.ActorCritic:
    """Network whose `apply` takes a `Policy`: values of the choices in place of logits, and the greatest value."""
    inner = _q_parts(spec, config).network

    def apply(policy: Policy, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        return inner.apply(policy.params, memory, actor_critic.look(policy.moments, observation))

    return inner._replace(apply=apply, both=apply)
