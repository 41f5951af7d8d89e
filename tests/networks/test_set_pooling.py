"""The greatest over a set, item by item, beside all items at once and their gradients by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.networks.actor_critic import actor_critic
from longhaul.networks.set_pooling import greatest
from tests.helpers.quick import quick


def drawn(rows, items, inputs, features, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, items, inputs))
    x[..., -1] = rng.random((rows, items)) < 0.6
    parts = rng.normal(size=(inputs, features)), rng.normal(size=features), x
    return tuple(jnp.asarray(part, jnp.float32) for part in parts)


def at_once(kernel, bias, items):
    return jnp.max((items @ kernel + bias[None, None]) * items[..., -1:], axis=1)


@pytest.mark.parametrize(("rows", "items", "inputs", "features"), [(40, 5, 4, 6), (7, 1, 3, 2), (1, 9, 2, 1)])
def test_it_is_the_greatest_and_so_are_its_gradients(rows, items, inputs, features):
    parts = drawn(rows, items, inputs, features)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(rows, features)), jnp.float32)

    def told(function):
        total = lambda *parts: jnp.sum(weight * jnp.sin(function(*parts)))  # noqa: E731
        return quick(jax.value_and_grad(total, argnums=(0, 1, 2)))(*parts)

    found, expected = told(greatest), told(at_once)
    there = parts[2][..., -1:]  # of several that are not, each is as much the greatest as the others
    (value, (*own, of_items)), (expected_value, (*others, expected_items)) = found, expected
    assert float(jnp.abs(expected_items * there).max()) > 0.0
    found, expected = (value, own, of_items * there), (expected_value, others, expected_items * there)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, expected)


def test_what_is_not_there_is_zero_and_has_no_gradient():
    kernel, bias, items = drawn(6, 4, 3, 5)
    items = items.at[..., -1].set(0.0).at[:3, 1, -1].set(1.0)
    pooled = quick(greatest)
    np.testing.assert_array_equal(pooled(kernel, bias, items)[3:], 0.0)
    of_kernel = quick(jax.grad(lambda kernel: jnp.sum(greatest(kernel, bias, items[3:]))))(kernel)
    np.testing.assert_array_equal(of_kernel, 0.0)
    changed = items.at[:, 2, :-1].add(100.0)
    np.testing.assert_array_equal(pooled(kernel, bias, changed), pooled(kernel, bias, items))


def test_of_equal_items_one_has_the_whole_gradient():
    kernel, bias, items = drawn(4, 1, 3, 5)
    items = items.at[..., -1].set(1.0)
    twice = jnp.concatenate([items, items], axis=1)
    slope = quick(jax.grad(lambda k, x: jnp.sum(greatest(k, bias, x))))
    one, two = (slope(kernel, x) for x in (items, twice))
    np.testing.assert_allclose(one, two, rtol=1e-6)


def test_many_networks_at_once():
    """Networks of a population: parameters [N, ...], each with its own observation."""
    each = [drawn(3, 4, 3, 5, seed) for seed in range(4)]
    parts = [jnp.stack(leaves) for leaves in zip(*each)]
    slope = jax.grad(lambda *parts: jnp.sum(jnp.cos(greatest(*parts))))
    found, single = quick(jax.vmap(slope))(*parts), quick(slope)
    for i, own in enumerate(each):
        alone = single(*own)
        np.testing.assert_allclose(found[i], alone, rtol=1e-5, atol=1e-6)


def test_bfloat16_rounds_the_factors_and_not_the_sums():
    kernel, bias, items = drawn(20, 5, 8, 6)

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    found = greatest(kernel, bias, items.astype(jnp.bfloat16))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, at_once(rounded(kernel), bias, rounded(items)), rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(found - at_once(rounded(kernel), bias, items)).max()) > 1e-3


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"memory": 3}, {"activation": "relu", "remat": "full"}])
def test_networks_are_the_same_on_a_cpu_and_elsewhere(monkeypatch, options):
    """Same parameters from the same key, same outputs, same gradients: a run may go on on another device."""
    seen = {"ego": jax.ShapeDtypeStruct((3,), jnp.float32), "items": jax.ShapeDtypeStruct((5, 4), jnp.float32)}
    observed = {"ego": jnp.ones((6, 3)), "items": drawn(6, 5, 4, 1)[2]}
    found = []
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        network = actor_critic(seen, 2, torso="deepset", sizes=(16, 8), **options)
        params = quick(network.init)(jax.random.key(3))

        def told(params, network=network):
            parameters, value, _ = network.apply(params, network.memory(6), observed)
            return jnp.sum(jnp.sin(parameters)) + jnp.sum(jnp.cos(value))

        found.append((params, quick(jax.value_and_grad(told))(params)))
    jax.tree.map(np.testing.assert_array_equal, found[0][0], found[1][0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found[0][1], found[1][1])
