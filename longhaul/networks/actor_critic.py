"""Actor-critic networks as pairs of pure functions.

Torsos: `mlp` flattens and joins all leaves of an observation; `deepset` (Zaheer et al. 2017) embeds each item of a
rank-2 leaf [items, features] with one shared layer and takes the maximum over items, so that the order of neighbours
does not matter. The last feature of an item marks it as present (1) or padding (0). `latent`, `wayformer` and `mtr`
attend to the items (attention.py): their width is the first of `sizes`, their depth the number of sizes, and GELU their
activation. `nature`, `impala` and `minatar` take one image (conv.py), with sizes and ReLU of their own. With `norm`
each layer, except in torsos by attention, is normalised before its activation (Ba et al. 2016, arXiv 1607.06450).

Without memory the actor and the critic of `mlp` and `deepset` are two towers (PureJaxRL's layout). With `shared` they
have one torso, and an `mlp` is computed as in mlp.py. With `memory > 0` they share a torso and a gated recurrent unit
of that width. A torso of sets or images is always shared, because it is nearly all of the work; after a torso by
attention each head has a hidden layer of its own.

With `precision` "bf16" the torso computes in bfloat16; parameters, memory (in which rounding would add up along time)
and the last layers stay in float32. In an `mlp` tower only the factors of products are rounded (layers.mixed_affine).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.networks import attention, conv, layers, user_network
from longhaul.networks.config import CONVOLUTIONS, ENCODERS, INITS, REMATS, TORSOS
from longhaul.networks.layers import (
    HIDDEN_SCALE,
    POLICY_SCALE,
    PRECISIONS,
    VALUE_SCALE,
    NamedKey,
    rematerialised,
)
from longhaul.networks.mlp import perceptron
from longhaul.runtime.user_modules import is_named
from longhaul.types import Key, Params, PyTree, platform

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
RISING = ("tanh", "relu")
"""Activations that never fall, and are 0 at 0."""

ENCODED = (*ENCODERS, *CONVOLUTIONS)
"""Torsos that are nearly all of the work, and which actor and critic share."""

Apply = Callable[[Params, PyTree, PyTree], tuple[jax.Array, jax.Array, PyTree]]


class ActorCritic(NamedTuple):
    """`apply(params, memory, observation) -> (parameters, value, memory)`; leading axes of the observation are free.

    parameters float32 [..., n], value float32 [...], memory [B, width] or ().
    """

    init: Callable[[Key], Params]
    apply: Apply
    memory: Callable[[int], PyTree]  # B -> memory at an episode's start
    both: Apply  # `apply`, or a faster way to it where policy and value are both used
    live: Callable[[Params], Params] = lambda params: params
    """Parameters that have a gradient; `apply` takes them too. Computed once, they serve many chunks of a batch."""


class Tower(NamedTuple):
    """`apply(params, observation) -> float32 [..., outputs]`; leading axes of the observation are free."""

    init: Callable[[Key], Params]
    apply: Callable[[Params, PyTree], jax.Array]


class _Torso(NamedTuple):
    """`apply(params, observation) -> features [..., width]`."""

    init: Callable[[NamedKey], Params]
    apply: Callable[[Params, PyTree], jax.Array]
    width: int


def count(params: Params) -> int:
    """Number of parameters; shapes suffice."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def _dense(key: NamedKey, inputs: int, outputs: int, scale: float, init: str) -> Params:
    return layers.init_dense(key.draw(), (inputs, outputs), layers.kernel_init(init, scale))


def _torso(
    observation: PyTree, kind: str, sizes: Sequence[int], activation: str, dtype: Any, remat: str, init: str, norm: bool
) -> _Torso:
    """The torso for observations like `observation` (a pytree of ShapeDtypeStruct)."""
    if kind in CONVOLUTIONS:
        kernels = layers.kernel_init(init, HIDDEN_SCALE)
        image = conv.encoder(observation, kind, kernels, dtype=dtype, remat=remat, norm=norm)
        return _encoder_torso(image, conv.FEATURES[kind])
    if is_named(kind):
        return _encoder_torso(user_network.encoder(observation, kind, sizes[0]), sizes[0])
    if kind in ENCODERS:
        return _encoder_torso(
            attention.encoder(observation, kind, sizes[0], len(sizes), dtype=dtype, remat=remat), sizes[0]
        )
    return _mlp_torso(observation, kind == "deepset", sizes, activation, dtype, remat, init, norm)


