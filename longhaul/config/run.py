"""Run: one whole experiment as plain data. `config/resolve.py` decides what it leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from longhaul.algorithms.config import AlgorithmConfig, PPOConfig
from longhaul.config.population import Population
from longhaul.driving.sim import config as sim
from longhaul.reasoning.config import Reasoning
from longhaul.runtime.mesh_shape import MeshShape
from longhaul.telemetry.health import Bounds
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.inference_server.config import ServerConfig

TOPOLOGIES = ("fused", "actors", "central")

PUBLISHED = ("as-is", "bf16")
"""Precisions in which a run publishes parameters of fp32."""

MOST = 2**31 - 1
"""Largest number that JAX counts to in int32."""


@dataclass(frozen=True)
class Named:
    """An environment of the registry."""

    env: str = "cartpole"


@dataclass(frozen=True)
class Driving:
    """Driving in logs, or in generated scenarios where `data` is empty."""

    data: tuple[str, ...] = ()  # files, folders, globs
    bank: int | None = None  # scenarios of `data` that are held at once; None: all
    bank_updates: int | None = None  # updates in the same ones
    scenarios: int = 1024  # generated ones to train in
    horizon: int | None = None  # most steps of a scenario; None: to the log's end
    objects: int = 128  # most agents of a scenario
    least: int = 1  # agents that a generated scenario must have to control, to be trained in
    simulator: sim.Config = field(default_factory=sim.Config)


@dataclass(frozen=True)
class Run:
    """One experiment. Steps are agent steps; None is chosen by `resolve`."""

    recipe: str
    environment: Named | Driving | Reasoning
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)
    topology: str = "fused"
    acting: ActorConfig = field(default_factory=ActorConfig)  # of the topologies `actors` and `central`
    central: ServerConfig = field(default_factory=ServerConfig)  # of the topology `central`
    population: Population = field(default_factory=Population)  # runs side by side; sizes and steps are of each
    total_steps: int = 1_000_000
    num_envs: int = 64  # worlds
    num_steps: int = 128  # of each world an update
    scaling: str = "none"  # rule by which minibatches and epochs that are None follow from the batch
    lr_rule: str = "none"  # how the learning rate follows from the batch
    base_batch: int | None = None  # steps of the batch that the learning rate is meant for; None: the run's own
    seed: int = 0
    devices: int | None = None  # shards of the `data` axis
    model: int = 1  # parts that parameters and optimiser are split into, a device each: those of the `model` axis
    deterministic: bool = False  # the same numbers on any number of devices that divides `shards.VIRTUAL`
    threads: int | None = None  # of the CPU; how sums are cut, and so their last bits, depends on it
    log_interval: int | None = None  # updates that a record of metrics sums up
    block: int | None = None  # updates of a compiled call: a run logs, saves and stops between calls
    save_interval_minutes: float = 10.0
    save_interval: int | None = None  # updates, instead of minutes
    keep: int = 3  # checkpoints
    keep_every: int | None = None  # updates, of each of which a checkpoint stays for good
    rollbacks: int = 3  # how often the run goes back from numbers that are not finite, and on with other random ones
    evaluation_episodes: int | None = None
    health: Bounds = field(default_factory=Bounds)

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(self.devices, self.model)

    @property
    def many(self) -> bool:
        """True for a population of runs."""
        return self.population.many

    @property
    def all_devices(self) -> int:
        """Devices of a resolved run, over both axes."""
        assert self.devices is not None
        return self.devices * self.model


class Origin(NamedTuple):
    """From where a run counts with the sizes that it has now: the end of what was done with others."""

    updates: int = 0
    agent_steps: int = 0
    env_steps: int = 0
    swaps: int = 0  # chunks of its data before


BEGINNING = Origin()
