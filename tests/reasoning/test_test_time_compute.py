"""Chains chosen by hand-written tables, waves that stop, a cache that forgets what was not verified; then a model.

And completions written by hand: by steps, by samples, and with an early stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.reasoning import evaluate, sampler, tasks, test_time_compute, tokenizer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.test_time_compute import Chain, Config, ReasoningOptimizer, drawing
from tests.helpers.quick import language_model

TASK = tasks.arithmetic(1, 4)
PROMPT = "3+4-2="
RIGHT, LUCKY, WRONG = "3+4=2;2-2=0;>0$", "3-4=4;>0$", "3+4=2;2-2=1;>1$"


def chain(answer: str | None, soundness: float = 0.0, reward: float = 0.0, log_prob: float = -1.0) -> Chain:
    return Chain("", answer, (), log_prob, soundness, reward)


TABLE = [
    chain("1", 0.5),
    chain("1", 0.1),
    chain("0", 1.0, 1.0, -2.0),
    chain("1", 0.2),
    chain("0", 0.3, 1.0),
    chain(None),
]
"""1 has 3 votes of weight 0.8 in all, 0 has 2 of 1.3; one never ended."""


@pytest.mark.parametrize(("select", "place"), [("majority", 0), ("weighted", 2), ("verified", 2), ("best_of_n", 2)])
def test_chains_are_chosen_as_it_says(select: str, place: int) -> None:
    assert test_time_compute.choose(TABLE, select) is TABLE[place]


def test_votes_by_hand() -> None:
    assert test_time_compute.votes(TABLE, "majority") == {"1": 3.0, "0": 2.0}
    assert list(test_time_compute.votes(TABLE, "weighted")) == ["0", "1"]
    assert test_time_compute.votes([chain("b"), chain("a"), chain("a"), chain("b")], "majority") == {"b": 2, "a": 2}
    assert test_time_compute.choose([chain(None)], "majority") is None
    assert test_time_compute.choose([chain("2"), chain("2")], "verified") is not None  # none is accepted: the leader


def test_a_vote_is_settled_when_it_leads_or_can_not_be_caught() -> None:
    one, two = chain("1"), chain("2")
    assert not test_time_compute.settled([one], Config(samples=8))
    assert test_time_compute.settled([one, one], Config(samples=8))
    assert not test_time_compute.settled([one, one, two], Config(samples=8))
    assert test_time_compute.settled([one, one, two], Config(samples=3))  # nothing is left to be drawn
    assert test_time_compute.settled([one, one, one, two, two], Config(samples=5, lead=3.0))
    assert not test_time_compute.settled([one] * 6, Config(samples=8, lead=0.0))
    assert test_time_compute.settled([one, chain("0", 1.0, 1.0)], Config(samples=8, select="verified"))


class Script:
    """Gives texts in order, whoever asks, and counts them."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.drawn = list(texts), 0

    def __call__(self, prompts: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
        found = [[(self.texts[(self.drawn + i) % len(self.texts)], -1.0) for i in range(count)] for _ in prompts]
        self.drawn += count * len(prompts)
        return found


def test_waves_stop_early_and_majority_is_at_least_its_parts() -> None:
    script = Script(RIGHT, WRONG, RIGHT, RIGHT)
    found = ReasoningOptimizer(TASK, script, Config(samples=16, wave=4)).solve([PROMPT])[0]
    assert (found.answer, found.drawn, found.settled, script.drawn) == ("0", 4, True, 4)
    assert found.votes == {"0": 3.0, "1": 1.0}
    assert found.chain is not None
    assert found.chain.text == RIGHT
    never = ReasoningOptimizer(TASK, Script(RIGHT, WRONG), Config(samples=6, wave=4)).solve([PROMPT])[0]
    assert (never.drawn, never.settled) == (6, False)


def test_the_cache_keeps_answers_of_a_version_and_facts_for_good() -> None:
    other = "1+1="
    script = Script(RIGHT)
    made = ReasoningOptimizer(TASK, script, Config(samples=2, wave=2))
    first = made.solve([PROMPT, other])
    assert script.drawn == 4
    again = made.solve([other, PROMPT])
    assert script.drawn == 4
    assert [each.drawn for each in again] == [0, 0]
    assert [each.answer for each in again] == [each.answer for each in reversed(first)]
    made.update(script, version=1)
    assert made.solve([PROMPT])[0].drawn == 0  # verified: a fact
    assert made.solve([other])[0].drawn == 2  # right chains of another problem
    assert [prompt for prompt, _ in made.verified()] == [PROMPT]
    lucky = ReasoningOptimizer(TASK, Script(LUCKY), Config(samples=2, wave=2))
    lucky.solve([PROMPT])
    lucky.update(Script(LUCKY), version=1)
    assert lucky.solve([PROMPT])[0].drawn == 2  # the answer is right, and its steps are not


def test_the_least_used_is_forgotten_first() -> None:
    made = ReasoningOptimizer(TASK, Script(RIGHT), Config(samples=2, wave=2, cache=2))
    made.solve(["1+1="])
    made.solve(["2+1="])
    made.solve(["1+1="])
    made.solve(["3+1="])
    assert [made.solve([prompt])[0].drawn for prompt in ("1+1=", "2+1=")] == [0, 2]
    nothing = ReasoningOptimizer(TASK, Script(RIGHT), Config(samples=2, wave=2, cache=0))
    assert [nothing.solve([PROMPT])[0].drawn for _ in range(2)] == [2, 2]


@pytest.mark.parametrize("prompt", ["", "3+4", "3+4*2=", "3+9=", "12+3=", "3+4-2=0"])
def test_a_prompt_that_is_no_problem_is_named(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"looks like 3\+4-2=|modulo 5"):
        ReasoningOptimizer(TASK, Script(RIGHT)).solve([prompt])


@pytest.mark.parametrize("task", [TASK, tasks.addition(1, 3), tasks.countdown()])
def test_a_prompt_says_what_the_problem_is(task: tasks.Task) -> None:
    assert task.posed is not None
    rng = np.random.default_rng(1)
    for problem in tasks.problems(task, rng, 50):
        assert task.posed(problem.prompt) == problem


def test_a_model_draws_within_its_budget_and_others_each_time() -> None:
    config = ModelConfig(width=16, layers=1, heads=1, kv_heads=1, head_dim=16, hidden=16)
    params = language_model(config)
    draw: Callable[..., list[list[tuple[str, float]]]] = drawing(
        config, params, sampler.Sampling(12), max_reasoning_steps=1
    )
    one, two = draw([PROMPT, "1+1="], 3)
    assert [len(one), len(two)] == [3, 3]
    texts = [text for text, _ in one + two]
    assert len(set(texts)) > 1
    for text, log_prob in one + two:
        assert text.partition(">")[0].count(";") <= 1
        assert -np.log(len(tokenizer.CHARACTERS)) * 3 < log_prob < 0.0
    assert [text for text, _ in draw([PROMPT, "1+1="], 3)[0]] != [text for text, _ in one]


# ------------------------------------------------------------------------------ by steps, samples and an early stop

LENGTH, GROUP = 16, 4
SOLVED = {"1+1=": "1+1=2;>2$", PROMPT: RIGHT}
MISSED = {"1+1=": [0], PROMPT: [3]}
"""Wrong ones of four samples."""


def scripted(*_: Any) -> Any:
    """A policy that solves what it has the steps for, but for `MISSED`."""

    def evaluated(params: Any, bank: sampler.Bank, key: Any, budget: Any) -> Any:
        texts = [
            right if right.count(";") <= int(budget) and i not in MISSED[prompt] else ">4$"
            for prompt, right in SOLVED.items()
            for i in range(GROUP)
        ]
        rows = [tokenizer.encode(text) for text in texts]
        token = jnp.array([row + [tokenizer.PAD] * (LENGTH - len(row)) for row in rows], jnp.int32)
        written = token != tokenizer.PAD
        drawn = sampler.Drawn(token, written, written, *[jnp.zeros(token.shape)] * 2)
        return evaluate.quality(bank, drawn, GROUP), drawn

    return evaluated


@pytest.mark.slow
def test_steps_samples_and_the_early_stop_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_time_compute, "evaluate_reasoning", scripted)
    assert TASK.posed is not None
    asked = [TASK.posed(prompt) for prompt in SOLVED]
    bank = sampler.bank(TASK, asked, np.random.default_rng(0), LENGTH)
    how = sampler.Sampling(LENGTH, GROUP)
    settings = Config(samples=GROUP, wave=1, lead=2.0)
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
                       sampling=sampler.Sampling(group=4), settings=Config(samples=8))  # fmt: skip
