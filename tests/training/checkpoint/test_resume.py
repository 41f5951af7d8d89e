"""A run that is gone on with with other sizes keeps what it learnt, counts on, and ends at the same total."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.algorithms import actor_critic
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.cli import flags, run_flags, train
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import MOST, Named, Origin, Run
from longhaul.envs import classic_control
from longhaul.runtime import heartbeat, mesh
from longhaul.runtime.devices import MeshShape
from longhaul.runtime.errors import RunError
from longhaul.telemetry import sinks
from longhaul.training import assemble, compilation, loop, run_dir
from longhaul.training.checkpoint import resume as resumption
from longhaul.training.checkpoint.checkpoint import Checkpoint, Checkpoints
from longhaul.training.data import Fed, Feed, Feeding, Place
from tests.helpers.small_runs import after, begin, checkpoints, make_quick, records, result, resume, small

STOPPED_AT = 20
DONE = STOPPED_AT * 8 * 16
TOTAL = 60 * 8 * 16


@pytest.fixture(scope="module", autouse=True)
def _programs() -> Iterator[None]:
    jax.devices()  # as many as conftest asks for, before a run asks for one
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield


class Enough(Exception):
    """What was to be seen is seen."""


def stop_after(save: int, run: Run, folder: Path) -> None:
    """Trains in `folder` until a signal after this save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", after(save, lambda: signal.raise_signal(signal.SIGTERM), Checkpoints.save))
        outcome = loop.train(run, folder, resumed=True) if folder.exists() else begin(run, folder)
    assert outcome.code == loop.STOPPED


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, of 60 updates of 128 steps, stopped after 20."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    stop_after(3, small(), folder)
    assert checkpoints(folder)[-1] == STOPPED_AT
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """A copy of `stopped`."""
    return shutil.copytree(stopped, tmp_path / "run")


def change(folder: Path, *words: str) -> Run:
    """Run that `longhaul train small --resume` would train with these flags."""
    stored = run_dir.load_run(folder)
    parsed = flags.parse("train small", "", run_flags.table(stored), words)
    return runs.resolve(run_flags.resumed(folder, small(), parsed))


def first_call(run: Run, folder: Path, **asked: Any) -> Any:
    """The progress with which a run goes on, which is then killed."""
    seen: list[Any] = []

    def noting(run: Any, assembly: Any, feeding: Any, progress: Any, *_: Any) -> Any:
        seen.append(progress._replace(key=jax.random.key_data(progress.key)))
        raise Enough

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "compiled", noting)
        with pytest.raises(Enough):
            loop.train(run, folder, resumed=True, asked=asked)
    return jax.tree.map(np.array, jax.device_get(seen[0]))


def saved(folder: Path) -> Any:
    """The progress in the newest checkpoint of a small run."""
    run = run_dir.load_run(folder)
    environment = classic_control.cartpole()
    like = assemble.assemble(run, lambda _: environment, ()).start(0, ())
    found = Checkpoints(folder / "checkpoints").latest(like)
    assert found is not None
    return jax.tree.map(np.array, jax.device_get(found.progress._replace(key=jax.random.key_data(found.progress.key))))


def equal(a: Any, b: Any) -> bool:
    same = jax.tree.map(lambda x, y: x.shape == y.shape and bool(np.all(x == y)), a, b)
    return all(jax.tree.leaves(same))


# ------------------------------------------------------------------------------------------------------ other sizes


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory, stopped: Path) -> Path:
    """`stopped`, gone on with in updates of four times the steps, to its end."""
    folder = shutil.copytree(stopped, tmp_path_factory.mktemp("resized") / "run")
    run = change(folder, "--num-envs", "16", "--num-steps", "32")
    assert loop.train(run, folder, resumed=True).code == 0
    return folder


def test_it_ends_at_the_same_total_and_no_update_is_missing_or_repeated(resized: Path) -> None:
    found = records(resized)
    updates, steps = ([r[name] for r in found] for name in ("update", "agent_steps"))
    assert result(resized)["agent_steps"] == result(resized)["env_steps"] == TOTAL
    assert updates[-1] == STOPPED_AT + (TOTAL - DONE) // 512 == 30
    assert updates == sorted(set(updates))
    assert steps == [min(u, STOPPED_AT) * 128 + max(0, u - STOPPED_AT) * 512 for u in updates]
    assert [r["env_steps"] for r in found] == steps


