"""Settings in files: what one run prints, or its run.json, makes the same Run; unknown keys are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longhaul.cli.main import main
from longhaul.config import files, recipes
from longhaul.config.resolve import changed, resolve
from longhaul.config.run import Run, to_dict
from longhaul.runtime.errors import RunError
from longhaul.training import run_dir


def read(path: Path, recipe: str) -> Run:
    known = recipes.recipe(recipe)
    return resolve(changed(known, files.read(files.load(path), known, path)))


@pytest.mark.parametrize(
    "recipe", ["cartpole", "ppo", "pendulum-sac", "driving", "reasoning-arithmetic", "impala-cartpole"]
)
def test_a_printed_config_reads_back_as_the_same_run(recipe: str, tmp_path: Path) -> None:
    run = resolve(recipes.recipe(recipe))
    path = tmp_path / "run.yaml"
    path.write_text(files.render(run))
    assert read(path, recipe) == run
    stored = tmp_path / "run.json"
    stored.write_text(json.dumps({"format": 1, "id": "x", "recipe": recipe, "run": to_dict(run), "python": "3.11"}))
    assert read(stored, recipe) == run


YAML = """
recipe: ppo
lr: 1e-3
algorithm: {network: {hidden_dim: 32}, gamma: 0.9}
mesh: data=1
env: pendulum
"""
TOML = """
recipe = "ppo"
env = "pendulum"
mesh = 1
[algorithm]
lr = 0.001
gamma = 0.9
network.hidden_dim = 32
"""
JSON = """
{"lr": 0.001, "gamma": 0.9, "hidden_dim": 32, "mesh": {"data": 1}, "environment": {"env": "pendulum"}}
"""


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.toml", TOML), ("a.json", JSON)])
def test_settings_stand_alone_or_inside_their_config(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for written in (text.encode(), text.replace("\n", "\r\n").encode("utf-8-sig")):  # the latter by Windows' editors
        path.write_bytes(written)
        _check_settings(read(path, "ppo"))


def _check_settings(run: Run) -> None:
    assert (run.algorithm.lr, run.devices, to_dict(run.environment)["env"]) == (0.001, 1, "pendulum")
    assert to_dict(run.algorithm)["network"]["hidden_dim"] == 32 and to_dict(run.algorithm)["gamma"] == 0.9


def test_a_sweep_stands_as_a_table_of_values(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("sweep: {lr: [0.001, 3e-4], ent_coef: 0..0.1:3}\n")
    assert read(path, "ppo").population.sweep == ("lr=0.001,0.0003", "ent_coef=0..0.1:3")


MERGED = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 25))
"""A kB of merge keys, each of which names the last one twice."""


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.ini", "", "its suffix must be one of .yaml, .yml, .toml, .json"),
        ("b.yaml", None, "b.yaml is not there: check the path"),
        ("c.yaml", "lr: [", "c.yaml can't be read: while parsing"),
        ("d.toml", "lr = ", "d.toml can't be read"),
        ("e.yaml", "3", "holds a int; it must be settings by name"),
        ("f.yaml", "num_env: 3", "num_env is no setting of recipe ppo; did you mean num_envs"),
        ("g.yaml", "algorithm: {lrr: 3}", "algorithm.lrr is no setting of recipe ppo; did you mean lr"),
        ("h.yaml", "optimizer: {lr: 3}", "optimizer is no part of recipe ppo"),
        ("i.yaml", "num_envs: many", "--num-envs is 'many'; it must be a whole number"),
        ("k.yaml", "[" * 2000 + "]" * 2000, "k.yaml can't be read: its parts are within one another without an end"),
        ("n.toml", ".".join(["a"] * 30_000) + "=1", "n.toml can't be read: its parts are within one another"),
        ("o.toml", ".".join(['"a,b"'] * 30_000) + "=1", "o.toml can't be read: its parts are within one another"),
        ("p.yaml", MERGED, "p.yaml can't be read: its merge keys stand for more than 32,768 values"),
        ("q.yaml", "seed: " + ":".join(["59"] * 99), "q.yaml can't be read: a number has 585 bits"),
        ("l.yaml", f"a: &a [{'0,' * 99}]\nb: &b [{'*a,' * 99}]\nc: [{'*b,' * 99}]", "for more than 32,768 values"),
        ("m.json", " " * 300_000, "it has 300,000 bytes; settings have at most 262,144"),
        ("j.yaml", "mesh: all of them", "mesh is .*; write data=2 or data=2,model=2"),
    ],
)
def test_bad_files_are_answered_in_a_line(name: str, text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunError, match=says) as caught:
        read(path, "ppo")
    assert "\n" not in str(caught.value)


def test_flags_go_before_the_file_which_may_name_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: pendulum\nlr: 0.5\nseed: 7\n")
    for words in (["--config", str(path), "--seed", "9"], ["--seed=9", f"--config={path}"]):
        assert main(["train", *words, "--print-config"]) == 0
        printed = tmp_path / "printed.yaml"
        printed.write_text(capsys.readouterr().out)
        run = read(printed, "pendulum")
        assert (run.recipe, run.seed, run.algorithm.lr) == ("pendulum", 9, 0.5)
    run_dir.save_run(run_dir.new_folder(tmp_path, run, "begun"), resolve(run), {})
    for words in ([f"--resume={tmp_path / 'begun'}"], ["--runs-dir", str(tmp_path), "--resume-run", "begun"]):
        assert main(["train", "--lr", "0.25", *words, "--print-config"]) == 0
        assert "recipe: pendulum" in capsys.readouterr().out
    assert main(["train", "pendulum", "--config", str(path), "--resume", "x"]) == 2
    assert "--config and --resume are both given" in capsys.readouterr().err
