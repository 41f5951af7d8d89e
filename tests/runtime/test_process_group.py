"""Identity of a process by its environment; how processes that were joined speak, agree, save and end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from longhaul.config import resolve as runs
from longhaul.runtime import compile_cache, devices, process_group, pytree_serialization
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.runtime.launch import local
from longhaul.runtime.launch.process import LIFELINE
from longhaul.runtime.process_group import ALONE, AUTO, Hosts, HostsError
from longhaul.training.checkpoint.checkpoint import Checkpoints
from tests.helpers.small_runs import small

ROOT = Path(__file__).resolve().parents[2]

OURS = {"LONGHAUL_COORDINATOR": "node7:1234", "LONGHAUL_PROCESS_ID": "2", "LONGHAUL_NUM_PROCESSES": "4"}
SLURM = {
    "SLURM_JOB_ID": "70001", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[03-06,11]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1", "LONGHAUL_SERVICE": "trainers"}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0.local,t1.local,t2.local"}

FOUND: dict[str, tuple[dict[str, str], Hosts]] = {
    "nothing": ({"HOME": "/root"}, ALONE),
    "ours": (OURS, Hosts(2, 4, "node7:1234", ", ".join(OURS))),
    "without a port": (OURS | {"LONGHAUL_COORDINATOR": "node7"}, Hosts(2, 4, "node7:8476", ", ".join(OURS))),
    "one of one": (SLURM | {"LONGHAUL_NUM_PROCESSES": "1"}, ALONE),
    "JAX finds out": ({"LONGHAUL_COORDINATOR": "auto"}, Hosts(0, 0, AUTO, "LONGHAUL_COORDINATOR")),
    # 70001 % 4096 = 369
    "SLURM": (SLURM, Hosts(3, 8, "gpu03:61809", "SLURM")),
    "SLURM, another coordinator": (SLURM | {"LONGHAUL_COORDINATOR": "gpu11:99"}, Hosts(3, 8, "gpu11:99", "SLURM")),
    "a SLURM job outside of srun": ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ALONE),
    "one SLURM task": (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, ALONE),
    # 1531576320 / 4096 = 373920; % 4096 = 1184
    "Open MPI": (OPEN_MPI, Hosts(1, 2, "10.96.0.1:62624", "OMPI_COMM_WORLD_SIZE")),
    "Open MPI of one": (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, ALONE),
    "Kubernetes": (
        POD | {"LONGHAUL_NUM_PROCESSES": "3"}, Hosts(1, 3, "train-0.trainers:8476", "JOB_COMPLETION_INDEX"),
    ),
    "a Kubernetes job of anything": (POD, ALONE),
    "a TPU pod": (TPU, Hosts(1, 3, "t0.local:8476", "TPU_WORKER_HOSTNAMES")),
    "a TPU host": (TPU | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, ALONE),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no number": (OURS | {"LONGHAUL_PROCESS_ID": "two"}, "LONGHAUL_PROCESS_ID is 'two'; it must be a whole number"),
    "too large": (OURS | {"LONGHAUL_PROCESS_ID": "4"}, "LONGHAUL_PROCESS_ID is 4, and there are 4 processes"),
    "a part": ({"LONGHAUL_COORDINATOR": "a:1"}, "LONGHAUL_PROCESS_ID and LONGHAUL_NUM_PROCESSES not; set all"),
    "no process 0": ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""}, "LONGHAUL_COORDINATOR not; set all"),
    "no service": ({"JOB_COMPLETION_INDEX": "0", "LONGHAUL_NUM_PROCESSES": "2"}, "LONGHAUL_COORDINATOR not"),
    "no port": (OURS | {"LONGHAUL_COORDINATOR": "node7:http"}, "'node7:http'; it must be HOST:PORT"),
}


def test_a_platform_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would fail by an assertion without a text."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(devices, "NVIDIA", ("/dev/no-such-gpu",))
    with pytest.raises(RunError, match=r"JAX_PLATFORMS is cuda, .* unset it, or set it to cpu$"):
        devices.prepare_devices(1)


@pytest.mark.parametrize("name", FOUND)
def test_the_environment_says_who_a_process_is(name: str) -> None:
    environment, expected = FOUND[name]
    assert process_group.find(environment) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_half_an_environment_is_refused_in_a_line_that_says_the_remedy(name: str) -> None:
    environment, words = REFUSED[name]
    with pytest.raises(HostsError, match=words) as raised:
        process_group.find(environment)
    assert "\n" not in str(raised.value)


def test_on_a_tpu_that_says_nothing_jax_finds_out_unless_it_is_told() -> None:
    assert process_group.find({}, tpu=True) == Hosts(0, 0, AUTO, "TPU")
    assert process_group.find(TPU, tpu=True).coordinator == "t0.local:8476"
    assert process_group.find({"LONGHAUL_NUM_PROCESSES": "1"}, tpu=True) == ALONE
    assert not process_group.on_tpu({"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("a[1-3]", "a1"), ("a[007-015,020],b", "a007"), ("a[4,6]-x,b[1-2]", "a4-x"),
     ("r[1-2]n[03-04]", "r1n03")],
)  # fmt: skip
def test_the_first_node_of_slurms_lists(nodes: str, first: str) -> None:
    assert process_group.first_node(nodes) == first


def test_a_process_finds_its_place_in_the_variables_of_the_launcher() -> None:
    made = local.environment({"HOME": "x"}, 1, 3, "/tmp/a/b", 2)
    assert process_group.find(made) == Hosts(1, 3, "unix:/tmp/a/b", "LONGHAUL_COORDINATOR, LONGHAUL_PROCESS_ID, "
                                     "LONGHAUL_NUM_PROCESSES")  # fmt: skip
    assert made["JAX_LOCAL_DEVICE_IDS"] == "2,3" and made["HOME"] == "x"
    assert "JAX_LOCAL_DEVICE_IDS" not in local.environment({}, 1, 3, "/a", None)
    assert process_group.find(local.environment({}, 0, 1, "/a", None)) == ALONE


# ------------------------------------------------------------------------------------------------------------- alone


def test_alone_nothing_is_started_and_words_go_nowhere() -> None:
    process_group.start(ALONE)
    assert not process_group.together()
    assert (process_group.index(), process_group.count()) == (0, 1)
    value = object()
    assert process_group.share("x", lambda: value) is value
    process_group.tell("x", value)  # which JSON could not hold
    assert process_group.lead(lambda: 75) == 75
    ask = meshes.asking(meshes.make_mesh(2), late=True)
    assert ask(True, False) == (True, False)


def test_a_port_that_is_taken_is_named() -> None:
    """JAX would crash on it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for here in (True, False):
            with pytest.raises(HostsError, match=rf"port {port} can't be had on process 0 .*LONGHAUL_COORDINATOR"):
                process_group._check_port(f"127.0.0.1:{port}", local=here)
    process_group._check_port(f"127.0.0.1:{local.free_port()}", local=True)


