"""Which algorithm a config is of: the one place that knows them all.

Another algorithm is a module in `algorithms/` with a frozen `Config`, and a row and a name here. All that the rest of
the package asks of it stands in `Learner`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from longhaul import networks
from longhaul.algorithms import actor_critic, impala, ppo
from longhaul.types import Algorithm, PyTree, Spec

Config = ppo.Config | impala.Config
"""Of any algorithm. A run.json that does not say which is of the first."""


class Learner(NamedTuple):
    """An algorithm's module, as functions of its config."""

    name: str  # what run.json says, and what its metrics begin with: "ppo/entropy"
    title: str  # what a user reads
    make: Callable[..., Algorithm]  # (spec, config, *, updates, mean, apart, first, done, split)
    check: Callable[..., None]  # (config, *, columns, steps); raises ValueError
    network: Callable[[Spec, Any], networks.ActorCritic]  # what a policy does and believes in; it takes a policy


LEARNERS: dict[type, Learner] = {
    ppo.Config: Learner("ppo", "PPO", ppo.ppo, ppo.check, actor_critic.network),
    impala.Config: Learner("impala", "IMPALA, or APPO", impala.impala, impala.check, actor_critic.network),
}


def of(config: Config) -> Learner:
    """The algorithm of a config."""
    return LEARNERS[type(config)]


def make(
    spec: Spec,
    config: Config,
    *,
    updates: int,
    mean: Callable[[PyTree], PyTree],
    apart: actor_critic.Apart = lambda function: function,
    first: int = 0,
    done: float = 0.0,
    split: bool = False,
) -> Algorithm:
    """The algorithm of a config for environments of `spec`, annealed over `updates` updates; `mean` averages over the
    shards.

    Between two means, what is computed of a shard's numbers goes through `apart` (shards.py).

    A run that goes on from update `first` with batches of another size has the share `done` of it behind it there.
    Say `split` where parameters are split over devices: then the optimiser takes them one by one.
    """
    return of(config).make(
        spec, config, updates=updates, mean=mean, apart=apart, first=first, done=done, split=split
    )


def check(config: Config, *, columns: int, steps: int) -> None:
    """Raises ValueError, naming value, bound and remedy, where the sizes of one shard can't work."""
    of(config).check(config, columns=columns, steps=steps)


def network(spec: Spec, config: Config) -> networks.ActorCritic:
    """The network of a policy, which `apply` takes for parameters: what it would do, and what it believes in."""
    return of(config).network(spec, config)


def critic(spec: Spec, config: Config) -> Callable[[Any, PyTree, PyTree], jax.Array]:
    """(policy, memory, observation [B, ...]) -> the value that the learner believes in, float32 [B]."""
    made = network(spec, config)
    return lambda policy, memory, observation: made.apply(policy, memory, observation)[1]
