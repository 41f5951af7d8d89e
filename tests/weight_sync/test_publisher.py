"""States that must never be, whoever stands still, writes beside another, fills the disk or comes by the hundred: a
hang, or a wrong version served."""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from longhaul.weight_sync.protocol import NOTHING, Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import safetensors_files, tcp
from longhaul.weight_sync.transports.folder import FolderTransport
from tests.helpers.weight_sync_transports import is_whole, process, receivers, tensors, until, way

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


def test_a_close_writes_what_was_taken_and_an_error_ends_at_once(tmp_path: Path) -> None:
    with Publisher("run", epoch=1, transports=[FolderTransport(tmp_path / "whole")]) as sender:
        assert sender.publish(1, tensors(1))
    assert safetensors_files.newest(tmp_path / "whole") == (1, 1)

    class Slow(FolderTransport):
        """Comes to a version only when it is told to close."""

        def _take(self, *parcel: object) -> None:
            self._closed.wait()

    for ends, deadline in ((None, 1.0), (0.0, 100.0)):
        settings = Settings(lease=200.0, deadline=deadline)
        sender = Publisher("run", transports=[Slow(tmp_path / "slow")], settings=settings)
        assert sender.publish(1, tensors(1))
        began = time.monotonic()
        sender.close(ends)
        assert (deadline if ends is None else 0.0) <= time.monotonic() - began < 60.0
    began = time.monotonic()

    def fails() -> None:
        settings = Settings(lease=200.0, deadline=100.0)
        with Publisher("run", transports=[Slow(tmp_path / "slow")], settings=settings) as sender:
            raise KeyError(sender.publish(1, tensors(1)))

    with pytest.raises(KeyError, match="True"):
        fails()
    assert time.monotonic() - began < 60.0


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


def test_twelve_receivers_end_with_the_newest(tmp_path: Path) -> None:
    crowd(12, tmp_path)


@pytest.mark.slow
def test_three_hundred_receivers_end_with_the_newest(tmp_path: Path) -> None:
    crowd(300, tmp_path)


RECEIVER = """
import sys, threading, time
from longhaul.weight_sync.transports import sockets
from longhaul.weight_sync.receiver import follow
address, phase, version = sys.argv[1], sys.argv[2], int(sys.argv[3])
first = threading.Lock()
def say():  # once, whichever thread comes first
    if first.acquire(blocking=False):
        print("here", flush=True)
def hang(name, after):
    before = getattr(sockets.SocketSource, name)
    def hung(self, *args):
        told = [each for each in args if getattr(getattr(each, "offer", each), "version", each) == version]
        found = before(self, *args) if after else None
        if told:
            say()
            time.sleep(600)
        return before(self, *args) if not after else found
    setattr(sockets.SocketSource, name, hung)
if phase != "serving":
    hang(*{"asked": ("fetch", False), "fetched": ("fetch", True), "staged": ("ready", False), "ready": ("ready", True),
           "committed": ("done", False)}[phase])
receiver = follow([address], name="victim")
assert receiver.wait(version, 60)
held = receiver.latest()
say()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("shared", phase) for phase in ("fetched", "ready", "serving")]
    + [("tcp", phase) for phase in ("asked", "staged", "committed")],
)
def test_a_receiver_killed_in_any_phase_holds_nobody_up(kind: str, phase: str, tmp_path: Path) -> None:
    there = way(kind, tmp_path)
    lane = there.serve()
    with Publisher("run", transports=[lane], settings=Settings(deadline=30.0)) as sender, receivers(there) as (other,):
        sender.publish(1, tensors(1))
        assert other.wait(1, 20)
        with process(sys.executable, "-c", RECEIVER, lane.address, phase, "2") as victim:
            assert victim.stdout is not None
            until(lambda: len(sender.status()["receivers"]) == 2)
            until(lambda: {each["version"] for each in sender.status()["receivers"]} == {1})
            sender.publish(2, tensors(2))
            assert victim.stdout.readline() == "here\n"
            victim.send_signal(signal.SIGKILL)
            victim.wait()
        began = time.monotonic()
        assert sender.wait(2, 20) and other.wait(2, 20), other.errors
        for version in range(3, 9):  # every image serves again
            sender.publish(version, tensors(version))
            assert other.wait(version, 20), other.errors
            assert is_whole(*other.latest())
        assert time.monotonic() - began < 25
        assert sender.peak_bytes <= 4 * sender.status()["image_bytes"]


SENDER = """
import sys, time
import numpy as np
from longhaul.weight_sync import publisher as engine
from longhaul.weight_sync.transports import sockets as wire
from longhaul.weight_sync.transports import serve
address, phase = sys.argv[1:]
def hang(*_):
    print("here", flush=True)
    time.sleep(600)
lane = serve(address)
sender = engine.Publisher("run", epoch=1, transports=[lane])
def tensors(v):
    return {"a": np.full(200_000, v, np.int32), "b": np.full((7, 3), v, np.float32), "c": np.array(v, np.uint8)}
sender.publish(1, tensors(1))
assert sys.stdin.readline() == "go\\n"
if phase == "pouring":
    def half(self, data, seconds):
        self.sock.sendall(data[: len(data) // 2])
        hang()
    wire.Wire.pour = half
elif phase == "deciding":
    engine.Publisher.ready = hang
elif phase == "offering":
    engine.Publisher.ask = hang
sender.publish(2, tensors(2))
time.sleep(600)
"""


@pytest.mark.parametrize(("kind", "phase"), [("tcp", "pouring"), ("tcp", "deciding"), ("shared", "deciding")])
def test_a_sender_killed_in_any_phase_leaves_the_old_version_served(kind: str, phase: str, tmp_path: Path) -> None:
    there = way(kind, tmp_path)
    lane = there.serve()
    address = lane.address
    lane.close()
    with receivers(there) as (receiver,):
        with process(sys.executable, "-c", SENDER, address, phase) as sender:
            assert sender.stdin is not None and sender.stdout is not None
            assert receiver.wait(1, 30), receiver.errors
            sender.stdin.write("go\n")
            sender.stdin.flush()
            assert sender.stdout.readline() == "here\n"
            sender.send_signal(signal.SIGKILL)
            sender.wait()
        time.sleep(0.1)
        assert receiver.latest()[0] == 1 and is_whole(*receiver.latest())
        with Publisher("run", epoch=2, transports=[there.serve()]) as again:
            again.publish(1, tensors(1, 200_000))
            until(lambda: receiver.held.epoch == 2)
            assert is_whole(*receiver.latest())
