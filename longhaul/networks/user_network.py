"""Torso of the user's own, by "package.module:name".

    def network(observation, width):       # a pytree of ShapeDtypeStruct, --hidden-dim
        def init(key): ...                 # -> parameters
        def apply(params, observation): ...  # leaves [B, ...] -> features, float [B, width]
        return init, apply

Actor and critic share it; their heads are Longhaul's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from longhaul.networks.layers import Encoder, leading_axes
from longhaul.runtime import user_modules
from longhaul.types import Params, PyTree


def encoder(observation: PyTree, name: str, width: int) -> Encoder:
    """The encoder that the function "module:name" makes. Raises ValueError, one line, where it does not keep the form
    above."""
    try:
        init, own_apply = user_modules.load(name)(observation, width)
    except ValueError as error:
        raise ValueError(f"--torso {name}: {error}") from error
    except TypeError as error:
        raise ValueError(
            f"--torso {name}: {error}; it must take (observation, width) and return (init, apply)"
        ) from error
    ranks = [len(leaf.shape) for leaf in jax.tree.leaves(observation)]
    _check(name, observation, init, own_apply, width)

    def apply(params: Params, observed: PyTree) -> jax.Array:
        lead = leading_axes(observed, ranks)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), observed)
        features: jax.Array = own_apply(params, rows)
        return features.reshape(*lead, width)

    return Encoder(init, apply)


def _check(name: str, observation: PyTree, init: Callable[..., Any], apply: Callable[..., Any], width: int) -> None:
    """Traces both functions for a batch of two."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), observation)
    try:
        params = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
        features = jax.eval_shape(apply, params, batch)
    except Exception as error:
        raise ValueError(user_modules.untraceable(f"--torso {name}", error)) from error
    if (
        not isinstance(features, jax.ShapeDtypeStruct)
        or features.shape != (2, width)
        or not jnp.issubdtype(features.dtype, jnp.floating)
    ):
        shown = f"{features.dtype}{list(features.shape)}" if isinstance(features, jax.ShapeDtypeStruct) else "a tree"
        raise ValueError(
            f"--torso {name}: of 2 observations the features are {shown}; they must be float32[2, {width}]"
        )
