"""A Run is resolved to numbers that work, or refused with a reason; its folder is found and read again, or refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from longhaul.algorithms.config import PPOConfig, PQNConfig, SACConfig
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import MOST, Driving, Named, Run
from longhaul.driving.sim import simulator
from longhaul.networks.config import NetworkConfig
from longhaul.runtime import devices
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import run_dir
from tests.helpers import installed_recipes

BASE = Run("cartpole", Named("cartpole"), devices=1)

ON_DEVICE = {
    "environment": Named("torch/module:function"), "topology": "actors", "acting": ActorConfig(actor_kind="device"),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- resolve


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_steps": 0}, "--total-steps is 0; it must be at least 1"),
        ({"total_steps": 8191}, "is 8191, which is 0 updates of 8192 (--num-envs x agents x --num-steps)"),
        ({"total_steps": 2**31 * 8192}, "which is 2147483648 updates of 8192"),
        ({"num_envs": 0}, "--num-envs is 0; it must be at least 1"),
        ({"num_envs": -4}, "--num-envs is -4; it must be at least 1"),
        ({"num_envs": 2**30}, "is 137438953472 on a device; it must be at most 2147483647: give fewer, or more"),
        ({"num_steps": 0}, "--num-steps is 0; it must be at least 1"),
        ({"num_envs": 10, "devices": 4}, "--num-envs is 10, which 4 devices can't share evenly; choose a multiple"),
        ({"devices": 0}, "--mesh is 0; it must be at least 1"),
        ({"threads": 0}, "--threads is 0; it must be at least 1"),
        ({"log_interval": 0}, "--log-interval is 0; it must be at least 1"),
        ({"save_interval": -1}, "--save-interval is -1; it must be at least 1"),
        ({"save_interval_minutes": 0.0}, "--save-interval-minutes is 0.0; it must be above 0"),
        ({"save_interval_minutes": math.nan}, "--save-interval-minutes is nan; it must be finite"),
        ({"save_interval_minutes": math.inf}, "--save-interval-minutes is inf; it must be finite"),
        ({"keep": 0}, "--keep is 0; it must be at least 1"),
        ({"evaluation_episodes": 0}, "--evaluation-episodes is 0; it must be at least 1"),
        ({"seed": -1}, "--seed is -1; it must lie in 0 to 2147483647"),
        ({"seed": 2**31}, "--seed is 2147483648; it must lie in 0 to 2147483647"),
        ({"topology": "fuse"}, "--topology is 'fuse'; it must be one of fused"),
        ({"algorithm": PPOConfig(num_minibatches=3)}, "--num-minibatches is 3, which does not divide the 8192 steps"),
        ({"algorithm": PPOConfig(num_minibatches=0)}, "--num-minibatches is 0; it must be at least 1"),
        ({"algorithm": replaced(PPOConfig(), memory=8, num_minibatches=7)}, "does not divide the 64 environments"),
        ({"algorithm": PPOConfig(gamma=1.5)}, "--gamma is 1.5; it must lie in 0 to 1"),
        ({"algorithm": PPOConfig(lr=math.nan)}, "--lr is nan; it must be finite"),
        ({"algorithm": PPOConfig(vf_coef=math.inf)}, "--vf-coef is inf; it must be finite"),
        (
            {"environment": Driving(), "topology": "actors", "acting": ActorConfig(actor_kind="device")},
            "--actor-kind is device, and actors drive in the scenarios of the learner's process; choose --actor-kind t",
        ),
        ({**ON_DEVICE, "devices": 2, "fsdp": True}, "--fsdp is on, and with --actor-kind device the policy acts where"),
        ({**ON_DEVICE, "model": 2}, "--mesh is data=1,model=2, and with --actor-kind device the policy acts where it"),
        ({"environment": Driving(scenarios=0)}, "--scenarios is 0; it must lie in 1 to 1000000"),
        ({"environment": Driving(scenarios=1_000_001)}, "(those after are for evaluation)"),
        ({"environment": Driving(horizon=1)}, "--horizon is 1; it must be at least 2"),
        ({"environment": Driving(simulator=simulator.Config(agents=0))}, "--agents is 0; it must be at least 1"),
        ({"environment": Driving(simulator=simulator.Config(neighbours=0))}, "--neighbours is 0; it must be at least"),
        ({"environment": Driving(simulator=simulator.Config(waypoints=0))}, "--waypoints is 0; it must lie in 1 to 20"),
        ({"environment": Driving(simulator=simulator.Config(waypoints=21))}, "--waypoints is 21; it must lie in"),
        (
            {"environment": Driving(simulator=simulator.Config(reward="nowhere:pay"))},
            "--reward nowhere:pay: nowhere can't be imported: ModuleNotFoundError",
        ),
        (
            {"environment": Driving(simulator=simulator.Config(reward="json:JSONDecoder"))},
            "--reward json:JSONDecoder: it is a type; give a function of a reward.Step",
        ),
        (
            {"environment": Driving(simulator=simulator.Config(reward="json:loads", conditioning=True))},
            "--reward is json:loads; --conditioning draws weights of terms",
        ),
    ],
)  # fmt: skip
def test_impossible_settings_are_one_line_with_value_bound_and_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=re.escape(message)) as raised:
        runs.resolve(dataclasses.replace(BASE, **change))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", installed_recipes.RECIPES)
def test_resolving_leaves_nothing_open_and_twice_is_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "cores", lambda: 2)
    for changes in ({}, {"devices": 1}, {"save_interval": 5}, {"log_interval": 67}, {"block": 3}, {"seed": 9}):
        run = runs.resolve(dataclasses.replace(recipes.recipe(name), **changes))
        assert {f.name for f in dataclasses.fields(run) if getattr(run, f.name) is None} <= {
            "evaluation_interval",
            "init_from",
            "save_interval",
            "keep_every",
        }
        assert runs.resolve(run) == run
        assert run.log_interval is not None
        assert run.block is not None
        assert run.log_interval % run.block == 0


@pytest.mark.parametrize("name", installed_recipes.RECIPES)
def test_records_and_calls_stay_bounded_however_long_a_run_is(name: str) -> None:
    """A call takes no longer in a long run: it must still be able to stop and save."""
    recipe = dataclasses.replace(recipes.recipe(name), devices=1)
    steps = recipe.num_envs * recipe.num_steps * runs.agents(recipe)
    blocks = set()
    for total in (10**6, 10**7, 10**9, 10**12):
        total = min(total, steps * MOST)  # updates are counted in int32
        run = runs.resolve(dataclasses.replace(recipe, total_steps=total))
        assert run.log_interval is not None
        assert run.block is not None
        assert (total // steps) / run.log_interval <= runs.MOST_RECORDS
        assert run.block * steps <= 32_768
        blocks.add(run.block)
    assert len(blocks) == 1


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, (64, 64)),
        ({"save_interval": 5}, (5, 5)),  # saved when it is asked for, not at the end of a longer call
        ({"log_interval": 10}, (10, 10)),
        ({"log_interval": 128}, (128, 64)),
        ({"log_interval": 130}, (130, 26)),
        ({"log_interval": 131}, (129, 43)),  # whole calls of some length; rounded down
        ({"log_interval": 130, "save_interval": 13}, (130, 13)),
        ({"log_interval": 10**6}, (1000, 50)),  # no longer than the run
        ({"block": 10, "log_interval": 25}, (25, 5)),
        ({"block": 4, "log_interval": 10}, (10, 2)),
        ({"block": 4096}, (1000, 1000)),
    ],
)
def test_records_sum_up_whole_calls(wanted: dict[str, int], found: tuple[int, int]) -> None:
    run = runs.resolve(dataclasses.replace(BASE, num_envs=8, num_steps=16, total_steps=128 * 1000, **wanted))
    assert (run.log_interval, run.block) == found


def test_threads_are_those_of_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 6)
    for given, count, threads in (("3", 1, 3), ("", 1, 1), ("", 2, 6), ("", 8, 8), ("many", 1, 1), ("0", 1, 1)):
        monkeypatch.setenv("NPROC", given)
        run = runs.resolve(dataclasses.replace(BASE, devices=count))
        assert run.threads == threads
        monkeypatch.setenv("NPROC", "5")
        assert runs.resolve(run).threads == threads


def test_data_is_found_again_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    run = dataclasses.replace(BASE, environment=Driving(("logs/*.json", "/there", "~/x", "../y")))
    task = runs.resolve(run).environment
    assert isinstance(task, Driving)
    assert task.data == (f"{tmp_path}/logs/*.json", "/there", "/home/me/x", f"{tmp_path.parent}/y")


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", installed_recipes.RECIPES)
def test_every_recipe_comes_back_from_its_folder(name: str, tmp_path: Path) -> None:
    run = runs.resolve(recipes.recipe(name))
    run_dir.save_run(tmp_path, run, {"commit": None})
    assert run_dir.load_run(tmp_path) == run


def test_a_run_of_no_recipe_reads_back_from_its_folder(tmp_path: Path) -> None:
    task = Driving(
        ("/a", "/b*"), bank=3, bank_updates=5, simulator=simulator.Config(terminations=("collision",), agents=2)
    )
    run = runs.resolve(dataclasses.replace(BASE, environment=task, algorithm=PPOConfig(kl_stop=0.5, lr=1)))
    run_dir.save_run(tmp_path, run, {})
    found = run_dir.load_run(tmp_path)
    assert found == run
    assert found.environment == task


def test_a_run_says_by_which_algorithm_and_one_that_does_not_is_of_the_first(tmp_path: Path) -> None:
    """Folders of before there was a choice are PPO's."""
    for name, kind in (("cartpole", "ppo"), ("impala-cartpole", "impala"), ("appo-cartpole", "impala")):
        run = runs.resolve(dataclasses.replace(recipes.recipe(name), devices=1))
        run_dir.save_run(tmp_path, run, {})
        path = tmp_path / "run.json"
        about = json.loads(path.read_text())
        assert about["run"]["algorithm"].pop("kind") == kind
        path.write_text(json.dumps(about))
        if kind == "ppo":
            assert run_dir.load_run(tmp_path) == run
        else:
            with pytest.raises(RunError, match="do not fit"):
                run_dir.load_run(tmp_path)
        about["run"]["algorithm"]["kind"] = "sarsa"
        path.write_text(json.dumps(about))
        with pytest.raises(RunError, match="kind 'sarsa' is unknown"):
            run_dir.load_run(tmp_path)


