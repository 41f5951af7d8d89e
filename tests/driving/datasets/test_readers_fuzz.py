"""Damaged input of every format: a clear error or a log, whatever is cut, flipped or replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fuzz
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import LANE_STREET, BadData, Feature, Log, Malformed
from longhaul.driving.scenario import from_log
from longhaul.driving.shards.shard import pack, unpack
from tests.helpers import damaged_inputs
from tests.helpers import log_files as made

STEPS, CURRENT = damaged_inputs.STEPS, damaged_inputs.CURRENT


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> damaged_inputs.Sources:
    pytest.importorskip("pyarrow")
    return damaged_inputs.Sources(tmp_path_factory.mktemp("sources"))


def outcome(files: damaged_inputs.Files, scratch: Path) -> str:
    """Outcome of an input; anything but a sound scenario or one clear line that names the file fails the test."""
    found, wrong = fuzz.attempt(fuzz.put(files, scratch))
    assert wrong is None, wrong
    return found


@pytest.mark.parametrize("kind", damaged_inputs.KINDS)
def test_damaged_inputs_are_read_or_refused(sources: damaged_inputs.Sources, kind: str, tmp_path: Path) -> None:
    """Bytes and values, of TFRecords inside their frames: checksums would find every damage."""
    found = {outcome(sources.make(kind, np.random.default_rng((7, i))), tmp_path / "in") for i in range(40)}
    assert found >= {"read", "refused"}  # some damage is to values alone, and most is found


@pytest.mark.parametrize("kind", ["womd-example", "womd-scenario", "gpudrive", "scenarionet", "nuplan"])
def test_inputs_cut_anywhere_are_read_or_refused(sources: damaged_inputs.Sources, kind: str, tmp_path: Path) -> None:
    whole = sources.db if kind == "nuplan" else sources.payloads[kind]
    for cut in np.linspace(0, len(whole) - 1, 80).astype(int).tolist():
        data = made.framed([whole[:cut]]) if kind.startswith("womd") else whole[:cut]
        outcome({f"a{made.SUFFIXES.get(kind, '.db')}": data, sources.chart_name: sources.chart}, tmp_path / "in")


def test_json_with_every_value_replaced(tmp_path: Path) -> None:
    """Each key of GPUDrive's document in turn holds something of another kind, or is missing: a log, or `BadData`."""
    document = made.gpudrive(made.make_log(STEPS, CURRENT))
    road, metadata = document["roads"][0], document["metadata"]
    holders = [document, document["objects"][2], document["objects"][0]["position"][5], road, metadata]
    holders += [road["geometry"][0], document["tl_states"]["102"], metadata["tracks_to_predict"][0]]
    path = tmp_path / "a.json"

    def read() -> None:
        path.write_text(json.dumps(document))
        list(readers.read(path))

    for holder in holders:
        for key, before in list(holder.items()):
            for wrong in (None, -1, 10**30, 1e308, float("nan"), "text", [], {}, [[]], [None], True, [1e308] * STEPS):
                holder[key] = wrong
                with suppress(BadData):
                    read()
            del holder[key]
            with suppress(BadData):
                read()
            holder[key] = before
    read()


