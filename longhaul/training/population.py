"""Members of a population run, and the algorithm that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from longhaul.algorithms import population, registry
from longhaul.algorithms.context import Context
from longhaul.algorithms.population import Make, Tuned
from longhaul.config.population import Member, own
from longhaul.config.resolve import members_of
from longhaul.config.run import Run
from longhaul.replay import Sizes
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.types import Algorithm, Key, PyTree, Spec


def tuned(make: Make, members: tuple[Member, ...]) -> tuple[Algorithm, Callable[[PyTree, Key], Tuned]]:
    """Algorithm with the members' differing hyperparameters as arguments; RunError if one cannot be an argument."""
    try:
        return population.tuned(make, tuple(members[0].values))
    except ValueError as error:
        raise RunError(str(error)) from error


def keys(members: tuple[Member, ...]) -> Key:
    """Random key [M] of each member, from its seed."""
    return jax.vmap(jax.random.key)(jnp.array([member.seed for member in members], jnp.uint32))


def begun(run: Run, spec: Spec) -> tuple[Algorithm, PyTree]:
    """(algorithm of a population, its initial states [M, ...]), the target of a restore."""
    found = members_of(run)
    sizes = Sizes(1, run.num_envs * (spec.agents or 1), run.num_steps)
    algorithm, init = tuned(
        lambda values: registry.make(
            spec, dataclasses.replace(run.algorithm, **values), Context(updates=1, mean=meshes.identity, sizes=sizes)
        ),
        found,
    )  # fmt: skip
    first = jax.vmap(lambda key: jax.random.split(key, 3)[0])(keys(found))  # keys as in a population's start
    states = jax.jit(lambda members: jax.lax.map(lambda member: init(*member), members))((own(found), first))
    return algorithm, states


def chosen(run: Run, member: int | None, name: str) -> Member:
    """Member number `member` of run `name`. Raises RunError if it does not exist, or None is given."""
    found = members_of(run)
    if member is None or not 0 <= member < len(found):
        said = "give" if member is None else f"--member is {member}; it must be"
        raise RunError(f"run {name} holds {len(found)} runs; {said} --member 0 to {len(found) - 1}"
                       if member is None else f"{said} 0 to {len(found) - 1}, of run {name}")  # fmt: skip
    return found[member]
