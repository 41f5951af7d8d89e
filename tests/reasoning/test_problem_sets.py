"""Training and held-out problems of a run."""

from __future__ import annotations

import numpy as np
import pytest

from longhaul.reasoning import tasks


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_held_out_problems_are_held_out() -> None:
    task = tasks.arithmetic(2, 2)
    held = tasks.problems(task, rng(1), 200, distinct=True)
    prompts = {problem.prompt for problem in held}
    assert len(prompts) == 200
    assert not prompts & {p.prompt for p in tasks.problems(task, rng(2), 2000, without=prompts)}
    with pytest.raises(ValueError, match=r"501 problems of arithmetic are wanted, and 500 were found"):
        tasks.problems(task, rng(3), 501, distinct=True)  # 5^3 terms, 2^2 signs
