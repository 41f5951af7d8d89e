"""The command line: helps, lists, and each command from its words to its output, in real processes too."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli import main, run_flags
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.envs import registry
from longhaul.runtime.config_fields import walk
from longhaul.training.run_dir import save_run
from tests.helpers import log_files
from tests.helpers.command_line import assert_refused, in_process

# ------------------------------------------------------------------------------------------------------------- helps


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        ("--help", ["usage: longhaul COMMAND", *main.COMMANDS, "Exit codes"]),
        ("train --help", ["usage: longhaul train RECIPE", *recipes.RECIPES]),
        ("evaluate --help", ["RUN", "--policy {run,untrained,idm,log,constant,pretrained}", "--episodes INT"]),
        ("render -h", ["--scenario TEXT", "--out PATH", ".gif"]),
        ("data inspect --help", ["PATH...", "--json PATH"]),
        ("data --help", ["longhaul data inspect"]),
        ("status --help", ["RUN", "--checkpoint-dir PATH"]),
        ("bench --help", ["NAME"]),
        ("--version", ["longhaul 0."]),
        ("version", ["longhaul 0."]),
        ("help train", ["usage: longhaul train RECIPE", *recipes.RECIPES]),
        ("recipes", [*recipes.RECIPES, "balance a pole"]),
        (
            "algorithms",
            ["ppo ", "DQN: cartpole-dqn, minatar-dqn", "grpo ", "RECIPE --env NAME", "my_module:MyClass"],
        ),
        ("envs", ["cartpole ", "mountaincar-continuous", "probe/memory", "driving "]),
    ],
)
def test_helps_and_lists_are_plain_text_on_stdout(longhaul: Any, words: str, phrases: Sequence[str]) -> None:
    code, out, err = longhaul(*words.split())
    assert (code, err) == (0, "")
    assert all(phrase in out for phrase in phrases)
    assert "\x1b" not in out


def test_every_recipe_has_a_line(longhaul: Any) -> None:
    code, out, _ = longhaul("recipes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [*recipes.RECIPES, *recipes.GRIDS]


def test_every_environment_has_a_line(longhaul: Any) -> None:
    code, out, _ = longhaul("envs")
    assert code == 0
    assert {name for name, _ in registry.names()} <= {line.split()[0] for line in out.splitlines() if line.strip()}


def test_nothing_at_all_is_bad_input_with_the_help(longhaul: Any) -> None:
    code, out, _ = longhaul()
    assert code == 2
    assert "usage: longhaul COMMAND" in out


@pytest.mark.parametrize("recipe", ["driving", "cartpole"])
def test_the_whole_help_of_a_recipe_has_each_flag_with_its_default(longhaul: Any, recipe: str) -> None:
    code, out, _ = longhaul("train", recipe, "--help-all")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    for heading in run_flags.GROUPS:
        assert f"{heading} options" in words
    apart = (*run_flags.FOLDERS, *run_flags.TRACKING, *run_flags.PUBLISHING)
    for flag in (*run_flags.run_flags(recipes.recipe(recipe)), *apart):
        assert all(f"--{name}" in words for name in (flag.name, *flag.aliases))
        assert "".join(flag.help.split()) in "".join(words.split())
    assert "--total-timesteps " in words and "{online,offline,disabled}" in words
    assert f"agent steps to train for (default: {recipes.recipe(recipe).total_steps})" in words
    assert ("--data PATH..." in words) == (recipe == "driving")
    assert ("--env TEXT" in words) == (recipe == "cartpole")


@pytest.mark.parametrize("recipe", [*recipes.RECIPES])
def test_the_help_of_a_recipe_fits_a_screen_with_the_flags_that_matter(
    longhaul: Any, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = longhaul("train", recipe, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 40
    shown = re.findall(r"^  --([a-z-]+)", out, re.MULTILINE)
    table = run_flags.table(recipes.recipe(recipe))
    known = {flag.name for group in table.values() for flag in group} | {"config", "dry-run"}
    assert len(shown) == 20
    assert set(shown) <= known
    algorithm = {leaf.name.replace("_", "-") for leaf in walk(recipes.recipe(recipe).algorithm)}
    assert {"total-steps", "num-envs", "seed", "lr", "resume"} <= set(shown) | ({"lr"} - algorithm)
    assert out.splitlines()[-1].startswith(f"longhaul train {recipe} --help-all shows all ")


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        ("train ppo", "which environment? longhaul train ppo --env NAME"),
        ("train cartpole --batch-size 64", "a batch is --num-envs x --num-steps"),
        ("train cartpole --learning-rate x", "--learning-rate is 'x'; it must be a finite number"),
        ("train cartpole --n_envs 3 --num-steps 7", "--num-minibatches is 4, which does not divide the 21 steps"),
        ("train cartpole --learning-rate -1", "--learning-rate is "),
        ("train cartpole --n-envs 64 --total_timesteps 5", "--total_timesteps is 5, which is 0 updates of 4096 (--n-"),
        ("train cartpole --total-steps 5", "(--num-envs x agents x --num-steps)"),
        ("play --frobnicate", "longhaul play has no flag --frobnicate"),
    ],
)
def test_words_of_other_libraries_are_understood_or_answered(longhaul: Any, words: str, phrase: str) -> None:
    assert_refused(longhaul(*words.split()), phrase)


# ------------------------------------------------------------------------------------------------- real processes


@pytest.mark.slow  # each command: training/test_api.py, training/test_hub.py, test_status.py
def test_train_evaluate_and_status_from_end_to_end(longhaul: Any, tmp_path: Path) -> None:
    words = "train cartpole --total-steps 4096 --num-envs 16 --num-steps 32 --evaluation-episodes 4 --run-name a"
    code, out, err = longhaul(*words.split())
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "runs/a"
    assert [line.split()[0] for line in lines[1:]] == ["policy", "trained", "untrained", "report:"]
    assert "\x1b" not in out + err
    assert "\r" not in err
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    for policy, scored in (("run", "trained"), ("untrained", "untrained")):
        code, out, _ = longhaul("evaluate", "a", "--policy", policy, "--json", f"{policy}.json")
        assert code == 0
        assert out.splitlines()[0].split() == ["4", "episodes", "mean", "2.5", "%", "97.5", "%", "std", "min", "max"]
        report = json.loads((tmp_path / f"{policy}.json").read_text())
        assert (report["run"], report["policy"], report["episodes"]) == ("a", policy, 4)
        assert report["mean"] | {"episodes": 4} == result["evaluation"][scored]
    code, out, _ = longhaul("status", "a")
    assert code == 0
    told = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (told["state"], told["checkpoints"], told["updates"]) == ("done", "8", "8, in 1 records")
    (tmp_path / "runs/a/result.json").unlink()
    hints = [longhaul("status", "a")[1]]
    (tmp_path / "runs").rename(tmp_path / "my runs")
    hints += [longhaul("status", "a", "--runs-dir", "my runs")[1], longhaul("status", "my runs/a")[1]]
    for hint, where in zip(hints, ("a", "'my runs/a'", "'my runs/a'"), strict=True):
        assert f"longhaul train cartpole --resume {where} goes on\n" in hint


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells from /proc that JAX is being imported")
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 1, "interrupted; nothing was saved"),
        (signal.SIGTERM, 75, "SIGTERM before a run began or after its end; the same command can be given again"),
    ],
)
def test_a_signal_while_jax_is_imported_ends_the_command(number: int, code: int, line: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "longhaul", "train", "cartpole", "--run-name", "a"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", f"longhaul: error: {line}\n")
    assert not (tmp_path / "runs").exists()


def test_a_command_does_not_wait_for_threads_in_compiled_code() -> None:
    """An interpreter that ends waits for no daemon, and crashes when one comes back to it."""
    program = """
