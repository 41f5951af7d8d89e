"""Verifier on the host, for problems with many right answers: it adds the rewards to completions of the device.

A checker is Python, which no compiled program can hold. So it runs between sampling and learning, in the actor that
sampled; in an asynchronous run beside the learner.
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
"""(sampled completions, sums over them) -> both with rewards; NumPy's arrays."""


def marks(task: Task, asked: Sequence[Problem], texts: Sequence[str]) -> Marks:
    """Marks of completions of as many problems by a task's checker. Raises ValueError for a reward not finite."""
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
    """Mask bool [B] of completions [B, N] with an end."""
    return np.asarray(np.isin(token, words.ends).any(axis=1))


def marking(task: Task, problems: Sequence[Problem], words: Tokeniser, group: int) -> Marking:
    """Function that checks completions of a bank of these problems, in groups."""

    def mark(data: Completions, metrics: Metrics) -> tuple[Completions, Metrics]:
        token = np.asarray(data.token)
        asked = [problems[int(place)] for place in np.asarray(data.problem)]
        scores = marks(task, asked, [words.decode(row) for row in token])
        known, sums = judged(data, scores, ended(token, words), group)
        whole: Metrics = {name: np.asarray(sums[name], np.float32) for name in metrics}  # type: ignore[misc]
        return known, whole

    return mark


def quality(task: Task, asked: Sequence[Problem], drawn: Drawn, words: Tokeniser, samples: int) -> Quality:
    """Quality of completions, `samples` of each problem side by side: `evaluate.quality` on the host."""
    token = np.asarray(drawn.token)
    texts = [words.decode(row) for row in token]
    scores = marks(task, [problem for problem in asked for _ in range(samples)], texts)
    answers = [task.reading(text).answer for text in texts]
    leaders = [_leader(answers[first : first + samples]) for first in range(0, len(texts), samples)]

    def each(x: Any) -> np.ndarray:
        return np.asarray(x, np.float32).reshape(-1, samples)

    right = each(scores.reward)
    best: Any = right.max(axis=1)
    picked: Any = right[np.arange(len(right)), leaders]
    means: dict[str, Any] = {
        "pass_at_1": right,
        "soundness": each(scores.soundness),
        "reasoned": each(scores.steps > 0.0),
        "steps": each(scores.steps),
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
    """Evaluation of a task that the host checks, like `evaluate.evaluate_reasoning`; the bank is of these problems."""
    sample = jax.jit(in_waves(sampler(config, how.length, how.temperature, words=words), how.wave))

    def evaluate(params: Params, posed: Bank, key: Key) -> tuple[Quality, Drawn]:
        prompts = jnp.repeat(posed.prompt, how.group, axis=0)
        drawn = jax.device_get(sample(params, prompts, key, jnp.int32(UNBOUNDED)))
        return quality(task, asked, drawn, words, how.group), drawn

    return evaluate


def _leader(answers: Sequence[str | None]) -> int:
    """Place of the first completion whose answer has most votes; a missing answer has none."""
    votes = Counter(answers) | {None: 0}
    return max(range(len(answers)), key=lambda place: (votes[answers[place]], -place))