def test_weights_optimiser_and_count_go_on_and_the_worlds_begin_anew(folder: Path) -> None:
    before = saved(folder)
    now = first_call(change(folder, "--num-envs", "16", "--num-steps", "32"), folder)
    assert equal(now.state, before.state)
    assert (now.updates, now.state.updates) == (STOPPED_AT, STOPPED_AT)
    assert equal(now.key, before.key)
    assert now.carry.worlds.episode_length.tolist() == [0] * 16
    environment = classic_control.cartpole()
    begun = assemble.assemble(small(), lambda _: environment, ()).start(small().seed, ()).carry.observation
    starts = np.concatenate([now.carry.observation, np.asarray(begun)])
    assert len(np.unique(starts, axis=0)) == 16 + 8, "no world begins where another, or one of the old run, began"


def test_dropped_state_is_reported_and_recorded(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first_call(change(folder, "--num-envs", "16", "--lr", "1e-3"), folder, num_envs=16, lr=1e-3)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("goes on")]
    assert len(lines) == 1
    assert "after update 20, 2,560 of 7,680 steps, with num_envs 16 (was 8), lr 0.001 (was 0.003)" in lines[0]
    assert "the environments begin anew, and episodes under way are dropped; parameters" in lines[0]
    about = json.loads((folder / "run.json").read_text())
    entry = about["history"][0]
    assert (entry["update"], entry["agent_steps"]) == (20, 2560)
    assert entry["changed"] == {"num_envs": [8, 16], "lr": [0.003, 0.001]}
    assert entry["dropped"] == [resumption.BEGIN_ANEW]
    assert about["run"]["num_envs"] == 16
    assert about["asked"] == {"num_envs": 16, "lr": 1e-3}
    assert about["id"] == "run" and about["versions"], "the rest of run.json stays"


def test_a_kill_at_any_moment_and_a_resume_without_flags_end_the_same(folder: Path, resized: Path) -> None:
    """Before the first save of the new sizes, when run.json has them and no checkpoint does; and after some saves."""
    run = change(folder, "--num-envs", "16", "--num-steps", "32")
    first_call(run, folder)
    assert run_dir.load_run(folder) == run
    assert checkpoints(folder)[-1] == STOPPED_AT
    stop_after(1, run_dir.load_run(folder), folder)
    assert STOPPED_AT < checkpoints(folder)[-1] < 30
    assert resume(folder).code == 0
    assert result(folder) == result(resized)
    assert records(folder) == records(resized)
    assert len(json.loads((folder / "run.json").read_text())["history"]) == 1


def test_sizes_of_more_updates_than_int32_counts_are_refused() -> None:
    run = small(total_steps=128 * MOST)
    sizes = {name: getattr(run, name) for name in resumption.SIZES}
    steps = dict.fromkeys(("agent_steps", "env_steps"), 128 * (MOST - 100))
    found = Checkpoint("1", {"step": MOST - 100, "metadata": {"sizes": sizes, "steps": steps, "place": {"swaps": 0}}})
    wide, thin = (dataclasses.replace(run, num_envs=envs) for envs in (16, 4))
    assert resumption.standing(wide, found).updates == MOST - 100
    with pytest.raises(RunError, match=f"--num-envs 4 and --num-steps 16 make {MOST + 100} updates in all; at most"):
        resumption.standing(thin, found)


