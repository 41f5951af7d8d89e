"""Scenarios of an evaluation in a fixed order, of which few need be in memory.

Raw logs are all held. Of packed shards and of many generated scenarios one is read when it is due; only what says how
large they are is known of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longhaul.driving import scenario_source
from longhaul.driving.scenario import bank as banks
from longhaul.driving.scenario.bank import Sizes
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.scenario_source import BLOCK
from longhaul.driving.shards import stream
from longhaul.driving.shards.stream import Library
from longhaul.driving.sim.config import HELD_OUT

MOST_HELD = 512
"""Generated scenarios up to which all stay in memory."""

POPULATION = 1 << 20
"""Generated seeds from one seed of a sample to the next."""


class Facts(NamedTuple):
    """Bounds of all scenarios, so that every batch of them has the same shapes."""

    sizes: Sizes
    shortest: int  # steps
    dt: float  # s, the largest
    driven: int  # most agents of a scenario that can be controlled


@dataclass(frozen=True)
class ScenarioSet:
    """Scenarios; `scenarios[i]` may read from the disk."""

    ids: tuple[str, ...]
    facts: Facts
    load: Callable[[int], Scenario]
    files: tuple[str, ...] = ()  # of each; () if generated

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Scenario:
        return self.load(index)

    def __iter__(self) -> Iterator[Scenario]:
        return map(self.load, range(len(self)))


def in_memory(scenarios: Sequence[Scenario], files: Sequence[str] = ()) -> ScenarioSet:
    """All `scenarios` in memory."""
    kept = list(scenarios)
    return ScenarioSet(tuple(s.id for s in kept), facts(map(_measure, kept)), kept.__getitem__, tuple(files))


Row = tuple[int, int, int, int, float, int]
"""Steps, objects, route points, lights, dt and agents to control of one scenario."""


def _measure(s: Scenario) -> Row:
    driven = int(np.sum(s.controlled >= 0))
    return s.steps, s.kind.shape[0], s.route.shape[1], s.light_s.shape[1], s.dt, driven


def facts(rows: Iterable[Row]) -> Facts:
    """Bounds of scenarios of which each has a row."""
    steps, objects, points, lights, dt, driven = (np.array(column) for column in zip(*rows, strict=True))
    sizes = banks.sizes_of(*(int(each.max()) for each in (steps, objects, points, lights)))
    return Facts(sizes, int(steps.min()), float(dt.max()), max(int(driven.max()), 1))


def generated(
    count: int, *, agents: int, horizon: int | None, control: str, workers: int, seed: int = 0
) -> ScenarioSet:
    """Generated scenarios in which no run trains; those of another `seed` are others.

    More than MOST_HELD are made once in blocks, to learn how large they are, and read again when they are due.
    """
    first = HELD_OUT + seed * POPULATION
    make = functools.partial(scenario_source.generated, agents=agents, horizon=horizon, control=control)
    if count <= MOST_HELD:
        return in_memory(make(first, count, workers=workers))
    rows, ids = [], []
    for begin in range(0, count, MOST_HELD):
        for scenario in make(first + begin, min(MOST_HELD, count - begin), workers=workers):
            rows.append(_measure(scenario))
            ids.append(scenario.id)

    @functools.lru_cache(maxsize=4)
    def block(number: int) -> list[Scenario]:
        return make(first + number * BLOCK, BLOCK, workers=1)

    return ScenarioSet(tuple(ids), facts(rows), lambda index: block(index // BLOCK)[index % BLOCK])


def packed(
    library: Library, count: int | None, *, agents: int, horizon: int | None, objects: int, seed: int = 0
) -> ScenarioSet:
    """Scenarios of shards: all, or a sample of `count` that `seed` draws, in the order of the shards."""
    total = len(library)
    which = np.arange(total)
    if count is not None and count < total:
        which = np.sort(stream.permute(np.arange(count), total, seed, 0))
    sizes = library.sizes
    rows = zip(
        np.minimum(sizes["T"], horizon or np.iinfo(np.int64).max)[which], np.minimum(sizes["N"], objects)[which],
        sizes["R"][which], sizes["L"][which], library.dt[which],
        np.minimum(library.extents["routes"], agents)[which], strict=True,
    )  # fmt: skip
    ids, paths = library.names()

    def load(index: int) -> Scenario:
        return stream.load(library, int(which[index]), agents, horizon, objects)

    return ScenarioSet(tuple(ids[i] for i in which), facts(rows), load, tuple(str(paths[i]) for i in which))
