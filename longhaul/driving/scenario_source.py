"""Sources of driving scenarios: logs and shards on disk, or the generator; for training and, unseen, for evaluation.

Generated scenarios are kept on disk, a block of seeds a file, so that the next run need not make them. A scenario
follows from its seed, from how it is compiled, and from the code that makes it: all three are in a file's name. Unlike
shards, which round to centimetres, a file gives each bit back: a run does not depend on what is kept. One that is
damaged, or can't be written, costs the time of making its scenarios, never the run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData, LibraryMissing
from longhaul.driving.generator.generate import generate
from longhaul.driving.scenario.from_log import CHOSEN, cast_of, scenario_from_log, scenario_of
from longhaul.driving.scenario.lane_graph import look_around
from longhaul.driving.scenario.made_up_log import made_up_log
from longhaul.driving.scenario.scenario import NO_ROAD, ONWARD, Road, Scenario
from longhaul.driving.shards import shard as shards
from longhaul.runtime import cache_dir, process_group
from longhaul.runtime import worker_pool as processes
from longhaul.telemetry import screen

TRIED = 50
"""Seeds for one scenario that is good enough before giving up."""


def generated_one(
    seed: int, *, agents: int, horizon: int | None = None, control: str = "vehicles", least: int = 1
) -> Scenario | None:
    """The scenario of `seed`; None if fewer than `least` agents can be controlled, which is known before the rest."""
    log = generate(seed)
    cast = cast_of(log, agents=agents, horizon=horizon, control=control)
    return scenario_of(log, cast, agents=agents, control=control) if len(cast.driven) >= least else None


def generated(
    first: int, count: int, *, agents: int, horizon: int | None, workers: int, control: str = "vehicles", least: int = 1
) -> list[Scenario]:
    """The generated scenarios of seeds first .. first + count - 1, in order.

    With `least` above 1: from `first` on the first `count` in which so many agents can be controlled. ValueError where
    hardly any has them.
    """
    make = partial(generated_one, agents=agents, horizon=horizon, control=control, least=least)
    about = f"agents={agents},horizon={horizon or 'all'},control={control}" + f",least={least}" * (least > 1)
    store = open_store(about) if count >= BLOCK else None
    found: list[Scenario] = []
    seed = first
    with ExitStack() as closed:
        advance = closed.enter_context(screen.stage("making scenarios", count))

        @cache
        def pool() -> ProcessPoolExecutor:
            made = closed.enter_context(processes.ending(processes.pool(workers)))
            for part in range(2):  # two workers, a half of the compiler's minute each
                made.submit(_compile, part)
            return made

        def several(blocks: Sequence[range]) -> Iterator[Block]:
            work = partial(_block, make=make, store=store)
            missing = sum(len(seeds) for seeds in blocks if store is None or not store.has(seeds))
            alone = workers < 2 or (missing < LEAST_SHARED and sum(map(len, blocks)) < LEAST_READ)
            return map(work, blocks) if alone else pool().map(work, blocks)

        while len(found) < count:
            stop = seed + count - len(found)
            seeds = range(seed, stop if least == 1 or store is None else -(-stop // BLOCK) * BLOCK)
            for scenario in _of(seeds, store, several):
                if scenario is not None:
                    found.append(scenario)
                    advance(min(len(found), count))
            seed = seeds.stop
            if len(found) < count and seed - first >= TRIED * (1 + len(found)):
                raise ValueError(
                    f"{len(found)} of {seed - first} generated scenarios have {least} agents or more; ask for fewer"
                )
    return found[:count]


def _compile(part: int) -> None:
    """Compilation of one of two parts of what generated scenarios need of numba, which keeps it on disk."""
    if part:
        log = made_up_log()
        scenario_of(log, cast_of(log, agents=1, horizon=None, control="vehicles"), agents=1, control="vehicles")
    else:
        for seed in range(8):  # junctions of several kinds
            generate(seed)


class Block(NamedTuple):
    """Scenarios of neighbouring seeds."""

    scenarios: list[Scenario | None]  # of its seeds, in their order
    complaint: str | None  # what is wrong with the store


def _block(seeds: range, *, make: Callable[[int], Scenario | None], store: Store | None) -> Block:
    """Scenarios of a block, read from the store or made and stored: packing them takes half as long as making them, so
    the workers do both."""
    if store is None or len(seeds) < BLOCK:
        return Block([make(seed) for seed in seeds], None)
    found = store.load(seeds.start)
    if found is None:
        found = [make(seed) for seed in seeds]
        store.save(seeds.start, found)
    return Block(found, store.complaint)


def _of(
    seeds: range, store: Store | None, several: Callable[[Sequence[range]], Iterator[Block]]
) -> Iterator[Scenario | None]:
    """The scenarios of `seeds` in their order: those of whole blocks from the store, as far as it has them."""
    parts = BLOCK if store is not None else SHARE
    aligned = range(-(-seeds.start // parts) * parts, seeds.stop, parts)
    ends = sorted({seeds.start, *aligned, seeds.stop})
    for block in several([range(*ends[i : i + 2]) for i in range(len(ends) - 1)]):
        if store is not None and block.complaint is not None:
            store.complain(block.complaint)
        yield from block.scenarios


LEAST_SHARED, LEAST_READ = 16, 1024
"""Scenarios from which on workers share the making, and the reading."""

SHARE = 8
"""Seeds that a worker makes at once where nothing is stored."""

OBJECTS = 128
"""Agents that are kept of a scenario, if nothing else is said."""


SHOWN = 20
"""Logs that are left out and named; of more the number alone is said."""


def from_logs(
    paths: Sequence[str], *, agents: int = 1, horizon: int | None = None, objects: int = OBJECTS,
    count: int | None = None, control: str = "vehicles", skip_bad: bool = False,
) -> list[Scenario]:  # fmt: skip
    """Every scenario of the files at `paths`, in their order, or the first `count`: with `agents` controlled agents of
    at most `objects`, for at most `horizon` steps. `BadData`, one line, at the first that can't be used, unless
    `skip_bad`, and where there is none."""
    each = by_file(
        paths, count=count, skip_bad=skip_bad, agents=agents, horizon=horizon, objects=objects, control=control
    )
    found = [scenario for _, scenarios in each for scenario in scenarios]
    if not found:
        raise BadData(f"{', '.join(map(str, paths))}: the files hold no scenario; give other data")
    return found


def by_file(
    paths: Sequence[str], *, count: int | None, skip_bad: bool = False, **settings: Any
) -> Iterator[tuple[Path, list[Scenario]]]:
    """Each file at `paths` with its scenarios, as `from_logs`.

    Logs are read under limits of a process (`readers.limited`): where JAX is loaded, of another one. What is wrong is
    told with the file's name; with `skip_bad` on stderr, and the scenarios that can't be used are left out. In a folder
    with other logs, those that need a library which is not installed are left out, which stderr says once of each
    format.
    """
    done, files, lacking = 0, readers.expand(paths), set()
    faults: list[str] = []

    def leave_out(fault: str) -> None:
        faults.append(fault)
        if len(faults) <= SHOWN:
            process_group.say(f"{fault}; it is left out")

    with ExitStack() as closed:
        advance = closed.enter_context(screen.stage("reading logs", count))
        closed.callback(lambda: process_group.say(f"{len(faults)} logs are left out") if len(faults) > SHOWN else None)
        pool = cache(lambda: closed.enter_context(processes.ending(processes.pool(1))))
        for path in files:
            left = None if count is None else count - done
            if left == 0:
                return
            work = partial(_scenarios, path, left, skip_bad=skip_bad, **settings)
            try:
                here = "jax" not in sys.modules or readers.detect(path) == readers.SHARD
                found, wrong = work() if here else pool().submit(work).result()
            except LibraryMissing as error:
                if str(path) in map(str, paths) or (path == files[-1] and not done):
                    raise
                if (why := str(error).removeprefix(str(path))) not in lacking:
                    process_group.say(f"{error}; logs like it are left out")
                lacking.add(why)
                continue
            except (BadData, BrokenProcessPool) as error:
                fault = _fault(path, error)
                if isinstance(error, BrokenProcessPool):
                    pool.cache_clear()
                    fault = f"{path}: the process that read it died (out of memory?)"
                if not skip_bad:
                    many = len(files) > 1 or readers.detect(path) == readers.TFRECORD
                    raise BadData(fault + LEAVE_OUT * many) from error
                found, wrong = [], [fault]
            for fault in wrong:
                leave_out(fault)
            done += len(found)
            advance(done)
            if found:
                yield path, found


LEAVE_OUT = "; --skip-bad-logs leaves out what can't be used, and `longhaul data convert` makes shards of the rest"
"""Remedy behind an error of one of many logs."""


def _fault(path: Path, error: Exception) -> str:
    """Fault of a file, with its name."""
    return str(error) if str(path) in str(error) else f"{path}: {error}"


def _scenarios(path: Path, count: int | None, *, skip_bad: bool, **settings: Any) -> tuple[list[Scenario], list[str]]:
    """(scenarios of a file, at most `count`; with `skip_bad` what is wrong with the others)."""
    found: list[Scenario] = []
    wrong: list[str] = []
    with readers.limited(path):
        each = makers(path, **settings)
        while count is None or len(found) < count:
            try:
                if (make := next(each, None)) is None:
                    break
                found.append(make())
            except LibraryMissing:
                raise
            except BadData as error:
                if not skip_bad:
                    raise
                wrong.append(_fault(path, error))
    return found, wrong


def makers(
    path: Path, *, agents: int = 1, horizon: int | None = None, objects: int = OBJECTS, control: str = "vehicles",
    routes: str = "log",
) -> Iterator[Callable[[], Scenario]]:  # fmt: skip
    """One function for each scenario of a file; shards hold ready who is controlled and along what routes. Calling it
    may raise `BadData` without an end to the others; where the file itself is damaged, going on raises it."""
    if readers.detect(path) == readers.SHARD:
        shard = shards.open(path)

        def stored(index: int) -> Scenario:
            where = f"{path}: record {index} of {len(shard)}"
            scenario = shard[index]
            if agents > 1 and not agrees(scenario.control, control):
                raise BadData(disagreement(where, scenario.control, control))
            return cut(scenario, agents=agents, horizon=horizon, objects=objects, where=where)

        yield from (partial(stored, index) for index in range(len(shard)))
        return
    for log in readers.read(path):
        yield partial(
            scenario_from_log, log, agents=agents, horizon=horizon, objects=objects, control=control, routes=routes
        )


def agrees(compiled: str, control: str) -> bool:
    """True if a scenario that was compiled with one `control` is what another asks for, of more than the ego."""
    return compiled in (control, CHOSEN)


def disagreement(where: str, compiled: str, control: str) -> str:
    """Error text where `agrees` does not hold: who is left of all that were near is not who compiling would choose."""
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


BLOCK = 32
"""Seeds of a file; the first one is a multiple of it."""

SUFFIX, LEVEL = ".npz", 1
"""Ending of a file's name, and the level at which it is compressed: the higher ones take several times as long."""

