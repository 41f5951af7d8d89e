"""V(s) and V(successor) of a rollout, and the recurrent network along time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from longhaul import networks, returns
from longhaul.types import Params, PyTree, Rollout


def along_time(
    network: networks.ActorCritic, params: Params, memory: jax.Array, observation: PyTree, begins: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The recurrent network along time: parameters [T, B, n], values [T, B], memory after each step [T, B, width]."""
    initial = jnp.zeros_like(memory)

    def step(memory: jax.Array, now: tuple[PyTree, jax.Array]) -> tuple[jax.Array, Any]:
        seen, begin = now
        memory = jnp.where(begin[:, None], initial, memory)
        parameters, value, memory = network.apply(params, memory, seen)
        return memory, (parameters, value, memory)

    return jax.lax.scan(step, memory, (observation, begins))[1]


def estimates(
    network: networks.ActorCritic, params: Params, data: Rollout, observation: PyTree, chunk: int, updates: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """V(observation) and V(successor), float32 [T, B] each, all from `params`, which so many updates made.

    `observation` is (of the steps, of `successors.last`, of `successors.truncated`), as the network sees them.
    """
    steps, last, truncated = observation
    t, b = data.reward.shape
    if "value" in data.extras:

        def of(rows: PyTree, n: int) -> jax.Array:
            flat = jax.tree.map(lambda x: x.reshape(n * b, *x.shape[2:]), rows)
            return by_chunks(lambda part: network.apply(params, (), part)[1], flat, chunk).reshape(n, b)

        k = jax.tree.leaves(truncated)[0].shape[0]
        after = of(jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), last, truncated), 1 + k)
        value = jax.lax.cond(data.version == updates, lambda: data.extras["value"], lambda: of(steps, t))
        return value, returns.successor_values(value, after[0], after[1:], data.truncated)
    if isinstance(data.memory, tuple):
        k = jax.tree.leaves(truncated)[0].shape[0]
        rows = jax.tree.map(lambda x, y, z: jnp.concatenate([x, y[None], z]), steps, last, truncated)
        rows = jax.tree.map(lambda x: x.reshape((t + 1 + k) * b, *x.shape[2:]), rows)
        value = by_chunks(lambda part: network.apply(params, (), part)[1], rows, chunk).reshape(t + 1 + k, b)
        return value[:t], returns.successor_values(value[:t], value[t], value[t + 1 :], data.truncated)
    _, value, after = along_time(network, params, data.memory, steps, begins(data))
    ended = (data.terminated | data.truncated)[-1]
    last_value = network.apply(params, jnp.where(ended[:, None], jnp.zeros_like(after[-1]), after[-1]), last)[1]
    # A truncated episode would have gone on with the memory after its last step: pick it out, slot by slot.
    slot = jnp.cumsum(data.truncated, axis=0) - data.truncated
    which = jnp.arange(jax.tree.leaves(truncated)[0].shape[0])
    here = data.truncated[None] & (slot[None] == which[:, None, None])  # [K, T, B]
    remembered = jnp.take_along_axis(after, jnp.argmax(here, axis=1)[..., None], axis=0)
    truncated_value = network.apply(params, remembered, truncated)[1]
    return value, returns.successor_values(value, last_value, truncated_value, data.truncated)


def begins(data: Rollout) -> jax.Array:
    """bool [T, B]: memory was put back before the step (the first row begins with the memory of the rollout)."""
    ended = data.terminated | data.truncated | ~data.valid
    return jnp.concatenate([jnp.zeros_like(ended[:1]), ended[:-1]])


def by_chunks(function: Callable[[PyTree], jax.Array], rows: PyTree, chunk: int) -> jax.Array:
    """function(rows), `chunk` rows at a time where there are more: what one core computes stays in its cache."""
    n = jax.tree.leaves(rows)[0].shape[0]
    whole = n - n % chunk
    if whole <= chunk:
        return function(rows)
    blocks = jax.tree.map(lambda x: x[:whole].reshape(whole // chunk, chunk, *x.shape[1:]), rows)
    done = jax.lax.map(function, blocks).reshape(whole)
    if whole == n:
        return done
    return jnp.concatenate([done, function(jax.tree.map(lambda x: x[whole:], rows))])
