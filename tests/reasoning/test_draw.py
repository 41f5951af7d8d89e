"""Draws of a token against sorting, and against the distribution that they are of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.reasoning import draw, tokenizer
from longhaul.reasoning.draw import Rule

SIZE, ROWS = 41, 5
LOGITS = 2.0 * np.random.default_rng(0).normal(size=(SIZE, ROWS)).astype(np.float32)
PLACE = 3
"""Number of the token that pads."""


def sorted_out(logits: np.ndarray, rule: Rule) -> np.ndarray:
    """Probabilities [V] of the rule by sorting, one row; those of tokens that are never drawn are 0."""
    scores = logits.astype(np.float64) / rule.temperature
    scores[PLACE] = -np.inf
    share = np.exp(scores - scores.max())
    share /= share.sum()
    order = np.argsort(-share)
    if rule.top_k:
        share[order[rule.top_k :]] = 0.0
        share /= share.sum()
    before = np.cumsum(share[order]) - share[order]
    share[order[before >= rule.top_p]] = 0.0
    share[share < rule.min_p * share.max()] = 0.0
    return np.asarray(share / share.sum())


RULES = (Rule(0.7), Rule(1.0, 6), Rule(1.3, 0, 0.8), Rule(1.0, 0, 1.0, 0.1), Rule(1.5, 12, 0.9, 0.05), Rule(1.0, 1000))


# The fifth of the rules has all that the others have.
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule == RULES[4] else pytest.mark.slow) for rule in RULES], ids=str
)
def test_a_token_has_the_probability_that_sorting_gives(rule: Rule) -> None:
    many = 8_000
    uniforms = jax.random.uniform(jax.random.key(1), (many, 2))
    plain, chosen = Rule(rule.temperature), jax.jit(draw.chosen, static_argnums=(2, 3))
    for row in range(ROWS):
        wanted, full = (sorted_out(LOGITS[:, row], each) for each in (rule, plain))
        found = chosen(jnp.repeat(LOGITS[:, row : row + 1], many, axis=1), uniforms, rule, PLACE)
        shares = np.bincount(np.asarray(found.token), minlength=SIZE) / many
        assert (shares[wanted == 0.0] == 0.0).all()
        assert (abs(shares - wanted) <= 4.5 * np.sqrt(wanted / many)).all()
        np.testing.assert_allclose(found.log_prob, np.log(full[found.token]), atol=1e-5)
        np.testing.assert_allclose(found.behaviour, np.log(wanted[found.token]), atol=1e-5)


def test_a_token_without_mass_is_never_drawn() -> None:
    """At both ends of the unit interval, for masses of 9 orders of magnitude between tokens of none."""
    rng = np.random.default_rng(0)
    mass = np.where(rng.random((300, 2000)) < 0.9, 0.0, 10.0 ** rng.uniform(-9, 0, (300, 2000))).astype(np.float32)
    mass[150] = np.maximum(mass[150], 1e-9)
    ends = jnp.array([0.0, 1.0 - 2.0**-23], jnp.float32)
    for pair in np.ndindex(2, 2):
        token = draw.drawn(jnp.asarray(mass), jnp.broadcast_to(ends[jnp.array(pair)], (2000, 2)))
        assert (mass[np.asarray(token), np.arange(2000)] > 0.0).all()


def test_the_likeliest_token_at_temperature_0_is_no_padding() -> None:
    logits = jnp.asarray(LOGITS).at[tokenizer.PAD].set(100.0)
    found = draw.chosen(logits, jnp.zeros((ROWS, 2)), Rule(0.0))
    np.testing.assert_array_equal(found.token, 1 + jnp.argmax(logits[1:], axis=0))
    assert not np.any(found.log_prob) and not np.any(found.behaviour)
