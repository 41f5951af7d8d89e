"""Configuration of the actor-learner topology and its validation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longhaul.topologies.staleness import Rule

KINDS = ("process", "thread", "ray")

MOST = 1024
"""Largest number of actors in a run."""

LIVE = "live.json"
"""File of a run's folder with the actors' current state; removed when the run ends."""


@dataclass(frozen=True)
class ActorConfig:
    """Options of the topology `actors`; `decided` resolves None."""

    actors: int | None = None  # each steps an equal share of the worlds
    actor_kind: str = "process"
    staleness: int | None = 0  # updates that the learnt data may lag behind; None: no bound
    pin: bool = False  # act with exactly the oldest weights allowed, so a run is repeatable
    ray_address: str = "auto"  # of the cluster, where actor_kind is "ray"


def decided(acting: ActorConfig, *, envs: int, devices: int, cores: int) -> ActorConfig:
    """Options with the number of actors resolved for `envs` worlds, the learner's devices and this machine's cores.

    ValueError: names the field, its value, the bound and the remedy.
    """
    if acting.actor_kind not in KINDS:
        raise ValueError(f"actor_kind is {acting.actor_kind!r}; it must be one of {', '.join(KINDS)}")
    if acting.staleness is not None and acting.staleness < 0:
        raise ValueError(f"staleness is {acting.staleness}; it must be at least 0, or none")
    if acting.pin and acting.staleness is None:
        raise ValueError("pin is on and --staleness is none; exact versions need a bound: give a --staleness")
    actors = acting.actors
    if actors is None:
        fit = [n for n in range(devices, max(cores, devices) + 1, devices) if envs % n == 0]
        return dataclasses.replace(acting, actors=fit[-1])
    if not 1 <= actors <= MOST:
        raise ValueError(f"actors is {actors}; it must lie in 1 to {MOST}")
    if envs % actors:
        raise ValueError(f"actors is {actors}, which can't share {envs} worlds evenly; choose a divisor of {envs}")
    if actors % devices:
        raise ValueError(
            f"actors is {actors}, and the learner's {devices} devices can't share their rollouts evenly; choose a "
            f"multiple of {devices}, or another --mesh"
        )
    return acting


def rule(acting: ActorConfig, updates: int, oldest: int = 0) -> Rule:
    """Staleness rule of a resolved run from update `oldest` to `updates`."""
    from longhaul.topologies.staleness import Rule

    assert acting.actors is not None
    return Rule(acting.actors, acting.staleness, acting.pin, updates, oldest)
