"""Actors, and central inference, under a supervisor are hit in all their roles, twenty times, and end where they would
have: with the target's return, and nothing left behind. Nor do they grow while they learn."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil
import pytest

from longhaul.config.run import Named, Run
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.launch import supervisor
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.inference_server import learner as central
from longhaul.topologies.inference_server.config import ServerConfig
from longhaul.topologies.inference_server.grpc_transport import PATH
from longhaul.training import actor_learner, inference_server
from longhaul.training.assemble import assemble
from longhaul.training.data import Feeding, feed
from tests.helpers import launch_faults
from tests.helpers.malformed_frames import malformed, observe
from tests.helpers.small_runs import result, small

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")

POLES = "numpy/longhaul.envs.host.numpy_cartpole:cartpole"

FLAGS = shlex.split(
    f"cartpole --env {POLES} --actors 2 --staleness 1 "
    "--num-envs 32 --num-steps 32 --num-minibatches 4 --update-epochs 4 --hidden-dim 32 --num-layers 2 --lr 3e-3 "
    "--seed 3 --log-interval 8 --evaluation-episodes 16 --save-interval 8"
)

UPDATES, TARGET = 240, 150.0
"""Of 1,024 steps each; the mean return of the evaluation. Who acts by chance has 22."""


class Scene(NamedTuple):
    """A topology, by what its actors are known, and what befalls it."""

    flags: tuple[str, ...]
    actor: str  # a word of their command line
    hits: dict[str, int]


SCENES = {
    "actors": Scene(
        ("--topology", "actors", "--pin"),
        "longhaul.topologies.actor_learner.actor",
        {"kill actor": 8, "pause actor": 4, "hang actor": 3, "pause server": 2, "kill server": 3},
    ),
    "central": Scene(
        ("--topology", "central", "--lane", "grpc"),
        "longhaul.topologies.inference_server.actor",
        {"kill actor": 6, "pause actor": 4, "garbage": 4, "hang actor": 2, "pause server": 2, "kill server": 2},
    ),
}
"""The server is the process that learns."""

MARK = "LONGHAUL_CHAOS"
"""A variable by which all processes of a test are known."""


def marked(mark: str, word: str) -> Iterator[int]:
    """The processes of a test with this word on their command line."""
    for process, words, variables in launch_faults.processes():
        if variables.get(MARK) == mark and any(word in each for each in words):
            yield process


def listens(process: int) -> str | None:
    """The address at which a process listens for streams."""
    sockets = psutil.Process(process).net_connections("inet")
    return next((f"127.0.0.1:{each.laddr.port}" for each in sockets if each.status == psutil.CONN_LISTEN), None)


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

    def __init__(self, folder: Path, mark: str, actor: str, seed: int) -> None:
        self.folder, self.mark, self.actor, self.rng = folder, mark, actor, random.Random(seed)
        self.descriptors: dict[int, list[int]] = {}  # of each learner, after each hit

    def hit(self, what: str) -> None:
        actors: list[int] = []

        def there() -> bool:
            actors[:] = sorted(marked(self.mark, self.actor))
            return bool(actors) and 0 in launch_faults.pids("hit")

        launch_faults.wait_for(there)
        learner = launch_faults.pids("hit")[0]
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
                self.descriptors.setdefault(learner, []).append(psutil.Process(learner).num_fds())
        except (ProcessLookupError, psutil.NoSuchProcess):
            return

    def wait(self, launcher: subprocess.Popen[bytes]) -> None:
        """For a new save, so that hits are spread over the run."""
        wanted = supervisor.newest_step(self.folder) + 8
        launch_faults.wait_for(
            lambda: supervisor.newest_step(self.folder) >= wanted or launcher.poll() is not None, 900.0
        )


def segments() -> set[str]:
    """Shared memory that has a name; semaphores are not ours."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def train(folder: Path, flags: tuple[str, ...]) -> list[str]:
    words = ["train", *FLAGS, *flags, "--total-steps", str(1024 * UPDATES)]
    return [*words, "--runs-dir", str(folder.parent), "--run-name", folder.name]


