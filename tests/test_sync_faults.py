"""What must never be, whatever is killed, cut, doubled, turned around or filled: a wrong version served, or a hang."""

from __future__ import annotations

import errno
import hashlib
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from longhaul.sync import files, wire
from longhaul.sync.engine import Publisher
from longhaul.sync.lanes import shared, tcp
from longhaul.sync.lanes.folder import FolderLane, FolderSource
from longhaul.sync.protocol import NOTHING, ProtocolError, Settings
from longhaul.sync.receiver import Receiver
from tests.sync_lanes import is_whole, process, receivers, tensors, until, way

QUICK = Settings(lease=3.0, deadline=3.0, retries=1)

# ------------------------------------------------------------------------------------------------------ kill -9

RECEIVER = """
import sys, threading, time
from longhaul.sync.lanes import sockets
from longhaul.sync.receiver import follow
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
    lane = there.lane()
    with Publisher("run", lanes=[lane], settings=Settings(deadline=30.0)) as sender, receivers(there) as (other,):
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
from longhaul.sync import engine, wire
from longhaul.sync.lanes import serve
address, phase = sys.argv[1:]
def hang(*_):
    print("here", flush=True)
    time.sleep(600)
lane = serve(address)
sender = engine.Publisher("run", epoch=1, lanes=[lane])
def tensors(v):
    return {"a": np.full(200_000, v, np.int32), "b": np.full((7, 3), v, np.float32), "c": np.array(v, np.uint8)}
sender.publish(1, tensors(1))
assert sys.stdin.readline() == "go\\n"
if phase == "pouring":
    def half(self, data, seconds, *more):
        self.sock.sendall(data[: len(data) // 2])
        hang()
    wire.Wire.pour_memory = half
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
    lane = there.lane()
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
        with Publisher("run", epoch=2, lanes=[there.lane()]) as again:
            again.publish(1, tensors(1, 200_000))
            until(lambda: receiver.held.epoch == 2)
            assert is_whole(*receiver.latest())


# ---------------------------------------------------------------------------------------------------- the wire


def pair() -> tuple[wire.Wire, wire.Wire]:
    a, b = socket.socketpair()
    mine, other = wire.Wire(a), wire.Wire(b)
    mine.session = other.session = 77
    return mine, other


def frames(count: int, session: int = 77) -> list[bytes]:
    """What a side would send: each frame's bytes."""
    a, b = pair()
    a.session = session
    found = []
    for number in range(count):
        a.send("word", 5, {"number": number}, b"blob" * number)
        found.append(b.sock.recv(1 << 16))
    a.close()
    b.close()
    return found


