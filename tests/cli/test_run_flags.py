"""What `longhaul train` makes of its words: every field of a Run is a flag, and each flag changes its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from longhaul.cli import run_flags
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving, Named, Run
from longhaul.config.serialize import to_dict
from longhaul.envs import suites
from longhaul.runtime.settings import CHANGEABLE, FIXED, FREE, walk
from longhaul.training import loop
from longhaul.training.run_dir import save_run
from tests.helpers import installed_recipes, log_files
from tests.helpers.command_line import tree


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The Runs that `longhaul train` would train, of which nothing is trained."""
    runs: list[Run] = []

    def train(run: Run, folder: Path, *, resumed: bool, source: Any = None) -> loop.Outcome:
        runs.append(run)
        return loop.Outcome(loop.STOPPED, None)

    monkeypatch.setattr(loop, "train", train)
    return runs


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder of a run of CartPole that has not begun, where `longhaul` runs."""
    folder = tmp_path / "runs" / "cartpole"
    folder.mkdir(parents=True)
    save_run(folder, resolve(recipes.recipe("cartpole")), {})
    return folder


HIDDEN = {"recipe", "kind", "driver", "model", "vocabulary", "pad", "rope_scaling"}
"""Fields that are no flag: the recipe is named before, who learns drives by the policy, --mesh says both sizes, a
tokeniser the vocabulary and what pads, and rope scaling is of models from elsewhere."""


def test_every_field_of_a_run_is_a_flag_with_a_help() -> None:
    def leaves(value: Any, name: str = "") -> list[str]:
        if isinstance(value, dict):
            return [leaf for key, inner in value.items() for leaf in leaves(inner, key)]
        return [name]

    for make in recipes.RECIPES.values():
        found = run_flags.run_flags(make())
        assert all(flag.help for flag in found)
        fields = [name for name in leaves(to_dict(make())) if name not in HIDDEN]
        assert len(fields) == len(found) == len({flag.name for flag in found})


def test_a_field_that_may_change_at_a_resume_says_so() -> None:
    """The rule decides what a resumed run may be asked for; these change numbers, or none, or what the run is."""
    rules = {leaf.name: leaf.setting.resume for leaf in walk(recipes.recipe("driving"))}
    assert {rules[name] for name in ("num_envs", "mesh", "lr", "precision")} == {CHANGEABLE}
    assert {rules[name] for name in ("block", "keep", "lane", "bind", "health_kl")} == {FREE}
    assert {rules[name] for name in ("seed", "topology", "hidden_dim", "total_steps", "staleness")} == {FIXED}


def suite_of(recipe: str) -> str:
    """The suite of a recipe's environment; "" where it is ours."""
    task = recipes.recipe(recipe).environment
    kind = task.env.partition("/")[0] if isinstance(task, Named) else ""
    return kind if kind in suites.SUITES else ""


@pytest.mark.parametrize(
    "recipe",
    # Suites warn when they are imported, and promote ranks.
    [
        pytest.param(
            n, marks=[*installed_recipes.marks(n), *([pytest.mark.filterwarnings("ignore")] if suite_of(n) else [])]
        )
        for n in recipes.RECIPES
    ],
)
def test_without_flags_a_recipe_is_what_it_says(longhaul: Any, trained: list[Run], recipe: str) -> None:
    suite = suite_of(recipe)
    with jax.numpy_rank_promotion("allow" if suite else "raise"):
        code, out, err = longhaul("train", recipe, "--run-name", "a")
        if suite and "pip install" in err:
            pytest.skip(err.strip())  # it is not installed, or too old
        assert code == 75, err
        assert (out.splitlines()[-1], trained) == ("runs/a", [resolve(recipes.recipe(recipe))])
        assert suite or out == "runs/a\n", "only a suite may print"


def test_flags_change_their_fields_and_no_other(longhaul: Any, trained: list[Run]) -> None:
    words = (
        "--total-steps 1e6 --num_envs=16 --num-steps 16 --seed 3 --mesh data=2,model=1 --save-interval 7 --keep 2 "
        "--lr 1e-3 --no-anneal --ent-coef -0.1 --kl-stop 0.02 --memory 16 --evaluation-episodes 5 --topology fused "
        "--log-interval 3 --save-interval-minutes 0.5 --clip-value"
    )
    assert longhaul("train", "pendulum", *words.split())[0] == 75
    base = recipes.recipe("pendulum")
    algorithm = dataclasses.replace(
        base.algorithm, lr=1e-3, anneal=False, ent_coef=-0.1, kl_stop=0.02, memory=16, clip_value=True
    )
    expected = dataclasses.replace(
        base, total_steps=1_000_000, num_envs=16, num_steps=16, seed=3, devices=2, save_interval=7, keep=2,
        evaluation_episodes=5, log_interval=3, save_interval_minutes=0.5, algorithm=algorithm,
        base_batch=base.num_envs * base.num_steps,
    )  # fmt: skip
    assert trained == [resolve(expected)]


