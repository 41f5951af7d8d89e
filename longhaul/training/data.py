"""Training data of a run: one context for all of it, or chunks of scenarios one after the other.

Scenarios that fit on the device form one bank. Shards that hold more than `Driving.bank` scenarios are read in chunks
of that size (`shards.stream`: shuffled by the run's seed, each once an epoch; the same in all processes, or in each
those of its own, `Driving.bank_by_host`: an epoch's scenarios then fall to all processes together). A thread reads,
compiles and sends the next chunk while the run trains, so two are on the device at a time; where actors drive, on each
of their devices (`layout`). After `Driving.bank_updates` updates all worlds start new episodes in the next chunk. The
order of chunks follows from the seed and the number of updates alone.

All chunks of a run have the same shapes, known before any is read: the shards' indices hold the size of each scenario
and the composition of each chunk is known, so the padding is that of the run's largest chunk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import jax
import numpy as np
from jax.sharding import NamedSharding

from longhaul.algorithms import registry
from longhaul.algorithms.run_context import RunContext
from longhaul.config.resolve import named
from longhaul.config.run import BEGINNING, Driving, Origin, Run
from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.scenario import bank as banks
from longhaul.driving.scenario.bank import Sizes
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.shards import stream
from longhaul.driving.shards.stream import Library, Position, Share
from longhaul.driving.sim import device_bank, simulator
from longhaul.driving.sim.device_bank import FLAT, DeviceBank, Room, needs, padded
from longhaul.driving.sim.simulator import Simulator
from longhaul.reasoning.config import Reasoning
from longhaul.reasoning.problem_sets import World
from longhaul.runtime import device_memory, partition, process_group
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import cores
from longhaul.runtime.errors import RunError
from longhaul.telemetry import screen
from longhaul.topologies.actor_learner import learner, placement
from longhaul.training import offline_data, reasoning_setup
from longhaul.training.assemble import last_update
from longhaul.types import Environment, PyTree, Spec

AHEAD = 1
"""Chunks prepared in advance."""

MOST = 2**31 - 1
"""Largest number of elements of an array: XLA indexes it by int32."""


class Place(NamedTuple):
    """Position of a run in its data stream, kept in checkpoints."""

    swaps: int = 0  # chunks before this one
    position: Position = Position(0, 0)  # of this chunk's first scenario

    def plain(self) -> dict[str, Any]:
        """The position as JSON can hold it."""
        return {"swaps": self.swaps, "position": list(self.position)}


def place(plain: dict[str, Any]) -> Place:
    return Place(plain["swaps"], Position(*plain["position"]))


class Fed(NamedTuple):
    """A context with its place in the stream."""

    context: PyTree  # on the mesh
    place: Place
    following: Place  # of the next context


class Feed(NamedTuple):
    """Source of a run's training data."""

    within: Callable[[PyTree], Environment | World]  # environment in a context
    open: Callable[[Place], Generator[Fed]]  # contexts from a place on
    period: int | None = None  # updates in each context; None if there is one
    about: dict[str, Any] | None = None  # digest of the data, for run.json
    like: PyTree | None = None  # shapes of a context on the mesh, if known before reading