@pytest.mark.parametrize(
    ("bend", "taken"),
    [
        (lambda f: [f[0], f[0], f[1]], 1),  # doubled
        (lambda f: [f[1], f[0]], 0),  # turned around
        (lambda f: [f[0], f[2]], 1),  # one is missing
        (lambda f: [f[0], f[1][:-3]], 1),  # cut
        (lambda f: [f[0], f[1][:20]], 1),
        (lambda f: [frames(1, session=78)[0]], 0),  # of another connection
        (lambda f: [f[0][:5] + bytes([f[0][5] ^ 1]) + f[0][6:]], 0),
        (lambda f: [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"], 0),
    ],
)
def test_frames_are_taken_once_in_order_and_whole(bend: Callable[[list[bytes]], list[bytes]], taken: int) -> None:
    mine, other = pair()
    with closing(mine), closing(other):
        mine.sock.sendall(b"".join(bend(frames(3))))
        mine.sock.shutdown(socket.SHUT_WR)
        for number in range(taken):
            assert other.receive(5).words == {"number": number}
        with pytest.raises(ConnectionError):
            other.receive(5)


def test_every_flipped_bit_of_a_frame_is_seen() -> None:
    good = frames(1)[0]
    for at in range(len(good)):
        mine, other = pair()
        with closing(mine), closing(other):
            mine.sock.sendall(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
            mine.sock.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError):
                other.receive(5)


def test_silence_ends_with_the_deadline() -> None:
    mine, other = pair()
    with closing(mine), closing(other):
        with pytest.raises(TimeoutError):
            other.receive(0.05)
        other.sock.sendall(b"LHS1")  # begins, and says no more
        with pytest.raises(TimeoutError):
            mine.receive(0.05)
        with pytest.raises(TimeoutError):
            mine.pour(memoryview(bytes(1 << 24)), 0.05)  # nobody reads


def test_a_large_stream_is_told_of_as_it_comes() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3_000_001, np.uint8)
    into = np.zeros_like(data)
    counts: list[int] = []

    def arrived(count: int) -> None:
        begin = counts[-1] if counts else 0
        assert np.array_equal(into[begin:count], data[begin:count])
        counts.append(count)

    with socket.create_server(("127.0.0.1", 0)) as server:
        near, far = socket.create_connection(server.getsockname()), server.accept()[0]
    with closing(wire.Wire(near)) as mine, closing(wire.Wire(far)) as other:
        mine.session = other.session = 5
        for _ in range(2):
            counts.clear()
            thread = threading.Thread(target=other.pour, args=(data.data, 20))
            thread.start()
            mine.draw(into.data, time.monotonic() + 20, arrived)
            thread.join()
            assert counts[-1] == data.size and counts == sorted(set(counts))
            other.send("word", 5)  # a few bytes wake us again
            assert mine.receive(5).kind == "word"
        other.pour(data[:700_000].data, 5)
        with pytest.raises(TimeoutError):
            mine.draw(into.data, time.monotonic() + 0.2, lambda count: None)
        other.close()
        with pytest.raises(ConnectionError):
            mine.draw(into.data, time.monotonic() + 5, lambda count: None)


def test_who_has_another_token_gets_nothing() -> None:
    lane = tcp.lane("127.0.0.1:0", "a token of sixteen")
    with Publisher("run", lanes=[lane]):
        address = lane.address.removeprefix("tcp:")
        for token, words in (("another of sixteen", "another one"), (None, "asks for a token")):
            with pytest.raises(PermissionError, match=words):
                tcp.connect(address, "stranger", token)
        with closing(tcp.connect(address, "friend", "a token of sixteen")) as source:
            source.bind(NOTHING, 5.0)
    for token in (None, "short"):
        with pytest.raises(ValueError, match="token"):
            tcp.lane("0.0.0.0:0", token)


class Meddler:
    """Stands between a receiver and a sender, and now and then spoils a byte, cuts, or doubles a piece."""

    def __init__(self, address: str, seed: int, faults: int) -> None:
        host, _, port = address.rpartition(":")
        self._to, self._random, self.left = (host, int(port)), random.Random(seed), faults
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(self._to)
            except OSError:
                return
            for a, b, down in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(a, b, 20_000 if down else 1000), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, spread: int) -> None:
        done, at = 0, self._random.randrange(spread)
        try:
            while data := source.recv(4096):
                i = at - done
                done += len(data)
                if self.left > 0 and 0 <= i < len(data):
                    kind = self._random.choice(("flip", "flip", "cut", "double"))
                    self.left -= 1
                    at = done + self._random.randrange(spread)
                    if kind == "flip":
                        data = data[:i] + bytes([data[i] ^ 32]) + data[i + 1 :]
                    elif kind == "double":
                        data = data[: i + 1] + data[max(0, i - 40) :]
                    else:
                        break
                to.sendall(data)
        except OSError:
            pass
        for sock in (source, to):
            sock.close()

    def close(self) -> None:
        with closing(self._server):
            self._server.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_whatever_happens_between_them_what_is_served_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longhaul.sync.receiver.LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("longhaul.sync.receiver.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("longhaul.sync.lanes.sockets.PATIENCE", 0.3)
    lane = tcp.lane()
    with Publisher("run", lanes=[lane], settings=Settings(0, deadline=0.5, lease=1.0)) as sender:
        meddler = Meddler(lane.address.removeprefix("tcp:"), seed=3, faults=20)
        seen: list[tuple[int, bool]] = []
        with Receiver(lambda: tcp.connect(meddler.address, "meddled")) as receiver:
            version = 0
            end = time.monotonic() + 40
            while meddler.left and time.monotonic() < end:
                version += 1
                sender.publish(version, tensors(version))
                receiver.wait(version, 0.05)
                if receiver.served is not None:
                    now, held = receiver.latest()
                    seen.append((now, is_whole(now, held)))
            assert not meddler.left and len(receiver.errors) > 10
            assert all(whole for _, whole in seen)
            assert [now for now, _ in seen] == sorted(now for now, _ in seen)
            sender.publish(version + 1, tensors(version + 1))
            assert receiver.wait(version + 1, 20), receiver.errors  # by itself, when they are left alone
        meddler.close()


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
    lane = tcp.lane()
    size = 1 << 22  # more than sockets hold
    settings = Settings(quorum, lease=20.0, deadline=1.0, retries=0)
    image = 4 * size + 192
    with (
        Publisher("run", lanes=[lane], settings=settings, budget=3 * image) as sender,
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
    with Publisher("run", epoch=4, lanes=[shared.lane(name)]) as sender:
        sender.publish(5, tensors(5))
        with Receiver(lambda: shared.connect(name, "one")) as receiver:
            assert receiver.wait(5, 20)
            with closing(shared.connect(name, "two")) as source:
                source.bind(NOTHING, 5.0)
                parcel = source.ask(NOTHING, 5.0)
                assert parcel is not None
                for change in ({"base": 4}, {"epoch": 3, "version": 9}, {}, {"run": "other", "version": 9}):
                    bent = parcel._replace(offer=parcel.offer._replace(**change))
                    with pytest.raises(ProtocolError):
                        receiver._take(source, bent)
            assert is_whole(*receiver.latest())


def test_of_two_writers_of_a_folder_the_later_epoch_wins(tmp_path: Path) -> None:
    old = Publisher("run", epoch=1, lanes=[FolderLane(tmp_path, durable=False)], settings=QUICK)
    with old, Receiver(lambda: FolderSource(tmp_path)) as receiver:
        old.publish(50, tensors(50))
        assert receiver.wait(50, 20), receiver.errors
        with Publisher("run", epoch=2, lanes=[FolderLane(tmp_path, durable=False)], settings=QUICK) as new:
            new.publish(3, tensors(3))
            until(lambda: receiver.held.epoch == 2)
            old.publish(51, tensors(51))
            until(lambda: any("epoch" in why for _, why in old.status()["dropped"]))
            assert files.newest(tmp_path) == (2, 3)
            assert receiver.held.epoch == 2 and is_whole(*receiver.latest())


def test_a_full_disk_holds_nobody_up_and_is_got_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pour, full = files._pour, threading.Event()

    def limited(file, shard, image):  # type: ignore[no-untyped-def]
        if full.is_set() and shard.name.startswith("model-00002"):
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        pour(file, shard, image)

    monkeypatch.setattr(files, "_pour", limited)
    lane = FolderLane(tmp_path / "folder", shard=3000, durable=False)
    there = way("tcp", tmp_path)
    with Publisher("run", lanes=[lane, there.lane()], settings=QUICK) as sender, receivers(there) as (receiver,):
        sender.publish(1, tensors(1))
        assert receiver.wait(1, 20)
        until(lambda: lane.latest and lane.latest.name.endswith("-1"))
        full.set()
        sender.publish(2, tensors(2))
        assert receiver.wait(2, 20), receiver.errors  # who has memory goes on
        until(lambda: any("the disk is full" in line for line in lane.errors))
        assert lane.latest is not None and files.read_manifest(lane.latest).version == 1  # whole, and the latest
        assert not list((tmp_path / "folder").glob("*/*.part"))
        full.clear()
        until(lambda: lane.latest and lane.latest.name.endswith("-2"))  # by itself
        with Receiver(lambda: FolderSource(tmp_path / "folder")) as reader:
            assert reader.wait(2, 20) and is_whole(*reader.latest())


def test_an_interrupted_version_goes_on_with_its_complete_shards(tmp_path: Path) -> None:
    with Publisher("run", epoch=1, lanes=[FolderLane(tmp_path / "a", shard=3000, durable=False)]) as sender:
        sender.publish(1, tensors(1))
        assert sender.wait(1, 20)
        until(lambda: files.newest(tmp_path / "a"))
    whole = tmp_path / "a" / files.folder_name(1, 1)
    manifest = files.read_manifest(whole)
    image = np.zeros(manifest.size, np.uint8)
    files.read(whole, manifest, image, lambda *_: None)
    staging = files.stage(manifest, image, tmp_path / "b", 3000, durable=False)
    first, second = (staging / shard.name for shard in files.shards(manifest, 3000))
    at = first.stat().st_mtime_ns
    data = second.read_bytes()
    for bad in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b"", None):
        if bad is None:
            second.unlink()
        else:
            second.write_bytes(bad)
        assert files.stage(manifest, image, tmp_path / "b", 3000, durable=False) == staging
        assert second.read_bytes() == data and first.stat().st_mtime_ns == at
    image[0] ^= 1
    first.unlink()
    with pytest.raises(files.Damaged):
        files.stage(manifest, image, tmp_path / "b", 3000, durable=False)
    assert not first.exists()


def test_a_spoilt_file_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longhaul.sync.lanes.folder.PAUSE", 0.01)
    with Publisher("run", epoch=1, lanes=[FolderLane(tmp_path, shard=3000, durable=False)]) as sender:
        with Receiver(lambda: FolderSource(tmp_path)) as receiver:
            sender.publish(1, tensors(1))
            assert receiver.wait(1, 20)
        sender.publish(2, tensors(2))
        until(lambda: files.newest(tmp_path) == (1, 2))
        path = tmp_path / files.folder_name(1, 2) / "model-00001-of-00002.safetensors"
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
    with Publisher("run", lanes=[there.lane()]) as sender, receivers(there, 2) as both:
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
    with Publisher("run", lanes=[there.lane()], settings=settings) as sender, receivers(there, count) as all_of_them:
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
