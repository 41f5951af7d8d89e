"""Verifiers of completions: on the device for problems with one right answer, on the host for all others.

The device compares completions with solutions as tokens: `tasks.read`, `Task.reward` and `Task.soundness` as arithmetic
on whole batches; a test compares the two. A task's own checker is Python, which no compiled program can hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import tokenizer
from longhaul.reasoning.tasks import Problem, Task
from longhaul.reasoning.tokenizer import Tokeniser


class Marks(NamedTuple):
    """Scores of completions by a checker; float32 [B], NumPy's or JAX's."""

    reward: Any
    soundness: Any
    steps: Any


def checked(solution: jax.Array, text: jax.Array) -> Marks:
    """Marks of completions against the solutions, both [B, N]."""
    return Marks(rewards(solution, text), soundness(solution, text), steps(text))


def _count_before(flag: jax.Array) -> jax.Array:
    """Number of True before each place of a mask [B, N], int32."""
    return jnp.cumsum(flag, axis=1, dtype=jnp.int32) - flag


def answers(text: jax.Array) -> jax.Array:
    """Tokens between the first answer's mark and the first end, moved to the front; [B, N], PAD behind."""
    rows, length = text.shape
    marked = _count_before(text == tokenizer.ANSWER) > 0
    inside = marked & (_count_before(text == tokenizer.END) == 0)
    place = jnp.where(inside, _count_before(inside), length)
    nothing = jnp.full((rows, length), tokenizer.PAD, text.dtype)
    return nothing.at[jnp.arange(rows)[:, None], place].set(text, mode="drop")


def rewards(solution: jax.Array, text: jax.Array) -> jax.Array:
    """Rewards of completions, 1 where the answers are those of the solutions, both [B, N], else 0: `Task.reward`."""
    ended = jnp.any(text == tokenizer.END, axis=1)
    return (ended & jnp.all(answers(solution) == answers(text), axis=1)).astype(jnp.float32)


def _before_answer(text: jax.Array) -> jax.Array:
    """Mask bool [B, N] of tokens before the answer's mark and the end."""
    stop = (text == tokenizer.ANSWER) | (text == tokenizer.END) | (text == tokenizer.PAD)
    return (_count_before(stop) == 0) & ~stop


def steps(text: jax.Array) -> jax.Array:
    """Number of written steps of completions [B, N], float32 [B]; a step without its final `;` counts too."""
    head = _before_answer(text)
    ends = head & (text == tokenizer.STEP)
    last = jnp.take_along_axis(text, jnp.maximum(jnp.sum(head, axis=1) - 1, 0)[:, None], axis=1)[:, 0]
    begun = jnp.any(head, axis=1) & (last != tokenizer.STEP)
    return (jnp.sum(ends, axis=1) + begun).astype(jnp.float32)


def soundness(solution: jax.Array, text: jax.Array) -> jax.Array:
    """Share of the completions' steps that are the solutions', float32 [B]: `Task.soundness`."""
    same = _count_before(solution != text) == 0
    same &= (solution == text) & _before_answer(solution) & _before_answer(text)
    common = jnp.sum(same & (text == tokenizer.STEP), axis=1).astype(jnp.float32)
    longer = jnp.maximum(steps(solution), steps(text))
    return jnp.where(longer == 0, 1.0, common / jnp.maximum(longer, 1.0))


# ---------------------------------------------------------------------------------------------------------- on the host


def marks(task: Task, problems: Sequence[Problem], texts: Iterable[str]) -> Marks:
    """Marks of completions of as many problems by a task's checker. Raises ValueError for a reward not finite."""
    rows = []
    for problem, text in zip(problems, texts, strict=True):
        reward, written = float(task.reward(problem, text)), task.reading(text)
        if not math.isfinite(reward):
            raise ValueError(f"the checker of {task.name} gives {reward} for {text!r}; a reward must be finite")
        rows.append((reward, task.soundness(problem, text), len(written.steps) + written.unfinished))
    return Marks(*np.array(rows, np.float32).T)


def ended(token: np.ndarray, tokeniser: Tokeniser) -> np.ndarray:
    """Mask bool [B] of completions [B, N] with an end, or with padding behind the text that stops them."""
    ends = np.asarray(np.isin(token, tokeniser.ends).any(axis=1))
    return ends if tokeniser.stop is None else ends | (token[:, -1] == tokeniser.pad)
