"""Oracle: JAX's own Threefry."""

import jax
import numpy as np
import pytest

from longhaul import prng

SHAPES = [(), (1,), (5,), (4, 3), (7, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_stream_is_that_of_jax(shape):
    key = jax.random.key(7)
    assert np.array_equal(prng.bits(key, shape), jax.random.bits(key, shape))
    assert np.array_equal(prng.uniform(key, shape), jax.random.uniform(key, shape))


def test_gumbel_noise_is_that_of_jax():
    key = jax.random.key(5)
    np.testing.assert_allclose(prng.gumbel(key, (64, 23)), jax.random.gumbel(key, (64, 23)), rtol=1e-5, atol=1e-6)


def test_split_gives_the_keys_of_jax():
    ours, theirs = prng.split(jax.random.key(3), 6), jax.random.split(jax.random.key(3), 6)
    assert np.array_equal(jax.random.key_data(ours), jax.random.key_data(theirs))


def test_normal_has_the_moments_and_tails_of_a_gaussian():
    x = np.asarray(prng.normal(jax.random.key(0), (200_000,)), np.float64)
    assert np.all(np.isfinite(x))
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1.0) < 0.01
    assert abs(np.mean(np.abs(x) > 1.959964) - 0.05) < 0.003
    assert abs(np.mean(x**4) - 3.0) < 0.1


def test_normal_numbers_of_many_keys_are_those_of_jax() -> None:
    keys, shapes = jax.random.split(jax.random.key(3), 3), [(2, 3), (5,), (4, 1, 2)]
    found = jax.jit(lambda keys: prng.normals(keys, shapes))(keys)
    for key, shape, each in zip(keys, shapes, found, strict=True):
        np.testing.assert_allclose(each, jax.random.normal(key, shape), rtol=1e-6)


def test_too_many_numbers_are_refused():
    with pytest.raises(ValueError, match=r"2\*\*32"):
        jax.eval_shape(lambda: prng.bits(jax.random.key(0), (2**32,)))
