"""Configuration of the actor-learner topology and its validation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longhaul.runtime import config_fields
from longhaul.runtime.config_fields import FREE, setting
from longhaul.runtime.errors import FieldError

if TYPE_CHECKING:
    from longhaul.topologies.staleness import Rule

DISTRIBUTED = ("actors", "central")
"""Topologies whose actors are not the learner."""

KINDS = ("process", "thread", "ray", "device")

MOST = 1024
"""Largest number of actors in a run."""

LIVE = "live.json"
"""File of a run's folder with the actors' current state; removed when the run ends."""

APIS, UPDATES = ("vllm", "sglang", "completions"), ("plugin", "folder", "none")
"""APIs of servers that sample completions, and ways in which they get new weights."""


@dataclass(frozen=True)
class ActorConfig:
    """Options of the topology `actors`; `decided` resolves None."""

    actors: int | None = setting(
        None,
        "actors, which share the worlds, in the topologies actors and central",
        least=1,
        most=MOST,
        auto=True,
        topologies=DISTRIBUTED,
    )
    actor_kind: str = setting(
        "process",
        "actors in processes of their own, in threads of the learner's, on the nodes of a Ray cluster; or the learner "
        "itself, for torch environments on its device",
        choices=KINDS,
        resume=FREE,
        topologies=DISTRIBUTED,
    )
    staleness: int | None = setting(
        0,
        "updates that the weights which acted may be behind; 0: none, as fused; none: without bound",
        least=0,
        why=", or none",
        topologies=DISTRIBUTED,
    )
    pin: bool = setting(
        False,
        "act with exactly the weights that --staleness allows, so that the run can be repeated bit for bit",
        topologies=("actors",),
    )
    ray_address: str = setting(
        "auto",
        "HOST:PORT of the cluster of --actor-kind ray; auto: RAY_ADDRESS, or one here; local: a new one",
        resume=FREE,
        topologies=DISTRIBUTED,
    )
    rollout_servers: tuple[str, ...] = setting(
        (), "servers that sample the completions, as http://HOST:PORT; none: the run samples itself", resume=FREE,
        topologies=("actors",),
    )  # fmt: skip
    rollout_api: str = setting(
        "vllm", "API of these servers: vLLM's, SGLang's, or completions with token ids, as of longhaul serve",
        choices=APIS, resume=FREE, topologies=("actors",),
    )  # fmt: skip
    rollout_updates: str = setting(
        "plugin", "way of new weights to them: longhaul's backend in vLLM, folders that they load, or none where they "
        "follow the run", choices=UPDATES, resume=FREE, topologies=("actors",),
    )  # fmt: skip
    rollout_weights: str | None = setting(
        None, "address where they take weights, tcp:HOST:PORT or shm:@NAME; with --rollout-updates folder, the folder; "
        "none: one on this machine", resume=FREE, topologies=("actors",),
    )  # fmt: skip
    rollout_requests: int = setting(
        32, "requests of an actor that a server has at once", least=1, most=4096, resume=FREE, topologies=("actors",)
    )
    rollout_timeout: float = setting(
        120.0, "seconds of a request, after which it counts as failed", above=0, resume=FREE, topologies=("actors",)
    )
    rollout_token_file: str | None = setting(
        None, "file with the token that these servers ask for", path=True, resume=FREE, topologies=("actors",)
    )
    actor_devices: tuple[int, ...] = setting(
        (), "devices of this process, by number, where actors in threads act in turn (central: the one where the "
        "policy acts); none: those that the learner leaves free, else its own", least=0, most=1023, resume=FREE,
        topologies=DISTRIBUTED,
    )  # fmt: skip


def decided(acting: ActorConfig, *, envs: int, devices: int, cores: int) -> ActorConfig:
    """Options with the number of actors resolved for `envs` worlds, the learner's devices and this machine's cores.

    FieldError: the number of actors does not fit.
    """
    config_fields.check(acting)
    if acting.pin and acting.staleness is None:
        raise FieldError("pin", "on and --staleness is none", "exact versions need a bound: give a --staleness")
    if acting.actor_devices and acting.actor_kind != "thread":
        raise FieldError(
            "actor_devices",
            f"{config_fields.plain(acting.actor_devices)}, and --actor-kind {acting.actor_kind}",
            "choose --actor-kind thread, or leave it out",
        )
    if acting.actor_kind == "device":
        if acting.staleness != 0 or acting.pin:
            name, value = ("pin", "on") if acting.pin else ("staleness", acting.staleness)
            raise FieldError(name, value, "with --actor-kind device the learner acts by itself: leave it out")
        if acting.actors not in (None, devices):
            raise FieldError("actors", acting.actors, f"with --actor-kind device a device has one: choose {devices}")
        acting = dataclasses.replace(acting, actors=devices)
    actors = acting.actors
    if actors is None:
        fit = [n for n in range(devices, max(cores, devices) + 1, devices) if envs % n == 0]
        return dataclasses.replace(acting, actors=fit[-1])
    if envs % actors:
        raise FieldError("actors", f"{actors}, which can't share {envs} worlds evenly", f"choose a divisor of {envs}")
    if actors % devices:
        raise FieldError(
            "actors",
            f"{actors}, and the learner's {devices} devices can't share their rollouts evenly",
            f"choose a multiple of {devices}, or another --mesh",
        )
    return acting


def rule(acting: ActorConfig, updates: int, oldest: int = 0) -> Rule:
    """Staleness rule of a resolved run from update `oldest` to `updates`."""
    from longhaul.topologies.staleness import Rule

    assert acting.actors is not None
    return Rule(acting.actors, acting.staleness, acting.pin, updates, oldest)
