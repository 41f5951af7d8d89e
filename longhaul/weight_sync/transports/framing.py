"""Frames on a stream socket: small messages, each checked, in order and in time; and bare bytes of images behind them.

A frame carries the session's number, which the server draws for each connection, and its own number: a frame that was
cut, repeated, reordered or taken from another connection is refused, and ends the connection. Images follow a frame as
bare bytes: their digests are in the manifest.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from longhaul.weight_sync import manifest

HEAD = struct.Struct("<4sIQQIH")  # magic, number, session, digest, bytes of the blob, bytes of the words
MAGIC = b"LHS1"
MOST_WORDS = 1 << 15
MOST_BLOB = 1 << 28
"""Bytes of a frame's two parts, at most: a manifest of a million tensors fits."""

MOST_DESCRIPTORS = 2
"""Descriptors that come with a frame, at most."""

PIECE = 1 << 18
"""Bytes received at once, at most: they are digested while the processor's cache still has them."""

LOW = 256 << 10
"""Bytes of a large stream for which a receiver wakes up."""

SECRET = 16
"""Characters of a token, at least."""


class WireError(ConnectionError):
    """Bytes that are no frame of this connection, which must be closed."""


class Frame(NamedTuple):
    kind: str
    words: dict[str, Any]
    blob: bytes = b""


class Wire:
    """One end of a connected stream socket, for one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.session = 0
        self._sent = self._received = 0
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(
        self,
        kind: str,
        seconds: float,
        words: Mapping[str, Any] | None = None,
        blob: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        """Sends one frame, with descriptors on a Unix socket. TimeoutError, ConnectionError."""
        text = json.dumps({**(words or {}), "kind": kind}, separators=(",", ":")).encode()
        if len(text) > MOST_WORDS or len(blob) > MOST_BLOB:
            raise WireError(f"a frame of {len(text)} + {len(blob)} bytes; at most {MOST_WORDS} + {MOST_BLOB}")
        digest = _check(self._sent, self.session, text, blob)
        head = HEAD.pack(MAGIC, self._sent, self.session, digest, len(blob), len(text))
        self._sent += 1
        self.sock.settimeout(_positive(seconds))
        if descriptors:
            sent = socket.send_fds(self.sock, [head + text], list(descriptors))
            self.sock.sendall((head + text)[sent:] + blob)
        else:
            self.sock.sendall(head + text + blob)

    def receive(self, seconds: float, descriptors: list[int] | None = None) -> Frame:
        """Next frame; appends the descriptors that came with it to `descriptors`.

        TimeoutError, WireError; ConnectionError where the other side is gone.
        """
        until = time.monotonic() + seconds
        magic, number, session, digest, blob_length, text_length = HEAD.unpack(
            self._take(HEAD.size, until, descriptors)
        )
        most = MOST_BLOB if self.session else 0  # before the handshake nobody can make us reserve memory
        if magic != MAGIC or text_length > MOST_WORDS or blob_length > most:
            raise WireError("the bytes received are no frame")
        text, blob = self._take(text_length, until), self._take(blob_length, until)
        if session != self.session or number != self._received:
            raise WireError(f"frame {number} of session {session:x}; {self._received} of {self.session:x} comes next")
        if digest != _check(number, session, text, blob):
            raise WireError("a frame was damaged")
        self._received += 1
        try:
            words = json.loads(text)
            return Frame(str(words.pop("kind")), words, blob)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise WireError(f"a frame that means nothing: {error}") from error

    def _take(self, count: int, until: float, descriptors: list[int] | None = None) -> bytes:
        data = bytearray(count)
        self.fill(memoryview(data), until, descriptors)
        return bytes(data)

    def fill(self, into: memoryview, until: float, descriptors: list[int] | None = None) -> None:
        """Reads exactly len(into) bytes before the time `until` of `time.monotonic`."""
        done = 0
        while done < len(into):
            self.sock.settimeout(_positive(until - time.monotonic()))
            if descriptors is not None and done == 0:
                got = self._with_descriptors(into, descriptors)
            else:
                got = self.sock.recv_into(into[done:])
            if not got:
                raise ConnectionResetError("the other side has closed the connection")
            done += got

    def _with_descriptors(self, into: memoryview, descriptors: list[int]) -> int:
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
        got, extra, _, _ = self.sock.recvmsg_into([into], room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        for level, kind, data in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                descriptors.extend(received)
        return got

    def draw(self, into: memoryview, until: float, arrived: Callable[[int], None]) -> None:
        """Reads a large block; `arrived(n)` is called when its first n bytes are in place, while the cache has them.

        Sleeps until LOW bytes are there, so that it does not wake for every packet.
        """
        done, low = 0, 0
        self.sock.settimeout(0.0)
        try:
            while done < len(into):
                try:
                    got = self.sock.recv_into(into[done : done + PIECE])
                except BlockingIOError:
                    if low != (low := min(LOW, len(into) - done)):
                        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
                    _awaited(self.sock, select.POLLIN, until - time.monotonic(), "the other side sends no bytes")
                    continue
                if not got:
                    raise ConnectionResetError("the other side has closed the connection")
                done += got
                arrived(done)
        finally:
            if low > 1:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def pour(self, data: memoryview, seconds: float) -> None:
        """Sends bare bytes, all within `seconds`. The kernel waits, not Python: that takes fewer calls."""
        until, done = time.monotonic() + seconds, 0
        self.sock.settimeout(None)
        while done < len(data):
            left = _positive(until - time.monotonic())
            timeout = struct.pack("@ll", int(left), int(1e6 * (left % 1.0)) or 1)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            try:
                done += self.sock.send(data[done:])
            except BlockingIOError:
                raise TimeoutError("the other side takes no bytes") from None

    def pour_file(self, descriptor: int, size: int, seconds: float, bucket: int = 1 << 24) -> None:
        """Sends a file's bytes without copying them (sendfile): none may change before they are read there."""
        until, done = time.monotonic() + seconds, 0
        while done < size:
            self.sock.settimeout(_positive(until - time.monotonic()))
            try:
                sent = os.sendfile(self.sock.fileno(), descriptor, done, min(bucket, size - done))
            except BlockingIOError:
                _awaited(self.sock, select.POLLOUT, until - time.monotonic(), "the other side takes no bytes")
                continue
            if not sent:
                raise ConnectionResetError("nothing more can be sent")
            done += sent

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def _check(number: int, session: int, text: bytes, blob: bytes) -> int:
    running = manifest.hasher()(struct.pack("<IQI", number, session, len(text)))
    running.update(text)
    running.update(blob)
    return int.from_bytes(running.digest()[:8], "little")


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds


