"""Oracle: JAX's own Threefry."""

import jax
import numpy as np
import pytest

from longhaul import prng
from tests.helpers.quick import quick

SHAPES = [(), (1,), (5,), (4, 3), (7, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stream_is_that_of_jax(shape):
    key = jax.random.key(7)
    bits, uniform = quick(lambda key: (prng.bits(key, shape), prng.uniform(key, shape)))(key)
    assert np.array_equal(bits, jax.random.bits(key, shape))
    assert np.array_equal(uniform, jax.random.uniform(key, shape))


def test_split_gives_the_keys_of_jax():
    ours, theirs = quick(lambda key: prng.split(key, 6))(jax.random.key(3)), jax.random.split(jax.random.key(3), 6)
    assert np.array_equal(jax.random.key_data(ours), jax.random.key_data(theirs))


def test_normal_has_the_moments_and_tails_of_a_gaussian():
    x = np.asarray(quick(lambda key: prng.normal(key, (200_000,)))(jax.random.key(0)), np.float64)
    assert np.all(np.isfinite(x))
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1.0) < 0.01
    assert abs(np.mean(np.abs(x) > 1.959964) - 0.05) < 0.003
    assert abs(np.mean(x**4) - 3.0) < 0.1


def test_normal_numbers_of_many_keys_are_those_of_jax() -> None:
    keys, shapes = jax.random.split(jax.random.key(3), 3), [(2, 3), (5,), (4, 1, 2)]
    found = quick(lambda keys: prng.normals(keys, shapes))(keys)
    for key, shape, each in zip(keys, shapes, found, strict=True):
        np.testing.assert_allclose(each, jax.random.normal(key, shape), rtol=1e-6)


def test_too_many_numbers_are_refused():
    with pytest.raises(ValueError, match=r"2\*\*32"):
        jax.eval_shape(lambda: prng.bits(jax.random.key(0), (2**32,)))


SIZES = [1, 2, 7, 97, 512, 1009, 131_072]


@pytest.mark.parametrize(
    "n", [*SIZES, *(pytest.param(n, marks=pytest.mark.slow) for n in (12, 60, 128, 1000, 4096, 6144))]
)
def test_every_index_comes_once(n):
    order = np.asarray(quick(lambda key: prng.permutation(key, n))(jax.random.key(n)))
    assert order.dtype == np.int32
    assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [36, pytest.param(256, marks=pytest.mark.slow), 1024])
def test_positions_are_uniform(n):
    """Chi-square of where one index lands, over 4,000 keys; 60 bins or fewer."""
    keys = jax.random.split(jax.random.key(0), 4000)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: prng.permutation(key, n)))(keys))
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
    orders = np.asarray(jax.jit(jax.vmap(lambda key: prng.permutation(key, n)))(keys))
    quarter = np.argsort(orders, axis=1) // (n // 4)
    for apart in (1, 16, 32, 512):
        same = np.mean(quarter[:, :-apart] == quarter[:, apart:])
        expected = (n / 4 - 1) / (n - 1)
        assert abs(same - expected) < 5 * np.sqrt(0.25 * 0.75 / (600 * (n - apart))) * 3, (apart, same)
