"""A permutation is a bijection, and looks random in positions and in pairs."""

import jax
import numpy as np
import pytest

from longhaul import prng


@pytest.mark.parametrize("n", [1, 2, 7, 12, 60, 97, 128, 512, 1000, 1009, 4096, 6144, 131_072])
def test_every_index_comes_once(n):
    order = np.asarray(jax.jit(lambda key: prng.permutation(key, n))(jax.random.key(n)))
    assert order.dtype == np.int32
    assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [36, 256, 1024])
def test_positions_are_uniform(n):
    """Chi-square of where one index lands, over 4,000 keys; 60 bins or fewer."""
    keys = jax.random.split(jax.random.key(0), 4000)
    orders = np.asarray(jax.vmap(lambda key: prng.permutation(key, n))(keys))
    bins = 32 if n > 36 else 36
    for index in (0, 1, n // 2, n - 1):
        position = np.argmax(orders == index, axis=1)
        counts = np.bincount(position * bins // n, minlength=bins)
        chi2 = np.sum((counts - 4000 / bins) ** 2 / (4000 / bins))
        assert chi2 < bins - 1 + 5.5 * np.sqrt(2 * (bins - 1)), (index, chi2)


def test_neighbours_land_in_one_minibatch_as_often_as_chance_says():
    """Pairs (i, i+1), (i, i+16), (i, i+512) in the same quarter: 1/4 of the time, to 5 standard errors."""
    n = 1024
    keys = jax.random.split(jax.random.key(1), 600)
    orders = np.asarray(jax.vmap(lambda key: prng.permutation(key, n))(keys))
    quarter = np.argsort(orders, axis=1) // (n // 4)
    for apart in (1, 16, 32, 512):
        same = np.mean(quarter[:, :-apart] == quarter[:, apart:])
        expected = (n / 4 - 1) / (n - 1)
        assert abs(same - expected) < 5 * np.sqrt(0.25 * 0.75 / (600 * (n - apart))) * 3, (apart, same)


def test_epochs_differ():
    a, b = (np.asarray(prng.permutation(jax.random.key(s), 2048)) for s in (0, 1))
    assert np.mean(a == b) < 0.01
