"""Layers that the networks share, in plain JAX: products, normalisations, a recurrent unit, the maximum over a set;
their initial values, their precision and what of them is computed again.

The parameters of a layer are float32 arrays, kernels [inputs, outputs]; the leading axes of its input are free.

Initial values are those of Flax 0.12, bit for bit, because earlier versions of this package used it: a run with the
same seed begins with the same numbers. Flax folds into the network's key a hash of the parameter's path (`NamedKey`).

bfloat16 has the exponents of float32, so that no gradient vanishes and no loss is scaled (Micikevicius et al. 2018,
arXiv 1710.03740, scale theirs for float16). Parameters, the optimiser, gradients, normalisation, memory, heads and
losses stay in float32; only the factors of a torso's products are rounded.

Rematerialisation (Chen et al. 2016, arXiv 1604.06174) computes a part of the network again for its gradient instead of
keeping its results. The parts are a layer of a perceptron, the embedding of a set's items, a step of the recurrent
unit, a block of an encoder. A part's input is always kept, so the memory needed is that of all inputs and of the widest
part's inside. Numbers change in their last bits at most.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from longhaul.types import Key, Params, PyTree

Initialise = Callable[[Key, tuple[int, ...], Any], jax.Array]
"""(key, shape [..., inputs, outputs], dtype) -> kernel."""

PRECISIONS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
"""Types that a torso computes in."""

POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots-no-batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""Values of a part kept beside its input: none; all products; products with a kernel, but not attention's."""

Function = TypeVar("Function", bound=Callable[..., Any])

EPSILON = 1e-6
"""Number added to a variance before its root is taken."""

HIDDEN_SCALE, POLICY_SCALE, VALUE_SCALE = math.sqrt(2.0), 0.01, 1.0
"""Scales of orthogonal kernels: of hidden layers, the policy's head and the value's head."""

LOG_STD = -0.5
"""Initial logarithm of a Gaussian policy's standard deviation."""


class Encoder(NamedTuple):
    """`apply(params, observation) -> features` [..., width]; leading axes of the observation are free."""

    init: Callable[[Key], Params]
    apply: Callable[[Params, PyTree], jax.Array]


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
    """Scale and bias, float32 [features] each, of a layer normalisation."""
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


def init_free(count: int) -> Params:
    """Parameters of a policy's `count` outputs that do not depend on the observation; none at 0."""
    return {"log_std": jnp.full(count, LOG_STD, jnp.float32)} if count else {}


def with_free(params: Params, outputs: jax.Array) -> jax.Array:
    """Outputs [..., n] and after them those of `init_free`, if there are any."""
    if "log_std" not in params:
        return outputs
    free = params["log_std"]
    return jnp.concatenate([outputs, jnp.broadcast_to(free, (*outputs.shape[:-1], len(free)))], axis=-1)


def leading_axes(observation: PyTree, ranks: Sequence[int]) -> tuple[int, ...]:
    """Leading axes of an observation whose leaves have these ranks without them."""
    first = jax.tree.leaves(observation)[0]
    return first.shape[: first.ndim - ranks[0]]


def joined(observation: PyTree, ranks: Sequence[int]) -> jax.Array:
    """All numbers of an observation whose leaves have these ranks: float32 [..., n], leading axes kept."""
    lead = leading_axes(observation, ranks)
    leaves = [leaf.astype(jnp.float32).reshape(*lead, -1) for leaf in jax.tree.leaves(observation)]
    return jnp.concatenate(leaves, axis=-1)


def along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Vector [features] with leading axes of length 1, as many as x [..., features] has."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., inputs] @ kernel [inputs, outputs] + bias [outputs], computed in the type of x."""
    y = jax.lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))
    return y if bias is None else y + along_last(bias.astype(x.dtype), y)


def dense(params: Mapping[str, jax.Array], x: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Layer of `init_dense` on x [..., inputs] -> [..., outputs], computed in `dtype`."""
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


def _unless_converted(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in ("convert_element_type", "bitcast_convert_type")


def rematerialised(part: Function, remat: str, *, scanned: bool = False, widens: bool = False) -> Function:
    """Part of a network whose gradient computes it again by the rule `remat`, one of config.REMATS.

    `scanned`: it is the body of a loop. Its gradient is another loop, so XLA cannot merge the two computations, and the
    barrier that keeps them apart elsewhere would only cost time. `widens`: it computes in a wider type than that of its
    kernels; without `remat` their gradient widens them again, where each loop kept all layers' in the wider type.
    """
    if remat == "none" and not widens:
        return part
    policy = _unless_converted if remat == "none" else POLICIES[remat]
    return jax.checkpoint(part, policy=policy, prevent_cse=not scanned)  # type: ignore[return-value]


def _embedded(kernel: jax.Array, bias: jax.Array, item: jax.Array) -> jax.Array:
    """Embedding float32 [rows, features] of one item [rows, inputs], whose last input is its presence."""
    return (contract(item, kernel.astype(item.dtype), 1, 0) + bias[None]) * item[:, -1:].astype(jnp.float32)


@jax.custom_vjp
def max_pooled_embedding(kernel: jax.Array, bias: jax.Array, items: jax.Array) -> jax.Array:
    """Maximum over items of (items @ kernel + bias) * (their last input), float32 [rows, features]; for CPUs.

    kernel [inputs, features], bias [features], items [rows, items, inputs]. Factors of products have the items' type.
    The first of equal items has the gradient.

    All items at once make an array [rows, items, features], which no cache holds and whose gradient takes five passes.
    Here a loop over the items keeps the maximum so far and its item; the gradient needs nothing else. Measured on one
    core with 1,024 rows of 64 features, gradient included: 8 items take 0.64 ms instead of 2.6, 64 items 5.1 instead of
    51. On a GPU, which starts one kernel as fast as eight, all items at once are faster.
    """
    return _max_pooled_forward(kernel, bias, items)[0]


def _max_pooled_forward(kernel: jax.Array, bias: jax.Array, items: jax.Array) -> tuple[jax.Array, Any]:
    each = jnp.moveaxis(items, 1, 0)

    def step(so_far: tuple[jax.Array, jax.Array], numbered: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        (most, which), (i, item) = so_far, numbered
        value = _embedded(kernel, bias, item)
        return (jnp.maximum(most, value), jnp.where(value > most, i, which)), None

    first = _embedded(kernel, bias, each[0])
    start = first, jnp.zeros(first.shape, jnp.int32)
    (most, which), _ = jax.lax.scan(step, start, (jnp.arange(1, len(each), dtype=jnp.int32), each[1:]))
    return most, (kernel, bias, items, which)


def _max_pooled_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
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


max_pooled_embedding.defvjp(_max_pooled_forward, _max_pooled_backward)
