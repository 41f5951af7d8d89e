"""Populations of runs: seeds and swept hyperparameters, and the checks of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime import config_fields
from longhaul.runtime.config_fields import setting
from longhaul.runtime.errors import FieldError

MOST_MEMBERS = 4096
"""Members of a population."""

SCENARIOS = "scenarios"
"""Number of generated scenarios, which can be swept beside the algorithm's own numbers."""

FORMS = "NAME=LOW..HIGH:COUNT, or NAME=VALUE,VALUE,..."


@dataclass(frozen=True)
class Population:
    """Runs that are trained side by side."""

    seeds: int = setting(
        1, "runs side by side in one program, each as if alone: with the seed, the next one, ...", least=1
    )
    sweep: tuple[str, ...] = setting(
        (), "runs side by side, too: lr=1e-4..1e-3:8, lr=1e-4,3e-4; of several hyperparameters every combination"
    )
    pbt_interval: int | None = setting(
        None, "updates after which a sweep's worst runs go on from its best ones, with values beside theirs", least=1
    )
    together: int | None = setting(
        None, "runs of a device that are computed at once; affects speed, and last bits", least=1, auto=True
    )

    @property
    def many(self) -> bool:
        return self.seeds > 1 or bool(self.sweep)


class Member(NamedTuple):
    seed: int
    values: dict[str, float]  # of the swept hyperparameters, by their field

    def label(self) -> str:
        """ "lr=0.0003 gamma=0.99", or "" where nothing is swept."""
        return " ".join(f"{name.replace('_', '-')}={value:.4g}" for name, value in self.values.items())

    @property
    def algorithm(self) -> dict[str, float]:
        """Values of the algorithm's own hyperparameters."""
        return {name: value for name, value in self.values.items() if name != SCENARIOS}


def members(population: Population, seed: int) -> tuple[Member, ...]:
    """The members in order: all seeds of the first setting, then of the next. Raises FieldError as `sweeps` does."""
    swept = sweeps(population.sweep)
    count = population.seeds * math.prod(map(len, swept.values()))
    if count > MOST_MEMBERS:
        raise FieldError(
            "sweep",
            f"of {count} runs, with --seeds",
            f"at most {MOST_MEMBERS} are trained side by side: give fewer values or --seeds",
        )
    settings = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    return tuple(Member(seed + i, values) for values in settings for i in range(population.seeds))


def sweeps(words: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """Field -> its values, of each word. Raises FieldError."""
    grid: dict[str, tuple[float, ...]] = {}
    for word in words:
        name, _, values_text = word.partition("=")
        name = name.strip().replace("-", "_")
        try:
            values = _values(values_text)
        except ValueError as error:
            raise FieldError("sweep", f"{word!r} ({error})", f"give {FORMS}, lr=1e-4..1e-3:8 say") from None
        if not name or name in grid:
            raise FieldError("sweep", repr(word), f"name each hyperparameter once: {FORMS}")
        grid[name] = values
    return grid


def _values(text: str) -> tuple[float, ...]:
    """ "1e-4..1e-3:8" evenly on a logarithmic scale where that spans a decade, else on a linear one; "1,2,3"."""
    if ".." not in text:
        values = tuple(float(part) for part in text.split(","))
    else:
        ends, _, count = text.partition(":")
        low, high = (float(end) for end in ends.split(".."))
        n = int(count) if count else 0
        if not 2 <= n <= MOST_MEMBERS or not low < high:
            raise ValueError(f"a range has LOW < HIGH and a COUNT of 2 to {MOST_MEMBERS}")
        spread = np.geomspace if low > 0 and high / low >= 10 * (1 - 1e-9) else np.linspace
        values = tuple(float(f"{value:.9g}") for value in spread(low, high, n))
    if not all(math.isfinite(value) for value in values):
        raise ValueError("values must be finite")
    if len(set(values)) < len(values):
        raise ValueError("a value stands twice")
    return values


def check(population: Population, config: Any, seed: int, most_scenarios: int | None = None) -> tuple[Member, ...]:
    """The members. Raises FieldError where `config` has no such hyperparameters.

    At most `most_scenarios` can be swept; None: they can't.
    """
    config_fields.check(population)
    expanded = members(population, seed)
    hints = typing.get_type_hints(type(config))
    known = [
        field.name
        for field in dataclasses.fields(config)
        if float in (hints[field.name], *typing.get_args(hints[field.name]))
    ]
    swept = sweeps(population.sweep)
    if SCENARIOS in swept and most_scenarios is not None:
        known.append(SCENARIOS)
        for value in swept[SCENARIOS]:
            if value != int(value) or not 1 <= value <= most_scenarios:
                raise FieldError("sweep", f"of scenarios={value:g}", f"give whole numbers, 1 to {most_scenarios}")
        if population.pbt_interval is not None:
            raise FieldError(
                "pbt_interval", f"{population.pbt_interval}, and scenarios are swept", "their number is no setting to "
                "choose; leave one out",
            )  # fmt: skip
    for name in swept:
        if name not in known:
            remedy = f"there are {', '.join(known).replace('_', '-')}"
            remedy = "runs with several seeds are --seeds N" if name == "seed" else remedy
            raise FieldError("sweep", f"of {name.replace('_', '-')!r}, no number that can be swept", remedy)
    if population.pbt_interval is not None and (not population.sweep or len(expanded) < 2):
        raise FieldError(
            "pbt_interval", f"{population.pbt_interval}, and there is no population to choose from", "give --sweep"
        )
    return expanded


def values_of(members: tuple[Member, ...]) -> dict[str, np.ndarray]:
    """The members' values, float32 [M] each."""
    return {name: np.array([member.values[name] for member in members], np.float32) for name in members[0].values}


def bounds(members: tuple[Member, ...]) -> dict[str, tuple[float, float]]:
    """The range of each swept hyperparameter."""
    return {name: (float(column.min()), float(column.max())) for name, column in values_of(members).items()}
