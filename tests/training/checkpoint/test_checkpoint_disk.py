"""Saving that is stopped: a full disk, a refused write, any call that fails, kill -9; an intact step stays."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longhaul.training.checkpoint import checkpoint
from longhaul.training.checkpoint.checkpoint import CheckpointError, Checkpoints
from tests.helpers.checkpoints import fill, full, names, restore, step_progress


def test_what_is_to_be_done_before_fails_the_save(tmp_path: Path) -> None:
    def no_room() -> None:
        raise OSError(errno.ENOSPC, "")

    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, {"n": np.int32(1)})
        with pytest.raises(CheckpointError, match=r"checkpoint 2 .*the disk is full; those before it are intact"):
            checkpoints.save(2, {"n": np.int32(2)}, before=no_room)
        checkpoints.save(3, {"n": np.int32(3)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_old_steps_go_only_after_a_newer_one_is_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1, keep=1)
    with closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "_digest", lambda *_, **__: full())
            checkpoints.save(2, step_progress(2))
            with pytest.raises(CheckpointError):
                checkpoints.wait()
        assert names(tmp_path) == ["1"]
        checkpoints.save(3, step_progress(3))
    assert names(tmp_path) == ["3"]


def fail_like_tensorstore(*_: Any) -> None:
    """Its words, when a file system of 3 MB was full."""
    text = 'RESOURCE_EXHAUSTED: Error writing "l8/0": Failed to write 5197824 bytes to file 14: No space left on device'
    raise ValueError(text + " [os_error_code='28']")


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("os.fsync", full),
        ("os.rename", full),
        ("pathlib.Path.mkdir", full),
        ("orbax.checkpoint.StandardCheckpointer.save", fail_like_tensorstore),
        ("orbax.checkpoint.StandardCheckpointer.wait_until_finished", fail_like_tensorstore),
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=5000)),
    ],
)
def test_a_full_disk_is_one_clear_line_and_leaves_the_steps_before(
    tmp_path: Path, function: str, fault: Callable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    fill(tmp_path, 10)
    with closing(Checkpoints(tmp_path)) as checkpoints:

        def save() -> None:
            checkpoints.save(20, step_progress(20), {"step": 20})
            checkpoints.wait()

        with monkeypatch.context() as patch:
            patch.setattr(function, fault)
            with pytest.raises(CheckpointError) as caught:
                save()
        start = rf"cannot save checkpoint 20 in .* \({4012 + 2**20} bytes wanted, \d+ free\)"
        pattern = f"^{start}: the disk is full; those before it are intact: make room and resume$"
        assert caught.match(pattern)
        assert names(tmp_path) == ["10"]
        assert restore(tmp_path) == (10, {"step": 10})
        save()
    assert restore(tmp_path) == (20, {"step": 20})
    assert capfd.readouterr().err == ""


def test_a_refused_write_inside_tensorstore_is_one_clear_line(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    fill(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            # One array: where several are being written, the others would complain of Orbax's closed event loop.
            checkpoints.save(20, np.random.default_rng(0).normal(size=1_000_000))
            with pytest.raises(CheckpointError, match=r"cannot save checkpoint 20 .*File too large.*see to the folder"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names(tmp_path) == ["10"]
        checkpoints.save(30, step_progress(30), {"step": 30})
    assert restore(tmp_path) == (30, {"step": 30})
    assert capfd.readouterr().err == ""


def test_stopping_at_any_call_to_the_disk_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only step is saved again; each call that changes the disk fails for good, in turn, as if all ended there."""
    fill(tmp_path / "before", 20)
    newest = []
    for stop in itertools.count():
        folder = tmp_path / str(stop)
        shutil.copytree(tmp_path / "before", folder)
        count = itertools.count()
        with monkeypatch.context() as patch:
            for name in ("rename", "fsync", "unlink", "rmdir"):
                whole = getattr(os, name)

                def limited(*args: Any, whole=whole, count=count, stop=stop, **kwargs: Any) -> Any:
                    if next(count) >= stop:
                        raise OSError(errno.EIO, "stopped")
                    return whole(*args, **kwargs)

                patch.setattr(os, name, limited)
            checkpoints = Checkpoints(folder, keep=1, warn=lambda line: None)
            checkpoints.save(20, step_progress(20), {"step": "again"})
            with suppress(CheckpointError):
                checkpoints.close()
        newest.append(restore(folder))
        if next(count) <= stop:
            break
    wanted: list = [(20, {"step": 20}), (20, {"step": "again"})]
    assert [found for found, _ in itertools.groupby(newest)] == wanted
    assert names(folder) == ["20.1"]


SAVING = """
import sys
import time
from longhaul.training.checkpoint.checkpoint import Checkpoints
from tests.helpers.checkpoints import step_progress
checkpoints = Checkpoints(sys.argv[1], keep=2)
found = checkpoints.latest(step_progress(0, 300_000))
first = 1 if found is None else found.step + 1
for step in range(first, first + 10_000):
    checkpoints.save(step, step_progress(step, 300_000), {"step": step})
    print(step, flush=True)
"""


def test_kill_9_at_any_moment_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    rng, before = random.Random(1), 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SAVING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process, process.stdout:
            begun = [int(process.stdout.readline()) for _ in range(rng.randrange(2, 6))]
            time.sleep(rng.random() * 0.1)
            process.kill()
            begun += [int(line) for line in process.stdout]
        assert begun[0] == before + 1
        said: list[str] = []
        found = restore(tmp_path, said, 300_000)
        assert found is not None
        # The save before the last begun one was waited for; the last may be whole, and so may one begun unheard.
        assert begun[-1] - 1 <= found[0] <= begun[-1] + 1
        assert said == []
        before = found[0]
