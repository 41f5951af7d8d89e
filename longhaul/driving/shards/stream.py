"""Packed shards as an endless, shuffled stream of batches: for training data larger than memory.

An epoch gives each scenario once, in an order drawn by (seed, epoch): a keyed bijection of 0 .. n - 1, computed place
by place, so that nothing of the length of the data is held or drawn, and a stream starts anywhere at once. Where it
stands is a `Position` of two numbers. Of H hosts, host h has every H-th place of that order: together they give each
scenario once an epoch, whatever n is. Batches are always full; they go over from one epoch into the next.

A thread reads ahead. What `make` does to a batch, it does there: `partial(bank.stack, agents=A)`, or a transfer to the
device after that. Never do more than 1 + `ahead` batches exist: who asks for the next has let go of the one before.

Example:
    library = stream.open(["shards"])
    for batch, position in stream.batches(library, size=64, seed=0, position=saved):
        ...  # save `position` with what was learned from `batch`

The bijection is a Feistel network on an even number of bits with cycle-walking (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002).
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.scenario.bank import Extents
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.scenario_source import agrees, cut, disagreement
from longhaul.driving.shards import shard as shards
from longhaul.runtime import splitmix

Batch = TypeVar("Batch")

ROUNDS = 6

MOST_OPEN = 128
"""Shards that are kept open at once: each needs a file handle."""

TOGETHER = 1 << 16
"""Scenarios that are considered together when batches are planned."""

PATIENCE = 0.1
"""Seconds after which a thread that waits looks whether it is still wanted."""


class Position(NamedTuple):
    """Position of a stream: how many scenarios of this epoch it gave, on all hosts together."""

    epoch: int
    given: int


@dataclass(frozen=True)
class Library:
    """Many shards as one sequence of scenarios; `library[i]` reads from the disk."""

    paths: tuple[Path, ...]
    ends: np.ndarray  # int64 [shards]: how many scenarios lie up to the end of each
    sizes: dict[str, np.ndarray]  # int64 [scenarios] for each of `shard.LETTERS`
    extents: dict[str, np.ndarray]  # int64 [scenarios] for each field of `Extents`
    control: np.ndarray  # int64 [scenarios], indices into `shard.CONTROLS`
    dt: np.ndarray  # float64 [scenarios], s
    digest: str  # SHA-256 of all ids and checksums, in order: other data have another
    opened: OrderedDict[int, shards.Shard] = field(default_factory=OrderedDict, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Scenario:
        if not 0 <= index < len(self):
            raise IndexError(f"scenario {index} of {len(self)}")
        place = int(np.searchsorted(self.ends, index, side="right"))
        shard = self._shard(place)
        return shard[index - int(self.ends[place]) + len(shard)]

    def names(self) -> tuple[list[str], list[Path]]:
        """Id and shard of each scenario."""
        opened = [self._shard(place) for place in range(len(self.paths))]
        return [each for shard in opened for each in shard.ids], [shard.path for shard in opened for _ in shard.ids]

    def _shard(self, place: int) -> shards.Shard:
        shard = self.opened.pop(place, None) or shards.open(self.paths[place])
        self.opened[place] = shard
        if len(self.opened) > MOST_OPEN:
            self.opened.popitem(last=False)
        return shard


def open(paths: Sequence[str]) -> Library:
    """The shards at `paths`: files, folders, patterns. `BadData` where there is none, or something else is named."""
    files, entries, digest = [], [], hashlib.sha256()
    for path in readers.expand(paths):
        shard = shards.open(path)
        if len(shard):
            files.append(path)
            entries.append(shard.entries)
            digest.update(json.dumps([shard.ids, shard.entries["crc"].tolist()]).encode())
        shard.close()
    if not files:
        raise BadData(f"{', '.join(map(str, paths))}: the shards hold no scenario; convert some logs first")
    every = np.concatenate(entries)
    sizes = {letter: every["sizes"][:, i].astype(np.int64) for i, letter in enumerate(shards.LETTERS)}
    extents = {name: every["extents"][:, i].astype(np.int64) for i, name in enumerate(Extents._fields)}
    ends, control = np.cumsum([len(each) for each in entries]), every["control"].astype(np.int64)
    return Library(tuple(files), ends, sizes, extents, control, every["dt"], digest.hexdigest())


def permute(place: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Scenarios, of `count`, at the places `place` of the order of (seed, epoch), int64 [...]."""
    half = np.uint64(max(((count - 1).bit_length() + 1) // 2, 1))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)
    value = np.array(place, np.uint64).reshape(-1)
    outside = np.arange(len(value))
    while len(outside):  # at most four times as many values as places: it ends soon, and never leaves the cycle
        left, right = value[outside] >> half, value[outside] & mask
        for key in keys:
            left, right = right, left ^ (splitmix.mix(right ^ key) & mask)
        value[outside] = left << half | right
        outside = outside[value[outside] >= count]
    return value.astype(np.int64).reshape(np.shape(place))


class Share(NamedTuple):
    """Share of a host in a stream that several read."""

    host: int = 0
    hosts: int = 1


WHOLE = Share()


def picks(
    count: int, size: int, position: Position | tuple[int, int], *, seed: int, share: Share = WHOLE
) -> tuple[np.ndarray, Position]:
    """The scenarios of one batch of a host, int64 [size], where all hosts together are at `position`; and the position
    after it."""
    epoch, start = position
    parts, left = [], size * share.hosts
    while left > 0:
        take = min(left, count - start)
        parts.append(permute(np.arange(start, start + take), count, seed, epoch))
        left, start = left - take, start + take
        if start == count:
            epoch, start = epoch + 1, 0
    return np.concatenate(parts)[share.host :: share.hosts], Position(epoch, start)


def largest(values: np.ndarray, size: int, count: int, *, seed: int, hosts: int = 1) -> np.ndarray:
    """For `values` [K, scenarios]: the greatest sums [K] over one of the first `count` batches of any of the hosts."""
    greatest, at = np.zeros(len(values), values.dtype), Position(0, 0)
    together = max(1, TOGETHER // (size * hosts))
    for begin in range(0, count, together):
        batches_now = min(together, count - begin)
        chosen, at = picks(values.shape[1], batches_now * size * hosts, at, seed=seed)
        sums = [row[chosen].reshape(batches_now, size, hosts).sum(1).max() for row in values]
        greatest = np.maximum(greatest, sums)
    return greatest


def batches(
    library: Library,
    *,
    size: int,
    seed: int,
    position: Position | tuple[int, int] = (0, 0),
    agents: int | None = None,
    horizon: int | None = None,
    objects: int | None = None,
    make: Callable[[list[Scenario]], Batch] = list,  # type: ignore[assignment]
    ahead: int = 2,
    share: Share = WHOLE,
) -> Generator[tuple[Batch, Position]]:
    """Batches of `size` scenarios without end, each with the position to resume from after it.

    Scenarios are cut to `agents` controlled agents, `horizon` steps and `objects` agents (None: as they are). `ahead`
    batches are read in advance. Raises ValueError for a size or a position that can't be; BadData where a record is
    damaged, when its batch is due.
    """
    if size < 1 or ahead < 1:
        raise ValueError(f"size is {size} and ahead {ahead}: give at least 1 of each")
    if position[0] < 0 or not 0 <= position[1] < len(library):
        raise ValueError(f"position is {tuple(position)}; there are {len(library)} scenarios: it is of other data")

    def produce() -> Iterator[tuple[Batch, Position]]:
        at = Position(*position)
        while True:
            chosen, at = picks(len(library), size, at, seed=seed, share=share)
            yield make([load(library, int(index), agents, horizon, objects) for index in chosen]), at

    return prefetch(produce(), ahead)


def load(library: Library, index: int, agents: int | None, horizon: int | None, objects: int | None) -> Scenario:
    """A scenario, cut as `batches` does."""
    scenario = library[index]
    driven = agents or len(scenario.controlled)
    return cut(scenario, agents=driven, horizon=horizon, objects=objects, where=f"scenario {index}")


def prefetch(items: Iterator[Batch], ahead: int) -> Generator[Batch]:
    """The same items, up to `ahead` of them made in advance by a thread, which ends with this iterator. What making an
    item raises is raised in its place.

    Who asks for the next item is taken to have let go of the one before: no more than 1 + `ahead` are held at a time.
    """
    ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    room = threading.Semaphore(1 + ahead)
    unwanted = threading.Event()

    def work() -> None:
        try:
            while not unwanted.is_set():
                if room.acquire(timeout=PATIENCE):
                    ready.put(("item", next(items)))  # held nowhere else: what is given away can be freed
        except StopIteration:
            ready.put(("end", None))
        except Exception as error:
            ready.put(("error", error))

    thread = threading.Thread(target=work, name="longhaul-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            taken = [value]
            del value
            yield taken.pop()
            room.release()
    finally:
        unwanted.set()
        thread.join()


def check(library: Library, where: str, *, agents: int, control: str) -> None:
    """Early check: BadData if some scenario of the library cannot be driven so; `where` names the shards."""
    driven = library.sizes["A"]
    if driven.min() < agents:
        raise BadData(
            f"{where}: scenario {int(driven.argmin())} was compiled for {int(driven.min())} controlled "
            f"agents, fewer than {agents}: convert the logs again with --agents {agents}"
        )
    if agents == 1:
        return  # any kind of ego is driven
    others = np.array([not agrees(each, control) for each in shards.CONTROLS])[library.control]
    if others.any():
        first = int(others.argmax())
        raise BadData(disagreement(f"{where}: scenario {first}", shards.CONTROLS[library.control[first]], control))
    slow = library.extents["slow"] < agents
    if slow.any() and control == "vehicles":
        raise BadData(
            f"{where}: --control is vehicles; {int(slow.sum())} scenarios, the first of them "
            f"{int(slow.argmax())}, have cyclists or pedestrians to control: choose --control all"
        )
