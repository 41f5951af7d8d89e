"""Packing of completions: those of different lengths side by side in rows of a fixed number of tokens, by first fit of
the longest (Krell et al. 2021, arXiv 2107.02027), so that a learner reads no padding.

A token sees its own completion and its prompt alone, and its position counts from its prompt's first token: results are
those of a row for each completion, up to rounding. Only tokens that count in a loss are laid, with those before them.

Where we differ: completions of a problem have their prompt once in a row (as in Liu et al. 2025, 2506.05433), and there
are as many rows as a batch needs, over which a learner loops: no shape depends on the lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.reasoning import sampler, transformer
from longhaul.reasoning.config import ModelConfig
from longhaul.types import Params


class Packed(NamedTuple):
    """Places of B completions in rows.

    A completion of n tokens takes n places: of its prompt's last token and of all its tokens but the last. So each
    place predicts one of its tokens. The prompt's other tokens are before those of the row's first of its problem.
    """

    problem: jax.Array  # int32 [B]
    row: jax.Array  # int32 [B]; -1 where no token counts
    start: jax.Array  # int32 [B]: place of the prompt's last token
    before: jax.Array  # int32 [B]: tokens of the prompt before it; 0 where another completion brought them
    asked: jax.Array  # int32 [B]: tokens of the prompt
    length: jax.Array  # int32 [B]: tokens up to the last that counts
    rows: jax.Array  # int32: rows in use


class Row(NamedTuple):
    """Row of L places; B completions of at most N tokens."""

    token: jax.Array  # int32 [L]
    places: transformer.Places
    target: jax.Array  # int32 [L]: number among the B * N tokens of the one that a place predicts; B * N for none
    here: jax.Array  # bool [B]: completions of this row


def packed(prompt: jax.Array, problem: jax.Array, counts: jax.Array, *, room: int, pad: int) -> Packed:
    """Rows of `room` places for completions of problems [B] with prompts [B, P], padded on the left.

    `counts` [B, N] is not 0 where a token counts. `room` must be at least P + N - 1.
    """
    number, steps = counts.shape
    prompt_lengths = jnp.sum(prompt != pad, axis=1, dtype=jnp.int32)
    length = jnp.max(jnp.where(counts != 0, jnp.arange(1, steps + 1)[None], 0), axis=1).astype(jnp.int32)
    order = jnp.lexsort((-length, problem))
    each = jnp.arange(number)

    def put(now: tuple[jax.Array, jax.Array], which: jax.Array) -> tuple[Any, Any]:
        free, last = now  # [B] of the rows: free places; the last problem whose prompt is there
        same_problem = last == problem[which]
        before = jnp.where(same_problem, 0, prompt_lengths[which] - 1)
        fits = before + length[which] <= free
        row = jnp.argmin(jnp.where(fits, each + number * ~same_problem, 2 * number)).astype(jnp.int32)
        used, begin = length[which] > 0, room - free[row]
        taken = jnp.where(used, before[row] + length[which], 0)
        after = free.at[row].add(-taken), last.at[row].set(jnp.where(used, problem[which], last[row]))
        return after, (jnp.where(used, row, -1), begin + before[row], before[row])

    empty = jnp.full(number, room, jnp.int32), jnp.full(number, -1, jnp.int32)
    _, places = jax.lax.scan(put, empty, order)
    row, start, before = (jnp.zeros_like(x).at[order].set(x) for x in places)
    return Packed(problem, row, start, before, prompt_lengths, length, jnp.max(row) + 1)


def laid(to: Packed, prompt: jax.Array, text: jax.Array, number: jax.Array, *, room: int) -> Row:
    """Row `number` of completions [B, N] of prompts [B, P]."""
    (count, steps), width = text.shape, prompt.shape[1]
    place, in_row = jnp.arange(room), to.row == number
    begin, end = (x[:, None] for x in (to.start - to.before, to.start + to.length))
    inside = in_row[:, None] & (begin <= place[None]) & (place[None] < end)  # [B, L], one of each place at most
    used, own = jnp.any(inside, axis=0), jnp.argmax(inside, axis=0)
    step = place - to.start[own]  # of the completion's token that the place predicts; below 0 in the prompt
    asking = step < 0
    read = jnp.where(
        step > 0,
        text[own, jnp.clip(step - 1, 0, steps - 1)],
        prompt[own, jnp.clip(width - 1 + step, 0, width - 1)],
    )
    problem = to.problem[own]
    same = (own[:, None] == own[None]) | (asking[None] & (problem[:, None] == problem[None]))
    seen = same & used[None] & jnp.tril(jnp.ones((room, room), bool))
    position = jnp.where(used, to.asked[own] - 1 + step, 0)
    target = jnp.where(used & ~asking, own * steps + step, count * steps)
    return Row(jnp.where(used, read, 0), transformer.Places(position[None], seen[None]), target, in_row)


def summed(function: Callable[[Row], Any], to: Packed, prompt: jax.Array, text: jax.Array, *, room: int) -> Any:
    """Sum of function(row) over the rows of completions [B, N] of prompts [B, P]."""

    def of_row(number: jax.Array) -> Any:
        return function(laid(to, prompt, text, number, room=room))

    def add(number: jax.Array, sums: Any) -> Any:
        return jax.tree.map(jnp.add, sums, of_row(number))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_row, jnp.int32(0)))
    return jax.lax.fori_loop(0, to.rows, add, zeros)


def log_probs(
    config: ModelConfig, params: Params, row: Row, text: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies as of `sampler.log_probs`, [B, N], of the tokens that `row` predicts; 0 for
    others."""
    hidden, _ = transformer.trunk(config, params, row.token[None], row.places)
    target = text.reshape(-1)[jnp.minimum(row.target, text.size - 1)]
    predicted = sampler.predicted(config, params, hidden[0], target, temperature)
    whole = (jnp.zeros(text.size).at[row.target].set(x, mode="drop").reshape(text.shape) for x in predicted)
    chosen, entropy = whole
    return chosen, entropy
