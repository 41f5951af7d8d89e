"""Folders of versions: two writers, a full disk, an interruption, a spoilt file; versions as changes.

Any reader gets a version of a chain of changes bit for bit, from whatever it holds, or says why not.
"""

from __future__ import annotations

import errno
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from longhaul.weight_sync import manifest
from longhaul.weight_sync.delta import tensor_delta
from longhaul.weight_sync.protocol import NOTHING, Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import folder as folders
from longhaul.weight_sync.transports import safetensors_files
from longhaul.weight_sync.transports.folder import FolderSource, FolderTransport
from tests.helpers.weight_sync_transports import CODEC, damaged, is_whole, receivers, tensors, until, way

QUICK = Settings(lease=3.0, deadline=3.0, retries=1)


def test_of_two_writers_of_a_folder_the_later_epoch_wins(tmp_path: Path) -> None:
    old = Publisher("run", epoch=1, transports=[FolderTransport(tmp_path, durable=False)], settings=QUICK)
    with old, Receiver(lambda: FolderSource(tmp_path)) as receiver:
        old.publish(50, tensors(50))
        assert receiver.wait(50, 20), receiver.errors
        with Publisher("run", epoch=2, transports=[FolderTransport(tmp_path, durable=False)], settings=QUICK) as new:
            new.publish(3, tensors(3))
            until(lambda: receiver.held.epoch == 2)
            old.publish(51, tensors(51))
            until(lambda: any("epoch" in why for _, why in old.status()["dropped"]))
            assert safetensors_files.newest(tmp_path) == (2, 3)
            assert receiver.held.epoch == 2 and is_whole(*receiver.latest())


def test_a_full_disk_holds_nobody_up_and_is_got_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pour, full = safetensors_files._pour, threading.Event()

    def limited(file, shard, image):  # type: ignore[no-untyped-def]
        if full.is_set() and shard.name.startswith("model-00002"):
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        pour(file, shard, image)

    monkeypatch.setattr(safetensors_files, "_pour", limited)
    lane = FolderTransport(tmp_path / "folder", shard=3000, durable=False)
    there = way("tcp", tmp_path)
    with Publisher("run", transports=[lane, there.serve()], settings=QUICK) as sender, receivers(there) as (receiver,):
        sender.publish(1, tensors(1))
        assert receiver.wait(1, 20)
        until(lambda: lane.latest and lane.latest.name.endswith("-1"))
        full.set()
        sender.publish(2, tensors(2))
        assert receiver.wait(2, 20), receiver.errors  # who has memory goes on
        until(lambda: any("the disk is full" in line for line in lane.errors))
        assert (
            lane.latest is not None and safetensors_files.read_manifest(lane.latest).version == 1
        )  # whole, and the latest
        assert not list((tmp_path / "folder").glob("*/*.part"))
        full.clear()
        until(lambda: lane.latest and lane.latest.name.endswith("-2"))  # by itself
        with Receiver(lambda: FolderSource(tmp_path / "folder")) as reader:
            assert reader.wait(2, 20) and is_whole(*reader.latest())


def test_an_interrupted_version_goes_on_with_its_complete_shards(tmp_path: Path) -> None:
    with Publisher("run", epoch=1, transports=[FolderTransport(tmp_path / "a", shard=3000, durable=False)]) as sender:
        sender.publish(1, tensors(1))
        assert sender.wait(1, 20)
        until(lambda: safetensors_files.newest(tmp_path / "a"))
    whole = tmp_path / "a" / safetensors_files.folder_name(1, 1)
    manifest = safetensors_files.read_manifest(whole)
    image = np.zeros(manifest.size, np.uint8)
    safetensors_files.read(whole, manifest, image, lambda *_: None)
    staging = safetensors_files.stage(manifest, image, tmp_path / "b", 3000, durable=False)
    first, second = (staging / shard.name for shard in safetensors_files.shards(manifest, 3000))
    at = first.stat().st_mtime_ns
    (staging / "stray").mkdir()
    data = second.read_bytes()
    for bad in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b"", None):
        if bad is None:
            second.unlink()
        else:
            second.write_bytes(bad)
        assert safetensors_files.stage(manifest, image, tmp_path / "b", 3000, durable=False) == staging
        assert second.read_bytes() == data and first.stat().st_mtime_ns == at
        assert not (staging / "stray").exists()
    image[0] ^= 1
    first.unlink()
    with pytest.raises(safetensors_files.Damaged):
        safetensors_files.stage(manifest, image, tmp_path / "b", 3000, durable=False)
    assert not first.exists()