def _mlp_torso(
    observation: PyTree, pools: bool, sizes: Sequence[int], activation: str, dtype: Any, remat: str, init: str,
    norm: bool,
) -> _Torso:  # fmt: skip
    """The perceptron of all leaves of an observation, joined.

    With `pools` (a deep set) the items of a leaf [items, features] pass a layer of half the width, and of each of its
    outputs the maximum over the items is joined.
    """
    shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(observation)]
    ranks = [len(shape) for shape in shapes]
    pooled = [pools and rank == 2 for rank in ranks]
    width = sizes[0] // 2  # of a pooled leaf
    activate, rising = ACTIVATIONS[activation], activation in RISING

    def init_params(key: NamedKey) -> Params:
        joined = sum(width if pool else math.prod(shape) for shape, pool in zip(shapes, pooled, strict=True))
        kernels = {f"item_{i}": (shape[-1], width) for i, shape in enumerate(shapes) if pooled[i]}
        kernels |= {f"layer_{i}": shape for i, shape in enumerate(zip((joined, *sizes), sizes, strict=False))}
        params = {name: _dense(key.child(name), *shape, HIDDEN_SCALE, init) for name, shape in kernels.items()}
        if not norm:
            return params
        return params | {f"{name}_norm": layers.init_norm(outputs) for name, (_, outputs) in kernels.items()}

    def layer(dense: Params, scale: Params | None, x: jax.Array) -> jax.Array:
        x = layers.dense(dense, x, dtype)
        return activate(x if scale is None else layers.one_pass_layer_norm(scale, x))

    def pool(dense: Params, scale: Params | None, x: jax.Array) -> jax.Array:
        """The maximum of each feature over the items [..., items, features] that are present."""
        if rising and not norm and platform() == "cpu":
            most = layers.max_pooled_embedding(
                dense["kernel"], dense["bias"], x.reshape(-1, *x.shape[-2:]).astype(dtype)
            )
            return activate(most.reshape(*x.shape[:-2], -1).astype(dtype))
        present = x[..., -1:].astype(dtype)
        if not rising:
            return jnp.max(layer(dense, scale, x) * present, axis=-2)
        x = layers.dense(dense, x, dtype)  # activated after the maximum: the activation keeps the order
        x = x if scale is None else layers.one_pass_layer_norm(scale, x)
        return activate(jnp.max(x * present, axis=-2))

    def apply(params: Params, observed: PyTree) -> jax.Array:
        def through(part: Callable[..., jax.Array], name: str, x: jax.Array) -> jax.Array:
            return rematerialised(part, remat)(params[name], params[f"{name}_norm"] if norm else None, x)

        lead, parts = layers.leading_axes(observed, ranks), []
        for i, leaf in enumerate(jax.tree.leaves(observed)):
            x = leaf.astype(jnp.float32)
            parts.append(through(pool, f"item_{i}", x) if pooled[i] else x.reshape(*lead, -1).astype(dtype))
        x = jnp.concatenate(parts, axis=-1)
        for i in range(len(sizes)):
            x = through(layer, f"layer_{i}", x)
        return x

    return _Torso(init_params, apply, sizes[-1])


def _encoder_torso(encoder: layers.Encoder, width: int) -> _Torso:
    """The torso that an encoder is."""
    return _Torso(
        lambda key: {"encoder": encoder.init(key.draw())},
        lambda params, observed: encoder.apply(params["encoder"], observed),
        width,
    )


