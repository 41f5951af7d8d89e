"""Conditional computation: functions of many agents that are computed for those alone who need them.

`jax.lax.cond` under `jax.vmap` computes both branches for everybody. These decide for a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

CHUNK = 8
"""Agents for whom it is computed at a time, where each costs as much as plans do."""


def if_any(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """(needed, ...) -> `function(...)` where it is `needed`, else zeros or what the function returns.

    Batched by `jax.vmap`, it is computed for all of the batch if any of them needs it, and for none if none does.
    """

    @custom_vmap
    def run(needed: jax.Array, *arguments: Any) -> jax.Array:
        like = jax.eval_shape(function, *arguments)
        return lax.cond(needed, function, lambda *_: jnp.zeros(like.shape, like.dtype), *arguments)

    @run.def_vmap
    def _batched(size: int, batched: Any, needed: jax.Array, *arguments: Any) -> tuple[jax.Array, bool]:
        axes = jax.tree.map(lambda has: 0 if has else None, tuple(batched[1:]))
        computed = jax.vmap(function, axes, axis_size=size)
        like = jax.eval_shape(computed, *arguments)
        zeros = jnp.zeros(like.shape, like.dtype)
        return lax.cond(jnp.any(needed), computed, lambda *_: zeros, *arguments), True

    return run


def only_where(function: Callable[[Any, Any, Any], Any], chunk: int = CHUNK) -> Callable[..., Any]:
    """(needed [A], default, agents, world, shared) -> tree like `default`, [A, ...]: `function(agent, world, shared)`
    of each agent where it is `needed`, else `default`.

    `agents` have leaves [A, ...]; `world` and `shared` hold for all. Batched by `jax.vmap`, it costs what is needed and
    no more: those of all worlds for whom it is needed are computed, `chunk` at a time. `shared` can't be batched.
    """

    @custom_vmap
    def run(needed: jax.Array, default: Any, agents: Any, world: Any, shared: Any) -> Any:
        worlds, count = needed.shape
        result, agents = jax.tree.map(lambda x: x.reshape(worlds * count, *x.shape[2:]), (default, agents))

        def some(carry: Any) -> Any:
            left, result = carry
            index = jnp.nonzero(left, size=chunk, fill_value=worlds * count)[0]
            row = jnp.minimum(index, worlds * count - 1)
            theirs = jax.tree.map(lambda x: x[row], agents), jax.tree.map(lambda x: x[row // count], world)
            computed = jax.vmap(lambda agent, its: function(agent, its, shared))(*theirs)
            result = jax.tree.map(lambda old, new: old.at[index].set(new, mode="drop"), result, computed)
            return left.at[index].set(False, mode="drop"), result

        _, result = lax.while_loop(lambda carry: jnp.any(carry[0]), some, (needed.reshape(-1), result))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), result, default)

    @run.def_vmap
    def _batched(size: int, batched: Any, *given: Any) -> Any:
        if any(jax.tree.leaves(batched[4])):
            raise TypeError("`shared` has a batch, and holds for all worlds; give what differs in `world`")

        def merge(x: jax.Array, has: bool) -> jax.Array:
            x = x if has else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        merged = jax.tree.map(merge, given[:4], tuple(batched[:4]))
        result = run(*merged, given[4])
        result = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), result)
        return result, jax.tree.map(lambda _: True, result)

    def one(needed: jax.Array, default: Any, agents: Any, world: Any, shared: Any) -> Any:
        given = jax.tree.map(lambda x: jnp.asarray(x)[None], (needed, default, agents, world))
        return jax.tree.map(lambda x: x[0], run(*given, shared))

    return one
