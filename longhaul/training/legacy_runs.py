"""Runs of older versions' run.json in the fields of this version; a field that was missing gets its old behaviour.

Parameters of older checkpoints: legacy_params.py.
"""

from __future__ import annotations

from typing import Any

from longhaul.algorithms.config import ALGORITHMS
from longhaul.config.population import Population
from longhaul.config.run import to_dict
from longhaul.reasoning.config import GYM, QUESTIONS
from longhaul.topologies.actor_learner.config import ActorConfig

Fields = dict[str, Any]
"""A Run or a part of it, as run.json has it."""


def as_current(run: Fields) -> Fields:
    """A Run with the fields of this version. Raises TypeError if its algorithm has no fields."""
    if not isinstance(run["algorithm"], dict):
        raise TypeError(f"its algorithm is {run['algorithm']!r}")
    run = _of_run() | run | {"algorithm": _algorithm(run["algorithm"])}
    task = run.get("environment")
    if isinstance(task, dict) and isinstance(run["algorithm"].get("gate"), dict):
        run |= _reasoning(run["algorithm"], task)
    if isinstance(task, dict) and isinstance(task.get("simulator"), dict):
        run |= {"environment": _driving(task)}
    if isinstance(run.get("acting"), dict):
        run |= {"acting": _acting() | run["acting"]}
    return run


def _of_run() -> Fields:
    """Later fields of a Run itself."""
    later = {"population": to_dict(Population()), "init_from": None, "init_parts": ["parameters", "normaliser"]}
    return later | {"evaluation_interval": 0, "fsdp": False}


def _algorithm(algorithm: Fields) -> Fields:
    """An algorithm, its network's fields in a part of their own."""
    kind = algorithm.get("kind", "ppo")
    if kind in ("ppo", "impala"):  # algorithms with replay have always written it
        algorithm = {"accumulate": None} | algorithm
    if isinstance(algorithm.get("remat"), bool):  # once a switch
        algorithm = algorithm | {"remat": "full" if algorithm["remat"] else "none"}
    if "torso" in algorithm and kind in ALGORITHMS:  # the network's fields once stood among the algorithm's
        network = to_dict(ALGORITHMS[kind].network)
        network |= {name: value for name, value in algorithm.items() if name in network}
        algorithm = {name: value for name, value in algorithm.items() if name not in network} | {"network": network}
    return algorithm


def _reasoning(algorithm: Fields, task: Fields) -> Fields:
    """The algorithm and the environment of a run that trains a language model."""
    in_words = str(task.get("task")).startswith((QUESTIONS, GYM))
    gate, model = {"verdict": in_words} | algorithm["gate"], {"frozen": "fp32"} | algorithm["model"]
    return {
        "algorithm": {"resample": 0} | algorithm | {"gate": gate, "model": model},
        "environment": {"tools": ""} | task,
    }


def _driving(task: Fields) -> Fields:
    """An environment of driving."""
    simulator = {"reward": None, "speed_limit": False, "safety": False} | task["simulator"]
    weights = {"speeding": 0.0, "unease": 0.0, "near_collision": 0.0, "unsafe": 0.0} | simulator["weights"]
    return {"bank_by_host": False, "skip_bad_logs": False} | task | {"simulator": simulator | {"weights": weights}}


def _acting() -> Fields:
    """Later fields of acting by processes of their own."""
    later = ("rollout_", "actor_devices")
    return {name: value for name, value in to_dict(ActorConfig()).items() if name.startswith(later)}
