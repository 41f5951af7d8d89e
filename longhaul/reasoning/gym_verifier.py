"""Verifiers of reasoning-gym that run an answer as a program, and what of an answer may reach them.

Nine of the library's verifiers call `eval`, or SymPy's parser that does, on what the model wrote. A completion is a
stranger's text. So an answer passes only if it is of numbers, plain words or formulas, without anything that looks up,
calls or quotes something else; any other is wrong. Formulas are compared by SymPy in a process with limits, where a
power of powers or a long simplification ends as a wrong answer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from longhaul.reasoning.tools import Tool

PLAIN = re.compile(r"[\w\s]*")
"""Whole answers that are right as they stand: matrices, boards, words."""

ARITHMETIC = re.compile(r"(?:[\d\s()+/.-]|\*(?!\*))*")
"""Formulas of numbers without powers."""

FORMULA = re.compile(r"(?:[\s()+*/^,-]|\d+(?:\.\d*)?|[A-Za-z]+)*+")
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs", "abs", "pi",
    "Integral",
})  # fmt: skip
"""Formulas of numbers, variables of one letter and these."""

FORMS: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), PLAIN),
    **dict.fromkeys(("countdown", "puzzle24"), ARITHMETIC),
    **dict.fromkeys(("simple_integration", "intermediate_integration", "polynomial_multiplication"), FORMULA),
}
"""Datasets with such a verifier, and the answers that may reach it."""

LETTERS, SECONDS = 1000, 20.0
"""Letters of such an answer, and seconds for comparing formulas, at most; the first of a process also imports the
library."""


def passes(name: str, answer: str) -> bool:
    """True if an answer may reach the verifier of a dataset."""
    form = FORMS.get(name)
    if form is None:
        return True
    if len(answer) > LETTERS or not answer.isascii() or not form.fullmatch(answer):
        return False
    return form is not FORMULA or all(len(word) == 1 or word in FUNCTIONS for word in re.findall("[A-Za-z]+", answer))


def score(data: Any, name: str, settings: str, number: int, entry: dict[str, Any], answer: str) -> float:
    """The library's score of an answer to item `number`, `entry`, of a dataset."""
    if not passes(name, answer):
        return 0.0
    if FORMS.get(name) is not FORMULA:
        return float(data.score_answer(answer, entry))
    reply = _apart()(json.dumps([name, settings, number, answer]))
    try:
        return float(reply)
    except ValueError:
        raise RuntimeError(reply) from None


@functools.cache
def _apart() -> Tool:
    return Tool(f"{__name__}:score_apart", SECONDS)


@functools.cache
def _dataset(name: str, settings: str) -> Any:
    from longhaul.reasoning import gym_tasks

    return gym_tasks.dataset(name, settings)


def score_apart(text: str) -> float:
    """Work of the process with limits: `score` of a JSON list [name, settings, number, answer]."""
    name, settings, number, answer = json.loads(text)
    data = _dataset(name, settings)
    return float(data.score_answer(answer, data[number]))
