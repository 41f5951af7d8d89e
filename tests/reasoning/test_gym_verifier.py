"""Verifiers of reasoning-gym that run an answer: what reaches them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest

from longhaul.reasoning import gym_tasks, gym_verifier, tasks
from longhaul.reasoning.gym_verifier import FORMS, FORMULA, passes
from tests.helpers.libraries import library

library("reasoning_gym", "reasoning-gym is not installed")


@pytest.mark.parametrize("name", sorted(FORMS))
def test_no_completion_is_run_and_right_answers_pass(name: str, tmp_path: Path) -> None:
    """An answer that writes a file when it is run does not; one that takes for ever is wrong in no time."""
    made, file = gym_tasks.task(name), tmp_path / "was-run"
    problem = tasks.problems(made, np.random.default_rng(0), 1)[0]
    began = time.thread_time()
    for evil in (
        f"open({str(file)!r}, 'w')", f"[open({str(file)!r}, 'w')]", f"__import__('os').mkdir({str(file)!r})",
        "[9**9**9**9]", "exec(x)", "x.__class__", "().a", "ｅxec(x)", "1" * 5000,
    ):  # fmt: skip
        assert not passes(name, evil)
        assert made.reward(problem, evil) == 0.0
    assert not file.exists()
    assert time.thread_time() - began < 1.0
    assert passes(name, problem.answer)
    if FORMS[name] is not FORMULA:
        assert made.reward(problem, problem.answer) == 1.0


@pytest.mark.slow
def test_formulas_are_compared_in_a_process_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    made = gym_tasks.task("simple_integration", report=lines.append)
    problem = tasks.problems(made, np.random.default_rng(0), 1)[0]
    assert made.reward(problem, problem.answer) == 1.0
    assert made.reward(problem, f"2*({problem.answer})") == 0.0
    monkeypatch.setattr(gym_verifier._apart(), "_seconds", 1.0)
    assert made.reward(problem, "9**9**9**9") == 0.0
    assert "TimeoutError" in lines[0]
    monkeypatch.undo()
    assert made.reward(problem, problem.answer) == 1.0  # in a new process


def test_no_other_verifier_of_the_library_runs_an_answer() -> None:
    """By its source, when it is updated: files that call eval or SymPy's parser are those that are known."""
    folder = Path(gym_tasks.library().__file__).parent
    pattern = re.compile(r"\b(?:eval|sympify|exec)\(|\b(?:sp|sympy)\.parse_expr\(|sympy_parser import parse_expr")
    there = {path.stem for path in folder.rglob("*.py") if pattern.search(path.read_text())}
    of_its_own_text = {"codeio", "number_sorting", "generators_50_99", "generators_00_49", "bitwise_arithmetic",
                       "basic_arithmetic"}  # fmt: skip
    assert there - of_its_own_text == FORMS.keys()