def test_fields_of_a_network_that_an_algorithm_does_not_have_are_refused() -> None:
    for config, words in (
        (SACConfig(network=NetworkConfig(memory=8)), "--memory is 8; SACConfig takes 0 alone"),
        (PQNConfig(network=NetworkConfig()), "--shared is False; PQNConfig takes True alone"),
    ):
        with pytest.raises(RunError, match=words):
            runs.resolve(dataclasses.replace(BASE, algorithm=config))


def _damages() -> dict[str, Any]:
    """Damage to the JSON of a run; -> its bytes, or the changed object."""

    def change(*path: Any, value: Any) -> Any:
        def apply(data: dict[str, Any]) -> dict[str, Any]:
            inner = data
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = value
            return data

        return apply

    def drop(data: dict[str, Any]) -> dict[str, Any]:
        del data["run"]["keep"]
        return data

    return {
        "cut": lambda data: json.dumps(data)[:200].encode(),
        "empty": lambda _: b"",
        "binary": lambda _: b"\x00\xff\xfe",
        "a list": lambda _: [],
        "no run": lambda data: {"format": data["format"]},
        "another format": change("format", value=2),
        "no format": change("format", value=None),
        "a field missing": drop,
        "a field more": change("run", "colour", value="red"),
        "no number": change("run", "seed", value="3"),
        "a bool": change("run", "seed", value=True),
        "a number": change("run", "algorithm", value=3),
        "a string": change("run", "environment", "data", value="abc"),
        "unknown kind": change("run", "environment", "kind", value="Sailing"),
        "left open": change("run", "devices", value=None),
        "impossible": change("run", "num_envs", value=-1),
        "does not divide": change("run", "algorithm", "num_minibatches", value=7),
    }


