"""TLS around the TCP transport: `tls:HOST:PORT`.

A thread of each side encrypts: the sender's accepts TLS connections and passes their bytes to a `tcp` session over a
socket of its own process, the receiver's does the same in turn. So sessions, bounds and tokens are those of `tcp`.
Bytes are copied once more on each side.

Certificates are files that the environment names: LONGHAUL_TLS_CERT and LONGHAUL_TLS_KEY of a sender; LONGHAUL_TLS_CA,
which a receiver verifies the sender by. A sender with LONGHAUL_TLS_CA asks receivers for certificates, too (mutual
TLS), and then needs no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import threading
from typing import Any

from longhaul.runtime import credentials, descriptors
from longhaul.weight_sync.transports import socket_server
from longhaul.weight_sync.transports.base import PublisherSide
from longhaul.weight_sync.transports.socket_server import PAUSE, STRANGERS, Admission, SocketTransport, fail
from longhaul.weight_sync.transports.sockets import PATIENCE, SocketSource, check_token
from longhaul.weight_sync.transports.tcp import TcpCollection, TcpDelivery

VARIABLES = ("LONGHAUL_TLS_CERT", "LONGHAUL_TLS_KEY", "LONGHAUL_TLS_CA")

PIECE = 1 << 18
"""Bytes that are passed on at once."""

MOST = 1024
"""Connections of a sender at once behind TLS's handshake. In it there are STRANGERS: another one ends the oldest."""

RATE = 25.0
"""Handshakes begun in a second, at most, after STRANGERS at once: one takes a millisecond and more. Connections that
say nothing cost as little as those of `tcp`, and are accepted at its rate: others do not wait behind them."""

BACKLOG = 200
"""Connections that wait to be accepted, at most: at RATE the last one's turn comes before its PATIENCE is over."""


