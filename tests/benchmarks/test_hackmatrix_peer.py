"""The comparison with the other trainer of HackMatrix, with one that does nothing in its place."""

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import hackmatrix_peer

TRAINER = """
import jax, jax.numpy as jnp

class HackMatrixGymnax:
    default_params = None

    def reset(self, key, params):
        return jnp.ones(3), jnp.float32(1.0)

    def step(self, key, state, action, params):
        return state * jnp.ones(3), state, action * 1.0, action == 0, {}

    def get_action_mask(self, state):
        return jnp.arange(28) % 2 == 1

class TrainConfig:
    def __init__(self, **sizes):
        assert sizes == {"num_envs": 8, "num_steps": 128, "total_timesteps": 1024}

def init_runner_state(config, env, key):
    return jnp.zeros(4), 0

def make_train_chunk(config, env, updates):
    names = ("mean_episode_return", "entropy", "approx_kl", "clip_frac")
    return jax.jit(lambda state: (state + 1, {name: state[:updates] for name in names}))
"""
"""What their package looks like from outside."""


@pytest.mark.slow
def test_ours_takes_turns_with_another_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hackmatrix" / "purejaxrl").mkdir(parents=True)
    (tmp_path / "hackmatrix" / "__init__.py").touch()
    (tmp_path / "hackmatrix" / "purejaxrl" / "__init__.py").write_text(TRAINER)
    out, page = tmp_path / "peer.jsonl", tmp_path / "page.md"
    words = ["--trainer", str(tmp_path), "--python", sys.executable, "--commit", "0123456789", "--num-envs", "8"]
    words += ["--json", str(out), "--page", str(page), "--what", "env"]
    monkeypatch.setattr(sys, "argv", ["peer", *words])
    assert hackmatrix_peer.main() == 0
    (record,) = map(json.loads, out.read_text().splitlines())
    other = record["peer"]
    assert (record["name"], record["steps"], other["steps"]) == ("hackmatrix-env", 8 * 32 * 20, 8 * 32)
    assert other["commit"] == "0123456789" and record["config"]["cores"] == len(os.sched_getaffinity(0))
    assert other["observation"] == 32.0, "each step's observation is read"
    assert other["episodes"] == 0, "an action that is not legal was never taken"
    assert min(other["cold_seconds"], other["warm_seconds"], record["cold_seconds"], record["warm_seconds"]) > 0.0
    assert record["peer_cpu_ratio"] > 0.0
    lines = page.read_text().splitlines()
    assert lines[0] == f"<!-- begin: {hackmatrix_peer.TABLE} -->"
    assert lines[3].startswith("| `hackmatrix-env` |") and "Theirs: commit 0123456" in lines[5]


def test_a_folder_without_a_trainer_and_odd_flags_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, line in (
        (["--trainer", str(tmp_path)], "holds no folder hackmatrix"),
        (["--trainer", str(tmp_path / "a"), "--repeats", "4"], "a median of fewer than 5"),
        (["--trainer", str(tmp_path / "a"), "--page", "p.md"], "--page needs --json"),
    ):
        (tmp_path / "a" / "hackmatrix").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(sys, "argv", ["peer", "--python", sys.executable, *words])
        with pytest.raises(SystemExit):
            hackmatrix_peer.main()
        assert line in capsys.readouterr().err
