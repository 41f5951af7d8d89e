"""Frames on a stream: what two sides of a connection say to each other, each word checked, in order, and in time.

A frame has a session's number, which the server draws for each connection, and its own number in it: what was cut,
doubled, changed in order or brought from another connection is no frame, and ends the connection. Big bytes (images)
follow a frame bare: their digests are in the manifest.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from longhaul.weight_sync import manifest

HEAD = struct.Struct("<4sIQQIH")  # magic, number, session, digest, length of the blob, length of the words
MAGIC = b"LHS1"
MOST_WORDS = 1 << 15
MOST_BLOB = 1 << 28
"""Bytes of a frame's two parts: a manifest of a million tensors fits."""

MOST_DESCRIPTORS = 2
"""That come with a frame."""

PIECE = 1 << 18
"""Bytes that are received at once at most, and then digested while the processor's cache still has them."""

TURN = 1.0
"""Seconds after which a deadline is looked at again, however much comes."""

LOW = 256 << 10
"""Bytes that a large stream wakes us for."""

SECRET = 16
"""The fewest characters of a token."""


class WireError(ConnectionError):
    """What came is no frame of this connection; it must be closed."""


class Frame(NamedTuple):
    kind: str
    words: dict[str, Any]
    blob: bytes = b""


class Wire:
    """One end of a connected stream socket. One thread at a time."""

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
        """One frame, with descriptors on a Unix socket. TimeoutError, ConnectionError."""
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
        """The next frame; `descriptors` grows by those that came with it. TimeoutError, WireError; ConnectionError if
        the other side is gone."""
        until = time.monotonic() + seconds
        magic, number, session, digest, blob_length, text_length = HEAD.unpack(
            self._take(HEAD.size, until, descriptors)
        )
        most = MOST_BLOB if self.session else 0  # who has not proved himself makes us reserve no memory
        if magic != MAGIC or text_length > MOST_WORDS or blob_length > most:
            raise WireError("what came is no frame")
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
        """Reads exactly as many bytes, until the time `until` of `time.monotonic`."""
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
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                descriptors.extend(found)
        return got

    def draw(self, into: memoryview, until: float, arrived: Callable[[int], None]) -> None:
        """`fill` for what is large: `arrived(n)` is told, while they are hot, that the first n bytes are in place.

        It sleeps until there is a PIECE, so that it is not woken for every packet.
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

    def draw_by(self, buffer: memoryview, size: int, until: float, take: Callable[[int], int]) -> None:
        """`draw` of `size` bytes by way of a buffer that stays in the cache: `take(n)` says how many of its first n
        bytes it has taken. Those that it left come again, in front of what follows.

        It takes what comes at once, packet by packet: so few are on their way that the cache has them, too.
        """
        held, left, turn = 0, size, 0.0
        while left:
            while left and held < len(buffer):
                if time.monotonic() >= turn:
                    turn = self._block(socket.SO_RCVTIMEO, until, TURN)
                try:
                    got = self.sock.recv_into(buffer[held : held + left])
                except BlockingIOError:
                    turn = 0.0
                    continue
                if not got:
                    raise ConnectionResetError("the other side has closed the connection")
                held, left = held + got, left - got
            used = take(held)
            if used < held:
                rest = bytes(buffer[used:held])
                buffer[: len(rest)] = rest
            held -= used

    def pull(self, until: float, step: Callable[[int, float], int]) -> None:
        """`draw_by` whose loop is compiled (`intake`): `step(descriptor, stop)` receives until all is there, which is
        0, or until the time `stop`, above 0; below 0 it is -errno."""
        descriptor = os.dup(self.sock.fileno())  # so that its number is no other file's when someone closes the socket
        try:
            left = 1
            while left:
                left = step(descriptor, self._block(socket.SO_RCVTIMEO, until, TURN))
                if left == -errno.ECONNRESET:
                    raise ConnectionResetError("the other side has closed the connection")
                if left < 0 and left not in (-errno.EAGAIN, -errno.EINTR):
                    raise OSError(-left, os.strerror(-left))
        finally:
            os.close(descriptor)

    def _block(self, which: int, until: float, most: float = math.inf) -> float:
        """What is received next, or sent, waits in the kernel, which needs no call to wait: for `most` seconds, and
        until then at the latest. `which` is SO_RCVTIMEO or SO_SNDTIMEO. -> the time when that ends."""
        now = time.monotonic()
        seconds = min(_positive(until - now), most)
        self.sock.settimeout(None)
        whole = int(seconds)
        self.sock.setsockopt(socket.SOL_SOCKET, which, struct.pack("@ll", whole, int(1e6 * (seconds - whole)) or 1))
        return now + seconds

    def pour(self, data: memoryview, seconds: float) -> None:
        """Sends bare bytes, all within `seconds`."""
        self.pour_memory(data, seconds)

    def pour_memory(self, data: memoryview, seconds: float, beyond: Callable[[int, float], int] | None = None) -> None:
        """`pour` of an image, whose bytes may still be coming, as in `pour_file`."""
        until, done, there = time.monotonic() + seconds, 0, 0 if beyond else len(data)
        while done < len(data):
            if beyond and done == there:
                there = beyond(done, until - time.monotonic())
            self._block(socket.SO_SNDTIMEO, until)
            try:
                done += self.sock.send(data[done:there])
            except BlockingIOError:
                raise TimeoutError("the other side takes no bytes") from None

    def pour_file(
        self,
        descriptor: int,
        size: int,
        seconds: float,
        beyond: Callable[[int, float], int] | None = None,
        bucket: int = 1 << 24,
    ) -> None:
        """Sends a file's bytes without bringing them to us (sendfile): none may change before they are read there.

        `beyond(n, seconds)` says how many there are, once they are more than n; without it, all are.
        """
        until, done, there = time.monotonic() + seconds, 0, 0 if beyond else size
        while done < size:
            self.sock.settimeout(_positive(until - time.monotonic()))
            if beyond and done == there:
                there = beyond(done, until - time.monotonic())
            try:
                sent = os.sendfile(self.sock.fileno(), descriptor, done, min(bucket, there - done))
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
    """Sleeps until a socket can be read or written; TimeoutError after so many seconds."""
    poll = select.poll()
    poll.register(sock, event)
    if not poll.poll(_positive(seconds) * 1000):
        raise TimeoutError(why)


# ----------------------------------------------------------------------------------------------- who may speak here


def check_token(token: str | None) -> None:
    """ValueError where a token is too weak to be one."""
    if token is not None and (len(token) < SECRET or not token.isascii() or not token.isprintable()):
        raise ValueError(f"a token of {len(token)} characters; it is one line of {SECRET} or more ASCII ones")


def welcome(wire: Wire, token: str | None, seconds: float) -> None:
    """The server's part: draws the session's number, and lets in who proves to know the token without showing it."""
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
    """The client's part; PermissionError where either side has another token."""
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
