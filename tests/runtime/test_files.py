"""Removal takes links and files as folders; names of checkpoints and numbers are read strictly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longhaul.runtime import files


def test_a_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    (target / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").touch()
    for name in ("link", "file", "absent"):
        files.remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (target / "inner").is_dir()
    files.remove(target)
    assert list(tmp_path.iterdir()) == []


def test_steps_are_those_of_folders_with_a_checkpoints_name(tmp_path: Path) -> None:
    for name in ("20", "100", "100.1", "7.partial", "20-old", "²", "5.x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "500").touch()
    assert files.checkpoint_steps(tmp_path) == [20, 100]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2.0), np.int64(2)])
def test_finite_numbers_of_python_and_numpy_are_floats(value: object) -> None:
    number = files.finite_number(value)
    assert type(number) is float
    assert number == 2.0


@pytest.mark.parametrize("value", [None, True, "2", [2], float("nan"), np.float32("inf"), 10**400, 2j])
def test_anything_else_is_no_finite_number(value: object) -> None:
    assert files.finite_number(value) is None