def test_the_devices_and_threads_of_a_run_are_shared_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC")
    for module in (runs, devices):
        monkeypatch.setattr(module, "cores", lambda: 2)
    monkeypatch.setattr(process_group, "count", lambda: 2)
    for own, wanted in (("3", 6), ("1", 2), ("", 4)):  # without: a device a core
        monkeypatch.setenv(process_group.DEVICES, own or "0")
        resolved = small(devices=None, num_envs=96, total_steps=96 * 16 * 5)
        assert (resolved.devices, resolved.threads) == (wanted, max(wanted, 4) if wanted > 2 else 2)
    monkeypatch.setenv(process_group.DEVICES, "3")
    assert small(devices=None, num_envs=64, total_steps=64 * 16 * 5).devices == 4, "6 can't share 64 worlds"
    for wrong, message in (
        ({"devices": 3}, "--mesh is data=3, of 3 devices, which 2 processes can't share evenly; choose a multiple"),
        (
            {"model": 2, "topology": "actors"},
            "--mesh is data=1,model=2, and with --topology actors the 2 devices",
        ),
        ({"devices": 2, "num_envs": 33}, "which 2 devices can't share evenly; choose a multiple of 2, or another n"),
    ):
        with pytest.raises(RunError, match=message):
            small(**wrong)
    with pytest.raises(RunError, match=r"of 3 devices, which 2 processes can't share evenly; choose a multiple"):
        devices.prepare_devices(3)
    with pytest.raises(RunError, match=r"of 2049 devices in a process, and a CPU shows at most 2048; choose fewer"):
        devices.prepare_devices(2 * 2049)


