"""Which algorithm a config is of: the one place that knows them all.

Another algorithm is a module in `algorithms/` with a frozen `Config`, and a row and a name here. All that the rest of
the package asks of it stands in `Learner`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from longhaul.algorithms import actor_critic, apg, bc, dqn, grpo, impala, ppo, pqn, sac, td3
from longhaul.algorithms.config import (
    NAMES,
    AlgorithmConfig,
    APGConfig,
    BCConfig,
    DQNConfig,
    GRPOConfig,
    IMPALAConfig,
    OffPolicy,
    OnPolicy,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from longhaul.algorithms.context import Context
from longhaul.networks import actor_critic as networks
from longhaul.replay import Sizes
from longhaul.types import Algorithm, PyTree, Spec


class Learner(NamedTuple):
    """An algorithm's module, as functions of its config."""

    name: str  # what run.json says, and what its metrics begin with: "ppo/entropy"
    title: str  # what a user reads
    make: Callable[[Spec, Any, Context], Algorithm]
    check: Callable[..., None]  # (config, *, columns, steps), off-policy shards, too; raises ValueError
    network: Callable[[Spec, Any], networks.ActorCritic]  # what a policy does and believes in; it takes a policy


LEARNERS: dict[type, Learner] = {
    PPOConfig: Learner(NAMES[PPOConfig], "PPO", ppo.ppo, ppo.check, actor_critic.network),
    IMPALAConfig: Learner(NAMES[IMPALAConfig], "IMPALA, or APPO", impala.impala, impala.check, actor_critic.network),
    PQNConfig: Learner(NAMES[PQNConfig], "PQN", pqn.pqn, pqn.check, pqn.network),
    BCConfig: Learner(NAMES[BCConfig], "behaviour cloning", bc.bc, bc.check, actor_critic.network),
    APGConfig: Learner(NAMES[APGConfig], "analytic policy gradient", apg.apg, apg.check, actor_critic.network),
    DQNConfig: Learner(NAMES[DQNConfig], "DQN", dqn.dqn, dqn.check, dqn.network),
    SACConfig: Learner(NAMES[SACConfig], "SAC", sac.sac, sac.check, sac.network),
    TD3Config: Learner(NAMES[TD3Config], "TD3", td3.td3, td3.check, td3.network),
    GRPOConfig: Learner(NAMES[GRPOConfig], "GRPO, or one of its kin", grpo.grpo, grpo.check, grpo.network),
}


def of(config: AlgorithmConfig) -> Learner:
    """The algorithm of a config."""
    return LEARNERS[type(config)]


def on_policy(config: AlgorithmConfig) -> OnPolicy:
    """`config`, where it is of an algorithm with a policy, and without a replay; else ValueError."""
    if isinstance(config, OffPolicy):
        raise ValueError(f"{of(config).title} learns from a replay, and this is for algorithms without: PPO, IMPALA")
    if isinstance(config, PQNConfig):
        raise ValueError("PQN has values and no policy, and this is for algorithms with one: PPO, IMPALA")
    if not isinstance(config, OnPolicy):
        raise ValueError(f"{of(config).title} does not learn from rewards alone; this is for PPO, IMPALA")
    return config


def guidance(config: AlgorithmConfig) -> float | None:
    """The share of the worlds that an expert drives, where the algorithm asks one; None where it asks nobody."""
    if isinstance(config, BCConfig) and not config.recorded:
        return config.expert_share
    return config.expert_share if isinstance(config, SACConfig) and config.imitation else None


def pathwise(config: AlgorithmConfig) -> APGConfig | None:
    """`config`, where the algorithm learns from gradients through the environment."""
    return config if isinstance(config, APGConfig) else None


def recorded(config: AlgorithmConfig) -> tuple[str, ...]:
    """The files of what was recorded that the algorithm learns from, instead of from an environment."""
    return config.recorded if isinstance(config, BCConfig) else ()


def make(spec: Spec, config: AlgorithmConfig, context: Context) -> Algorithm:
    """The algorithm of a config for environments of `spec`."""
    return of(config).make(spec, config, context)


def check(config: AlgorithmConfig, sizes: Sizes) -> None:
    """Raises ValueError, naming value, bound and remedy, where the sizes can't work."""
    shards = {"shards": sizes.shards} if isinstance(config, OffPolicy) else {}
    of(config).check(config, columns=sizes.columns, steps=sizes.steps, **shards)


def network(spec: Spec, config: AlgorithmConfig) -> networks.ActorCritic:
    """The network of a policy, which `apply` takes for parameters: what it would do, and what it believes in."""
    return of(config).network(spec, config)


def critic(spec: Spec, config: AlgorithmConfig) -> Callable[[Any, PyTree, PyTree], jax.Array]:
    """(policy, memory, observation [B, ...]) -> the value that the learner believes in, float32 [B]."""
    made = network(spec, config)
    return lambda policy, memory, observation: made.apply(policy, memory, observation)[1]
