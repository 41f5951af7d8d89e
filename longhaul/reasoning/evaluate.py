"""Evaluation of reasoning on a fixed set of problems, with several completions of each.

pass@1 is the share of right completions, pass@k the share of problems that some completion of k solves (Chen et al.
2021, arXiv 2107.03374, with as many samples as k), majority@k the share of problems whose most frequent answer is right
(Wang et al. 2022, 2203.11171; of equal ones the first written). Soundness is the share of written steps that belong to
the problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import prng
from longhaul.reasoning import tokenizer, turns
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.sampler import UNBOUNDED, Bank, Drawn, Sampling, sampler
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.reasoning.verifier import Marks, answers, checked, ended, marks
from longhaul.runtime import device_memory
from longhaul.types import Key, Params


class Quality(NamedTuple):
    """Scores of each of M problems over its completions; float32 [M]."""

    pass_at_1: jax.Array
    pass_at_k: jax.Array
    majority_at_k: jax.Array
    soundness: jax.Array  # share of the written steps that belong to the problem
    reasoned: jax.Array  # share of completions that write a step at all
    steps: jax.Array  # mean number of written steps
    truncated: jax.Array  # share of completions that did not end
    length: jax.Array  # mean number of tokens


def votes(text: jax.Array, ends: jax.Array) -> jax.Array:
    """Votes int32 [M, K] of texts [M, K, N]: completions with the same answer; 0 for a completion without an end."""
    problems, samples, length = text.shape
    answer = answers(text.reshape(-1, length)).reshape(problems, samples, length)
    same = jnp.all(answer[:, :, None] == answer[:, None, :], axis=-1) & ends[:, None, :]
    return jnp.where(ends, jnp.sum(same, axis=2), 0)


def quality(problems: Bank, drawn: Drawn, samples: int) -> Quality:
    """Quality of completions, `samples` of each problem side by side."""
    text, solution = drawn.token, jnp.repeat(problems.solution, samples, axis=0)
    ends = jnp.any(text == tokenizer.END, axis=1)
    leaders = jnp.argmax(votes(text.reshape(-1, samples, text.shape[1]), ends.reshape(-1, samples)), axis=1)
    return scores(checked(solution, text), ends, drawn.written, leaders, samples)


def scores(known: Marks, ends: Any, written: Any, leaders: Any, samples: int) -> Quality:
    """Quality by marks, ends and tokens of completions and the place [M] of each leader; NumPy's or JAX's arrays."""

    def each(x: Any) -> Any:
        return x.astype(np.float32).reshape(-1, samples)

    right = each(known.reward)
    return Quality(
        pass_at_1=right.mean(axis=1),
        pass_at_k=right.max(axis=1),
        majority_at_k=right[np.arange(len(right)), leaders],
        soundness=each(known.soundness).mean(axis=1),
        reasoned=each(known.steps > 0.0).mean(axis=1),
        steps=each(known.steps).mean(axis=1),
        truncated=each(~ends).mean(axis=1),
        length=each(written.sum(axis=1)).mean(axis=1),
    )


def evaluate_reasoning(config: ModelConfig, sampling: Sampling) -> Callable[..., tuple[Quality, Drawn]]:
    """Compiled function (params, problems, key, budget of steps) -> (quality of `sampling.group` completions of each,
    completions). The default budget is unbounded."""
    sample = sampler(config, sampling)

    @jax.jit
    def evaluate(
        params: Params, problems: Bank, key: Key, budget: jax.Array | int = UNBOUNDED
    ) -> tuple[Quality, Drawn]:
        keys = prng.split(key, len(problems.prompt) * sampling.group)
        drawn = sample(params, problems.prompt, keys, jnp.int32(budget))
        return quality(problems, drawn, sampling.group), drawn

    return evaluate


# ---------------------------------------------------------------------------------------------------------- on the host


def quality_on_host(
    task: Task, problems: Sequence[Problem], drawn: Drawn, tokeniser: Tokeniser, samples: int
) -> Quality:
    """Quality of completions, `samples` of each problem side by side: `quality` by the task's checker."""
    token = np.asarray(drawn.token)
    texts = [tokeniser.decode(row) for row in token]
    known = marks(task, [problem for problem in problems for _ in range(samples)], texts)
    answers = [task.reading(text).answer for text in texts]
    leaders = [_leader(answers[first : first + samples]) for first in range(0, len(texts), samples)]
    return scores(known, ended(token, tokeniser), np.asarray(drawn.written), leaders, samples)


def _leader(answers: Sequence[str | None]) -> int:
    """Place of the first completion whose answer has most votes; a missing answer has none."""
    votes = Counter(answers) | {None: 0}
    return max(range(len(answers)), key=lambda place: (votes[answers[place]], -place))


def evaluate_on_host(
    task: Task, problems: Sequence[Problem], config: ModelConfig, sampling: Sampling, tokeniser: Tokeniser
) -> Callable[[Params, Bank, Key], tuple[Quality, Drawn]]:
    """Evaluation of a task that the host checks, like `evaluate_reasoning`; the bank is of these problems."""
    sample = jax.jit(sampler(config, sampling, tokeniser=tokeniser))
    go_on = turns.continuing(config, sampling, tokeniser).go_on
    compiled: list[jax.stages.Compiled] = []

    def evaluate(params: Params, posed: Bank, key: Key) -> tuple[Quality, Drawn]:
        keys = jax.random.split(key, len(posed.prompt) * sampling.group)
        arguments = params, posed.prompt, keys, jnp.int32(UNBOUNDED)
        if not compiled:
            compiled.append(device_memory.compiled(sample, *arguments))
        drawn = jax.device_get(compiled[0](*arguments))
        drawn = go_on(params, np.repeat(posed.prompt, sampling.group, axis=0), drawn, keys)
        return quality_on_host(task, problems, drawn, tokeniser, sampling.group), drawn

    return evaluate
