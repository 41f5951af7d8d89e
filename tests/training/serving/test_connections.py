"""Connections of a server: silent ones are closed, those beyond the bound too, and one that asks is served."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from longhaul.runtime.credentials import self_signed
from longhaul.training.serving import connections

SILENT = 0.5


ASKED, ANSWERED = threading.Semaphore(0), threading.Event()
"""A release for each `/slow` that was asked for, and the event until which none of them is answered."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        ASKED.release()
        while not ANSWERED.is_set():
            await asyncio.sleep(0.01)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def serving(most: int, silent: float) -> Iterator[int]:
    """Port of a server with these bounds."""
    config = uvicorn.Config(
        app, port=0, log_config=None, log_level="error", lifespan="off", ws="none",
        http=connections.protocol(most, silent), timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture
def crowded() -> Iterator[int]:
    """Port of a server of four connections, which ends none of them for its silence."""
    ANSWERED.clear()
    with serving(4, silent=600.0) as found:
        yield found


def closed(connection: socket.socket) -> bool:
    """True if the other side closes a connection."""
    connection.settimeout(60.0)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def status(port: int) -> int:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    asked.request("GET", "/")
    try:
        return asked.getresponse().status
    finally:
        asked.close()


def test_silent_and_slow_connections_are_closed_and_others_served() -> None:
    """One that waits for its answer is no silent one, however often silence is looked for."""
    ANSWERED.clear()
    with serving(4, SILENT) as port, socket.create_connection(("127.0.0.1", port)) as waits:
        waits.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ASKED.acquire(timeout=60.0)
        silent, slow = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        with silent, slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-")
            assert status(port) == 204
            assert closed(silent) and closed(slow)
        with socket.create_connection(("127.0.0.1", port)) as silent:
            assert closed(silent)
        ANSWERED.set()
        assert waits.recv(12) == b"HTTP/1.1 204"


def test_a_connection_that_asks_goes_on(crowded: int) -> None:
    asked = http.client.HTTPConnection("127.0.0.1", crowded, timeout=60.0)
    asked.connect()
    first = asked.sock
    for _ in range(2):
        asked.request("GET", "/")
        assert asked.getresponse().read() == b""
        assert asked.sock is first, "it was closed, and another one was opened"
    asked.close()


def test_a_head_without_an_end_ends_its_connection() -> None:
    with (
        serving(4, silent=600.0) as port,  # what ends it is the head
        socket.create_connection(("127.0.0.1", port), timeout=30.0) as sock,
        contextlib.suppress(ConnectionError),  # the sender may notice while it sends, or when it waits for an answer
    ):
        sock.sendall(b"GET / HTTP/1.1\r\n")
        for number in range(2000):
            sock.sendall(b"a%d: " % number + b"b" * 1000 + b"\r\n")
        while sock.recv(4096):
            pass


def test_connections_beyond_the_bound_are_closed(crowded: int) -> None:
    held = [socket.create_connection(("127.0.0.1", crowded)) for _ in range(4)]
    for each in held:
        each.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ASKED.acquire(timeout=60.0)
    with socket.create_connection(("127.0.0.1", crowded)) as further:
        assert closed(further)
    ANSWERED.set()
    for each in held:
        assert each.recv(12) == b"HTTP/1.1 204"
    assert status(crowded) == 204  # in place of one that was answered
    for each in held:
        each.close()


def test_the_oldest_that_asks_nothing_makes_room(crowded: int) -> None:
    held = [socket.create_connection(("127.0.0.1", crowded)) for _ in range(4)]
    held[0].sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    assert ASKED.acquire(timeout=60.0)
    assert status(crowded) == 204
    assert closed(held[1])  # long before it would be closed as a silent one
    ANSWERED.set()
    assert held[0].recv(12) == b"HTTP/1.1 204"
    for each in held:
        each.close()


def test_a_handshake_of_tls_that_waits_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE", 0.3)
    made = self_signed("127.0.0.1")
    assert made.certificate is not None and made.key is not None
    paths = [tmp_path / name for name in ("cert.pem", "key.pem")]
    for path, data in zip(paths, (made.certificate, made.key), strict=True):
        path.write_bytes(data)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certfile=paths[0], keyfile=paths[1])

    async def silent_newcomer() -> bytes:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0, ssl=context)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            async with asyncio.timeout(60.0):
                data = await reader.read()
            writer.close()
            return data

    with asyncio.Runner(loop_factory=connections.Loop) as runner:
        assert runner.run(silent_newcomer()) == b""