def test_a_spoilt_file_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longhaul.weight_sync.transports.folder.PAUSE", 0.01)
    with Publisher("run", epoch=1, transports=[FolderTransport(tmp_path, shard=3000, durable=False)]) as sender:
        with Receiver(lambda: FolderSource(tmp_path)) as receiver:
            sender.publish(1, tensors(1))
            assert receiver.wait(1, 20)
        sender.publish(2, tensors(2))
        until(lambda: safetensors_files.newest(tmp_path) == (1, 2))
        path = tmp_path / safetensors_files.folder_name(1, 2) / "model-00001-of-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        with Receiver(lambda: FolderSource(tmp_path)) as receiver:
            until(lambda: any("damaged: a" in line for line in receiver.errors))
            assert receiver.served is None
            sender.publish(3, tensors(3))
            assert receiver.wait(3, 20) and is_whole(*receiver.latest())


# ---------------------------------------------------------------------------------------------------- chains of changes

SIZE, VERSIONS = 20_000, 11


def weights() -> Iterator[dict[str, np.ndarray]]:
    """Tensors of which few elements change, once all of them (version 6)."""
    draw = np.random.default_rng(0)
    given = {"w": draw.integers(0, 1 << 16, SIZE, np.uint16), "still": np.ones((50, 7), np.float32)}
    for version in range(VERSIONS):
        if version == 6:
            given["w"][:] = draw.integers(0, 1 << 16, SIZE, np.uint16)
        given["w"][draw.integers(0, SIZE, 300)] += 1
        yield {name: array.copy() for name, array in given.items()}


