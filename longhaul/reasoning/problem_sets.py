"""Problems of a run: its task by name, the problems to train on, and those held out.

Held-out problems come first, from a seed of their own, and no training problem has the same prompt: they are the same
for all seeds of a run, and no run has seen them. Questions of a file are held out in the same way, or come from another
file.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import gym_tasks, tasks, tokenizer, tools
from longhaul.reasoning.config import GYM, MADE, QUESTIONS, TASKS, Reasoning
from longhaul.reasoning.sampler import Bank, bank
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime import config_fields
from longhaul.runtime.errors import FieldError
from longhaul.spaces import Discrete
from longhaul.types import Spec

HELD_OUT = 10_000_019
"""Seed of held-out problems; different from any run's."""


class World(NamedTuple):
    """Stand-in for an environment: spec and problem bank."""

    spec: Spec
    bank: Bank


def check(config: Reasoning) -> None:
    """Raises FieldError where a setting is out of bounds, or does not fit the others."""
    config_fields.check(config)
    if config.task not in TASKS and not config.task.startswith(GYM):
        raise FieldError("task", repr(config.task), f"it must be one of {', '.join(TASKS)}, or {GYM}NAME")
    if config.task == "countdown" and config.most < 2:
        raise FieldError("most", config.most, "countdown needs at least 2 numbers")
    if tasks.QUESTION not in config.template:
        raise FieldError("template", repr(config.template), f"it must have {tasks.QUESTION} for the question")
    for name in ("fewest", "held_out_fewest"):
        if getattr(config, name) > config.most:
            raise FieldError(name, getattr(config, name), f"it must lie in 1 to --most, {config.most}")


def task(config: Reasoning, *, fewest: int | None = None) -> Task:
    """Task of a run, with problems no easier than `fewest`. Raises ValueError for an unreadable file."""
    if config.task == QUESTIONS:
        return _read(config, config.questions)
    if config.task.startswith(GYM):
        loaded = gym_tasks.task(
            config.task.removeprefix(GYM), config.task_settings, template=plain(config.template),
            form=config.answer_format, shots=config.shots, report=_reporter(config.task),
        )  # fmt: skip
        return tools.without_calls(loaded) if config.tools else loaded
    return MADE[config.task](fewest or config.fewest, config.most)


def _read(config: Reasoning, path: str) -> Task:
    if not path:
        raise ValueError("no file is given; give --questions FILE.jsonl, with a question and an answer a line")
    loaded = tasks.questions(path, check=config.check, template=plain(config.template), report=_reporter(config.check))
    return tools.without_calls(loaded) if config.tools else loaded


@functools.cache
def _reporter(verifier: str) -> Callable[[str], None]:
    """Function that prints its first line: the first error of a verifier, in training and evaluation together."""
    lines: list[str] = []

    def report(line: str) -> None:
        if not lines:
            print(line, file=sys.stderr)
        lines.append(line)

    return report


def report_again() -> None:
    """Beginning of a run, which prints a verifier's first error whatever runs before it in this process printed."""
    _reporter.cache_clear()


def plain(text: str) -> str:
    """Text of a flag, in which \\n is a newline."""
    return text.replace("\\n", "\n")


def held_out_task(config: Reasoning) -> Task:
    """Task whose problems are held out."""
    if config.task == QUESTIONS:
        return _read(config, config.held_out_questions or config.questions)
    return task(config, fewest=config.held_out_fewest)


def held_out_problems(config: Reasoning, count: int) -> list[Problem]:
    """First `count` distinct held-out problems. Raises ValueError where there are fewer."""
    rng, source = np.random.default_rng(HELD_OUT), held_out_task(config)
    if not source.listed:
        return tasks.problems(source, rng, count, distinct=True)
    if count > len(source.listed):
        raise ValueError(f"{source.name} has {len(source.listed)} questions, and {count} are to be held out; give "
                         "--evaluation-episodes fewer")  # fmt: skip
    return [source.listed[place] for place in rng.permutation(len(source.listed))[:count]]


def training_problems(config: Reasoning, rng: np.random.Generator, without: int) -> list[Problem]:
    """Problems that a run trains on, without the first `without` held-out ones, those of few steps first.

    Raises ValueError where all questions of a list are held out.
    """
    source, never = task(config), {problem.prompt for problem in held_out_problems(config, without)}
    if source.listed:
        left = [problem for problem in source.listed if problem.prompt not in never]
        if not left:
            raise ValueError(f"{source.name} has {len(source.listed)} questions, and all are held out; give "
                             "--evaluation-episodes fewer, or --held-out-questions another file")  # fmt: skip
        chosen = [left[place] for place in rng.permutation(len(left))[: config.problems]]
    else:
        chosen = tasks.problems(source, rng, config.problems, without=never)
    return sorted(chosen, key=lambda problem: len(problem.steps))


def training(
    config: Reasoning, *, seed: int, without: int, length: int, tokeniser: Tokeniser = tokenizer.TOKENISER
) -> Bank:
    """Bank of a run's problems by its seed."""
    rng = np.random.default_rng(seed)
    problems = training_problems(config, rng, without)
    return bank(task(config), problems, rng, length, tokeniser)


def spec(length: int, vocabulary: int) -> Spec:
    """Spec in place of an environment's: a prompt of any length, and one token after the other."""
    prompt: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return Spec(prompt, Discrete(vocabulary), truncation_interval=None, max_steps=length)
