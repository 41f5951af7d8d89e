"""The loop: what it logs, when it saves, what it writes, and that nothing in it grows or compiles again."""

from __future__ import annotations

import gc
import json
import math
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.config.run import Driving, Named
from longhaul.driving.sim import simulator
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.runtime.provenance import params_sha256
from longhaul.telemetry import sinks
from longhaul.telemetry.aggregate import Sums
from longhaul.topologies import fused
from longhaul.training import compilation, final_evaluation, loop, run_dir
from longhaul.training.checkpoint.checkpoint import Checkpoints
from longhaul.training.checkpoint.resume import restore_policy
from tests.helpers import log_files
from tests.helpers.small_runs import after, begin, checkpoints, make_quick, records, result, resume, small


@pytest.fixture
def _quick(shared: pytest.MonkeyPatch) -> None:
    """See `make_quick`: for the tests that are not about compiling or evaluating."""


@pytest.fixture(scope="module")
def shared() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield patch


# ----------------------------------------------------------------------------------------------- with all its parts


def test_a_run_compiles_nothing_after_its_first_call_and_leaves_what_the_contract_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Saving, logging and a call that is cut short included. Nothing else has compiled for it before."""
    jax.clear_caches()
    compiled: list[str] = []

    def listen(name: str, *_: Any, **__: Any) -> None:
        compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    counts: list[int] = []

    def count() -> int:
        return sum(name == "/jax/core/compile/backend_compile_duration" for name in compiled)

    calls = fused.fused

    def watched(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for call in calls(*args, **kwargs):
            jax.block_until_ready(call[2])
            counts.append(count())
            yield call
        counts.append(count())

    def scored(*_: Any, **__: Any) -> Iterator[final_evaluation.Evaluated]:
        """Stand-ins for scores, whose program is compiled after all calls."""
        yield final_evaluation.Evaluated("trained", {"return": 2.0})
        yield final_evaluation.Evaluated("untrained", {"return": 1.0})

    monkeypatch.setattr(fused, "fused", watched)
    monkeypatch.setattr(final_evaluation, "evaluations", scored)
    run, folder = small(block=4, log_interval=8, total_steps=8 * 16 * 58), tmp_path / "run"
    try:
        outcome = begin(run, folder)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert counts[0] > 0
    assert counts == [counts[0]] * (15 + 1)
    assert checkpoints(folder) == [48, 56, 58], "saved at the end of the call that a multiple of 6 lies in"

    shown = capfd.readouterr()
    assert shown.out == ""
    counted, compiled, weighed, *lines, last = shown.err.splitlines()
    assert re.fullmatch(r"[\d,]+ parameters", counted)
    assert re.fullmatch(r"compiled in [\d.]+ s, [\d.]+ s of that traced", compiled.partition(";")[0])
    assert re.match(r"memory a device: [\d.]+ \wB of ", weighed)
    assert [re.match(r"[\d,]+ of 7,424 agent steps", line) is not None for line in lines] == [True] * 8
    assert last == "evaluating"

    assert outcome.result == json.loads((folder / "result.json").read_text())
    found = dict(outcome.result or {})
    seconds = [found.pop(f"{name}_seconds") for name in ("train", "compile", "wall")]
    assert found.pop("sps") == pytest.approx(58 * 128 / seconds[0])
    assert 0 < seconds[0] < seconds[2]
    assert 0 < seconds[1] < seconds[2]
    assert 0 < found.pop("trace_seconds") < seconds[1] < found.pop("start_seconds")
    assert found.pop("cache") is None  # it is off in tests
    assert found.pop("memory") == json.loads((folder / "memory.json").read_text())
    assert found.pop("evaluation").keys() == {"trained", "untrained"}
    _, trained, untrained = restore_policy(folder)
    assert found == {
        "status": "done",
        "agent_steps": 58 * 128,
        "env_steps": 58 * 128,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        "params_sha256": params_sha256(trained.params),
    }
    assert params_sha256(untrained.params) != params_sha256(trained.params)
    assert {path.name.partition(".tfevents")[0] for path in folder.iterdir()} == {
        "run.json", "metrics.jsonl", "checkpoints", "report.html", "result.json", "events.out",
        "memory.json",
    }  # fmt: skip
    about = json.loads((folder / "run.json").read_text())
    assert {"format", "run", "versions", "commit", "host", "command"} <= about.keys()
    assert run_dir.load_run(folder) == run


@pytest.mark.slow
def test_a_driving_run_in_logs_is_gone_on_with_and_evaluated_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two formats of one log. The whole `train`, evaluation and report, stopped once on its way."""
    log_files.write_all(log_files.make_log(), tmp_path)
    monkeypatch.chdir(tmp_path)
    task = Driving(("womd-example.tfrecord", "gpudrive.json"), simulator=simulator.Config(neighbours=2, waypoints=2))
    run = small(environment=task, total_steps=8 * 16 * 6, log_interval=1, block=1, save_interval=None)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", after(2, lambda: signal.raise_signal(signal.SIGINT), Sums.add))
        assert begin(run, folder) == (loop.STOPPED, None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume(folder).code == 0
    scores = result(folder)["evaluation"]
    assert scores.keys() == {"trained", "untrained", "idm", "log"}
    assert [s["episodes"] for s in scores.values()] == [2] * 4
    assert scores["log"]["accuracy"] == 1.0
    assert scores["log"]["log_divergence"] == pytest.approx(0.0, abs=1e-6)  # m, of float32 positions
    assert [r["update"] for r in records(folder)] == [1, 2, 3, 4, 5, 6]


# ---------------------------------------------------------------------------------------------------------- records


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_how_a_run_is_cut_changes_no_number(tmp_path: Path) -> None:
    """Calls of 1, 2 and 7 updates; records of 6 updates are the means of six records of one."""
    fine, coarse, odd = tmp_path / "fine", tmp_path / "coarse", tmp_path / "odd"
    begin(small(log_interval=1, block=1), fine)
    begin(small(log_interval=6, block=2, save_interval=1), coarse)
    begin(small(log_interval=7, block=7), odd)
    assert result(fine) == result(coarse) == result(odd)
    assert [r["update"] for r in records(odd)] == [7, 14, 21, 28, 35, 42, 49, 56, 60]
    one_by_one = records(fine)
    for i, record in enumerate(records(coarse)):
        part = one_by_one[6 * i : 6 * i + 6]
        assert record["update"] == part[-1]["update"] == 6 * (i + 1)
        assert record["agent_steps"] == record["env_steps"] == 128 * record["update"]
        episodes = [r["episode/count"] for r in part]
        assert record["episode/count"] == sum(episodes) > 0
        returns = sum((r["episode/return"] or 0.0) * n for r, n in zip(part, episodes, strict=True))
        assert record["episode/return"] == pytest.approx(returns / sum(episodes))
        for name in (name for name in record if name.startswith("ppo/")):
            assert record[name] == pytest.approx(float(np.mean([r[name] for r in part])), rel=1e-6, abs=1e-9)


def test_sums_give_means_and_go_on_bit_by_bit_from_what_was_pending() -> None:
    rows = {
        "episodes": np.array([1.0, 0.0, 3.0, 99.0], np.float32),
        "episode/return": np.array([0.1, 0.0, 7.3, 99.0], np.float32),
        "episode/light": np.array([1.0, 0.0, 0.5, 99.0], np.float32),
        "episodes/light": np.array([1.0, 0.0, 2.0, 99.0], np.float32),
        "ppo/loss": np.array([1 / 3, -2.0, 5.0, 99.0], np.float32),
        "peak/light": np.array([0.5, -np.inf, -3.0, 99.0], np.float32),
        "peak/never": np.full(4, -np.inf, np.float32),
    }
    sums, other = Sums(), Sums()
    for added in (sums, other):
        added.add(3, rows)
    resumed = Sums(pending=json.loads(json.dumps(other.pending())))
    for added in (sums, resumed):
        added.add(1, {name: values[2:] for name, values in rows.items()})
    assert sums.updates == resumed.updates == 4
    record = sums.take()
    assert resumed.take() == record
    thirds = [float(np.float32(x)) for x in (1 / 3, -2.0, 5.0, 5.0)]
    returned = [float(np.float32(x)) for x in (0.1, 7.3, 7.3)]
    assert record == {
        "episode/count": 7.0,
        "episode/return": pytest.approx(sum(returned) / 7),
        "episode/light": pytest.approx((1.0 + 0.5 + 0.5) / 5),
        "ppo/loss": pytest.approx(sum(thirds) / 4),
        "peak/light": 0.5,
    }
    none = {"episodes": np.zeros(1), "episode/return": np.zeros(1), "ppo/loss": np.full(1, np.nan)}
    sums.add(1, none | {"episodes/light": np.zeros(1), "episode/light": np.zeros(1)})
    record = sums.take()
    assert set(record) == {"episode/count", "episode/return", "ppo/loss"}, "what no episode tells is left out"
    assert record["episode/count"] == 0.0
    assert math.isnan(record["episode/return"])
    assert math.isnan(record["ppo/loss"])


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_a_long_run_keeps_no_more_in_memory_and_on_disk_than_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A million updates, with a learner that does nothing: 4096 records, and memory that does not grow."""
    run = small(total_steps=8 * 16 * 1_000_000, log_interval=None, block=None, save_interval=None)
    sizes: list[int] = []

    def idle(program: Any, progress: Any, context: Any, *, updates: int, block: int) -> Iterator[tuple[Any, int, Any]]:
        done = 0
        while done < updates:
            n = min(block, updates - done)
            done += n
            if done in (block * 1600, block * 15_000):
                gc.collect()
                held = (each for each in gc.get_objects() if isinstance(each, (list, dict, set, deque)))
                sizes.append(sum(map(sys.getsizeof, held)))
            rows = np.full(block, 0.5, np.float32)
            yield progress, n, {"episodes": rows, "episode/return": rows, "ppo/loss": rows, fused.FINITE: rows > 0}

    monkeypatch.setattr(fused, "compiled", lambda *_, **__: fused.Program(None, None))
    monkeypatch.setattr(compilation, "weigh", lambda *_: None)
    monkeypatch.setattr(fused, "fused", idle)
    begin(run, tmp_path / "run")
    assert len(capfd.readouterr().err.splitlines()) < 4100
    written = records(tmp_path / "run")
    assert 3000 < len(written) <= 4096
    assert written[-1]["update"] == 1_000_000
    assert sizes[1] - sizes[0] < 20_000, "bytes of lists and the like, in 857,600 updates"


# ----------------------------------------------------------------------------------------------- when it is saved


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_it_saves_by_minutes_by_updates_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save, now, calls = Checkpoints.save, [0.0], fused.fused

    def noted(self: Checkpoints, step: int, *rest: Any, **more: Any) -> None:
        saved.append(step)
        save(self, step, *rest, **more)

    def minutely(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for call in calls(*args, **kwargs):
            now[0] += 60.0
            yield call

    monkeypatch.setattr(Checkpoints, "save", noted)
    with monkeypatch.context() as patch:
        patch.setattr(fused, "fused", minutely)
        patch.setattr(loop.time, "perf_counter", lambda: now[0])
        begin(small(save_interval=None, save_interval_minutes=7.0), tmp_path / "minutes")
    assert saved == [14, 28, 42, 56, 60], "calls of 2 updates, a minute each"
    assert checkpoints(tmp_path / "minutes") == [42, 56, 60]
    assert sinks.read(tmp_path / "minutes" / "metrics.jsonl")[-1]["wall_seconds"] == 1800.0
    saved.clear()
    begin(small(save_interval=25, keep=9), tmp_path / "updates")
    assert saved == checkpoints(tmp_path / "updates") == [26, 50, 60]


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
def test_seconds_add_up_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a call of 2 updates takes 1 s of, compiling 10 s, preparing 100 s."""
    now, calls, compiled, prepare = [0.0], fused.fused, fused.compiled, loop.feed

    def takes(seconds: float) -> None:
        now[0] += seconds

    def slow_calls(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for call in calls(*args, **kwargs):
            takes(1.0)
            yield call

    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(fused, "fused", slow_calls)
    monkeypatch.setattr(fused, "compiled", lambda *a, **k: (takes(10.0), compiled(*a, **k))[1])
    monkeypatch.setattr(loop, "feed", lambda *a: (takes(100.0), prepare(*a))[1])
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", after(1, lambda: signal.raise_signal(signal.SIGINT), Checkpoints.save))
        begin(small(), folder)  # heard after update 8
    takes(1e6)  # away
    with monkeypatch.context() as patch:  # fails after update 22: what came after 18 is done again, and counts once
        patch.setattr(Sums, "add", after(7, lambda: 1 / 0, Sums.add))
        with pytest.raises(ZeroDivisionError):
            resume(folder)
    found = resume(folder).result
    assert found is not None
    assert (found["train_seconds"], found["compile_seconds"], found["wall_seconds"]) == (30.0, 30.0, 360.0)
    assert found["sps"] == 60 * 128 / 30.0
    walls = {r["update"]: r["wall_seconds"] for r in sinks.read(folder / "metrics.jsonl")}
    expected = {4: 113, 8: 114, 12: 226, 16: 229, 20: 341, 24: 342, 28: 345, 56: 359, 60: 360}
    assert {update: walls[update] for update in expected} == expected, "a call behind, but before a checkpoint"


# ---------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.usefixtures("_quick")
def test_after_an_error_no_thread_handler_or_lock_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(Sums, "add", after(7, lambda: 1 / 0, Sums.add))  # a save is under way
        with pytest.raises(ZeroDivisionError):
            begin(small(), folder)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert "checkpoint" not in [thread.name for thread in threading.enumerate()]
    assert checkpoints(folder) == [6, 12]
    assert resume(folder).code == 0
    assert checkpoints(folder) == [48, 54, 60]


@pytest.mark.usefixtures("_quick")
def test_it_trains_in_a_thread_where_no_signal_can_be_heard(tmp_path: Path) -> None:
    outcomes: list[loop.Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(begin(small(save_interval=None), tmp_path / "run")))
    thread.start()
    thread.join()
    assert [outcome.code for outcome in outcomes] == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": Named("cartpol")}, "no environment is named 'cartpol'; did you mean cartpole"),
        ({"algorithm": replaced(small().algorithm, activation="tanhh")}, "activation is 'tanhh'"),
        ({"environment": Driving(("nowhere",))}, "nowhere: no such file or folder"),
    ],
)
def test_a_run_that_cannot_be_made_leaves_no_folder(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        begin(small(**change), tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "run").glob("*"))


def test_a_policy_without_a_checkpoint_is_an_error(tmp_path: Path, shared: pytest.MonkeyPatch) -> None:
    run_dir.save_run(tmp_path, small(), {})
    with pytest.raises(RunError, match=rf"has no checkpoint yet; go on with --resume {tmp_path},"):
        restore_policy(tmp_path)