class Feeding:
    """An open feed: the current context, and a thread that prepares the next."""

    def __init__(self, source: Feed, origin: Origin = BEGINNING):
        """`origin` is where the run counts the updates in each context from."""
        self._source = source
        self._origin = origin
        self._contexts = source.open(Place())
        self.now = next(self._contexts)

    def move(self, to: Place) -> None:
        """Continue at another place."""
        if to != self.now.place:
            del self.now
            self.close()
            self._contexts = self._source.open(to)
            self.now = next(self._contexts)

    def ends(self, updates: int) -> bool:
        """True if a run with `updates` updates is due in the next context."""
        period, finished = self._source.period, updates - self._origin.updates
        return period is not None and finished > 0 and finished % period == 0

    def turn(self, updates: int) -> None:
        """Switch to the context after `updates` updates; the caller must hold no reference to the old one."""
        if self.place(updates) != self.now.place:
            del self.now
            self.now = next(self._contexts)

    def until(self, updates: int) -> int | None:
        """Update at which the context of a run with `updates` updates ends; None if never."""
        period, first = self._source.period, self._origin.updates
        return None if period is None else first + ((updates - first) // period + 1) * period

    def place(self, updates: int) -> Place:
        """Place of a run with `updates` updates."""
        due = self._origin.swaps + (updates - self._origin.updates) // (self._source.period or 1)
        over = self.ends(updates) and self.now.place.swaps < due
        return self.now.following if over else self.now.place

    def ahead(self) -> dict[str, int]:
        """Bytes on a device of the contexts that are prepared in advance, by their name."""
        if self._source.period is None:
            return {}
        return {"next bank": AHEAD * device_memory.bytes_on_device(self.now.context)}

    def close(self) -> None:
        self._contexts.close()


def feed(run: Run, origin: Origin = BEGINNING) -> Feed:
    """Training data of the resolved `run` from `origin` on; read now, or only their indices if streamed.

    Call `prepare_devices` first. Raises RunError or BadData, one line, if data cannot be used.
    """
    task = run.environment
    if isinstance(task, Reasoning):  # problems of the run's seed, without those held out for evaluation
        held = once(_send(run, reasoning_setup.bank(run)))
        return Feed(lambda context: reasoning_setup.world(run, context), held)
    if not isinstance(task, Driving):
        environment = named(task)
        if files := registry.recorded(run.algorithm):
            recorded = offline_data.read(files, environment.spec)
            sums = json.dumps([_checksum(np.asarray(leaf)) for leaf in jax.tree.leaves(recorded)])
            about = {"steps": recorded.rows, "sha256": hashlib.sha256(sums.encode()).hexdigest()}
            return Feed(lambda context: environment, once(_send(run, recorded)), about=about)
        if registry.guidance(run.algorithm) is not None:
            title = run.algorithm.title
            raise RunError(f"{title} has no expert in {task.env}; give --recorded FILES, or train driving-bc")
        return Feed(lambda context: environment, once(()))
    layout(run)
    check_network(run)
    if task.bank is not None:
        for path in readers.expand(task.data):
            if readers.detect(path) != readers.SHARD:
                raise BadData(f"{path}: is no shard, and --bank needs shards; longhaul data convert makes them")
        library = stream.open(task.data)
        stream.check(library, " ".join(task.data), agents=task.simulator.agents, control=task.simulator.control)
        if len(library) > task.bank:
            return _streamed(run, task, library, origin)
    return _resident(run, task)


def check_network(run: Run) -> None:
    """Raises RunError or ValueError if a run's network and its optimiser can't fit on its devices, or can't be split
    over them, by their shapes alone: before its scenarios are made or read, which takes minutes."""
    algorithm = registry.make(spec(run), run.algorithm, RunContext(last_update(run), meshes.identity))
    state = jax.eval_shape(algorithm.init, jax.random.key(run.seed))
    partition.check(state, run.mesh)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    mesh = meshes.make_mesh(*run.mesh)
    device_memory.check_state(size // (mesh.size if run.fsdp or run.mesh.parts > 1 else 1), mesh)


def once(context: PyTree) -> Callable[[Place], Generator[Fed]]:
    """Contexts of a feed that has only one."""
    return lambda at: (Fed(context, at, at) for _ in range(1))


def _resident(run: Run, task: Driving) -> Feed:
    """Feed of all scenarios as one bank."""
    agents, about = task.simulator.agents, None
    if task.data:
        scenarios = scenario_source.from_logs(
            task.data, agents=agents, horizon=task.horizon, objects=task.objects, control=task.simulator.control,
            skip_bad=task.skip_bad_logs,
        )  # fmt: skip
        about = {"scenarios": len(scenarios), "sha256": digest(scenarios)}
    else:
        scenarios = scenario_source.generated(
            0, task.scenarios, agents=agents, horizon=task.horizon, workers=cores(), control=task.simulator.control,
            least=task.least,
        )  # fmt: skip
    with screen.stage("laying out scenarios"):
        shell, host = simulator.arranged(banks.stack(scenarios, agents=agents), task.simulator)
    return Feed(_within(shell), once(_send(run, host)), about=about)


def _streamed(run: Run, task: Driving, library: Library, origin: Origin = BEGINNING) -> Feed:
    """Feed of chunks of the library."""
    assert task.bank is not None and task.bank_updates is not None
    steps = np.minimum(library.sizes["T"], task.horizon or np.iinfo(np.int64).max)
    objects = min(int(library.sizes["N"].max()), task.objects)
    extents = objects, int(library.sizes["R"].max()), int(library.sizes["L"].max())
    sizes = banks.sizes_of(int(steps.max()), *extents)
    room = room_for(run, task, library, origin)

    def contexts(at: Place) -> Generator[Fed]:
        return _chunks(run, task, library, sizes, room, at)

    about = {"scenarios": len(library), "sha256": library.digest}
    dt = float(library.dt.max())
    within = _within(simulator.outline(task.simulator, least=int(steps.min()), most=int(steps.max()), dt=dt))
    return Feed(within, contexts, task.bank_updates, about, _extrapolated_shapes(run, task, library, sizes, room))


def _extrapolated_shapes(run: Run, task: Driving, library: Library, sizes: Sizes, room: Room) -> DeviceBank:
    """Shapes of every chunk, extrapolated from one and two scenarios."""
    assert task.bank is not None
    few = [stream.load(library, i % len(library), task.simulator.agents, task.horizon, task.objects) for i in range(2)]
    first, second = (_device_layout(task, few[:count], sizes) for count in (1, 2))
    more, where = task.bank - 1, layout(run)

    def shape(path: Any, a: np.ndarray, b: np.ndarray) -> jax.ShapeDtypeStruct:
        grown = [i + more * (j - i) for i, j in zip(a.shape, b.shape, strict=True)]
        if (name := jax.tree_util.keystr(path)) in FLAT:
            grown[FLAT[name]] = room[name]
        return jax.ShapeDtypeStruct(tuple(grown), jax.dtypes.canonicalize_dtype(a.dtype), sharding=where)

    shapes: DeviceBank = jax.tree_util.tree_map_with_path(shape, first, second)
    return shapes


def _device_layout(task: Driving, scenarios: list[Scenario], sizes: Sizes) -> DeviceBank:
    """Scenarios in the simulator's layout, on the host."""
    bank = banks.stack(scenarios, agents=task.simulator.agents, sizes=sizes)
    simulator.check(bank, task.simulator)
    return device_bank.arrange(bank, task.simulator.agents, reactive=task.simulator.traffic == "idm")


def room_for(run: Run, task: Driving, library: Library, origin: Origin = BEGINNING) -> Room:
    """Padding that fits every chunk of the whole run."""
    assert task.bank is not None and task.bank_updates is not None
    needed = needs(
        library.sizes, library.extents, agents=task.simulator.agents, horizon=task.horizon,
        reactive=task.simulator.traffic == "idm",
    )  # fmt: skip
    updates = last_update(run, origin) - origin.updates
    chunks = origin.swaps - (-updates // task.bank_updates) + AHEAD
    each = np.stack([added for _, added in needed.values()])
    most = stream.largest(each, task.bank, chunks, seed=run.seed, hosts=_share(task).hosts)
    room = {name: max(needed[name][0] + int(more), 1) for name, more in zip(needed, most, strict=True)}
    name = max(room, key=room.__getitem__)
    if room[name] > MOST:
        raise BadData(f"--bank is {task.bank}; {name} of that many takes {room[name]} places, above {MOST}: hold fewer")
    return room


def _share(task: Driving) -> Share:
    """Share of this process in the stream."""
    return Share(process_group.index(), process_group.count()) if task.bank_by_host else stream.WHOLE


def _chunks(run: Run, task: Driving, library: Library, sizes: Sizes, room: Room, at: Place) -> Generator[Fed]:
    agents, size = task.simulator.agents, task.bank
    assert size is not None

    def make(scenarios: list[Scenario]) -> DeviceBank:
        return _send(run, padded(_device_layout(task, scenarios, sizes), room))

    batches = stream.batches(
        library, size=size, seed=run.seed, position=at.position, agents=agents, horizon=task.horizon,
        objects=task.objects, make=make, ahead=AHEAD, share=_share(task),
    )  # fmt: skip
    try:
        swaps, begin = at.swaps, at.position
        while True:
            context, end = next(batches)
            fed = [Fed(context, Place(swaps, begin), Place(swaps + 1, end))]
            del context
            yield fed.pop()
            swaps, begin = swaps + 1, end
    finally:
        batches.close()


def _within(shell: Simulator) -> Callable[[PyTree], Environment]:
    """Environment in the tables of a bank."""
    return lambda context: dataclasses.replace(shell, tables=context)


def _send(run: Run, host: PyTree) -> Any:
    """Data on each device that reads them; with `bank_by_host` on each of this process, whose shards alone do. With
    central inference actors hold the scenarios, which stay on the host."""
    if run.topology == "central" and isinstance(run.environment, Driving):
        return host
    if _by_actors(run):
        return jax.device_put(host, layout(run))
    return meshes.everywhere(host, meshes.make_mesh(*run.mesh))


def layout(run: Run) -> NamedSharding:
    """Layout of a run's contexts, whole on each device of its mesh; scenarios that actors drive on those of this
    process's actors. Raises RunError for a device that is not there."""
    mesh = meshes.make_mesh(*run.mesh)
    if not _by_actors(run):
        return meshes.replicated(mesh)
    assert run.acting.actors is not None
    actors = len(learner.process_places(run.acting.actors))
    return placement.copies(placement.devices(mesh, actors, run.acting.actor_devices))


def _by_actors(run: Run) -> bool:
    return run.topology == "actors" and isinstance(run.environment, Driving)


def _checksum(array: np.ndarray) -> int:
    return int(google_crc32c.value(np.ascontiguousarray(array).tobytes()))


def digest(scenarios: Sequence[Scenario]) -> str:
    """SHA-256 of the ids, courses, routes and fields of scenarios, in order."""
    rows = [(s.id, *(_checksum(array) for array in (s.pose, s.route, s.field))) for s in scenarios]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def check(run: Run, source: Feed, about: dict[str, Any], name: str) -> None:
    """Check of the data: RunError if `source` differs from what run.json (`about`) of run `name` records."""
    before, now = about.get("data"), source.about
    if before is None or now is None or before == now:
        return
    task, kind = run.environment, "scenarios" if isinstance(run.environment, Driving) else "steps"
    files = f"--data {' '.join(task.data)}" if isinstance(task, Driving) else "--recorded"
    count = now[kind]
    difference = (
        f"{count} {kind}, and {before[kind]} when" if count != before[kind] else f"{count} other {kind} than when"
    )
    raise RunError(f"{files} holds {difference} run {name} began; bring those data back, or start a new run")


def spec(run: Run) -> Spec:
    """Spec of a run's environments without reading data; for driving without the length of episodes."""
    task = run.environment
    if isinstance(task, Driving):
        return simulator.outline(task.simulator, least=2, most=2, dt=0.1).spec
    return reasoning_setup.spec(run) if isinstance(task, Reasoning) else named(task).spec
