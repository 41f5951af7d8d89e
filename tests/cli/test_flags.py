"""Words become values. Other words for a flag mean the same wherever they stand, and two that disagree are an error."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from longhaul.algorithms.config import OnPolicy, PPOConfig
from longhaul.cli import flags, run_flags
from longhaul.cli import train as commands
from longhaul.cli.main import main
from longhaul.config import recipes
from longhaul.config.run import Named, Run
from longhaul.telemetry import wandb
from longhaul.training import loop

FLAGS = {"": [flags.Flag("count", flags.INT, 1, "how many", aliases=("total-count", "n")), run_flags.RUNS_DIR]}

KINDS = {
    "one": flags.Flag("one", flags.INT, 1, "a number"),
    "maybe": flags.Flag("maybe", flags.optional(flags.FLOAT), None, "a number or none"),
    "many": flags.Flag("many", flags.choice(["red", "blue"]), ("red",), "colours", many=True),
    "on": flags.Flag("on", flags.SWITCH, True, "a pair"),
    "FILE": flags.Flag("FILE", flags.PATH, None, "where"),
}

DOCUMENT = "--wandb --total-timesteps 100000000 --num-envs 2048 --num-steps 256 --checkpoint-dir checkpoints"
"""The command of the specification, after the name of the script."""

OLD = {
    "num-envs": 512, "num-steps": 64, "total-timesteps": 2**21, "lr": 1e-3, "gamma": 0.9, "gae-lambda": 0.8,
    "num-minibatches": 8, "update-epochs": 2, "clip-eps": 0.1, "vf-coef": 0.25, "ent-coef": 0.05, "max-grad-norm": 1.5,
    "hidden-dim": 32, "num-layers": 1, "log-interval": 4, "seed": 7, "save-interval-minutes": 10.0, "save-interval": 3,
}  # fmt: skip
"""The old trainer's flags of numbers, each with a value that is not its default."""

OLD_OF_ALL = {name: value for name, value in OLD.items() if name != "gae-lambda"}
"""Those that every algorithm has which learns from rollouts."""

ON_POLICY = [n for n in recipes.RECIPES if isinstance(recipes.recipe(n).algorithm, OnPolicy) and n != "brax-ant"]
"""Without the one whose environment is of a suite that need not be installed."""


@pytest.mark.parametrize(
    ("words", "values", "given"),
    [
        ("", {}, ""),
        ("x", {"FILE": "x"}, ""),
        ("--one 5 x", {"one": 5, "FILE": "x"}, "one"),
        ("x --one=-5", {"one": -5, "FILE": "x"}, "one"),
        ("--one 1e3", {"one": 1000}, "one"),
        ("--one 1 --one 2", {"one": 2}, "one"),
        ("--maybe .5", {"maybe": 0.5}, "maybe"),
        ("--maybe none", {}, "maybe"),
        ("--many blue red --no-on", {"many": ("blue", "red"), "on": False}, "many on"),
        ("--on", {}, "on"),
        ("-", {"FILE": "-"}, ""),
    ],
)
def test_words_become_values(words: str, values: dict[str, Any], given: str) -> None:
    parsed = flags.parse("try", "Tries.", {"": list(KINDS.values())}, words.split())
    assert parsed.values == {name: flag.default for name, flag in KINDS.items()} | values
    assert parsed.given == set(given.split())


def test_the_nearest_names_come_first_by_their_beginning() -> None:
    names = ["--total-steps", "--num-steps", "--kl-stop"]
    assert flags.nearest("--total", names) == ["--total-steps"]
    assert flags.nearest("--num-stpes", names)[0] == "--num-steps"
    assert flags.nearest("--wandering", names) == []


@pytest.mark.parametrize("words", ["--count 7", "--total-count 7", "--total_count=7", "--n 7 --count 7", "--n=7 --n 7"])
def test_each_name_means_the_same(words: str) -> None:
    parsed = flags.parse("try", "Tries.", FLAGS, words.split())
    assert parsed.values == {"count": 7, "runs-dir": "runs"}
    assert parsed.given == {"count"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--count 7 --n 8", "--count is 7 and --n, another word for it, is 8; give one of them"),
        ("--n=8 --total-count 7", "--n is 8 and --total-count, another word for it, is 7; give one of them"),
        ("--total-count x", "--count is 'x'; it must be a whole number"),
        ("--total-count", "--count has no value; it must be a whole number"),
        ("--total-cuont 3", "longhaul try has no flag --total-cuont; did you mean --total-count"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, message: str) -> None:
    with pytest.raises(flags.FlagError) as raised:
        flags.parse("try", "Tries.", FLAGS, words.split())
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Run, Path]]:
    """The runs that `longhaul train` would train in an empty folder, without W&B's say."""
    runs: list[tuple[Run, Path]] = []

    def train(run: Run, folder: Path, *, resumed: bool, source: Any = None) -> loop.Outcome:
        runs.append((run, folder))
        return loop.Outcome(loop.STOPPED, None)

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")  # so that wandb need not be installed
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return runs


def test_the_command_of_the_specification_starts_and_is_gone_on_with(begun: list[tuple[Run, Path]]) -> None:
    assert commands.train(["hackmatrix", *DOCUMENT.split()]) == loop.STOPPED
    ((run, folder),) = begun
    assert (run.total_steps, run.num_envs, run.num_steps) == (100_000_000, 2048, 256)
    assert folder.parent == Path("checkpoints")
    assert wandb.load(folder) == wandb.Tracking(wandb.run_id(folder.name), True, "hackmatrix")
    words = ["hackmatrix", "--resume-run", wandb.run_id(folder.name), "--checkpoint-dir", "checkpoints"]
    assert commands.train([*words, "--no-wandb"]) == loop.STOPPED
    assert begun[1] == (run, folder)
    tracked = wandb.load(folder)
    assert tracked is not None
    assert not tracked.on


@pytest.mark.parametrize("recipe", ON_POLICY)
def test_every_recipe_has_the_old_flags(begun: list[tuple[Run, Path]], recipe: str) -> None:
    task = recipes.recipe(recipe).environment
    if isinstance(task, Named) and task.env.startswith("ale/"):
        pytest.importorskip("ale_py", reason="ale_py, of the extra host, is not installed")
        pytest.importorskip("gymnasium", reason="gymnasium, of the extra host, is not installed")
    old = OLD if isinstance(recipes.recipe(recipe).algorithm, PPOConfig) else OLD_OF_ALL
    words = shlex.join(word for name, value in old.items() for word in (f"--{name}", str(value)))
    more = "--wandb --project mine --entity us --run-suffix big --checkpoint-dir there --mesh data=1"
    assert commands.train([recipe, *words.split(), *more.split()]) == loop.STOPPED
    run, folder = begun[0]
    found = {flag.name: flag.default for flag in run_flags.run_flags(run)}
    found["total-timesteps"] = found["total-steps"]
    assert {name: found[name] for name in old} == old
    assert folder.parent == Path("there")
    assert folder.name.startswith(f"{recipe}-20")
    assert folder.name.endswith("-big")
    tracked = wandb.load(folder)
    assert tracked is not None
    assert tracked[:4] == (wandb.run_id(folder.name), True, "mine", "us")


def test_the_help_shows_each_other_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "pendulum", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for other, own in (("total-timesteps", "total-steps"), ("checkpoint-dir", "runs-dir"), ("resume-run", "resume")):
        assert f"--{other} " in text
        assert f"--{own} " in text
    assert "{online,offline,disabled}" in text


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
