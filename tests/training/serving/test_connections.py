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


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
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
def port() -> Iterator[int]:
    with serving(4, SILENT) as found:
        yield found


def closed(connection: socket.socket) -> bool:
    """True if the other side closes a connection within 2 s."""
    connection.settimeout(2.0)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def status(port: int) -> int:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    asked.request("GET", "/")
    try:
        return asked.getresponse().status
    finally:
        asked.close()


def test_silent_and_slow_connections_are_closed_and_others_served(port: int) -> None:
    silent, slow = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    with silent, slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-")
        assert status(port) == 204
        assert closed(silent) and closed(slow)
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    for _ in range(2):  # one that asks goes on
        asked.request("GET", "/")
        assert asked.getresponse().read() == b""
        time.sleep(0.2)
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


def test_connections_beyond_the_bound_are_closed(port: int) -> None:
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    for each in held:
        each.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(0.1)
    with socket.create_connection(("127.0.0.1", port)) as further:
        assert closed(further)
    for each in held:
        assert each.recv(12) == b"HTTP/1.1 204"
    assert status(port) == 204  # in place of one that was answered
    for each in held:
        each.close()


def test_the_oldest_that_asks_nothing_makes_room(port: int) -> None:
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    held[0].sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(0.1)
    assert status(port) == 204
    held[1].settimeout(0.1)  # long before it is closed as a silent one
    assert held[1].recv(1) == b"" and held[0].recv(12) == b"HTTP/1.1 204"
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
            async with asyncio.timeout(5.0):
                data = await reader.read()
            writer.close()
            return data

    with asyncio.Runner(loop_factory=connections.Loop) as runner:
        assert runner.run(silent_newcomer()) == b""
