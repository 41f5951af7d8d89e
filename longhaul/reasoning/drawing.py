"""Chains of a language model for `ReasoningOptimizer`: prompts as text, in batches that compile once."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning import tokenizer
from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.sampler import UNBOUNDED, Drawn, in_waves, sampler
from longhaul.reasoning.self_consistency import Draw
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.types import Params

ROOM, ROWS = 8, 64
"""Prompts are padded to multiples of so many tokens, and so many completions are decoded together."""


def drawing(
    config: ModelConfig,
    params: Params,
    *,
    length: int,
    temperature: float = 1.0,
    max_reasoning_steps: int = UNBOUNDED,
    seed: int = 0,
    words: Tokeniser = tokenizer.TOKENISER,
) -> Draw:
    """Draws completions of at most `length` tokens and `max_reasoning_steps` steps, each call others.

    After as many steps the answer's mark is put there. Raises ValueError for a text with unknown characters, and for a
    bound where `words` have no such mark.
    """
    if max_reasoning_steps < 0:
        raise ValueError(f"max_reasoning_steps is {max_reasoning_steps}; it must be at least 0")
    if max_reasoning_steps < UNBOUNDED and words.answer == tokenizer.NONE:
        raise ValueError(f"max_reasoning_steps is {max_reasoning_steps}, and this vocabulary has no mark of an answer")
    sample = jax.jit(in_waves(sampler(config, length, temperature, words=words), ROWS))
    calls = 0

    def draw(prompts: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
        nonlocal calls
        encoded = [words.encode(prompt) for prompt in prompts for _ in range(count)]
        room = -(-max(map(len, encoded)) // ROOM) * ROOM
        rows = 1 << (len(encoded) - 1).bit_length()  # so that few shapes are compiled
        padded = [[words.pad] * (room - len(each)) + each for each in encoded]
        padded += [padded[0]] * (rows - len(padded))
        key = jax.random.fold_in(jax.random.key(seed), calls)
        calls += 1
        drawn = jax.device_get(sample(params, jnp.asarray(np.array(padded, np.int32)), key,
                                      jnp.int32(max_reasoning_steps)))  # fmt: skip
        return texts(drawn, count, words)[: len(prompts)]

    return draw


def texts(drawn: Drawn, group: int, words: Tokeniser = tokenizer.TOKENISER) -> list[list[tuple[str, float]]]:
    """Of completions in groups side by side each one's text, and the mean log-probability of what was chosen of it."""
    means = np.asarray(drawn.log_prob).sum(axis=1) / np.maximum(np.asarray(drawn.taken).sum(axis=1), 1)
    rows = [(words.decode(row), float(mean)) for row, mean in zip(np.asarray(drawn.token), means, strict=True)]
    return [rows[first : first + group] for first in range(0, len(rows), group)]
