"""Verifier on the device, for problems with one right answer: completions are compared with solutions as tokens.

It computes `tasks.read`, `Task.reward` and `Task.soundness` as arithmetic on whole batches; a test compares the two.
Tasks with many right answers are checked on the host (host_verifier.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.reasoning import tokenizer


class Marks(NamedTuple):
    """Scores of completions by a checker; float32 [B], NumPy's or JAX's."""

    reward: Any
    soundness: Any
    steps: Any


def checked(solution: jax.Array, text: jax.Array) -> Marks:
    """Marks of completions against the solutions, both [B, N]."""
    return Marks(rewards(solution, text), soundness(solution, text), steps(text))


def _before(found: jax.Array) -> jax.Array:
    """Number of True before each place of a mask [B, N], int32."""
    return jnp.cumsum(found, axis=1, dtype=jnp.int32) - found


def answers(text: jax.Array) -> jax.Array:
    """Tokens between the first answer's mark and the first end, moved to the front; [B, N], PAD behind."""
    rows, length = text.shape
    marked = _before(text == tokenizer.ANSWER) > 0
    inside = marked & (_before(text == tokenizer.END) == 0)
    place = jnp.where(inside, _before(inside), length)
    nothing = jnp.full((rows, length), tokenizer.PAD, text.dtype)
    return nothing.at[jnp.arange(rows)[:, None], place].set(text, mode="drop")


def rewards(solution: jax.Array, text: jax.Array) -> jax.Array:
    """Rewards of completions, 1 where the answers are those of the solutions, both [B, N], else 0: `Task.reward`."""
    ended = jnp.any(text == tokenizer.END, axis=1)
    return (ended & jnp.all(answers(solution) == answers(text), axis=1)).astype(jnp.float32)


def _heads(text: jax.Array) -> jax.Array:
    """Mask bool [B, N] of tokens before the answer's mark and the end."""
    stop = (text == tokenizer.ANSWER) | (text == tokenizer.END) | (text == tokenizer.PAD)
    return (_before(stop) == 0) & ~stop


def steps(text: jax.Array) -> jax.Array:
    """Number of written steps of completions [B, N], float32 [B]; a step without its final `;` counts too."""
    head = _heads(text)
    ends = head & (text == tokenizer.STEP)
    last = jnp.take_along_axis(text, jnp.maximum(jnp.sum(head, axis=1) - 1, 0)[:, None], axis=1)[:, 0]
    begun = jnp.any(head, axis=1) & (last != tokenizer.STEP)
    return (jnp.sum(ends, axis=1) + begun).astype(jnp.float32)


def soundness(solution: jax.Array, text: jax.Array) -> jax.Array:
    """Share of the completions' steps that are the solutions', float32 [B]: `Task.soundness`."""
    same = _before(solution != text) == 0
    same &= (solution == text) & _heads(solution) & _heads(text)
    common = jnp.sum(same & (text == tokenizer.STEP), axis=1).astype(jnp.float32)
    longer = jnp.maximum(steps(solution), steps(text))
    return jnp.where(longer == 0, 1.0, common / jnp.maximum(longer, 1.0))
