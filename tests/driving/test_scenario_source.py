"""Scenarios are the same however many processes make them; and those processes never outlive the one that asked."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import BadData
from longhaul.driving.scenario.scenario import Scenario
from tests.helpers import log_files

WORK = """
import os, sys, time

def make(seed, agents, horizon, control, least):
    with open(os.path.join(sys.argv[1], str(os.getpid())), "w"):
        time.sleep(3600)

def nothing(part):
    pass
"""
SLOW = """
from longhaul.driving import scenario_source as worlds
from work import make, nothing

if __name__ == "__main__":
    worlds.generated_one, worlds._compile = make, nothing
    worlds.generated(0, 64, agents=1, horizon=None, workers=2)
"""

CALL = "    worlds.generated(0, 64, agents=1, horizon=None, workers=2)"
STOPPABLE = """    from longhaul.runtime.signals import listening

    with listening() as stop:
        try:
            with stop.at_once():
                worlds.generated(0, 64, agents=1, horizon=None, workers=2)
        except KeyboardInterrupt:
            print("heard")
"""


def test_workers_make_what_one_process_makes_and_store_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_CACHE", "off")
    alone = scenario_source.generated(0, 33, agents=2, horizon=40, workers=1)  # first: it compiles for all
    monkeypatch.setenv("LONGHAUL_CACHE", str(tmp_path))
    by_workers = scenario_source.generated(0, 33, agents=2, horizon=40, workers=2)
    assert [s.id for s in by_workers] == [s.id for s in alone]
    _same(by_workers, alone)
    found, seeds = _made(monkeypatch, 0, 33, agents=2)
    assert seeds == [32], "a whole block is kept"
    _same(found, alone)


PINNED = {1: "77d4cbd6ca5edeb9", 16: "77720cc84f879062"}
"""Digests of the scenarios of seeds 0 to 63 as commit 96d68be makes them, by how many agents are driven: the ego, as in
`driving`; 16, as in `driving-best` and `driving-selfplay`."""


def test_faster_code_makes_the_same_scenarios() -> None:
    """Recorded results and the shipped policy rest on them: who changes them says so here."""
    found = {agents: hashlib.sha256() for agents in PINNED}
    for seed in range(64):
        for agents, digest in found.items():
            _feed(digest, scenario_source.generated_one(seed, agents=agents))
    assert {agents: digest.hexdigest()[:16] for agents, digest in found.items()} == PINNED


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, tuple):
        for each in value:
            _feed(digest, each)
    else:
        digest.update(repr(value).encode())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which blocks of four seeds are kept."""
    monkeypatch.setenv("LONGHAUL_CACHE", str(tmp_path))
    monkeypatch.setattr(scenario_source, "BLOCK", 4)
    return tmp_path / "scenarios"


def _made(monkeypatch: pytest.MonkeyPatch, first: int, count: int, **how: Any) -> tuple[list[Scenario], list[int]]:
    """(scenarios, seeds that were made)."""
    seeds: list[int] = []

    def make(seed: int, **compiled: Any) -> Scenario | None:
        seeds.append(seed)
        return generate(seed, **compiled)

    generate = scenario_source.generated_one
    with monkeypatch.context() as patched:
        patched.setattr(scenario_source, "generated_one", make)
        return scenario_source.generated(first, count, **({"agents": 1, "horizon": 40, "workers": 1} | how)), seeds


def _same(some: list[Scenario], others: list[Scenario]) -> None:
    for one, other in zip(some, others, strict=True):
        for name in one._fields:
            np.testing.assert_equal(getattr(one, name), getattr(other, name))


