"""Runs of learners with a replay: gone on with exactly, on several devices, and what may not change on the way."""

from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from longhaul.algorithms.config import DQNConfig, SACConfig
from longhaul.config import resolve as runs
from longhaul.config.run import Named, Run
from longhaul.runtime.errors import RunError
from longhaul.runtime.settings import replaced
from longhaul.topologies import fused
from longhaul.training import assemble, loop
from longhaul.training.checkpoint.checkpoint import Checkpoints
from tests.helpers.small_runs import begin, checkpoints, make_quick, records, result, resume

LITTLE: dict[str, Any] = {
    "hidden_dim": 8, "num_layers": 1, "batch_size": 16, "gradient_steps": 2, "learning_starts": 64, "replay_size": 256
}  # fmt: skip
LEARNERS = {
    "sac": ("pendulum", replaced(SACConfig(), **LITTLE)),
    "dqn": ("cartpole", replaced(DQNConfig(), **LITTLE, replay_precision="bf16")),
}


def small(name: str, **changes: Any) -> Run:
    """60 updates of 4 worlds in calls of 2, a checkpoint every 6; the replay is full after 16."""
    env, config = LEARNERS[name]
    settings: dict[str, Any] = {
        "algorithm": config, "environment": Named(env), "total_steps": 4 * 4 * 60, "num_envs": 4, "num_steps": 4,
        "seed": 3, "devices": 1, "log_interval": 4, "block": 2, "save_interval": 6, "evaluation_episodes": 2,
    }  # fmt: skip
    return runs.resolve(Run("small", **(settings | changes)))


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "devices"), [("dqn", 2), pytest.param("sac", 1, marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_run_that_was_killed_goes_on_bit_for_bit(
    name: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quick(monkeypatch)
    run = small(name, devices=devices)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    begin(run, whole)
    stepped, calls = fused.fused, []

    def killed(*args: Any, **kwargs: Any) -> Any:
        for out in stepped(*args, **kwargs):
            calls.append(out)
            if len(calls) == 17:  # after update 34, of which 30 are saved
                raise Killed
            yield out

    with monkeypatch.context() as patch:
        patch.setattr(fused, "fused", killed)
        with pytest.raises(Killed):
            begin(run, cut)
    assert max(checkpoints(cut)) == 30
    resume(cut)
    assert records(cut) == records(whole)
    assert result(cut) == result(whole)
    (cut / "result.json").unlink()
    with pytest.raises(RunError, match="num_envs is 8, and this run's replay is laid out for 4"):
        loop.train(small(name, num_envs=8, devices=devices), cut, resumed=True)
    assembly = assemble.assemble(run, lambda _: runs.named(run.environment), ())
    like, last = assembly.start(run.seed, ()), []
    for folder in (whole, cut):
        with closing(Checkpoints(folder / "checkpoints")) as saved:
            found = saved.latest(like)
        assert found is not None
        last.append(jax.device_get(found.progress.state))
    jax.tree.map(np.testing.assert_array_equal, *last)
    ring = last[0].replay.value
    assert ring.reward.shape[0] == devices and np.all(np.any(ring.reward != 0.0, axis=(1, 2)))
