"""Layers that the networks share, in plain JAX: products, normalisations, a recurrent unit, and their initial values.

The parameters of a layer are float32 arrays, kernels [inputs, outputs]; the leading axes of its input are free.

Initial values are those of Flax 0.12, bit for bit, because earlier versions of this package used it: a run with the
same seed begins with the same numbers. Flax folds into the network's key a hash of the parameter's path (`NamedKey`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.types import Key, Params

Initialise = Callable[[Key, tuple[int, ...], Any], jax.Array]
"""(key, shape [..., inputs, outputs], dtype) -> kernel."""

EPSILON = 1e-6
"""Number added to a variance before its root is taken."""


class NamedKey(NamedTuple):
    """Random key of a part of a network: the key of the whole network and the path to the part."""

    key: Key
    path: tuple[str, ...] = ()

    def child(self, name: str) -> NamedKey:
        return NamedKey(self.key, (*self.path, name))

    def draw(self) -> Key:
        """Key of the part's kernel. The last byte of the hashed text is Flax's count of a part's draws: the first."""
        digest = hashlib.sha1("".join(self.path).encode() + b"\x01", usedforsecurity=False).digest()
        return jax.random.fold_in(self.key, jnp.uint32(int.from_bytes(digest[:4], "big")))


def kernel_init(name: str, scale: float) -> Initialise:
    """Initialiser of a kernel: `name` is one of INITS; LeCun's has no scale."""
    return jax.nn.initializers.orthogonal(scale) if name == "orthogonal" else jax.nn.initializers.lecun_normal()


def init_dense(key: Key, shape: tuple[int, ...], kernels: Initialise, *, bias: bool = True) -> dict[str, jax.Array]:
    """Kernel of this shape [..., inputs, outputs], and a bias of zeros."""
    kernel = kernels(key, shape, jnp.float32)
    return {"kernel": kernel} | ({"bias": jnp.zeros(shape[-1], jnp.float32)} if bias else {})


def init_norm(features: int) -> dict[str, jax.Array]:
    """Scale and bias of a layer normalisation."""
    return {"scale": jnp.ones(features, jnp.float32), "bias": jnp.zeros(features, jnp.float32)}


def init_gru(key: NamedKey, inputs: int, width: int) -> dict[str, Params]:
    """Parameters of `gru`: kernels from the input are LeCun's normal, those from the memory orthogonal."""
    sources = {"i": (inputs, jax.nn.initializers.lecun_normal()), "h": (width, jax.nn.initializers.orthogonal())}
    return {
        source + gate: init_dense(
            key.child(source + gate).draw(), (size, width), kernels, bias=source == "i" or gate == "n"
        )
        for source, (size, kernels) in sources.items()
        for gate in "rzn"
    }


def along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Vector [features] with leading axes of length 1, as many as x [..., features] has."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x @ kernel + bias in the precision of x."""
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))
    return y if bias is None else y + along_last(bias.astype(x.dtype), y)


def dense(params: Mapping[str, jax.Array], x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Layer of `init_dense`, computed in `dtype`."""
    return affine(x.astype(dtype), params["kernel"], params.get("bias"))


def contract(a: jax.Array, b: jax.Array, i: int, j: int) -> jax.Array:
    """Product of two arrays over axis i of `a` and axis j of `b`, added up in float32."""
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def mixed_affine(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """x [rows, inputs] @ kernel + bias, float32: factors are rounded to bfloat16, sums are not; also in its gradients.

    On a CPU that multiplies bfloat16 this is faster than rounded sums, after which each step converts.
    """
    return _mixed_forward(x, kernel, bias)[0]


def _mixed_forward(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    factors = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    return contract(*factors, 1, 0) + bias[None], factors


def _mixed_backward(factors: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    (x, kernel), g = factors, g.astype(jnp.bfloat16)
    # XLA uses a CPU's bfloat16 instructions only where the sum runs over the last axis of the first factor; elsewhere
    # it widens both factors, at a fifth of the speed. It transposes x.T back, but not with a row of ones appended.
    ones = jnp.ones((1, x.shape[0]), x.dtype)
    both = contract(jnp.concatenate([x.T, ones]), g, 1, 0)
    return contract(g, kernel, 1, 1), both[:-1], both[-1]


mixed_affine.defvjp(_mixed_forward, _mixed_backward)


def layer_norm(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Layer normalisation (Ba et al. 2016, arXiv 1607.06450) over the last axis, in float32; -> x's precision."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + EPSILON)
    return (scaled * along_last(params["scale"], x) + along_last(params["bias"], x)).astype(x.dtype)


def one_pass_layer_norm(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """`layer_norm` with the variance E[x^2] - E[x]^2, which reads x once; less exact where the mean is large."""
    wide = x.astype(jnp.float32)
    squares = jnp.square(wide)
    mean = jnp.mean(wide, axis=-1)
    variance = jnp.maximum(0.0, jnp.mean(squares, axis=-1) - jnp.square(mean))
    factor = jax.lax.rsqrt(variance[..., None] + EPSILON) * along_last(params["scale"], x)
    centred = x.astype(jnp.float32) - mean[..., None]  # gradients of x are added up in its own precision
    return (centred * factor + along_last(params["bias"], x)).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, axis: int = -1) -> jax.Array:
    """Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467) over `axis` (below 0), in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=axis, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32).reshape((1,) * (y.ndim + axis) + (-1,) + (1,) * (-1 - axis))).astype(x.dtype)


def gru(params: Mapping[str, Params], memory: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(memory, output), the same array [..., width], after input x [..., inputs] of a gated recurrent unit (Cho et al.
    2014, arXiv 1406.1078). Two results, because their gradients are then added up apart from each other."""

    def gate(name: str) -> tuple[jax.Array, jax.Array]:
        return dense(params["i" + name], x), dense(params["h" + name], memory)

    reset = jax.nn.sigmoid(jnp.add(*gate("r")))
    keep = jax.nn.sigmoid(jnp.add(*gate("z")))
    fresh, old = gate("n")
    memory = (1.0 - keep) * jnp.tanh(fresh + reset * old) + keep * memory
    return memory, memory
