"""The stream over shards: each scenario once an epoch, resumed exactly, another order each epoch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from longhaul.driving.datasets.log import BadData
from longhaul.driving.scenario import bank
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.shards import shard, stream
from longhaul.driving.shards.shard import pack
from tests.helpers import log_files as made

COUNT = 37
SCENARIO = scenario_from_log(made.make_log(21, 5), agents=2)

PINNED = [0, 5, 3, 7, 6, 1, 9, 8, 4, 2]


@pytest.fixture
def library(tmp_path: Path) -> stream.Library:
    """37 scenarios in shards of 10, one of them empty; their ids are their numbers."""
    names = [str(number) for number in range(COUNT)]
    for start in (0, 10, 20, 30):
        part = [(name, pack(SCENARIO._replace(id=name))) for name in names[start : start + 10]]
        shard.write_records(tmp_path / f"{start:02d}.lhs", part)
    shard.write_records(tmp_path / "15.lhs", [])
    return stream.open([str(tmp_path)])


def ids(batches: Iterator[tuple[list, stream.Position]], count: int) -> list[list[int]]:
    return [[int(each.id) for each in batch] for batch, _ in islice(batches, count)]


def test_a_library_is_one_sequence(library: stream.Library) -> None:
    assert len(library) == COUNT
    assert [int(library[index].id) for index in range(COUNT)] == list(range(COUNT))
    for wrong in (-1, COUNT):
        with pytest.raises(IndexError, match=f"scenario {wrong} of {COUNT}"):
            library[wrong]


def test_few_shards_stay_open(library: stream.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_OPEN", 2)
    random = np.random.default_rng(0)
    for index in random.integers(0, COUNT, 50).tolist():
        assert int(library[index].id) == index
        assert len(library.opened) <= 2


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_the_order_is_a_permutation(count: int) -> None:
    for epoch in range(3):
        order = stream.permute(np.arange(count), count, 7, epoch)
        assert sorted(order.tolist()) == list(range(count))
        each = [int(stream.permute(np.array(place), count, 7, epoch)) for place in range(min(count, 20))]
        assert each == order[:20].tolist()


def test_the_order_is_even() -> None:
    """Where each of 64 goes, over 4,000 epochs, and which follows which, are as even as chance has them.

    Chi-square with 64 * 63 degrees of freedom or so has mean 1 and a deviation of 0.022, taken by its degrees.
    """
    count, epochs = 64, 4000
    orders = np.stack([stream.permute(np.arange(count), count, 3, epoch) for epoch in range(epochs)])
    places, follows = np.zeros((count, count)), np.zeros((count, count))
    np.add.at(places, (np.arange(count)[None], orders), 1)
    np.add.at(follows, (orders[:, :-1], orders[:, 1:]), 1)
    off = ~np.eye(count, dtype=bool)
    expected = epochs / count
    assert abs(((places - expected) ** 2 / expected).sum() / (count - 1) ** 2 - 1) < 0.1
    expected = epochs * (count - 1) / (count * (count - 1))
    assert abs(((follows[off] - expected) ** 2 / expected).mean() - 1) < 0.1


def test_the_order_is_pinned() -> None:
    """Saved positions must mean the same in every version."""
    assert stream.permute(np.arange(10), 10, 0, 0).tolist() == PINNED


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(stream.permute(np.arange(100), 100, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_each_scenario_once_an_epoch(library: stream.Library) -> None:
    for epoch in range(2):
        ((batch, after),) = islice(stream.batches(library, size=COUNT, seed=1, position=(epoch, 0)), 1)
        assert after == (epoch + 1, 0)
        assert sorted(int(each.id) for each in batch) == list(range(COUNT))


def test_a_stream_resumes_exactly(library: stream.Library) -> None:
    """From every position of two epochs and more, by batches that do not divide them."""
    make = partial(stream.batches, library, size=5, seed=9)
    whole = list(islice(make(), 16))
    assert len({tuple(each.id for each in batch) for batch, _ in whole}) == 16
    positions = [stream.Position(0, 0)] + [position for _, position in whole]
    assert positions[8] == (1, 3) and positions[15] == (2, 1)
    for start in range(15):
        (again,) = islice(make(position=tuple(positions[start])), 1)
        assert [each.id for each in again[0]] == [each.id for each in whole[start][0]]
        assert again[1] == positions[start + 1]


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_have_parts_of_one_stream(library: stream.Library, hosts: int) -> None:
    """Interleaved, their batches are those of one host that reads as many; so each scenario is read once an epoch."""
    whole = list(islice(stream.batches(library, size=5 * hosts, seed=9), 8))
    each = [
        list(islice(stream.batches(library, size=5, seed=9, share=stream.Share(host, hosts)), 8))
        for host in range(hosts)
    ]
    for (batch, after), *parts in zip(whole, *each, strict=True):
        assert {position for _, position in parts} == {after}
        assert [s.id for s in batch] == [s.id for row in zip(*(part for part, _ in parts), strict=True) for s in row]


def test_banks_are_made_in_the_thread(library: stream.Library) -> None:
    threads = []

    def make(batch: list) -> bank.Bank:
        threads.append(threading.current_thread().name)
        return bank.stack(batch, agents=1)

    ((found, _),) = islice(stream.batches(library, size=4, seed=0, agents=1, horizon=6, make=make), 1)
    assert found.pose.shape[:2] == (4, 6)
    assert found.controlled.shape == (4, 1)
    assert set(threads) == {"longhaul-prefetch"}


def test_reading_ahead_is_bounded_and_ends_with_the_stream() -> None:
    made_so_far = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(1000):
            made_so_far.release()
            yield number

    before = threading.active_count()
    found = stream.prefetch(items(), 3)
    assert next(found) == 0
    for _ in range(4):  # the one given, and three that wait
        assert made_so_far.acquire(timeout=60)
    assert not made_so_far.acquire(timeout=0.3)
    found.close()
    assert threading.active_count() == before
    assert list(stream.prefetch(iter(range(10)), 2)) == list(range(10))
    assert threading.active_count() == before


def test_a_damaged_record_is_told_when_it_is_due(library: stream.Library) -> None:
    path = library.paths[1]
    data = bytearray(path.read_bytes())
    data[shard.HEAD_BYTES + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadData, match=r"10.lhs: record 0 of 10.*checksum"):
        ids(stream.batches(library, size=4, seed=0), COUNT)
    batches = stream.batches(library, size=1, seed=0)
    due = int(np.flatnonzero(stream.permute(np.arange(COUNT), COUNT, 0, 0) == 10)[0])
    assert len(ids(batches, due)) == due
    with pytest.raises(BadData, match="checksum"):
        next(batches)


def test_impossible_sizes_and_positions_are_refused(library: stream.Library, tmp_path: Path) -> None:
    for wrong, match in [
        ({"size": 0}, "size is 0"),
        ({"ahead": 0}, "ahead 0"),
        ({"position": (0, COUNT)}, "of other data"),
        ({"position": (-1, 0)}, "position is"),
    ]:
        with pytest.raises(ValueError, match=match):
            stream.batches(library, **({"size": 1, "seed": 0} | wrong))
    shard.write(tmp_path / "none.lhs", [])
    with pytest.raises(BadData, match="hold no scenario"):
        stream.open([str(tmp_path / "none.lhs")])
    made.write_all(replace(made.make_log(11, 5), id="x"), tmp_path)
    with pytest.raises(BadData, match="is no shard"):
        stream.open([str(tmp_path / "gpudrive.json")])
    with pytest.raises(BadData, match="fewer than 3"):
        next(stream.batches(library, size=1, seed=0, agents=3))
