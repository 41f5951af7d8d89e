"""Questions with answers from a JSONL file, in GSM8K's format (Cobbe et al. 2021, arXiv 2110.14168), and checkers.

No JAX.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.reasoning.tasks import SIGNS, Problem, Task, Written

QUESTION = "{question}"
"""Placeholder of the question in a template."""


def questions(path: Path | str, *, check: str = "numeric", mark: str = "####", template: str = QUESTION) -> Task:
    """Questions of a JSONL file with `question` and `answer` a line, in GSM8K's format: the final answer after `mark`.

    A prompt is `template` with the question in the place of {question}. A repeated question is left out.

    `check` is "numeric" (numbers are compared: 1,000 is 1000.0; without `mark` the last number of a completion counts),
    "exact" (the text after `mark`, without outer spaces), or the path of a user's function, "package.module:function",
    (problem, completion) -> reward. A problem's steps are GSM8K's calculations, <<48/2=24>>; `soundness` is the share
    of a completion's calculations that are right and use numbers of the question or of earlier calculations.

    Raises ValueError, one line with file and line, for an unreadable line.
    """
    if QUESTION not in template:
        raise ValueError(f"template is {template!r}; it must have {QUESTION} where the question stands")
    reward = checker(check, mark)
    known: dict[str, tuple[Problem, str]] = {}
    for line_number, line in _lines(Path(path)):
        question, answer = _question(line, f"{path}:{line_number}", mark)
        known.setdefault(question.prompt, (question, answer))
    if not known:
        raise ValueError(f"{path}: holds no question")

    def prompted(problem: Problem) -> Problem:
        return problem._replace(prompt=template.replace(QUESTION, problem.prompt))

    asked = {name: prompted(question) for name, (question, _) in known.items()}
    bare = {asked[name].prompt: each for name, each in known.items()}
    listed = tuple(asked.values())

    def solution(problem: Problem, rng: np.random.Generator) -> str:
        return bare[problem.prompt][1]

    def soundness(problem: Problem, completion: str) -> float:
        """Soundness by the question's numbers, without the template's."""
        return calculated(bare.get(problem.prompt, (problem, ""))[0], completion)

    def posed(prompt: str) -> Problem:
        """Problem by its question or its whole prompt; a text that is not in the file has no known answer."""
        question = bare[prompt][0].prompt if prompt in bare else prompt
        return asked.get(question) or prompted(Problem(question, ""))

    return Task(
        Path(path).stem, lambda rng: listed[int(rng.integers(len(listed)))], solution, reward, soundness, False, posed,
        solution, lambda completion: reading(completion, mark), listed,
    )  # fmt: skip


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; give a JSONL file") from error
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _question(line: str, where: str, mark: str) -> tuple[Problem, str]:
    try:
        fields = json.loads(line)
        question, solution = fields["question"], fields["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: {error!r}; each line is an object with question and answer") from error
    if not isinstance(question, str) or not isinstance(solution, str):
        raise ValueError(f"{where}: question and answer must be text")
    answer = solution.rpartition(mark)[2].strip()
    return Problem(question, answer, tuple(re.findall(r"<<([^<>]*)>>", solution))), solution


def checker(check: str, mark: str = "####") -> Callable[[Problem, str], float]:
    """Reward function of `check`. Raises ValueError for an unknown one."""
    if check == "exact":
        return lambda problem, completion: float(_final(completion, mark) == problem.answer)
    if check == "numeric":
        return lambda problem, completion: float(_same_number(_final(completion, mark), completion, problem.answer))
    module, colon, name = check.partition(":")
    if not colon:
        raise ValueError(f"check is {check!r}; it must be numeric, exact, or package.module:function")
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"check is {check!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"check is {check!r}, which is no function")
    return lambda problem, completion: float(function(problem, completion))


def _final(completion: str, mark: str) -> str | None:
    _, found, tail = completion.rpartition(mark)
    return tail.strip() if found else None


def reading(completion: str, mark: str = "####") -> Written:
    """Calculations of a completion and its answer: the text after `mark`, or the last number; as a plain number, such
    that 1,050 and 1050.00 are one answer."""
    final = _final(completion, mark)
    final = _last(completion) if final is None else final
    value = number(final)
    answer = final if value is None else f"{value.normalize():f}"
    return Written(tuple(re.findall(r"<<([^<>]*)>>", completion)), False, answer or None)


def number(text: str) -> Decimal | None:
    """Number in a common notation: "$1,000.50" is 1000.50; None for anything else."""
    plain = text.strip().lstrip("$").rstrip(".%").replace(",", "")
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", plain, re.ASCII):
        return None
    try:
        return Decimal(plain)
    except InvalidOperation:
        return None


def _same_number(final: str | None, completion: str, answer: str) -> bool:
    wanted = number(answer)
    given_number = number(_last(completion) if final is None else final)
    return wanted is not None and given_number is not None and wanted == given_number


def _last(completion: str) -> str:
    """Last number of a text; "" where there is none."""
    numbers = re.findall(r"-?[\d,]*\.?\d+", completion, re.ASCII)
    return numbers[-1] if numbers else ""


def calculated(problem: Problem, completion: str) -> float:
    """Share of a completion's calculations, <<48/2=24>>, that are right and about the question's numbers.

    Each has two numbers, both of the question or earlier results. 0 without any calculation.
    """
    known = {number(found) for found in re.findall(r"[\d,]*\.?\d+", problem.prompt, re.ASCII)}
    written = re.findall(r"<<([^<>]*)>>", completion)
    sound = 0
    for each in written:
        parts = re.fullmatch(r"\s*([\d.,]+)\s*([-+*/])\s*([\d.,]+)\s*=\s*(-?[\d.,]+)\s*", each, re.ASCII)
        if parts is None:
            continue
        a, b, result = (number(parts[place]) for place in (1, 3, 4))
        if a is None or b is None or result is None:
            continue
        right = result * b == a if parts[2] == "/" else SIGNS[parts[2]](a, b) == result
        sound += right and a in known and b in known
        known |= {result} if right else set()
    return sound / len(written) if written else 0.0
