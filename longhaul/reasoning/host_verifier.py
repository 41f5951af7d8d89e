"""Completions checked on the host, where a problem has many right answers: what the device sampled gets its rewards.

A checker is Python, which no compiled program holds. So it runs between sampling and learning, in the actor that
sampled: of an asynchronous run beside the learner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.device_verifier import Marks
from longhaul.reasoning.evaluate import Quality
from longhaul.reasoning.sampler import UNBOUNDED, Bank, Completions, Drawn, Sampling, in_waves, judged, sampler
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.types import Key, Metrics, Params

Marking = Callable[[Completions, Metrics], tuple[Completions, Metrics]]
"""(completions as they were sampled, sums over them) -> both with rewards; NumPy's arrays."""


def marks(task: Task, asked: Sequence[Problem], texts: Sequence[str]) -> Marks:
    """What a task's checker says of completions of as many problems. Raises ValueError where a reward is no number."""
    rewards = []
    for problem, text in zip(asked, texts, strict=True):
        reward = float(task.reward(problem, text))
        if not math.isfinite(reward):
            raise ValueError(f"the checker of {task.name} gives {reward} for {text!r}; a reward must be finite")
        rewards.append(reward)
    sound = [task.soundness(problem, text) for problem, text in zip(asked, texts, strict=True)]
    read = [task.reading(text) for text in texts]
    steps = [len(each.steps) + each.unfinished for each in read]
    return Marks(*(np.array(values, np.float32) for values in (rewards, sound, steps)))


def ended(token: np.ndarray, words: Tokeniser) -> np.ndarray:
    """Which completions [B, N] have an end; bool [B]."""
    return np.asarray(np.isin(token, words.ends).any(axis=1))


def marking(task: Task, problems: Sequence[Problem], words: Tokeniser, group: int) -> Marking:
    """Checks completions of a bank of these problems, in groups."""

    def mark(data: Completions, told: Metrics) -> tuple[Completions, Metrics]:
        token = np.asarray(data.token)
        asked = [problems[int(place)] for place in np.asarray(data.problem)]
        found = marks(task, asked, [words.decode(row) for row in token])
        known, sums = judged(data, found, ended(token, words), group)
        whole: Metrics = {name: np.asarray(sums[name], np.float32) for name in told}  # type: ignore[misc]
        return known, whole

    return mark


def quality(task: Task, asked: Sequence[Problem], drawn: Drawn, words: Tokeniser, samples: int) -> Quality:
    """`quality.quality` on the host: what completions are worth, `samples` of each problem side by side."""
    token = np.asarray(drawn.token)
    texts = [words.decode(row) for row in token]
    found = marks(task, [problem for problem in asked for _ in range(samples)], texts)
    answers = [task.reading(text).answer for text in texts]
    leaders = [_leader(answers[first : first + samples]) for first in range(0, len(texts), samples)]

    def each(x: Any) -> np.ndarray:
        return np.asarray(x, np.float32).reshape(-1, samples)

    right = each(found.reward)
    best: Any = right.max(axis=1)
    picked: Any = right[np.arange(len(right)), leaders]
    means: dict[str, Any] = {
        "pass_at_1": right,
        "soundness": each(found.soundness),
        "reasoned": each(found.steps > 0.0),
        "steps": each(found.steps),
        "truncated": each(~ended(token, words)),
        "length": each(np.sum(drawn.written, axis=1)),
    }
    return Quality(
        pass_at_k=best,
        majority_at_k=picked,
        **{name: value.mean(axis=1) for name, value in means.items()},
    )


def evaluating(
    task: Task, asked: Sequence[Problem], config: ModelConfig, how: Sampling, words: Tokeniser
) -> Callable[[Params, Bank, Key], tuple[Quality, Drawn]]:
    """`quality.evaluate_reasoning` of a task that the host checks; the bank is of these problems."""
    sample = jax.jit(in_waves(sampler(config, how.length, how.temperature, words=words), how.wave))

    def evaluate(params: Params, posed: Bank, key: Key) -> tuple[Quality, Drawn]:
        prompts = jnp.repeat(posed.prompt, how.group, axis=0)
        drawn = jax.device_get(sample(params, prompts, key, jnp.int32(UNBOUNDED)))
        return quality(task, asked, drawn, words, how.group), drawn

    return evaluate


def _leader(answers: Sequence[str | None]) -> int:
    """The first completion whose answer has most votes; who says nothing has none."""
    votes = Counter(answers) | {None: 0}
    return max(range(len(answers)), key=lambda place: (votes[answers[place]], -place))
