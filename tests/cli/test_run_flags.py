"""Runs that `longhaul train` makes of its words: every field of a Run is a flag, and each flag changes its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from longhaul.algorithms.config import OnPolicy, PPOConfig
from longhaul.cli import flags, run_flags
from longhaul.cli import train as commands
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving, Named, Run, to_dict
from longhaul.runtime.config_fields import CHANGEABLE, FIXED, FREE, replaced, walk
from longhaul.telemetry import tracking
from longhaul.training import loop, run_dir
from longhaul.training.run_dir import save_run
from tests.helpers import installed_recipes, log_files
from tests.helpers.command_line import tree

DOCUMENT = "--wandb --total-timesteps 100000000 --num-envs 2048 --num-steps 256 --checkpoint-dir checkpoints"
"""The command of the specification, after the name of the script."""

OLD = {
    "num-envs": 512, "num-steps": 64, "total-timesteps": 2**21, "lr": 1e-3, "gamma": 0.9, "gae-lambda": 0.8,
    "num-minibatches": 8, "update-epochs": 2, "clip-eps": 0.1, "vf-coef": 0.25, "ent-coef": 0.05, "max-grad-norm": 1.5,
    "hidden-dim": 32, "num-layers": 1, "log-interval": 4, "seed": 7, "save-interval-minutes": 10.0, "save-interval": 3,
}  # fmt: skip
"""The old trainer's flags of numbers, each with a value that is not its default."""