def written(folder: Path, keep: int = 100, anchor: int = 4) -> list[dict[str, np.ndarray]]:
    """All versions in `folder`, one after the other, and what they hold."""
    given = list(weights())
    lane = FolderTransport(folder, keep=keep, durable=False, anchor=anchor, beside={"config.json": b"{}"})
    with Publisher("run", epoch=3, transports=[lane], budget=5 * 45_000) as sender:
        for version, expected in enumerate(given):
            sender.publish(version, expected)
            until(lambda: lane.latest is not None and lane.latest.name == safetensors_files.folder_name(3, version))  # noqa: B023
        assert sender.peak_bytes <= 5 * 45_000
    return given


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All versions in a folder; 0 and 6 are whole."""
    folder = tmp_path_factory.mktemp("chained") / "versions"
    written(folder, anchor=100)
    return folder


def is_version(receiver: Receiver, given: list[dict[str, np.ndarray]]) -> bool:
    version, held = receiver.latest()
    return all(held[name].tobytes() == array.tobytes() for name, array in given[version].items())


@CODEC
def test_anchors_are_written_where_they_are_due_and_the_rest_is_small(tmp_path: Path) -> None:
    given = written(tmp_path)
    whole = [v for v in range(VERSIONS) if folders.link(tmp_path / safetensors_files.folder_name(3, v)) is None]
    assert whole == [0, 4, 6, 10]  # each fourth, and where all has changed; then counted anew
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / safetensors_files.folder_name(3, v)).iterdir()) for v in (0, 1)
    ]
    assert sizes[1] < sizes[0] / 20
    assert (tmp_path / safetensors_files.folder_name(3, 1) / "config.json").read_bytes() == b"{}"
    for version, expected in enumerate(given):
        found = safetensors_files.read_manifest(tmp_path / safetensors_files.folder_name(3, version))
        image = np.zeros(found.size, np.uint8)
        folders.read(tmp_path, found, image, None, lambda image, count: None)
        assert not damaged(found, image)
        held = manifest.views(found, image)
        assert all(held[name].tobytes() == array.tobytes() for name, array in expected.items())


@CODEC
def test_who_follows_reads_links_and_who_comes_late_the_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    chain = folders.chain
    monkeypatch.setattr(folders, "chain", lambda *args: (read.extend(found := chain(*args)), found)[1])
    given = list(weights())
    lane = FolderTransport(tmp_path / "versions", keep=1, durable=False, anchor=8)
    there = way("folder", tmp_path)
    with Publisher("run", epoch=3, transports=[lane]) as sender, receivers(there) as (receiver,):
        for version in range(4):
            sender.publish(version, given[version])
            assert receiver.wait(version, 20), receiver.errors
            assert is_version(receiver, given)
        assert [len(folders.chain(lane.folder, (3, 3), held)) for held in ((3, 2), (3, 0), None)] == [1, 3, 4]
        with receivers(there) as (late,):
            assert late.wait(3, 20) and is_version(late, given)
            assert late.held.root == receiver.held.root
        assert sorted(safetensors_files.versions(lane.folder)) == [
            (3, v) for v in range(4)
        ]  # kept, since 3 builds upon them


@CODEC
def test_old_chains_go_when_nothing_builds_upon_them(tmp_path: Path) -> None:
    written(tmp_path, keep=2)
    assert sorted(safetensors_files.versions(tmp_path)) == [(3, v) for v in (6, 7, 8, 9, 10)]


@CODEC
def test_a_restarted_trainer_begins_with_an_anchor(chained: Path, tmp_path: Path) -> None:
    given = list(weights())
    shutil.copytree(chained, tmp_path, dirs_exist_ok=True)
    lane = FolderTransport(tmp_path, keep=1, durable=False, anchor=100)
    with Publisher("run", epoch=4, transports=[lane]) as sender:
        sender.publish(2, given[2])
        until(lambda: lane.latest is not None and lane.latest.name == safetensors_files.folder_name(4, 2))
    assert folders.link(tmp_path / safetensors_files.folder_name(4, 2)) is None
    assert safetensors_files.versions(tmp_path) == [(4, 2)]


@CODEC
@pytest.mark.parametrize("fault", ["flipped", "cut", "swapped", "missing", "loop", "rooted"])
def test_a_broken_chain_is_never_served_and_the_next_anchor_mends_it(fault: str, chained: Path, tmp_path: Path) -> None:
    given = list(weights())
    shutil.copytree(chained, tmp_path, dirs_exist_ok=True)
    first, second = (tmp_path / safetensors_files.folder_name(3, v) / folders.CHANGES for v in (7, 8))
    data = bytearray(first.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 4
        first.write_bytes(data)
    elif fault == "cut":
        first.write_bytes(data[:-1])
    elif fault == "swapped":
        first.write_bytes(second.read_bytes())
    elif fault == "missing":
        shutil.rmtree(tmp_path / safetensors_files.folder_name(3, 6))
    elif fault == "loop":
        head = folders.HEAD.pack(folders.MAGIC, 3, 9, *folders.HEAD.unpack_from(data)[3:])
        first.write_bytes(tensor_delta.seal(head) + data[folders.HEAD.size + tensor_delta.SEAL :])
    else:  # the frames are right, and the head says another base
        head = folders.HEAD.pack(*folders.HEAD.unpack_from(data)[:3], bytes(16), *folders.HEAD.unpack_from(data)[4:])
        first.write_bytes(tensor_delta.seal(head) + data[folders.HEAD.size + tensor_delta.SEAL :])
    with Receiver(lambda: FolderSource(tmp_path)) as receiver:
        until(lambda: receiver.errors)
        assert receiver.served is None and receiver.held == NOTHING
        with Publisher("run", epoch=4, transports=[FolderTransport(tmp_path, durable=False)]) as sender:
            sender.publish(5, given[5])
            assert receiver.wait(5, 20), receiver.errors
            assert is_version(receiver, given)


def test_wrong_names_beside_a_version_are_refused(tmp_path: Path) -> None:
    for name in ("../config.json", "model.safetensors", ".hidden"):
        with pytest.raises(ValueError, match="plain name"):
            FolderTransport(tmp_path, beside={name: b""})


def test_changes_are_asked_for_only_where_they_can_be_coded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without zstandard or numba the first version came, and none after it."""
    for name in ("zstandard", "numba"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            with pytest.raises(ValueError, match=f"needs {name}: pip install"):
                FolderTransport(tmp_path, anchor=2)
            with pytest.raises(ValueError, match=f"needs {name}: pip install"):
                Publisher("run", send_changes=True)
            FolderTransport(tmp_path, anchor=1)
