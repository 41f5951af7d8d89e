"""Actors on the nodes of a Ray cluster: they change no number, and a node that dies costs what was under way on it."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longhaul.runtime import credentials
from longhaul.runtime.errors import RunError
from longhaul.runtime.launch import ray_cluster
from longhaul.runtime.process_group import HostsError
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.inference_server.config import ServerConfig
from tests.helpers import launch_faults
from tests.helpers.small_runs import records, result, small

ROOT = Path(__file__).resolve().parents[2]

MARK = "LONGHAUL_TEST_OF"
"""A variable by which all processes of a test are found."""


# ------------------------------------------------------------------------------------------------------- what is said


def test_without_ray_or_a_cluster_a_line_says_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HostsError, match=r"--actor-kind ray needs Ray .*install longhaul-rl\[cluster\]"):
        ray_cluster.check("auto", ray_cluster.ACTORS)
    monkeypatch.undo()
    pytest.importorskip("ray")
    for address in ("127.0.0.1:1", "127.0.0.1:none"):
        with pytest.raises(HostsError, match=rf"joined at {address} .*`ray start --head`, or give --ray-address"):
            ray_cluster.check(address, ray_cluster.ACTORS)


@pytest.mark.parametrize(
    ("central", "message"),
    [
        (ServerConfig("shm"), "--lane is shm, and --actor-kind is ray"),
        (ServerConfig("grpc", bind="192.0.2.1:0", tls_cert="cert.pem"), "--tls-cert and --tls-key belong together"),
    ],
)
def test_lanes_that_nodes_can_not_use_are_refused(central: ServerConfig, message: str) -> None:
    with pytest.raises(RunError, match=message):
        small(topology="central", acting=ActorConfig(2, "ray"), central=central)


@pytest.mark.parametrize(("host", "known"), [("192.0.2.7", True), ("learner.example", True), ("192.0.2.8", False)])
def test_a_certificate_that_is_made_is_known_for_its_host_alone(host: str, known: bool, tmp_path: Path) -> None:
    held = credentials.self_signed(host if known else "192.0.2.7")
    assert held.certificate is not None and held.key is not None
    (tmp_path / "key").write_bytes(held.key)
    (tmp_path / "certificate").write_bytes(held.certificate)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    client = ssl.create_default_context(cadata=held.certificate.decode())
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server, server_hostname=host)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)

    def shake() -> None:
        left = [ours, theirs]
        while left:
            for side in list(left):
                try:
                    side.do_handshake()
                    left.remove(side)
                except ssl.SSLWantReadError:
                    pass

    if known:
        shake()
    else:
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake()


def test_a_node_that_was_killed_and_counts_as_alive_gets_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as other:
        gone = socket.create_server(("127.0.0.1", 0))
        a, b, c, head = ("0123"[i] * 56 for i in range(4))
        ports = {a: there.getsockname()[1], b: gone.getsockname()[1], c: other.getsockname()[1], head: 1}
        nodes = [
            {"NodeID": name, "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port,
             "Resources": {} if name == head else {"CPU": 2.0}}
            for name, port in ports.items()
        ]  # fmt: skip
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        assert ray_cluster.placement(0) == "SPREAD"
        gone.close()
        assert [ray_cluster.placement(turn).node_id for turn in range(3)] == [a, c, a]
        nodes[1]["Alive"] = False  # Ray knows it
        assert ray_cluster.placement(0) == "SPREAD"


# ------------------------------------------------------------------------------------------------------- on a cluster


WORDS = """
--num-envs 8 --num-steps 16 --hidden-dim 8 --num-layers 1 --num-minibatches 2 --update-epochs 1 --lr 3e-3 --no-anneal
--seed 3 --log-interval 4 --evaluation-episodes 4 --actors 2 --rollbacks 0
"""

STEPS = 8 * 16


@pytest.fixture
def _marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All processes of the test have ended after it, also those of which Ray has changed the name."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    deadline = time.monotonic() + 30.0
    while left := marked(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def marked(tmp_path: Path) -> list[str]:
    return [
        f"{process}: {words}" for process, words, variables in launch_faults.processes()
        if variables.get(MARK) == str(tmp_path) and process != os.getpid()
    ]  # fmt: skip


def trained(folder: Path, updates: int, *words: str, disturb: Callable[[], None] | None = None) -> str:
    """`longhaul train` to the end, disturbed once a record is there -> what was said."""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    command = [sys.executable, "-m", "longhaul", "train", "cartpole", *WORDS.split()]
    command += ["--total-steps", str(updates * STEPS), *words]
    command += ["--runs-dir", str(folder.parent), "--run-name", folder.name]
    said, metrics = folder.with_suffix(".log"), folder / "metrics.jsonl"
    with open(said, "wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        if disturb is not None:
            deadline = time.monotonic() + 600.0
            while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
                assert process.poll() is None and time.monotonic() < deadline, said.read_text()
                time.sleep(0.05)
            disturb()
        assert process.wait(900) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()
    return said.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("_marked")
@pytest.mark.parametrize("bound", ["--staleness 0", "--staleness 1 --pin"])
def test_actors_on_two_nodes_are_threads_bit_for_bit_also_where_a_node_dies(tmp_path: Path, bound: str) -> None:
    pytest.importorskip("ray")
    from tests.helpers.ray_nodes import nodes

    updates = 400
    own = ["--topology", "actors", *bound.split()]
    here, calm, hit = tmp_path / "here", tmp_path / "calm", tmp_path / "hit"
    trained(here, updates, *own, "--actor-kind", "thread")
    with nodes(2, 2) as there:
        own += ["--actor-kind", "ray", "--ray-address", there.address]
        assert "takes its place" not in trained(calm, updates, *own)
        said = trained(hit, updates, *own, disturb=lambda: there.kill(1))
    assert "is lost with its process or node" in said and "another takes its place" in said
    for folder in (calm, hit):
        assert result(folder)["params_sha256"] == result(here)["params_sha256"]
    assert learnt(calm) == learnt(here)
    assert learnt(hit) == learnt(here)


def learnt(folder: Path) -> list[dict[str, object]]:
    """The records without what depends on who acts, and how fast."""
    return [{k: v for k, v in row.items() if not k.startswith(("actors/", "health/"))} for row in records(folder)]


@pytest.mark.slow
@pytest.mark.usefixtures("_marked")
def test_central_inference_trains_to_its_end_through_the_loss_of_a_node(tmp_path: Path) -> None:
    """By TLS and with a token, as beyond this machine. Each update is of all environments, once."""
    pytest.importorskip("ray")
    pytest.importorskip("grpc")
    from tests.helpers.ray_nodes import nodes

    updates, hit = 300, tmp_path / "hit"
    with nodes(2, 2) as there:
        own = ["--topology", "central", "--lane", "grpc", "--actor-kind", "ray", "--ray-address", there.address]
        own += ["--bind", f"{there.address.partition(':')[0]}:0"]
        said = trained(hit, updates, *own, disturb=lambda: there.kill(1))
    assert "actor 1: " in said or "actor 0: " in said
    rows = records(hit)
    assert [row["update"] for row in rows] == list(range(4, updates + 1, 4))
    assert [row["agent_steps"] for row in rows] == [STEPS * row["update"] for row in rows]
    assert sum(row["central/lost"] for row in rows) > 0
    assert all(row["central/staleness_max"] == 0 for row in rows)
    lengths = sum(row["episode/count"] * (row.get("episode/length") or 0.0) for row in rows)  # none where none ended
    assert lengths <= updates * STEPS, "more steps of episodes than were learnt from"
