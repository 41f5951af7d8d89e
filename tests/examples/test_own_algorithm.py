"""The example of an algorithm in a package of its own, installed: by its entry point it learns CartPole, is killed and
resumed bit for bit, trains side by side, on two hosts and by actors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ("--num-envs", "32", "--num-steps", "8", "--evaluation-episodes", "20")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working folder beside which the package is installed."""
    found = tmp_path_factory.mktemp("own")
    copy = shutil.copytree(REPOSITORY / "examples" / "own_algorithm", found / "source")  # a build leaves files there
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(found / "site"), str(copy)], check=True, capture_output=True)
    module = found / "starting.py"
    module.write_text("import jax.numpy as jnp\nfrom longhaul_a2c import A2C\n\nTABLE = jnp.eye(3)\n")
    return found


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "longhaul", *words]


def variables(folder: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder / 'site'}"}


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        command(*words), cwd=folder, env=variables(folder), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def result(folder: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "runs" / name / "result.json").read_text())
    return found


def test_it_learns_is_killed_resumes_bit_for_bit_and_is_evaluated(folder: Path) -> None:
    flags = ("--algorithm", "a2c", *SMALL, "--total-steps", "300000")
    run(folder, "train", "cartpole", *flags, "--run-name", "whole")
    process = subprocess.Popen(
        command("train", "cartpole", *flags, "--run-name", "cut", "--save-interval", "64"), cwd=folder,
        env=variables(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    saved = folder / "runs" / "cut" / "checkpoints"
    while process.poll() is None and not (saved.exists() and any(path.name.isdecimal() for path in saved.iterdir())):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "runs" / "cut" / "result.json").exists()
    run(folder, "train", "cartpole", "--resume", "cut")
    assert result(folder, "cut")["params_sha256"] == result(folder, "whole")["params_sha256"]
    run(folder, "evaluate", "whole", "--json", "scores.json")
    assert json.loads((folder / "scores.json").read_text())["mean"]["return"] > 400
    stored = json.loads((folder / "runs" / "whole" / "run.json").read_text())
    assert stored["run"]["algorithm"]["kind"] == "longhaul_a2c:A2C"
    assert stored["modules"]["algorithm"]["version"] == "1.0"


def test_several_seeds_two_hosts_and_actors_train_by_it(folder: Path) -> None:
    """Its module starts JAX as it is imported, on both hosts alike."""
    small = ("--algorithm", "starting:A2C", *SMALL, "--total-steps", "8192")
    run(folder, "train", "cartpole", *small, "--seeds", "4", "--run-name", "seeds")
    run(folder, "launch", "--hosts", "2", "--", "train", "cartpole", *small, "--run-name", "hosts")
    run(folder, "train", "cartpole", *small, "--run-name", "alone")
    run(folder, "train", "cartpole", *small, "--topology", "actors", "--actors", "2", "--run-name", "actors")
    assert len({member["params_sha256"] for member in result(folder, "seeds")["members"]}) == 4  # type: ignore[attr-defined]
    for name in ("hosts", "alone", "actors"):
        assert result(folder, name)["agent_steps"] == 8192
        assert json.loads((folder / "runs" / name / "run.json").read_text())["run"]["algorithm"]["kind"] == (
            "longhaul_a2c:A2C"
        )