@pytest.mark.parametrize("damage", _damages())
def test_a_folder_of_another_version_or_damaged_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    run_dir.save_run(tmp_path, runs.resolve(dataclasses.replace(BASE, environment=Driving(("/a",)))), {})
    path = tmp_path / "run.json"
    changed = _damages()[damage](json.loads(path.read_text()))
    path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    before = path.read_bytes()
    with pytest.raises(RunError, match=re.escape(str(path))) as raised:
        run_dir.load_run(tmp_path)
    assert "\n" not in str(raised.value)
    assert "use the" in str(raised.value) or "can't read" in str(raised.value)
    assert path.read_bytes() == before


def test_json_is_written_whole_or_not_at_all_and_holds_what_json_has(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    run_dir.write_json(path, {"a": (1, math.nan, [-math.inf]), "b": None})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"a": [1, None, [None]], "b": None}
    before = path.read_bytes()
    with pytest.raises(TypeError):
        run_dir.write_json(path, {"a": object()})
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run_dir.write_json(tmp_path / "result.json", {})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "result.json"))
    assert not (tmp_path / "result.json").exists()


def test_folders_are_new_and_names_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_dir = tmp_path / "a" / "runs"
    first, second = (run_dir.new_folder(runs_dir, BASE, None) for _ in range(2))
    assert first != second
    assert first.is_dir()
    assert second.is_dir()
    named = run_dir.new_folder(runs_dir, BASE, "mine")
    assert named == runs_dir / "mine"
    with pytest.raises(RunError, match=r"run 'mine' exists in .*; choose another --run-name, or --resume /.*/mine$"):
        run_dir.new_folder(runs_dir, BASE, "mine")
    for name in ("", "..", "a/b", "-x", "a b", "x" * 101, "ä"):
        with pytest.raises(RunError, match="--run-name is"):
            run_dir.new_folder(runs_dir, BASE, name)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"--runs-dir .*file can't be made \(.*\); give another folder"):
        run_dir.new_folder(tmp_path / "file", BASE, None)
    monkeypatch.setattr(run_dir.sys, "getfilesystemencoding", lambda: "ascii")
    assert run_dir.new_folder(runs_dir, BASE, "plain").is_dir()
    with pytest.raises(RunError, match=r"runs-ü has letters beyond ASCII, .* set PYTHONUTF8=1"):
        run_dir.new_folder(tmp_path / "runs-ü", BASE, None)


