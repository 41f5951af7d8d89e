"""Checkpoints that are damaged, foreign or torn: named, skipped, and never taken for a fresh start."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from longhaul.training.checkpoint import checkpoint
from longhaul.training.checkpoint.checkpoint import CheckpointError, Checkpoints
from tests.helpers.checkpoints import assert_same, fill, names, restore, step_progress


def test_a_damaged_one_that_stayed_is_passed_over_and_goes(tmp_path: Path) -> None:
    said: list[str] = []
    with closing(Checkpoints(tmp_path, keep=1, every=4, warn=said.append)) as checkpoints:
        for step in (4, 8, 9):
            checkpoints.save(step, {"n": np.int32(step)})
        checkpoints.wait()
        for name in ("8", "9"):
            (tmp_path / name / "manifest.json").write_text("{}")
        restored = checkpoints.latest({"n": np.int32(0)})
        assert restored is not None
        assert restored.step == 4
        assert [line.split()[1] for line in said] == ["9", "8"]
        checkpoints.save(10, {"n": np.int32(10)})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [4, 10]


def test_steps_found_damaged_do_not_push_out_intact_ones(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30)
    for step in ("20", "30"):
        (tmp_path / step / "manifest.json").unlink()
    said: list[str] = []
    with closing(Checkpoints(tmp_path, keep=2, warn=said.append)) as checkpoints:
        found = checkpoints.latest(step_progress(0))
        assert found is not None
        assert (found.step, len(said)) == (10, 2)
        checkpoints.save(15, step_progress(15))
        checkpoints.save(20, step_progress(20), {"step": 20})
    assert names(tmp_path) == ["15", "20"]
    assert restore(tmp_path, said) == (20, {"step": 20})
    assert len(said) == 2


def damages(path: Path, rng: random.Random) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, function) of the ways in which one file is damaged."""
    data = path.read_bytes()
    place, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
    yield "flip", lambda: path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
    yield "shorten", lambda: path.write_bytes(data[: rng.randrange(len(data))])
    yield "lengthen", lambda: path.write_bytes(data + b"\n")
    yield "remove", path.unlink


def test_each_damage_of_each_file_is_named_and_the_step_before_is_used(tmp_path: Path) -> None:
    fill(tmp_path / "sound", 10, 20)
    rng = random.Random(0)
    files = [path.relative_to(tmp_path / "sound") for path in (tmp_path / "sound" / "20").rglob("*") if path.is_file()]
    assert len(files) > 5
    with closing(Checkpoints(tmp_path / "folder")) as checkpoints:
        said: list[str] = []
        checkpoints._warn = said.append
        for file, kind in itertools.product(files, range(4)):
            shutil.rmtree(tmp_path / "folder", ignore_errors=True)
            shutil.copytree(tmp_path / "sound", tmp_path / "folder")
            name, damage = list(damages(tmp_path / "folder" / file, rng))[kind]
            damage()
            said.clear()
            path = tmp_path / "folder" / "20"
            with pytest.raises(checkpoint.Damaged, match=file.name.replace(".", r"\.")):
                checkpoint._verify(path, 20)
            if kind == 0:
                found = checkpoints.latest(step_progress(0))
                assert found is not None
                assert_same(found.progress, step_progress(10))
                assert len(said) == 1, (file, name)
                assert said[0].startswith(f"checkpoint 20 in {path.parent} is damaged")


def test_foreign_files_and_empty_or_renamed_steps_are_damage(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    (tmp_path / "20" / "progress" / "d" / "more").write_bytes(b"")
    (tmp_path / "30").mkdir()
    shutil.copytree(tmp_path / "10", tmp_path / "40")
    (tmp_path / "50").write_text("a file")
    said: list[str] = []
    assert restore(tmp_path, said) == (10, {"step": 10})
    reasons = [line.partition(": ")[2] for line in said]
    assert reasons[1:] == ["manifest.json is that of step 10", "manifest.json is missing", reasons[3]]
    assert reasons[3] == "progress/d/more does not belong to it"
    assert "cannot be read: " in reasons[0]


def test_no_silent_fresh_start_where_all_are_damaged(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    for step in ("10", "20"):
        manifest = tmp_path / step / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float16"))
    with pytest.raises(
        CheckpointError, match=r"all 2 checkpoints in .* are damaged: 20 \(.*\); 10 \(.*\); bring"
    ) as caught:
        restore(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_format_is_no_damage(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    manifest = tmp_path / "20" / "manifest.json"
    contents = json.loads(manifest.read_bytes())["contents"]
    manifest.write_bytes(checkpoint._render({**contents, "format": 99}))
    with pytest.raises(ValueError, match="is of format 99, and this version reads 1: use the version"):
        restore(tmp_path)
