"""Actor-critic networks as pairs of pure functions; the only file that knows Flax.

Torsos: `mlp` flattens and joins all leaves of an observation; `deepset` (Zaheer et al. 2017) embeds each item of a
rank-2 leaf [items, features] with one shared layer and takes the maximum over items, so that the order of neighbours
does not matter. The last feature of an item says whether it is there (1) or padding (0). `latent`, `wayformer` and
`mtr` attend to the items (encoders.py); their width is the first of `sizes`, their depth how many there are, and GELU
their activation.

Without memory the actor and the critic of `mlp` and `deepset` are two towers (PureJaxRL's layout); with `memory > 0`
they share a torso and a gated recurrent unit (Cho et al. 2014) of that width. An encoder by attention is shared, for it
is nearly all of the work; each head then has a hidden layer of its own.

With `precision` "bf16" the torso computes in bfloat16; parameters, memory (in which rounding would add up along time)
and the last layers stay in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from longhaul import encoders
from longhaul.types import Key, Params, PyTree

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu,
}  # fmt: skip
TORSOS = ("mlp", "deepset", *encoders.ENCODERS)
PRECISIONS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
"""What a torso computes in."""


class ActorCritic(NamedTuple):
    """`apply(params, memory, observation) -> (parameters, value, memory)`; leading axes of the observation are free.

    parameters float32 [..., n], value float32 [...], memory [B, width] or ().
    """

    init: Callable[[Key], Params]
    apply: Callable[[Params, PyTree, PyTree], tuple[jax.Array, jax.Array, PyTree]]
    memory: Callable[[int], PyTree]  # B -> memory at an episode's start


def count(params: Params) -> int:
    """How many numbers the parameters (or their shapes) are."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def _dense(features: int, scale: float, name: str, dtype: Any = jnp.float32) -> nn.Dense:
    return nn.Dense(features, dtype=dtype, kernel_init=nn.initializers.orthogonal(scale), name=name)


class _Torso(nn.Module):
    """An observation -> features [..., sizes[-1]]."""

    kind: str
    sizes: Sequence[int]
    activation: str
    ranks: Sequence[int]  # the rank of each leaf of one observation
    dtype: Any
    remat: bool

    @nn.compact
    def __call__(self, observation: PyTree) -> jax.Array:
        if self.kind in encoders.ENCODERS:
            return self._attend(observation)
        act = ACTIVATIONS[self.activation]
        leaves = jax.tree.leaves(observation)
        lead = leaves[0].ndim - self.ranks[0]
        parts = []
        for i, (leaf, rank) in enumerate(zip(leaves, self.ranks, strict=True)):
            x = leaf.astype(jnp.float32)
            if self.kind == "deepset" and rank == 2:
                items = act(_dense(self.sizes[0] // 2, np.sqrt(2.0), f"item_{i}", self.dtype)(x))
                parts.append(jnp.max(items * x[..., -1:].astype(items.dtype), axis=-2))
            else:
                parts.append(x.reshape(*x.shape[:lead], -1).astype(self.dtype))
        x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        for i, size in enumerate(self.sizes):
            x = act(_dense(size, np.sqrt(2.0), f"layer_{i}", self.dtype)(x))
        return x

    def _attend(self, observation: PyTree) -> jax.Array:
        one = jax.tree.unflatten(
            jax.tree.structure(observation),
            [
                jax.ShapeDtypeStruct(leaf.shape[leaf.ndim - rank :], leaf.dtype)
                for leaf, rank in zip(jax.tree.leaves(observation), self.ranks, strict=True)
            ],
        )
        encoder = encoders.encoder(one, self.kind, self.sizes[0], len(self.sizes), dtype=self.dtype, remat=self.remat)
        return encoder.apply(self.param("encoder", encoder.init), observation)


class _Network(nn.Module):
    kind: str
    sizes: Sequence[int]
    activation: str
    ranks: Sequence[int]
    dtype: Any
    remat: bool
    outputs: int
    free: int
    width: int

    @nn.compact
    def __call__(self, memory: PyTree, observation: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        torso = (self.kind, self.sizes, self.activation, self.ranks, self.dtype, self.remat)
        attends = self.kind in encoders.ENCODERS
        if self.width:
            features = _Torso(*torso, name="torso")(observation)
            memory, features = nn.GRUCell(self.width, name="memory")(memory, features.astype(jnp.float32))
            for_actor = for_critic = features
        elif attends:
            for_actor = for_critic = _Torso(*torso, name="torso")(observation)
        else:
            for_actor = _Torso(*torso, name="actor")(observation)
            for_critic = _Torso(*torso, name="critic")(observation)
        if attends:
            for_actor, for_critic = (
                nn.gelu(_dense(self.sizes[0], np.sqrt(2.0), name, self.dtype)(features))
                for features, name in ((for_actor, "policy_hidden"), (for_critic, "value_hidden"))
            )
        parameters = _dense(self.outputs, 0.01, "policy")(for_actor)
        value = _dense(1, 1.0, "value")(for_critic)[..., 0]
        if self.free:
            extra = self.param("log_std", nn.initializers.constant(-0.5), (self.free,))
            extra = jnp.broadcast_to(extra, (*parameters.shape[:-1], self.free))
            parameters = jnp.concatenate([parameters, extra], axis=-1)
        return parameters, value, memory


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
    remat: bool = False,
) -> ActorCritic:
    """The network for observations like `observation` (a pytree of ShapeDtypeStruct) and `outputs` policy parameters.

    `free` more parameters do not depend on the observation. `memory` is the width of the recurrent unit, 0 for none.
    With `remat` the blocks of an encoder are computed again for the gradient: less memory, about a third more work.
    """
    if torso not in TORSOS:
        raise ValueError(f"torso is {torso!r}; it must be one of {', '.join(TORSOS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if not sizes or min(sizes) < 1 or memory < 0:
        raise ValueError(
            f"sizes are {tuple(sizes)} and memory {memory}; give at least one positive size and memory >= 0"
        )
    leaves = jax.tree.leaves(observation)
    ranks = tuple(len(leaf.shape) for leaf in leaves)
    network = _Network(torso, tuple(sizes), activation, ranks, PRECISIONS[precision], remat, outputs, free, memory)

    def initial(batch: int) -> PyTree:
        return jnp.zeros((batch, memory), jnp.float32) if memory else ()

    def init(key: Key) -> Params:
        example = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation)
        return network.init(key, initial(1), example)["params"]

    def apply(params: Params, carried: PyTree, observed: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        return network.apply({"params": params}, carried, observed)  # type: ignore[return-value]

    return ActorCritic(init, apply, initial)
