"""Contract of a transport of weight synchronisation, run for each of them."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from longhaul.weight_sync import packing
from longhaul.weight_sync.delta import version_delta
from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import tcp
from tests.helpers.weight_sync_transports import (
    CODEC,
    KINDS,
    Way,
    is_whole,
    process,
    receivers,
    tensors,
    until,
    way,
)


@pytest.fixture(params=KINDS)
def lane(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    return way(request.param, tmp_path)


def test_a_version_comes_bit_by_bit_in_every_dtype(lane: Way) -> None:
    from tests.weight_sync.test_manifest import arrays

    sent = arrays()
    with Publisher("run", transports=[lane.serve()]) as sender, receivers(lane) as (receiver,):
        sender.publish(5, sent)
        assert receiver.wait(5, 20), receiver.errors
        version, held = receiver.latest()
        assert version == 5 and list(held) == list(sent)
        for name in sent:
            assert held[name].dtype == sent[name].dtype and held[name].tobytes() == sent[name].tobytes()
            assert not held[name].flags.writeable
        del held


def test_versions_come_in_order_and_each_is_whole(lane: Way) -> None:
    seen: list[int] = []
    with Publisher("run", transports=[lane.serve()]) as sender, receivers(lane, on_commit=seen.append) as (receiver,):
        for version in range(20):
            assert sender.publish(version, tensors(version))
            if version % 3 == 0:
                assert receiver.wait(version, 20), receiver.errors
                now, held = receiver.latest()
                assert is_whole(now, held)
                assert receiver.held.root == receiver.served.manifest.root
                del held
        assert receiver.wait(19, 20)
    assert seen == sorted(set(seen)) and seen[-1] == 19


def test_what_was_taken_comes_before_the_end(lane: Way) -> None:
    with receivers(lane, 2) as both:
        with Publisher("run", transports=[lane.serve()]) as sender:
            sender.publish(1, tensors(1))
            assert all(one.wait(1, 20) for one in both)
            assert sender.publish(2, tensors(2)) and sender.publish(3, tensors(3), lent=True)
        sender.close()  # once more changes nothing
        with pytest.raises(ValueError, match="closed"):
            sender.publish(4, tensors(4))
        assert all(one.wait(3, 20) for one in both), both[0].errors


def test_who_comes_late_gets_the_newest(lane: Way) -> None:
    with Publisher("run", transports=[lane.serve()]) as sender:
        for version in (1, 2, 3):
            sender.publish(version, tensors(version))
            assert sender.wait(version, 20)
        with receivers(lane, 2) as late:
            for receiver in late:
                assert receiver.wait(3, 20), receiver.errors
                assert is_whole(*receiver.latest())


def test_who_comes_late_is_seeded_by_whoever_has_the_newest(lane: Way, tmp_path: Path) -> None:
    store = way("folder", tmp_path / "store")
    with Publisher("run", epoch=1, transports=[store.serve()]) as before:
        before.publish(5, tensors(5))
        assert before.wait(5, 20)
    with Publisher("run", epoch=2, transports=[lane.serve()]) as sender:  # started anew, and has nothing yet
        with Receiver(lane.connect, store.connect) as receiver:
            assert receiver.wait(5, 20) and is_whole(*receiver.latest())
            sender.publish(1, tensors(1))
            until(lambda: receiver.held.epoch == 2)
            assert is_whole(*receiver.latest())
        with Receiver(store.connect, lane.connect) as receiver:  # the newest wins, wherever it is
            until(lambda: receiver.held.epoch == 2)


def test_a_reader_keeps_its_version_while_others_come_and_go(lane: Way) -> None:
    with Publisher("run", transports=[lane.serve()]) as sender, receivers(lane) as (receiver,):
        sender.publish(0, tensors(0))
        assert receiver.wait(0, 20)
        _, kept = receiver.latest()
        for version in range(1, 12):
            sender.publish(version, tensors(version))
            assert receiver.wait(version, 20), receiver.errors
            assert is_whole(0, kept)
        receiver.close()
        assert is_whole(0, kept)
        del kept


def test_damage_is_found_and_the_old_version_served(lane: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = packing.gather

    def spoilt(given, planned, image, *rest):  # type: ignore[no-untyped-def]
        found = gather(given, planned, image, *rest)
        if given["a"][0] == 2:
            image[planned[1].offset + 3] ^= 0x10
        return found

    monkeypatch.setattr(packing, "gather", spoilt)
    settings = Settings(retries=1)
    with Publisher("run", transports=[lane.serve()], settings=settings) as sender, receivers(lane) as (receiver,):
        sender.publish(1, tensors(1))
        assert receiver.wait(1, 20), receiver.errors
        sender.publish(2, tensors(2))
        if lane.answers:
            until(lambda: sum("damaged: b" in line for line in receiver.errors) >= 2)
        assert not sender.wait(2, 5)
        assert any("damaged" in why for _, why in sender.status()["dropped"])
        assert is_whole(*receiver.latest()) and receiver.latest()[0] == 1
        assert 2 in sender._cohort.aborted or sender._cohort.committed == 1
        sender.publish(3, tensors(3))
        assert receiver.wait(3, 20), receiver.errors  # without a restart
        assert is_whole(*receiver.latest())


def test_a_restarted_trainer_goes_on_in_a_new_epoch(lane: Way) -> None:
    with receivers(lane) as (receiver,):
        with Publisher("run", epoch=1, transports=[lane.serve()]) as sender:
            sender.publish(9, tensors(9))
            assert receiver.wait(9, 20), receiver.errors
        assert is_whole(*receiver.latest())  # it serves on without a sender
        with Publisher("run", epoch=2, transports=[lane.serve()]) as sender:
            sender.publish(4, tensors(4))  # from a checkpoint before
            until(lambda: receiver.held.epoch == 2)
            assert receiver.latest()[0] == 4 and is_whole(*receiver.latest())


def test_an_older_epoch_and_another_run_change_nothing(lane: Way) -> None:
    with receivers(lane) as (receiver,):
        with Publisher("run", epoch=5, transports=[lane.serve()]) as sender:
            sender.publish(1, tensors(1))
            assert receiver.wait(1, 20), receiver.errors
        for run, epoch in (("run", 4), ("other", 9)):
            if not lane.answers:  # who writes into a folder is refused at once
                with pytest.raises(ValueError, match=r"superseded|run run"):
                    Publisher(run, epoch=epoch, transports=[lane.serve()])
                continue
            with Publisher(run, epoch=epoch, transports=[lane.serve()]) as sender:
                sender.publish(8, tensors(8))
                count = len(receiver.errors)
                until(lambda: any(run in each or "epoch 4" in each for each in receiver.errors[count:]))  # noqa: B023
                assert receiver.latest()[0] == 1 and is_whole(*receiver.latest())


def test_memory_stays_within_the_budget(lane: Way) -> None:
    size = 1 << 16
    image = 4 * size + 64 * 3
    with (
        Publisher("run", transports=[lane.serve()], budget=3 * image) as sender,
        receivers(lane, 2, budget=2 * image) as both,
    ):
        for version in range(30):
            sender.publish(version, tensors(version, size))
        for receiver in both:
            assert receiver.wait(29, 20), receiver.errors
            assert receiver.peak_bytes <= 2 * image
        assert sender.peak_bytes <= 3 * image


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list descriptors")
def test_nothing_is_left_behind(lane: Way) -> None:
    def once() -> None:
        with Publisher("run", transports=[lane.serve()]) as sender, receivers(lane, 3) as three:
            sender.publish(0, tensors(0))
            assert all(receiver.wait(0, 20) for receiver in three)

    once()
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    once()
    gc.collect()
    assert (descriptors(), threading.active_count()) == (before, threads)


def test_lent_tensors_go_without_waiting(lane: Way) -> None:
    with Publisher("run", transports=[lane.serve()]) as sender, receivers(lane) as (receiver,):
        kept = [tensors(version) for version in range(8)]
        for version, given in enumerate(kept):
            assert sender.publish(version, given, lent=True)
        assert sender.wait(7, 20) and receiver.wait(7, 20)
        assert is_whole(*receiver.latest())
        assert np.array_equal(kept[7]["a"], receiver.latest()[1]["a"])


OTHER = """
import sys
from longhaul.weight_sync.receiver import follow
with follow([sys.argv[1]], name="other") as receiver:
    for version in map(int, sys.stdin):
        assert receiver.wait(version, 120), receiver.errors  # of a chain both sides compile their loops first
        now, held = receiver.latest()
        print(now, receiver.held.root.hex(), int(held["a"].min()), int(held["a"].max()), flush=True)
        del held