def test_flags_of_another_topology_are_refused_where_they_say_something(
    longhaul: Any, trained: list[Run], stored: Path
) -> None:
    usual = "--staleness 0 --lane shm --slots 2 --actor-kind process --ray-address auto --no-pin --bind none"
    assert longhaul("train", "cartpole", *usual.split())[0] == 75
    assert longhaul("train", "cartpole", "--resume", str(stored), "--lane", "shm")[0] == 75
    assert [(run.topology, run.acting.staleness) for run in trained] == [("fused", 0), ("fused", 0)]
    code, out, err = longhaul("train", "cartpole", "--resume", str(stored), "--lane", "grpc")
    assert (code, out) == (2, "") and "--lane is grpc, and --topology fused has none" in err
    assert len(trained) == 2


@installed_recipes.ATARI
def test_what_a_recipe_says_of_another_topology_is_not_refused(longhaul: Any, trained: list[Run]) -> None:
    assert longhaul("train", "impala-pong", "--env", "cartpole", "--torso", "mlp", "--topology", "fused")[0] == 75
    assert [(run.topology, run.acting.staleness) for run in trained] == [("fused", 1)]


def test_flags_of_driving(longhaul: Any, trained: list[Run], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        log_files.write_all(log_files.make_log(), tmp_path / name)
    words = (
        "--data one two/*.json --agents 2 --traffic idm --actions continuous --reward-collision -9 "
        "--reward-red-light -2 --terminations collision goal --horizon 40 --ent-coef-final none"
    )
    assert longhaul("train", "driving", *words.split())[0] == 75
    (run,) = trained
    task = run.environment
    assert isinstance(task, Driving)
    assert task.data == (str(tmp_path / "one"), str(tmp_path / "two/*.json"))
    simulator = task.simulator
    assert (simulator.agents, simulator.traffic, simulator.actions, task.horizon) == (2, "idm", "continuous", 40)
    assert (simulator.weights.collision, simulator.weights.red_light, simulator.weights.goal) == (-9, -2, 2)
    assert simulator.terminations == ("collision", "goal")
    assert run.algorithm.ent_coef_final is None


def test_the_general_recipe_takes_any_environment(longhaul: Any, trained: list[Run]) -> None:
    assert longhaul("train", "ppo", "--env", "probe/two_step")[0] == 75
    assert trained[0].environment == Named("probe/two_step")


def test_a_folder_is_named_after_recipe_and_time_and_kept(longhaul: Any, trained: list[Run], tmp_path: Path) -> None:
    _, out, _ = longhaul("train", "cartpole", "--runs-dir", "my/runs")
    folder = Path(out.strip())
    assert folder.parent == Path("my/runs")
    assert folder.name.startswith("cartpole-")
    assert json.loads((tmp_path / folder / "run.json").read_text())["run"] == to_dict(trained[0])


def test_resuming_takes_the_run_of_the_folder(longhaul: Any, trained: list[Run], stored: Path) -> None:
    begun = resolve(recipes.recipe("cartpole"))
    words = "--resume cartpole --total-steps 500000 --lr 2.5e-3 --anneal --keep 9 --save-interval 4"
    code, out, _ = longhaul("train", "cartpole", *words.split())
    assert (code, out) == (75, "runs/cartpole\n")
    assert trained == [resolve(dataclasses.replace(begun, keep=9, save_interval=4))]
    assert longhaul("train", "cartpole", "--resume", str(stored))[0] == 75
    assert trained[1] == begun


def test_a_finished_run_tells_its_result_again(longhaul: Any, stored: Path) -> None:
    result = {"status": "done", "evaluation": {"trained": {"return": 500.0, "length": 500.0, "episodes": 100}}}
    (stored / "result.json").write_text(json.dumps(result))
    before = tree(stored)
    code, out, err = longhaul("train", "cartpole", "--resume", "cartpole")
    assert code == 0
    assert "done already" in err
    header, row, report = out.splitlines()[1:]
    assert header.split() == ["policy", "return", "length", "episodes"]
    assert row.split() == ["trained", "500.000", "500.000", "100"]
    assert report == "report: runs/cartpole/report.html"
    assert tree(stored) == before
