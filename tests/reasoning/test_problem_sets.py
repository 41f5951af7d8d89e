"""Training and held-out problems of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from longhaul.reasoning import problem_sets, tasks
from longhaul.reasoning.config import Reasoning
from longhaul.reasoning.tasks import Problem


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_held_out_problems_are_held_out() -> None:
    task = tasks.arithmetic(1, 1)
    held = tasks.problems(task, rng(1), 20, distinct=True)
    prompts = {problem.prompt for problem in held}
    assert len(prompts) == 20
    assert not prompts & {p.prompt for p in tasks.problems(task, rng(2), 200, without=prompts)}
    with pytest.raises(ValueError, match=r"51 problems of arithmetic are wanted, and 50 were found"):
        tasks.problems(task, rng(3), 51, distinct=True)  # 5^2 terms, 2 signs


def fails(problem: Problem, completion: str) -> float:
    raise KeyError(completion)


def test_a_verifiers_first_error_is_printed_once_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In training and in evaluation together."""
    (tmp_path / "sums.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}))
    config = Reasoning(task="questions", questions=str(tmp_path / "sums.jsonl"), check=f"{__name__}:fails")
    line = f"the verifier of {__name__}:fails raises KeyError('first') for 'first'; such answers count as wrong\n"
    for _ in range(2):
        problem_sets.report_again()
        for made, text in ((problem_sets.task(config), "first"), (problem_sets.held_out_task(config), "second")):
            assert [made.reward(problem, text) for problem in made.listed] == [0.0]
        assert capsys.readouterr().err == line
