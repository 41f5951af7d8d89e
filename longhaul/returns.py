"""Returns and advantages of one stream of experience [T]; batch them with `jax.vmap(..., in_axes=1, out_axes=1)`.

Every function takes `terminated` and `truncated` apart: the first ends the task (nothing follows), the second only our
watching (the successor's value counts, but the next step of the stream belongs to another episode).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def gae(
    reward: Float[Array, " T"],
    value: Float[Array, " T"],
    successor_value: Float[Array, " T"],
    terminated: Bool[Array, " T"],
    truncated: Bool[Array, " T"],
    *,
    gamma: float,
    lam: float,
) -> Float[Array, " T"]:
    """Generalised advantage estimates (Schulman et al. 2016, equation 16); add `value` for the lambda-return.

    `successor_value[t]` is the value of what step t truly led to. The sum stops at an episode's end of either kind.
    """
    bootstrap = jnp.where(terminated, 0.0, gamma * successor_value)
    delta = reward + bootstrap - value
    trace = jnp.where(terminated | truncated, 0.0, gamma * lam)

    def backward(advantage: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta_t, trace_t = step
        advantage = delta_t + trace_t * advantage
        return advantage, advantage

    start = jnp.zeros_like(delta[0])
    return jax.lax.scan(backward, start, (delta, trace), reverse=True, unroll=16)[1]


def successor_values(
    value: Float[Array, "T B"],
    last: Float[Array, " B"],
    truncated_value: Float[Array, "K B"],
    truncated: Bool[Array, "T B"],
) -> Float[Array, "T B"]:
    """The value of each step's true successor, from the values of a rollout and of its `types.Successors`."""
    following = jnp.concatenate([value[1:], last[None]], axis=0)
    count = jnp.cumsum(truncated.astype(jnp.int32), axis=0) - truncated
    own = jnp.take_along_axis(truncated_value, count, axis=0, mode="clip")
    return jnp.where(truncated, own, following)
