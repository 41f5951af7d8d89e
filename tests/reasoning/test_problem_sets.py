"""Training and held-out problems of a run."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.reasoning import tasks


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
