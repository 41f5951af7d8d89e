"""Bounds of a Run's settings, checked before anything is computed; errors name value, bound and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from longhaul.algorithms import batch_scaling
from longhaul.algorithms.config import TITLES, Reasoner
from longhaul.config.run import MOST, TOPOLOGIES, Driving, Run
from longhaul.config.serialize import to_dict
from longhaul.reasoning.config import Reasoning
from longhaul.runtime.errors import RunError

LAID_OUT = (
    dict.fromkeys(("actors", "actor-kind", "ray-address", "staleness"), ("actors", "central"))
    | dict.fromkeys(("lane", "slots", "bind", "token-file", "tls-cert", "tls-key"), ("central",))
    | {"pin": ("actors",)}
)
"""Flags of some topologies alone, and which: the others would take them, and do nothing."""


def check_topology(run: Run, changed: Mapping[str, Any]) -> None:
    """Raises RunError where one of the flags that were given, and change something, is not of the run's topology."""
    for name, value in changed.items():
        have = LAID_OUT.get(name, TOPOLOGIES)
        said = f"--{name} is {'none' if value is None else 'on' if value is True else value}"
        if run.topology in TOPOLOGIES and run.topology not in have:
            raise RunError(
                f"{said}, and --topology {run.topology} has none; choose --topology {' or '.join(have)}, "
                f"or leave --{name} out"
            )
        if name == "ray-address" and run.acting.actor_kind != "ray":
            raise RunError(f"{said}, and --actor-kind is {run.acting.actor_kind}; choose --actor-kind ray")


def check_numbers(run: Run) -> None:
    """Raises RunError, naming value, bound and remedy, where a number of a Run can't be right whatever the rest is."""
    if run.model < 1:
        raise RunError(f"--mesh is {run.mesh}; model must be at least 1")
    for name in ("total_steps", "num_envs", "num_steps", "keep"):
        if getattr(run, name) < 1:
            raise RunError(f"--{flag(name)} is {getattr(run, name)}; it must be at least 1")
    if run.rollbacks < 0:
        raise RunError(f"--rollbacks is {run.rollbacks}; it must be at least 0")
    for name, allowed in (("scaling", batch_scaling.SCALINGS), ("lr_rule", batch_scaling.LR_RULES)):
        if getattr(run, name) not in allowed:
            raise RunError(f"--{flag(name)} is {getattr(run, name)!r}; it must be one of {', '.join(allowed)}")
    optional = ("devices", "threads", "log_interval", "block", "save_interval", "evaluation_episodes", "base_batch",
                "keep_every")  # fmt: skip
    for name in optional:
        value = getattr(run, name)
        if value is not None and value < 1:
            raise RunError(f"--{flag(name)} is {value}; it must be at least 1")
    if not 0 <= run.seed <= MOST:  # JAX would take others, and cut them down
        raise RunError(f"--seed is {run.seed}; it must lie in 0 to {MOST}")
    if not run.save_interval_minutes > 0:
        raise RunError(f"--save-interval-minutes is {run.save_interval_minutes}; it must be above 0")
    for name, value in _floats(to_dict(run)):
        if not math.isfinite(value):
            raise RunError(f"--{flag(name)} is {value}; it must be finite")


def check_driving(task: Driving) -> None:
    """Raises RunError where settings of driving are out of bounds."""
    from longhaul.driving.scenario_source import HELD_OUT
    from longhaul.driving.sim.config import check_settings

    try:
        check_settings(task.simulator)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise RunError(f"--{flag(name)} {rest}") from error
    if not 1 <= task.scenarios <= HELD_OUT:
        raise RunError(
            f"--scenarios is {task.scenarios}; it must lie in 1 to {HELD_OUT} (those after are for evaluation)"
        )
    if task.bank is not None and task.bank < 1:
        raise RunError(f"--bank is {task.bank}; it must be at least 1")
    if task.bank is not None and not task.data:
        raise RunError(f"--bank is {task.bank}, and there is no --data; of generated scenarios, --scenarios are held")
    if task.bank_updates is not None and (task.bank is None or task.bank_updates < 1):
        raise RunError(f"--bank-updates is {task.bank_updates}; it must be at least 1, and needs --bank")
    if not 1 <= task.least <= task.simulator.agents:
        raise RunError(f"--least is {task.least}; it must lie in 1 to --agents, {task.simulator.agents}")
    if task.objects < task.simulator.agents:
        raise RunError(f"--objects is {task.objects}; it must be at least --agents, {task.simulator.agents}")
    if task.horizon is not None and task.horizon < 2:
        raise RunError(f"--horizon is {task.horizon}; a scenario has at least 2 steps")


def check_reasoning(run: Run) -> None:
    """Raises RunError where settings of reasoning are out of bounds, or do not fit the algorithm and topology."""
    from longhaul.reasoning import problem_sets

    if isinstance(run.environment, Reasoning) != isinstance(run.algorithm, Reasoner):
        raise RunError(f"recipe {run.recipe}: GRPO and its kin learn from prompts, and nothing else does")
    if not isinstance(run.environment, Reasoning):
        return
    if run.topology == "central" or (run.topology == "actors" and run.acting.actor_kind == "ray"):
        raise RunError("completions are sampled by the learner, its threads or its processes; give --topology actors "
                       "--actor-kind thread, or leave both out")  # fmt: skip
    try:
        problem_sets.check(run.environment)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise RunError(f"--{flag(name)} {rest}") from error
    if not run.environment.exact and run.topology != "actors":
        raise RunError(f"--task {run.environment.task} is checked on the host; give --topology actors")


def check_expert(run: Run) -> None:
    """Raises RunError where imitation, or gradients through environments, do not fit the topology and task."""
    from longhaul.algorithms import registry

    share, files, task = registry.guidance(run.algorithm), registry.recorded(run.algorithm), run.environment
    if registry.pathwise(run.algorithm) and run.topology != "fused":
        raise RunError(
            f"--topology is {run.topology}, and gradients pass through environments in one program: choose fused"
        )
    if share is None and not files:
        return
    title = TITLES[type(run.algorithm)]
    if run.topology != "fused":
        raise RunError(f"--topology is {run.topology}, and {title} asks an expert in the same program: choose fused")
    if files and isinstance(task, Driving):
        raise RunError(f"--recorded is {files[0]}, and in driving the expert is asked as it goes: leave it out")


def _floats(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(name of its field, value) of every float in what `to_dict` made."""
    if isinstance(value, float):
        yield name, value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _floats(inner, key)


def flag(name: str) -> str:
    return name.replace("_", "-")
