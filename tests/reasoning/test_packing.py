"""Packing of completions: rows by hand and by a plain first fit, and log-probabilities that neighbours leave alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.reasoning import packing, sampler, tokenizer, transformer
from longhaul.reasoning.config import ModelConfig
from tests.helpers.quick import quick

WIDTH, STEPS, GROUP = 4, 6, 4
TINY = ModelConfig(width=16, layers=2, heads=2, kv_heads=1, head_dim=8, hidden=16)


def texts(lengths: Any, asked: Any, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """(prompts [B, P], completions [B, N]) of these lengths; a group has one prompt."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 23, (2, len(lengths), max(WIDTH, STEPS)))
    prompt = tokens[0][np.arange(len(lengths)) // GROUP * GROUP, :WIDTH]
    prompt = np.where(np.arange(WIDTH)[None] >= WIDTH - np.asarray(asked)[:, None], prompt, pad)
    text = np.where(np.arange(STEPS)[None] < np.asarray(lengths)[:, None], tokens[1][:, :STEPS], pad)
    return prompt.astype(np.int32), text.astype(np.int32)


def places(lengths: Any, asked: Any, problem: np.ndarray, room: int) -> packing.Packed:
    prompt, text = texts(lengths, asked, tokenizer.NONE)
    found: packing.Packed = quick(functools.partial(packing.packed, room=room, pad=tokenizer.NONE))(
        prompt, problem, text != tokenizer.NONE
    )
    return jax.tree.map(np.asarray, found)


def test_rows_by_hand() -> None:
    """A problem's longest is first, and brings the prompt but its last token; the next problem fills what is left."""
    found = places([2, 0, 3, 5, 1, 1, 1, 1], [3] * 4 + [2] * 4, np.repeat([7, 9], GROUP), 11)
    assert found.row.tolist() == [1, -1, 0, 0, 1, 1, 1, 1]
    assert found.before[[0, 2, 3, 4, 5, 6, 7]].tolist() == [2, 0, 2, 1, 0, 0, 0]
    assert found.start[[0, 2, 3, 4, 5, 6, 7]].tolist() == [2, 7, 2, 5, 6, 7, 8]
    assert (int(found.rows), found.length.tolist()) == (2, [2, 0, 3, 5, 1, 1, 1, 1])


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_a_first_fit(seed: int) -> None:
    """Completions of a problem lie apart; rows with its prompt come before others."""
    rng = np.random.default_rng(seed)
    lengths, mixed = rng.integers(0, STEPS + 1, 24), rng.permutation(24)
    asked, problem = np.repeat(rng.integers(1, WIDTH + 1, 6), GROUP), np.repeat(rng.permutation(6), GROUP)[mixed]
    asked = asked[mixed]
    free: list[int] = []
    prompts: list[set[int]] = []
    wanted = {}
    for which in sorted(range(24), key=lambda which: (problem[which], -lengths[which])):
        need = {True: lengths[which], False: lengths[which] + asked[which] - 1}
        fits = [(problem[which] not in prompts[row], row) for row in range(len(free))]
        fits = [(new, row) for new, row in fits if free[row] >= need[not new]]
        if lengths[which] == 0:
            continue
        if not fits:
            free, prompts = [*free, 13], [*prompts, set()]
        new, row = min(fits) if fits else (True, len(free) - 1)
        free[row] -= need[not new]
        prompts[row].add(problem[which])
        wanted[which] = row
    found = places(lengths, asked, problem, 13)
    assert {which: int(row) for which, row in enumerate(found.row) if row >= 0} == wanted
    assert int(found.rows) == len(free)


@pytest.mark.parametrize(
    ("family", "pad", "apart"),
    [
        ("llama", tokenizer.NONE, False),
        pytest.param("qwen2", tokenizer.NONE, True, marks=pytest.mark.slow),
        pytest.param("qwen3", tokenizer.PAD, False, marks=pytest.mark.slow),
    ],
)
def test_log_probabilities_are_those_of_rows_of_their_own(family: str, pad: int, apart: bool) -> None:
    """Though prompts have different lengths, and tokens are left out that do not count."""
    config = dataclasses.replace(TINY, family=family, pad=pad)
    params = quick(lambda key: transformer.init(key, config))(jax.random.key(0))
    rng = np.random.default_rng(0)
    prompt, text = texts([6, 1, 3, 2, 5, 0, 6, 1], [4] * 4 + [2] * 4, pad)
    counts = (text != pad) & (rng.random(text.shape) < 0.7)
    counts[1] = False

    problem = jnp.arange(8) // (1 if apart else GROUP)

    def by_rows(params: Any) -> Any:
        def read(row: packing.Row) -> Any:
            return packing.log_probs(config, params, row, jnp.asarray(text), 0.7)

        to = packing.packed(prompt, problem, counts, room=16, pad=pad)
        return packing.summed(read, to, jnp.asarray(prompt), jnp.asarray(text), room=16)

    wanted = quick(lambda params: sampler.log_probs(config, params, prompt, text, 0.7))(params)
    for one, other in zip(quick(by_rows)(params), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one)[counts], np.asarray(other)[counts], atol=2e-6)
        assert (np.asarray(one)[1] == 0.0).all()
