"""Run: one whole experiment as plain data, and its JSON form. `config/resolve.py` decides what it leaves open."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, NamedTuple

from longhaul.algorithms import external
from longhaul.algorithms.config import ALGORITHMS, LR_RULES, SCALINGS, AlgorithmConfig, PPOConfig
from longhaul.config.population import Population
from longhaul.driving.sim import config as sim
from longhaul.driving.sim.config import HELD_OUT
from longhaul.reasoning.config import Reasoning
from longhaul.runtime.config_fields import CHANGEABLE, FREE, nested, setting
from longhaul.runtime.devices import MeshShape
from longhaul.runtime.errors import ModuleError
from longhaul.runtime.user_modules import is_named
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

    env: str = setting("cartpole", "the environment; longhaul envs lists them")


@dataclass(frozen=True)
class Driving:
    """Driving in logs, or in generated scenarios where `data` is empty."""

    data: tuple[str, ...] = setting(
        (), "driving logs to train in: files, folders, globs; without: generated scenarios", path=True
    )
    skip_bad_logs: bool = setting(
        False, "logs of --data that can't be used are named and left out; else the first is an error"
    )
    bank: int | None = setting(
        None, "scenarios of the shards in --data that are held at once, others after --bank-updates; none: all", least=1
    )
    bank_updates: int | None = setting(None, "updates in the same scenarios of the bank", least=1, auto=True)
    bank_by_host: bool = setting(False, "each process reads and holds scenarios of its own, --bank of them")
    scenarios: int = setting(
        1024, "generated scenarios to train in", least=1, most=HELD_OUT, why=" (those after are for evaluation)"
    )
    horizon: int | None = setting(None, "most steps of a scenario; none: to the log's end", least=2)
    objects: int = setting(128, "most agents of a scenario, the nearest to the ego's path")
    least: int = setting(1, "agents that a generated scenario must have to control, to be trained in", least=1)
    simulator: sim.Config = nested(sim.Config())


SAVING = {"resume": FREE, "group": "saving"}
"""Description that settings of saving share."""


@dataclass(frozen=True)
class Run:
    """One experiment. Steps are agent steps; None is chosen by `resolve`."""

    recipe: str
    environment: Named | Driving | Reasoning
    algorithm: AlgorithmConfig = nested(PPOConfig())
    topology: str = setting("fused", "layout of acting and learning", choices=TOPOLOGIES)
    acting: ActorConfig = nested(ActorConfig())
    central: ServerConfig = nested(ServerConfig())
    population: Population = nested(Population())  # sizes and steps are of each member
    total_steps: int = setting(1_000_000, "agent steps to train for", least=1, resume=CHANGEABLE)
    num_envs: int = setting(64, "worlds that are stepped at once", least=1, resume=CHANGEABLE)
    num_steps: int = setting(128, "steps of each world between two updates", least=1, resume=CHANGEABLE)
    scaling: str = setting(
        "none",
        "minibatches and epochs that are not given: 4 and 4, or by the batch where it is above 32,768 steps",
        choices=SCALINGS,
        resume=CHANGEABLE,
    )
    lr_rule: str = setting(
        "none",
        "rule by which lr follows the batch, relative to --base-batch: none, linear, or square root",
        choices=LR_RULES,
        resume=CHANGEABLE,
    )
    base_batch: int | None = setting(
        None, "agent steps of the update that lr is meant for", least=1, auto=True, resume=CHANGEABLE
    )
    init_from: str | None = setting(
        None, "parameters to begin from: RUN, RUN@STEP (a checkpoint), hf:USER/NAME, a file .npz, .safetensors or .pkl"
    )
    init_parts: tuple[str, ...] = setting(
        ("parameters", "normaliser"), "what is taken from there", choices=("parameters", "normaliser", "optimiser")
    )
    seed: int = setting(0, "source of all random numbers", least=0, most=MOST)
    devices: int | None = setting(
        None,
        "devices: data=N of them share the worlds; with model=M each of these is M, which share the parameters",
        least=1,
        auto=True,
        flag="mesh",
        resume=CHANGEABLE,
    )
    model: int = 1  # parts that parameters and optimiser are split into, a device each; the second part of --mesh
    fsdp: bool = setting(
        False,
        "parameters, gradients and optimiser are split over the devices of data=N (fully sharded data parallelism)",
        resume=CHANGEABLE,
    )
    deterministic: bool = setting(False, "the same parameters on 1, 2, 4 and 8 devices, bit for bit")
    threads: int | None = setting(
        None, "CPU threads in all; the last bits of sums depend on it", least=1, auto=True, resume=CHANGEABLE
    )
    log_interval: int | None = setting(None, "updates of a record of metrics", least=1, auto=True, **SAVING)
    block: int | None = setting(
        None, "updates of a compiled call; between calls a run logs, saves and stops", least=1, auto=True, **SAVING
    )
    save_interval_minutes: float = setting(10.0, "minutes between two checkpoints", above=0, **SAVING)
    save_interval: int | None = setting(None, "updates between two checkpoints, instead of minutes", least=1, **SAVING)
    keep: int = setting(3, "newest checkpoints that stay", least=1, **SAVING)
    keep_every: int | None = setting(
        None, "updates between checkpoints that stay for good; none: only the newest stay", least=1, **SAVING
    )
    rollbacks: int = setting(
        3, "returns from NaN or infinity to a checkpoint, with other random numbers, before failure", least=0, **SAVING
    )
    evaluation_episodes: int | None = setting(
        None, "episodes, or scenarios never trained in, of the evaluation at the end", least=1, auto=True
    )
    evaluation_interval: int | None = setting(
        None, "updates between two evaluations while it trains; none: by time, 3 % of it; 0: only at the end", least=0,
        **SAVING,
    )  # fmt: skip
    health: Bounds = nested(Bounds(), "health_")

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(self.devices, self.model, self.fsdp)

    @property
    def many(self) -> bool:
        """True for a population of runs."""
        return self.population.many

    @property
    def all_devices(self) -> int:
        """Devices of a resolved run, over both axes."""
        assert self.devices is not None
        return self.devices * self.model

    @property
    def shown_devices(self) -> int:
        """Devices that JAX has to show for a resolved run where it can choose: those of its mesh, and those that its
        actors are given beside them, over all processes."""
        from longhaul.runtime import process_group  # not before: files without JAX read runs

        return max(self.all_devices, process_group.count() * (1 + max(self.acting.actor_devices, default=-1)))


class Origin(NamedTuple):
    """From where a run counts with the sizes that it has now: the end of what was done with others."""

    updates: int = 0
    agent_steps: int = 0
    env_steps: int = 0
    swaps: int = 0  # chunks of its data before


BEGINNING = Origin()

KINDS: dict[type, str] = {Named: "Named", Driving: "Driving", Reasoning: "Reasoning"} | {
    config: name for name, config in ALGORITHMS.items()
}
"""Names of classes in JSON, where a field may have several; a value without a name is of the field's first class."""


def to_dict(value: Any) -> Any:
    """A dataclass as JSON can hold it; `kind` names the class where a field may have several."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
        kind = external.name_of(value) if external.is_own(type(value)) else KINDS.get(type(value))
        return {"kind": kind, **fields} if kind else fields
    return [to_dict(v) for v in value] if isinstance(value, (list, tuple)) else value


def from_dict(kind: Any, value: Any) -> Any:
    """The inverse of `to_dict`. Raises TypeError where a field is missing, unknown or of another type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if isinstance(value, dict) and "kind" in value:
            if not isinstance(value["kind"], str):
                raise TypeError(f"kind {value['kind']!r} is no name")
            if is_named(value["kind"]):
                return _own(value)
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


def _own(value: dict[str, Any]) -> AlgorithmConfig:
    """Config of an algorithm of the user's own; ModuleError where its module is gone, or has other fields now."""
    name = value["kind"]
    kind: Any = type(external.load(name))
    try:
        config: AlgorithmConfig = from_dict(kind, {k: v for k, v in value.items() if k != "kind"})
    except TypeError as error:
        raise ModuleError(f"--algorithm {name}: {error}; its module is not the one that the run began with") from error
    return config