def test_runs_are_found_by_name_or_path_or_the_nearest_are_named(tmp_path: Path) -> None:
    folder = run_dir.new_folder(tmp_path, BASE, "first-run")
    run_dir.new_folder(tmp_path, BASE, "no-run-yet")
    run_dir.save_run(folder, runs.resolve(BASE), {})
    assert run_dir.find_folder(tmp_path, "first-run") == folder
    assert run_dir.find_folder(tmp_path / "elsewhere", str(folder)) == folder
    with pytest.raises(RunError, match=r"no run 'fist-run' in .*first-run"):
        run_dir.find_folder(tmp_path, "fist-run")
    with pytest.raises(RunError, match="no run 'no-run-yet'"):
        run_dir.find_folder(tmp_path, "no-run-yet")
    with pytest.raises(RunError, match=r"is a folder of runs, not a run; give one of its 1: .*first-run$"):
        run_dir.find_folder(tmp_path, str(tmp_path))
    (tmp_path / "logs").mkdir()
    with pytest.raises(RunError, match=r"no run '.*logs' in .*, and the folder .*logs has no run.json; did you mean"):
        run_dir.find_folder(tmp_path, str(tmp_path / "logs"))


def test_unknown_recipes_and_environments_name_the_nearest() -> None:
    with pytest.raises(RunError, match="no recipe is named 'drivin'; did you mean driving"):
        recipes.recipe("drivin")
    with pytest.raises(RunError, match=r"no recipe is named 'xyz'; there are cartpole, .*, ppo, driving-scaling$"):
        recipes.recipe("xyz")
    with pytest.raises(RunError, match="recipe driving-scaling is a grid of many runs"):
        recipes.recipe("driving-scaling")
    with pytest.raises(RunError, match="no environment is named 'pendulun'; did you mean pendulum"):
        runs.named(Named("pendulun"))


def test_driving_is_checked_unless_its_dynamics_cannot_be() -> None:
    def simulator(**given: Any) -> Any:
        return runs.changed(recipes.recipe("driving"), given).environment.simulator  # type: ignore[union-attr]

    assert simulator().safety
    assert not simulator(dynamics="delta").safety
    with pytest.raises(RunError, match="safety checks the commands of bicycle, steering alone"):
        runs.resolve(runs.changed(recipes.recipe("driving"), {"dynamics": "delta", "safety": True}))


def test_a_run_of_one_device_is_evaluated_by_two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = runs.resolve(dataclasses.replace(recipes.recipe("cartpole"), devices=1))
    run_dir.save_run(tmp_path, run, {})
    monkeypatch.setattr(runs.process_group, "count", lambda: 2)
    assert run_dir.load_run(tmp_path) == run
    with pytest.raises(RunError, match="which 2 processes can't share evenly"):
        runs.resolve(run)
