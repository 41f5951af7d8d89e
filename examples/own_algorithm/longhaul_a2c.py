"""Advantage actor-critic (A2C; Mnih et al. 2016), from Longhaul's parts: one step of the optimiser along each rollout.

Where it differs from the paper: actors are in step, advantages are estimated by GAE, and Adam takes RMSProp's place.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from longhaul import returns
from longhaul.algorithms import actor_critic, values
from longhaul.algorithms.actor_critic import Policy, advanced, explained_variance, look
from longhaul.algorithms.config import ANNEAL, ENT_COEF, GAMMA, LR, MAX_GRAD_NORM, NORMALISE_OBSERVATION, VF_COEF
from longhaul.algorithms.run_context import RunContext
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.config_fields import CHANGEABLE, nested, setting
from longhaul.types import Algorithm, Rollout, Spec

__version__ = "1.0"


@dataclass(frozen=True)
class A2C:
    """A2C's hyperparameters, which are its flags."""

    title: ClassVar[str] = "A2C"
    lr: float = LR.field(2e-3)
    anneal: bool = ANNEAL.field(True)
    gamma: float = GAMMA.field(0.99)
    trace_lambda: float = setting(0.95, "lambda of A2C's advantages", least=0, most=1, resume=CHANGEABLE)
    vf_coef: float = VF_COEF.field(0.5)
    ent_coef: float = ENT_COEF.field(0.01)
    max_grad_norm: float = MAX_GRAD_NORM.field(0.5)
    normalise_observation: bool = NORMALISE_OBSERVATION.field(False)
    network: NetworkConfig = nested(NetworkConfig())

    def make(self, spec: Spec, context: RunContext) -> Algorithm:
        return a2c(spec, self, context)


def a2c(spec: Spec, config: A2C, context: RunContext) -> Algorithm:
    parts = actor_critic.parts(spec, config)
    network, policy = parts.network, parts.policy
    rate = actor_critic.annealing(context)(config.lr, 0.0 if config.anneal else config.lr)
    optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=1e-5))

    def estimate(params, data: Rollout, visible, others, updates):
        """Advantages and targets of the value, float32 [T, B]; a truncated step bootstraps from its own successor."""
        value, successor = values.estimates(network, params, data, (visible, *others), None, updates)
        gae = jax.vmap(functools.partial(returns.gae, gamma=config.gamma, lam=config.trace_lambda), 1, 1)
        advantage = gae(data.reward, value, successor, data.terminated, data.truncated)
        return advantage, advantage + value

    def loss(params, data: Rollout, visible, mask, advantage, target, weight):
        if config.network.memory:
            start, begins = data.memory, values.begins(data)
            parameters, value, _ = values.along_time(network, params, start, visible, begins)
        else:
            parameters, value, _ = network.both(params, (), visible)
        found = {
            "policy_loss": -policy.log_prob(parameters, mask, data.extras["raw"]) * advantage,
            "value_loss": 0.5 * jnp.square(value - target),
            "entropy": policy.entropy(parameters, mask),
        }
        found = {name: jnp.sum(weight * value) for name, value in found.items()}
        total = found["policy_loss"] + config.vf_coef * found["value_loss"] - config.ent_coef * found["entropy"]
        return total, found

    def learn(state, data: Rollout, key):
        visible, mask = look(state.moments, data.observation)
        others = [look(state.moments, o)[0] for o in data.successors]
        advantage, target = estimate(state.params, data, visible, others, state.updates)
        valid = data.valid.astype(jnp.float32)
        weight = valid / jnp.maximum(context.mean(jnp.sum(valid)), 1.0)  # steps without an agent count nowhere
        both = jax.grad(loss, has_aux=True)(state.params, data, visible, mask, advantage, target, weight)
        grads, metrics = context.mean(both)  # over the shards, which meet here
        directions, opt_state = optimiser.update(grads, state.opt_state)
        lr = jnp.maximum(rate(state.updates), 0.0)
        params = jax.tree.map(lambda p, d: p - lr * d, state.params, directions)
        metrics["explained_variance"] = explained_variance(advantage, target, valid, context)
        after = advanced(state, params, opt_state, data, valid, context)
        return after, {f"a2c/{name}": value for name, value in (metrics | {"lr": lr}).items()}

    return Algorithm(
        actor_critic.starting(parts, config, optimiser), lambda state: Policy(state.params, state.moments),
        network.memory, actor_critic.acting(parts, config), learn,
    )  # fmt: skip
