"""Child processes: what they read and print, how they end, and that none outlives its parent."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from longhaul.runtime.launch.process import DROP, PIPE, Process, Restarts
from tests.helpers.alive import lives

ECHO = [sys.executable, "-c", "import sys; data = sys.stdin.read(); print(data); print(len(data), file=sys.stderr)"]


def test_a_payload_is_all_that_it_reads_and_all_its_lines_are_taken() -> None:
    out: list[bytes] = []
    error: list[bytes] = []
    before = len(os.listdir("/proc/self/fd"))
    process = Process(ECHO, payload=b"one\ntwo", out=out.append, error=error.append)
    assert process.wait(30.0)
    process.end()
    assert (out, error) == ([b"one\n", b"two\n"], [b"7\n"])
    assert process.ended() == "it ended with code 0"
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_is_killed_when_it_takes_too_long_and_may_be_talked_to() -> None:
    program = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"
    process = Process([sys.executable, "-c", program], talks=True, out=PIPE)
    assert process.out is not None
    assert process.say(b"abc\n")
    assert process.out.readline() == b"cba\n"
    process.end(within=0.05)
    assert process.ended() == "it was ended by SIGKILL"


PARENT = """
import sys, time
from longhaul.runtime.launch.process import Process
child = "from longhaul.runtime.launch.process import end_with_parent as tie; import time; tie(); "
child += "open('tied', 'w').close(); time.sleep(600)"
print(Process([sys.executable, "-c", child]).id, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process runs no thread that could end it")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_ends_with_a_parent_that_is_killed(stopped: bool, tmp_path: Path) -> None:
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    parent = Process([sys.executable, "-c", PARENT], out=PIPE, error=DROP, variables=variables, folder=str(tmp_path))
    assert parent.out is not None
    child = int(parent.out.readline())
    if stopped:
        while not (tmp_path / "tied").exists():
            time.sleep(0.02)
        os.kill(child, signal.SIGSTOP)
    parent.end()
    deadline = time.monotonic() + 50.0
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(child)


IMPORTING = """
import sys, time
from longhaul.topologies.actor_process import process
print(process("slow_to_import", b"").id, flush=True)
time.sleep(60)
"""


def test_an_actor_ends_with_its_learner_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("open('begun', 'w').close()\nimport time\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    variables = os.environ | {"PYTHONPATH": path}
    parent = Process([sys.executable, "-c", IMPORTING], out=PIPE, error=DROP, variables=variables, folder=str(tmp_path))
    assert parent.out is not None
    child = int(parent.out.readline())
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    parent.end()
    deadline = time.monotonic() + 50.0
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(child)


def test_pauses_double_up_to_a_bound_and_progress_starts_them_again() -> None:
    history, pauses = Restarts(allowed=3, first=1.0, most=3.0), []
    for _ in range(3):
        history = history.failed(progress=False)
        pauses.append(history.pause)
    assert pauses == [1.0, 2.0, 3.0]
    assert not history.exhausted
    assert history.failed(progress=False).exhausted
    assert history.failed(progress=True).pause == 1.0
