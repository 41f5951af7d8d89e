"""Algorithms whose hyperparameters are in their state, and population-based training on top (Jaderberg et al. 2017,
"Population Based Training of Neural Networks").

A swept hyperparameter is no constant of the compiled program but a float32 beside the learner's state. So one program
trains all members, a checkpoint holds each member's values, and `evolve` changes them during training.

Where we differ from the paper: all members evolve together, after the same number of updates; the member to copy is
drawn from the best 20 % (its truncation selection); values stay within the range of the sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.types import Algorithm, Key, Metrics, PyTree

SHARE = 5
"""Members for one that is copied, and for one that is replaced: the paper's 20 %."""

FACTORS = (0.8, 1.2)
"""Factors of a copied hyperparameter, either with the same chance."""


class Tuned(NamedTuple):
    """State of a learner, or its acting part, with its hyperparameters."""

    values: dict[str, jax.Array]  # float32
    state: PyTree


Make = Callable[[Mapping[str, Any]], Algorithm]
"""Values of swept hyperparameters, as numbers or as arguments of a compiled program -> the algorithm."""


def tuned(make: Make, names: tuple[str, ...]) -> tuple[Algorithm, Callable[[PyTree, Key], Tuned]]:
    """(algorithm whose state holds the values of `names`, its initial state as a function (values, key) -> Tuned).

    The algorithm's own `init` is for shapes alone, with values of 0. Raises ValueError for a hyperparameter that cannot
    be an argument of the compiled program.
    """

    def init(values: PyTree, key: Key) -> Tuned:
        return Tuned(values, make(values).init(key))

    def policy(tuned: Tuned) -> Tuned:
        return Tuned(tuned.values, make(tuned.values).policy(tuned.state))

    def act(policy: Tuned, memory: PyTree, observation: PyTree, key: Key | None) -> tuple[jax.Array, PyTree, PyTree]:
        return make(policy.values).act(policy.state, memory, observation, key)

    def learn(tuned: Tuned, data: PyTree, key: Key) -> tuple[Tuned, Metrics]:
        state, metrics = make(tuned.values).learn(tuned.state, data, key)
        return Tuned(tuned.values, state), metrics | {f"hyper/{name}": x for name, x in tuned.values.items()}

    zero = {name: jnp.float32(0.0) for name in names}
    for name in names:
        _check_sweepable(make, name)
    memory = make({}).memory
    return Algorithm(lambda key: init(zero, key), policy, memory, act, learn), init


def _check_sweepable(make: Make, name: str) -> None:
    """Raises ValueError where `name` changes shapes or the program itself."""
    try:
        jax.eval_shape(lambda value: make({name: value}).init(jax.random.key(0)), jnp.float32(1.0))
    except (jax.errors.ConcretizationTypeError, TypeError) as error:
        flag = name.replace("_", "-")
        raise ValueError(
            f"--sweep names {flag}, which decides on the program itself, not on its numbers; "
            f"train a run for each --{flag} instead"
        ) from error


def parents(scores: jax.Array, key: Key) -> jax.Array:
    """Parent int32 [M] of each member. Members of the best fifth by score [M], drawn uniformly, replace the worst fifth
    where they are better; NaN is worst."""
    count = scores.shape[0]
    share = max(1, count // SHARE)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    order = jnp.argsort(scores)
    rank = jnp.argsort(order)
    best = order[count - share + jax.random.randint(key, (count,), 0, share)]
    members = jnp.arange(count)
    return jnp.where((rank < share) & (scores[best] > scores), best, members).astype(jnp.int32)


def evolve(bounds: Mapping[str, tuple[float, float]]) -> Callable[[Tuned, jax.Array, Key], Tuned]:
    """Function (states [M, ...], scores [M], key) -> states after exploiting and exploring, values within `bounds`."""

    def step(states: Tuned, scores: jax.Array, key: Key) -> Tuned:
        key_parent, key_values = jax.random.split(key)
        parent = parents(scores, key_parent)
        copied = parent != jnp.arange(parent.shape[0])
        after: Tuned = jax.tree.map(lambda x: x[parent], states)
        values = {}
        for i, (name, value) in enumerate(sorted(after.values.items())):
            up = jax.random.bernoulli(jax.random.fold_in(key_values, i), 0.5, value.shape)
            moved = jnp.clip(value * jnp.where(up, FACTORS[1], FACTORS[0]), *bounds[name])
            values[name] = jnp.where(copied, moved, value).astype(value.dtype)
        return after._replace(values=values)

    return step
