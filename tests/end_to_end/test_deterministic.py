"""The same numbers on any number of devices: as asked for by `--deterministic`, and only then.

Numbers of devices and of CPU threads are fixed when JAX starts, so a run on so many has a process of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul.algorithms.config import PPOConfig
from longhaul.config import recipes
from longhaul.config import resolve as runs
from longhaul.config.run import Driving, Run
from longhaul.networks.config import NetworkConfig
from longhaul.runtime import batch_shards
from longhaul.runtime import devices as machine
from longhaul.runtime import mesh as meshes
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.topologies import fused
from longhaul.training import assemble, final_evaluation, loop, run_dir
from longhaul.training.data import Feeding, feed
from tests.helpers.small_runs import begin, make_quick, records, small
from tests.runtime.test_process_group import together

ROOT = Path(__file__).resolve().parents[2]
CONFIG = PPOConfig(
    num_minibatches=3, update_epochs=2, lr=3e-2, normalise_observation=True, kl_stop=1e-3, chunk=5,
    network=NetworkConfig(hidden_dim=8),
)  # fmt: skip
"""So that sums have lengths which are no powers of two, and each kind of mean is taken."""


def run_of(name: str, devices: int | None, *, deterministic: bool = True) -> Run:
    sizes: dict[str, Any] = {"devices": devices, "deterministic": deterministic, "block": 3, "log_interval": 3}
    if name in ("cartpole", "memory"):
        config = replaced(CONFIG, memory=8, kl_stop=None) if name == "memory" else CONFIG
        return small(algorithm=config, num_envs=24, num_steps=15, total_steps=24 * 15 * 6, **sizes)
    made = recipes.recipe(name)
    assert made.algorithm.num_minibatches is None or name == "driving"
    task, agents = made.environment, runs.agents(made)
    if isinstance(task, Driving):
        task = dataclasses.replace(task, scenarios=4)
    config = dataclasses.replace(made.algorithm, num_minibatches=2, update_epochs=1)
    sizes |= {"num_envs": 16, "num_steps": 8, "total_steps": 16 * agents * 8 * 6}
    return runs.resolve(dataclasses.replace(made, environment=task, algorithm=config, **sizes))


def digests(run: Run) -> dict[str, str]:
    """Of all that a run is after its last update."""
    source = feed(run)
    context = Feeding(source).now.context
    made = assemble.assemble(run, source.within, context)
    progress, block = made.start(run.seed, context), run.block
    assert block is not None
    program = fused.compiled(
        made.algorithm, made.collector_in, progress, context, made.mesh, block=block, shards=made.shards
    )
    for progress, n, rows in fused.fused(program, progress, context, updates=made.updates, block=block):
        assert n == block
    return {"params": digest(progress.state.params), "state": digest(progress.state),
            "carry": digest(progress.carry), "metrics": digest(rows)}  # fmt: skip


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        found.update(np.asarray(data).tobytes())
    return found.hexdigest()


PROGRAM = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, sys.argv[1])
from tests.end_to_end import test_deterministic as here
name, deterministic, *devices = json.loads(sys.argv[2])
found = [here.digests(here.run_of(name, n, deterministic=deterministic)) for n in devices]
print("found " + json.dumps(found))
"""


def on_devices(name: str, *devices: int, deterministic: bool = True, threads: int = 4) -> list[dict[str, str]]:
    """What a run is on so many of eight devices, one after the other, with so many threads of the CPU."""
    command = [sys.executable, "-c", PROGRAM, str(ROOT), json.dumps([name, deterministic, *devices])]
    environment = os.environ | {"NPROC": str(threads)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("found "))
    found: list[dict[str, str]] = json.loads(line[6:])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("devices", [(1, 8), pytest.param((1, 2, 4), marks=pytest.mark.slow)])  # to compile takes long
def test_a_run_is_the_same_on_1_2_4_and_8_devices(devices: tuple[int, ...]) -> None:
    """Parameters, optimiser, normaliser, environments and metrics; minibatches of odd sizes, in several chunks."""
    first, *others = on_devices("cartpole", *devices)
    assert others == [first] * (len(devices) - 1)


