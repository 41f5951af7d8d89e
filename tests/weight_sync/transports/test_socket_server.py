"""Server of sockets: strangers, liars, no thread and no descriptor end connections, never the server."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from longhaul.weight_sync.protocol import NOTHING, ProtocolError, Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import socket_server, tcp
from longhaul.weight_sync.transports.socket_server import STRANGERS, SocketTransport
from tests.helpers.weight_sync_transports import is_whole, tensors, until

TOKEN = "a token of sixteen"


class Served:
    """A publisher with one receiver, which must be served whatever others do."""

    def __init__(self, lane: SocketTransport) -> None:
        self.lane, self.version = lane, 0
        self.address = lane.address.removeprefix("tcp:")
        self.sender = Publisher("run", transports=[lane], settings=Settings(0))
        self.receiver = Receiver(lambda: tcp.connect(self.address, "friend", TOKEN))

    def serves(self) -> None:
        self.version += 1
        self.sender.publish(self.version, tensors(self.version))
        assert self.receiver.wait(self.version, 20), self.receiver.errors
        assert is_whole(*self.receiver.latest())

    def stranger(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=20)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close(0.0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("longhaul.weight_sync.receiver.LONGEST_PAUSE", 0.05)
    with closing(Served(tcp.serve(token=TOKEN))) as found:
        found.serves()
        yield found


def is_closed(sock: socket.socket) -> bool:
    """True where the server has ended a connection, once all that it said was read."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def test_strangers_are_few_and_the_oldest_makes_room(served: Served) -> None:
    threads = threading.active_count()
    with ExitStack() as ends:
        idle = [ends.enter_context(served.stranger()) for _ in range(4 * STRANGERS)]
        assert all(is_closed(sock) for sock in idle[: 3 * STRANGERS])
        assert len(served.lane._sessions) <= STRANGERS + 1 and threading.active_count() == threads
        served.serves()
        with closing(tcp.connect(served.address, "late", TOKEN)) as source:
            source.bind(NOTHING, 5.0)
        idle[-1].settimeout(0.0)
        assert idle[-1].recv(4096), "the newest was greeted"
        with pytest.raises(BlockingIOError):  # and is left alone until its time is over
            idle[-1].recv(4096)


def test_who_says_half_a_hello_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "PATIENCE", 0.2)
    with closing(Served(tcp.serve(token=TOKEN))) as served, served.stranger() as slow:
        slow.sendall(b"LHS1")
        assert is_closed(slow)


def test_a_liar_ends_alone(served: Served) -> None:
    draw = random.Random(0)
    lies = [{"wait": float("nan")}, {"wait": -1.0}, {"wait": "soon"}, {}, {"wait": [1]}, {"wait": 10**400}]
    for lie in lies:
        for kind in ("ask", "ready", "fetch", "done", "failed", "status", "bind", "nonsense"):
            with closing(tcp.connect(served.address, "liar", TOKEN)) as source:
                if draw.random() < 0.5:
                    source.bind(NOTHING, 5.0)
                source.wire.send(kind, 5.0, lie)
                if kind != "status" and (kind, lie.get("wait")) != ("ask", 10**400):
                    assert is_closed(source.wire.sock)
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 9, draw.randbytes(500), b"LHS1" + bytes(60), b"\xff" * 100):
        with served.stranger() as sock:
            sock.sendall(data)
            assert is_closed(sock)
    with closing(tcp.connect(served.address, "large", TOKEN)) as source:
        source.wire.send("status", 5.0, blob=b"1")  # a server takes no memory for what a receiver says
        assert is_closed(source.wire.sock)
    served.serves()


def test_a_frame_before_the_answer_ends_the_connection_and_a_goodbye_is_heard(served: Served) -> None:
    for kind in ("ask", "bye"):
        with closing(tcp.connect(served.address, "hasty", TOKEN)) as source:
            source.bind(served.receiver.held, 5.0)
            source.wire.send("ask", 5.0, {"wait": 60.0})
            source.wire.send(kind, 5.0)
            assert is_closed(source.wire.sock)
    until(lambda: [one["name"][:6] for one in served.sender.status()["receivers"]] == ["friend"])
    assert [why for name, why in served.sender.status()["dropped"] if "hasty" in name][-1] == "it has gone"


def test_without_a_thread_a_connection_ends_and_the_server_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = threading.Thread.start, 3

    def refused(thread: threading.Thread) -> None:
        nonlocal failures
        if thread.name == "longhaul-courier" and failures:
            failures -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    served.serves()
    assert failures == 0 and len(served.lane._sessions) == 1


class Exhausted:
    """A listener of a process that has no descriptor left, for so many connections."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self.listener, self.times = listener, times

    def accept(self) -> tuple[socket.socket, object]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self.listener, name)


def test_without_a_descriptor_the_server_waits_until_there_is_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "PAUSE", 0.01)
    tired = Exhausted(served.lane._listener, 5)
    monkeypatch.setattr(served.lane, "_listener", tired)
    with closing(tcp.connect(served.address, "late", TOKEN)) as source:
        source.bind(NOTHING, 5.0)
    assert tired.times == 0


def test_descriptors_stay_in_reserve(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(served.lane, "_limit", 0)
        with served.stranger() as refused:
            assert refused.recv(4096) == b"", "nothing was said"
        served.serves()  # who is there stays
    with closing(tcp.connect(served.address, "late", TOKEN)) as source:
        source.bind(NOTHING, 5.0)


def test_more_receivers_than_allowed_are_refused_with_a_reason(served: Served) -> None:
    served.lane._most = 2
    with closing(tcp.connect(served.address, "second", TOKEN)) as source:
        source.bind(NOTHING, 5.0)
        with (
            closing(tcp.connect(served.address, "third", TOKEN)) as late,
            pytest.raises(ProtocolError, match="2 receivers are here"),
        ):
            late.bind(NOTHING, 5.0)
    served.serves()


def test_a_flood_is_accepted_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "RATE", 0.001)
    lane = tcp.serve(token=TOKEN)
    with Publisher("run", transports=[lane]), ExitStack() as ends:
        host, _, port = lane.address.removeprefix("tcp:").rpartition(":")
        socks = [ends.enter_context(socket.create_connection((host, int(port)))) for _ in range(STRANGERS + 5)]
        assert all(sock.recv(4096) for sock in socks[:STRANGERS])
        socks[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            socks[-1].recv(4096)


def test_a_flood_seldom_wakes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes, accept = 0, SocketTransport._accept

    def counted(lane: SocketTransport) -> None:
        nonlocal wakes
        wakes += 1
        accept(lane)

    monkeypatch.setattr(socket_server, "RATE", 400.0)
    monkeypatch.setattr(SocketTransport, "_accept", counted)
    lane = tcp.serve(token=TOKEN)
    with Publisher("run", transports=[lane]), ExitStack() as ends:
        host, _, port = lane.address.removeprefix("tcp:").rpartition(":")
        count = STRANGERS + 8 * socket_server.BATCH
        socks = [ends.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        assert all(sock.recv(4096) for sock in socks)
    assert wakes <= STRANGERS + 2 * 8


def test_a_server_that_must_end_ends_its_process_with_a_line(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = threading.Event()

    def broken() -> None:
        raise RuntimeError("no loop")

    monkeypatch.setattr(os, "kill", lambda pid, number: sent.set() if number == signal.SIGTERM else None)
    monkeypatch.setattr(served.lane, "_turn", broken)
    served.lane._wake()
    assert sent.wait(20)
    assert capfd.readouterr().err == f"longhaul: {served.lane.address} can't be served: RuntimeError no loop\n"
