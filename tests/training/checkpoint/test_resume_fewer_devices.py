"""A run that goes on where devices are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from longhaul.cli import flags, run_flags, train
from longhaul.config import recipes
from longhaul.runtime import heartbeat
from longhaul.runtime.devices import MeshShape
from longhaul.runtime.errors import RunError
from longhaul.training import run_dir
from longhaul.training.checkpoint import resume
from tests.helpers.small_runs import small


@pytest.mark.parametrize(
    ("devices", "there", "envs", "left"),
    [
        (8, [8], 64, 8),
        (8, [16], 64, 8),  # no more than it had
        (8, [7], 64, 4),  # 64 worlds are shared evenly by 4
        (8, [7], 70, 7),
        (8, [4, 3], 60, 6),
        (8, [4, 3], 64, 4),
        (8, [1], 63, 1),
    ],
)
def test_as_many_as_are_there_and_share_the_worlds(devices: int, there: list[int], envs: int, left: int) -> None:
    assert resume.fewer(devices, there, envs) == left


@pytest.mark.parametrize(
    ("shards", "model", "there", "envs", "left"),
    [(4, 2, [8], 64, 4), (4, 2, [7], 64, 2), (4, 2, [7], 66, 3), (2, 4, [7], 64, 1), (4, 2, [3, 4], 64, 2)],
)
def test_each_shard_keeps_all_parts_of_the_parameters(
    shards: int, model: int, there: list[int], envs: int, left: int
) -> None:
    assert resume.fewer(shards, there, envs, model) == left
    with pytest.raises(RunError, match="of 8 devices 3 are there, which can't share 64 worlds and 4 parts"):
        resume.fewer(2, [3], 64, 4)


def test_none_left_is_an_error() -> None:
    with pytest.raises(RunError, match="of 8 devices 2 are there, which can't share 7 worlds"):
        resume.fewer(8, [1, 1], 7)


def test_under_a_launcher_alone_it_goes_on_with_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four devices are there (tests/conftest.py), and no CPU is said to be."""
    run = small(num_envs=8, devices=8)
    run_dir.save_run(tmp_path, run, {})
    recipe = recipes.recipe("cartpole")

    def fitting(*words: str) -> flags.Parsed:
        parsed = flags.parse("train", "", run_flags.table(recipe), words)
        return train._fitting(parsed, tmp_path)

    monkeypatch.setattr(train, "on_cpu", lambda: False)
    assert "mesh" not in fitting().given
    monkeypatch.setenv(heartbeat.DESCRIPTOR, "9")
    assert fitting().values["mesh"] == MeshShape(4)
    assert "mesh" in fitting().given
    assert fitting("--mesh", "data=2").values["mesh"] == MeshShape(2)
    assert fitting("--mesh", "data=4,model=2").values["mesh"] == MeshShape(2, 2)
    assert "4 of 8 devices are there; goes on with data=4" in capfd.readouterr().err
    monkeypatch.setattr(train, "on_cpu", lambda: True)  # whose devices are as many as one asks for
    assert "mesh" not in fitting().given
