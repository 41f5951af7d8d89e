"""TD3 (Fujimoto et al. 2018, arXiv 1802.09477): a deterministic actor, twin critics, smoothed targets, a rarer actor.

Where we differ: actor and critics have one gradient, at the same parameters, so that shards meet once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from longhaul import prng, replay
from longhaul.algorithms import off_policy
from longhaul.algorithms.actor_critic import Apart
from longhaul.algorithms.off_policy import Parts, Policy, Sight, State
from longhaul.networks import actor_critic
from longhaul.replay import Sizes, Transitions
from longhaul.spaces import Box
from longhaul.types import Algorithm, Key, Params, PyTree, Spec


@dataclass(frozen=True)
class Config:
    """TD3's hyperparameters. Steps are agent steps; noise is of actions within -1 to 1."""

    lr: float = 1e-3
    anneal: bool = False  # the learning rate falls to 0 over the run, linearly
    adam_eps: float = 1e-8
    max_grad_norm: float | None = None  # of the actor's and the critics' gradients, each; None: they are not cut
    gamma: float = 0.99
    tau: float = 0.005  # how far targets follow, each time the actor steps
    n_step: int = 1  # rewards that a target sums before it trusts a critic
    noise: float = 0.1  # deviation of what is added to actions
    target_noise: float = 0.2  # and to the target actor's, for critics that are smooth in actions
    noise_clip: float = 0.5  # at most
    actor_interval: int = 2  # steps of the optimiser, of which the actor and the targets join one
    batch_size: int = 256  # of a step of the optimiser, over all devices
    gradient_steps: int = 2  # of the optimiser, an update
    learning_starts: int = 1000  # steps in the replay before learning; until then actions are drawn evenly
    replay_size: int = 1_000_000  # steps that the replay holds, over all devices
    replay_precision: str = "fp32"  # how float observations are kept: off_policy.STORES
    priority_exponent: float | None = None  # of the error, for the chance of a step to be sampled; None: all alike
    importance_exponent: float = 0.4  # of the weights that make up for it; rises to 1 over the run
    reward_scale: float = 1.0
    torso: str = "mlp"
    hidden_dim: int = 256
    num_layers: int = 2
    activation: str = "relu"  # of mlp and deepset
    init: str = "lecun"  # of mlp, deepset and heads
    precision: str = "fp32"  # of the torso
    remat: str = "none"  # what of the torso is computed again for the gradient: precision.REMATS


def check(config: Config, *, shards: int, columns: int, steps: int) -> None:
    """Raises ValueError, naming value, bound and remedy, where the sizes can't work."""
    off_policy.check(config, shards=shards, columns=columns, steps=steps)
    for name in ("noise", "target_noise", "noise_clip"):
        if not getattr(config, name) >= 0.0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0")
    if not 1 <= config.actor_interval <= config.gradient_steps:
        raise ValueError(
            f"actor_interval is {config.actor_interval}; it must lie in 1 to gradient_steps, {config.gradient_steps}"
        )


def _networks(spec: Spec, config: Config) -> tuple[actor_critic.Tower, actor_critic.Tower, Sight, Box]:
    """(actor, one critic, sight, the space of actions)."""
    if not isinstance(spec.action, Box):
        raise ValueError(f"TD3 learns a vector, and this environment takes {spec.action}")
    sight = off_policy.sight(spec)
    action = jax.ShapeDtypeStruct((len(spec.action.low),), jnp.float32)
    actor = off_policy.tower(config, sight.shape, action.shape[0], 0.01)
    return actor, off_policy.tower(config, (sight.shape, action), 1), sight, spec.action


def td3(
    spec: Spec,
    config: Config,
    *,
    updates: int,
    mean: Callable[[PyTree], PyTree],
    apart: Apart = lambda function: function,
    sizes: Sizes | None = None,
) -> Algorithm:
    """TD3 for environments of `spec`, in a run of `updates` updates; `mean` averages over the shards.

    Without `sizes` it acts and does not learn.
    """
    actor, critic, sight, box = _networks(spec, config)

    def init(key: Key) -> dict[str, Params]:
        first, *rest = jax.random.split(key, 3)
        return {"actor": actor.init(first), "critics": tuple(map(critic.init, rest))}

    def loss(params: dict[str, Params], target: dict[str, Params], batch: Transitions, noise: jax.Array) -> Any:
        seen, following = sight.look(batch.observation)[0], sight.look(batch.successor)[0]
        action = jnp.tanh(actor.apply(target["actor"], following))
        moved = jnp.clip(config.target_noise * noise, -config.noise_clip, config.noise_clip)
        action = jnp.clip(action + moved, -1.0, 1.0)
        ahead = jnp.min(off_policy.pair(critic, target["critics"], following, action), axis=0)
        reward, discount = replay.discounted(batch, config.gamma)
        goal = jax.lax.stop_gradient(config.reward_scale * reward + discount * ahead)
        q = off_policy.pair(critic, params["critics"], seen, batch.action)
        error = q - goal[None]
        frozen = jax.lax.stop_gradient(params["critics"][:1])
        worth = off_policy.pair(critic, frozen, seen, jnp.tanh(actor.apply(params["actor"], seen)))[0]
        judged = 0.5 * jnp.sum(jnp.square(error), axis=0)
        told = {"value_loss": judged, "policy_loss": -worth, "q": jnp.mean(q, axis=0)}
        return judged - worth, told, jnp.mean(jnp.abs(error), axis=0)

    def act(acting: Policy, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, PyTree]:
        chosen = jnp.tanh(actor.apply(acting.params, sight.look(observation)[0]))
        if key is not None:
            key_noise, key_even, key_which = prng.split(key, 3)
            drawn = 2.0 * prng.uniform(key_even, chosen.shape) - 1.0
            noisy = jnp.clip(chosen + config.noise * prng.normal(key_noise, chosen.shape), -1.0, 1.0)
            even = prng.uniform(key_which, chosen.shape[:1]) < acting.random
            chosen = jnp.where(even[:, None], drawn, noisy)
        return off_policy.outward(box, chosen), memory, ()

    kept = jax.ShapeDtypeStruct((len(box.low),), jnp.float32)
    parts = Parts(
        "td3", init, ("actor", "critics"), loss, lambda action: off_policy.inward(box, action), kept, "actor",
        lambda done: jnp.float32(0.0), ("actor",), config.actor_interval,
        lambda key, rows: prng.normal(key, (rows, len(box.low))),
    )  # fmt: skip
    return off_policy.algorithm(spec, config, parts, act, updates=updates, mean=mean, apart=apart, sizes=sizes)


def critic(spec: Spec, config: Config) -> Callable[[State, PyTree], jax.Array]:
    """(state, observation [B, ...]) -> the lesser of the critics' values of what the actor does, float32 [B]."""
    actor, judge, sight, _ = _networks(spec, config)

    def value(state: State, observation: PyTree) -> jax.Array:
        seen = sight.look(observation)[0]
        action = jnp.tanh(actor.apply(state.params["actor"], seen))
        return jnp.min(off_policy.pair(judge, state.params["critics"], seen, action), axis=0)

    return value


def network(spec: Spec, config: Config) -> actor_critic.ActorCritic:
    """The actor, which `apply` takes a `Policy` for. What it believes in only its critics tell: 0 here."""
    actor, _, sight, _ = _networks(spec, config)

    def apply(policy: Policy, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        parameters = actor.apply(policy.params, sight.look(observation)[0])
        return parameters, jnp.zeros(parameters.shape[:-1], jnp.float32), memory

    return actor_critic.ActorCritic(actor.init, apply, lambda columns: ())
