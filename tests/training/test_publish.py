"""What trains is what is published: bit for bit, by every topology, in order, in a new epoch after each start."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.cli import main
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError
from longhaul.runtime.provenance import params_sha256
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import loop, publish
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.training.publish import Publishing, chosen
from longhaul.weight_sync import manifest
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.producer import Producer, named
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import follow
from longhaul.weight_sync.transports import safetensors_files
from longhaul.weight_sync.transports.folder import FolderTransport
from tests.helpers.command_line import assert_refused, tree
from tests.helpers.small_runs import make_quick, resume, small
from tests.helpers.weight_sync_transports import damaged, tensors, until


def held(folder: Path) -> tuple[Manifest, dict[str, np.ndarray]]:
    """The latest version in a folder, with its tensors."""
    latest = safetensors_files.newest(folder)
    assert latest is not None
    where = folder / safetensors_files.folder_name(*latest)
    found = safetensors_files.read_manifest(where)
    image = np.zeros(found.size, np.uint8)
    safetensors_files.read(where, found, image, lambda image, count: None)
    assert not damaged(found, image)
    return found, manifest.views(found, image)


def published(topology: str, folder: Path, updates: int = 12) -> Any:
    """Trains so many updates, each second of which is published, into `folder`; -> the policy at the end."""
    acting = ActorConfig() if topology == "fused" else ActorConfig(2, "thread", 1)
    folder.mkdir(parents=True)
    publish.save(folder, Publishing(("run",), every=2))
    run = small(topology=topology, acting=acting, total_steps=8 * 16 * updates, save_interval=None)
    loop.train(run, folder, resumed=False)
    found, tensors = held(folder / "weights")
    assert found.version == updates
    assert all(version % 2 == 0 for _, version in safetensors_files.versions(folder / "weights"))
    _, policy, _ = restore_policy(folder)
    digest = json.loads((folder / "result.json").read_text())["params_sha256"]
    assert digest in (params_sha256(policy.params), params_sha256(policy))
    is_policy(tensors, policy)
    return policy


def is_policy(found: dict[str, np.ndarray], policy: Any) -> None:
    wanted = named(policy)
    assert list(found) == list(wanted)
    assert all(found[each].tobytes() == np.asarray(wanted[each]).tobytes() for each in wanted)


SLOW = [pytest.param(topology, marks=pytest.mark.slow) for topology in ("actors", "central")]


@pytest.mark.parametrize("topology", ["fused", *SLOW])
def test_the_learner_publishes_what_it_has_learnt(
    topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if topology == "fused":
        make_quick(monkeypatch)
    published(topology, tmp_path / "run", 60 if topology == "fused" else 12)


@pytest.mark.slow
def test_a_run_that_goes_on_publishes_in_a_new_epoch_and_a_shell_can_pull_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_quick(monkeypatch)
    folder = tmp_path / "run"
    policy = published("fused", folder)
    before, _ = held(folder / "weights")
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "12")  # as if it had been killed after its first save
    resume(folder)
    after, again = held(folder / "weights")
    assert after.run == before.run == "run" and after.version == before.version == 12 and after.epoch > before.epoch
    is_policy(again, policy)  # the same numbers, learnt twice
    assert main.main(["sync", "pull", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert Path(capsys.readouterr().out.strip()).name == safetensors_files.folder_name(after.epoch, 12)
    (folder / "weights").rename(tmp_path / "weights")  # of a run that published nothing: its checkpoint
    assert main.main(["sync", "pull", str(folder), "--out", str(tmp_path / "other")]) == 0
    is_policy(held(tmp_path / "other")[1], policy)


def test_who_follows_gets_each_version_but_those_whose_numbers_are_not_finite(tmp_path: Path) -> None:
    name = f"shm:{tmp_path}/socket"
    notes: list[str] = []
    seen: list[int] = []
    publish.save(tmp_path, Publishing(("run", name), every=2))
    with (
        publish.publishing(tmp_path, small(), lambda state: state, meshes.make_mesh(1), notes.append) as tell,
        follow([name], on_commit=seen.append) as receiver,
    ):
        for done in range(1, 9):
            tell(done, 1, {"w": jnp.array([1.0, jnp.nan if done == 6 else 0.0]), "n": jnp.int32(done)})
            if done in (2, 4, 8):
                assert receiver.wait(done, 60), receiver.errors
                assert receiver.latest()[1]["n"] == done
            if done == 6:
                until(lambda: "version 6 is not published: its numbers are not finite" in notes)
    assert seen == [2, 4, 8]
    found, values = held(tmp_path / "weights")  # what is told last is on the disk at the end
    assert found.version == 8 and values["n"] == 8


def test_a_trainer_that_starts_after_the_clock_went_back_has_a_later_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish.save(tmp_path, Publishing(("run",)))
    for now in (5_000, 2_000, 9_000):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        with publish.publishing(tmp_path, small(), lambda state: state, meshes.make_mesh(1), lambda line: None) as tell:
            tell(1, 1, {"w": jnp.float32(now)})
        found, tensors = held(tmp_path / "weights")
        assert tensors["w"] == now
        assert found.epoch == {2_000: 5_001}.get(now, now)


def test_a_copy_outlives_the_state_it_was_taken_of() -> None:
    state = {"w": jnp.arange(8.0)}
    copied, finite = publish.copying(lambda state: state, meshes.make_mesh(1), "as-is")(state)
    jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0, x), donate_argnums=0)(state)
    assert state["w"].is_deleted()
    assert finite and np.array_equal(copied["w"], np.arange(8.0))
    half = {"w": jnp.float32([0.1, 3.0]), "n": jnp.int32(1)}
    copied, _ = publish.copying(lambda state: state, meshes.make_mesh(1), "bf16")(half)
    assert copied["w"].dtype == jnp.bfloat16 and copied["n"].dtype == jnp.int32
    assert jnp.array_equal(copied["w"], half["w"].astype(jnp.bfloat16))


def test_of_those_that_wait_only_the_newest_travels(tmp_path: Path) -> None:
    held_up, going = threading.Event(), threading.Event()

    def take(params: dict[str, Any]) -> dict[str, Any]:
        going.set()
        assert held_up.wait(20)
        return params

    with (
        Publisher("run", transports=[FolderTransport(tmp_path, durable=False)]) as sender,
        Producer(sender, take) as producer,
    ):
        producer.publish(1, tensors(1))
        assert going.wait(20)
        for version in (2, 3, 4):
            producer.publish(version, tensors(version))
        held_up.set()
        assert producer.drain(20)
        assert (producer.published, producer.newest) == (2, 4)
        assert held(tmp_path)[0].version == 4  # what is drained is on the disk


def test_addresses_to_publish_at_are_checked_and_kept(tmp_path: Path) -> None:
    values = {"publish": ("run", "there"), "publish-every": 3, "publish-precision": "bf16"}
    values |= {"publish-token-file": None, "publish-anchor": 8}
    asked = chosen(values, frozenset({"publish", "publish-every"}))
    assert asked == Publishing(("run", f"folder:{Path('there').absolute()}"), 3)
    publish.save(tmp_path, asked)
    assert chosen(values, frozenset(), publish.load(tmp_path)) == asked  # a run that goes on keeps to it
    assert chosen({"publish": ("none",)}, frozenset({"publish"}), asked) is None
    with pytest.raises(RunError, match=r"take its weights with --rollout-servers http://127\.0\.0\.1:8000"):
        publish.address("http://127.0.0.1:8000")
    assert publish.address("./a:b") == f"folder:{Path('a:b').absolute()}"
    assert chosen(values, frozenset()) is None
    for given, told in (
        ({"publish": ("tcp:x",)}, "tcp:x"),
        (
            {"publish": ("127.0.0.1:7171",)},
            r"--publish 127\.0\.0\.1:7171: .* is no address; write shm:NAME, tcp:HOST:PORT",
        ),
        ({"publish": ("udp:1:2",)}, "--publish udp:1:2: 'udp:1:2' is no address; write shm:NAME, tcp:HOST:PORT"),
        ({"publish": ("run",), "publish-every": 0}, "--publish-every is 0"),
        ({"publish-every": 2}, "need --publish"),
    ):
        with pytest.raises(RunError, match=told):
            chosen(given, frozenset(given))


@pytest.mark.parametrize(("library", "flag"), [("xxhash", "--publish"), ("zstandard", "--publish-anchor 8")])
def test_libraries_for_publishing_are_asked_for_before_a_run(
    longhaul: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, flag: str
) -> None:
    """Without it no version would come, or only the first, and the run would train to its end."""
    monkeypatch.setitem(sys.modules, library, None)
    words = "train cartpole --total-steps 512 --num-envs 16 --num-steps 32 --publish out --publish-anchor 8"
    assert_refused(longhaul(*words.split()), f"{flag} needs {library}: pip install 'longhaul-rl[sync]'")
    assert tree(tmp_path) == []
