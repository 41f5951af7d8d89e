"""The examples that are scripts, each run as its first line says: what it prints is what it claims."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import longhaul
from examples import serve_policy

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


def run(name: str, folder: Path) -> list[str]:
    """Lines that the script prints, but for folders of runs."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "MINARI_DATASETS_PATH": str(folder / "minari")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], cwd=folder, capture_output=True, text=True, timeout=580,
        check=False, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("runs/")]


def said(line: str) -> dict[str, Any]:
    found: dict[str, Any] = ast.literal_eval(re.sub(r"^\w+ ", "", line))
    return found


@pytest.mark.slow
def test_a_network_of_ones_own_learns_and_its_run_is_found_again(tmp_path: Path) -> None:
    (scores,) = run("own_network", tmp_path)
    assert said(scores)["return"] > 200
    (folder,) = (tmp_path / "runs").iterdir()
    env = os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{EXAMPLES}"}
    command = [sys.executable, "-m", "longhaul", "evaluate", str(folder), "--episodes", "5"]
    assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False).returncode == 0
    gone = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert gone.returncode == 2 and "own_network can't be imported" in gone.stderr and gone.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_data_set_of_minaris_is_cloned_to_its_controllers_return(tmp_path: Path) -> None:
    pytest.importorskip("minari", reason="minari is not installed")
    (scores,) = run("minari_cloning", tmp_path)
    assert said(scores)["return"] > 490  # the controller's is 500; of untrained policies 10 to 30


@pytest.mark.slow
def test_optuna_prunes_by_the_callback_and_finds_settings_that_learn(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    states, best = run("optuna_search", tmp_path)
    assert len(found := ast.literal_eval(states)) == 8 and {"COMPLETE", "PRUNED"} == set(found)
    assert float(best.split()[0]) > 200
    ended = [(folder / "result.json").exists() for folder in sorted((tmp_path / "runs").iterdir())]
    assert ended == [state == "COMPLETE" for state in found]


@pytest.mark.slow
def test_questions_of_a_file_are_learnt_from_a_verifier(tmp_path: Path) -> None:
    untrained, trained = map(said, run("grpo_questions", tmp_path))
    assert untrained["pass_at_1"] < 0.3 < 0.9 < trained["pass_at_1"]  # of questions held out


@pytest.mark.slow
def test_self_play_drives_further_than_it_began(tmp_path: Path) -> None:
    lines = run("self_play", tmp_path)
    untrained, trained = (said(line) for line in lines[:2])
    assert trained["goal"] > untrained["goal"] + 0.2 and trained["progress"] > 0.8
    assert "Estimate" in lines[3] and lines[4].startswith("longhaul render runs/")


@pytest.mark.slow
def test_a_server_of_a_policy_gives_its_actions_and_answers_bad_requests(tmp_path: Path) -> None:
    small = {"num_envs": 4, "num_steps": 8, "total_steps": 64, "evaluation_episodes": 2, "hidden_dim": 8}
    result = longhaul.train("cartpole", runs_dir=tmp_path, **small)
    serving = serve_policy.server(result.folder, port=0)
    threading.Thread(target=serving.serve_forever, daemon=True).start()

    def post(path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        address = f"http://127.0.0.1:{serving.server_port}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(address, body), timeout=30) as answer:
                return answer.status, ast.literal_eval(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ast.literal_eval(error.read().decode())

    try:
        seen = np.asarray(jax.random.normal(jax.random.key(0), (8, 4)))
        wanted = result.policy.act_numpy(seen).tolist()
        assert post("/act", f'{{"observation": {seen.tolist()}}}'.encode()) == (200, {"action": wanted})
        assert post("/act", f'{{"observation": {seen[0].tolist()}}}'.encode()) == (200, {"action": wanted[0]})
        code, body = post("/act", b'{"observation": [1, 2, 3]}')
        assert code == 400 and "the observation is [3]; the policy takes [4]" in body["error"]
        assert post("/act", b'{"seen": 1}')[0] == post("/act", b"{")[0] == 400
        assert post("/reset", b"{}")[0] == 404
    finally:
        serving.shutdown()
        serving.server_close()