@pytest.mark.slow
def test_the_fuzzer_finds_nothing_in_a_few_inputs_of_every_format() -> None:
    """All of it as it is run for 100,000: a worker under limits, a line for each input, one report."""
    pytest.importorskip("pyarrow")
    command = [sys.executable, "-m", "benchmarks.fuzz", "105", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["findings"] == []
    assert set(report["outcomes"]) == set(damaged_inputs.KINDS)
    for kind, outcomes in report["outcomes"].items():
        assert sum(outcomes.values()) == 15
        assert outcomes["refused"] > 0, kind
    assert sum(outcomes.get("read", 0) for outcomes in report["outcomes"].values()) > 10


def test_the_fuzzer_would_tell_of_what_is_run(tmp_path: Path) -> None:
    """Its mutations do carry programs: an ordinary unpickler runs one of them, and many inputs name foreign things."""
    import pickle

    sources_ = damaged_inputs.Sources(tmp_path)
    assert not sources_.canary.exists()
    pickle.loads(pickle.dumps(damaged_inputs.hostile(sources_.canary)[0]))
    assert sources_.canary.exists()
    made_ = [sources_.make("scenarionet", np.random.default_rng((5, i)))["a.pkl"] for i in range(60)]
    assert sum(b"system" in each or b"touch" in each for each in made_) > 5


def moved(log: Log, track: int, step: int, metres: float) -> Log:
    """The log with one track `metres` farther east from `step` on."""
    position = log.tracks.position.copy()
    position[track, step:, 0] += metres
    return replace(log, tracks=replace(log.tracks, position=position))


def test_who_jumps_across_the_world_takes_no_memory() -> None:
    """Found by fuzzing: a distance field, and a route, as large as the way between two wrong positions."""
    log = made.make_log(STEPS, CURRENT)
    with pytest.raises(BadData, match=r"straight: the ego goes 1e\+07 m in 8 steps, beyond 20000"):
        from_log.scenario_from_log(moved(log, log.sdc, 8, 1e7))
    position = moved(log, log.sdc, 8, 9000.0).tracks.position
    position[log.sdc, 8:, 1] += 9000.0
    with pytest.raises(BadData, match=r"its routes lie .* km apart, beyond 4 square km"):
        from_log.scenario_from_log(replace(log, tracks=replace(log.tracks, position=position)))
    other = from_log.scenario_from_log(moved(log, 0, 8, 1e7), agents=3)  # not the ego: it is not worth controlling
    driven = other.controlled[other.controlled >= 0]
    assert len(driven) == 1
    assert (from_log.scenario_from_log(log, agents=3).controlled >= 0).sum() == 2
    assert np.abs(other.pose[:, driven]).max() < 1000.0


def test_a_line_across_the_world_takes_no_time() -> None:
    """Found by fuzzing: a lane with one point ten thousand kilometres away was cut into pieces of ten metres."""
    log = made.make_log(STEPS, CURRENT)
    far = np.concatenate([log.features[0].points, [[1e8, 0.0, 0.5]]])
    scenario = from_log.scenario_from_log(replace(log, features=(Feature(1, LANE_STREET, far), *log.features[1:])))
    assert len(scenario.road.place) < 10_000


def test_edges_are_compared_with_the_routes_in_bounded_memory() -> None:
    rng = np.random.default_rng(0)
    points, near = rng.uniform(-100, 100, (3000, 2)), rng.uniform(-100, 100, (700, 2))
    away, closest = from_log.approach(points, near)
    whole = np.hypot(*(points[:, None] - near[None]).transpose(2, 0, 1))
    np.testing.assert_array_equal(closest, whole.argmin(1))
    np.testing.assert_allclose(away, whole.min(1), rtol=1e-12)


def test_a_record_beyond_any_map_is_refused() -> None:
    """Found by fuzzing: numbers that float32 holds, and that overflow wherever they are multiplied."""
    scenario = from_log.scenario_from_log(made.make_log(STEPS, CURRENT), route_margin=3.0)
    assert unpack(pack(scenario)).steps == scenario.steps
    for changes in (
        {"field_origin": np.full(2, 1e30, np.float32)},
        {"dt": 1e300},
        {"road": scenario.road._replace(origin=np.full(2, -1e20, np.float32))},
        {"road": scenario.road._replace(corner=np.full(2, 1e20, np.float32))},
    ):
        with pytest.raises(Malformed):
            unpack(pack(scenario._replace(**changes)))


def test_ways_after_the_logs_keep_to_their_agents() -> None:
    scenario = from_log.scenario_from_log(made.make_log(STEPS, CURRENT), route_margin=3.0)
    assert len(scenario.onward_of) >= 2  # the vehicles that drive on lanes
    again = unpack(pack(scenario))
    np.testing.assert_array_equal(again.onward_of, scenario.onward_of)
    np.testing.assert_allclose(again.onward, scenario.onward, atol=0.0051)
    with pytest.raises(Malformed, match="the way of an agent that does not exist"):
        unpack(pack(scenario._replace(onward_of=np.full_like(scenario.onward_of, 99))))
    with pytest.raises(Malformed, match="ways of another length"):
        unpack(pack(scenario._replace(onward=scenario.onward[1:])))