WAITS = (
    "import time; from longhaul.runtime import process_group\n"
    "process_group.start(process_group.ALONE); print('up', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize("command", [["-c", WAITS], ["-m", "longhaul", "train", "cartpole"]], ids=["waits", "imports"])
def test_a_process_ends_with_its_launcher(command: list[str], tmp_path: Path) -> None:
    """Also one that waits for something else: the other end of the pipe is closed when its holder is killed. And one
    whose launcher is killed at once: on a busy machine JAX takes many seconds to come."""
    variables = {}
    if command[0] == "-m":
        (tmp_path / "jax.py").write_text("import os, time; os.write(1, b'up\\n'); time.sleep(60)")
        variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path if variables else ROOT,
        env=os.environ | variables | {LIFELINE: str(reader)}, pass_fds=[reader], stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(reader)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert child.poll() is None
        os.close(writer)
        assert child.wait(timeout=20) == 1
    finally:
        child.kill()
        child.communicate()


# ------------------------------------------------------------------------------------------------------ two processes

PAIR = """
import os, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
from longhaul.runtime import process_group as hosts
sys.path.insert(0, sys.argv[1])
import importlib
hosts.start(hosts.find(os.environ))
step = getattr(importlib.import_module(f"tests.{sys.argv[4]}"), sys.argv[2])
work = lambda: step(Path(sys.argv[3]))
sys.exit(hosts.follow(work) if hosts.index() else hosts.lead(work))
"""


def together(step: str, folder: Path, module: str = "runtime.test_process_group") -> list[tuple[int, str]]:
    """Runs the function `step` of a file of tests in two processes of two devices; -> (exit code, stderr) of each."""
    place = Path(tempfile.mkdtemp()) / "socket"
    children = []
    for i in range(2):
        environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
        environment |= {"LONGHAUL_COORDINATOR": f"unix:{place}", "LONGHAUL_PROCESS_ID": str(i), "NPROC": "2"}
        environment |= {"LONGHAUL_NUM_PROCESSES": "2"}
        command = [sys.executable, "-c", PAIR, str(ROOT), step, str(folder), module]
        children.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [child.communicate(timeout=900)[1] for child in children]
    return [(child.returncode, error) for child, error in zip(children, errors, strict=True)]


def progress(mesh: Any, add: int) -> dict[str, Any]:
    """A sharded array, a copied one and a key, global ones."""
    split = jnp.arange(12, dtype=jnp.float32).reshape(4, 3) + add
    tree = {"copy": jnp.full(3, 7 + add), "key": jax.random.key(5 + add), "half": jnp.bfloat16(0.5) + add}
    return meshes.everywhere(tree, mesh) | {"split": pytree_serialization.put(np.asarray(split), meshes.sharded(mesh))}


def speak(folder: Path) -> int:
    """In each of two processes."""
    first = process_group.index() == 0
    assert (process_group.count(), jax.process_count(), jax.process_index()) == (2, 2, process_group.index())
    assert process_group.share("joined", lambda: True)
    assert not Path(os.environ["LONGHAUL_COORDINATOR"].removeprefix("unix:")).parent.exists(), "no stranger can come"
    assert process_group.share("a", lambda: {"b": [1, 2.5]} if first else 1 / 0) == {"b": [1, 2.5]}
    if first:
        process_group.tell("c", "d")
        with pytest.raises(ZeroDivisionError):
            process_group.share("e", lambda: 1 / 0)
    else:
        assert process_group.hear("c") == "d"
        with pytest.raises(HostsError, match="process 0 failed: division by zero"):
            process_group.share("e", lambda: 1 / 0)
    mesh = meshes.make_mesh(4)
    assert [device.process_index for device in mesh.devices.flat] == [0, 0, 1, 1]
    assert [device.process_index for device in meshes.make_mesh(2).devices.flat] == [0, 1]
    heard = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    assert heard == {"127.0.0.1"}, "Gloo's"
    for odd in (3, 6):
        with pytest.raises(ValueError, match=rf"data={odd}, but 2 processes have 4 .*a multiple of 2 up to 4"):
            meshes.make_mesh(odd)
    assert meshes.asking(mesh)(first, not first, False) == (True, True, False)
    ask = meshes.asking(mesh, late=True)
    assert [ask(first and i == 1, not first and i == 2) for i in range(4)] == [
        (False, False), (False, False), (True, False), (False, True),
    ]  # fmt: skip
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, progress(mesh, step), {"of": process_group.index()})
    checkpoints.close()
    process_group.share("saved", lambda: True)
    reader = Checkpoints(folder / "checkpoints")
    found = reader.newest()
    assert found is not None
    for like_mesh in (mesh, meshes.make_mesh(2)):
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), progress(like_mesh, 0)
        )
        again = reader.restore(found, like).progress
        wanted = progress(like_mesh, 3)
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(wanted), strict=True):
            assert one.sharding == other.sharding
            if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                one, other = jax.random.key_data(one), jax.random.key_data(other)
            for mine, its in zip(one.addressable_shards, other.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(its.data))
    return 0


