"""Rules between a Run's settings, checked before anything is computed; the bounds of each stand beside its field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longhaul.algorithms.config import TITLES, Reasoner
from longhaul.config.run import TOPOLOGIES, Driving, Run
from longhaul.driving.sim import config as sim
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import settings
from longhaul.runtime.errors import FieldError, RunError


def check_topology(run: Run, changed: Mapping[str, Any]) -> None:
    """Raises RunError where one of the flags that were given, and change something, is not of the run's topology."""
    topologies = {flag(leaf.name): leaf.setting.topologies for leaf in settings.walk(run)}
    for name, value in changed.items():
        have = topologies[name] or TOPOLOGIES
        said = f"--{name} is {'none' if value is None else 'on' if value is True else value}"
        if run.topology in TOPOLOGIES and run.topology not in have:
            raise RunError(
                f"{said}, and --topology {run.topology} has none; choose --topology {' or '.join(have)}, "
                f"or leave --{name} out"
            )
        if name == "ray-address" and run.acting.actor_kind != "ray":
            raise RunError(f"{said}, and --actor-kind is {run.acting.actor_kind}; choose --actor-kind ray")


def check_driving(task: Driving) -> None:
    """Raises FieldError where settings of driving do not fit each other."""
    sim.check_settings(task.simulator)
    if task.bank is not None and not task.data:
        raise FieldError("bank", f"{task.bank}, and there is no --data", "of generated scenarios, --scenarios are held")
    if task.bank_updates is not None and task.bank is None:
        raise FieldError("bank_updates", task.bank_updates, "it needs --bank")
    if task.least > task.simulator.agents:
        raise FieldError("least", task.least, f"it must lie in 1 to --agents, {task.simulator.agents}")
    if task.objects < task.simulator.agents:
        raise FieldError("objects", task.objects, f"it must be at least --agents, {task.simulator.agents}")


def check_reasoning(run: Run) -> None:
    """Raises RunError or FieldError where settings of reasoning do not fit each other, the algorithm or topology."""
    from longhaul.reasoning import problem_sets

    if isinstance(run.environment, Reasoning) != isinstance(run.algorithm, Reasoner):
        raise RunError(f"recipe {run.recipe}: GRPO and its kin learn from prompts, and nothing else does")
    if not isinstance(run.environment, Reasoning):
        return
    if run.topology == "central" or (run.topology == "actors" and run.acting.actor_kind == "ray"):
        raise RunError("completions are sampled by the learner, its threads or its processes; give --topology actors "
                       "--actor-kind thread, or leave both out")  # fmt: skip
    problem_sets.check(run.environment)
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


def flag(name: str) -> str:
    return name.replace("_", "-")