def test_generated_scenarios_are_found_again_block_by_block(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, seeds = _made(monkeypatch, 2, 7)
    assert seeds == list(range(2, 9))
    again, seeds = _made(monkeypatch, 2, 7)
    assert seeds == [2, 3, 8], "whole blocks are kept, here 4 to 7"
    _same(first, again)
    assert _made(monkeypatch, 4, 4, horizon=20)[1] == [4, 5, 6, 7]
    assert _made(monkeypatch, 4, 4)[1] == []
    monkeypatch.setattr(scenario_source, "maker", lambda: "other code")
    assert _made(monkeypatch, 4, 4)[1] == [4, 5, 6, 7]


def test_kept_scenarios_are_filtered_as_those_that_are_made(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_ones, _ = _made(monkeypatch, 0, 5, agents=4, least=3)
    found, seeds = _made(monkeypatch, 0, 5, agents=4, least=3)
    monkeypatch.setenv("LONGHAUL_CACHE", "off")
    made, all_seeds = _made(monkeypatch, 0, 5, agents=4, least=3)
    assert seeds == [] and len(all_seeds) > 5
    _same(kept_ones, made)
    _same(found, made)


def test_a_damaged_file_costs_a_line(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = _made(monkeypatch, 0, 8)
    damaged = sorted(store.iterdir())[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 4  # amid the arrays, which have checksums
    damaged.write_bytes(data)
    again, seeds = _made(monkeypatch, 0, 8)
    assert len(seeds) == 4
    _same(first, again)
    said = capsys.readouterr().err
    assert said.count("are of no use") == 1
    assert _made(monkeypatch, 0, 8)[1] == [], "it was written anew"


def test_a_store_that_is_no_folder_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenarios").write_text("")
    monkeypatch.setenv("LONGHAUL_CACHE", str(tmp_path))
    monkeypatch.setattr(scenario_source, "BLOCK", 2)
    assert _made(monkeypatch, 0, 4)[1] == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("are of no use") == 1


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""  # empty: dead, and nobody has asked how
    except (FileNotFoundError, ProcessLookupError):
        return False


def _run(tmp_path: Path, program: str, seconds: float = 3600) -> tuple[subprocess.Popen[str], list[int]]:
    """A process in a group of its own whose two workers have begun, and the workers' ids."""
    script, started = tmp_path / "slow.py", tmp_path / "started"
    script.write_text(program)
    (tmp_path / "work.py").write_text(WORK.replace("3600", str(seconds)))
    started.mkdir()
    command = [sys.executable, str(script), str(started)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True, text=True)
    while len(list(started.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    return process, [int(path.name) for path in started.iterdir()]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked at in /proc")
def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    process, workers = _run(tmp_path, SLOW)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(map(_lives, workers)):
        assert time.monotonic() < deadline, "workers live on"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked at in /proc")
def test_a_signal_to_the_whole_group_ends_workers_without_a_word(tmp_path: Path) -> None:
    """As `timeout` sends it: twice to us, once to each worker, whose death would break the pool."""
    process, workers = _run(tmp_path, SLOW.replace(CALL, STOPPABLE), 0.2)
    process.terminate()
    time.sleep(0.1)  # so that this one is heard already
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "heard\n", "")
    assert not any(map(_lives, workers))


def test_files_without_a_scenario_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.tfrecord").write_bytes(b"")
    with pytest.raises(BadData) as raised:
        scenario_source.from_logs([str(tmp_path / "empty.tfrecord")], agents=1, horizon=None)
    assert "\n" not in str(raised.value)


def test_a_log_that_cant_be_used_is_told_with_its_file_and_what_leaves_such_logs_out(tmp_path: Path) -> None:
    log = log_files.make_log()
    seen = log.tracks.valid.copy()
    seen[log.sdc, log.current + 1 :] = False
    short = replace(log, id="short", tracks=replace(log.tracks, valid=seen))
    for name, each in (("a", log), ("b", short)):
        (tmp_path / f"{name}.json").write_text(json.dumps(log_files.gpudrive(each)))
    told = r"b\.json: short: the ego is known for 1 step from the current one.*; --skip-bad-logs leaves out what"
    with pytest.raises(BadData, match=told):
        scenario_source.from_logs([str(tmp_path)])
    with pytest.raises(BadData, match=r"b\.json: short: .*leave this log out$"):
        scenario_source.from_logs([str(tmp_path / "b.json")])


@pytest.mark.slow
def test_bad_logs_are_named_and_left_out_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside JAX, where another process reads, one that dies of a file included."""
    log = log_files.make_log()
    seen = log.tracks.valid.copy()
    seen[log.sdc, log.current + 1 :] = False
    short = replace(log, id="short", tracks=replace(log.tracks, valid=seen))
    for name, each in (("b", short), ("d", log)):
        (tmp_path / f"{name}.json").write_text(json.dumps(log_files.gpudrive(each)))
    (tmp_path / "a.json").write_text((tmp_path / "d.json").read_text()[:1000])
    (tmp_path / "c.json").write_text("{}")
    monkeypatch.setattr(scenario_source, "_scenarios", _dies_of_c)
    found = scenario_source.from_logs([str(tmp_path)], skip_bad=True)
    assert [scenario.id for scenario in found] == [log.id]
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.endswith("it is left out")] == []
    assert [line.partition(":")[0] for line in lines] == [str(tmp_path / f"{name}.json") for name in "abc"]
    assert "the process that read it died" in lines[2]
    with pytest.raises(BadData, match="the files hold no scenario; give other data"):
        scenario_source.from_logs([str(tmp_path / "b.json")], skip_bad=True)


def test_of_many_bad_logs_the_first_are_named_and_all_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scenario_source, "SHOWN", 2)
    monkeypatch.setattr(scenario_source.processes, "pool", lambda count: _Here())
    monkeypatch.setattr(scenario_source.processes, "ending", nullcontext)
    for name in "abc":
        (tmp_path / f"{name}.json").write_text("{")
    assert list(scenario_source.by_file([str(tmp_path)], count=None, skip_bad=True)) == []
    first, second, total = capsys.readouterr().err.splitlines()
    assert first.startswith(str(tmp_path / "a.json")) and second.startswith(str(tmp_path / "b.json"))
    assert total == "3 logs are left out"


SCENARIOS_OF = scenario_source._scenarios


def _dies_of_c(path: Path, count: int | None, **settings: Any) -> tuple[list[Scenario], list[str]]:
    return os._exit(1) if path.name == "c.json" else SCENARIOS_OF(path, count, **settings)


class _Here:
    """Pool whose work is done at once, in this process."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


def test_logs_that_need_a_library_which_is_not_there_are_left_out_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_files.make_log()
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"a-{name}.parquet").write_bytes(b"PAR1, of which no more is read")
    (tmp_path / "c" / "z.json").write_text(json.dumps(log_files.gpudrive(log)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(scenario_source.processes, "pool", lambda count: _Here())
    monkeypatch.setattr(scenario_source.processes, "ending", nullcontext)
    assert [scenario.id for scenario in scenario_source.from_logs([str(tmp_path / "c")])] == [log.id]
    says = 'a-c.parquet: Argoverse 2 needs pyarrow: pip install "longhaul-rl[data]"; logs like it are left out\n'
    assert capsys.readouterr().err.endswith(says)
    for paths in ([tmp_path / "b"], [tmp_path / "c", tmp_path / "b" / "a-b.parquet"]):
        with pytest.raises(BadData, match="needs pyarrow"):
            scenario_source.from_logs([str(path) for path in paths])


def _takes_memory(path: Path, count: int | None, **settings: Any) -> list[Scenario]:
    with readers.limited(path):
        return [bytearray(2 * readers.MEMORY)]  # type: ignore[list-item]


def _takes_time(path: Path, count: int | None, **settings: Any) -> list[Scenario]:
    readers.SECONDS = 0.2
    with readers.limited(path):
        while True:
            pass


def _dies(path: Path, count: int | None, **settings: Any) -> list[Scenario]:
    os._exit(1)


@pytest.mark.parametrize(
    ("read", "words"),
    [(_takes_memory, "takes more than 2,048 MB of memory"), (_takes_time, "takes more than 0 s of CPU time"),
     (_dies, "the process that read it died")],
)  # fmt: skip
def test_a_reader_over_its_limits_ends_in_a_line_beside_jax(
    read: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as limits of this one would be those of JAX's threads."""
    path = tmp_path / "a.json"
    path.write_text("{}")
    monkeypatch.setattr(scenario_source, "_scenarios", read)
    with pytest.raises(BadData, match=rf"a\.json: {words}"):
        scenario_source.from_logs([str(path)])


def test_the_digest_covers_the_code_that_makes_scenarios() -> None:
    """Every module that making one imports, and none of those that simulate: their change makes nothing anew."""
    call = (
        "import sys; from longhaul.driving.generator.generate import generate;"
        "from longhaul.driving.scenario.from_log import scenario_from_log; scenario_from_log(generate(0));"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('longhaul.driving')), sep='\\n')"
    )
    used = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True).stdout.split()
    root = Path(scenario_source.__file__).parent
    covered = {str(path) for path in scenario_source.sources()}
    assert {path for path in used if path != str(root / "__init__.py")} <= covered
    assert not any(str(root / "sim") in path for path in covered)
