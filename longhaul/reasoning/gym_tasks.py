"""Tasks of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760): a hundred generators, each with its own verifier.

`reasoning-gym:NAME` names one; its settings are the keyword arguments of the library's config, as in
"min_terms=2,max_terms=3". A completion's answer is all of its text, its last line, or what stands between <answer> and
</answer> after the thinking. Solved examples may stand before a question (Brown et al. 2020, arXiv 2005.14165).
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from longhaul.reasoning import tasks
from longhaul.reasoning.config import GYM
from longhaul.reasoning.tasks import QUESTION, Problem, Task, Written

TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

RIGHT = 0.99
"""Score from which an answer is right: a verifier gives less for right answers in another form."""

ITEMS = 2**31 - 1
"""Items of a dataset; each is generated from its number."""


def parsed(settings: str) -> dict[str, Any]:
    """Keyword arguments of "name=value,name=value". Raises ValueError for another text."""
    try:
        call = ast.parse(f"f({settings})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ValueError("they are written like min_terms=2,max_terms=3") from error


def answer(text: str, form: str) -> str | None:
    """Answer of a completion in one of config.FORMATS; None where it lacks one."""
    if form == "tags":
        tagged = TAGS.findall(text.rpartition("</think>")[2])
        return tagged[-1].strip() if tagged else None
    lines = text.strip().splitlines()
    return (lines[-1] if lines and form == "line" else text).strip() or None


def library() -> Any:
    """reasoning-gym as a module, without the warnings of what it is made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
    return reasoning_gym


def dataset(name: str, settings: str) -> Any:
    """The library's dataset; each of its ITEMS is generated from its number."""
    return library().create_dataset(name, size=ITEMS, seed=0, **parsed(settings))


def _settings_of(name: str) -> str:
    """Names of a dataset's settings."""
    own = inspect.signature(library().factory.DATASETS[name][1]).parameters
    return ", ".join(each for each in own if each not in ("seed", "size"))


def task(
    name: str,
    settings: str = "",
    *,
    template: str = QUESTION,
    form: str = "text",
    shots: int = 0,
    report: Callable[[str], None] = print,
) -> Task:
    """Task of a dataset, with `shots` solved examples before each question. Raises ValueError where there is none.

    A verifier that raises counts as wrong; the first error is reported once.
    """
    try:
        datasets = library().factory.DATASETS

        from longhaul.reasoning import gym_verifier
    except ImportError as error:
        raise ValueError(f"{GYM}{name} needs {error.name}; pip install 'longhaul-rl[llm]'") from error
    if name not in datasets:
        from difflib import get_close_matches

        near = " or ".join(get_close_matches(name, datasets, n=3, cutoff=0.5)) or "chain_sum"
        raise ValueError(f"reasoning-gym has no {name!r}; did you mean {near}?")
    try:
        data = dataset(name, settings)
        data[0]
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"--task-settings is {settings!r}: {error}; {name} has {_settings_of(name)}") from error

    def plain(number: int) -> tuple[str, dict[str, Any]]:
        entry = data[number]
        return template.replace(QUESTION, entry["question"].strip()), entry

    # The last items are examples; a question drawn at random is one of them once in a billion.
    examples = "".join(f"{text}{entry['answer']}\n\n" for text, entry in (plain(ITEMS - 1 - i) for i in range(shots)))

    def problem(rng: np.random.Generator) -> Problem:
        number = int(rng.integers(ITEMS - shots))
        text, entry = plain(number)
        return Problem(examples + text, str(entry["answer"]), entry=(number, entry))

    def solution(problem: Problem, rng: np.random.Generator) -> str:
        return f"<answer>{problem.answer}</answer>" if form == "tags" else problem.answer

    def scored(problem: Problem, completion: str) -> float:
        answered = answer(completion, form)
        if answered is None or problem.entry is None:
            return 0.0
        number, entry = problem.entry
        return float(gym_verifier.score(data, name, settings, number, entry, answered) >= RIGHT)

    reward = tasks.guarded(scored, name, report)

    def soundness(problem: Problem, completion: str) -> float:
        """Right answer in the right format: what the gate looks at, as there are no steps to check."""
        return reward(problem, completion)

    def reading(completion: str) -> Written:
        return Written((), False, answer(completion, form))

    def posed(text: str) -> Problem:
        """Problem of a question, or of its whole prompt; its answer is not known."""
        head, _, tail = template.partition(QUESTION)
        whole = text.startswith(examples + head) and text.endswith(tail) and (examples + head + tail)
        return Problem(text if whole else examples + template.replace(QUESTION, text), "")

    return Task(f"{GYM}{name}", problem, solution, reward, soundness, False, posed, solution, reading)
