"""Processes on the nodes of a Ray cluster: where they are placed, and that they fare as those of one machine do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longhaul.cli import launch
from longhaul.cli.flags import FlagError
from longhaul.runtime import process_group
from longhaul.runtime.launch import ray as cluster
from longhaul.runtime.launch import ray_cluster, supervisor
from longhaul.runtime.launch.ray import Layout, Node, Wanted
from longhaul.runtime.process_group import Hosts, HostsError
from longhaul.training import loop
from tests.cli.test_launch import PROCESS, assert_gone, wait_for
from tests.end_to_end.test_launch_faults import undisturbed, words
from tests.helpers import launch_faults
from tests.helpers.small_runs import records, result

ROOT = Path(__file__).resolve().parents[3]


def nodes_of(*cores: int, gpus: tuple[int, ...] = ()) -> list[Node]:
    return [Node(f"n{i}", n, gpus[i] if gpus else 0) for i, n in enumerate(cores)]


# ------------------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(
    ("nodes", "number", "place", "each"),
    [
        (nodes_of(8, 8), 2, "strict", 8),
        (nodes_of(8, 4), 2, "strict", 4),  # the smallest that has one
        (nodes_of(8, 4, 2), 2, "strict", 4),
        (nodes_of(0, 8), 2, "spread", 4),
        (nodes_of(8, 4), 3, "pack", 4),
        (nodes_of(1), 2, "strict", 1),
        (nodes_of(16, 16, gpus=(8, 8)), 2, "strict", 8),
        (nodes_of(16, 16, gpus=(8, 8)), 4, "spread", 4),
        ([], 2, "strict", 1),
    ],
)
def test_a_process_has_all_devices_of_its_node_or_its_share(
    nodes: list[Node], number: int, place: str, each: int
) -> None:
    assert cluster.share(nodes, number, strict=place == "strict") == each


STRICT, SPREAD = "STRICT_SPREAD", "SPREAD"


@pytest.mark.parametrize(
    ("nodes", "number", "fewest", "place", "devices", "found"),
    [
        (nodes_of(4, 4), 2, 2, "strict", 4, Layout(2, 4, {"CPU": 4.0}, STRICT)),
        (nodes_of(4, 2), 2, 2, "strict", 4, None),
        (nodes_of(8), 2, 2, "strict", 4, None),
        (nodes_of(8), 2, 2, "spread", 4, Layout(2, 4, {"CPU": 4.0}, SPREAD)),
        (nodes_of(8), 2, 2, "pack", 4, Layout(2, 4, {"CPU": 4.0}, "PACK")),
        (nodes_of(8, 8, 8), 2, 2, "strict", 4, Layout(2, 4, {"CPU": 4.0}, STRICT)),
        (nodes_of(1), 2, 1, "strict", 1, Layout(1, 1, {"CPU": 1.0}, STRICT)),
        # three of 4 can't share 4 x 3 devices, and two of 3 can't share 3 x 1
        (nodes_of(3, 3, 3), 4, 1, "strict", 3, Layout(3, 3, {"CPU": 3.0}, STRICT)),
        (nodes_of(1, 1), 3, 1, "strict", 1, Layout(1, 1, {"CPU": 1.0}, STRICT)),
        (nodes_of(1, 1), 3, 2, "strict", 1, None),
        # of GPUs a run takes as many as share its worlds
        (nodes_of(9, 9, gpus=(8, 8)), 3, 2, "strict", 8, Layout(2, 8, {"CPU": 1.0, "GPU": 8.0}, STRICT)),
        (nodes_of(9, 1, gpus=(8, 0)), 2, 2, "strict", 1, None),  # a node without GPUs is none
    ],
)
def test_as_many_as_there_is_room_for(
    nodes: list[Node], number: int, fewest: int, place: str, devices: int, found: Layout | None
) -> None:
    assert cluster.layout(nodes, Wanted(number, fewest, devices, place, 0.0), devices) == found


def test_processes_find_their_place_in_the_variables_of_the_launcher() -> None:
    """And what of the launcher's variables its processes need, no other."""
    given = {"JAX_PLATFORMS": "cpu", "LONGHAUL_CACHE": "off", "HOME": "/home/a", "WANDB_API_KEY": "secret"}
    made = cluster.variables(3, 4, "10.0.0.7:4567", given)
    told_by = f"{process_group.COORDINATOR}, {process_group.INDEX}, {process_group.COUNT}"
    assert [process_group.find(each) for each in made] == [Hosts(i, 3, "10.0.0.7:4567", told_by) for i in range(3)]
    ours = {process_group.DEVICES, process_group.COORDINATOR, process_group.INDEX, process_group.COUNT}
    assert made[1].keys() == {"JAX_PLATFORMS", "LONGHAUL_CACHE"} | ours
    assert made[1][process_group.DEVICES] == "4"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--address auto", "--address can be given with --on ray only"),
        ("--on ray --hosts 2 --fewest 3", "--fewest is 3; it must be at most --hosts, 2"),
        ("--on ray --fewest 0", "--fewest is 0; it must be at least 1"),
        ("--on ray --patience -1", "--patience is -1"),
        ("--on ray --place here", "--place"),
    ],
)
def test_words_that_mean_nothing_are_refused(flags: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        launch.launch([*flags.split(), "--", "train", "cartpole"])


# --------------------------------------------------------------------------------------------------------- on a cluster

ray = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes by /proc")

LAUNCH = """
import sys
from longhaul.runtime.launch import local as processes
if sys.argv[1]:
    processes.PROGRAM = (sys.executable, "-c", sys.argv[1])
from longhaul.cli import main as cli
from longhaul.runtime.launch import supervisor
if sys.argv[1]:
    supervisor.PAUSES = (0.01, 0.02)
    supervisor.resume_command = lambda command, folder: [*command, "--resume", str(folder)]
sys.exit(cli.main(["launch", *sys.argv[2:]]))
"""


@contextmanager
def launched(log: Path, program: str, *given: str) -> Iterator[subprocess.Popen[bytes]]:
    """`longhaul launch`, of `program` instead of Longhaul where there is one."""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    with open(log, "ab") as file:
        command = [sys.executable, "-c", LAUNCH, program, *given]
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


DUMMY = PROCESS.replace("sys.argv[1]), sys.argv[2:]", "sys.argv[2]), sys.argv[3:]")
"""The dummies of tests/cli/test_launch.py, behind the word "train"."""


@pytest.mark.slow
@ray
def test_dummies_end_recover_and_listen_as_on_one_machine(tmp_path: Path) -> None:
    """Two share a node of two cores. Output is passed on, a death is named, all start again, a signal comes."""
    pytest.importorskip("ray")
    from tests.helpers.ray_nodes import nodes

    with nodes(2) as there:
        own = ["--on", "ray", "--address", there.address, "--place", "pack", "--restarts", "1", "--hosts", "2", "--"]
        codes = {"end 0 0": 0, "end 75 75": 75, "end 2 1": 2, "recover": 0}
        for mode, code in codes.items():
            folder = tmp_path / mode.replace(" ", "-")
            folder.mkdir()
            with launched(folder / "log", DUMMY, *own, "train", str(folder), *mode.split()) as launcher:
                assert launcher.wait(600) == code, (folder / "log").read_text()
            said = (folder / "log").read_text()
            assert said.count(f"{folder}\n") == 1 and "process 0 of 2\n" in said
            assert "[0] on stderr" in said and "[1] on stderr" in said
            assert_gone(folder)
        assert "process 1 was ended by SIGKILL" in said
        assert "starts again (1 of 1), from update 0" in said
        folder = tmp_path / "listen"
        folder.mkdir()
        with launched(folder / "log", DUMMY, *own, "train", str(folder), "listen") as launcher:
            wait_for(lambda: all((folder / f"listens{k}").exists() for k in range(2)))
            launcher.terminate()
            assert launcher.wait(300) == 75
        assert_gone(folder)
        with launched(folder / "log2", DUMMY, *own, "train", str(folder), "die-not") as launcher:
            before = {k: (folder / f"pid{k}").read_text() for k in range(2)}
            wait_for(lambda: all((folder / f"pid{k}").read_text() not in ("", before[k]) for k in range(2)))
        wait_for(lambda: all(not Path(f"/proc/{(folder / f'pid{k}').read_text()}").exists() for k in range(2)))
        short = [word for word in own if word not in ("--place", "pack")]
        with launched(tmp_path / "log", DUMMY, "--patience", "0", *short, "train", str(folder), "end") as launcher:
            assert launcher.wait(600) == 2
        assert "2 processes of 1 device(s) each have no room: 2 are there, with 0, 2 cores" in (
            (tmp_path / "log").read_text()
        )


@pytest.mark.slow
@ray
def test_two_nodes_train_as_one_machine_and_through_the_loss_of_one(tmp_path: Path) -> None:
    """One process a node. Undisturbed; then one node is killed, and its run goes on with one process."""
    pytest.importorskip("ray")
    from tests.helpers.ray_nodes import nodes

    updates = 120
    whole = undisturbed(tmp_path, updates)
    with nodes(1, 1) as there:
        own = ["--on", "ray", "--address", there.address, "--devices-per-host", "1", "--hosts", "2"]
        own += ["--restarts", "2", "--fewest", "1", "--patience", "5", "--"]
        calm, hit = tmp_path / "calm", tmp_path / "hit"
        with launched(tmp_path / "log", "", *own, *words(tmp_path, updates, "--run-name", "calm")) as launcher:
            assert launcher.wait(900) == 0, (tmp_path / "log").read_text()
        with launched(tmp_path / "log2", "", *own, *words(tmp_path, updates, "--run-name", "hit")) as launcher:
            wait_for(lambda: supervisor.newest_step(hit) >= 12, 900.0)
            there.kill(1)
            assert launcher.wait(900) == 0, (tmp_path / "log2").read_text()
        assert not launch_faults.pids("hit")
    said = (tmp_path / "log2").read_text()
    assert "goes on with 1 of 2 processes" in said, said
    for folder in (calm, hit):
        assert result(folder) | {"cache": None} == result(whole) | {"cache": None}
        assert records(folder) == records(whole)


@pytest.mark.slow
@ray
def test_a_signal_saves_and_a_killed_process_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from tests.helpers.ray_nodes import nodes

    updates = 120
    whole = undisturbed(tmp_path, updates)
    folder, log = tmp_path / "hit", tmp_path / "log"
    with nodes(2) as there:
        own = ["--on", "ray", "--address", there.address, "--devices-per-host", "1", "--hosts", "2"]
        own += ["--restarts", "2", "--place", "spread", "--"]
        with launched(log, "", *own, *words(tmp_path, updates, "--run-name", "hit")) as launcher:
            wait_for(lambda: supervisor.newest_step(folder) >= 12, 900.0)
            launch_faults.send("hit", signal.SIGKILL, (1,))
            wait_for(lambda: supervisor.newest_step(folder) >= 36, 900.0)
            launcher.terminate()
            assert launcher.wait(600) == loop.STOPPED, log.read_text()
        assert "process 1 was ended by SIGKILL" in log.read_text()
        with launched(log, "", *own, *words(tmp_path, updates, "--resume", "hit")) as launcher:
            assert launcher.wait(900) == 0, log.read_text()
    assert result(folder) | {"cache": None} == result(whole) | {"cache": None}
    assert records(folder) == records(whole)


def test_without_a_cluster_a_line_says_the_remedy() -> None:
    pytest.importorskip("ray")
    with (
        pytest.raises(HostsError, match=r"no Ray cluster can be joined at 127\.0\.0\.1:1 .*ray start --head"),
        ray_cluster.joined("127.0.0.1:1"),
    ):
        pass
