"""The room of chunks, known from the indices of shards; and whom shards let a run control."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.config.run import Driving
from longhaul.driving import scenario_source
from longhaul.driving.datasets.log import PEDESTRIAN, VEHICLE, BadData
from longhaul.driving.scenario import bank as banks
from longhaul.driving.scenario_source import cut
from longhaul.driving.shards import shard, stream
from longhaul.driving.sim import device_bank
from longhaul.driving.sim.padding import lengths, needs, padded
from longhaul.training import data as feeds
from tests.helpers.driving_scenarios import line, scenario
from tests.training.test_data import BANK, COUNT, EGO, PERIOD, assert_same, contexts, streaming, written


@pytest.mark.parametrize("traffic", ["log", "idm"])
@pytest.mark.parametrize("cuts", [{}, {"horizon": 6, "objects": 3}])
def test_the_room_is_known_before_any_chunk_is_read(tmp_path: Path, traffic: str, cuts: dict[str, int]) -> None:
    """No chunk of a run needs more, and the largest needs all but what the bounds of lights and ways give away."""
    run = streaming(written(tmp_path), updates=60 * PERIOD, simulator=dataclasses.replace(EGO, traffic=traffic), **cuts)
    assert isinstance(run.environment, Driving)
    library = stream.open([str(tmp_path)])
    room = feeds.room_for(run, run.environment, library)
    assert room.keys() == device_bank.FLAT.keys() - ({".paths.lines.points"} if traffic == "log" else set())
    most = dict.fromkeys(room, 0)
    for chosen in np.split(stream.picks(COUNT, 61 * BANK, (0, 0), seed=run.seed)[0], 61):
        some = [cut(library[i], agents=1, **{"horizon": None, "objects": None} | cuts) for i in chosen]
        found = lengths(device_bank.arrange(banks.stack(some), 1, traffic == "idm"))
        most = {name: max(length, found[name]) for name, length in most.items()}
    bounds = {".paths.lines.points", ".lights.states"} | ({".routes.points"} if cuts else set())
    for name, length in most.items():
        assert room[name] >= length, name
        assert room[name] == length or name in bounds, name
    assert room[".paths.lines.points" if traffic == "idm" else ".motion"] < 4 * max(most.values())


@pytest.mark.parametrize("cuts", [{}, {"horizon": 20, "agents": 2}])
def test_what_a_shard_says_of_a_road_is_what_it_takes(tmp_path: Path, cuts: dict[str, int]) -> None:
    """Generated scenarios with roads, lights and traffic, one by one."""
    made = scenario_source.generated(10, 3, agents=8, horizon=None, workers=1)
    shard.write(tmp_path / "a.lhs", made)
    library = stream.open([str(tmp_path)])
    cuts = {"agents": 8, "horizon": None} | cuts  # type: ignore[dict-item]
    needed = needs(library.sizes, library.extents, reactive=True, **cuts)  # type: ignore[arg-type]
    gaps = set()
    for i, compiled in enumerate(made):
        one = banks.stack([cut(library[i], **cuts)], agents=cuts["agents"])  # type: ignore[arg-type]
        for name, length in lengths(device_bank.arrange(one, cuts["agents"], True)).items():
            room = needed.shared[name] + int(needed.each[name][i])
            assert length <= room, (compiled.id, name)
            assert room <= 2 * length or name == ".paths.lines.points", (compiled.id, name)
            gaps |= {name} if room > length else set()
    bounds = {".paths.lines.points", ".lights.states", ".routes.points"}
    assert gaps <= (bounds if cuts["agents"] == 2 else bounds - {".routes.points", ".lights.states"})
    assert library.extents["movers"].min() > 0
    assert library.extents["courses"].max() > 1


def test_a_chunk_that_needs_more_than_its_shards_say_is_one_line(tmp_path: Path) -> None:
    library = stream.open([str(written(tmp_path))])
    host = device_bank.arrange(banks.stack([library[3]]), 1, False)
    room = lengths(host)
    assert_same(padded(host, room), host)
    with pytest.raises(ValueError, match=r"\.cells has \d+ places; by the index of the shards it should have 9"):
        padded(host, room | {".cells": 9})
    run = streaming(tmp_path)
    assert isinstance(run.environment, Driving)
    library.extents["cells"][:] = 2**30
    with pytest.raises(BadData, match=r"--bank is 3; \.cells of that many takes \d+ places, above 2147483647"):
        feeds.room_for(run, run.environment, library)


def test_the_largest_batches_are_those_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sums batch by batch; however many are looked at together."""
    values = np.random.default_rng(0).integers(0, 1000, (3, 11))
    for hosts in (1, 2):
        expected = np.zeros(3, np.int64)
        for host in range(hosts):
            at: Any = (0, 0)
            for _ in range(9):
                chosen, at = stream.picks(11, 4, at, seed=5, host=host, hosts=hosts)
                expected = np.maximum(expected, values[:, chosen].sum(1))
        for together in (1, 8, 12, 1 << 16):
            monkeypatch.setattr(stream, "TOGETHER", together)
            np.testing.assert_array_equal(stream.largest(values, 4, 9, seed=5, hosts=hosts), expected)
        assert (stream.largest(values, 4, 1, seed=5, hosts=hosts) < expected).any()


WALKER = scenario(
    [line((0.0, 0.0), (4.0, 0.0), 9), line((5.0, 5.0), (2.0, 0.0), 9), line((5.0, -5.0), (2.0, 0.0), 9)],
    kinds=[VEHICLE, VEHICLE, PEDESTRIAN],
    drivers=3,
)
"""Two vehicles and somebody on foot, all controlled."""


@pytest.mark.parametrize(
    ("compiled", "control", "agents", "message"),
    [
        ("all", "vehicles", 2, r"scenario 0: was compiled for the control of all, not vehicles: .* --control vehicles"),
        ("vehicles", "all", 2, r"scenario 0: was compiled for the control of vehicles, not all: .* --control all"),
        ("chosen", "vehicles", 3, r"--control is vehicles; 2 scenarios, the first of them 0, have cyclists or ped"),
        ("all", "all", 3, None),
        ("chosen", "all", 3, None),
        ("chosen", "vehicles", 2, None),
        ("all", "vehicles", 1, None),
    ],
)
@pytest.mark.parametrize("bank", [None, 1])
def test_who_is_controlled_is_checked_whether_streamed_or_not(
    tmp_path: Path, compiled: str, control: str, agents: int, message: str | None, bank: int | None
) -> None:
    shard.write(tmp_path / "a.lhs", [WALKER._replace(control=compiled, id=name) for name in "ab"])
    config = dataclasses.replace(EGO, agents=agents, control=control)
    run = streaming(tmp_path, bank=bank, bank_updates=bank, simulator=config)
    if message is None:
        assert len(contexts(run, 1)) == 1
        return
    if bank is None:
        message = {"scena": message.replace("scenario 0", "record 0 of 2")}.get(
            message[:5], "control is 'vehicles': the bank has 2"
        )
    with pytest.raises(ValueError, match=message) as raised:
        feeds.feed(run)
    assert "\n" not in str(raised.value)
