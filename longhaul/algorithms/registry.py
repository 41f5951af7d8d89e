"""Registry of the algorithms: from a config to its functions.

A new algorithm is a module in `algorithms/`, a frozen dataclass in `algorithms/config.py` and a row here; one of the
user's own is all of this itself (external.py). The rest of the package uses `Learner` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from longhaul.algorithms import actor_critic, apg, bc, dqn, external, grpo, impala, off_policy, ppo, pqn, sac, td3
from longhaul.algorithms.config import (
    AlgorithmConfig,
    APGConfig,
    BCConfig,
    OffPolicy,
    OnPolicy,
    PQNConfig,
    SACConfig,
)
from longhaul.algorithms.run_context import RunContext
from longhaul.networks import actor_critic as networks
from longhaul.replay import Sizes
from longhaul.runtime import config_fields
from longhaul.types import Algorithm, PyTree, Spec


class Learner(NamedTuple):
    """Functions of an algorithm."""

    make: Callable[[Spec, Any, RunContext], Algorithm]
    check: Callable[..., None]  # (config, *, columns, steps), off-policy shards, too; raises FieldError
    network: Callable[[Spec, Any], networks.ActorCritic]  # its `apply` takes a policy for parameters


def _check_nothing(config: APGConfig, *, columns: int, steps: int) -> None:
    """Every size is possible."""


LEARNERS: dict[str, Learner] = {
    "ppo": Learner(ppo.ppo, actor_critic.check, actor_critic.network),
    "impala": Learner(impala.impala, actor_critic.check, actor_critic.network),
    "pqn": Learner(pqn.pqn, actor_critic.check, pqn.network),
    "bc": Learner(bc.bc, bc.check, actor_critic.network),
    "apg": Learner(apg.apg, _check_nothing, actor_critic.network),
    "dqn": Learner(dqn.dqn, off_policy.check, dqn.network),
    "sac": Learner(sac.sac, sac.check, sac.network),
    "td3": Learner(td3.td3, td3.check, td3.network),
    "grpo": Learner(grpo.grpo, grpo.check, grpo.network),
}


def _own(config: AlgorithmConfig) -> Learner:
    """Functions of an algorithm of the user's own."""

    def make(spec: Spec, config: Any, context: RunContext) -> Algorithm:
        return external.make(config, spec, context)

    def unknown(spec: Spec, config: Any) -> networks.ActorCritic:
        raise ValueError(f"{external.name_of(config)} is an algorithm of your own, whose network is not known here")

    check = getattr(config, "check", lambda *, columns, steps: None)
    return Learner(make, lambda config, **sizes: check(**sizes), unknown)


def learner(config: AlgorithmConfig) -> Learner:
    """Functions of a config's algorithm."""
    return _own(config) if external.is_own(type(config)) else LEARNERS[config.name]


def on_policy(config: AlgorithmConfig) -> OnPolicy:
    """Config of an algorithm with a policy and without a replay; ValueError for others."""
    if external.is_own(type(config)):
        raise ValueError(
            f"{external.name_of(config)} is of your own, and this is for PPO, IMPALA; choose a recipe of one"
        )
    if isinstance(config, OffPolicy):
        raise ValueError(
            f"{config.title} learns from a replay, and this is for algorithms without: PPO, IMPALA; choose a recipe "
            "of one"
        )
    if isinstance(config, PQNConfig):
        raise ValueError(
            "PQN has values and no policy, and this is for algorithms with one: PPO, IMPALA; choose a recipe of one"
        )
    if not isinstance(config, OnPolicy):
        raise ValueError(
            f"{config.title} does not learn from rewards alone, and this is for PPO, IMPALA; choose a recipe of one"
        )
    return config


def guidance(config: AlgorithmConfig) -> float | None:
    """Share of the worlds that an expert drives; None for algorithms without an expert."""
    if isinstance(config, BCConfig) and not config.recorded:
        return config.expert_share
    return config.expert_share if isinstance(config, SACConfig) and config.imitation else None


def recorded(config: AlgorithmConfig) -> tuple[str, ...]:
    """Files of recorded steps that the algorithm learns from instead of an environment."""
    return config.recorded if isinstance(config, BCConfig) else ()


def make(spec: Spec, config: AlgorithmConfig, context: RunContext) -> Algorithm:
    """Algorithm of a config for environments of `spec`."""
    return learner(config).make(spec, config, context)


def check(config: AlgorithmConfig, sizes: Sizes) -> None:
    """Raises FieldError for impossible settings or sizes."""
    config_fields.check(config)
    shards = {"shards": sizes.shards} if isinstance(config, OffPolicy) else {}
    learner(config).check(config, columns=sizes.columns, steps=sizes.steps, **shards)


def network(spec: Spec, config: AlgorithmConfig) -> networks.ActorCritic:
    """Network whose `apply` takes a policy for parameters: policy parameters and value."""
    return learner(config).network(spec, config)


def critic(spec: Spec, config: AlgorithmConfig) -> Callable[[Any, PyTree, PyTree], jax.Array]:
    """Function (policy, memory, observation [B, ...]) -> the learner's value, float32 [B]."""
    actor = network(spec, config)
    return lambda policy, memory, observation: actor.apply(policy, memory, observation)[1]
