"""Driving as a `HostVector`, each agent a column: in scenarios that it makes or reads, or in those of another process
on this machine, which lie in shared memory."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from longhaul.driving import scenario_source
from longhaul.driving.scenario import bank as banks
from longhaul.driving.scenario.bank import Bank
from longhaul.driving.sim import shared_bank, simulator
from longhaul.driving.sim.config import Config, Weights
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.shared_bank import Shared
from longhaul.driving.sim.simulator import Simulator
from longhaul.envs.host.jax_vector import JaxVector, Programs
from longhaul.envs.host.vector import Description

KIND = "driving"

GENERATED, SHARED = "generated", "shared"
"""Names of generated scenarios, and of those in shared memory, beside paths of logs."""


def driving_environment(name: str = GENERATED, **options: Any) -> Simulator:
    """Driving in the scenarios that `compiled` returns."""
    return simulator.driving(*compiled(name, **options))


def compiled(
    name: str = GENERATED, *, scenarios: int = 64, first: int = 0, horizon: int | None = None, objects: int = 128,
    least: int = 1, more: Sequence[str] = (), skip_bad: bool = False, **settings: Any,
) -> tuple[Bank, Config]:  # fmt: skip
    """`scenarios` generated ones from seed `first` on, or those in the files that the paths `name` and `more` mean.

    `settings` are those of `driving.sim.config.Config`: agents, traffic, dynamics ...; `weights` may be a dictionary.
    `horizon`, `objects` and `least` are those of `run.Driving`; with `skip_bad`, logs that can't be used are left out.
    Raises ValueError or BadData, one line, where they can't be used.
    """
    if name == GENERATED and scenarios < 1:
        raise ValueError(f"scenarios is {scenarios}; at least 1 is needed")
    config = configuration(settings)
    how: dict[str, Any] = {"agents": config.agents, "horizon": horizon, "control": config.control}
    if name == GENERATED:
        found = scenario_source.generated(first, scenarios, workers=1, least=least, **how)
    else:
        found = scenario_source.from_logs([name, *more], objects=objects, skip_bad=skip_bad, **how)
    return banks.stack(found, agents=config.agents), config


def configuration(settings: Mapping[str, Any]) -> Config:
    """Configuration of these settings. ValueError where there is no such setting."""
    changes = dict(settings)
    try:
        if isinstance(weights := changes.get("weights"), Mapping):
            changes["weights"] = Weights(**weights)
        return Config(**changes)
    except TypeError as error:
        raise ValueError(f"driving: {error}") from error


def changes(config: Config) -> dict[str, Any]:
    """Settings from which `configuration` makes `config`: those that differ from the default, as JSON can hold them."""

    def differing(one: Any, other: Any) -> dict[str, Any]:
        pairs = ((f.name, getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
        return {name: value for name, value, usual in pairs if value != usual}

    found = differing(config, Config())
    if "weights" in found:
        found["weights"] = differing(config.weights, Weights())
    return found


def driving(name: str, num_envs: int, seed: int, **options: Any) -> JaxVector:
    """Worlds of the scenarios that `compiled` returns, or of those that another process described by `shared`; vectors
    of the same description share scenarios and programs."""
    return JaxVector(_programs(name, num_envs, json.dumps(options, sort_keys=True, default=dataclasses.asdict)))


def shared(tables: Shared, like: Simulator, data: str) -> Description:
    """Description, for a process that inherits the descriptor, of driving in shared `tables`, whose digest is `data`,
    and else as in the environment `like`."""
    spec = like.spec
    assert spec.truncation_interval is not None and spec.max_steps is not None
    shape = {"least": spec.truncation_interval + 1, "most": spec.max_steps + 1, "search": like.search}
    options = changes(like.config) | {"descriptor": tables.descriptor, "rows": tables.rows, "data": data} | shape
    return Description(KIND, SHARED, tuple(sorted(options.items())))


@functools.cache
def _programs(name: str, worlds: int, options: str) -> Programs:
    given: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(options).items()}
    if name == SHARED:
        return _of_shared(worlds, **given)
    bank, config = compiled(name, **given)
    shell, tables = simulator.arranged(bank, config)
    return _of_tables(shell, tables, worlds, shared_bank.digest(tables, shell.config))


def _of_shared(
    worlds: int, *, descriptor: int, rows: Any, data: str, least: int, most: int, search: int, **settings: Any
) -> Programs:  # fmt: skip
    shell = simulator.outline(configuration(settings), least=least, most=most, dt=0.0)
    shell = dataclasses.replace(shell, search=search)
    return _of_tables(shell, shared_bank.mapped(descriptor, rows), worlds, data)


def _of_tables(shell: Simulator, tables: DeviceBank, worlds: int, data: str) -> Programs:
    """Programs whose tables are an argument; on a CPU it is the memory of `tables` itself."""
    context = jax.device_put(tables)

    def within(tables: DeviceBank) -> Simulator:
        return dataclasses.replace(shell, tables=tables)

    return Programs(within(context), worlds, within, context, data)
