"""An environment in a folder outside the package, by the command line: train, kill, resume, evaluate, seeds, hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]

JAX_ENVIRONMENT = """
import jax, jax.numpy as jnp
from longhaul.types import Discrete, Spec, transition

TABLE = jnp.eye(7)  # starts JAX as the module is imported

class Corridor:
    spec = Spec(jax.ShapeDtypeStruct((7,), jnp.float32), Discrete(2), truncation_interval=30, max_steps=30)

    def reset(self, key):
        state = jax.random.randint(key, (), 0, 3), 0
        return state, TABLE[state[0]]

    def step(self, key, state, action):
        place, steps = jnp.clip(state[0] + 2 * action - 1, 0, 6), state[1] + 1
        won = place == 6
        return (place, steps), transition(TABLE[place], jnp.where(won, 1.0, -0.01), won, (steps >= 30) & ~won)
"""

GYMNASIUM_ENVIRONMENT = """
import gymnasium as gym
import numpy as np

class Corridor(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (7,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(0, 3)), 0
        return np.eye(7, dtype=np.float32)[self.place], {}

    def step(self, action):
        self.place, self.steps = min(max(self.place + 2 * int(action) - 1, 0), 6), self.steps + 1
        won = self.place == 6
        seen = np.eye(7, dtype=np.float32)[self.place]
        return seen, 1.0 if won else -0.01, won, self.steps >= 30, {}
"""

MODULES = {"jax": JAX_ENVIRONMENT, "gymnasium": GYMNASIUM_ENVIRONMENT}
SMALL = {"jax": ("--total-steps", "200000"), "gymnasium": ("--total-steps", "40000", "--staleness", "0")}


@pytest.fixture(params=MODULES)
def outside(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "my_env.py").write_text(MODULES[request.param])
    (tmp_path / "kind").write_text(request.param)
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "longhaul", *words]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY)}


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        command(*words), cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def digest(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["params_sha256"])


def test_it_trains_is_killed_resumes_bit_for_bit_and_is_evaluated(outside: Path) -> None:
    flags = ("--env", "my_env:Corridor", *SMALL[(outside / "kind").read_text()])
    run(outside, "train", "ppo", *flags, "--run-name", "whole")
    process = subprocess.Popen(
        command("train", "ppo", *flags, "--run-name", "cut", "--save-interval", "2"), cwd=outside, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    saved = outside / "runs" / "cut" / "checkpoints"
    while process.poll() is None and not (saved.exists() and any(path.name.isdecimal() for path in saved.iterdir())):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (outside / "runs" / "cut" / "result.json").exists()
    run(outside, "train", "ppo", "--resume", "cut")
    assert digest(outside / "runs" / "cut") == digest(outside / "runs" / "whole")
    run(outside, "evaluate", "whole", "--json", "scores.json")
    assert json.loads((outside / "scores.json").read_text())["mean"]["return"] > 0.9


def test_several_seeds_and_two_hosts_train_in_it(outside: Path) -> None:
    small = ("--env", "my_env:Corridor", "--num-envs", "16", "--total-steps", "8192")
    run(outside, "train", "ppo", *small, "--seeds", "4", "--run-name", "seeds")
    run(outside, "launch", "--hosts", "2", "--", "train", "ppo", *small, "--run-name", "hosts")
    assert digest(outside / "runs" / "hosts") and digest(outside / "runs" / "seeds")
    records = (outside / "runs" / "hosts" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["agent_steps"] == 8192
