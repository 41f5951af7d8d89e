"""The lane between hosts: an image as one stream of bytes into memory that is there already, digested as it comes.

Who serves other hosts from shared memory lets the kernel send it (sendfile), and copies nothing. On one machine that
does not pay: somebody must copy, and who receives does it page by page, of pages that no cache has; so bytes are sent
from memory there. A large image comes by way of a buffer that stays in the cache, out of which it is digested and
written past the caches in one pass. Every call has a deadline. Loopback is open to this machine; beyond it both sides
prove that they know a token, which itself never travels. The bytes are not encrypted: let networks that others can read
be tunnels.

To who holds the version before, only what changed may travel (`changes`). A receiver may serve others (`relay`): then
a sender feeds a few, each of which feeds a few more.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np

from longhaul.runtime import credentials
from longhaul.weight_sync import image as images
from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.delta import version_delta
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.transports.base import DAMAGED, Hub, Parcel, Staging
from longhaul.weight_sync.transports.framing import Wire, WireError, check_token
from longhaul.weight_sync.transports.socket_server import PATIENCE, SocketLane, SocketSource, expect

BUFFER = 4 << 20
"""Bytes that a socket is asked to hold for us."""

NEAR = 1 << 20
"""The same where both ends are of this machine: nothing is far away, and so few stay in a cache on their way."""


def lane(address: str = "127.0.0.1:0", token: str | None = None) -> SocketLane:
    """Serves at HOST:PORT; port 0 is one that is free, which the lane's `address` names.

    ValueError for an address that can't be served, and where other machines reach it and there is no token.
    """
    found = listener(address, token)
    return SocketLane(found, named("tcp", credentials.split(address)[0], found), token, TcpDelivery)


def listener(address: str, token: str | None) -> socket.socket:
    """A bound socket, not yet listening. ValueError as `lane`."""
    host, port = credentials.split(address)
    check_token(token)
    if token is None and not credentials.is_loopback(host):
        raise ValueError(f"{address} can be reached by other machines: give a token, or serve 127.0.0.1")
    found = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        found.bind(where)
    except OSError as error:
        if found is not None:
            found.close()
        raise ValueError(f"{address} can't be served: {error.strerror}; give another one") from error
    return found


def named(kind: str, host: str, bound: socket.socket) -> str:
    """The address of a lane on a bound socket."""
    return f"{kind}:{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


def connect(address: str, receiver: str, token: str | None = None) -> SocketSource:
    """A receiver's end. OSError where nobody serves there, PermissionError where the token is another one."""
    return SocketSource(connected(address, token), token, receiver, TcpCollection())


def connected(address: str, token: str | None) -> socket.socket:
    """A socket to who serves at an address."""
    host, port = credentials.split(address)
    check_token(token)
    sock = socket.create_connection((host, port), timeout=PATIENCE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR if _is_near(sock) else BUFFER)
    return sock


def _is_near(sock: socket.socket) -> bool:
    """Whether the other side is on this machine, as far as its address tells."""
    return sock.family != socket.AF_UNIX and credentials.is_loopback(sock.getpeername()[0])


class TcpDelivery:
    """A session's images, each poured out whole. `Session` keeps the image until it was verified, because the kernel
    may still read it when all is sent."""

    partly = True

    def deliver(self, connection: Wire, hub: Hub, parcel: Parcel, image: Image, words: dict[str, Any]) -> None:
        size, seconds = parcel.manifest.size, parcel.offer.seconds
        room = int(words.get("room", 0))  # of the receiver, for a frame of changes at a time
        found = hub.changes(parcel, image) if room > 0 else None
        if found is not None and found.most <= room:
            connection.send("changes", PATIENCE, {"size": len(found.body), "most": found.most})
            connection.pour(memoryview(found.body), seconds)
            return
        connection.send("whole", PATIENCE, {"size": size})
        near, beyond = _is_near(connection.sock), None if image.arriving is None else image.arriving.beyond
        if near:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR)
        if near or image.block is None or image.block.descriptor < 0:
            connection.pour_memory(image.array[:size].data, seconds, beyond)
        else:
            connection.pour_file(image.block.descriptor, size, seconds, beyond)

    def released(self, words: dict[str, Any]) -> None:
        """It lends nothing."""

    def end(self) -> None:
        """It keeps nothing."""


def _lengths(words: dict[str, Any], size: int, room: int) -> tuple[int, int]:
    """(bytes of all changes, and of the longest frame); WireError where they can't be."""
    total, most = words.get("size"), words.get("most")
    if not (isinstance(total, int) and isinstance(most, int) and 0 <= total <= size and 0 <= most <= room):
        raise WireError(f"changes of {total} bytes in frames of {most} where {size} and {room} are the most")
    return total, most


class TcpCollection:
    """The stream that a receiver reads into its staging memory."""

    moves = True

    def words(self) -> dict[str, Any]:
        return {}

    def collect(self, connection: Wire, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        until = time.monotonic() + seconds
        size = parcel.manifest.size
        image = staging.take(size)[:size]
        based = staging.base is not None and parcel.offer.base == staging.base[0].version
        room = staging.spare(0) if based else 0
        connection.send("fetch", PATIENCE, {"version": parcel.offer.version, "room": room})
        frame = expect(connection, seconds, "whole", "changes")  # which may first have to be encoded
        words = frame.words
        if frame.kind == "changes" and based and staging.base is not None:
            lengths = _lengths(words, size, room)
            staging.spare(lengths[1])
            self._change(connection, lengths, staging.base, parcel, image, until)
            staging.made()
            return image
        if frame.kind != "whole" or words.get("size") != size:
            raise WireError(f"an image of {words.get('size')} bytes where {size} were due")
        if (buffer := staging.buffer) is None:
            connection.draw(image.data, until, lambda count: staging.arrived(image, count))
        else:
            if (pull := staging.pull) is not None and images.pulls(image):
                connection.pull(until, lambda descriptor, stop: pull(image, buffer, descriptor, stop))
            else:
                connection.draw_by(buffer.data, size, until, lambda held: staging.draw(image, buffer, held))
            staging.arrived(image, size)
        return image

    def _change(
        self,
        connection: Wire,
        lengths: tuple[int, int],
        base: tuple[Manifest, np.ndarray],
        parcel: Parcel,
        image: np.ndarray,
        until: float,
    ) -> None:
        """Makes the image of the base, frame by frame as they come. LookupError where that does not make it, but all
        of them came."""
        size, most = lengths
        buffer, left = memoryview(bytearray(max(most, version_delta.HEAD.size))), size

        def take(count: int) -> memoryview:
            nonlocal left
            connection.fill(buffer[:count], until)
            left -= count
            return buffer[:count]

        try:
            version_delta.apply(
                version_delta.frames(take, size, most, parcel.manifest), *base, parcel.manifest, image, None
            )
        except ValueError as error:
            while left:
                take(min(left, len(buffer)))
            raise LookupError(f"version {parcel.offer.version} came as {DAMAGED} changes: {error}") from error

    def close(self) -> None:
        """It keeps nothing."""