ON_POLICY = [
    pytest.param(name, marks=[*installed_recipes.marks(name)])
    for name in recipes.RECIPES
    if isinstance(recipes.recipe(name).algorithm, OnPolicy) and name != "pendulum"
]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Run, Path]]:
    """The runs that `longhaul train` would train in an empty folder, without W&B's say."""
    runs: list[tuple[Run, Path]] = []

    def train(run: Run, folder: Path, **_: Any) -> loop.Outcome:
        runs.append((run, folder))
        return loop.Outcome(loop.STOPPED, None)

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")  # so that wandb need not be installed
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return runs


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder of a run of CartPole that has not begun, where `longhaul` runs."""
    folder = tmp_path / "runs" / "cartpole"
    folder.mkdir(parents=True)
    save_run(folder, resolve(recipes.recipe("cartpole")), {})
    return folder


HIDDEN = {"recipe", "kind", "driver", "model", "vocabulary", "pad", "rope_scaling", "verdict"}
"""Fields that are no flag: the recipe is named before, who learns drives by the policy, --mesh says both sizes, a
tokeniser the vocabulary and what pads, rope scaling is of models from elsewhere, and the task says how a gate looks."""


def test_every_field_of_a_run_is_a_flag_with_a_help() -> None:
    def leaves(value: Any, name: str = "") -> list[str]:
        if isinstance(value, dict):
            return [leaf for key, inner in value.items() for leaf in leaves(inner, key)]
        return [name]

    for make in recipes.RECIPES.values():
        run = make()
        found = run_flags.run_flags(run)
        assert all(flag.help for flag in found)
        network = type(run.algorithm).__dataclass_fields__.get("network")
        hidden = HIDDEN.union(network.metadata["without"] if network else ())
        fields = [name for name in leaves(to_dict(run)) if name not in hidden]
        assert len(fields) == len(found) == len({flag.name for flag in found})


def test_a_field_that_may_change_at_a_resume_says_so() -> None:
    """The rule decides what a resumed run may be asked for; these change numbers, or none, or what the run is."""
    rules = {leaf.name: leaf.setting.resume for leaf in walk(recipes.recipe("driving"))}
    assert {rules[name] for name in ("num_envs", "mesh", "lr", "precision", "total_steps")} == {CHANGEABLE}
    assert {rules[name] for name in ("block", "keep", "lane", "bind", "health_kl")} == {FREE}
    assert {rules[name] for name in ("seed", "topology", "hidden_dim", "init_from", "staleness")} == {FIXED}


def chosen(recipe: str, *words: str) -> Run:
    base = recipes.recipe(recipe)
    return resolve(run_flags.chosen(base, flags.parse(f"train {recipe}", "", run_flags.table(base), words)))


@pytest.mark.parametrize("recipe", installed_recipes.RECIPES)
def test_without_flags_a_recipe_is_what_it_says(recipe: str) -> None:
    assert chosen(recipe) == resolve(recipes.recipe(recipe))


@pytest.mark.parametrize(
    ("recipe", "suite"),
    [
        ("driving", ""),
        ("reasoning-arithmetic", ""),
        pytest.param("impala-pong", "", marks=installed_recipes.ATARI),
        # Suites warn when they are imported, and promote ranks.
        pytest.param("minatar-dqn", "gymnax", marks=pytest.mark.filterwarnings("ignore")),
        pytest.param("brax-ant", "brax", marks=pytest.mark.filterwarnings("ignore")),
    ],
)
def test_the_command_trains_the_recipe(longhaul: Any, begun: list[tuple[Run, Path]], recipe: str, suite: str) -> None:
    with jax.numpy_rank_promotion("allow" if suite else "raise"):
        code, out, err = longhaul("train", recipe, "--run-name", "a")
        if suite and "pip install" in err:
            pytest.skip(err.strip())  # it is not installed, or too old
        assert code == 75, err
        assert (out.splitlines()[-1], begun) == ("runs/a", [(resolve(recipes.recipe(recipe)), Path("runs/a"))])
        assert suite or out == "runs/a\n", "only a suite may print"


def test_flags_change_their_fields_and_no_other(longhaul: Any, begun: list[tuple[Run, Path]]) -> None:
    words = (
        "--total-steps 1e6 --num_envs=16 --num-steps 16 --seed 3 --mesh data=2,model=1 --save-interval 7 --keep 2 "
        "--lr 1e-3 --no-anneal --ent-coef -0.1 --kl-stop 0.02 --memory 16 --evaluation-episodes 5 --topology fused "
        "--log-interval 3 --save-interval-minutes 0.5 --clip-value"
    )
    assert longhaul("train", "pendulum", *words.split())[0] == 75
    base = recipes.recipe("pendulum")
    algorithm = replaced(base.algorithm, lr=1e-3, anneal=False, ent_coef=-0.1, kl_stop=0.02, memory=16, clip_value=True)
    expected = dataclasses.replace(
        base, total_steps=1_000_000, num_envs=16, num_steps=16, seed=3, devices=2, save_interval=7, keep=2,
        evaluation_episodes=5, log_interval=3, save_interval_minutes=0.5, algorithm=algorithm,
        base_batch=base.num_envs * base.num_steps,
    )  # fmt: skip
    ((run, folder),) = begun
    assert run == resolve(expected)
    asked = json.loads((folder / "run.json").read_text())["asked"]
    assert asked == {
        "total_steps": 1_000_000, "num_envs": 16, "num_steps": 16, "seed": 3, "mesh": "data=2", "save_interval": 7,
        "keep": 2, "lr": 1e-3, "anneal": False, "ent_coef": -0.1, "kl_stop": 0.02, "memory": 16,
        "evaluation_episodes": 5, "topology": "fused", "log_interval": 3, "save_interval_minutes": 0.5,
        "clip_value": True,
    }  # fmt: skip


def test_flags_of_another_topology_are_refused_where_they_say_something(
    longhaul: Any, begun: list[tuple[Run, Path]], stored: Path
) -> None:
    usual = "--staleness 0 --lane shm --slots 2 --actor-kind process --ray-address auto --no-pin --bind none"
    assert longhaul("train", "cartpole", *usual.split())[0] == 75
    assert longhaul("train", "cartpole", "--resume", str(stored), "--lane", "shm")[0] == 75
    assert [(run.topology, run.acting.staleness) for run, _ in begun] == [("fused", 0), ("fused", 0)]
    code, out, err = longhaul("train", "cartpole", "--resume", str(stored), "--lane", "grpc")
    assert (code, out) == (2, "") and "--lane is grpc, and --topology fused has none" in err
    assert len(begun) == 2


@installed_recipes.ATARI
def test_settings_of_a_recipe_for_another_topology_are_not_refused(
    longhaul: Any, begun: list[tuple[Run, Path]]
) -> None:
    assert longhaul("train", "impala-pong", "--env", "cartpole", "--torso", "mlp", "--topology", "fused")[0] == 75
    assert [(run.topology, run.acting.staleness) for run, _ in begun] == [("fused", 1)]


def test_flags_of_driving_reach_the_run(longhaul: Any, begun: list[tuple[Run, Path]], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text(json.dumps(log_files.gpudrive(log_files.make_log())))
    words = (
        "--data one two/*.json --agents 2 --traffic idm --actions continuous --reward-collision -9 "
        "--reward-red-light -2 --terminations collision goal --horizon 40 --ent-coef-final none"
    )
    assert longhaul("train", "driving", *words.split())[0] == 75
    ((run, _),) = begun
    task = run.environment
    assert isinstance(task, Driving)
    assert task.data == (str(tmp_path / "one"), str(tmp_path / "two/*.json"))
    simulator = task.simulator
    assert (simulator.agents, simulator.traffic, simulator.actions, task.horizon) == (2, "idm", "continuous", 40)
    assert (simulator.weights.collision, simulator.weights.red_light, simulator.weights.goal) == (-9, -2, 2)
    assert simulator.terminations == ("collision", "goal")
    assert run.algorithm.ent_coef_final is None


def test_the_general_recipe_takes_any_environment(longhaul: Any, begun: list[tuple[Run, Path]]) -> None:
    assert longhaul("train", "ppo", "--env", "probe/two_step")[0] == 75
    assert begun[0][0].environment == Named("probe/two_step")


def test_a_folder_is_named_after_recipe_and_time_and_kept(
    longhaul: Any, begun: list[tuple[Run, Path]], tmp_path: Path
) -> None:
    _, out, _ = longhaul("train", "cartpole", "--runs-dir", "my/runs")
    folder = Path(out.strip())
    assert folder.parent == Path("my/runs")
    assert folder.name.startswith("cartpole-")
    assert json.loads((tmp_path / folder / "run.json").read_text())["run"] == to_dict(begun[0][0])
    assert run_dir.load_asked_settings(tmp_path / folder) == {}


def test_resuming_takes_the_run_of_the_folder(longhaul: Any, begun: list[tuple[Run, Path]], stored: Path) -> None:
    run = resolve(recipes.recipe("cartpole"))
    words = "--resume cartpole --total-steps 500000 --lr 2.5e-3 --anneal --keep 9 --save-interval 4"
    code, out, _ = longhaul("train", "cartpole", *words.split())
    assert (code, out) == (75, "runs/cartpole\n")
    assert [now for now, _ in begun] == [resolve(dataclasses.replace(run, keep=9, save_interval=4))]
    assert longhaul("train", "cartpole", "--resume", str(stored))[0] == 75
    assert begun[1][0] == run


def test_a_flag_that_the_stored_run_lacks_is_refused(longhaul: Any, begun: list[Any], stored: Path) -> None:
    other = dataclasses.replace(recipes.recipe("cartpole-dqn"), recipe="cartpole")
    save_run(stored, resolve(other), {})
    code, out, err = longhaul("train", "cartpole", "--resume", "cartpole", "--gae-lambda", "0.9")
    assert (code, out, begun) == (2, "", [])
    assert "run cartpole has no --gae-lambda; leave it out" in err


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


def test_the_command_of_the_specification_starts_and_is_gone_on_with(begun: list[tuple[Run, Path]]) -> None:
    assert commands.train(["hackmatrix", *DOCUMENT.split()]) == loop.STOPPED
    ((run, folder),) = begun
    assert (run.total_steps, run.num_envs, run.num_steps) == (100_000_000, 2048, 256)
    assert folder.parent == Path("checkpoints")
    assert tracking.load(folder) == tracking.Tracking(tracking.run_id(folder.name), True, "hackmatrix")
    words = ["hackmatrix", "--resume-run", tracking.run_id(folder.name), "--checkpoint-dir", "checkpoints"]
    assert commands.train([*words, "--no-wandb"]) == loop.STOPPED
    assert begun[1] == (run, folder)
    tracked = tracking.load(folder)
    assert tracked is not None
    assert not tracked.on


def _old(recipe: str) -> dict[str, Any]:
    """The old trainer's flags that an algorithm has: GAE's lambda is PPO's."""
    ppo = isinstance(recipes.recipe(recipe).algorithm, PPOConfig)
    return {name: value for name, value in OLD.items() if ppo or name != "gae-lambda"}


