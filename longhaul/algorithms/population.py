"""Populations: the runs that `--seeds` and `--sweep` make, an algorithm whose hyperparameters are in its state, and
population-based training on top (Jaderberg et al. 2017, "Population Based Training of Neural Networks").

A swept hyperparameter is no constant of the compiled program but a float32 beside the learner's state. So one program
trains all members, a checkpoint holds what each has, and `evolve` changes it while they train.

Where we differ from the paper: all members evolve together, after the same number of updates; who is copied is drawn
among the best 20 % (its truncation selection); values stay within the range that was swept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.types import Algorithm, Key, Metrics, PyTree

MOST = 4096
"""Members of a population."""

SHARE = 5
"""One in so many members is copied, and as many are replaced: the paper's 20 %."""

FACTORS = (0.8, 1.2)
"""What a copied hyperparameter is multiplied with, either of them."""

FORMS = "NAME=LOW..HIGH:COUNT, or NAME=VALUE,VALUE,..."


@dataclass(frozen=True)
class Population:
    """Which runs are trained side by side."""

    seeds: int = 1  # runs of each setting: with the run's seed, the next, ...
    sweep: tuple[str, ...] = ()  # settings: FORMS; of several, every combination
    pbt_interval: int | None = None  # updates between two steps of population-based training; None: none
    together: int | None = None  # members of a device computed at once; None: 1 on a CPU, else all

    @property
    def many(self) -> bool:
        return self.seeds > 1 or bool(self.sweep)


class Member(NamedTuple):
    seed: int
    values: dict[str, float]  # of the swept hyperparameters, by their field

    def label(self) -> str:
        """ "lr=0.0003 gamma=0.99", or "" where nothing is swept."""
        return " ".join(f"{name.replace('_', '-')}={value:.4g}" for name, value in self.values.items())


def members(population: Population, seed: int) -> tuple[Member, ...]:
    """The members in order: all seeds of the first setting, then of the next. Raises ValueError as `sweeps` does."""
    swept = sweeps(population.sweep)
    settings = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    return tuple(Member(seed + i, values) for values in settings for i in range(population.seeds))


def sweeps(words: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """Field -> its values, of each word. Raises ValueError, naming the word and the forms there are."""
    found: dict[str, tuple[float, ...]] = {}
    for word in words:
        name, _, said = word.partition("=")
        name = name.strip().replace("-", "_")
        try:
            values = _values(said)
        except ValueError as error:
            raise ValueError(f"sweep is {word!r} ({error}); give {FORMS}, lr=1e-4..1e-3:8 say") from None
        if not name or name in found:
            raise ValueError(f"sweep is {word!r}; name each hyperparameter once: {FORMS}")
        found[name] = values
    return found


def _values(said: str) -> tuple[float, ...]:
    """ "1e-4..1e-3:8" evenly on a logarithmic scale where that spans a decade, else on a linear one; "1,2,3"."""
    if ".." not in said:
        values = tuple(float(part) for part in said.split(","))
    else:
        ends, _, count = said.partition(":")
        low, high = (float(end) for end in ends.split(".."))
        n = int(count) if count else 0
        if n < 2 or not low < high:
            raise ValueError("a range has LOW < HIGH and a COUNT of at least 2")
        spread = np.geomspace if low > 0 and high / low >= 10 * (1 - 1e-9) else np.linspace
        values = tuple(float(f"{value:.9g}") for value in spread(low, high, n))
    if not all(math.isfinite(value) for value in values):
        raise ValueError("values must be finite")
    if len(set(values)) < len(values):
        raise ValueError("a value stands twice")
    return values


def check(population: Population, config: Any, seed: int) -> tuple[Member, ...]:
    """The members. Raises ValueError, naming value, bound and remedy, where `config` has no such hyperparameters."""
    if population.seeds < 1:
        raise ValueError(f"seeds is {population.seeds}; it must be at least 1")
    found = members(population, seed)
    if len(found) > MOST:
        raise ValueError(f"sweep and seeds make {len(found)} runs; at most {MOST} are trained side by side")
    hints = typing.get_type_hints(type(config))
    known = [field.name for field in dataclasses.fields(config) if float in (hints[field.name], *_args(hints, field))]
    for name in sweeps(population.sweep):
        if name not in known:
            there = ", ".join(known).replace("_", "-")
            raise ValueError(f"sweep names {name.replace('_', '-')!r}, no number that can be swept; there are {there}")
    if population.together is not None and population.together < 1:
        raise ValueError(f"together is {population.together}; it must be at least 1")
    if population.pbt_interval is None:
        return found
    if population.pbt_interval < 1:
        raise ValueError(f"pbt_interval is {population.pbt_interval}; it must be at least 1 update")
    if not population.sweep or len(found) < 2:
        raise ValueError("pbt_interval needs a population to choose from, and a hyperparameter to change: give --sweep")
    return found


def _args(hints: dict[str, Any], field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    return typing.get_args(hints[field.name])


def own(found: tuple[Member, ...]) -> dict[str, np.ndarray]:
    """The members' values, float32 [M] each."""
    return {name: np.array([member.values[name] for member in found], np.float32) for name in found[0].values}


# ---------------------------------------------------------------------------------------- hyperparameters in the state


class Tuned(NamedTuple):
    """A learner's state, or what acts, with the hyperparameters that it is to work by."""

    values: dict[str, jax.Array]  # float32
    state: PyTree


Make = Callable[[Mapping[str, Any]], Algorithm]
"""The values of swept hyperparameters, as numbers or as arguments of a compiled program -> the algorithm of them."""


def tuned(make: Make, names: tuple[str, ...]) -> tuple[Algorithm, Callable[[PyTree, Key], Tuned]]:
    """(the algorithm whose state holds the values of `names`, how its state begins: (values, key) -> Tuned).

    Its `init` is for shapes alone, with values of 0. Raises ValueError where the algorithm can't be made of a value
    that is an argument of the compiled program.
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
        _try(make, name)
    memory = make({}).memory
    return Algorithm(lambda key: init(zero, key), policy, memory, act, learn), init


def _try(make: Make, name: str) -> None:
    """Raises ValueError where `name` decides on shapes, or on what is computed at all."""
    try:
        jax.eval_shape(lambda value: make({name: value}).init(jax.random.key(0)), jnp.float32(1.0))
    except (jax.errors.ConcretizationTypeError, TypeError) as error:
        said = name.replace("_", "-")
        raise ValueError(
            f"--sweep names {said}, which decides on the program itself, not on its numbers; "
            f"train a run for each --{said} instead"
        ) from error


# ------------------------------------------------------------------------------------------ population-based training


def parents(scores: jax.Array, key: Key) -> jax.Array:
    """int32 [M]: of whom each member goes on. The worst fifth by score [M] is replaced by members of the best fifth,
    drawn evenly, where these are better; NaN is worst."""
    count = scores.shape[0]
    share = max(1, count // SHARE)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    order = jnp.argsort(scores)
    rank = jnp.argsort(order)
    best = order[count - share + jax.random.randint(key, (count,), 0, share)]
    mine = jnp.arange(count)
    return jnp.where((rank < share) & (scores[best] > scores), best, mine).astype(jnp.int32)


def evolve(bounds: Mapping[str, tuple[float, float]]) -> Callable[[Tuned, jax.Array, Key], Tuned]:
    """(states [M, ...], scores [M], key) -> the states after exploiting and exploring, values within `bounds`."""

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


def bounds(found: tuple[Member, ...]) -> dict[str, tuple[float, float]]:
    """The range of each swept hyperparameter."""
    return {name: (float(column.min()), float(column.max())) for name, column in own(found).items()}
