"""An algorithm whose actions and memory are known without a network."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from longhaul.types import Algorithm


def counting() -> Algorithm:
    """Acts at random; its memory counts the steps since it was put back."""

    def act(policy: Any, memory: jax.Array, seen: Any, key: Any) -> Any:
        action = jax.random.randint(key, memory.shape[:1], 0, 2)
        return action, memory + 1.0, {"remembered": memory[:, 0]}

    return Algorithm(
        lambda key: jnp.float32(0.5), lambda state: state, lambda n: jnp.zeros((n, 1)), act,
        lambda state, data, key: (state, {}),
    )  # fmt: skip
