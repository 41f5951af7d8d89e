"""What trains is what is published: bit for bit, by every topology, in order, in a new epoch after each start."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import cli, publishing, training
from longhaul import mesh as meshes
from longhaul.actors.settings import Acting
from longhaul.provenance import params_sha256
from longhaul.publishing import Publishing, chosen
from longhaul.run import RunError
from longhaul.sync import files, manifest
from longhaul.sync.engine import Publisher
from longhaul.sync.lanes.folder import FolderLane
from longhaul.sync.manifest import Manifest
from longhaul.sync.producer import Producer, named
from longhaul.sync.receiver import follow
from tests.small_runs import make_quick, resume, small
from tests.sync_lanes import tensors, until


def held(folder: Path) -> tuple[Manifest, dict[str, np.ndarray]]:
    """The latest version in a folder, with its tensors."""
    latest = files.newest(folder)
    assert latest is not None
    where = folder / files.folder_name(*latest)
    found = files.read_manifest(where)
    image = np.zeros(found.size, np.uint8)
    files.read(where, found, image, lambda image, count: None)
    assert not list(manifest.damaged(found, image))
    return found, manifest.views(found, image)


def train(run: Any, folder: Path, asked: Publishing) -> None:
    folder.mkdir(parents=True)
    publishing.save(folder, asked)
    training.train(run, folder, resumed=False)


def trained(folder: Path) -> tuple[str, Any]:
    """(digest of the parameters at a run's end, their tree)."""
    _, policy, _ = training.restore_policy(folder)
    result = json.loads((folder / "result.json").read_text())
    assert params_sha256(policy.params) == result["params_sha256"] or params_sha256(policy) == result["params_sha256"]
    return result["params_sha256"], policy


def published(topology: str, folder: Path) -> tuple[list[int], Any]:
    """Trains 12 updates into `folder`, to it and to a follower; -> (the versions that came, the policy at the end)."""
    acting = Acting() if topology == "fused" else Acting(2, "thread", 1)
    run = small(topology=topology, acting=acting, total_steps=8 * 16 * 12)
    name, seen = f"@longhaul-test-{os.getpid()}-{topology}", []
    with follow([f"shm:{name}"], on_commit=seen.append) as receiver:
        train(run, folder, Publishing(("run", f"shm:{name}"), every=2))
        assert receiver.wait(12, 20)
        _, policy = trained(folder)
        for found in (held(folder / "weights")[1], receiver.latest()[1]):
            is_policy(found, policy)
        del found
    return seen, policy


def is_policy(found: dict[str, np.ndarray], policy: Any) -> None:
    wanted = named(policy)
    assert list(found) == list(wanted)
    assert all(found[each].tobytes() == np.asarray(wanted[each]).tobytes() for each in wanted)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int], Any]]:
    """A run of the topology `fused` that has published; of its shape others compile nothing."""
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        folder = tmp_path_factory.mktemp("runs") / "run"
        yield folder, *published("fused", folder)


def test_the_learner_publishes_what_it_has_learnt_in_order(fused: tuple[Path, list[int], Any]) -> None:
    _, seen, _ = fused
    assert seen == sorted(seen) and seen[-1] == 12 and all(version % 2 == 0 for version in seen)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["actors", "central"])
def test_so_does_the_learner_of_the_other_topologies(topology: str, tmp_path: Path) -> None:
    assert published(topology, tmp_path / "run")[0][-1] == 12


