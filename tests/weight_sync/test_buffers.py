"""Memory of images stays within its budget, as the system counts pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PEAK = """
import json, sys
import numpy as np
from longhaul.weight_sync import transports
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver

SIZE, SEND, RECEIVE = 32 << 20, 3, 2
lane, folder = sys.argv[1], sys.argv[2]

def memory(what):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1])

given = {f"layer.{i}": np.ones(SIZE // 32 // 4, np.float32) for i in range(32)}
opened = transports.serve(lane)
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the high-water mark begins anew
with Publisher("run", transports=[opened], budget=SEND * SIZE) as sender, Receiver(
    lambda: transports.connect(opened.address), budget=RECEIVE * SIZE
) as receiver:
    for version in range(6):
        given["layer.0"][0] = version
        assert sender.publish(version, given, patience=60)
        assert receiver.wait(version, 60), receiver.errors
        assert receiver.latest()[1]["layer.0"][0] == version
    peak = memory("VmHWM") - before
    print(json.dumps({"peak": peak, "sender": sender.peak_bytes, "receiver": receiver.peak_bytes, "size": SIZE}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell a process's peak")
@pytest.mark.parametrize("kind", ["shm", pytest.param("tcp", marks=pytest.mark.slow), "folder"])
def test_a_process_takes_no_more_memory_than_it_was_granted(kind: str, tmp_path: Path) -> None:
    """Both sides in one process, as the system counts its pages: the images, and a little for all the rest."""
    where = {"shm": f"shm:{tmp_path}/socket", "tcp": "tcp:127.0.0.1:0", "folder": f"folder:{tmp_path}/versions"}[kind]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, where, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=90
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    granted = found["size"] * (3 + (0 if kind == "shm" else 2))
    assert found["sender"] + found["receiver"] <= granted
    twice = 2 if kind == "shm" else 1  # the receiver has the sender's pages mapped once more
    assert found["size"] < found["peak"] <= twice * granted + (8 << 20)