def remember(folder: Path) -> int:
    """Compiles a program of all devices and one of this process's own, with a store; says where they came from."""
    compile_cache.enable(2, on_cpu=True, process=process_group.index())
    ledger = compile_cache.Ledger()
    mesh = meshes.make_mesh(4)
    total = jax.jit(lambda x: jnp.sum(x * 3.0), out_shardings=meshes.replicated(mesh))
    assert float(total(progress(mesh, 0)["split"])) == 3.0 * 66.0
    assert float(jax.jit(lambda x: x * 5.0)(2.0)) == 10.0
    (folder / f"found-{process_group.index()}").write_text(json.dumps([ledger.hits, ledger.misses]))
    return 0


def speak_and_fail(folder: Path) -> int:
    """At last process 0 finds bad input, while the other waits for it."""
    speak(folder)
    (folder / f"spoken-{process_group.index()}").touch()
    if process_group.index() == 0:
        raise ValueError("nonsense")
    process_group.hear("nothing")
    return 0


class Pair(NamedTuple):
    folder: Path
    ended: list[tuple[int, str]]  # exit code and stderr of its processes


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return Pair(folder, together("speak_and_fail", folder))


def test_two_processes_speak_agree_and_save(pair: Pair) -> None:
    """What both saved on two devices each, this process restores on three, and on none in particular."""
    assert all((pair.folder / f"spoken-{i}").exists() for i in range(2)), pair.ended
    saving = pair.folder / "checkpoints"
    assert sorted(path.name for path in saving.iterdir()) == ["2", "3"]
    manifest = json.loads((saving / "3" / "manifest.json").read_text())["contents"]
    assert manifest["metadata"] == {"of": 0}
    mesh = meshes.make_mesh(2)
    restored = Checkpoints(saving).latest(progress(mesh, 0))
    assert restored is not None and restored.step == 3
    for one, other in zip(jax.tree.leaves(restored.progress), jax.tree.leaves(progress(mesh, 3)), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow
def test_each_process_finds_its_programs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would have all but the first compile anew at each start. On the CPU each has a folder of its own."""
    monkeypatch.setenv("LONGHAUL_CACHE", str(tmp_path / "store"))
    found = []  # [hits, misses] of each process in each of two pairs, one after the other
    for _ in range(2):
        ended = together("remember", tmp_path)
        assert [code for code, _ in ended] == [0, 0], ended
        found.append([json.loads((tmp_path / f"found-{i}").read_text()) for i in range(2)])
    for (_, missed), (hits, left) in zip(*found, strict=True):
        assert missed >= 2 and (hits, left) == (missed, 0)
    mine = tmp_path / "store" / compile_cache.subfolder(2, on_cpu=True, process=1)
    entries = list(mine.glob("*-cache"))
    assert {path.parent.name for path in entries} == {"process-1"}
    assert len(entries) == found[0][1][1]


def test_where_jax_has_moved_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import compiler

    def other(key: str, executable: object) -> None: ...

    monkeypatch.setattr(compiler, "_cache_write", other)
    assert not compile_cache._allow_writes()
    assert compiler._cache_write is other
    monkeypatch.delattr(compiler, "_cache_write")
    assert not compile_cache._allow_writes()


def test_where_process_0_fails_the_others_end_with_its_code(pair: Pair) -> None:
    first, other = pair.ended
    assert (first[0], other[0]) == (1, 2), (first, other)  # Python's own code, and what `cli` makes of a ValueError
    assert "ValueError: nonsense" in first[1]
    assert "Error" not in other[1]
