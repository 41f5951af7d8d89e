"""What a run reasons about: a task by its name, the problems to train on, and those held out.

Problems held out come first, from a seed of their own, and no training problem has the prompt of one: they are the same
for all seeds of a run, and no run has seen them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import tasks, tokens
from longhaul.reasoning.sampling import Bank, bank
from longhaul.reasoning.tasks import Problem, Task
from longhaul.types import Discrete, Spec

HELD_OUT = 10_000_019
"""The seed of problems held out, which no run's own is."""

MADE: dict[str, Callable[[int, int], Task]] = {"arithmetic": tasks.arithmetic, "addition": tasks.addition}
"""Tasks with one right answer, which the device can check: name -> (fewest, most) -> the task."""


@dataclass(frozen=True)
class Reasoning:
    """Problems with answers that a program checks. Of a run, `num_envs` are problems of an update, a group of
    completions each, and `num_steps` the most tokens of one."""

    task: str = "arithmetic"
    fewest: int = 1  # operations of a problem, or digits
    most: int = 4
    held_out_fewest: int = 2  # of a problem held out
    problems: int = 16_384  # to train on
    wave: int = 128  # completions that are sampled together


class World(NamedTuple):
    """What of an environment problems have: a spec, and the bank that completions are about."""

    spec: Spec
    bank: Bank


def check(config: Reasoning) -> None:
    """Raises ValueError, naming value, bound and remedy."""
    if config.task not in MADE:
        raise ValueError(f"task is {config.task!r}; it must be one of {', '.join(MADE)}")
    for name in ("fewest", "held_out_fewest"):
        if not 1 <= getattr(config, name) <= config.most:
            raise ValueError(f"{name} is {getattr(config, name)}; it must lie in 1 to --most, {config.most}")
    for name, most in (("most", 64), ("problems", 2**24), ("wave", 2**20)):
        if not 1 <= getattr(config, name) <= most:
            raise ValueError(f"{name} is {getattr(config, name)}; it must lie in 1 to {most}")


def task(config: Reasoning, *, fewest: int | None = None) -> Task:
    """The task of a run, of problems that are no easier than `fewest`."""
    return MADE[config.task](fewest or config.fewest, config.most)


def held_out(config: Reasoning, count: int) -> list[Problem]:
    """The first `count` distinct problems held out. Raises ValueError where there are not as many."""
    rng = np.random.default_rng(HELD_OUT)
    return tasks.problems(task(config, fewest=config.held_out_fewest), rng, count, distinct=True)


def training(config: Reasoning, *, seed: int, without: int, length: int) -> Bank:
    """The bank of a run of this seed, without the first `without` problems held out, those of few steps first."""
    made, rng = task(config), np.random.default_rng(seed)
    never = {problem.prompt for problem in held_out(config, without)}
    found = tasks.problems(made, rng, config.problems, without=never)
    return bank(made, sorted(found, key=lambda problem: len(problem.steps)), rng, length)


def spec(config: Reasoning, length: int) -> Spec:
    """What takes the place of an environment's: a prompt of any length, and one token after the other."""
    prompt: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return Spec(prompt, Discrete(len(tokens.CHARACTERS)), truncation_interval=None, max_steps=length)
