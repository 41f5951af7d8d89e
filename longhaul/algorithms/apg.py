"""Analytic policy gradient: the gradient of the return itself, through policy, environment and rewards.

It works for environments that JAX can differentiate: the collector (`rollout.pathwise`) computes the gradient of the
discounted rewards of a rollout, and the learner follows it. The horizon is the rollout's length, as in Brax's APG
(Freeman et al. 2021, arXiv 2106.13281); the gradient is cut at an episode's end, because the next episode does not
depend on earlier actions. Actions are sampled by the reparameterisation of the policy's Gaussian (Kingma and Welling
2014), so that the gradient is that of the expectation.

Events without a gradient, a collision for example, have no effect: other rewards must account for them. The network is
that of PPO, whose critic learns nothing here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from longhaul.algorithms import actor_critic
from longhaul.algorithms.actor_critic import Policy, State
from longhaul.algorithms.config import APGConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.spaces import Box
from longhaul.types import Algorithm, Key, Metrics, Pathwise, Spec


def apg(spec: Spec, config: APGConfig, context: RunContext) -> Algorithm:
    """Analytic policy gradient for environments of `spec`, whose actions must be a Box: else ValueError.

    `learn` takes the data of `rollout.pathwise`.
    """
    if not isinstance(spec.action, Box):
        raise ValueError(f"APG learns a vector, and this environment takes {spec.action}; --actions continuous, say")
    parts = actor_critic.parts(spec, config)
    optimiser = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.scale_by_adam(eps=config.adam_eps))
    rate = actor_critic.annealing(context)(config.lr, 0.0 if config.anneal else config.lr)

    def learn(state: State, data: Pathwise, key: Key) -> tuple[State, Metrics]:
        upwards, metrics = context.mean((data.gradient.params, data.metrics))
        directions, opt_state = optimiser.update(jax.tree.map(jnp.negative, upwards), state.opt_state)
        lr = jnp.maximum(rate(state.updates), 0.0)
        params = optax.apply_updates(state.params, jax.tree.map(lambda x: -lr * x, directions))
        metrics |= {"grad_norm": optax.tree.norm(upwards), "lr": lr}
        return State(params, opt_state, state.moments, state.updates + 1), {f"apg/{k}": v for k, v in metrics.items()}

    return Algorithm(
        actor_critic.starting(parts, config, optimiser), lambda state: Policy(state.params, state.moments),
        parts.network.memory, actor_critic.acting(parts, config, extras=False), learn,
    )  # fmt: skip
