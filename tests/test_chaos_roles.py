"""Central inference under a supervisor is hit in all its roles, twenty times, and ends where it would have: with the
target's return, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from longhaul import launch
from longhaul.central.grpc_lane import PATH
from tests import faults
from tests.wire_fuzz import malformed, observe

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")

FLAGS = shlex.split(
    "cartpole --env numpy/longhaul.envs.batched:cartpole --topology central --lane grpc --actors 2 --staleness 1 "
    "--num-envs 32 --num-steps 32 --num-minibatches 4 --update-epochs 4 --hidden-dim 32 --num-layers 2 --lr 3e-3 "
    "--seed 3 --log-interval 8 --evaluation-episodes 16 --save-interval 8"
)

UPDATES, TARGET = 240, 150.0
"""Of 1,024 steps each; the mean return of the evaluation. Who acts by chance has 22."""

MARK = "LONGHAUL_CHAOS"
"""A variable by which all processes of a test are known."""


def marked(mark: str, word: str) -> Iterator[int]:
    """The processes of a test with this word on their command line."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables, words = (place / "environ").read_bytes(), (place / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in variables.split(b"\0") and word.encode() in words:
            yield int(place.name)


def listens(process: int) -> str | None:
    """The address at which a process listens for streams."""
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                return f"127.0.0.1:{int(fields[1].rpartition(':')[2], 16)}"
    return None


async def garbage(address: str, seed: int) -> None:
    """Twenty streams that say what they must not."""
    import grpc

    rng = np.random.default_rng(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(20):
            call = channel.stream_stream(PATH)(timeout=20.0)
            try:
                for _ in range(4):
                    await call.write(malformed(rng, *observe(rng, int(rng.integers(4)), 1, 0)))
                while (await call.read()) is not grpc.aio.EOF:
                    pass
            except (grpc.RpcError, asyncio.InvalidStateError):
                continue


class Storm:
    """What befalls a run, and what is seen of its learner meanwhile."""

    def __init__(self, folder: Path, mark: str, seed: int) -> None:
        self.folder, self.mark, self.rng = folder, mark, random.Random(seed)
        self.descriptors: dict[int, list[int]] = {}  # of each learner, after each hit

    def hit(self, what: str) -> None:
        actors: list[int] = []

        def there() -> bool:
            actors[:] = sorted(marked(self.mark, "longhaul.central.client"))
            return bool(actors) and 0 in faults.pids("hit")

        faults.wait_for(there)
        learner = faults.pids("hit")[0]
        victim = learner if what.endswith("server") else self.rng.choice(actors)
        try:
            if what == "garbage":
                address = listens(learner)
                assert address is not None
                asyncio.run(garbage(address, self.rng.randrange(2**31)))
            elif what.startswith("kill"):
                os.kill(victim, signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGSTOP)
                if not what.startswith("hang"):  # who hangs is ended by the server
                    time.sleep(self.rng.uniform(0.3, 2.0))
                    os.kill(victim, signal.SIGCONT)
            if not what.endswith("server"):
                self.descriptors.setdefault(learner, []).append(len(list(Path(f"/proc/{learner}/fd").iterdir())))
        except (ProcessLookupError, FileNotFoundError):
            return

    def wait(self, launcher: subprocess.Popen[bytes]) -> None:
        """For a new save, so that hits are spread over the run."""
        wanted = launch.newest_step(self.folder) + 8
        faults.wait_for(lambda: launch.newest_step(self.folder) >= wanted or launcher.poll() is not None, 900.0)


@pytest.mark.slow
def test_twenty_hits_in_all_roles_end_at_the_target_with_nothing_left(tmp_path: Path) -> None:
    hits = ["kill actor"] * 6 + ["pause actor"] * 4 + ["garbage"] * 4 + ["hang actor"] * 2 + ["pause server"] * 2
    hits += ["kill server"] * 2
    mark, storm = str(tmp_path), Storm(tmp_path / "hit", str(tmp_path), seed=1)
    storm.rng.shuffle(hits)
    assert len(hits) == 20
    shared = set(os.listdir("/dev/shm"))
    words = ["train", *FLAGS, "--total-steps", str(1024 * UPDATES), "--runs-dir", str(tmp_path), "--run-name", "hit"]
    variables = {MARK: mark, "LONGHAUL_CACHE": str(tmp_path / "cache")}
    own = ("--hosts", "1", "--devices-per-host", "1", "--restarts", "4")
    with faults.launched(words, *own, variables=variables, log=tmp_path / "log") as launcher:
        for what in hits:
            storm.wait(launcher)
            assert launcher.poll() is None, f"it ended before {what}: {(tmp_path / 'log').read_text()}"
            with open(tmp_path / "log", "a") as log:
                log.write(f"--- {what} after checkpoint {launch.newest_step(storm.folder)}\n")
            storm.hit(what)
        assert launcher.wait(timeout=1800) == 0, (tmp_path / "log").read_text()
    found = json.loads((storm.folder / "result.json").read_text())
    assert found["status"] == "done"
    assert found["env_steps"] == 1024 * UPDATES, "each update counts once"
    assert found["evaluation"]["trained"]["return"] >= TARGET
    faults.wait_for(lambda: not list(marked(mark, "")), 20.0)
    assert set(os.listdir("/dev/shm")) <= shared
    for counts in storm.descriptors.values():  # saves and streams under way have some for a while
        assert min(counts[-4:]) <= min(counts[:4]) + 2, f"descriptors of a learner: {counts}"
