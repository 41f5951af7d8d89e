"""Removal takes links and files as folders; names of checkpoints are read strictly."""

from __future__ import annotations

from pathlib import Path

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
