"""Members of a population run: their shared algorithm, their metrics and records.

`metrics.jsonl` has the mean over the members under a metric's own name, and their standard deviation (n - 1) as
NAME_std. `members.jsonl` has the same records with a list of values, one a member, for every metric.

A member with non-finite metrics is recorded as null and excluded from means; members are independent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import population, registry
from longhaul.algorithms.context import Context
from longhaul.algorithms.population import Make, Tuned
from longhaul.config.population import Member, own
from longhaul.config.resolve import members_of
from longhaul.config.run import Run
from longhaul.replay import Sizes
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.telemetry.sinks import read
from longhaul.types import Algorithm, Key, PyTree, Spec

FILE = "members.jsonl"

FINITE = "finite"
"""Name of `topologies.fused.FINITE`, the row with the finiteness of each update."""


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


class Watch:
    """Monitor of non-finite members: one note when a member turns non-finite, one when it recovers."""

    def __init__(self, members: int, note: Callable[[str], None]):
        self._sound = np.ones(members, bool)
        self._note = note

    def look(self, rows: Mapping[str, np.ndarray], n: int, update: int) -> dict[str, np.ndarray]:
        """Rows without the finiteness row, after the n updates up to `update`."""
        sound: np.ndarray = np.all(rows[FINITE][:n], axis=0)
        for member in np.flatnonzero(sound != self._sound).tolist():
            state = "is finite again" if sound[member] else "has numbers that are not finite; the others go on"
            self._note(f"run {member} {state} (updates {update - n + 1} to {update})")
        self._sound = sound
        if not sound.any():
            raise RunError("no run has finite numbers any more; lower --lr or --max-grad-norm, or see to the rewards")
        return {name: values for name, values in rows.items() if name != FINITE}


def columns(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(agent steps [P], values of a metric [P, M]) of a population's records; NaN where a member reported none."""
    records = [record for record in read(folder / FILE) if name in record] if (folder / FILE).exists() else []
    steps = np.array([record["agent_steps"] for record in records], float)
    rows = [[math.nan if value is None else value for value in record[name]] for record in records]
    return steps, np.array(rows, float).reshape(len(rows), -1)
