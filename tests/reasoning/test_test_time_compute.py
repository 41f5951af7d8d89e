"""Test-time compute of completions written by hand: by steps, by samples, and with an early stop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.reasoning import (
    evaluate as quality,
)
from longhaul.reasoning import sampler, tasks, test_time_compute, tokenizer
from longhaul.reasoning.config import ModelConfig

TASK = tasks.arithmetic(1, 2)
LENGTH, GROUP = 16, 4
RIGHT = {"1+1=": "1+1=2;>2$", "3+4-2=": "3+4=2;2-2=0;>0$"}
WRONG = {"1+1=": [0], "3+4-2=": [3]}
"""Wrong ones of four samples."""


def scripted(*_: Any) -> Any:
    """A policy that solves what it has the steps for, but for `WRONG`."""

    def evaluate(params: Any, bank: sampler.Bank, key: Any, budget: Any) -> Any:
        texts = [
            right if right.count(";") <= int(budget) and i not in WRONG[prompt] else ">4$"
            for prompt, right in RIGHT.items()
            for i in range(GROUP)
        ]
        rows = [tokenizer.encode(text) for text in texts]
        token = jnp.array([row + [tokenizer.PAD] * (LENGTH - len(row)) for row in rows], jnp.int32)
        written = token != tokenizer.PAD
        drawn = sampler.Drawn(token, written, written, jnp.zeros(token.shape))
        return quality.quality(bank, drawn, GROUP), drawn

    return evaluate


def test_steps_samples_and_the_early_stop_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_time_compute, "evaluate_reasoning", scripted)
    assert TASK.posed is not None
    asked = [TASK.posed(prompt) for prompt in RIGHT]
    bank = sampler.bank(TASK, asked, np.random.default_rng(0), LENGTH)
    how = sampler.Sampling(LENGTH, GROUP)
    settings = test_time_compute.Config(samples=GROUP, wave=1, lead=2.0)
    found = test_time_compute.think(TASK, asked, bank, {}, jax.random.key(0), config=ModelConfig(), sampling=how,
                           settings=settings)  # fmt: skip
    # Three of four samples are right where the budget reaches the problem's one or two steps.
    assert [tuple(each) for each in found.budgets] == [(0, 0.0, 0.0), (1, 0.375, 0.5), (2, 0.75, 1.0)]
    # Of two samples that disagree the first is believed: wrong for one problem, right for the other.
    assert [tuple(each) for each in found.samples] == [(1, 0.75, 0.75), (2, 0.75, 1.0), (4, 1.0, 1.0)]
    # wrong, right, right, right takes all four; right, right takes two.
    assert tuple(found.stop) == (3.0, 0.75, 1.0, 1.0)
    assert found.plain()["samples"][1] == {"samples": 2, "majority": 0.75, "some": 1.0}


def test_samples_that_are_not_the_group_are_named() -> None:
    with pytest.raises(ValueError, match="samples is 8; it must be the group, 4"):
        test_time_compute.think(TASK, [], None, {}, jax.random.key(0), config=ModelConfig(),  # type: ignore[arg-type]
                       sampling=sampler.Sampling(group=4), settings=test_time_compute.Config(samples=8))  # fmt: skip
