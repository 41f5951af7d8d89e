"""Maximum of each feature over the items of a set, one item after the other: for CPUs.

All items at once make an array [rows, items, features], which no cache holds and whose gradient takes five passes.
Here a loop over the items keeps the maximum so far and its item; the gradient needs nothing else. Measured on one core
with 1,024 rows of 64 features, gradient included: 8 items take 0.64 ms instead of 2.6, 64 items 5.1 instead of 51. On
a GPU, which starts one kernel as fast as eight, all items at once are faster.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from longhaul.networks.layers import contract


def _embedded(kernel: jax.Array, bias: jax.Array, item: jax.Array) -> jax.Array:
    """Embedding float32 [rows, features] of one item [rows, inputs], whose last input is its presence."""
    return (contract(item, kernel.astype(item.dtype), 1, 0) + bias[None]) * item[:, -1:].astype(jnp.float32)


@jax.custom_vjp
def greatest(kernel: jax.Array, bias: jax.Array, items: jax.Array) -> jax.Array:
    """Maximum over items of (items @ kernel + bias) * (their last input), float32 [rows, features].

    kernel [inputs, features], bias [features], items [rows, items, inputs]. Factors of products have the items' type.
    The first of equal items has the gradient.
    """
    return _forward(kernel, bias, items)[0]


def _forward(kernel: jax.Array, bias: jax.Array, items: jax.Array) -> tuple[jax.Array, Any]:
    each = jnp.moveaxis(items, 1, 0)

    def step(so_far: tuple[jax.Array, jax.Array], numbered: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        (most, which), (i, item) = so_far, numbered
        value = _embedded(kernel, bias, item)
        return (jnp.maximum(most, value), jnp.where(value > most, i, which)), None

    first = _embedded(kernel, bias, each[0])
    start = first, jnp.zeros(first.shape, jnp.int32)
    (most, which), _ = jax.lax.scan(step, start, (jnp.arange(1, len(each), dtype=jnp.int32), each[1:]))
    return most, (kernel, bias, items, which)


def _back(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernel, bias, items, which = kept
    each, numbers = jnp.moveaxis(items, 1, 0), jnp.arange(items.shape[1], dtype=jnp.int32)

    def step(total: tuple[jax.Array, jax.Array], numbered: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        (kernel_gradient, bias_gradient), (i, item) = total, numbered
        own = jnp.where(which == i, g, 0.0) * item[:, -1:].astype(jnp.float32)
        return (
            kernel_gradient + contract(item, own.astype(item.dtype), 0, 0),
            bias_gradient + jnp.sum(own, axis=0),
        ), None

    zeros = jnp.zeros(kernel.shape, jnp.float32), jnp.zeros(bias.shape, jnp.float32)
    (kernel_gradient, bias_gradient), _ = jax.lax.scan(step, zeros, (numbers, each))
    # The gradient of the items is rarely used; the compiler then leaves all of this out.
    own = jnp.where(which[:, None] == numbers[None, :, None], g[:, None], 0.0)  # [rows, items, features]
    through = (own * items[..., -1:].astype(jnp.float32)).astype(items.dtype)
    items_gradient = contract(through, kernel.astype(items.dtype), 2, 1)
    plain = contract(items, kernel.astype(items.dtype), 2, 0) + bias[None, None]
    items_gradient = items_gradient.at[..., -1].add(jnp.sum(own * plain, axis=-1))
    return kernel_gradient, bias_gradient, items_gradient.astype(items.dtype)


greatest.defvjp(_forward, _back)
