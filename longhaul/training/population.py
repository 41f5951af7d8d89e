"""From a Run to the runs that it trains side by side: who they are, and the one algorithm that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from longhaul.algorithms import population, registry
from longhaul.algorithms.population import Make, Member, Tuned
from longhaul.config.run import MOST, Driving, Run, RunError
from longhaul.replay import Sizes
from longhaul.runtime import mesh as meshes
from longhaul.runtime import process_group
from longhaul.types import Algorithm, Key, PyTree, Spec


def of(run: Run) -> tuple[Member, ...]:
    """The runs of a population; of any other run it alone. Raises RunError where they can't be trained together."""
    try:
        found = population.check(run.population, run.algorithm, run.seed)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise RunError(f"--{name.replace('_', '-')} {rest}") from error
    if not run.many:
        return found
    clashes = {
        f"--topology {run.topology}": run.topology != "fused",
        "--deterministic": run.deterministic,
        f"--mesh {run.mesh}": run.model > 1,
        "longhaul launch": process_group.together(),
        "--bank": isinstance(run.environment, Driving) and run.environment.bank is not None,
    }
    for flag, clash in clashes.items():
        if clash:
            raise RunError(f"{flag} does not go with --seeds and --sweep, which train on one host, fused; leave it out")
    if run.seed + run.population.seeds - 1 > MOST:
        raise RunError(f"--seed is {run.seed}, and --seeds {run.population.seeds}; the last must be at most {MOST}")
    return found


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
    found = of(run)
    sizes = Sizes(1, run.num_envs * (spec.agents or 1), run.num_steps)
    algorithm, init = tuned(
        lambda values: registry.make(
            spec, dataclasses.replace(run.algorithm, **values), updates=1, mean=meshes.identity, sizes=sizes
        ),
        found,
    )  # fmt: skip
    first = jax.vmap(lambda key: jax.random.split(key, 3)[0])(keys(found))  # as a population's start has it
    states = jax.jit(lambda own: jax.lax.map(lambda member: init(*member), own))((population.own(found), first))
    return algorithm, states


def chosen(run: Run, member: int | None, name: str) -> Member:
    """The member of a run's folder `name` that is asked for. Raises RunError where there is none, or none was named."""
    found = of(run)
    if member is None or not 0 <= member < len(found):
        said = "give" if member is None else f"--member is {member}; it must be"
        raise RunError(f"run {name} holds {len(found)} runs; {said} --member 0 to {len(found) - 1}"
                       if member is None else f"{said} 0 to {len(found) - 1}, of run {name}")  # fmt: skip
    return found[member]