def test_a_run_that_goes_on_publishes_in_a_new_epoch_and_a_shell_can_pull_both_ways(
    fused: tuple[Path, list[int], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, policy = tmp_path / "run", fused[2]
    shutil.copytree(fused[0], folder)
    publishing.save(folder, Publishing(("run",)))
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "12")  # as if it had been killed after its first save
    before, _ = held(folder / "weights")
    resume(folder)
    after, again = held(folder / "weights")
    assert after.run == before.run == "run" and after.version == before.version == 12 and after.epoch > before.epoch
    is_policy(again, policy)  # the same numbers, learnt twice
    assert cli.main(["sync", "pull", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert Path(capsys.readouterr().out.strip()).name == files.folder_name(after.epoch, 12)
    (folder / "weights").rename(tmp_path / "weights")  # of a run that published nothing: its checkpoint
    assert cli.main(["sync", "pull", str(folder), "--out", str(tmp_path / "other")]) == 0
    is_policy(held(tmp_path / "other")[1], policy)


def test_versions_with_numbers_that_are_not_finite_stay_at_home(tmp_path: Path) -> None:
    notes: list[str] = []
    publishing.save(tmp_path, Publishing(("run",)))
    with publishing.publishing(tmp_path, lambda state: state, meshes.make_mesh(1), notes.append) as tell:
        tell(1, 1, {"w": jnp.ones(3), "n": jnp.int32(1)})
        until(lambda: (tmp_path / "weights" / "LATEST").exists())
        tell(2, 1, {"w": jnp.array([1.0, jnp.nan, 0.0]), "n": jnp.int32(2)})
    found, values = held(tmp_path / "weights")
    assert found.version == 1 and values["n"] == 1
    assert "version 2 is not published: its numbers are not finite" in notes


def test_a_copy_outlives_the_state_it_was_taken_of() -> None:
    state = {"w": jnp.arange(8.0)}
    copied, finite = publishing.copying(lambda state: state, meshes.make_mesh(1), "as-is")(state)
    jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0, x), donate_argnums=0)(state)
    assert state["w"].is_deleted()
    assert finite and np.array_equal(copied["w"], np.arange(8.0))
    half = {"w": jnp.float32([0.1, 3.0]), "n": jnp.int32(1)}
    copied, _ = publishing.copying(lambda state: state, meshes.make_mesh(1), "bf16")(half)
    assert copied["w"].dtype == jnp.bfloat16 and copied["n"].dtype == jnp.int32
    assert jnp.array_equal(copied["w"], half["w"].astype(jnp.bfloat16))


def test_of_those_that_wait_only_the_newest_travels(tmp_path: Path) -> None:
    held_up, going = threading.Event(), threading.Event()

    def take(params: dict[str, Any]) -> dict[str, Any]:
        going.set()
        assert held_up.wait(20)
        return params

    with Publisher("run", lanes=[FolderLane(tmp_path, durable=False)]) as sender, Producer(sender, take) as producer:
        producer.publish(1, tensors(1))
        assert going.wait(20)
        for version in (2, 3, 4):
            producer.publish(version, tensors(version))
        held_up.set()
        assert producer.drain(20)
        assert (producer.published, producer.passed, producer.newest) == (2, 2, 4)
        assert held(tmp_path)[0].version == 4  # what is drained is on the disk


class Pair(NamedTuple):
    a: Any
    b: Any


def test_the_leaves_of_any_tree_have_the_names_of_their_paths() -> None:
    tree = {"x": Pair(np.zeros(2, np.int8), [jnp.ones(1), 3.0]), "none": None}
    found = named(tree)
    assert list(found) == ["x.a", "x.b.0", "x.b.1"]
    assert found["x.a"] is tree["x"].a and found["x.b.1"] == 3.0
    with pytest.raises(ValueError, match=r"two leaves are named x\.y"):
        named({"x": {"y": np.zeros(1)}, "x.y": np.zeros(1)})
    with pytest.raises(ValueError, match="leaf k has dtype key"):
        named({"k": jax.random.key(0)})


def test_torch_gives_its_tensors_and_tied_ones_once() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from longhaul.sync.producer import of_torch

    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    module[1].weight = module[0].weight
    assert list(of_torch(module)) == ["0.weight"]
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool):
        given = torch.arange(6).reshape(2, 3).to(dtype)
        for tensor in (given, given.T):
            found = of_torch({"w": tensor})["w"]
            assert found.shape == tuple(tensor.shape) and str(found.dtype) == str(dtype).removeprefix("torch.")
            assert found.astype(np.float32).tolist() == tensor.float().tolist()
    with pytest.raises(ValueError, match="complex64"):
        of_torch({"w": torch.zeros(1, dtype=torch.complex64)})


def test_what_is_asked_for_is_checked_and_kept(tmp_path: Path) -> None:
    values = {"publish": ("run", "there"), "publish-every": 3, "publish-precision": "bf16"}
    values |= {"publish-token-file": None, "publish-anchor": 8}
    asked = chosen(values, frozenset({"publish", "publish-every"}))
    assert asked == Publishing(("run", f"folder:{Path('there').absolute()}"), 3)
    publishing.save(tmp_path, asked)
    assert chosen(values, frozenset(), publishing.load(tmp_path)) == asked  # a run that goes on keeps to it
    assert chosen({"publish": ("none",)}, frozenset({"publish"}), asked) is None
    assert chosen(values, frozenset()) is None
    for given, told in (
        ({"publish": ("tcp:x",)}, "tcp:x"),
        ({"publish": ("run",), "publish-every": 0}, "--publish-every is 0"),
        ({"publish-every": 2}, "need --publish"),
    ):
        with pytest.raises(RunError, match=told):
            chosen(given, frozenset(given))