ROAD, DRAWING, SHAPES = "road.", "drawing.", ".shapes"
"""Prefixes of array names, and of what tells the scenarios' parts of one array apart."""

THERE = "there"
"""Name of the array that says which seeds of a block have a scenario."""


class Store:
    """The scenarios compiled in one way, which `about` names: "agents=1,horizon=all". `open_store` makes one."""

    def __init__(self, folder: Path, about: str) -> None:
        self.folder, self.about = folder, about
        self.complaint: str | None = None
        self._complained = self._unwritable = False

    def path(self, first: int) -> Path:
        """Path of the block that begins with the seed `first`."""
        return self.folder / f"{maker()}-{self.about}-{first}{SUFFIX}"

    def has(self, seeds: range) -> bool:
        """True if a file of these seeds is there; they must be those of a block."""
        return len(seeds) == BLOCK and self.path(seeds.start).exists()

    def load(self, first: int) -> list[Scenario | None] | None:
        """The scenarios of the block, None for seeds that have none; None where they must be made."""
        path = self.path(first)
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            there = arrays.pop(THERE)
            rows: list[dict[str, np.ndarray]] = [{} for _ in range(int(there.sum()))]
            for name in filter(lambda name: not name.endswith(SHAPES), arrays):
                values, shapes = arrays[name], arrays[name + SHAPES]  # the arrays of one name lie one behind the other
                ends = np.cumsum(np.prod(shapes, axis=1, dtype=np.int64))
                for row, part, shape in zip(rows, np.split(values, ends[:-1]), shapes.astype(int), strict=True):
                    row[name] = part.reshape(shape)
            each = map(_scenario, rows)
            found = [next(each) if some else None for some in there.tolist()]
            os.utime(path)  # what is used stays; many file systems don't note a reading
        except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            self.complaint = str(error)
            return None
        return found

    def save(self, first: int, scenarios: Sequence[Scenario | None]) -> None:
        """Storage of a block that was made; of none any more once that failed."""
        if self._unwritable:
            return
        path = self.path(first)
        beside = path.with_name(f".{path.stem}.{os.getpid()}{SUFFIX}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            rows = [_arrays(scenario) for scenario in scenarios if scenario is not None]
            names = rows[0] if rows else {}
            columns = {name: np.concatenate([row[name].reshape(-1) for row in rows]) for name in names}
            columns |= {name + SHAPES: np.array([row[name].shape for row in rows]) for name in names}
            columns[THERE] = np.array([scenario is not None for scenario in scenarios])
            with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as file:
                for name, values in columns.items():
                    with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, values, allow_pickle=False)
            beside.replace(path)
        except OSError as error:
            self._unwritable, self.complaint = True, str(error)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def complain(self, complaint: str) -> None:
        """Report of what is wrong, of the first thing alone."""
        if not self._complained:
            cache_dir.say(f"generated scenarios in {self.folder} are of no use ({complaint}): they are made anew")
        self._complained = True