import atexit, sys, threading, time
from longhaul.cli.main import main
atexit.register(print, "the interpreter ends")
if len(sys.argv) > 2:
    threading.Thread(target=time.sleep, args=[60.0], name=sys.argv.pop(), daemon=True).start()
sys.exit(main())
"""
    command = [sys.executable, "-c", program, "version"]
    plain, left = (subprocess.check_output([*command, *more], text=True) for more in ([], ["actor 0"]))
    assert plain == f"{left}the interpreter ends\n"


@pytest.mark.slow
def test_a_signal_saves_and_the_last_line_says_how_to_go_on(tmp_path: Path) -> None:
    words = "train cartpole --total-steps 400000000 --num-envs 16 --num-steps 32 --evaluation-episodes 4 --run-name a"
    process = subprocess.Popen(
        [sys.executable, "-m", "longhaul", *words.split()], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "runs/a\n"
    assert (tmp_path / "runs/a/run.json").is_file()
    metrics = tmp_path / "runs/a/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (75, ""), err
    assert "go on with --resume a" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_generated_scenario_is_drawn_and_inspected_logs_too(longhaul: Any, tmp_path: Path) -> None:
    done = in_process(tmp_path, "render", "--policy", "constant", "--out", "a.png")
    assert (done.returncode, done.stdout) == (0, "a.png\n"), done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    paths = log_files.write_all(log_files.make_log(steps=31), tmp_path)
    words = f"render --policy log --data {paths['womd-example']} --scenario straight --out b.html"
    assert longhaul(*words.split())[:2] == (0, "b.html\n")
    assert "straight" in (tmp_path / "b.html").read_text()
    many = "render --policy constant idm --episodes 3 --past-violations --out c.html"
    assert longhaul(*many.split())[:2] == (0, "c.html\n")
    data = re.search(r'<script type="application/json">(.*?)</script>', (tmp_path / "c.html").read_text())
    assert data is not None
    drawn = json.loads(data[1])["recordings"]
    assert [each["label"] for each in drawn] == ["constant", "idm"] * 3
    assert drawn[0]["id"] == drawn[1]["id"] != drawn[2]["id"]
    faults = [event["frame"] for each in drawn for event in each["events"] if not event["good"]]
    ends = [each["frames"] - 1 for each in drawn for event in each["events"] if not event["good"]]
    assert faults and all(frame < end for frame, end in zip(faults, ends, strict=True))  # it went on
    words = words.replace("--scenario straight", "--scenario strait")
    assert_refused(longhaul(*words.split()), "no scenario is named 'strait'; did you mean straight?")


@pytest.mark.slow
def test_driving_is_scored_by_scenario(longhaul: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe("driving")
    (tmp_path / "runs" / "d").mkdir(parents=True)
    save_run(tmp_path / "runs" / "d", resolve(dataclasses.replace(recipe, evaluation_episodes=2)), {})
    code, out, err = longhaul("evaluate", "d", "--policy", "log", "--json", "log.json")
    assert code == 0, err
    report = json.loads((tmp_path / "log.json").read_text())
    assert (report["run"], report["policy"], report["episodes"]) == ("d", "log", 2)
    assert len({scenario["id"] for scenario in report["scenarios"]}) == 2
    assert report["mean"]["accuracy"] == report["mean"]["progress"] == 1.0  # the logs are clean
    by_scenario, by_metric, _ = out.split("\n\n")  # the last of kilometres between infractions
    assert by_metric.splitlines()[1].split()[:2] == ["accuracy", "1.000"]
    header, *rows, mean = by_scenario.splitlines()
    assert header.split()[:4] == ["scenario", "accuracy", "progress", "collision"]
    assert [row.split()[0] for row in rows] == [scenario["id"] for scenario in report["scenarios"]]
    assert mean.split()[:5] == ["mean", "of", "2", "1.000", "1.000"]


@pytest.mark.slow
def test_an_episode_of_cartpole_is_drawn(longhaul: Any, tmp_path: Path) -> None:
    words = "train cartpole --total-steps 2048 --num-envs 4 --num-steps 16 --evaluation-episodes 2 --run-name p"
    code, _, err = longhaul(*words.split())
    assert code == 0, err
    assert longhaul(*["render", "p", "--out", "p.gif"])[:2] == (0, "p.gif\n")
    assert (tmp_path / "p.gif").read_bytes().startswith(b"GIF")
    both = "render p --out p.gif --policy run untrained"
    assert_refused(longhaul(*both.split()), "drawn for one policy at a time")
    assert_refused(longhaul(*["render", "p", "--out", "p.gif", "--traffic", "idm"]), "is for driving, and run p is")
