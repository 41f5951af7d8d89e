"""The greatest of each feature over the items of a set, one item after the other, in plain JAX: for CPUs.

All items at once make an array [rows, items, features], which no cache holds, and whose gradient takes it apart again
in five passes. Here a loop over the items keeps what was greatest so far and which item that was; the gradient needs
nothing else. Measured beside all items at once on one core, 1,024 rows of 64 features: for 8 items with the gradient
0.64 ms in place of 2.6, for 64 items 5.1 in place of 51. A GPU begins one kernel as fast as eight, and has it all at
once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from longhaul.networks.layers import contract


def _embedded(kernel: jax.Array, bias: jax.Array, item: jax.Array) -> jax.Array:
    """float32 [rows, features], of one item [rows, inputs] whose last input says whether it is there."""
    return (contract(item, kernel.astype(item.dtype), 1, 0) + bias[None]) * item[:, -1:].astype(jnp.float32)


@jax.custom_vjp
def greatest(kernel: jax.Array, bias: jax.Array, items: jax.Array) -> jax.Array:
    """float32 [rows, features]: the greatest of (items @ kernel + bias) * (their last input) over items.

    kernel [inputs, features], bias [features], items [rows, items, inputs]. Factors of products have the items' type.
    Of equal items the first has the gradient.
    """
    return _forward(kernel, bias, items)[0]


def _forward(kernel: jax.Array, bias: jax.Array, items: jax.Array) -> tuple[jax.Array, Any]:
    each = jnp.moveaxis(items, 1, 0)

    def step(found: tuple[jax.Array, jax.Array], numbered: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        (most, which), (i, item) = found, numbered
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
        (of_kernel, of_bias), (i, item) = total, numbered
        own = jnp.where(which == i, g, 0.0) * item[:, -1:].astype(jnp.float32)
        return (of_kernel + contract(item, own.astype(item.dtype), 0, 0), of_bias + jnp.sum(own, axis=0)), None

    zeros = jnp.zeros(kernel.shape, jnp.float32), jnp.zeros(bias.shape, jnp.float32)
    (of_kernel, of_bias), _ = jax.lax.scan(step, zeros, (numbers, each))
    # Mostly nobody asks for the gradient of what was seen, and the compiler leaves all of this out.
    own = jnp.where(which[:, None] == numbers[None, :, None], g[:, None], 0.0)  # [rows, items, features]
    through = (own * items[..., -1:].astype(jnp.float32)).astype(items.dtype)
    of_items = contract(through, kernel.astype(items.dtype), 2, 1)
    plain = contract(items, kernel.astype(items.dtype), 2, 0) + bias[None, None]
    of_items = of_items.at[..., -1].add(jnp.sum(own * plain, axis=-1))
    return of_kernel, of_bias, of_items.astype(items.dtype)


greatest.defvjp(_forward, _back)