@pytest.mark.slow
def test_without_being_asked_for_it_is_not() -> None:
    first, other = on_devices("cartpole", 1, 4, deterministic=False)
    assert first["params"] != other["params"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory", "driving", "hackmatrix"])
def test_other_runs_are_the_same_too(name: str) -> None:
    first, *others = on_devices(name, 1, 4, 8)
    assert others == [first] * 2


@pytest.mark.slow
def test_threads_of_the_cpu_change_nothing() -> None:
    assert on_devices("cartpole", 1, threads=1) == on_devices("cartpole", 8, threads=8)


def pair(folder: Path) -> int:
    """In each of two processes of two devices: trains what the folder is named after."""
    with pytest.MonkeyPatch.context() as patch:  # evaluations take long to compile, and change no parameter
        patch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
        loop.train(run_of(folder.name, 4), folder, resumed=False)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cartpole", "driving"])
def test_two_processes_of_two_devices_make_the_parameters_of_one_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so those of four in one process, which others here compare with one."""
    monkeypatch.setattr(final_evaluation, "evaluations", lambda *_, **__: iter(()))
    monkeypatch.setattr(loop, "prepare_devices", lambda *_: None)  # other tests here need more devices than one
    two, one = tmp_path / "two" / name, tmp_path / "one"
    two.mkdir(parents=True)
    ended = together("pair", two, "end_to_end.test_deterministic")
    assert [code for code, _ in ended] == [0, 0], ended
    alone = begin(run_of(name, 1), one).result
    assert alone is not None
    assert json.loads((two / "result.json").read_text())["params_sha256"] == alone["params_sha256"]
    assert records(two) == records(one)


@pytest.mark.slow
def test_moved_to_another_number_of_devices_it_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_quick(monkeypatch)
    monkeypatch.setattr(loop, "prepare_devices", lambda *_: None)
    whole = {"deterministic": True, "algorithm": CONFIG, "num_envs": 24, "num_steps": 15, "block": 2}
    four, one = (small(devices=n, total_steps=24 * 15 * 12, **whole) for n in (4, 1))
    expected = begin(one, tmp_path / "one").result
    assert expected is not None

    folder = tmp_path / "moved"
    begin(four, folder)
    for name in ("result.json", "checkpoints/12"):  # as a run that was killed after its update 6
        path = folder / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    result = loop.train(one, folder, resumed=True).result
    assert run_dir.load_run(folder).devices == 1
    assert result is not None
    assert result["params_sha256"] == expected["params_sha256"]


@pytest.mark.parametrize(("devices", "model", "envs", "words"), [
    (3, 1, 24, r"8 virtual shards, which 3 devices can't share evenly; choose --mesh data=N with N one of 1, 2, 4, 8"),
    (4, 1, 12, r"--num-envs is 12, which the 8 virtual shards .* choose a multiple of 8"),
    (4, 2, 24, r"--deterministic with --mesh data=4,model=2: sums over the model axis .* choose model=1"),
])  # fmt: skip
def test_sizes_that_can_not_be_are_refused(devices: int, model: int, envs: int, words: str) -> None:
    with pytest.raises(RunError, match=words):
        small(deterministic=True, devices=devices, model=model, num_envs=envs)


def test_devices_that_nobody_chose_can_share_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runs, machine):
        monkeypatch.setattr(module, "cores", lambda: 7)
        monkeypatch.setattr(module, "on_cpu", lambda: True)
    monkeypatch.setattr(runs, "started", lambda: None)  # as in a process where JAX has not
    sizes: dict[str, Any] = {"devices": None, "num_envs": 56 * 8, "total_steps": 56 * 8 * 16}
    assert small(**sizes).devices == 7
    assert small(deterministic=True, **sizes).devices == 4


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_mean_is_taken_in_pairs(devices: int) -> None:
    """Bit for bit that of NumPy in the same order, which is not that of a sum one after the other."""
    rows = np.random.default_rng(0).standard_normal((batch_shards.VIRTUAL, 13)).astype(np.float32) * 1e3
    mesh = meshes.make_mesh(devices)
    made = batch_shards.virtual(mesh)

    def shard(rows: jax.Array) -> Any:
        return made.each(lambda number, row: (row, made.mean({"b": row[0, :3], "a": row[0, 3:]})))(rows)[1]

    spec = PartitionSpec(meshes.DATA)
    found = jax.jit(meshes.per_shard(shard, mesh, (spec,), PartitionSpec()))(jnp.asarray(rows))
    tree = rows
    while len(tree) > 1:
        tree = tree[0::2] + tree[1::2]
    np.testing.assert_array_equal(np.concatenate([found["b"], found["a"]]), tree[0] / batch_shards.VIRTUAL)
    assert np.any(np.cumsum(rows, axis=0)[-1] / batch_shards.VIRTUAL != tree[0] / batch_shards.VIRTUAL)
