"""Conditional computation: what is needed is computed, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.driving.sim.conditional import if_any, only_where


def test_only_where_is_the_function_where_it_is_needed_and_the_default_elsewhere() -> None:
    def function(agent: jax.Array, world: jax.Array, shared: jax.Array) -> jax.Array:
        return agent * world + shared.sum()

    some = only_where(function)
    key = jax.random.key(0)
    agents, world = jax.random.normal(key, (3, 5, 7)), jnp.arange(15.0).reshape(3, 5)
    shared = jnp.arange(4.0)
    for share in (0.0, 0.3, 1.0):
        needed = jax.random.uniform(jax.random.key(1), (3, 5, 7)) < share
        default = jnp.full((3, 5, 7), -1.0)
        found = jax.jit(jax.vmap(jax.vmap(some, (0, 0, 0, 0, None)), (0, 0, 0, 0, None)))(
            needed, default, agents, world, shared
        )
        np.testing.assert_allclose(found, jnp.where(needed, agents * world[..., None] + 6.0, default), rtol=1e-6)


def test_if_any_is_computed_for_a_batch_that_has_one_that_needs_it() -> None:
    computed = []

    def function(x: jax.Array, shared: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: computed.append(1))
        return x * shared

    x, shared = jnp.arange(6.0).reshape(2, 3) + 1.0, jnp.float32(2.0)
    run = jax.jit(jax.vmap(if_any(function), (0, 0, None)))
    np.testing.assert_array_equal(run(jnp.array([False, False]), x, shared), jnp.zeros((2, 3)))
    jax.effects_barrier()
    assert not computed
    np.testing.assert_array_equal(run(jnp.array([False, True]), x, shared), 2.0 * x)
    jax.effects_barrier()
    assert computed
    alone = if_any(function)
    np.testing.assert_array_equal(alone(jnp.array(False), x[0], shared), jnp.zeros(3))
    np.testing.assert_array_equal(alone(jnp.array(True), x[0], shared), 2.0 * x[0])