@pytest.mark.slow
@pytest.mark.parametrize("topology", SCENES)
def test_twenty_hits_in_all_roles_end_at_the_target_with_nothing_left(topology: str, tmp_path: Path) -> None:
    """By `actors`, whose versions are pinned, with the very parameters of a run that nothing befell."""
    scene = SCENES[topology]
    hits = [what for what, count in scene.hits.items() for _ in range(count)]
    mark, storm = str(tmp_path), Storm(tmp_path / "hit", str(tmp_path), scene.actor, seed=1)
    storm.rng.shuffle(hits)
    assert len(hits) == 20
    shared = segments()
    variables = {MARK: mark, "LONGHAUL_CACHE": str(tmp_path / "cache")}
    own = ("--hosts", "1", "--devices-per-host", "1", "--restarts", "4")
    log = tmp_path / "log"
    with launch_faults.launched(train(storm.folder, scene.flags), *own, variables=variables, log=log) as launcher:
        for what in hits:
            storm.wait(launcher)
            assert launcher.poll() is None, f"it ended before {what}: {log.read_text()}"
            with open(log, "a") as file:
                file.write(f"--- {what} after checkpoint {supervisor.newest_step(storm.folder)}\n")
            storm.hit(what)
        assert launcher.wait(timeout=1800) == 0, log.read_text()
    found = result(storm.folder)
    assert found["status"] == "done"
    assert found["env_steps"] == 1024 * UPDATES, "each update counts once"
    assert found["evaluation"]["trained"]["return"] >= TARGET
    launch_faults.wait_for(lambda: not list(marked(mark, "")), 20.0)
    assert segments() <= shared
    for counts in storm.descriptors.values():  # saves and streams under way have some for a while
        assert min(counts[-4:]) <= min(counts[:4]) + 2, f"descriptors of a learner: {counts}"
    if topology == "actors":
        with launch_faults.launched(
            train(tmp_path / "calm", scene.flags), *own, variables=variables, log=log
        ) as launcher:
            assert launcher.wait(timeout=1800) == 0, log.read_text()
        assert found["params_sha256"] == result(tmp_path / "calm")["params_sha256"]


# ------------------------------------------------------------------------------------------------------------- growth

WORLDS, STEPS = 512, 64
"""A rollout of so many has 1.1 MB: who kept each one would have 41 MB more at the end."""

WARM, TIMES, MOST = 12, 4, 8.0
"""Updates until memory has its size; so many times as many are made; MB that it may have grown by then."""


def opened(run: Run, folder: Path, closed: ExitStack) -> tuple[Iterator[Any], Callable[[], list[Any]]]:
    """A run's updates, and its actors' processes."""
    prepare_devices(1, run.threads, inline=True)
    source = feed(run)
    context = Feeding(source).now.context
    assembly = assemble(run, source.within, context)
    progress = assembly.start(run.seed, context)
    if run.topology == "actors":
        made = actor_learner.opened(
            run, folder, assembly, actor_learner.prepare(run, assembly, context, progress), progress, closed
        )
        return made.calls, made.processes
    prepared = inference_server.prepare(run, assembly, context, progress)
    server, processes = inference_server.opened(run, prepared.serving, 0, closed, lambda line: None)
    device = inference_server.placed(run, assembly)
    policy = central.local(jax.jit(assembly.algorithm.policy)(progress.state), device)
    calls = central.central(prepared.update, server, progress, policy, device, updates=assembly.updates)
    return calls, processes


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "lane"), [("actors", "shm"), ("central", "shm"), ("central", "grpc")])
def test_nobody_grows_while_they_learn(topology: str, lane: str, tmp_path: Path) -> None:
    """Neither who learns, or serves, nor an actor."""
    given = {"acting": ActorConfig(2, staleness=1), "central": ServerConfig(lane)}
    sizes_of = {"num_envs": WORLDS, "num_steps": STEPS, "total_steps": WORLDS * STEPS * WARM * TIMES}
    run = small(environment=Named(POLES), topology=topology, **sizes_of, **given)
    sizes: list[list[float]] = []
    with ExitStack() as closed:
        updates, processes = opened(run, tmp_path, closed)
        for update, _ in enumerate(updates, 1):
            if update % WARM == 0:
                gc.collect()
                sizes.append([psutil.Process(p).memory_info().rss / 2**20 for p in (os.getpid(), *processes())])
    assert len(sizes) == TIMES
    grown = [last - first for first, last in zip(sizes[0], sizes[-1], strict=True)]
    assert max(grown) < MOST, f"MB of the learner and its actors: {sizes}"