def test_a_kill_before_the_new_sizes_were_checked_changes_nothing(folder: Path) -> None:
    text = (folder / "run.json").read_bytes()
    run = change(folder, "--num-envs", "16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resumption, "restored", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.train(run, folder, resumed=True)
    assert (folder / "run.json").read_bytes() == text


@pytest.mark.slow
def test_an_edited_run_is_told_field_by_field_and_taken_if_asked_for(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "run.json"
    about = json.loads(path.read_text())
    about["run"]["algorithm"]["lr"], about["run"]["seed"] = 99.0, 4
    path.write_text(json.dumps(about))
    with pytest.raises(RunError, match=r"edited since checkpoint 20: lr 99 \(was 0.003\), seed 4 \(was 3\); put that"):
        loop.train(change(folder), folder, resumed=True)
    assert json.loads(path.read_text()) == about
    with pytest.MonkeyPatch.context() as patch:  # killed before the first save
        patch.setattr(loop, "Loop", lambda *_, **__: (_ for _ in ()).throw(Enough))
        with pytest.raises(Enough):
            loop.train(change(folder), folder, resumed=True, edited=True)
    assert "with lr 99 (was 0.003), seed 4 (was 3): nothing is dropped" in capfd.readouterr().err
    assert json.loads(path.read_text())["history"][-1]["edited"] == ["lr", "seed"]
    assert resumption.edits(folder, found(folder)) == {}
    about["run"]["algorithm"]["lr"] = 98.0  # edited again, though a resume has changed it once
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run": about["run"]}))
    assert resumption.edits(folder, found(folder)) == {"lr": [0.003, 98.0]}


def found(folder: Path) -> Checkpoint:
    with closing(Checkpoints(folder / "checkpoints")) as saved:
        newest = saved.newest()
    assert newest is not None
    return newest


def test_a_checkpoint_of_an_older_version_says_nothing_of_edits(folder: Path) -> None:
    whole = found(folder)
    about = json.loads((folder / "run.json").read_text())
    about["run"]["algorithm"]["lr"] = 99.0
    (folder / "run.json").write_text(json.dumps(about))
    old = {name: value for name, value in whole.metadata.items() if name != "run"}
    assert resumption.edits(folder, Checkpoint(whole.name, whole.manifest | {"metadata": old})) == {}
    assert resumption.edits(folder, whole) == {"lr": [0.003, 99.0]}


@pytest.mark.slow
def test_sizes_may_change_twice_and_back(folder: Path) -> None:
    stop_after(1, change(folder, "--num-envs", "16", "--num-steps", "32"), folder)
    made = checkpoints(folder)[-1]
    run = change(folder, "--num-envs", "8", "--num-steps", "24")
    assert loop.train(run, folder, resumed=True).code == 0
    steps = DONE + (made - STOPPED_AT) * 512
    assert result(folder)["agent_steps"] == steps + (TOTAL - steps) // 192 * 192
    updates = [r["update"] for r in records(folder)]
    assert updates == sorted(set(updates))
    assert len(json.loads((folder / "run.json").read_text())["history"]) == 2


@pytest.mark.slow
def test_with_only_other_lengths_the_worlds_go_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = saved(folder)
    assert equal(first_call(change(folder, "--num-steps", "32"), folder), before)
    assert "nothing is dropped; parameters" in capfd.readouterr().err


@pytest.mark.slow
def test_on_another_mesh_the_same_worlds_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    stop_after(1, small(devices=2, total_steps=8 * 16 * 12), folder)
    before = saved(folder)
    assert equal(first_call(change(folder, "--mesh", "data=1"), folder), before)
    assert "devices 1 (was 2)" in capfd.readouterr().err


def test_the_learning_rate_goes_on_from_the_share_that_is_done(resized: Path) -> None:
    """A record's mean over its updates: of the first one in new sizes, at (2560 + 512 i) / 7680 of the way."""
    found = {r["update"]: r for r in sinks.read(resized / "metrics.jsonl")}
    first = min(u for u in found if u > STOPPED_AT)
    share = [(DONE + 512 * i) / TOTAL for i in range(first - STOPPED_AT)]
    assert found[first]["ppo/lr"] == pytest.approx(3e-3 * np.mean(1 - np.array(share)), rel=1e-5)
    assert found[30]["ppo/lr"] < found[first]["ppo/lr"]
    last = [3e-3 * (1 - (DONE + 512 * i) / TOTAL) for i in range(10)]
    assert found[30]["ppo/lr"] == pytest.approx(np.mean(last[-(30 - sorted(found)[-2]) :]), rel=1e-5)


def test_updates_too_large_for_what_is_left_are_refused(stopped: Path, folder: Path) -> None:
    run = change(folder, "--num-envs", "480")
    with pytest.raises(RunError, match=r"updates of 7680 steps, and 5120 are left of --total-steps 7680; choose small"):
        loop.train(run, folder, resumed=True)
    assert run_dir.load_run(folder) == run_dir.load_run(stopped)


# ------------------------------------------------------------------------------------------------------------ flags


def test_derived_settings_follow_from_the_new_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC")
    config = PPOConfig(num_minibatches=None, update_epochs=None)
    run = runs.resolve(Run("small", Named("cartpole"), config, num_envs=256, num_steps=128, scaling="batch"))
    folder = tmp_path / "run"
    folder.mkdir()
    run_dir.save_run(folder, run, {})
    larger = change(folder, "--num-envs", "2048")
    assert (larger.algorithm.num_minibatches, larger.algorithm.update_epochs) == (32, 2)
    assert larger.base_batch == 256 * 128
    assert change(folder, "--num-envs", "2048", "--num-minibatches", "8").algorithm.update_epochs == 4
    assert change(folder, "--mesh", "data=1").threads == 1
    assert change(folder, "--log-interval", "7").log_interval == 7
    assert change(folder) == run
    assert runs.resolve(larger) == larger


def test_chosen_settings_stay(tmp_path: Path) -> None:
    run = small()
    folder = tmp_path / "run"
    folder.mkdir()
    run_dir.save_run(folder, run, {})
    larger = change(folder, "--num-envs", "16")
    kept = ("log_interval", "block", "save_interval", "seed", "devices", "total_steps", "algorithm")
    assert [getattr(larger, name) for name in kept] == [getattr(run, name) for name in kept]


def test_a_chosen_setting_stays_though_it_equals_the_derived_one(tmp_path: Path) -> None:
    """`asked` in run.json tells a choice from a decision; a folder of an older version has none."""
    config = PPOConfig(num_minibatches=None, update_epochs=None)
    run = runs.resolve(Run("small", Named("cartpole"), config, num_envs=256, num_steps=128, scaling="batch"))
    folder = tmp_path / "run"
    folder.mkdir()
    decided = run.algorithm.num_minibatches
    run_dir.save_run(folder, run, {})
    assert change(folder, "--num-envs", "2048").algorithm.num_minibatches != decided
    run_dir.save_run(folder, run, {"asked": {"num_minibatches": decided}})
    assert change(folder, "--num-envs", "2048").algorithm.num_minibatches == decided


@pytest.mark.parametrize(
    "words", [("--seed", "4"), ("--hidden-dim", "16"), ("--init-from", "x"), ("--env", "pendulum")]
)
def test_settings_that_define_a_run_cannot_change(stopped: Path, words: tuple[str, str]) -> None:
    with pytest.raises(RunError, match=f"{words[0]} is .*, and run run has .*; leave {words[0]} out"):
        change(stopped, *words)


# ------------------------------------------------------------------------------------------------------------- data


def test_a_stream_is_gone_on_with_where_it_stood() -> None:
    """Five updates a chunk; after 12 updates, in the third chunk, three a chunk: turns after 15, 18, ... updates."""

    def chunks(at: Place) -> Any:
        for swaps in range(at.swaps, 100):
            yield Fed(swaps, at._replace(swaps=swaps), at._replace(swaps=swaps + 1))

    def turns(feeding: Feeding, first: int, last: int) -> list[tuple[int, Any]]:
        found = []
        for updates in range(first, last):
            if feeding.ends(updates):
                assert feeding.place(updates) == feeding.now.following
                feeding.turn(updates)
                found.append((updates, feeding.now.context))
            assert feeding.place(updates) == feeding.now.place
        return found

    feeding = Feeding(Feed(lambda _: None, chunks, period=5))  # type: ignore[arg-type,return-value]
    assert turns(feeding, 0, 13) == [(5, 1), (10, 2)]
    place = feeding.place(12)
    again = Feeding(Feed(lambda _: None, chunks, period=3), Origin(12, 0, 0, place.swaps))  # type: ignore[arg-type,return-value]
    again.move(place)
    assert again.until(12) == 15
    assert turns(again, 12, 20) == [(15, 3), (18, 4)]
    killed = Feeding(Feed(lambda _: None, chunks, period=3), Origin(12, 0, 0, place.swaps))  # type: ignore[arg-type,return-value]
    killed.move(again.place(19))
    assert turns(killed, 19, 22) == [(21, 5)]


def test_in_a_stream_other_lengths_begin_anew() -> None:
    """The turn to the next chunk is counted anew, too."""
    streaming = Feed(lambda _: None, lambda _: iter(()), period=5)  # type: ignore[arg-type,return-value]
    now = resumption.Standing(Origin(), {"num_steps": (16, 32)})
    assert resumption.dropped(now, streaming) == [resumption.BEGIN_ANEW, resumption.PERIOD]
    assert resumption.dropped(now, streaming._replace(period=None)) == []


# -------------------------------------------------------------------------------------------------------- schedules


def test_a_schedule_in_two_parts_is_the_schedule() -> None:
    """100 updates in one go, or 40 and then 120 of half the size: the same learning rate at the same step."""
    whole, second = (
        actor_critic.annealing(RunContext(updates, mesh.identity, first=first, done=done))(2.5e-4, 0.0)
        for updates, first, done in ((100, 0, 0.0), (160, 40, 0.4))
    )
    for update in range(40, 161):
        step = 40 + (update - 40) / 2
        assert float(second(update)) == pytest.approx(2.5e-4 * (1 - step / 100), abs=1e-10)
        if step == int(step):
            assert float(second(update)) == pytest.approx(float(whole(int(step))), abs=1e-10)


# -------------------------------------------------------------------------------------------------------- fewer devices


@pytest.mark.parametrize(
    ("devices", "there", "envs", "left"),
    [
        (8, [8], 64, 8),
        (8, [16], 64, 8),  # no more than it had
        (8, [7], 64, 4),  # 64 worlds are shared evenly by 4
        (8, [7], 70, 7),
        (8, [4, 3], 60, 6),
        (8, [4, 3], 64, 4),
        (8, [1], 63, 1),
    ],
)
def test_as_many_as_are_there_and_share_the_worlds(devices: int, there: list[int], envs: int, left: int) -> None:
    assert resumption.fewer(devices, there, envs) == left


@pytest.mark.parametrize(
    ("shards", "model", "there", "envs", "left"),
    [(4, 2, [8], 64, 4), (4, 2, [7], 64, 2), (4, 2, [7], 66, 3), (2, 4, [7], 64, 1), (4, 2, [3, 4], 64, 2)],
)
def test_each_shard_keeps_all_parts_of_the_parameters(
    shards: int, model: int, there: list[int], envs: int, left: int
) -> None:
    assert resumption.fewer(shards, there, envs, model) == left
    with pytest.raises(RunError, match="of 8 devices 3 are there, which can't share 64 worlds and 4 parts"):
        resumption.fewer(2, [3], 64, 4)


def test_none_left_is_an_error() -> None:
    with pytest.raises(RunError, match="of 8 devices 2 are there, which can't share 7 worlds"):
        resumption.fewer(8, [1, 1], 7)


def test_under_a_launcher_alone_it_goes_on_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four devices are there (tests/conftest.py), and no CPU is said to be."""
    run = small(num_envs=8, devices=8)
    run_dir.save_run(tmp_path, run, {})
    recipe = recipes.recipe("cartpole")

    def fitting(*words: str) -> flags.Parsed:
        parsed = flags.parse("train", "", run_flags.table(recipe), words)
        return train._fit_to_devices(parsed, tmp_path)

    monkeypatch.setattr(train, "on_cpu", lambda: False)
    assert "mesh" not in fitting().given
    monkeypatch.setenv(heartbeat.DESCRIPTOR, "9")
    assert fitting().values["mesh"] == MeshShape(4)
    assert "mesh" in fitting().given
    assert fitting("--mesh", "data=2").values["mesh"] == MeshShape(2)
    assert fitting("--mesh", "data=4,model=2").values["mesh"] == MeshShape(2, 2)
    assert "4 of 8 devices are there; goes on with data=4" in capfd.readouterr().err
    monkeypatch.setattr(train, "on_cpu", lambda: True)  # whose devices are as many as one asks for
    assert "mesh" not in fitting().given
