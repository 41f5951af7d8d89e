"""An optimiser's state as one vector while it works, and leaf by leaf where it is kept.

On a CPU, Adam on a dozen small leaves is dozens of small kernels, so `optax.flatten` has it work on one vector. A
checkpoint has its moments leaf by leaf all the same, and so fits runs whose parameters are split over devices, each
with its moments, where one vector would bring all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from longhaul.types import Params, PyTree


def pack(opt_state: optax.OptState, params: Params) -> optax.OptState:
    """`opt_state` with one vector for each part that has the parameters' structure, as `optax.flatten` makes it."""
    is_like = _is_like(params)

    def one(part: PyTree) -> PyTree:
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(part)]) if is_like(part) else part

    return jax.tree.map(one, opt_state, is_leaf=is_like)


def unpack(packed: optax.OptState, opt_state: optax.OptState, params: Params) -> optax.OptState:
    """The inverse of `pack`; of `opt_state` the structure counts."""
    leaves, is_like = jax.tree.leaves(params), _is_like(params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()

    def one(part: PyTree, vector: PyTree) -> PyTree:
        if not is_like(part):
            return vector
        parts = [x.reshape(leaf.shape) for x, leaf in zip(jnp.split(vector, ends), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), parts)

    return jax.tree.map(one, opt_state, packed, is_leaf=is_like)


def _is_like(params: Params) -> Callable[[PyTree], bool]:
    """Whether a part of a state has the parameters' structure."""
    wanted: Any = jax.tree.structure(params)
    return lambda part: bool(jax.tree.structure(part) == wanted)
