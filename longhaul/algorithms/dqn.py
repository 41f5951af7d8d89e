"""DQN (Mnih et al. 2015) with double targets (van Hasselt et al. 2016, arXiv 1509.06461), duelling values (Wang et al.
2016, arXiv 1511.06581), returns of several steps and priorities (Hessel et al. 2018, arXiv 1710.02298).

Where we differ: targets follow by a moving average at each step of the optimiser, where the papers copy them at
intervals; the loss is Huber's, because the papers clip the error's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from longhaul import prng, replay
from longhaul.algorithms import off_policy
from longhaul.algorithms.config import DQNConfig
from longhaul.algorithms.off_policy import Parts, Policy, Preprocessor
from longhaul.algorithms.run_context import RunContext
from longhaul.distributions import at_choice, legal_only
from longhaul.networks import actor_critic
from longhaul.replay import Transitions
from longhaul.spaces import Discrete
from longhaul.types import Algorithm, Key, Params, PyTree, Spec

Values = Callable[[Params, PyTree, jax.Array | None], jax.Array]
"""(params, input, mask of legal choices) -> value of each choice, float32 [..., n]; the least float if not legal."""


def _values(spec: Spec, config: DQNConfig) -> tuple[actor_critic.Tower, Preprocessor, Values]:
    if not isinstance(spec.action, Discrete):
        raise ValueError(
            f"DQN learns one choice, and this environment takes {spec.action}; choose --algorithm ppo or sac"
        )
    preprocessor = off_policy.preprocessor(spec)
    n = spec.action.n
    tower = off_policy.tower(config, preprocessor.shape, n + config.duelling)

    def values(params: Params, inputs: PyTree, mask: jax.Array | None) -> jax.Array:
        q = tower.apply(params, inputs)
        if config.duelling:
            value, advantage = q[..., :1], q[..., 1:]
            q = value + advantage - jnp.mean(advantage, axis=-1, keepdims=True)
        return legal_only(q, mask)

    return tower, preprocessor, values


def dqn(spec: Spec, config: DQNConfig, context: RunContext) -> Algorithm:
    """DQN for environments of `spec`; without `context.sizes` it acts and cannot learn.

    Raises ValueError where an action is more than one choice.
    """
    tower, preprocessor, values = _values(spec, config)

    def loss(params: dict[str, Params], target: dict[str, Params], batch: Transitions, noise: PyTree) -> Any:
        """Huber(Q(s, a) - r - gamma Q'(s', argmax Q(s', .))); without `double` the argmax is that of Q'."""
        inputs, mask = preprocessor.look(batch.observation)
        next_inputs, mask_next = preprocessor.look(batch.successor)
        next_q = values(target["q"], next_inputs, mask_next)
        selector = values(params["q"], next_inputs, mask_next) if config.double else next_q
        next_value = at_choice(next_q, jnp.argmax(selector, axis=-1))
        reward, discount = replay.discounted(batch, config.gamma)
        q_target = jax.lax.stop_gradient(config.reward_scale * reward + discount * next_value)
        q = at_choice(values(params["q"], inputs, mask), batch.action)
        row_loss = optax.huber_loss(q, q_target)
        return row_loss, {"value_loss": row_loss, "q": q}, q - q_target

    def explore(done: jax.Array) -> jax.Array:
        passed = jnp.minimum(done / max(config.exploration * context.updates, 1.0), 1.0)
        return config.epsilon + (config.epsilon_final - config.epsilon) * passed

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, PyTree]:
        inputs, mask = preprocessor.look(observation)
        q = values(acting.params, inputs, mask)
        best = jnp.argmax(q, axis=-1).astype(jnp.int32)
        if key is None:
            return best, memory, ()
        rows, n = q.shape
        key_uniform, key_explore = prng.split(key, 2)
        explores = prng.uniform(key_explore, (rows,)) < acting.random
        return jnp.where(explores, off_policy.uniform_legal(key_uniform, mask, n, rows), best), memory, ()

    assert isinstance(spec.action, Discrete)
    parts = Parts(
        init=lambda key: {"q": tower.init(key)}, targets=("q",), loss=loss,
        store=lambda action: action, stored=off_policy.choice_type(spec.action), actor="q", explore=explore,
    )  # fmt: skip
    return off_policy.algorithm(spec, config, parts, act, context)


def network(spec: Spec, config: DQNConfig) -> actor_critic.ActorCritic:
    """Network whose `apply` takes a `Policy`: values of the choices in place of logits, and the greatest value."""
    tower, preprocessor, values = _values(spec, config)

    def apply(policy: Policy, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        q = values(policy.params, *preprocessor.look(observation))
        return q, jnp.max(q, axis=-1), memory

    return actor_critic.ActorCritic(tower.init, apply, lambda columns: (), apply)
