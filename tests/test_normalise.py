"""Oracle: mean and variance of all samples at once."""

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import normalise
from longhaul.runtime import mesh


def test_batches_merge_to_the_moments_of_everything():
    rng = np.random.default_rng(0)
    batches = [rng.normal(50.0 + i, 1.0 + i, size=(5, 4, 3)).astype(np.float32) for i in range(6)]
    moments = normalise.start(jax.ShapeDtypeStruct((3,), jnp.float32))
    for batch in batches:
        moments = normalise.update(moments, jnp.asarray(batch), None, mesh.identity)
    everything = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, everything.var(0), rtol=1e-4)
    scaled = normalise.apply(moments, jnp.asarray(batches[0]))
    expected = (batches[0] - everything.mean(0)) / everything.std(0)
    np.testing.assert_allclose(scaled, np.clip(expected, -10, 10), rtol=1e-3, atol=1e-4)


def test_invalid_steps_are_left_out():
    rng = np.random.default_rng(1)
    batch = rng.normal(3.0, 2.0, size=(8, 6, 2)).astype(np.float32)
    valid = rng.random((8, 6)) < 0.5
    batch[~valid] = 1e6
    moments = normalise.start(jax.ShapeDtypeStruct((2,), jnp.float32))
    moments = normalise.update(moments, jnp.asarray(batch), jnp.asarray(valid), mesh.identity)
    np.testing.assert_allclose(moments.mean, batch[valid].mean(0), rtol=1e-3)
