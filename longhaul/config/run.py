"""One whole experiment as plain data: a Run, and what JSON says of it. `run.py` decides what is open, and assembles."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longhaul.algorithms import registry as learners
from longhaul.algorithms.config import AlgorithmConfig, PPOConfig, Reasoner
from longhaul.config.population import Population
from longhaul.driving.sim import simulator
from longhaul.envs import registry, suites
from longhaul.reasoning.config import Reasoning as Reasoning
from longhaul.runtime import batch_shards
from longhaul.runtime.errors import RunError
from longhaul.runtime.mesh_shape import MeshShape
from longhaul.telemetry.health import Bounds
from longhaul.topologies.actor_learner import host_rollout
from longhaul.topologies.actor_learner.config import Acting
from longhaul.topologies.inference_server.config import Central
from longhaul.types import Environment

TOPOLOGIES = ("fused", "actors", "central")


MOST = 2**31 - 1
"""Of what JAX counts in int32."""


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
    simulator: simulator.Config = field(default_factory=simulator.Config)


@dataclass(frozen=True)
class Run:
    """One experiment. Steps are agent steps; None is chosen by `resolve`."""

    recipe: str
    environment: Named | Driving | Reasoning
    algorithm: AlgorithmConfig = field(default_factory=PPOConfig)
    topology: str = "fused"
    acting: Acting = field(default_factory=Acting)  # of the topologies `actors` and `central`
    central: Central = field(default_factory=Central)  # of the topology `central`
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
        """Whether it is a population of runs."""
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


def agents(run: Run) -> int:
    """Columns of the batch that one world makes."""
    if isinstance(run.environment, Driving):
        return run.environment.simulator.agents
    if isinstance(run.environment, Reasoning):
        assert isinstance(run.algorithm, Reasoner)
        return run.algorithm.group
    if suites.is_suite(run.environment.env):  # whose import may start JAX, before it is told of its devices
        return 1
    return named(run.environment).spec.agents or 1


def parts(run: Run, devices: int) -> int:
    """In how many the batch is computed."""
    return 1 if run.many else batch_shards.VIRTUAL if run.deterministic else devices


def named(environment: Named) -> Environment:
    """The environment of that name; RunError with the nearest names where there is none."""
    try:
        return (
            host_rollout.hosted(environment.env)
            if host_rollout.is_hosted(environment.env)
            else registry.make(environment.env)
        )
    except ValueError as error:
        raise RunError(str(error)) from error


KINDS: dict[type, str] = {Named: "Named", Driving: "Driving", Reasoning: "Reasoning"} | {
    config: learner.name for config, learner in learners.LEARNERS.items()
}
"""What JSON calls a class, where a field may have several; a value that does not say is of the field's first."""


def to_dict(value: Any) -> Any:
    """A dataclass as JSON can hold it; `kind` names the class where a field may have several."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": KINDS[type(value)], **fields} if type(value) in KINDS else fields
    return [to_dict(v) for v in value] if isinstance(value, (list, tuple)) else value


def from_dict(kind: Any, value: Any) -> Any:
    """The inverse of `to_dict`. Raises TypeError where a field is missing, unknown or of another type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if isinstance(value, dict) and "kind" in value:
            named_kind = {KINDS[o]: o for o in options if o in KINDS}.get(value["kind"])
            if named_kind is None:
                raise TypeError(f"kind {value['kind']!r} is unknown")
            return from_dict(named_kind, {k: v for k, v in value.items() if k != "kind"})
        if value is None:
            return None
        return from_dict(next(o for o in options if o is not type(None)), value)
    if (dataclasses.is_dataclass(kind), typing.get_origin(kind) is tuple) != (type(value) is dict, type(value) is list):
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = {f.name for f in dataclasses.fields(kind)}
        if set(value) != names:
            odd = sorted(set(value) ^ names)
            raise TypeError(f"fields {', '.join(odd)} do not fit")
        return typing.cast(Any, kind)(**{name: from_dict(hints[name], value[name]) for name in names})
    if typing.get_origin(kind) is tuple:
        return tuple(from_dict(typing.get_args(kind)[0], v) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
