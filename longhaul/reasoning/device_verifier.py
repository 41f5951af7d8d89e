"""Completions checked on the device, where a problem has one right answer: its solution stands beside them as tokens.

What `tasks.read`, `Task.reward` and `Task.soundness` say of text, as arithmetic on whole batches; a test holds the two
together. Tasks with many right answers are the host's matter (`marking.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.reasoning import tokenizer


class Marks(NamedTuple):
    """What a checker says of completions; float32 [B], NumPy's or JAX's."""

    reward: Any
    soundness: Any
    steps: Any


def checked(solution: jax.Array, text: jax.Array) -> Marks:
    """What completions are worth beside the solutions, both [B, N]."""
    return Marks(rewards(solution, text), soundness(solution, text), steps(text))


def _before(found: jax.Array) -> jax.Array:
    """bool [B, N] -> how often it was True before each place, int32."""
    return jnp.cumsum(found, axis=1, dtype=jnp.int32) - found


def answers(text: jax.Array) -> jax.Array:
    """What stands after the first answer's mark up to the first end, moved to the front; [B, N], PAD behind."""
    rows, length = text.shape
    marked = _before(text == tokenizer.ANSWER) > 0
    inside = marked & (_before(text == tokenizer.END) == 0)
    place = jnp.where(inside, _before(inside), length)
    nothing = jnp.full((rows, length), tokenizer.PAD, text.dtype)
    return nothing.at[jnp.arange(rows)[:, None], place].set(text, mode="drop")


def rewards(solution: jax.Array, text: jax.Array) -> jax.Array:
    """1 where the answers of completions are those of the solutions, both [B, N], else 0: `Task.reward`."""
    ended = jnp.any(text == tokenizer.END, axis=1)
    return (ended & jnp.all(answers(solution) == answers(text), axis=1)).astype(jnp.float32)


def _heads(text: jax.Array) -> jax.Array:
    """bool [B, N]: before the answer's mark and the end."""
    stop = (text == tokenizer.ANSWER) | (text == tokenizer.END) | (text == tokenizer.PAD)
    return (_before(stop) == 0) & ~stop


def steps(text: jax.Array) -> jax.Array:
    """Written steps of completions [B, N], float32 [B]; one that is begun and not ended by `;` counts, too."""
    head = _heads(text)
    ends = head & (text == tokenizer.STEP)
    last = jnp.take_along_axis(text, jnp.maximum(jnp.sum(head, axis=1) - 1, 0)[:, None], axis=1)[:, 0]
    begun = jnp.any(head, axis=1) & (last != tokenizer.STEP)
    return (jnp.sum(ends, axis=1) + begun).astype(jnp.float32)


def soundness(solution: jax.Array, text: jax.Array) -> jax.Array:
    """The share of the completions' steps that are the solutions', float32 [B]: `Task.soundness`."""
    same = _before(solution != text) == 0
    same &= (solution == text) & _heads(solution) & _heads(text)
    common = jnp.sum(same & (text == tokenizer.STEP), axis=1).astype(jnp.float32)
    longer = jnp.maximum(steps(solution), steps(text))
    return jnp.where(longer == 0, 1.0, common / jnp.maximum(longer, 1.0))
