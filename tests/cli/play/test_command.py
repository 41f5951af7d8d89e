"""`longhaul play`: by words, and an agent's games, watched and counted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms import ppo
from longhaul.algorithms.actor_critic import Policy
from longhaul.algorithms.run_context import RunContext
from longhaul.cli import main
from longhaul.cli.play import command as play
from longhaul.cli.play import games
from longhaul.cli.play.games import Game
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.envs import registry
from longhaul.envs.hackmatrix import screen
from longhaul.envs.hackmatrix import state as w
from longhaul.envs.hackmatrix.environment import FIXES
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.training.checkpoint.checkpoint import Checkpoints
from longhaul.training.run_dir import save_run
from longhaul.types import Progress
from tests.training.test_legacy_params import arrays

COMPILE = games.game


@functools.cache
def by_hand() -> Game:
    """The games of seed 0 as `longhaul play hackmatrix` has them, compiled once for all tests."""
    return COMPILE(registry.make("hackmatrix", max_steps=None), 0)


@pytest.fixture
def longhaul(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """(words, text of stdin) -> (exit code, stdout, stderr) of the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    jax.devices()

    def game(environment: Any, seed: int, agent: Any = None, *, greedy: bool = True) -> Game:
        return by_hand() if agent is None and seed == 0 else COMPILE(environment, seed, agent, greedy=greedy)

    monkeypatch.setattr(games, "game", game)

    def run(*words: str, given: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        code = main.main(["play", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def frames(text: str) -> list[list[str]]:
    """The screens that were printed, each as its lines."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("HackMatrix,")]
    return [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)])]


def cell(frame: list[str], row: int, col: int) -> tuple[str, str]:
    """(who is in a cell of a printed board, what is in it)."""
    line = 2 + 3 * (5 - row)
    who, what = (frame[line + i][8 * col + 1 : 8 * col + 8].strip() for i in (0, 1))
    return who, what


def at(frame: list[str]) -> list[tuple[int, int]]:
    """Where the player is."""
    return [(r, c) for r in range(6) for c in range(6) if screen.UNICODE.player in cell(frame, r, c)[0]]


# ------------------------------------------------------------------------------------------------------------ by words


def test_words_reach_the_state_that_the_rules_tell(longhaul: Any) -> None:
    """Cases 1 and 2 of the rules: an empty board, edges, and three moves worth 0.04 each."""
    code, out, err = longhaul("hackmatrix", given="down\nup\n\n0 right # two words, one of them a number\n")
    assert (code, err) == (0, "")
    shown = frames(out)
    assert len(shown) == 4, "the start, and a screen for each action that was legal"
    assert [at(frame) for frame in shown] == [[(0, 0)], [(1, 0)], [(2, 0)], [(2, 1)]]
    assert "down: the board ends there" in shown[0]
    last = shown[-1]
    assert last[0].split() == ["HackMatrix,", "seed", "0,", "game", "1", "step", "3", "return", "0.12"]
    assert last[1].endswith("stage 1 of 8  turn 3")
    assert "right: +0.04  step penalty -0.01, distance shaping +0.05" in last
    assert "you can go or strike: up, down, left, right" in last
    assert cell(last, 5, 5) == ("", "EXIT")
    assert out.splitlines()[-1] == "1 left"


def test_the_way_to_the_exit_leads_to_the_next_stage(longhaul: Any, tmp_path: Path) -> None:
    """Ten steps, nine at 0.04; the last is worth -0.01 + 1, and 0.05 more if there is no way to the next exit."""
    words = ["up", "right"] * 5
    code, out, _ = longhaul(
        "hackmatrix", "--json", "played.json", given="\n".join(["siphon", "push", *words, "quit", "up"])
    )
    assert code == 0
    last = frames(out)[-1]
    assert last[1].endswith("stage 2 of 8  turn 10")
    assert at(last) == [(5, 5)]
    corners = [cell(last, row, col)[1] for row, col in ((0, 0), (0, 5), (5, 0))]
    assert sorted(corners) == ["EXIT", "◆", "◆"]
    found = json.loads((tmp_path / "played.json").read_text())
    (episode,) = found["episodes"]
    assert episode["actions"] == words, "what was not legal was not done"
    assert (episode["stage"], episode["length"], episode["score"], episode["end"]) == (2, 10, 0, "left")
    assert min(abs(episode["return"] - wanted) for wanted in (1.35, 1.40)) < 1e-5
    assert episode["reward"]["stage_completion"] == 1.0
    assert abs(sum(episode["reward"].values()) - episode["return"]) < 1e-5
    assert found["summary"]["highest_stage"] == 2
    assert (found["game"], found["seed"], found["agent"]) == ("hackmatrix", 0, None)


def test_words_that_are_no_actions_say_so_and_new_begins_another_game(longhaul: Any) -> None:
    code, out, _ = longhaul("hackmatrix", "--json", "-", given="jump\nup\nnew\n?\nright\nright\n28\n")
    assert code == 0
    found = json.loads(out)  # nothing else is on stdout
    assert [episode["actions"] for episode in found["episodes"]] == [["up"], ["right", "right"]]
    assert [episode["episode"] for episode in found["episodes"]] == [0, 1]
    _, out, _ = longhaul("hackmatrix", given="jump\nhelp\n")
    assert "'jump' is no action; ? shows what there is" in out
    assert "Programs: their key, name" in out
    assert longhaul("hackmatrix")[1].count("step 0") == 1, "no game was played, and there is no table"


@pytest.mark.slow
def test_the_command_by_itself_has_no_control_characters(tmp_path: Path) -> None:
    """A process of its own, with stdin and stdout that are no terminal."""
    command = [sys.executable, "-m", "longhaul", "play", "hackmatrix", "--seed", "0", "--fixes", "shaping"]
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, input="right\nright\nup\nq\n", capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert done.stdout.replace("\n", "").isprintable()
    last = done.stdout[done.stdout.rindex("HackMatrix,") :].splitlines()
    assert cell(last, 1, 2)[0] == "@"


@pytest.mark.slow
def test_the_canonical_rules_begin_with_a_gift_and_a_board(longhaul: Any, tmp_path: Path) -> None:
    """Section 10 of the rules: a random corner; 10 credits, 11 energy or a data siphon; one transmission."""
    code, out, _ = longhaul(
        "hackmatrix", "--rules", "canonical", "--seed", "5", "--json", "played.json", given="new\nnew\n0\n1\n2\n3\n"
    )
    assert code == 0
    begun = [frame for frame in frames(out) if " step 0 " in frame[0]]
    assert len(begun) == 3
    for frame in begun:
        text = "\n".join(frame)
        assert at(frame)[0] in [(0, 0), (0, 5), (5, 0), (5, 5)]
        gifts = ("credits 10    energy 0" in text, "credits 0     energy 11" in text, "siphons 1" in text)
        assert sum(gifts) == 1
        assert text.count(screen.UNICODE.sent) == 1
        assert sum("EXIT" in line for line in frame) == 1
    found = json.loads((tmp_path / "played.json").read_text())
    assert found["game"] == "hackmatrix-canonical"
    assert 1 <= len(found["episodes"][0]["actions"]) <= 4


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        ("", "which game? longhaul play hackmatrix"),
        (
            "hackmatrx",
            "GAME is 'hackmatrx'; it must be one of hackmatrix, hackmatrix-canonical; did you mean hackmatrix",
        ),
        ("hackmatrix --rules jaxx", "--rules is 'jaxx'; it must be one of jax, canonical"),
        ("hackmatrix-canonical --rules jax", "--rules is jax, and hackmatrix-canonical has others"),
        ("hackmatrix --fixes D1", "fixes names 'D1'; there are start, undo"),
        ("hackmatrix --run a --params b.npz", "--run and --params are both given"),
        ("hackmatrix --latest --params b.npz", "--params and --latest are both given"),
        ("hackmatrix --params b.npz --greedy --sample", "--greedy and --sample are both given"),
        ("hackmatrix --episodes 0", "--episodes is 0; it must lie in 1 to"),
        ("hackmatrix --max-steps 0", "--max-steps is 0; it must lie in 1 to"),
        ("hackmatrix --seed -1", "--seed is -1; it must lie in 0 to"),
        ("hackmatrix --delay -0.1", "--delay is -0.1; it must lie in 0 to 60"),
        ("hackmatrix --run nobody", "no run 'nobody' in runs"),
        ("hackmatrix --latest", "no run of hackmatrix in runs has a checkpoint; longhaul train hackmatrix makes one"),
        ("hackmatrix --json nowhere/x.json", "--json is 'nowhere/x.json'"),
    ],
)
def test_bad_input_is_one_line(longhaul: Any, words: str, phrase: str) -> None:
    code, out, err = longhaul(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("longhaul: error: ")
    assert err.count("\n") == 1
    assert phrase in err


# ----------------------------------------------------------------------------------------------------------- an agent's


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parameters of the game's own trainer, whose policy is far from uniform."""
    path = tmp_path_factory.mktemp("params") / "params_40.npz"
    drawn = arrays(6, 1, seed=5)
    drawn["params.Dense_1.kernel"] *= 4.0
    np.savez(path, **drawn)
    return path


@pytest.mark.slow
def test_watching_takes_legal_actions_only_and_the_table_counts_the_same_games(longhaul: Any, params: Path) -> None:
    """What is played step by step is what is played all at once; and another step of ours would find it illegal."""
    words = ("hackmatrix", "--params", str(params), "--episodes", "3", "--sample", "--max-steps", "60")
    code, out, err = longhaul(*words, "--show", "steps", "--json", "watched.json")
    assert (code, err) == (0, "")
    watched = json.loads(Path("watched.json").read_text())
    code, out_table, _ = longhaul(*words, "--json", "-")
    table = json.loads(out_table)
    assert len(watched["episodes"]) == len(table["episodes"]) == 3
    for one, other in zip(watched["episodes"], table["episodes"]):
        assert {k: one[k] for k in ("episode", "length", "stage", "score", "end")} == {
            k: other[k] for k in ("episode", "length", "stage", "score", "end")
        }
        assert abs(one["return"] - other["return"]) < 1e-4
    said = [line.split() for line in out.splitlines() if line.startswith("game ")]
    taken = {number: [words[4] for words in said if words[1] == number] for number in ("1", "2", "3")}
    assert list(taken.values()) == [episode["actions"] for episode in watched["episodes"]]
    for episode in watched["episodes"]:  # games of seed 0 are those that one plays by hand
        playing = by_hand().begin(episode["episode"])
        for name in episode["actions"]:
            action = w.NAMES.index(name)
            assert screen.why(playing.view, action) is None
            playing = by_hand().step(playing, action)
        assert (playing.view.over, playing.end) == (True, "died")
        assert sum(playing.view.parts) == pytest.approx(episode["return"], abs=1e-4)
    assert len({name for episode in watched["episodes"] for name in episode["actions"]}) > 2


def saved(runs_dir: Path, name: str, env: str = "hackmatrix") -> Policy:
    """A run that was saved after no update: its folder and a checkpoint. -> its policy."""
    recipe = recipes.recipe({"hackmatrix": "hackmatrix", "hackmatrix-fixed": "hackmatrix-best"}.get(env, env))
    algorithm = replaced(recipe.algorithm, hidden_dim=4, num_layers=1)
    run = resolve(dataclasses.replace(recipe, algorithm=algorithm, devices=1))
    folder = runs_dir / name
    folder.mkdir(parents=True)
    save_run(folder, run, {})
    spec = registry.make(env).spec
    state = jax.jit(ppo.ppo(spec, run.algorithm, RunContext(updates=1, mean=lambda x: x)).init)(
        jax.random.key(len(name))
    )
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        checkpoints.save(1, Progress(state, (), (), jnp.int32(1)))  # type: ignore[arg-type]
    return Policy(state.params, state.moments)


@pytest.mark.slow
def test_a_run_or_the_latest_one_plays_with_its_own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = saved(tmp_path / "runs", "first")
    second = saved(tmp_path / "runs", "second one")
    saved(tmp_path / "runs", "other", "cartpole")
    for i, name in enumerate(("second one", "first", "other")):  # by age, whatever they were made in
        place = next((tmp_path / "runs" / name / "checkpoints").iterdir())
        os.utime(place, (1e9 + i, 1e9 + i))
    asked: list[Any] = []
    monkeypatch.setattr(play, "_play_by_agent", lambda _, *given: asked.append(given) or [])
    for words, policy, name in (
        (["--latest"], first, "first"), (["--run", "second one"], second, "second one"),
        (["--run", "runs/first", "--fixes", "start"], first, "first"),
    ):  # fmt: skip
        assert main.main(["play", "hackmatrix", *words]) == 0
        environment, agent = asked.pop()
        assert agent.label == name
        jax.tree.map(np.testing.assert_array_equal, agent.policy, policy)
        assert environment.spec.max_steps == 1000
    assert environment.fixes == ("start",)
    with pytest.raises(RunError, match=r"run other is cartpole, not hackmatrix; name another, or longhaul evaluate"):
        play._check_run(tmp_path / "runs" / "other")


def test_a_run_in_corrected_rules_plays_in_them(longhaul: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = saved(tmp_path / "runs", "best", "hackmatrix-fixed")
    asked: list[Any] = []
    monkeypatch.setattr(play, "_play_by_agent", lambda _, *given: asked.append(given) or [])
    assert longhaul("hackmatrix", "--run", "best")[0] == 0
    environment, agent = asked.pop()
    assert environment.fixes == tuple(FIXES)
    jax.tree.map(np.testing.assert_array_equal, agent.policy, policy)
