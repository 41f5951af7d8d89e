"""Scenarios of an evaluation are the same whether they are held, packed, or made again when they are due."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longhaul.driving import scenario_source
from longhaul.driving.evaluation import scenario_set
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.shards import shard, stream
from longhaul.driving.sim.config import HELD_OUT

COMPILED = {"agents": 2, "horizon": 30}


@pytest.fixture(scope="module")
def made() -> list[Scenario]:
    return scenario_source.generated(HELD_OUT, 40, workers=1, **COMPILED)


@pytest.mark.slow
def test_scenarios_made_when_due_are_those_that_would_be_held(
    made: list[Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across a block's end; with another seed they are others."""
    asked = {**COMPILED, "control": "vehicles", "workers": 1}
    held = scenario_set.in_memory(made)
    monkeypatch.setattr(scenario_set, "MOST_HELD", 32)
    due = scenario_set.generated(40, **asked)
    assert due.load is not held.load
    assert (due.ids, due.facts) == (held.ids, held.facts) == (tuple(s.id for s in made), held.facts)
    for number in (39, 0, 33):
        assert due[number].pose.tobytes() == made[number].pose.tobytes()
    assert not set(scenario_set.generated(2, seed=1, **asked).ids) & set(due.ids)


@pytest.mark.slow
def test_a_sample_of_shards_follows_from_its_seed(made: list[Scenario], tmp_path: Path) -> None:
    shard.write(tmp_path / "a.lhs", made[:25])
    shard.write(tmp_path / "b.lhs", made[25:])
    library = stream.open([str(tmp_path)])
    every = scenario_set.packed(library, None, objects=128, **COMPILED)
    assert every.ids == tuple(s.id for s in made)
    assert [Path(name).name for name in every.files] == ["a.lhs"] * 25 + ["b.lhs"] * 15
    assert every.facts == scenario_set.in_memory(list(every)).facts
    some, again, other = (
        scenario_set.packed(library, 12, objects=128, seed=seed, **COMPILED) for seed in (3, 3, 4)
    )  # fmt: skip
    assert some.ids == again.ids != other.ids
    places = [every.ids.index(name) for name in some.ids]
    assert len(places) == 12 and places == sorted(set(places)) != list(range(12))
    for number, place in enumerate(places):
        assert some[number].id == some.ids[number] == every.ids[place]
        np.testing.assert_array_equal(some[number].pose, every[place].pose)