"""


def test_a_version_reaches_another_process(lane: Way, tmp_path: Path) -> None:
    opened = lane.serve()
    with Publisher("run", transports=[opened]) as sender, process(sys.executable, "-c", OTHER, opened.address) as other:
        assert other.stdin is not None and other.stdout is not None
        for version in range(3):
            sender.publish(version, tensors(version))
            other.stdin.write(f"{version}\n")
            other.stdin.flush()
            root = sender.status()["root"] if sender.wait(version, 120) else ""
            assert other.stdout.readline().split() == [str(version), root, str(version), str(version)]
        other.stdin.close()
        assert other.wait(30) == 0


@pytest.fixture
def changes_sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each body of changes that a sender sends, in order."""
    sizes, send = list[int](), tcp.Wire.send

    def sent(wire: tcp.Wire, kind: str, seconds: float, words: dict[str, int] | None = None, *rest: bytes) -> None:
        if kind == "changes" and words is not None:
            sizes.append(words["size"])
        send(wire, kind, seconds, words, *rest)

    monkeypatch.setattr(tcp.Wire, "send", sent)
    return sizes


@CODEC
def test_only_what_changed_travels_to_who_holds_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes_sent: list[int]
) -> None:
    frames, spoil = version_delta.frames, threading.Event()

    def spoilt(*given):  # type: ignore[no-untyped-def]
        for tensor, frame in frames(*given):
            if spoil.is_set():
                frame[len(frame) // 2] ^= 1
                spoil.clear()
            yield tensor, frame

    monkeypatch.setattr(version_delta, "frames", spoilt)
    there = way("tcp", tmp_path)
    draw = np.random.default_rng(0)
    given = {"w": draw.integers(0, 1 << 16, 40_000, np.uint16), "still": np.ones(5000, np.float32)}
    with Publisher("run", transports=[there.serve()], send_changes=True) as sender, receivers(there, 2) as both:
        until(lambda: len(sender.status()["receivers"]) == 2)
        for version in range(6):
            given["w"][draw.integers(0, 40_000, 400)] += 1
            if version == 3:
                spoil.set()
            if version == 4:
                given["w"][:] = draw.integers(0, 1 << 16, 40_000, np.uint16)  # all of it
            sender.publish(version, given)
            for receiver in both:
                assert receiver.wait(version, 20), receiver.errors
                assert receiver.latest()[1]["w"].tobytes() == given["w"].tobytes()
                assert receiver.held.root.hex() == sender.status()["root"]
        assert sum("damaged changes" in line for receiver in both for line in receiver.errors) == 1
    # Versions 1, 2, 3 and 5 to both; the damaged one then came whole.
    assert len(changes_sent) == 8 and max(changes_sent) < 3000


@CODEC
def test_changes_come_only_where_the_receivers_budget_has_room_for_them(
    tmp_path: Path, changes_sent: list[int]
) -> None:
    there = way("tcp", tmp_path)
    draw = np.random.default_rng(0)
    given = {name: draw.integers(0, 1 << 16, 20_000, np.uint16) for name in ("v", "w")}
    size = 2 * packing.describe(given)[1]  # of two images
    for room, changed in ((0, 0), (size, 2)):
        with (
            Publisher("run", transports=[there.serve()], send_changes=True) as sender,
            receivers(there, budget=size + room) as (receiver,),
        ):
            changes_sent.clear()
            until(lambda: sender.status()["receivers"])
            for version in range(4):
                for array in given.values():
                    array[draw.integers(0, array.size, 200)] += 1
                sender.publish(version, given)
                assert receiver.wait(version, 20), receiver.errors
                assert receiver.latest()[1]["w"].tobytes() == given["w"].tobytes()
            assert receiver.peak_bytes <= size + room
            assert len(changes_sent) >= changed and (changed or not changes_sent)
            if changed:  # one frame at a time, of two
                assert size < receiver.peak_bytes < size + max(changes_sent)


def test_parameters_of_jax_travel_as_they_are(tmp_path: Path) -> None:
    import jax.numpy as jnp

    there = way("shared", tmp_path)
    given = {"w": jnp.linspace(-3, 3, 12, dtype=jnp.bfloat16).reshape(3, 4), "b": jnp.float32(0.1)}
    with Publisher("run", transports=[there.serve()]) as sender, receivers(there) as (receiver,):
        sender.publish(0, given)
        assert receiver.wait(0, 20)
        _, held = receiver.latest()
        for name, array in given.items():
            assert held[name].dtype == array.dtype and held[name].tobytes() == np.asarray(array).tobytes()
            assert jnp.array_equal(jnp.asarray(held[name]), array)
        del held
        with pytest.raises(ValueError, match=r"another form of tensors than before \(b, w\)"):
            sender.publish(1, {"w": given["w"].T, "b": given["w"]})
        with pytest.raises(ValueError, match="versions grow"):
            sender.publish(0, given)
