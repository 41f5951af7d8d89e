"""Conversion to shards: the same bytes after any kill, by any number of workers; errors listed, never fatal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from longhaul.driving import inspect_logs, scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData, Log
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import Scenario
from longhaul.driving.shards import convert, shard
from longhaul.runtime import files
from tests.driving.shards.test_shard import assert_close
from tests.helpers import log_files as made

LOG = made.make_log(31, 5)
COUNTS = (3, 1, 5, 1, 2)
"""Scenarios of the files that `logs_in` writes, in their order."""


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> Iterator[None]:
    """Most tests convert the same logs: each is compiled once for each way of compiling, in this process."""
    known: dict[Any, Scenario] = {}

    def remember(log: Log, **how: Any) -> Scenario:
        key = log.id, log.source, len(log.features[0].exit), *how.items()
        if key not in known:
            known[key] = scenario_from_log(log, **how)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario_source, "scenario_from_log", remember)
        yield


def logs_in(folder: Path) -> Path:
    """Twelve scenarios in five files; ids say file and record."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(COUNTS):
        named = [replace(LOG, id=f"{number}-{record}") for record in range(count)]
        if count == 1:
            (folder / f"{number}.json").write_text(json.dumps(made.gpudrive(named[0])))
        else:
            made.write_records(folder / f"{number}.tfrecord", map(made.scenario, named))
    return folder


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The folder of twelve scenarios, for tests that only read it."""
    return [str(logs_in(tmp_path_factory.mktemp("logs") / "in"))]


IDS = [f"{number}-{record}" for number, count in enumerate(COUNTS) for record in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    """What must be the same: everything but the state and the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".lhs", ".json")}


def ids(folder: Path) -> list[list[str]]:
    return [list(shard.open(path).ids) for path in sorted(folder.glob("*.lhs"))]


def test_scenarios_keep_their_order_and_fill_the_shards(given: list[str], tmp_path: Path) -> None:
    seen: list[convert.Progress] = []
    report = convert.convert(given, tmp_path / "out", per_shard=5, progress=seen.append)
    assert ids(tmp_path / "out") == [IDS[:5], IDS[5:10], IDS[10:]]
    assert (report.files, report.scenarios, report.errors) == (5, 12, ())
    assert report.shards == ("shard-00000.lhs", "shard-00001.lhs", "shard-00002.lhs")
    assert seen[-1] == convert.Progress(5, 5, 12, 0)
    assert [each.scenarios for each in seen] == [3, 4, 9, 10, 12]
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (index["scenarios"], index["bytes"], index["agents"], index["errors"]) == (12, report.bytes, 1, [])
    assert sum(each["bytes"] for each in index["shards"]) == report.bytes
    assert_close(shard.open(tmp_path / "out" / "shard-00001.lhs")[1], scenario_from_log(replace(LOG, id="2-2")))


@pytest.mark.parametrize("per_shard", [1, 3, 4, 12, 100])
def test_shards_of_any_size_hold_everything_once(given: list[str], tmp_path: Path, per_shard: int) -> None:
    report = convert.convert(given, tmp_path / "out", per_shard=per_shard)
    assert [*chain(*ids(tmp_path / "out"))] == IDS
    assert len(report.shards) == -(-12 // per_shard)


@pytest.mark.slow
def test_workers_change_nothing(given: list[str], tmp_path: Path) -> None:
    convert.convert(given, tmp_path / "one", per_shard=5)
    convert.convert(given, tmp_path / "two", per_shard=5, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("writes", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 5, 6, 7))])
