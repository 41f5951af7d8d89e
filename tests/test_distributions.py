"""Oracles: sums over all actions, frequencies of many samples, and quadrature over a line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import distributions
from longhaul.distributions import distribution
from longhaul.spaces import Box, Discrete, MultiDiscrete
from tests.helpers.quick import quick

KEY = jax.random.key(0)


def probabilities(logits, mask=None):
    p = np.exp(logits - logits.max()) * (1 if mask is None else mask)
    return p / p.sum()


@pytest.mark.parametrize("mask", [None, [True, False, True, True, False], [False, False, False, True, False]])
@pytest.mark.parametrize("few", [distributions.FEW, 0])
def test_categorical_samples_with_its_probabilities(monkeypatch, few, mask):
    monkeypatch.setattr(distributions, "FEW", few)
    d = distribution(Discrete(5))
    logits = np.array([0.3, -1.0, 2.0, 0.0, 5.0], np.float32)
    many = jnp.broadcast_to(logits, (50_000, 5))
    masks = None if mask is None else jnp.broadcast_to(jnp.array(mask), (50_000, 5))
    actions = np.asarray(quick(d.sample)(many, masks, KEY))
    expected = probabilities(logits, None if mask is None else np.array(mask))
    frequency = np.bincount(actions, minlength=5) / len(actions)
    np.testing.assert_allclose(frequency, expected, atol=0.01)
    assert np.all(frequency[expected == 0] == 0)
    one = None if mask is None else jnp.array(mask)
    assert d.mode(jnp.asarray(logits), one) == np.argmax(expected)
    legal = [i for i in range(5) if expected[i] > 0]
    log_prob = quick(d.log_prob)
    log_p = [float(log_prob(jnp.asarray(logits), one, jnp.int32(i))) for i in legal]
    np.testing.assert_allclose(np.exp(log_p), expected[legal], rtol=1e-5)
    entropy = -np.sum(expected[legal] * np.log(expected[legal]))
    assert float(quick(d.entropy)(jnp.asarray(logits), one)) == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("few", [distributions.FEW, 0])
def test_masked_gradients_are_finite(monkeypatch, few):
    monkeypatch.setattr(distributions, "FEW", few)
    d = distribution(Discrete(4))
    mask = jnp.array([True, True, False, False])

    def f(logits):
        return d.entropy(logits, mask) + d.log_prob(logits, mask, jnp.int32(1))

    gradient = quick(jax.grad(f))(jnp.array([0.1, 0.2, 30.0, -40.0]))
    assert np.all(np.isfinite(gradient)) and np.all(gradient[2:] == 0)


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 7])
def test_few_choices_are_what_many_would_be(monkeypatch, n):
    rng = np.random.default_rng(n)
    logits = jnp.asarray(rng.normal(scale=3.0, size=(200, n)), jnp.float32)
    mask = jnp.asarray(rng.random((200, n)) < 0.7).at[:, 0].set(True)
    d, found = distribution(Discrete(n)), []
    for few in (distributions.FEW, 0):
        monkeypatch.setattr(distributions, "FEW", few)

        def all_of_it(logits):
            drawn = d.sample(logits, mask, KEY)
            log_prob, entropy = d.log_prob(logits, mask, drawn), d.entropy(logits, mask)
            return jnp.sum(entropy + 0.3 * log_prob), (drawn, log_prob, entropy)

        gradient, parts = quick(jax.grad(all_of_it, has_aux=True))(logits)
        found.append((*parts, gradient))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for few, many in zip(*found):
        np.testing.assert_allclose(few, many, rtol=1e-5, atol=1e-5)


def test_choices_of_a_multi_categorical_are_independent():
    d = distribution(MultiDiscrete((2, 3)))
    logits = jnp.array([0.0, 1.0, 0.5, -0.5, 0.0])
    actions = np.asarray(quick(lambda key: d.sample(jnp.broadcast_to(logits, (60_000, 5)), None, key))(KEY))
    joint = np.zeros((2, 3))
    np.add.at(joint, (actions[:, 0], actions[:, 1]), 1 / len(actions))
    a, b = probabilities(np.array([0.0, 1.0])), probabilities(np.array([0.5, -0.5, 0.0]))
    np.testing.assert_allclose(joint, np.outer(a, b), atol=0.01)
    assert float(d.log_prob(logits, None, jnp.array([1, 2]))) == pytest.approx(np.log(a[1] * b[2]), abs=1e-5)
    total = -np.sum(a * np.log(a)) - np.sum(b * np.log(b))
    assert float(d.entropy(logits, None)) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("log_std", [-1.5, -0.5, 0.3])
def test_tanh_gaussian_integrates_to_one_and_has_its_entropy(log_std):
    """The density over actions, by the trapezoid rule in the raw variable with its slope."""
    d = distribution(Box((-2.0,), (4.0,)))
    parameters = jnp.array([0.4, log_std])
    raw = np.linspace(-14, 14, 200_001, dtype=np.float32)[:, None]
    spread = jnp.broadcast_to(parameters, (len(raw), 2))
    log_p = np.asarray(quick(d.log_prob)(spread, None, jnp.asarray(raw)), np.float64)
    action = np.asarray(d.action(jnp.asarray(raw)), np.float64)[:, 0]
    assert action.min() >= -2.0 and action.max() <= 4.0
    slope = 3.0 / np.cosh(raw[:, 0].astype(np.float64)) ** 2
    step = 28 / 200_000
    p = np.exp(log_p)
    assert np.sum(p * slope) * step == pytest.approx(1.0, abs=1e-3)
    entropy = -np.sum(p * log_p * slope) * step
    assert float(quick(d.entropy)(parameters, None)) == pytest.approx(entropy, abs=0.01)


def test_tanh_gaussian_saturates_without_infinities():
    d = distribution(Box((-1.0, -1.0), (1.0, 1.0)))

    def f(parameters):
        return d.log_prob(parameters, None, jnp.array([30.0, -30.0])) + d.entropy(parameters, None)

    value, gradient = quick(jax.value_and_grad(f))(jnp.array([25.0, -25.0, 0.0, 0.0]))
    assert np.isfinite(value) and np.all(np.isfinite(gradient))
