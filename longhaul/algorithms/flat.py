"""An optimiser's state as one vector while it works, and leaf by leaf where it is kept.

On a CPU, Adam on a dozen small leaves is dozens of small kernels, so `optax.flatten` has it work on one vector. A
checkpoint has its moments leaf by leaf all the same, and so fits runs whose parameters are split over devices, each
with its moments, where one vector would bring all of them together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from longhaul.types import Params, PyTree


def pack(opt_state: optax.OptState, params: Params) -> optax.OptState:
    """`opt_state` with one vector for each part that has the parameters' structure, as `optax.flatten` makes it."""
    like = jax.tree.structure(params)

    def one(part: PyTree) -> PyTree:
        leaves = jax.tree.leaves(part)
        return jnp.concatenate([leaf.reshape(-1) for leaf in leaves]) if jax.tree.structure(part) == like else part

    return jax.tree.map(one, opt_state, is_leaf=lambda part: jax.tree.structure(part) == like)


def unpack(packed: optax.OptState, opt_state: optax.OptState, params: Params) -> optax.OptState:
    """The inverse of `pack`; of `opt_state` the structure counts."""
    leaves, like = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()

    def one(part: PyTree, vector: PyTree) -> PyTree:
        if jax.tree.structure(part) != like:
            return vector
        parts = jnp.split(vector, ends)
        return jax.tree.unflatten(like, [x.reshape(leaf.shape) for x, leaf in zip(parts, leaves, strict=True)])

    return jax.tree.map(one, opt_state, packed, is_leaf=lambda part: jax.tree.structure(part) == like)
