"""Decode steps are the full forward: of every family, behind padding, in bfloat16."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.reasoning import decode, transformer
from longhaul.reasoning.config import ModelConfig
from tests.helpers import reference_logits as reference
from tests.helpers.quick import quick

PROMPT, WHOLE, MORE = 6, 10, 7
MASK = np.arange(WHOLE)[None, :] >= np.array([[0], [4]])
"""Two rows, of 10 and of 6 tokens behind 4 of padding."""
ROWS = np.where(MASK, reference.TOKENS[:, :WHOLE], 0)


@pytest.fixture(autouse=True)
def rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of the full forward in one loop: that compiles sooner."""
    monkeypatch.setattr(transformer, "UNROLLED", 0)


def both(config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Logits [2, 4, V] of what follows each token behind the prompt: of the full forward, and step by step."""

    @quick
    def run(params: Any) -> tuple[jax.Array, jax.Array]:
        whole = transformer.forward(config, params, jnp.asarray(ROWS), jnp.asarray(MASK))
        mask = jnp.asarray(MASK[:, :PROMPT])
        _, kept = transformer.trunk(config, params, jnp.asarray(ROWS[:, :PROMPT]), mask, keeps=True)
        assert kept is not None
        kernels = decode.prepare(config, params, sum(decode.room(PROMPT, MORE)))

        def one(now: decode.Cache, token: jax.Array) -> tuple[decode.Cache, jax.Array]:
            logits, now = decode.step(config, kernels, token, now)
            return now, logits

        _, found = jax.lax.scan(one, decode.begin(kept, mask, MORE), jnp.asarray(ROWS[:, PROMPT:].T))
        return whole[:, PROMPT:], jnp.transpose(found, (2, 0, 1))

    return run(reference.params(config))


def relative(found: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))


FEW = ("llama3-rope",)
"""Families that are not slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in reference.CONFIGS]
)
def test_steps_are_the_full_forward(name: str) -> None:
    wanted, found = both(reference.CONFIGS[name])
    assert found.dtype == jnp.float32
    assert relative(found, wanted) < 3e-6


def test_bfloat16_stays_near() -> None:
    exact, rounded = both(dataclasses.replace(reference.CONFIGS["qwen3"], layers=1, precision="bf16"))
    assert rounded.dtype == jnp.float32
    assert 1e-5 < relative(rounded, exact) < 0.05


@pytest.mark.parametrize(
    ("piece", "ring", "read"),
    [
        pytest.param(64, 12, [1, 1, 1, 1], marks=pytest.mark.slow),
        (4, 12, [4, 3, 3, 3]),
        pytest.param(8, 4, [2, 2, 2, 2], marks=pytest.mark.slow),  # pieces of 4 in the last two
    ],
)
def test_attention_to_pieces_is_that_to_all_that_is_seen(
    piece: int, ring: int, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By products and written out, in parts of 2 slots; around the ring's end; and pieces that no row uses are not
    read."""
    monkeypatch.setattr(decode, "PIECE", piece)
    monkeypatch.setattr(decode, "PART", 1)  # twice as many of few rows
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 3, 8, 5))
    key, value = (jax.random.normal(each, (8 + ring, 2, 8, 5)) for each in keys[1:])
    asked, own = np.arange(8)[:, None] >= np.array([5, 6, 7, 6, 5]), np.minimum([0, 5, 2, 4, 1], ring - 1)
    hows = [quick(how) for how in (decode.attend_by_products, decode.attend_by_sums)]
    for place, pieces in zip((0, 3, 5 % ring, 11 % ring), read, strict=True):
        zero = jnp.zeros(5, jnp.int32)
        used = decode._attended_slots(
            decode.Cache((key,), (value,), jnp.asarray(asked), zero, jnp.asarray(own), jnp.int32(place))
        )
        seen = np.concatenate([asked, np.zeros((ring, 5), bool)])
        for row, count in enumerate(own):
            seen[8 + (place - np.arange(count + 1)) % ring, row] = True
        np.testing.assert_array_equal(used.seen, seen)
        assert used.pieces == pieces
        scores = np.where(seen[:, None, None], np.einsum("kgdb,skdb->skgb", query, key) / np.sqrt(8.0), -np.inf)
        shares = np.exp(scores - scores.max(axis=0))
        wanted = np.einsum("skgb,skdb->kgdb", shares / shares.sum(axis=0), value)
        for how in hows:
            np.testing.assert_allclose(how(query, key, value, used), wanted, rtol=1e-5, atol=1e-6)
