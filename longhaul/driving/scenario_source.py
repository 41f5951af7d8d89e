"""Sources of driving scenarios: logs and shards on disk, or the generator; for training and, unseen, for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import islice
from pathlib import Path

import numpy as np

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData, Log
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario.compile import CHOSEN, compile_log
from longhaul.driving.scenario.scenario import ONWARD, Scenario
from longhaul.driving.shards import generated_cache
from longhaul.driving.shards import shard as shards
from longhaul.driving.shards.generated_cache import BLOCK, Store
from longhaul.runtime import worker_pool as processes

TRIED = 50
"""Seeds for one scenario that is good enough before giving up."""


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


OBJECTS = 128
"""Agents that are kept of a scenario, if nothing else is said."""


def from_logs(
    paths: Sequence[str], *, agents: int = 1, horizon: int | None = None, objects: int = OBJECTS,
    count: int | None = None, control: str = "vehicles",
) -> list[Scenario]:  # fmt: skip
    """Every scenario of the files at `paths`, in their order, or the first `count`: with `agents` controlled agents of
    at most `objects`, for at most `horizon` steps. `BadData`, one line, at the first that can't be used, and where
    there is none."""
    each = (
        scenario
        for path in readers.expand(paths)
        for scenario in read(path, agents=agents, horizon=horizon, objects=objects, control=control)
    )
    found = list(islice(each, count))
    if not found:
        raise BadData(f"{', '.join(map(str, paths))}: the files hold no scenario; give other data")
    return found


def read(
    path: Path, *, agents: int = 1, horizon: int | None = None, objects: int = OBJECTS, control: str = "vehicles"
) -> Iterator[Scenario]:
    """The scenarios of one file, one at a time."""
    for make in makers(path, agents=agents, horizon=horizon, objects=objects, control=control):
        yield make()


def makers(
    path: Path, *, agents: int = 1, horizon: int | None = None, objects: int = OBJECTS, control: str = "vehicles",
    routes: str = "log",
) -> Iterator[Callable[[], Scenario]]:  # fmt: skip
    """One function for each scenario of a file; shards hold ready who is controlled and along what routes. Calling it
    may raise `BadData` without an end to the others; where the file itself is damaged, going on raises it."""
    if readers.detect(path) == readers.SHARD:
        shard = shards.open(path)
        for index in range(len(shard)):
            yield partial(_stored, shard, index, agents, horizon, objects, control)
        return
    for log in readers.read(path):
        yield partial(compile_log, log, agents=agents, horizon=horizon, objects=objects, control=control, routes=routes)


def _stored(shard: shards.Shard, index: int, agents: int, horizon: int | None, objects: int, control: str) -> Scenario:
    where = f"{shard.path}: record {index} of {len(shard)}"
    scenario = shard[index]
    if agents > 1 and not agrees(scenario.control, control):
        raise BadData(disagreement(where, scenario.control, control))
    return cut(scenario, agents=agents, horizon=horizon, objects=objects, where=where)


def agrees(compiled: str, control: str) -> bool:
    """True if a scenario that was compiled with one `control` is what another asks for, of more than the ego."""
    return compiled in (control, CHOSEN)


def disagreement(where: str, compiled: str, control: str) -> str:
    """Error text where `agrees` does not hold. Nothing is cut to fit: who is left of all that were near is not who
    compiling would choose."""
    return (
        f"{where}: was compiled for the control of {compiled}, not {control}: convert the logs again with "
        f"--control {control}, or choose --control {compiled}"
    )


def cut(
    scenario: Scenario, *, agents: int, horizon: int | None = None, objects: int | None = None, where: str = "scenario"
) -> Scenario:
    """The scenario with its first `agents` controlled agents, for at most `horizon` steps, of at most `objects` agents:
    the first, which are the nearest to the ego's path. The goals move with the end.

    `BadData`, which names `where`, if it was compiled for fewer agents. Compiling with fewer steps from the log itself
    may control other agents: those that move within them. Who is controlled and left out is padding, as where a log has
    fewer.
    """
    if horizon is not None and horizon < 2:
        raise ValueError(f"horizon is {horizon}: a scenario has at least 2 steps")
    if len(scenario.controlled) < agents:
        raise BadData(
            f"{where}: was compiled for {len(scenario.controlled)} controlled agents, fewer than {agents}: "
            f"convert the logs again with agents = {agents}"
        )
    steps = scenario.steps if horizon is None else min(horizon, scenario.steps)
    whole = steps == scenario.steps
    driven = scenario.controlled[:agents]
    kept = scenario.onward_of < (len(scenario.kind) if objects is None else objects)
    return scenario._replace(
        steps=steps,
        pose=scenario.pose[:steps, :objects],
        velocity=scenario.velocity[:steps, :objects],
        present=scenario.present[:steps, :objects],
        size=scenario.size[:objects],
        kind=scenario.kind[:objects],
        controlled=driven if objects is None else np.where(driven < objects, driven, -1),
        route=scenario.route[:agents],
        route_length=scenario.route_length[:agents] if whole else scenario.expert_s[:agents, steps - 1],
        route_points=scenario.route_points[:agents],
        expert_s=scenario.expert_s[:agents, :steps],
        light_s=scenario.light_s[:agents],
        light_state=scenario.light_state[:agents, :, :steps],
        onward_of=scenario.onward_of[kept],
        onward=scenario.onward[np.repeat(kept, ONWARD)],
    )
