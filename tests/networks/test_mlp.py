"""The shared perceptron against NumPy, against two towers of the same weights, and with inputs that are never there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.networks.actor_critic import actor_critic
from longhaul.networks.mlp import affine
from tests.helpers.quick import quick

INPUTS, LIVE = 12, (9, 2, 3, 7, 11, 0)
"""An observation has 12 numbers, of which 6 can differ from 0; they come in an order of their own."""


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


def weights(network: Any, seed: int = 0) -> Any:
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [normal(*x.shape, seed=seed + i, scale=0.5) for i, x in enumerate(leaves)])


def close(one: Any, other: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
def test_a_layer_and_its_gradients_are_the_products_of_float64(dtype: Any, tolerance: float) -> None:
    kernel, bias, x, g = normal(7, 5), normal(5, seed=1), normal(7, 33, seed=2), normal(5, 33, seed=3)
    found, back = jax.vjp(affine, kernel, bias, x.astype(dtype))
    k, b, y, h = (np.asarray(a, np.float64) for a in (kernel, bias, x, g))
    assert found.dtype == jnp.float32
    close(found, k.T @ y + b[:, None], tolerance)
    of_kernel, of_bias, of_x = back(g)
    assert (of_kernel.dtype, of_bias.dtype, of_x.dtype) == (jnp.float32, jnp.float32, dtype)
    close((of_kernel, of_bias, of_x.astype(jnp.float32)), (y @ h.T, h.sum(1), k @ h), tolerance)


def both(network: Any, params: Any, seen: Any) -> Any:
    """(parameters, value) and the gradient of a sum that mixes them."""

    def mixed(p: Any) -> Any:
        parameters, value, _ = network.apply(p, (), seen)
        return jnp.sum(jnp.sin(parameters)) + jnp.sum(value**2), (parameters, value)

    gradient, found = quick(jax.grad(mixed, has_aux=True))(params)
    return found, gradient


def test_it_is_two_towers_with_the_same_weights() -> None:
    """Policies and values are theirs; the torso's gradient is the sum of both towers'."""
    seen = {"a": normal(3, 4, 5, seed=5), "b": normal(3, 4, 2, 2, seed=6)}
    shapes = {name: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for name, x in seen.items()}
    one, two = (actor_critic(shapes, 3, free=2, sizes=(8, 6), shared=shared) for shared in (True, False))
    params = weights(one)
    assert set(params) == {"torso", "policy", "value", "log_std"}
    towers = {name: part for name, part in params.items() if name != "torso"}
    found, gradient = both(one, params, seen)
    expected, slopes = both(two, towers | {"actor": params["torso"], "critic": params["torso"]}, seen)
    assert found[0].shape == (3, 4, 5)
    assert found[1].shape == (3, 4)
    close(found, expected, 1e-5)
    torso = jax.tree.map(jnp.add, slopes.pop("actor"), slopes.pop("critic"))
    close(gradient, slopes | {"torso": torso}, 1e-5)


def test_leaving_out_dead_inputs_changes_neither_output_nor_gradient() -> None:
    shape = jax.ShapeDtypeStruct((INPUTS,), jnp.float32)
    whole = actor_critic(shape, 3, sizes=(8, 6), activation="relu", shared=True)
    short = actor_critic(shape, 3, sizes=(8, 6), activation="relu", shared=True, live=LIVE)
    params = weights(whole)
    assert jax.eval_shape(short.init, jax.random.key(0)) == jax.eval_shape(whole.init, jax.random.key(0))
    alive = normal(20, len(LIVE), seed=8)
    found, gradient = both(short, params, alive)
    expected, slopes = both(whole, params, jnp.zeros((20, INPUTS)).at[:, np.array(LIVE)].set(alive))
    close(found, expected, 1e-5)
    close(gradient, slopes, 1e-5)
    dead = sorted(set(range(INPUTS)) - set(LIVE))
    np.testing.assert_array_equal(gradient["torso"]["layer_0"]["kernel"][np.array(dead)], 0.0)
    # What is alive of the parameters serves as well, and leads back to all of them.
    living, back = jax.vjp(short.live, params)
    assert living["torso"]["layer_0"]["kernel"].shape == (len(LIVE), 8)
    again, part = both(short, living, alive)
    close(again, found, 1e-6)
    close(back(part)[0], gradient, 1e-6)


def test_bf16_rounds_the_torsos_factors_alone() -> None:
    shape = jax.ShapeDtypeStruct((INPUTS,), jnp.float32)
    full, low = (actor_critic(shape, 3, sizes=(32,), shared=True, precision=p) for p in ("fp32", "bf16"))
    params, seen = weights(full), normal(64, INPUTS, seed=9)
    (exact, slopes), (rounded, others) = both(full, params, seen), both(low, params, seen)
    for a, b in zip(jax.tree.leaves((exact, slopes)), jax.tree.leaves((rounded, others)), strict=True):
        assert b.dtype == jnp.float32
        a, b = np.asarray(a), np.asarray(b)
        assert 1e-5 < np.sqrt(np.mean((a - b) ** 2) / np.mean(a**2)) < 0.05
    lines = str(jax.make_jaxpr(lambda p: low.apply(p, (), seen))(params)).splitlines()
    products = [line for line in lines if "dot_general" in line]
    assert len(products) == 2
    assert all(":f32[" in line for line in products), "sums are float32"
