"""Multilayer perceptron with a policy and a value on one torso, for large batches.

Rows lie along the minor axis: a layer's output is [features, rows]. On a CPU each of a layer's three products (its
output, the gradients of its kernel and of its input) then reads both factors in place; with rows along the major axis
XLA transposes the input for each kernel's gradient and loses a fifth. GPUs and TPUs are fast with either layout.

Inputs that are 0 in every observation need no product: with `live`, the places of the others, the network takes only
these. The parameters are those of all inputs; those of dead inputs have a gradient of 0, as without `live`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.networks import layers
from longhaul.networks.layers import HIDDEN_SCALE, POLICY_SCALE, VALUE_SCALE, contract, rematerialised
from longhaul.types import Key, Params, PyTree


class Perceptron(NamedTuple):
    init: Callable[[Key], Params]
    apply: Callable[[Params, PyTree], tuple[jax.Array, jax.Array]]  # (params, observation) -> (parameters, value)
    live: Callable[[Params], Params]  # the parameters without the rows of dead inputs; `apply` takes both


@jax.custom_vjp
def affine(kernel: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """kernel^T x + bias: [inputs, outputs], [outputs], [inputs, rows] -> float32 [outputs, rows].

    Factors of the products are rounded to x's type and added up in float32: on CPUs that multiply bfloat16 this is
    twice as fast as sums rounded to bfloat16.
    """
    # The barrier makes the transposition a step of its own: once for all chunks of a loop, not once a product.
    transposed = jax.lax.optimization_barrier(kernel.astype(x.dtype).T)
    return contract(transposed, x, 1, 0) + bias[:, None]


def _affine(kernel: jax.Array, bias: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return affine(kernel, bias, x), (kernel, x)


def _affine_back(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    kernel, x = kept
    of_bias = jnp.matmul(g, jnp.ones(g.shape[1]), precision=jax.lax.Precision.HIGHEST)
    g = g.astype(x.dtype)
    return contract(x, g, 1, 1), of_bias, contract(kernel.astype(x.dtype), g, 1, 0).astype(x.dtype)


affine.defvjp(_affine, _affine_back)


def _kernel_rows(places: Sequence[int], size: int) -> Callable[[jax.Array], jax.Array]:
    """Function of a kernel [size, n] to its rows at `places`. Its gradient is a look-up, not a scatter."""
    place = np.asarray(places, np.int32)
    back = np.full(size, len(place), np.int32)
    back[place] = np.arange(len(place))

    @jax.custom_vjp
    def cut(kernel: jax.Array) -> jax.Array:
        return jnp.take(kernel, place, axis=0)

    def spread(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (jnp.take(jnp.pad(g, ((0, 1), (0, 0))), back, axis=0),)

    cut.defvjp(lambda kernel: (cut(kernel), None), spread)
    return cut


def perceptron(
    inputs: int,
    ranks: Sequence[int],
    outputs: int,
    *,
    free: int,
    sizes: Sequence[int],
    activation: Callable[[jax.Array], jax.Array],
    dtype: Any,
    init: str,
    live: Sequence[int] | None = None,
    remat: str = "none",
) -> Perceptron:
    """The perceptron for observations of `inputs` numbers in leaves of `ranks`; `init` is one of config.INITS.

    `outputs` policy parameters depend on the observation, and `free` more do not. With `live` an observation has one
    leaf: the inputs at these places. `remat`, one of config.REMATS: parts of a layer that are computed again.
    """
    cut = (lambda kernel: kernel) if live is None else _kernel_rows(live, inputs)
    count = inputs if live is None else len(live)
    widths = (inputs, *sizes)
    names = [f"layer_{i}" for i in range(len(sizes))]

    def init_params(key: Key) -> Params:
        keys = jax.random.split(key, len(sizes) + 2)

        def layer(key: Key, width: int, n: int, scale: float) -> Params:
            return layers.init_dense(key, (width, n), layers.kernel_init(init, scale))

        shapes = zip(keys[2:], widths[:-1], sizes, strict=True)
        torso = {name: layer(k, width, n, HIDDEN_SCALE) for name, (k, width, n) in zip(names, shapes, strict=True)}
        heads = {
            "policy": layer(keys[0], widths[-1], outputs, POLICY_SCALE),
            "value": layer(keys[1], widths[-1], 1, VALUE_SCALE),
        }
        return {"torso": torso, **heads, **layers.init_free(free)}

    def living(params: Params) -> Params:
        first = params["torso"][names[0]]
        if first["kernel"].shape[0] == count:
            return params
        return params | {"torso": params["torso"] | {names[0]: first | {"kernel": cut(first["kernel"])}}}

    def forward(own: Params, x: jax.Array) -> jax.Array:
        return activation(affine(**own, x=x.astype(dtype)))

    through = rematerialised(forward, remat)

    def apply(params: Params, observation: PyTree) -> tuple[jax.Array, jax.Array]:
        params = living(params)
        joined = layers.joined(observation, ranks)
        x = jnp.moveaxis(joined, -1, 0).reshape(joined.shape[-1], -1)
        for name in names:
            x = through(params["torso"][name], x)
        heads = jax.tree.map(lambda *parts: jnp.concatenate(parts, -1), params["policy"], params["value"])
        outputs_by_row = affine(**heads, x=x).reshape(outputs + 1, *joined.shape[:-1])
        parameters, value = jnp.moveaxis(outputs_by_row[:outputs], 0, -1), outputs_by_row[outputs]
        return layers.with_free(params, parameters), value

    return Perceptron(init_params, apply, living)
