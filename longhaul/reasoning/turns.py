"""Completions of several turns: where one stops at a mark, a text is put behind it, and the policy goes on.

The text is a tool's result (reasoning/tools.py), or the answer's mark after a number of steps (s1, Muennighoff et al.
2025, arXiv 2501.19393). It was not sampled: `taken` is False for its tokens, and no loss counts them.

A later turn reads prompt and completion so far, by one program for a number of rows; the host writes between turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.reasoning.config import ModelConfig
from longhaul.reasoning.sampler import UNBOUNDED, Drawn, Sampling, sampler
from longhaul.reasoning.tokenizer import Tokeniser
from longhaul.runtime import device_memory
from longhaul.types import Key, Params

TOGETHER = 32
"""Completions that go on together, at most; the last ones of a turn are filled up to as many."""

Continue = Callable[[Params, Any, Drawn, Key], Drawn]
"""(params, prompts [B, P], first turns, keys [B]) -> whole completions; NumPy's arrays."""


class Turns(NamedTuple):
    """Later turns of completions."""

    go_on: Continue  # keys of a later turn are folds of the given ones
    program: Callable[[Params, tuple[int, int]], jax.stages.Compiled | None]
    """(parameters or their shapes, (B, P)) -> program of a later turn, compiled once; None without marks."""


def continuing(config: ModelConfig, sampling: Sampling, tokeniser: Tokeniser) -> Turns:
    """Later turns by these settings of sampling."""
    if not tokeniser.replies:
        return Turns(lambda params, prompt, drawn, keys: drawn, lambda params, prompts: None)
    length, together = sampling.length, min(TOGETHER, sampling.wave)
    sample = jax.jit(sampler(config, dataclasses.replace(sampling, group=1), tokeniser=tokeniser))
    made_for: dict[tuple[int, int], jax.stages.Compiled] = {}

    def program(params: Params, prompts: tuple[int, int]) -> jax.stages.Compiled:
        shape = min(together, prompts[0]), prompts[1] + length
        if shape not in made_for:
            so_far, most = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
            keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), shape[0]))
            made_for[shape] = device_memory.compiled(sample, params, so_far, keys, jnp.int32(UNBOUNDED), most)
        return made_for[shape]

    def whole(params: Params, prompt: Any, drawn: Drawn, keys: Key) -> Drawn:
        batch: Any = jax.tree.map(np.array, drawn)  # copies, to be written to
        prompt = np.asarray(prompt)
        begun, turn = np.zeros(len(prompt), int), 0
        going = np.ones(len(prompt), bool)
        while (going := _continued_rows(batch, begun, going, tokeniser)).any():
            filled = batch.written.sum(axis=1)
            of_turn = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, turn)
            for chunk in _chunks(np.flatnonzero(going), min(together, len(prompt))):
                so_far = np.full((len(chunk), prompt.shape[1] + length), tokeniser.pad, np.int32)
                for place, row in enumerate(chunk):
                    text = np.concatenate([prompt[row][prompt[row] != tokeniser.pad], batch.token[row, : filled[row]]])
                    so_far[place, -len(text) :] = text
                most = jnp.asarray(length - filled[chunk], jnp.int32)
                arguments = params, jnp.asarray(so_far), of_turn[chunk], jnp.int32(UNBOUNDED), most
                more = jax.device_get(program(params, prompt.shape)(*arguments))
                for place, row in enumerate(chunk):
                    begun[row] = filled[row]
                    for old, new in zip(batch, more, strict=True):
                        old[row, filled[row] :] = new[place, : length - filled[row]]
            turn += 1
        return batch

    return Turns(whole, program)


def _chunks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Parts of `size` rows; the last one is filled up with its first row."""
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    return [np.concatenate([part, np.full(size - len(part), part[0])]) for part in parts]


def _continued_rows(batch: Any, begun: np.ndarray, going: np.ndarray, tokeniser: Tokeniser) -> np.ndarray:
    """Rows that go on: their last turn, from `begun`, ends in a mark, and its reply, written here, leaves room."""
    after = np.zeros(len(going), bool)
    length = batch.token.shape[1]
    for row in np.flatnonzero(going):
        filled = int(batch.written[row].sum())
        last = tokeniser.decode(batch.token[row, begun[row] : filled])
        mark = next((mark for mark in tokeniser.replies if mark in last), None)
        if mark is not None:
            reply = tokeniser.replies[mark](tokeniser.decode(batch.token[row, :filled]))
            put = tokeniser.encode(reply)[: length - filled]
            batch.token[row, filled : filled + len(put)] = put
            batch.written[row, filled : filled + len(put)] = True
            after[row] = filled + len(put) < length
    return after
