"""The wire of weight synchronisation: what is bent, late or of another is noticed, and what is served is whole."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from longhaul.weight_sync import transports
from longhaul.weight_sync.protocol import NOTHING, Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import sockets, tcp
from tests.helpers.weight_sync_transports import is_whole, tensors

QUICK = Settings(lease=3.0, deadline=3.0, retries=1)


def pair() -> tuple[sockets.Wire, sockets.Wire]:
    a, b = socket.socketpair()
    mine, other = sockets.Wire(a), sockets.Wire(b)
    mine.session = other.session = 77
    mine.most_blob = other.most_blob = 1 << 20
    return mine, other


def frames(count: int, session: int = 77) -> list[bytes]:
    """Words that a side would send: each frame's bytes."""
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
            assert other.receive(5).fields == {"number": number}
        with pytest.raises(ConnectionError):
            other.receive(5)


def test_nobody_on_the_way_can_make_a_frame_of_those_who_share_a_token() -> None:
    server, client = sockets.keys("a token of sixteen", "a", "b")
    for forged in ((b"", b""), (client, server), (sockets.keys("another of sixteen", "a", "b"))):
        mine, other = pair()
        with closing(mine), closing(other):
            mine.keys, other.keys = (server, client), (client, server)
            mine.send("word", 5.0)
            assert other.receive(5.0).kind == "word"
            mine.keys = forged
            mine.send("word", 5.0)
            with pytest.raises(sockets.WireError, match="damaged"):
                other.receive(5.0)


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
    with closing(sockets.Wire(near)) as mine, closing(sockets.Wire(far)) as other:
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


def test_an_image_is_awaited_until_the_deadline_however_it_trickles_in() -> None:
    """Silence, a byte now and then, an end, and a connection that another thread closes: none is a hang."""
    into = memoryview(bytearray(1 << 20))

    def drawn(wire: sockets.Wire, seconds: float) -> None:
        wire.draw(into, time.monotonic() + seconds, lambda count: None)

    near, far = socket.socketpair()
    with closing(sockets.Wire(near)) as mine, closing(sockets.Wire(far)) as other:
        with pytest.raises(TimeoutError):
            drawn(mine, 0.05)
        ended = threading.Event()
        drip = threading.Thread(target=lambda: [other.sock.send(b"a") for _ in range(300) if not ended.wait(0.02)])
        drip.start()
        with pytest.raises(TimeoutError):
            drawn(mine, 0.3)
        assert drip.is_alive()
        ended.set()
        drip.join()
        closer = threading.Timer(0.1, mine.close)
        closer.start()
        with pytest.raises(OSError, match=r"closed|Bad file"):
            drawn(mine, 30)
        closer.join()


def test_who_sends_an_image_is_freed_when_another_thread_closes() -> None:
    near, far = socket.socketpair()
    with closing(sockets.Wire(near)) as mine, closing(sockets.Wire(far)):
        closer = threading.Timer(0.1, mine.close)
        closer.start()
        with pytest.raises(OSError, match=r"Broken pipe|Bad file"):
            mine.pour(memoryview(bytes(1 << 24)), 30)  # nobody reads
        closer.join()


def test_who_has_another_token_gets_nothing() -> None:
    lane = tcp.serve("127.0.0.1:0", "a token of sixteen")
    with Publisher("run", transports=[lane]):
        address = lane.address.removeprefix("tcp:")
        for token, words in (("another of sixteen", "another one"), (None, "asks for a token")):
            with pytest.raises(PermissionError, match=words):
                tcp.connect(address, "stranger", token)
        with closing(tcp.connect(address, "friend", "a token of sixteen")) as source:
            source.bind(NOTHING, 5.0)
    for token in (None, "short"):
        with pytest.raises(ValueError, match="token"):
            tcp.serve("0.0.0.0:0", token)


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
    monkeypatch.setattr("longhaul.weight_sync.receiver.LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("longhaul.weight_sync.receiver.FIRST_PAUSE", 0.01)
    for module in ("sockets", "socket_server"):
        monkeypatch.setattr(f"longhaul.weight_sync.transports.{module}.PATIENCE", 0.3)
    lane = tcp.serve()
    with Publisher("run", transports=[lane], settings=Settings(0, deadline=0.5, lease=1.0)) as sender:
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


@pytest.mark.parametrize("kind", ["tcp", "tls", "shm"])
def test_an_address_may_be_a_url(kind: str) -> None:
    rest = "weights" if kind == "shm" else "127.0.0.1:7171"
    assert transports.split(f"{kind}://{rest}") == transports.split(f"{kind}:{rest}") == (kind, rest)
    assert transports.split("folder:///abc") == ("folder", "///abc")
