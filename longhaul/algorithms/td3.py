"""TD3 (Fujimoto et al. 2018, arXiv 1802.09477): a deterministic actor, twin critics, smoothed targets, a rarer actor.

Where we differ: actor and critics have one gradient, at the same parameters, so that shards meet once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul import prng, replay
from longhaul.algorithms import off_policy
from longhaul.algorithms.config import TD3Config
from longhaul.algorithms.off_policy import Parts, Policy, Preprocessor, State
from longhaul.algorithms.run_context import RunContext
from longhaul.networks import actor_critic
from longhaul.replay import Transitions
from longhaul.runtime.errors import FieldError
from longhaul.spaces import Box
from longhaul.types import Algorithm, Key, Params, PyTree, Spec


def check(config: TD3Config, *, shards: int, columns: int, steps: int) -> None:
    """Raises FieldError for impossible sizes."""
    off_policy.check(config, shards=shards, columns=columns, steps=steps)
    if config.actor_interval > config.gradient_steps:
        raise FieldError(
            "actor_interval", config.actor_interval, f"it must lie in 1 to gradient_steps, {config.gradient_steps}"
        )


class _Networks(NamedTuple):
    """Networks of a config, with what they read and return."""

    actor: actor_critic.Tower
    critic: actor_critic.Tower  # one of two
    preprocessor: Preprocessor
    box: Box


def _networks(spec: Spec, config: TD3Config) -> _Networks:
    if not isinstance(spec.action, Box):
        raise ValueError(
            f"TD3 learns a vector, and this environment takes {spec.action}; choose --algorithm ppo or sac"
        )
    preprocessor = off_policy.preprocessor(spec)
    action = jax.ShapeDtypeStruct((len(spec.action.low),), jnp.float32)
    actor = off_policy.tower(config, preprocessor.shape, action.shape[0], 0.01)
    return _Networks(actor, off_policy.tower(config, (preprocessor.shape, action), 1), preprocessor, spec.action)


def td3(spec: Spec, config: TD3Config, context: RunContext) -> Algorithm:
    """TD3 for environments of `spec`; without `context.sizes` it acts and cannot learn. ValueError without a Box."""
    actor, critic, preprocessor, box = _networks(spec, config)

    def init(key: Key) -> dict[str, Params]:
        first, *rest = jax.random.split(key, 3)
        return {"actor": actor.init(first), "critics": tuple(map(critic.init, rest))}

    def loss(params: dict[str, Params], target: dict[str, Params], batch: Transitions, noise: jax.Array) -> Any:
        """1/2 sum_i (Q_i(s, a) - r - gamma min_i Q'_i(s', a'))^2 - Q_1(s, mu(s)); a' is mu'(s') plus clipped noise."""
        inputs, next_inputs = preprocessor.look(batch.observation)[0], preprocessor.look(batch.successor)[0]
        next_action = jnp.tanh(actor.apply(target["actor"], next_inputs))
        noise_clipped = jnp.clip(config.target_noise * noise, -config.noise_clip, config.noise_clip)
        next_action = jnp.clip(next_action + noise_clipped, -1.0, 1.0)
        next_q = jnp.min(off_policy.q_values(critic, target["critics"], next_inputs, next_action), axis=0)
        reward, discount = replay.discounted(batch, config.gamma)
        q_target = jax.lax.stop_gradient(config.reward_scale * reward + discount * next_q)
        q = off_policy.q_values(critic, params["critics"], inputs, batch.action)
        error = q - q_target[None]
        frozen = jax.lax.stop_gradient(params["critics"][:1])
        actor_q = off_policy.q_values(critic, frozen, inputs, jnp.tanh(actor.apply(params["actor"], inputs)))[0]
        critic_loss = 0.5 * jnp.sum(jnp.square(error), axis=0)
        metrics = {"value_loss": critic_loss, "policy_loss": -actor_q, "q": jnp.mean(q, axis=0)}
        return critic_loss - actor_q, metrics, jnp.mean(jnp.abs(error), axis=0)

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, PyTree]:
        action = jnp.tanh(actor.apply(acting.params, preprocessor.look(observation)[0]))
        if key is not None:
            key_noise, key_uniform, key_explore = prng.split(key, 3)
            uniform = 2.0 * prng.uniform(key_uniform, action.shape) - 1.0
            noisy = jnp.clip(action + config.noise * prng.normal(key_noise, action.shape), -1.0, 1.0)
            explores = prng.uniform(key_explore, action.shape[:1]) < acting.random
            action = jnp.where(explores[:, None], uniform, noisy)
        return off_policy.from_unit(box, action), memory, ()

    size = len(box.low)
    parts = Parts(
        init=init, targets=("actor", "critics"), loss=loss,
        store=lambda action: off_policy.to_unit(box, action), stored=jax.ShapeDtypeStruct((size,), jnp.float32),
        actor="actor", rare=("actor",), interval=config.actor_interval,
        noise=lambda key, rows: prng.normal(key, (rows, size)),
    )  # fmt: skip
    return off_policy.algorithm(spec, config, parts, act, context)


def critic(spec: Spec, config: TD3Config) -> Callable[[State, PyTree], jax.Array]:
    """Function (state, observation [B, ...]) -> the smaller critic's value of the actor's action, float32 [B]."""
    networks = _networks(spec, config)

    def value(state: State, observation: PyTree) -> jax.Array:
        inputs = networks.preprocessor.look(observation)[0]
        action = jnp.tanh(networks.actor.apply(state.params["actor"], inputs))
        return jnp.min(off_policy.q_values(networks.critic, state.params["critics"], inputs, action), axis=0)

    return value


def network(spec: Spec, config: TD3Config) -> actor_critic.ActorCritic:
    """Actor whose `apply` takes a `Policy`, as of `off_policy.actor_network`."""
    networks = _networks(spec, config)
    return off_policy.actor_network(networks.actor, networks.preprocessor)