def serve(address: str, token: str | None = None) -> TlsTransport:
    """Serves at HOST:PORT. ValueError where certificates are missing, or a token beyond loopback without mutual TLS."""
    host, port = credentials.split(address)
    check_token(token)
    certificate, key, authority = (os.environ.get(name) or None for name in VARIABLES)
    if certificate is None or key is None:
        raise ValueError(f"tls:{address} needs a certificate: set {VARIABLES[0]} and {VARIABLES[1]} to its files")
    credentials.load(tls_cert=certificate, tls_key=key, tls_ca=authority)  # so that a wrong file is named
    if token is None and not authority and not credentials.is_loopback(host):
        raise ValueError(f"tls:{address} can be reached by other machines: give a token, or set {VARIABLES[2]}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if authority:
        context.load_verify_locations(authority)
        context.verify_mode = ssl.CERT_REQUIRED
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(f"tls:{address} can't be served: {error.strerror}; give another one") from error
    named = f"tls:{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
    return TlsTransport(bound, named, token, context)


def connect(address: str, receiver: str, token: str | None = None) -> SocketSource:
    """Receiver's end. OSError where nobody serves there; ConnectionError where the certificate is another one."""
    host, port = credentials.split(address)
    check_token(token)
    certificate, key, authority = (os.environ.get(name) or None for name in VARIABLES)
    context = ssl.create_default_context(cafile=authority)
    if certificate and key:
        context.load_cert_chain(certificate, key)
    ours, theirs = socket.socketpair()
    loop = _Loop()

    async def joined() -> None:
        outside = await asyncio.open_connection(host, port, ssl=context, limit=PIECE, ssl_handshake_timeout=PATIENCE)
        inside = await asyncio.open_connection(sock=theirs, limit=PIECE)
        loop.end_with(asyncio.ensure_future(_passed(outside, inside)))

    try:
        loop.run(joined(), PATIENCE)
    except (ssl.SSLError, TimeoutError) as error:
        ours.close()
        theirs.close()
        loop.end()
        why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or "no answer"
        raise ConnectionError(f"tls:{address}: {why}; is {VARIABLES[2]} the file of its authority?") from error
    except BaseException:
        ours.close()
        theirs.close()
        loop.end()
        raise
    return SocketSource(ours, token, receiver, TcpCollection())


class TlsTransport:
    """A `base.Transport`: a TCP session behind TLS for each connection."""

    def __init__(self, bound: socket.socket, address: str, token: str | None, context: ssl.SSLContext) -> None:
        self.address, self._bound, self._context = address, bound, context
        self._name = f"\0longhaul-{secrets.token_hex(16)}"
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.bind(self._name)
        self._inner = SocketTransport(inner, address, token, TcpDelivery, admits=_is_ours)
        self._loop: _Loop | None = None
        self._open = 0
        self._greeted: dict[asyncio.Future[None], None] = {}  # in TLS's handshake or before it, the oldest first
        self._visits: set[asyncio.Future[None]] = set()  # all connections: a loop alone does not keep its tasks
        self._handshakes = Admission(RATE)

    def open(self, publisher: PublisherSide) -> None:
        try:
            self._bound.listen(BACKLOG)
        except OSError as error:
            raise ValueError(f"{self.address} can't be served: {error.strerror}; give another one") from error
        self._inner.open(publisher)
        self._bound.setblocking(False)
        self._loop = _Loop()
        self._loop.begin(self._accept())

    async def _accept(self) -> None:
        """Accepts connections, as many as the rate and the descriptors allow."""
        admission, loop = Admission(socket_server.RATE), asyncio.get_running_loop()
        most = descriptors.raise_limit() - descriptors.RESERVE
        try:
            while True:
                while seconds := max(admission.pause(), self._handshakes.pause()):
                    await asyncio.sleep(seconds)
                try:
                    sock, _ = await loop.sock_accept(self._bound)
                except ConnectionError:  # it has gone already
                    continue
                except (OSError, MemoryError):  # no descriptor is left, or no memory
                    await asyncio.sleep(PAUSE)
                    continue
                admission.count()
                if sock.fileno() >= most or self._open >= MOST:
                    sock.close()
                    continue
                if len(self._greeted) >= STRANGERS:
                    oldest = next(iter(self._greeted))
                    del self._greeted[oldest]
                    oldest.cancel()
                task = asyncio.ensure_future(self._visited(sock))
                self._greeted[task] = None
                self._visits.add(task)
                task.add_done_callback(self._forget)
                await asyncio.sleep(0)  # it begins, so that it closes its socket if it has to make room
        except Exception as error:
            fail(self.address, error)

    def _forget(self, task: asyncio.Future[None]) -> None:
        self._greeted.pop(task, None)
        self._visits.discard(task)
        if not task.cancelled():
            task.exception()  # of that connection alone

    async def _visited(self, sock: socket.socket) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            async with asyncio.timeout(PATIENCE):
                await _speaks(sock)
        except BaseException:
            sock.close()
            raise
        self._handshakes.count()
        reader = asyncio.StreamReader(PIECE, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._context, ssl_handshake_timeout=PATIENCE
            )
        except OSError:
            return
        assert task is not None
        self._greeted.pop(task, None)
        outside = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        self._open += 1
        try:
            inside = await asyncio.open_unix_connection(self._name, limit=PIECE)
            await _passed(outside, inside)
        except OSError:
            outside[1].close()
        finally:
            self._open -= 1

    def close(self) -> None:
        if self._loop is not None:
            self._loop.end()
            self._loop = None
        self._bound.close()
        self._inner.close()


class _Loop:
    """Event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="longhaul-tls", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def run(self, work: Any, seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def begin(self, work: Any) -> None:
        """Begins what goes on until the loop ends."""
        self._begun = asyncio.run_coroutine_threadsafe(work, self._loop)

    def end_with(self, task: asyncio.Future[None]) -> None:
        """Ends when a task of this loop does."""
        self._held = task  # a loop alone would not keep it
        task.add_done_callback(lambda done: self._loop.stop())

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)


async def _speaks(sock: socket.socket) -> None:
    """Waits until a connection's first bytes are there, or its end."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, heard.set)
    try:
        await heard.wait()
    finally:
        loop.remove_reader(sock)


async def _passed(outside: Any, inside: Any) -> None:
    """Passes bytes on, both ways, until either side ends."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                writer.write(data)
                await writer.drain()

    ways = [asyncio.ensure_future(one(outside[0], inside[1])), asyncio.ensure_future(one(inside[0], outside[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (outside, inside):
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError, asyncio.TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.wait_closed()


def _is_ours(sock: socket.socket) -> bool:
    """True where this process is at the other end of a Unix socket."""
    import struct

    credential = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credential)[0]) == os.getpid()
