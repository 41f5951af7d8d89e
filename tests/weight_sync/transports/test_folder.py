"""Folders of versions: two writers, a full disk, an interruption, a spoilt file."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import safetensors_files
from longhaul.weight_sync.transports.folder import FolderSource, FolderTransport
from tests.helpers.weight_sync_transports import is_whole, receivers, tensors, until, way

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
    data = second.read_bytes()
    for bad in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b"", None):
        if bad is None:
            second.unlink()
        else:
            second.write_bytes(bad)
        assert safetensors_files.stage(manifest, image, tmp_path / "b", 3000, durable=False) == staging
        assert second.read_bytes() == data and first.stat().st_mtime_ns == at
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
