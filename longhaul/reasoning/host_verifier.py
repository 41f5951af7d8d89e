"""Verifier on the host, for problems with many right answers: it adds the rewards to completions of the device.

A checker is Python, which no compiled program can hold. So it runs between sampling and learning, in the actor that
sampled; in an asynchronous run beside the learner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.device_verifier import Marks
from longhaul.reasoning.evaluate import Quality, scores
from longhaul.reasoning.sampler import UNBOUNDED, Bank, Completions, Drawn, Sampling, in_waves, judged, sampler
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.types import Key, Metrics, Params

Marking = Callable[[Completions, Metrics], tuple[Completions, Metrics]]
"""(sampled completions, sums over them) -> both with rewards; NumPy's arrays."""


def marks(task: Task, asked: Sequence[Problem], texts: Iterable[str]) -> Marks:
    """Marks of completions of as many problems by a task's checker. Raises ValueError for a reward not finite."""
    rows = []
    for problem, text in zip(asked, texts, strict=True):
        reward, written = float(task.reward(problem, text)), task.reading(text)
        if not math.isfinite(reward):
            raise ValueError(f"the checker of {task.name} gives {reward} for {text!r}; a reward must be finite")
        rows.append((reward, task.soundness(problem, text), len(written.steps) + written.unfinished))
    return Marks(*np.array(rows, np.float32).T)


def ended(token: np.ndarray, words: Tokeniser) -> np.ndarray:
    """Mask bool [B] of completions [B, N] with an end."""
    return np.asarray(np.isin(token, words.ends).any(axis=1))


def marking(task: Task, problems: Sequence[Problem], words: Tokeniser, group: int) -> Marking:
    """Function that checks completions of a bank of these problems, in groups."""

    def mark(data: Completions, metrics: Metrics) -> tuple[Completions, Metrics]:
        token = np.asarray(data.token)
        asked = [problems[int(place)] for place in np.asarray(data.problem)]
        known, sums = judged(data, marks(task, asked, map(words.decode, token)), ended(token, words), group)
        whole: Metrics = {name: np.asarray(sums[name], np.float32) for name in metrics}  # type: ignore[misc]
        return known, whole

    return mark


def quality(task: Task, asked: Sequence[Problem], drawn: Drawn, words: Tokeniser, samples: int) -> Quality:
    """Quality of completions, `samples` of each problem side by side: `evaluate.quality` on the host."""
    token = np.asarray(drawn.token)
    texts = [words.decode(row) for row in token]
    known = marks(task, [problem for problem in asked for _ in range(samples)], texts)
    answers = [task.reading(text).answer for text in texts]
    leaders = [_leader(answers[first : first + samples]) for first in range(0, len(texts), samples)]
    return scores(known, ended(token, words), np.asarray(drawn.written), leaders, samples)


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
