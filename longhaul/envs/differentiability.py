"""Environments' gradients: an environment through which none passes is an error before training.

Both checks trace one step and run nothing. The first is of the derivative of the reward along changes of state and
action: where it depends on neither, the reward is constant or jumps (one point for each step survived, a target
reached), and nothing can be learned by gradients. The second is of the gradient backwards, which a loop without a
fixed number of turns does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from longhaul.runtime import user_modules
from longhaul.spaces import action_shape
from longhaul.types import PyTree, Spec


def check(name: str, environment_in: Callable[[PyTree], Any], context: PyTree = ()) -> None:
    """Raises ValueError, one line, where no gradient of rewards passes through a step of the environment `name`.

    `environment_in` returns it, an Environment, in a context: the data that it reads, of which the shapes alone count.
    """
    spec: Spec = environment_in(context).spec
    agents = () if spec.agents is None else (spec.agents,)
    shape, dtype = action_shape(spec.action)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))  # of a batch of one world, as it is trained
    state = jax.eval_shape(lambda context, keys: jax.vmap(environment_in(context).reset)(keys)[0], context, keys)
    leaves, structure = jax.tree.flatten(state)
    smooth = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    given = ([leaves[i] for i in smooth], jax.ShapeDtypeStruct((1, *agents, *shape), dtype))
    others = (context, keys, leaves)

    def step(given: Any, context: PyTree, keys: PyTree, leaves: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        moved = dict(zip(smooth, given[0], strict=True))
        state = jax.tree.unflatten(structure, [moved.get(i, leaf) for i, leaf in enumerate(leaves)])
        following, led_to = jax.vmap(environment_in(context).step)(keys, state, given[1])
        after = jax.tree.leaves(following)
        return [after[i] for i in smooth], led_to.reward

    def forwards(tangent: Any, given: Any, *others: Any) -> jax.Array:
        return jax.jvp(lambda given: step(given, *others)[1], (given,), (tangent,))[1]

    def backwards(given: Any, *others: Any) -> Any:
        value, pull = jax.vjp(lambda given: step(given, *others), given)
        return pull(jax.tree.map(jnp.ones_like, value))

    try:
        traced = jax.make_jaxpr(forwards)(given, given, *others).jaxpr
        depends = _depends(traced, len(jax.tree.leaves(given)))
        if depends:
            jax.eval_shape(backwards, given, *others)
    except Exception as error:
        raise ValueError(f"{name} has no gradient, which APG needs: {_reason(name, error)}") from error
    if not depends:
        raise ValueError(
            f"{name} has a reward without a gradient, which APG needs: it is constant or jumps; choose another "
            f"environment, or learn by PPO: longhaul train ppo --env {name}"
        )


def _depends(traced: Any, inputs: int) -> bool:
    """True where the outcome of a traced function depends on any of its first `inputs` arguments."""
    reached = set(traced.invars[:inputs])
    for equation in traced.eqns:
        if any(isinstance(value, Var) and value in reached for value in equation.invars):
            reached.update(equation.outvars)
    return any(isinstance(value, Var) and value in reached for value in traced.outvars)


def _reason(name: str, error: Exception) -> str:
    """Reason for an error of differentiation, with its remedy."""
    if "Linearization failed" in str(error):
        return "a step has a part that JAX can't differentiate backwards; in driving the safety check has: --no-safety"
    if "Reverse-mode differentiation does not work" not in str(error):
        return user_modules.described(error)
    remedy = "write it as lax.scan, or lax.fori_loop with fixed bounds"
    if name.startswith("playground/") or "backend=mjx" in name:
        with_option = f"{name}{'&' if '?' in name else '?'}iterations=1"
        remedy = f"MJX's solver has none where it makes one iteration: {with_option}"
    elif name.startswith("brax/"):
        remedy = f"try the backend spring: {name.partition('?')[0]}?backend=spring"
    return f"a step has a loop without a fixed number of turns (lax.while_loop); {remedy}"