def test_a_conversion_stopped_at_any_write_goes_on(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Stopped before or after each shard gets its name, twice; then run to the end."""
    whole = convert.convert(given, tmp_path / "whole", per_shard=5)
    sync, left = files.sync, writes

    def stop(folder: Path) -> None:
        nonlocal left
        sync(folder)
        left -= 1
        if left == 0:
            raise Killed

    monkeypatch.setattr(files, "sync", stop)
    for left in (writes, 1):
        with suppress(Killed):
            convert.convert(given, tmp_path / "out", per_shard=5)
    monkeypatch.undo()
    (tmp_path / "out" / ".shard-00001.lhs.1.tmp").write_bytes(b"half")
    (tmp_path / "out" / ".stray.tmp").mkdir()
    assert convert.convert(given, tmp_path / "out", per_shard=5) == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".*.tmp"))


@pytest.mark.slow
def test_a_killed_process_leaves_what_goes_on(tmp_path: Path) -> None:
    """SIGKILL, in the middle of many small shards, with workers; its orphans end by themselves."""
    folder = logs_in(tmp_path / "in")
    for number in range(5, 25):
        made.write_records(folder / f"{number:02d}.tfrecord", [made.scenario(replace(LOG, id=f"{number}"))] * 3)
    call = "from longhaul.driving.shards.convert import convert; from pathlib import Path; import sys\n"
    call += "if __name__ == '__main__': convert([sys.argv[1]], Path(sys.argv[2]), workers=2, per_shard=4)"
    program = tmp_path / "program.py"
    program.write_text(call)
    process = subprocess.Popen([sys.executable, str(program), str(folder), str(tmp_path / "out")])
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "shard-00002.lhs").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = tmp_path / "out" / "shard-00000.lhs"
    before = first.stat().st_ino
    convert.convert([str(folder)], tmp_path / "out", per_shard=4)
    convert.convert([str(folder)], tmp_path / "whole", per_shard=4)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert first.stat().st_ino == before  # what was done was kept


def test_a_finished_conversion_does_nothing(given: list[str], tmp_path: Path) -> None:
    report = convert.convert(given, tmp_path / "out", per_shard=5)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.lhs")}
    assert convert.convert(given, tmp_path / "out", per_shard=5, progress=lambda _: pytest.fail("read again")) == report
    assert {path.name: path.stat().st_ino for path in (tmp_path / "out").glob("*.lhs")} == before


@pytest.mark.parametrize("change", ["added", "changed", "removed", "shard lost", "state cut"])
def test_a_changed_input_is_converted_again_from_there_on(tmp_path: Path, change: str) -> None:
    folder, out = logs_in(tmp_path / "in"), tmp_path / "out"
    convert.convert([str(folder)], out, per_shard=2)
    kept = (out / "shard-00000.lhs").stat().st_ino
    if change == "added":
        shutil.copy(folder / "1.json", folder / "9.json")
    elif change == "changed":
        os.utime(folder / "2.tfrecord", ns=(1, 1))
    elif change == "removed":
        (folder / "4.tfrecord").unlink()
    elif change == "shard lost":
        (out / "shard-00003.lhs").unlink()
    else:
        lines = (out / "state.jsonl").read_bytes()
        (out / "state.jsonl").write_bytes(lines[:-20])
    convert.convert([str(folder)], out, per_shard=2)
    convert.convert([str(folder)], tmp_path / "fresh", per_shard=2)
    assert contents(out) == contents(tmp_path / "fresh")
    assert (out / "shard-00000.lhs").stat().st_ino == kept


def test_errors_are_listed_and_never_fatal(tmp_path: Path) -> None:
    folder = logs_in(tmp_path / "in")
    (folder / "1b.json").write_text("{")
    whole = (folder / "2.tfrecord").read_bytes()
    (folder / "2.tfrecord").write_bytes(whole[: len(whole) // 2])
    hidden = LOG.tracks.valid.copy()
    hidden[LOG.sdc, LOG.current] = False
    blind = replace(LOG, id="blind", tracks=replace(LOG.tracks, valid=hidden))
    made.write_records(folder / "5.tfrecord", [made.scenario(each) for each in (LOG, blind, replace(LOG, id="last"))])
    report = convert.convert([str(folder)], tmp_path / "out", per_shard=4)
    assert [*chain(*ids(tmp_path / "out"))] == [*IDS[:6], "3-0", "4-0", "4-1", "straight", "last"]
    assert [Path(path).name for path, _ in report.errors] == ["1b.json", "2.tfrecord", "5.tfrecord"]
    for (path, message), words in zip(report.errors, ("JSON", "cut off", "blind: the ego is not known"), strict=True):
        assert path in message
        assert words in message
        assert "\n" not in message
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert [(each["path"], each["message"]) for each in index["errors"]] == list(report.errors)
    assert convert.convert([str(folder)], tmp_path / "out", per_shard=4) == report


def dies(path: Path) -> convert.Packed:
    if path.name == "bad":
        os._exit(9)
    return convert.Packed([(path.name, b"")], [])


def test_a_worker_that_dies_takes_one_file_with_it() -> None:
    files = [Path(name) for name in ("a", "bad", "b", "c", "d", "e")]
    found = list(convert._results(files, dies, 2))
    assert [[identity for identity, _ in each.records] for each in found] == [["a"], [], ["b"], ["c"], ["d"], ["e"]]
    assert [bool(each.errors) for each in found] == [False, True, False, False, False, False]
    assert "process that read it died" in found[1].errors[0]


def test_nothing_usable_is_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    report = convert.convert([str(tmp_path / "a.json")], tmp_path / "out")
    assert (report.scenarios, report.shards, len(report.errors)) == (0, (), 1)


def test_impossible_settings_and_another_folder_s_settings_are_refused(given: list[str], tmp_path: Path) -> None:
    for wrong in ({"workers": 0}, {"per_shard": 0}, {"agents": 0}, {"horizon": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            convert.convert(given, tmp_path / "out", **wrong)
    with pytest.raises(BadData, match="no such file"):
        convert.convert([str(tmp_path / "none")], tmp_path / "out")
    convert.convert(given, tmp_path / "out", per_shard=5)
    with pytest.raises(BadData, match="made with per_shard = 5: name another folder"):
        convert.convert(given, tmp_path / "out", per_shard=6)
    (tmp_path / "out" / "state.jsonl").unlink()
    with pytest.raises(BadData, match=r"holds shard-0000\d.lhs, but no state"):
        convert.convert(given, tmp_path / "out", per_shard=5)
    (tmp_path / "out" / "state.jsonl").write_text("something else")
    with pytest.raises(BadData, match="is no state"):
        convert.convert(given, tmp_path / "out", per_shard=5)
    with pytest.raises(BadData, match="no logs outside"):
        convert.convert([str(tmp_path / "out")], tmp_path / "out")
    with convert._locked(tmp_path / "out"), pytest.raises(BadData, match="another conversion"):
        convert.convert(given, tmp_path / "out", per_shard=5)


def test_a_folder_of_logs_is_no_place_for_shards(given: list[str], tmp_path: Path) -> None:
    """Whoever names folders of logs alone has forgotten where to write: the last one's would not be read."""
    other = logs_in(tmp_path / "val" / "deep")
    before = sorted(path.name for path in other.iterdir())
    with pytest.raises(BadData, match=r"val: holds logs, as deep/0.tfrecord, .*: name another one after it$"):
        convert.convert([*given, str(tmp_path / "val")], tmp_path / "val")
    assert sorted(path.name for path in other.iterdir()) == before
    assert [path.name for path in (tmp_path / "val").iterdir() if path.name != convert.LOCK] == ["deep"]


def test_the_output_may_lie_within_the_input(tmp_path: Path) -> None:
    folder = logs_in(tmp_path / "in")
    for _ in range(2):
        assert convert.convert([str(folder)], folder / "out", per_shard=5).scenarios == 12


def test_shards_are_data_as_logs_are(tmp_path: Path) -> None:
    """Named with logs, cut to fewer agents and steps, repacked, inspected; asked for more agents, an error."""
    folder = logs_in(tmp_path / "in")
    convert.convert([str(folder)], tmp_path / "out", per_shard=5, agents=3)
    both = [str(tmp_path / "out"), str(folder / "0.tfrecord")]
    found = scenario_source.from_logs(both, agents=2, horizon=24)
    assert [each.id for each in found] == [*IDS, *IDS[:3]]
    stored, compiled = found[0], found[12]
    assert (stored.steps, stored.controlled.tolist()) == (24, compiled.controlled.tolist())
    assert stored.route_length == pytest.approx(compiled.route_length, abs=0.01)
    assert stored.expert_s == pytest.approx(compiled.expert_s, abs=0.001)
    assert stored.pose.shape == compiled.pose.shape
    assert stored.light_state.shape[2] == 24
    with pytest.raises(BadData, match=r"shard-00000.lhs: record 0 of 5: was compiled for 3 .* fewer than 4"):
        scenario_source.from_logs(both, agents=4)
    convert.convert([str(tmp_path / "out")], tmp_path / "again", per_shard=5, agents=3)
    names = [f"shard-0000{number}.lhs" for number in range(3)]
    assert [contents(tmp_path / "again")[name] for name in names] == [
        contents(tmp_path / "out")[name] for name in names
    ]
    with pytest.raises(BadData, match="compiled scenarios, no logs"):
        list(readers.read(tmp_path / "out" / "shard-00000.lhs"))
    report = inspect_logs.inspect([str(tmp_path / "out")])
    assert (report["scenarios"], report["errors"]) == (12, 0)
    (first, *_) = report["files"][0]["scenarios"]
    expected = {"id": "0-0", "steps": 26, "tracks": 5, "vehicles": 3, "others": 0, "sdc_index": 0, "lanes": None}
    assert {name: first[name] for name in expected} == expected
    assert list(first) == list(inspect_logs.inspect([str(folder / "1.json")])["files"][0]["scenarios"][0])


def test_settings_are_those_of_scenario_from_log(given: list[str], tmp_path: Path) -> None:
    """Agents to control and routes are those of `scenario_from_log`, and no shard of one passes for the other."""
    base = {"control": "vehicles", "routes": "log"}
    for changes in ({}, {"control": "all"}, {"routes": "lanes"}):
        settings = base | changes
        out = tmp_path / "-".join(settings.values())
        convert.convert(given, out, agents=4, **settings)  # type: ignore[arg-type]
        index = json.loads((out / "index.json").read_text())
        assert {name: index[name] for name in base} == settings
        found = shard.open(out / "shard-00000.lhs")[0]
        expected = scenario_from_log(replace(LOG, id=IDS[0]), agents=4, **settings)  # type: ignore[arg-type]
        assert found.control == settings["control"]
        assert_close(found, expected)
    with pytest.raises(BadData, match="made with control = all: name another folder"):
        convert.convert(given, tmp_path / "all-log", agents=4)
    for name in base:
        with pytest.raises(ValueError, match=f"{name} is 'none': choose from {base[name]}"):
            convert.convert(given, tmp_path / "out", **base | {name: "none"})  # type: ignore[arg-type]


def test_a_shard_keeps_whom_it_controls(given: list[str], tmp_path: Path) -> None:
    """Converted again with another control its scenarios are errors, unless the ego is all that is kept."""
    convert.convert(given, tmp_path / "all", agents=4, control="all")
    again = convert.convert([str(tmp_path / "all")], tmp_path / "again", agents=4, control="all")
    assert (again.scenarios, again.errors) == (12, ())
    assert contents(tmp_path / "all")["shard-00000.lhs"] == contents(tmp_path / "again")["shard-00000.lhs"]
    wrong = convert.convert([str(tmp_path / "all")], tmp_path / "wrong", agents=4)
    assert (wrong.scenarios, len(wrong.errors)) == (0, 12)
    assert "was compiled for the control of all, not vehicles" in wrong.errors[0][1]
    assert convert.convert([str(tmp_path / "all")], tmp_path / "ego").scenarios == 12
