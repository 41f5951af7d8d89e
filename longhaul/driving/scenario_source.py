"""Where driving scenarios come from: logs on disk, or the generator; for training and, unseen, for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import islice

from longhaul.driving import scenario_files
from longhaul.driving.datasets.log import Log
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario.compile import compile_log
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.shards import generated_cache
from longhaul.driving.shards.generated_cache import BLOCK, Store
from longhaul.runtime import worker_pool as processes

HELD_OUT = 1_000_000
"""Generated seeds from here on are for evaluation only; a run trains on seeds below."""

TRIED = 50
"""Seeds for one scenario that is good enough before giving up."""


def from_logs(
    paths: Sequence[str], *, agents: int, horizon: int | None, objects: int = scenario_files.OBJECTS,
    count: int | None = None, control: str = "vehicles",
) -> list[Scenario]:  # fmt: skip
    """Every scenario, or the first `count`, of the files (logs, and shards of `longhaul data convert`) at `paths`.

    Raises BadData, one line, where one can't be used.
    """
    return scenario_files.load(paths, agents=agents, horizon=horizon, objects=objects, count=count, control=control)


def generated(
    first: int, count: int, *, agents: int, horizon: int | None, workers: int, control: str = "vehicles", least: int = 1
) -> list[Scenario]:
    """The generated scenarios of seeds first .. first + count - 1, in order.

    With `least` above 1: from `first` on the first `count` in which so many agents can be controlled. ValueError where
    hardly any has them.
    """
    make = partial(_generate, agents=agents, horizon=horizon, control=control)
    store = (
        generated_cache.open(f"agents={agents},horizon={horizon or 'all'},control={control}")
        if count >= BLOCK
        else None
    )
    found: list[Scenario] = []
    seed = first
    with ExitStack() as closed:
        pool = cache(lambda: closed.enter_context(processes.ending(processes.pool(workers))))

        def several(seeds: Sequence[int]) -> Iterator[Scenario]:
            return map(make, seeds) if workers < 2 or len(seeds) < 16 else pool().map(make, seeds, chunksize=8)

        while len(found) < count:
            stop = seed + count - len(found)
            seeds = range(seed, stop if least == 1 or store is None else -(-stop // BLOCK) * BLOCK)
            made = _of(seeds, store, several)
            found += [scenario for scenario in made if int((scenario.controlled >= 0).sum()) >= least]
            seed = seeds.stop
            if len(found) < count and seed - first >= TRIED * (1 + len(found)):
                raise ValueError(
                    f"{len(found)} of {seed - first} generated scenarios have {least} agents or more; ask for fewer"
                )
    return found[:count]


def _of(
    seeds: range, store: Store | None, several: Callable[[Sequence[int]], Iterator[Scenario]]
) -> Iterator[Scenario]:
    """The scenarios of `seeds` in their order: whole blocks from the store, as far as it has them, others made."""
    aligned = range(-(-seeds.start // BLOCK) * BLOCK, seeds.stop, BLOCK)
    ends = sorted({seeds.start, *aligned, seeds.stop})
    blocks = [range(*ends[i : i + 2]) for i in range(len(ends) - 1)]
    there = {block: store.load(block.start) for block in blocks if store is not None and len(block) == BLOCK}
    made = several([seed for block in blocks if there.get(block) is None for seed in block])
    for block in blocks:
        scenarios = there.get(block)
        if scenarios is None:
            scenarios = list(islice(made, len(block)))
            if block in there and store is not None:
                store.save(block.start, scenarios)
        yield from scenarios


def _generate(seed: int, *, agents: int, horizon: int | None, control: str) -> Scenario:
    log: Log = generate(seed)
    return compile_log(log, agents=agents, horizon=horizon, control=control)
