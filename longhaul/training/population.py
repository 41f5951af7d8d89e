"""From a Run to the runs that it trains side by side: who they are, and the one algorithm that all of them share."""

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
    """`population.tuned` of the hyperparameters in which `members` differ; RunError where one can't be an argument."""
    try:
        return population.tuned(make, tuple(members[0].values))
    except ValueError as error:
        raise RunError(str(error)) from error


def keys(members: tuple[Member, ...]) -> Key:
    """[M]: what each draws all its random numbers from."""
    return jax.vmap(jax.random.key)(jnp.array([member.seed for member in members], jnp.uint32))


def begun(run: Run, spec: Spec) -> tuple[Algorithm, PyTree]:
    """(the algorithm of a population, its states before training [M, ...]): what a checkpoint is restored into."""
    found = members_of(run)
    sizes = Sizes(1, run.num_envs * (spec.agents or 1), run.num_steps)
    algorithm, init = tuned(
        lambda values: registry.make(
            spec, dataclasses.replace(run.algorithm, **values), Context(updates=1, mean=meshes.identity, sizes=sizes)
        ),
        found,
    )  # fmt: skip
    first = jax.vmap(lambda key: jax.random.split(key, 3)[0])(keys(found))  # as a population's start has it
    states = jax.jit(lambda members: jax.lax.map(lambda member: init(*member), members))((own(found), first))
    return algorithm, states


def chosen(run: Run, member: int | None, name: str) -> Member:
    """The member of a run's folder `name` that is asked for. Raises RunError where there is none, or none was named."""
    found = members_of(run)
    if member is None or not 0 <= member < len(found):
        said = "give" if member is None else f"--member is {member}; it must be"
        raise RunError(f"run {name} holds {len(found)} runs; {said} --member 0 to {len(found) - 1}"
                       if member is None else f"{said} 0 to {len(found) - 1}, of run {name}")  # fmt: skip
    return found[member]
