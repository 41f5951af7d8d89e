"""Actor-critic networks as pairs of pure functions; the only file that knows Flax.

Torsos: `mlp` flattens and joins all leaves of an observation; `deepset` (Zaheer et al. 2017) embeds each item of a
rank-2 leaf [items, features] with one shared layer and takes the maximum over items, so that the order of neighbours
does not matter. The last feature of an item says whether it is there (1) or padding (0). `latent`, `wayformer` and
`mtr` attend to the items (encoders.py); their width is the first of `sizes`, their depth how many there are, and GELU
their activation. `nature`, `impala` and `minatar` see one image (convolutions.py), with sizes and ReLU of their own.
With `norm` each layer but an encoder's by attention is normalised before its activation (Ba et al. 2016, arXiv
1607.06450).

Without memory the actor and the critic of `mlp` and `deepset` are two towers (PureJaxRL's layout), unless they are to
be `shared`: then they have one torso, and an `mlp` is computed as perceptron.py has it. With `memory > 0` they share a
torso and a gated recurrent unit (Cho et al. 2014) of that width. An encoder of sets or images is shared, for it is
nearly all of the work; after one by attention, each head has a hidden layer of its own.

With `precision` "bf16" the torso computes in bfloat16; parameters, memory (in which rounding would add up along time)
and the last layers stay in float32. Of a tower's `mlp` only the factors of products are rounded (precision.affine).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from longhaul.networks import attention, conv, set_pooling
from longhaul.networks.mlp import perceptron
from longhaul.networks.precision import POLICIES, PRECISIONS, REMATS, affine, rematerialised
from longhaul.types import Key, Params, PyTree

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": nn.tanh, "relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu,
}  # fmt: skip
RISING = ("tanh", "relu")
"""Activations that never fall, and are 0 at 0."""

TORSOS = ("mlp", "deepset", *attention.ENCODERS, *conv.CONVOLUTIONS)
ENCODED = (*attention.ENCODERS, *conv.CONVOLUTIONS)
"""Torsos that are nearly all of the work: actor and critic have one together."""

INITS = ("orthogonal", "lecun")
"""How kernels begin: orthogonal with a scale of their own (0.01 for the policy's), or as Flax does if not told."""


Apply = Callable[[Params, PyTree, PyTree], tuple[jax.Array, jax.Array, PyTree]]


class ActorCritic(NamedTuple):
    """`apply(params, memory, observation) -> (parameters, value, memory)`; leading axes of the observation are free.

    parameters float32 [..., n], value float32 [...], memory [B, width] or ().
    """

    init: Callable[[Key], Params]
    apply: Apply
    memory: Callable[[int], PyTree]  # B -> memory at an episode's start
    live: Callable[[Params], Params] = lambda params: params
    """What has a gradient of the parameters; `apply` takes it as well. Found once, it serves many chunks of a batch."""
    both: Apply | None = None
    """`apply` where policy and value are wanted both, if there is a faster way to it."""


def count(params: Params) -> int:
    """How many numbers the parameters (or their shapes) are."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def _kernels(begin: str) -> Callable[[float], Callable[..., jax.Array]]:
    """scale -> what draws a kernel."""
    return nn.initializers.orthogonal if begin == "orthogonal" else lambda scale: nn.initializers.lecun_normal()


def _dense(features: int, scale: float, name: str, begin: str, dtype: Any = jnp.float32) -> nn.Dense:
    return nn.Dense(features, dtype=dtype, kernel_init=_kernels(begin)(scale), name=name)


def _rematerialised(part: Any, remat: str) -> Any:
    """`precision.rematerialised` for what has parameters by Flax: a module, or a function of one."""
    return part if remat == "none" else nn.remat(part, policy=POLICIES[remat])


class _Greatest(nn.Module):
    """A `_dense` layer of each item [..., items, inputs] and the greatest over those that are there, [..., features];
    as a CPU likes it."""

    features: int
    begin: str
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", _kernels(self.begin)(np.sqrt(2.0)), (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        found = set_pooling.greatest(kernel, bias, x.reshape(-1, *x.shape[-2:]).astype(self.dtype))
        return found.reshape(*x.shape[:-2], self.features).astype(self.dtype)


class _Torso(nn.Module):
    """An observation -> features [..., sizes[-1]]."""

    kind: str
    sizes: Sequence[int]
    activation: str
    ranks: Sequence[int]  # the rank of each leaf of one observation
    dtype: Any
    remat: str
    begin: str
    norm: bool = False

    @nn.compact
    def __call__(self, observation: PyTree) -> jax.Array:
        if self.kind in ENCODED:
            return self._encode(observation)
        leaves = jax.tree.leaves(observation)
        lead = leaves[0].ndim - self.ranks[0]
        parts = []
        for i, (leaf, rank) in enumerate(zip(leaves, self.ranks, strict=True)):
            x = leaf.astype(jnp.float32)
            if self.kind == "deepset" and rank == 2:
                parts.append(self._through(x, self.sizes[0] // 2, f"item_{i}", pooled=True))
            else:
                parts.append(x.reshape(*x.shape[:lead], -1).astype(self.dtype))
        x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        for i, size in enumerate(self.sizes):
            x = self._through(x, size, f"layer_{i}")
        return x

    def _through(self, x: jax.Array, size: int, name: str, *, pooled: bool = False) -> jax.Array:
        """A layer; `pooled`: the greatest of each feature over items [..., items, features] that are there."""

        def layer(torso: _Torso, x: jax.Array) -> jax.Array:
            activation = ACTIVATIONS[torso.activation]
            rising = torso.activation in RISING  # of a set the greatest stays the greatest: activated alone
            if pooled and rising and not torso.norm and jax.default_backend() == "cpu":
                return activation(_Greatest(size, torso.begin, torso.dtype, name=name)(x))
            found = _dense(size, np.sqrt(2.0), name, torso.begin, torso.dtype)(x)
            found = nn.LayerNorm(dtype=torso.dtype, name=f"{name}_norm")(found) if torso.norm else found
            if not pooled:
                return activation(found)
            there = x[..., -1:].astype(found.dtype)
            if rising:
                return activation(jnp.max(found * there, axis=-2))
            return jnp.max(activation(found) * there, axis=-2)

        through: jax.Array = _rematerialised(layer, self.remat)(self, x)
        return through

    def _encode(self, observation: PyTree) -> jax.Array:
        one = jax.tree.unflatten(
            jax.tree.structure(observation),
            [
                jax.ShapeDtypeStruct(leaf.shape[leaf.ndim - rank :], leaf.dtype)
                for leaf, rank in zip(jax.tree.leaves(observation), self.ranks, strict=True)
            ],
        )
        options: dict[str, Any] = {"dtype": self.dtype, "remat": self.remat}
        encoder: attention.Encoder | conv.Encoder
        if self.kind in conv.CONVOLUTIONS:
            kernels = _kernels(self.begin)(np.sqrt(2.0))
            encoder = conv.encoder(one, self.kind, kernels, norm=self.norm, **options)
        else:
            encoder = attention.encoder(one, self.kind, self.sizes[0], len(self.sizes), **options)
        return encoder.apply(self.param("encoder", encoder.init), observation)


class _Network(nn.Module):
    kind: str
    sizes: Sequence[int]
    activation: str
    ranks: Sequence[int]
    dtype: Any
    remat: str
    begin: str
    outputs: int
    free: int
    width: int
    shared: bool
    norm: bool

    @nn.compact
    def __call__(
        self, memory: PyTree, observation: PyTree, towers: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        """`towers`: what the actor's and the critic's torso have seen, if that is known."""
        torso = (self.kind, self.sizes, self.activation, self.ranks, self.dtype, self.remat, self.begin, self.norm)
        attends = self.kind in attention.ENCODERS
        if towers is not None:
            for_actor, for_critic = towers
        elif self.width:
            features = _Torso(*torso, name="torso")(observation)
            cell = _rematerialised(nn.GRUCell, self.remat)(self.width, name="memory")
            memory, features = cell(memory, features.astype(jnp.float32))
            for_actor = for_critic = features
        elif self.kind in ENCODED or self.shared:
            for_actor = for_critic = _Torso(*torso, name="torso")(observation)
        else:
            for_actor = _Torso(*torso, name="actor")(observation)
            for_critic = _Torso(*torso, name="critic")(observation)
        if attends:
            for_actor, for_critic = (
                nn.gelu(_dense(self.sizes[0], np.sqrt(2.0), name, self.begin, self.dtype)(features))
                for features, name in ((for_actor, "policy_hidden"), (for_critic, "value_hidden"))
            )
        parameters = _dense(self.outputs, 0.01, "policy", self.begin)(for_actor)
        value = _dense(1, 1.0, "value", self.begin)(for_critic)[..., 0]
        if self.free:
            extra = self.param("log_std", nn.initializers.constant(-0.5), (self.free,))
            extra = jnp.broadcast_to(extra, (*parameters.shape[:-1], self.free))
            parameters = jnp.concatenate([parameters, extra], axis=-1)
        return parameters, value, memory


class Tower(NamedTuple):
    """`apply(params, observation) -> float32 [..., outputs]`; leading axes of the observation are free."""

    init: Callable[[Key], Params]
    apply: Callable[[Params, PyTree], jax.Array]


class _Tower(nn.Module):
    torso: Sequence[Any]  # of _Torso
    outputs: int
    scale: float

    @nn.compact
    def __call__(self, observation: PyTree) -> jax.Array:
        torso = _Torso(*self.torso, name="torso")
        features = torso(observation)
        if torso.kind in attention.ENCODERS:
            features = nn.gelu(_dense(torso.sizes[0], np.sqrt(2.0), "hidden", torso.begin, torso.dtype)(features))
        return _dense(self.outputs, self.scale, "head", torso.begin)(features).astype(jnp.float32)


def tower(
    observation: PyTree, outputs: int, *, torso: str, sizes: Sequence[int], activation: str, precision: str,
    remat: str, begin: str, scale: float = 1.0,
) -> Tower:  # fmt: skip
    """A torso with one head, whose kernel begins with `scale`; the rest is as `actor_critic` has it, and so are errors.

    A critic of vectors takes (what is seen, action) for its observation; a torso of images takes one image alone.
    """
    _check(observation, torso, sizes, activation, precision, remat, begin)
    ranks = tuple(len(leaf.shape) for leaf in jax.tree.leaves(observation))
    parts = (torso, tuple(sizes), activation, ranks, PRECISIONS[precision], remat, begin)
    module = _Tower(parts, outputs, scale)

    def init(key: Key) -> Params:
        example = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation)
        return module.init(key, example)["params"]

    if torso == "mlp" and precision == "bf16":
        return Tower(init, _rounded(ranks, len(sizes), ACTIVATIONS[activation], remat))
    return Tower(init, lambda params, seen: module.apply({"params": params}, seen))  # type: ignore[arg-type, return-value]


def _rounded(
    ranks: Sequence[int], layers: int, activation: Callable[[jax.Array], jax.Array], remat: str
) -> Callable[[Params, PyTree], jax.Array]:
    """How a `_Tower` of an mlp is applied with products of bfloat16 whose sums are float32."""

    def layer(own: Params, x: jax.Array) -> jax.Array:
        return activation(affine(x, own["kernel"], own["bias"]))

    through = rematerialised(layer, remat)

    def apply(params: Params, observation: PyTree) -> jax.Array:
        leaves = jax.tree.leaves(observation)
        lead = leaves[0].shape[: leaves[0].ndim - ranks[0]]
        parts = [leaf.astype(jnp.float32).reshape(*lead, -1) for leaf in leaves]
        x = jnp.concatenate(parts, axis=-1)
        x = x.reshape(-1, x.shape[-1])
        for i in range(layers):
            x = through(params["torso"][f"layer_{i}"], x)
        found = x @ params["head"]["kernel"] + params["head"]["bias"][None]
        return found.reshape(*lead, found.shape[-1])

    return apply


def _check(
    observation: PyTree, torso: str, sizes: Sequence[int], activation: str, precision: str, remat: str, begin: str
) -> None:
    if torso not in TORSOS:
        raise ValueError(f"torso is {torso!r}; it must be one of {', '.join(TORSOS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if remat not in REMATS:
        raise ValueError(f"remat is {remat!r}; it must be one of {', '.join(REMATS)}")
    if begin not in INITS:
        raise ValueError(f"init is {begin!r}; it must be one of {', '.join(INITS)}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes are {tuple(sizes)}; give at least one, all positive")
    if torso in conv.CONVOLUTIONS:
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
    begin: str = "orthogonal",
    norm: bool = False,
    live: Sequence[int] | None = None,
) -> ActorCritic:
    """The network for observations like `observation` (a pytree of ShapeDtypeStruct) and `outputs` policy parameters.

    `free` more parameters do not depend on the observation. `memory` is the width of the recurrent unit, 0 for none.
    `remat`, of precision.REMATS: what is computed again for the gradient; less memory, up to a third more work.
    `begin` is one of INITS. `norm` normalises layers. `live`, where `takes_live` allows it: the network is applied only
    to the inputs at these places, the others being 0 in any observation.
    """
    if not sizes or min(sizes) < 1 or memory < 0:
        raise ValueError(
            f"sizes are {tuple(sizes)} and memory {memory}; give at least one positive size and memory >= 0"
        )
    _check(observation, torso, sizes, activation, precision, remat, begin)
    leaves = jax.tree.leaves(observation)
    ranks = tuple(len(leaf.shape) for leaf in leaves)
    if takes_live(torso, shared, memory, norm):
        made = perceptron(
            count(observation), ranks, outputs, free=free, sizes=sizes, activation=ACTIVATIONS[activation],
            dtype=PRECISIONS[precision], kernels=_kernels(begin), live=live, remat=remat,
        )  # fmt: skip
        return ActorCritic(made.init, lambda p, carried, seen: (*made.apply(p, seen), carried), lambda _: (), made.live)
    assert live is None, "only `takes_live` may be asked for it"
    network = _Network(
        torso, tuple(sizes), activation, ranks, PRECISIONS[precision], remat, begin, outputs, free, memory, shared, norm
    )

    def initial(batch: int) -> PyTree:
        return jnp.zeros((batch, memory), jnp.float32) if memory else ()

    def init(key: Key) -> Params:
        example = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation)
        return network.init(key, initial(1), example)["params"]

    def apply(params: Params, carried: PyTree, observed: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        return network.apply({"params": params}, carried, observed)  # type: ignore[return-value]

    def both(params: Params, carried: PyTree, observed: PyTree) -> tuple[jax.Array, jax.Array, PyTree]:
        """Both towers as one twice as wide: half as many kernels, each of which takes a GPU as long to begin."""
        tower = _Torso(torso, tuple(sizes), activation, ranks, PRECISIONS[precision], remat, begin, norm)
        towers = jax.tree.map(lambda *leaves: jnp.stack(leaves), params["actor"], params["critic"])
        seen = jax.vmap(lambda own: tower.apply({"params": own}, observed))(towers)
        return network.apply({"params": params}, carried, observed, (seen[0], seen[1]))  # type: ignore[return-value]

    apart = not memory and not shared and torso not in ENCODED
    return ActorCritic(init, apply, initial, both=both if apart and jax.default_backend() != "cpu" else None)


def takes_live(torso: str, shared: bool, memory: int, norm: bool = False) -> bool:
    """Whether such a network can leave out inputs that are always 0."""
    return torso == "mlp" and shared and not memory and not norm
