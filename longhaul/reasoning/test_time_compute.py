"""Test-time compute: accuracy at fixed weights by the budget of steps, by samples, and with an early stop.

The budget forces an answer after so many steps (s1, Muennighoff et al. 2025, arXiv 2501.19393); samples vote (Wang et
al. 2022, 2203.11171). All samples of a problem are drawn once: smaller numbers are parts of these, and the early stop
takes them in order, so that differences come from the rule alone and not from the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import self_consistency
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.evaluate import evaluate_reasoning, quality
from longhaul.reasoning.sampler import UNBOUNDED, Bank, Drawn, Sampling
from longhaul.reasoning.self_consistency import Draw, ReasoningOptimizer, texts
from longhaul.reasoning.tasks import Problem, Task
from longhaul.types import Key, Params


class ByBudget(NamedTuple):
    """Shares of right answers with chains of at most so many steps."""

    steps: int
    pass_at_1: float
    majority: float  # of all samples


class BySamples(NamedTuple):
    """Shares of right answers of so many samples of each problem, the mean over all parts of the samples."""

    samples: int
    majority: float
    some: float  # share of problems with a right sample: pass@k


class Stopped(NamedTuple):
    """Savings of the early stop."""

    drawn: float  # mean number of samples of a problem
    share: float  # of all samples
    accuracy: float  # share of right answers
    full: float  # share of right answers where all samples vote


class Thinking(NamedTuple):
    budgets: tuple[ByBudget, ...]
    samples: tuple[BySamples, ...]
    stop: Stopped

    def plain(self) -> dict[str, Any]:
        """Plain dicts and lists for JSON."""
        rows = {name: [each._asdict() for each in getattr(self, name)] for name in ("budgets", "samples")}
        return rows | {"stop": self.stop._asdict()}


def think(
    task: Task,
    asked: Sequence[Problem],
    bank: Bank,
    params: Params,
    key: Key,
    *,
    config: ModelConfig,
    sampling: Sampling,
    settings: self_consistency.Config,
) -> Thinking:
    """Accuracy of a policy on `asked`, the problems of `bank`, by budget, by samples, and with the early stop of
    `settings`.

    `settings.samples` equals `sampling.group`; budgets go from 0 steps to those of the longest problem.
    """
    if settings.samples != sampling.group:
        raise ValueError(f"samples is {settings.samples}; it must be the group, {sampling.group}")
    evaluate = evaluate_reasoning(config, sampling)
    found = []
    for steps in range(max(len(problem.steps) for problem in asked) + 1):
        scored, _ = jax.device_get(evaluate(params, bank, key, jnp.int32(steps)))
        found.append(ByBudget(steps, float(np.mean(scored.pass_at_1)), float(np.mean(scored.majority_at_k))))
    _, drawn = jax.device_get(evaluate(params, bank, key, jnp.int32(UNBOUNDED)))
    counts = [1 << power for power in range(sampling.group.bit_length()) if sampling.group % (1 << power) == 0]
    parts = sorted({*counts, sampling.group})
    return Thinking(
        tuple(found), tuple(by_samples(bank, drawn, sampling.group, count) for count in parts),
        stopped(task, asked, texts(drawn, sampling.group), settings),
    )  # fmt: skip


_quality = jax.jit(quality, static_argnums=2)


def by_samples(bank: Bank, drawn: Drawn, group: int, count: int) -> BySamples:
    """Accuracy of `count` samples of each problem, parts of `group` side by side; `count` divides `group`."""
    whole = jax.tree.map(lambda x: jnp.repeat(x, group // count, axis=0), bank)
    scored = jax.device_get(_quality(whole, drawn, count))
    return BySamples(count, float(np.mean(scored.majority_at_k)), float(np.mean(scored.pass_at_k)))


def again(asked: Sequence[Problem], drawn: Sequence[Sequence[tuple[str, float]]]) -> Draw:
    """Sampler that returns the earlier samples of these problems, in the same order."""
    left = {problem.prompt: iter(each) for problem, each in zip(asked, drawn, strict=True)}

    def draw(prompts: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
        return [[next(left[prompt]) for _ in range(count)] for prompt in prompts]

    return draw


def stopped(
    task: Task,
    asked: Sequence[Problem],
    drawn: Sequence[Sequence[tuple[str, float]]],
    settings: self_consistency.Config,
) -> Stopped:
    """Accuracy of drawn samples with an early stop, and of all of them."""
    prompts = [problem.prompt for problem in asked]

    def solved(lead: float) -> tuple[float, float]:
        """Mean samples of a problem and share of right answers."""
        rule = self_consistency.Config(settings.samples, settings.wave, lead, settings.select, cache=0)
        found = ReasoningOptimizer(task, again(asked, drawn), rule).solve(prompts)
        right = [each.chain is not None and each.chain.reward == 1.0 for each in found]
        return float(np.mean([each.drawn for each in found])), float(np.mean(right))

    count, accuracy = solved(settings.lead)
    return Stopped(count, count / settings.samples, accuracy, solved(0.0)[1])