def _awaited(sock: socket.socket, event: int, seconds: float, why: str) -> None:
    """Sleeps until a socket is readable or writable; TimeoutError after `seconds`."""
    poll = select.poll()
    poll.register(sock, event)
    if not poll.poll(_positive(seconds) * 1000):
        raise TimeoutError(why)


# ---------------------------------------------------------------------------------------------------- authentication


def check_token(token: str | None) -> None:
    """Raises ValueError for a token that is too weak."""
    if token is not None and (len(token) < SECRET or not token.isascii() or not token.isprintable()):
        raise ValueError(f"a token of {len(token)} characters; it is one line of {SECRET} or more ASCII ones")


def welcome(wire: Wire, token: str | None, seconds: float) -> None:
    """Server's handshake: draws the session's number, and admits a client that proves to know the token."""
    nonce = secrets.token_bytes(16)
    wire.send("hello", seconds, {"nonce": nonce.hex(), "asks": token is not None})
    frame = wire.receive(seconds)
    theirs = frame.words.get("nonce", "")
    wanted = _proof(token, "client", nonce.hex(), theirs)
    if frame.kind != "hello" or not hmac.compare_digest(wanted, str(frame.words.get("proof"))):
        wire.send("error", seconds, {"why": "the token is another one"})
        raise PermissionError("a token was wrong")
    session = int.from_bytes(secrets.token_bytes(8), "little") | 1
    proof = _proof(token, "server", nonce.hex(), theirs)
    wire.send("welcome", seconds, {"session": session, "proof": proof})
    wire.session = session


def enter(wire: Wire, token: str | None, seconds: float) -> None:
    """Client's handshake; PermissionError where either side has another token."""
    asked = wire.receive(seconds)
    mine, theirs = secrets.token_bytes(16).hex(), str(asked.words.get("nonce", ""))
    if asked.words.get("asks") and token is None:
        raise PermissionError("the sender asks for a token; give --token-file")
    wire.send("hello", seconds, {"nonce": mine, "proof": _proof(token, "client", theirs, mine)})
    answer = wire.receive(seconds)
    proof = _proof(token, "server", theirs, mine)
    if answer.kind != "welcome" or not hmac.compare_digest(proof, str(answer.words.get("proof"))):
        raise PermissionError(str(answer.words.get("why", "the sender does not know the token")))
    wire.session = int(answer.words["session"])


def _proof(token: str | None, side: str, first: str, second: str) -> str:
    return hmac.new((token or "").encode(), f"{side} {first} {second}".encode(), hashlib.sha256).hexdigest()