def tower(
    observation: PyTree,
    outputs: int,
    *,
    torso: str,
    sizes: Sequence[int],
    activation: str,
    precision: str,
    remat: str,
    init: str,
    scale: float = 1.0,
) -> Tower:
    """A torso with one head, whose kernel begins with `scale`; arguments and errors are those of `actor_critic`.

    A critic of vectors takes (seen, action) for its observation; a torso of images takes one image alone.
    """
    _check(observation, torso, sizes, activation, precision, remat, init)
    trunk = _torso(observation, torso, sizes, activation, PRECISIONS[precision], remat, init, norm=False)
    attends = torso in ENCODERS

    def init_params(key: Key) -> Params:
        root = NamedKey(key)
        params = {"torso": trunk.init(root.child("torso"))}
        params["head"] = _dense(root.child("head"), trunk.width, outputs, scale, init)
        if attends:
            params["hidden"] = _dense(root.child("hidden"), trunk.width, sizes[0], HIDDEN_SCALE, init)
        return params

    def apply(params: Params, observed: PyTree) -> jax.Array:
        features = trunk.apply(params["torso"], observed)
        if attends:
            features = jax.nn.gelu(layers.dense(params["hidden"], features, PRECISIONS[precision]))
        return layers.dense(params["head"], features)

    if torso == "mlp" and precision == "bf16":
        ranks = [len(leaf.shape) for leaf in jax.tree.leaves(observation)]
        return Tower(init_params, _mixed_tower(ranks, len(sizes), ACTIVATIONS[activation], remat))
    return Tower(init_params, apply)


def _mixed_tower(
    ranks: Sequence[int], depth: int, activation: Callable[[jax.Array], jax.Array], remat: str
) -> Callable[[Params, PyTree], jax.Array]:
    """`Tower.apply` of an mlp whose products have bfloat16 factors and float32 sums."""

    def layer(own: Params, x: jax.Array) -> jax.Array:
        return activation(layers.mixed_affine(x, own["kernel"], own["bias"]))

    through = rematerialised(layer, remat)

    def apply(params: Params, observation: PyTree) -> jax.Array:
        joined = layers.joined(observation, ranks)
        x = joined.reshape(-1, joined.shape[-1])
        for i in range(depth):
            x = through(params["torso"][f"layer_{i}"], x)
        x = layers.dense(params["head"], x)
        return x.reshape(*joined.shape[:-1], x.shape[-1])

    return apply


def _check(
    observation: PyTree, torso: str, sizes: Sequence[int], activation: str, precision: str, remat: str, init: str
) -> None:
    """Raises ValueError for names and sizes that can't be, and where a torso of images does not fit."""
    choices = (
        ("torso", torso, TORSOS),
        ("activation", activation, tuple(ACTIVATIONS)),
        ("precision", precision, tuple(PRECISIONS)),
        ("remat", remat, REMATS),
        ("init", init, INITS),
    )
    for name, value, allowed in choices:
        if value not in allowed and not (name == "torso" and is_named(value)):
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes are {tuple(sizes)}; give at least one, all positive")
    if torso in CONVOLUTIONS:
        conv.check(observation, torso)


