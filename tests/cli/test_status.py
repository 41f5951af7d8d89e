"""Commands that start without JAX: `status`, and what shares its start with it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli import main, status
from longhaul.config import recipes
from longhaul.config.resolve import agents, resolve
from longhaul.config.run import Run
from longhaul.training.run_dir import save_run

PROGRAM = """
import sys
from longhaul.cli import main
for line in sys.argv[1:]:
    code = main.main(line.split())
    assert code == (2 if line.startswith("data inspect") else 0), (line, code)
    heavy = {"jax", "flax", "orbax", "scipy"} & set(sys.modules)
    assert not heavy, (line, heavy)
"""

LIGHT = ("--help", "data inspect no.json", "recipes", "train --help", "train cartpole --help", "status driving")


def run_of(recipe: str, **changes: Any) -> Run:
    return resolve(dataclasses.replace(recipes.recipe(recipe), devices=1, **changes))


def test_commands_that_only_print_import_no_jax(tmp_path: Path) -> None:
    """In one process, each after the one before."""
    for name, recipe in (("driving", "driving"), ("pole", "cartpole")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        save_run(tmp_path / "runs" / name, run_of(recipe), {})
    (tmp_path / "runs/pole/metrics.jsonl").write_text('{"update": 1, "env_steps": 2048, "agent_steps": 2048}\n')
    command = [sys.executable, "-c", PROGRAM, *LIGHT, "status pole"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: longhaul COMMAND" in done.stdout and "runs/pole" in done.stdout


@pytest.mark.parametrize("recipe", ["cartpole", "driving-selfplay", "reasoning-arithmetic"])
def test_agents_are_those_of_the_run_with_and_without_records(recipe: str) -> None:
    run = run_of(recipe)
    records = [{"env_steps": 6, "agent_steps": 6 * agents(run)}]
    assert status._agents(run, records) == status._agents(run, []) == agents(run)


@pytest.mark.parametrize(("field", "value"), [("num_envs", -1), ("devices", None), ("model", 0)])
def test_a_damaged_run_is_refused(longhaul: Any, tmp_path: Path, field: str, value: Any) -> None:
    damaged = dataclasses.replace(run_of("cartpole"), **{field: value})
    (tmp_path / "runs" / "a").mkdir(parents=True)
    save_run(tmp_path / "runs" / "a", damaged, {})
    code, out, error = longhaul("status", "a", "--runs-dir", str(tmp_path / "runs"))
    assert (code, out) == (2, "")
    assert "is no run of this version" in error


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("metrics.jsonl", f'{{"update": 1, "agent_steps": {HUGE}}}\n', "line 1 of .*metrics.jsonl is not a record"),
        ("metrics.jsonl", '{"update": 1, "agent_steps": 1e999}\n', "line 1 of .*metrics.jsonl is not a record"),
        ("metrics.jsonl", '{"update": 1, "agent_steps": 3, "sps": {}}\n', "line 1 of .*metrics.jsonl is not a record"),
        ("result.json", "{}", "result.json is no result of a run; remove it"),
        ("result.json", '{"members": [1, 2]}', "result.json is no result of a run; remove it"),
        ("result.json", '{"evaluation": {"trained": 3}}', "result.json is no result of a run; remove it"),
        ("result.json", f'{{"evaluation": {{"trained": {{"return": {HUGE}}}}}}}', "result.json is no result of a run"),
        ("health.jsonl", '{"update": 1}\n', "health.jsonl has a line that is no finding"),
    ],
)
def test_a_strangers_folder_is_one_line(
    file: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    save_run(tmp_path / "a", run_of("cartpole"), {})
    (tmp_path / "a" / file).write_text(text)
    command = "report" if file == "health.jsonl" else "status"
    assert main.main([command, "a", "--runs-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and re.search(words, said[0])