@pytest.mark.parametrize("recipe", ON_POLICY)
def test_every_recipe_has_the_old_flags(recipe: str) -> None:
    old = _old(recipe)
    run = chosen(
        recipe, "--mesh", "data=1", *(word for name, value in old.items() for word in (f"--{name}", str(value)))
    )
    values = {flag.name: flag.default for flag in run_flags.run_flags(run)}
    values["total-timesteps"] = values["total-steps"]
    assert {name: values[name] for name in old} == old


def test_the_old_command_trains_where_it_is_asked_to(begun: list[tuple[Run, Path]]) -> None:
    words = [word for name, value in _old("pendulum").items() for word in (f"--{name}", str(value))]
    more = "--wandb --project mine --entity us --run-suffix big --checkpoint-dir there --mesh data=1"
    assert commands.train(["pendulum", *words, *more.split()]) == loop.STOPPED
    ((run, folder),) = begun
    assert run == chosen("pendulum", *words, "--mesh", "data=1")
    assert folder.parent == Path("there")
    assert folder.name.startswith("pendulum-20")
    assert folder.name.endswith("-big")
    tracked = tracking.load(folder)
    assert tracked is not None
    assert tracked[:4] == (tracking.run_id(folder.name), True, "mine", "us")


def test_flags_of_a_run_that_is_not_tracked_are_said_to_do_nothing(
    begun: list[tuple[Run, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    commands.train(["cartpole", "--project", "mine"])
    assert capsys.readouterr().err == "--project does nothing without --wandb\n"
    commands.train(["cartpole", "--project", "mine", "--wandb"])
    assert capsys.readouterr().err == ""


def test_a_name_and_a_suffix_exclude_each_other(begun: list[tuple[Run, Path]]) -> None:
    with pytest.raises(ValueError, match="--run-suffix b and --run-name a are both given; leave one out"):
        commands.train(["cartpole", "--run-name", "a", "--run-suffix", "b"])
    assert begun == []
