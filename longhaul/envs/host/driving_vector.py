"""Driving as an environment on the host: in generated scenarios, or in logs on disk."""

from __future__ import annotations

import functools
from typing import Any

from longhaul.driving import scenario_source
from longhaul.driving.scenario import bank
from longhaul.driving.sim import simulator
from longhaul.driving.sim.config import Config
from longhaul.envs.host.jax_vector import JaxVector, Programs

GENERATED = "generated"


def environment(
    name: str = GENERATED, *, scenarios: int = 64, first: int = 0, horizon: int | None = None, objects: int = 128,
    least: int = 1, **settings: Any,
) -> simulator.Simulator:  # fmt: skip
    """Driving in `scenarios` generated ones from seed `first` on, or in the files that the path `name` means.

    `settings` are those of `driving.config.Config`: agents, traffic, dynamics, actions ...; `horizon`, `objects` and
    `least` those of `run.Driving`. Raises ValueError or BadData, one line, where they can't be used.
    """
    if name == GENERATED and scenarios < 1:
        raise ValueError(f"scenarios is {scenarios}; at least 1 is needed")
    try:
        config = Config(**settings)
    except TypeError as error:
        raise ValueError(f"driving: {error}") from error
    if name == GENERATED:
        made = scenario_source.generated(
            first, scenarios, agents=config.agents, horizon=horizon, workers=1, control=config.control, least=least
        )
    else:
        made = scenario_source.from_logs(
            [name], agents=config.agents, horizon=horizon, objects=objects, control=config.control
        )
    return simulator.driving(bank.stack(made, agents=config.agents), config)


@functools.cache
def _programs(name: str, num_envs: int, options: tuple[tuple[str, Any], ...]) -> Programs:
    return Programs(environment(name, **dict(options)), num_envs)


def driving(name: str, num_envs: int, seed: int, **options: Any) -> JaxVector:
    """`environment(name, **options)`, each agent a column; those with the same options share scenarios and programs."""
    return JaxVector(_programs(name, num_envs, tuple(sorted(options.items()))))
