"""Scenarios are the same however many processes make them; and those processes never outlive the one that asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from longhaul import worlds
from longhaul.datasets.log import BadData

SLOW = """
import os, sys, time
from longhaul import worlds

def make(seed, agents, horizon, control):
    with open(os.path.join(sys.argv[1], str(os.getpid())), "w"):
        time.sleep(3600)

if __name__ == "__main__":
    worlds._generate = make
    worlds.generated(0, 64, agents=1, horizon=None, workers=2)
"""


def test_workers_make_what_one_process_makes() -> None:
    by_workers = worlds.generated(3, 17, agents=2, horizon=40, workers=2)
    alone = worlds.generated(3, 17, agents=2, horizon=40, workers=1)
    assert [s.id for s in by_workers] == [s.id for s in alone]
    for one, other in zip(by_workers, alone, strict=True):
        for name in one._fields:
            np.testing.assert_equal(getattr(one, name), getattr(other, name))


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""  # empty: dead, and nobody has asked how
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked at in /proc")
def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    started = tmp_path / "started"
    started.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    process = subprocess.Popen([sys.executable, str(script), str(started)], env=environment)
    while len(list(started.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    workers = [int(path.name) for path in started.iterdir()]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(map(_lives, workers)):
        assert time.monotonic() < deadline, "workers live on"
        time.sleep(0.01)


def test_files_without_a_scenario_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.tfrecord").write_bytes(b"")
    with pytest.raises(BadData) as raised:
        worlds.from_logs([str(tmp_path / "empty.tfrecord")], agents=1, horizon=None)
    assert "\n" not in str(raised.value)
