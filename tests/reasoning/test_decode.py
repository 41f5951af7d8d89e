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

PROMPT, WHOLE = 6, 10
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
        kernels = decode.prepare(config, params, WHOLE + 3)  # more room than it takes

        def one(now: decode.Cache, token: jax.Array) -> tuple[decode.Cache, jax.Array]:
            logits, now = decode.step(config, kernels, token, now)
            return now, logits

        _, found = jax.lax.scan(one, decode.begin(kept, mask, WHOLE + 3), jnp.asarray(ROWS[:, PROMPT:].T))
        return whole[:, PROMPT:], jnp.transpose(found, (2, 0, 1))

    return run(reference.params(config))


def relative(found: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))


FEW = ("llama3-rope", "qwen2", "qwen3-untied")
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


def test_attention_is_the_same_by_products_and_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (2, 3, 8, 5))
    key, value = (jax.random.normal(each, (12, 2, 8, 5)) for each in keys[1:3])
    seen = jnp.arange(12)[:, None] <= jnp.arange(5)[None] * 2
    wanted = decode.multiplied(query, key, value, seen)
    np.testing.assert_allclose(wanted[..., 0], jnp.repeat(value[0, :, None, :, 0], 3, axis=1), rtol=1e-6)
    for piece in (64, 4):
        monkeypatch.setattr(decode, "PIECE", piece)
        found = quick(lambda *x: decode.written_out(*x))(query, key, value, seen)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