def open_store(about: str) -> Store | None:
    """Store of such scenarios; None where caches are switched off, or the code can't be read."""
    folder = cache_dir.folder("scenarios")
    if folder is None:
        return None
    try:
        maker()
        cache_dir.trim(folder, f"*{SUFFIX}")
    except OSError:
        return None
    return Store(folder, about)


@functools.cache
def maker() -> str:
    """The digest of all that a scenario follows from but its seed: our code, NumPy's version, the kind of machine."""
    digest = hashlib.sha256(f"{np.__version__} {platform.machine()}".encode())
    for path in sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def sources() -> list[Path]:
    """Files of the code that makes scenarios; those that simulate and draw them may change."""
    here = Path(__file__)
    parts = (here.parent / part for part in ("datasets", "generator", "scenario"))
    return sorted([here, *(path for part in parts for path in part.rglob("*.py"))])


def _arrays(scenario: Scenario) -> dict[str, np.ndarray]:
    """All of a scenario that does not follow from the rest, by name. Lines of the drawing lie one behind the other."""
    kinds, lines = zip(*scenario.drawing, strict=True) if scenario.drawing else ((), ())
    drawing = {
        "kinds": np.array(kinds, np.int64),
        "points": np.array([len(line) for line in lines], np.int64),
        "lines": np.concatenate([np.zeros((0, 2), np.float32), *lines]),
    }
    plain = {name: value for name, value in scenario._asdict().items() if name not in ("road", "drawing")}
    parts = {"": plain, ROAD: scenario.road._replace(near=NO_ROAD.near)._asdict(), DRAWING: drawing}
    return {prefix + name: np.asarray(value) for prefix, part in parts.items() for name, value in part.items()}


def _scenario(arrays: Mapping[str, np.ndarray]) -> Scenario:
    """The other way round."""
    kinds, points, lines = (arrays[DRAWING + name] for name in ("kinds", "points", "lines"))
    each = np.split(lines, np.cumsum(points)[:-1]) if len(points) else []
    values: dict[str, Any] = {name: arrays[name] for name in Scenario._fields if name not in ("road", "drawing")}
    values |= {"id": str(values["id"]), "control": str(values["control"]), "steps": int(values["steps"])}
    road = Road(*(arrays[ROAD + name] for name in Road._fields))
    values |= {"dt": float(values["dt"]), "road": look_around(road, road.near_lanes)}
    return Scenario(**values, drawing=tuple(zip(kinds.tolist(), each, strict=True)))