def actor_critic(
    observation: PyTree,
    outputs: int,
    *,
    free: int = 0,
    torso: str = "mlp",
    sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    memory: int = 0,
    precision: str = "fp32",
    remat: str = "none",
    shared: bool = False,
    init: str = "orthogonal",
    norm: bool = False,
    live: Sequence[int] | None = None,
) -> ActorCritic:
    """Network for observations like `observation` (a pytree of ShapeDtypeStruct) and `outputs` policy parameters.

    `free` more parameters do not depend on the observation. `memory` is the width of the recurrent unit, 0 for none.
    `remat`, one of config.REMATS: parts computed again for the gradient; less memory, up to a third more work.
    `init` is one of config.INITS. `norm` normalises layers. `live`, where `takes_live` allows it: places of the inputs
    that are not 0 in every observation; the network is applied to these alone. Raises ValueError for sizes and names
    that can't be, and where the torso does not fit the observation.
    """
    if memory < 0:
        raise ValueError(f"memory is {memory}; it must be at least 0")
    _check(observation, torso, sizes, activation, precision, remat, init)
    dtype = PRECISIONS[precision]
    if takes_live(torso, shared, memory, norm):
        ranks = [len(leaf.shape) for leaf in jax.tree.leaves(observation)]
        mlp = perceptron(
            count(observation), ranks, outputs, free=free, sizes=sizes, activation=ACTIVATIONS[activation],
            dtype=dtype, init=init, live=live, remat=remat,
        )  # fmt: skip

        def plain(params: Params, carried: PyTree, observed: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
            return (*mlp.apply(params, observed), carried)

        return ActorCritic(mlp.init, plain, lambda _: (), plain, mlp.live)
    assert live is None, "live is given for a network that `takes_live` excludes"
    trunk = _torso(observation, torso, sizes, activation, dtype, remat, init, norm)
    apart = not (memory or shared or torso in ENCODED or is_named(torso))
    towers = ("actor", "critic") if apart else ("torso",)
    heads = _heads(memory or trunk.width, outputs, sizes[0] if torso in ENCODERS else None, free, dtype, init)
    step = rematerialised(layers.gru, remat)

    def init_params(key: Key) -> Params:
        root = NamedKey(key)
        params = {name: trunk.init(root.child(name)) for name in towers}
        if memory:
            params["memory"] = layers.init_gru(root.child("memory"), trunk.width, memory)
        return params | heads.init(root)

    def apply(params: Params, carried: PyTree, observed: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        features = [trunk.apply(params[name], observed) for name in towers]
        if memory:
            carried, output = step(params["memory"], carried, features[0].astype(jnp.float32))
            features = [output]
        return (*heads.apply(params, features), carried)

    def both(params: Params, carried: PyTree, observed: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        """Both towers as one twice as wide: half as many kernels, each of which takes a GPU as long to start."""
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), params["actor"], params["critic"])
        features = jax.vmap(lambda own: trunk.apply(own, observed))(stacked)
        return (*heads.apply(params, (features[0], features[1])), carried)

    return ActorCritic(
        init_params,
        apply,
        lambda batch: jnp.zeros((batch, memory), jnp.float32) if memory else (),
        both if apart and platform() != "cpu" else apply,
    )


class _Heads(NamedTuple):
    """Heads of actor and critic, beside a torso."""

    init: Callable[[NamedKey], Params]
    apply: Callable[[Params, Sequence[jax.Array]], tuple[jax.Array, jax.Array]]
    #     (params, features of the actor and of the critic, or those that they share) -> (policy parameters, value)


def _heads(width: int, outputs: int, hidden: int | None, free: int, dtype: Any, init: str) -> _Heads:
    """Heads on `width` features, each with a hidden layer of its own where `hidden` is its width."""

    def init_params(root: NamedKey) -> Params:
        params: Params = {}
        for head, size, scale in (("policy", outputs, POLICY_SCALE), ("value", 1, VALUE_SCALE)):
            if hidden is not None:
                params[f"{head}_hidden"] = _dense(root.child(f"{head}_hidden"), width, hidden, HIDDEN_SCALE, init)
            params[head] = _dense(root.child(head), width if hidden is None else hidden, size, scale, init)
        return params | layers.init_free(free)

    def apply(params: Params, features: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        read = []
        for name, own in (("policy", features[0]), ("value", features[-1])):
            own = own if hidden is None else jax.nn.gelu(layers.dense(params[f"{name}_hidden"], own, dtype))
            read.append(layers.dense(params[name], own))
        parameters, value = read[0], read[1][..., 0]
        return layers.with_free(params, parameters), value

    return _Heads(init_params, apply)


def takes_live(torso: str, shared: bool, memory: int, norm: bool = False) -> bool:
    """True for a network that can leave out inputs that are always 0."""
    return torso == "mlp" and shared and not memory and not norm
