"""What must never be, whoever stands still, writes beside another, fills the disk or comes by the hundred: a hang, or
a wrong version served."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from longhaul.weight_sync.protocol import NOTHING, ProtocolError, Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import safetensors_files, shared_memory, tcp
from longhaul.weight_sync.transports.folder import FolderSource, FolderTransport
from tests.helpers.weight_sync_transports import is_whole, receivers, tensors, until, way

QUICK = Settings(lease=3.0, deadline=3.0, retries=1)


# -------------------------------------------------------------------------------------------- slow, two, full


def stalled(address: str) -> tcp.SocketSource:
    """A receiver that asks for a version, and then takes no byte of it."""
    source = tcp.connect(address.removeprefix("tcp:"), "stalled")
    source.bind(NOTHING, 5.0)
    parcel = source.ask(NOTHING, 5.0)
    assert parcel is not None
    source.wire.send("fetch", 5.0, {"version": parcel.offer.version})
    return source


@pytest.mark.parametrize("quorum", ["all", 1])
def test_who_takes_nothing_is_dropped_by_the_deadline_and_memory_is_bounded(quorum: str | int) -> None:
    lane = tcp.serve()
    size = 1 << 22  # more than sockets hold
    settings = Settings(quorum, lease=20.0, deadline=1.0, retries=0)
    image = 4 * size + 192
    with (
        Publisher("run", transports=[lane], settings=settings, budget=3 * image) as sender,
        Receiver(lambda: tcp.connect(lane.address.removeprefix("tcp:"), "quick")) as quick,
    ):
        until(lambda: sender.status()["receivers"])
        sender.publish(0, tensors(0, size))
        assert sender.wait(0, 20) and quick.wait(0, 20)
        with closing(stalled(lane.address)):
            for version in (1, 2, 3):
                sender.publish(version, tensors(version, size), patience=20.0)
                assert quick.wait(version, 20), quick.errors
                assert is_whole(*quick.latest())
            until(lambda: any("stalled" in name for name, _ in sender.status()["dropped"]))
        assert sender.peak_bytes <= 3 * image and sender.skipped == 0


def test_a_wrong_base_and_a_stale_offer_are_refused_and_nothing_changes() -> None:
    name = f"@longhaul-test-faults-{time.monotonic_ns()}"
    with Publisher("run", epoch=4, transports=[shared_memory.serve(name)]) as sender:
        sender.publish(5, tensors(5))
        with Receiver(lambda: shared_memory.connect(name, "one")) as receiver:
            assert receiver.wait(5, 20)
            with closing(shared_memory.connect(name, "two")) as source:
                source.bind(NOTHING, 5.0)
                parcel = source.ask(NOTHING, 5.0)
                assert parcel is not None
                for change in ({"base": 4}, {"epoch": 3, "version": 9}, {}, {"run": "other", "version": 9}):
                    bent = parcel._replace(offer=parcel.offer._replace(**change))
                    with pytest.raises(ProtocolError):
                        receiver._take(source, bent)
            assert is_whole(*receiver.latest())


def test_a_close_writes_what_was_taken_and_an_error_ends_at_once(tmp_path: Path) -> None:
    with Publisher("run", epoch=1, transports=[FolderTransport(tmp_path / "whole")]) as sender:
        assert sender.publish(1, tensors(1))
    assert safetensors_files.newest(tmp_path / "whole") == (1, 1)

    class Slow(FolderTransport):
        """Comes to a version only when it is told to close."""

        def _take(self, *parcel: object) -> None:
            self._closed.wait()

    for ends, least, most in ((None, 1.0, 5.0), (0.0, 0.0, 0.9)):
        sender = Publisher("run", transports=[Slow(tmp_path / "slow")], settings=Settings(lease=30.0, deadline=1.0))
        assert sender.publish(1, tensors(1))
        began = time.monotonic()
        sender.close(ends)
        assert least <= time.monotonic() - began < most
    began = time.monotonic()

    def fails() -> None:
        settings = Settings(lease=30.0, deadline=20.0)
        with Publisher("run", transports=[Slow(tmp_path / "slow")], settings=settings) as sender:
            raise KeyError(sender.publish(1, tensors(1)))

    with pytest.raises(KeyError, match="True"):
        fails()
    assert time.monotonic() - began < 5.0


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


# -------------------------------------------------------------------------------------------------------- many


def soak(count: int, kind: str, folder: Path) -> None:
    """Every version, by its digest, is the next link of a chain that sender and receivers make each for itself."""
    there = way(kind, folder)
    with Publisher("run", transports=[there.serve()]) as sender, receivers(there, 2) as both:
        chains = [b"", b""]
        wanted = b""
        until(lambda: len(sender.status()["receivers"]) == (2 if there.answers else 1))
        for version in range(count):
            given = tensors(version, 64)
            wanted = hashlib.sha256(wanted + b"".join(array.tobytes() for array in given.values())).digest()
            sender.publish(version, given)
            for i, receiver in enumerate(both):
                assert receiver.wait(version, 20), receiver.errors
                now, held = receiver.latest()
                assert now == version
                chains[i] = hashlib.sha256(chains[i] + b"".join(array.tobytes() for array in held.values())).digest()
                del held
        assert chains == [wanted, wanted] and sender.skipped == 0
        assert sender.peak_bytes <= 4 * sender.status()["image_bytes"]


def test_a_hundred_versions_are_a_chain(tmp_path: Path) -> None:
    soak(100, "shared", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "tcp", "folder"])
def test_a_thousand_versions_are_a_chain(kind: str, tmp_path: Path) -> None:
    soak(1000, kind, tmp_path)


def crowd(count: int, folder: Path) -> None:
    there = way("shared", folder)
    settings = Settings(quorum=0, lease=60.0)
    opened = there.serve()
    with Publisher("run", transports=[opened], settings=settings) as sender, receivers(there, count) as all_of_them:
        until(lambda: len(sender.status()["receivers"]) == count, 120)
        for version in range(50):
            sender.publish(version, tensors(version, 64), patience=60.0)  # nobody is waited for
            time.sleep(0.001)
        for receiver in all_of_them:
            assert receiver.wait(49, 120), receiver.errors
            assert is_whole(*receiver.latest())


def test_thirty_receivers_end_with_the_newest(tmp_path: Path) -> None:
    crowd(30, tmp_path)


@pytest.mark.slow
def test_three_hundred_receivers_end_with_the_newest(tmp_path: Path) -> None:
    crowd(300, tmp_path)
