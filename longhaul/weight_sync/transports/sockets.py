"""Connections of stream sockets: frames, the handshake, the receiver's end. `socket_server` is the sender's.

Frames are small messages, each checked, in order and in time. A frame carries the session's number, which the server
draws for each connection, and its own number: a frame that was cut, repeated, reordered or taken from another
connection is refused, and ends the connection. With a token each frame also proves that its sender knows it, so that
nobody on the way can change one; the bytes of images are guarded against accidents alone. Images follow a frame as bare
bytes: their digests are in the manifest. The way of an image is the transport's own: `socket_server.Delivery` on the
server's side, `Collection` on the receiver's.
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
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.runtime import bounded_json
from longhaul.weight_sync import manifest
from longhaul.weight_sync.digest import hasher
from longhaul.weight_sync.protocol import Held, Offer, ProtocolError, Verdict
from longhaul.weight_sync.transports.base import Parcel, ReceiveTarget

PATIENCE = 10.0
"""Seconds that one side waits for a small frame of the other."""

HEAD = struct.Struct("<4sIQQIH")  # magic, number, session, digest, bytes of the blob, bytes of the fields
MAGIC = b"LHS1"
MOST_WORDS = 1 << 15
MOST_BLOB = 1 << 28
"""Bytes of a frame's two parts, at most: a manifest of a million tensors fits. A server takes no blob."""

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
    """Message of a session: its kind, fields that JSON can hold, and bytes."""

    kind: str
    fields: dict[str, Any]
    blob: bytes = b""


class Wire:
    """One end of a connected stream socket, for one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.session = 0
        self.keys = b"", b""  # of the frames that are sent, and of those received; set by a handshake with a token
        self.most_blob = 0  # bytes of a blob that is received: until the handshake nobody can make us reserve memory
        self._sent = self._received = 0
        self._unsent = memoryview(b"")
        self._into, self._done = bytearray(HEAD.size), 0  # frame on its way, and the bytes of it that are here
        self._buffers = sock.family != socket.AF_UNIX  # LOW bytes: a Unix socket may have no room for them
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(
        self,
        kind: str,
        seconds: float,
        fields: Mapping[str, Any] | None = None,
        blob: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> None:
        """Sends one frame, with descriptors on a Unix socket. TimeoutError, ConnectionError."""
        data = self._packed(kind, fields, blob)
        self.sock.settimeout(_positive(seconds))
        sent = socket.send_fds(self.sock, [data], list(descriptors)) if descriptors else 0
        self.sock.sendall(memoryview(data)[sent:])

    def begin(self, kind: str, fields: Mapping[str, Any] | None = None, blob: bytes = b"") -> bool:
        """Begins to send one frame without waiting; the next one may follow when `flush` has returned true."""
        self._unsent = memoryview(self._packed(kind, fields, blob))
        return self.flush()

    def flush(self) -> bool:
        """Sends what can be sent without waiting; returns True when nothing is left."""
        self.sock.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        return not self._unsent

    def _packed(self, kind: str, fields: Mapping[str, Any] | None, blob: bytes) -> bytes:
        text = json.dumps({**(fields or {}), "kind": kind}, separators=(",", ":")).encode()
        if len(text) > MOST_WORDS or len(blob) > MOST_BLOB:
            raise WireError(f"a frame of {len(text)} + {len(blob)} bytes; at most {MOST_WORDS} + {MOST_BLOB}")
        digest = _check(self._sent, self.session, text, blob, self.keys[0])
        head = HEAD.pack(MAGIC, self._sent, self.session, digest, len(blob), len(text))
        self._sent += 1
        return head + text + blob

    def receive(self, seconds: float, descriptors: list[int] | None = None) -> Frame:
        """Next frame; appends the descriptors that came with it to `descriptors`.

        TimeoutError, WireError; ConnectionError where the other side is gone.
        """
        until = time.monotonic() + seconds
        while (frame := self.arrived(descriptors)) is None:
            _awaited(self.sock, select.POLLIN, until - time.monotonic(), "the other side sends no frame")
        return frame

    def arrived(self, descriptors: list[int] | None = None) -> Frame | None:
        """Next frame if all of it has come, else None; does not wait. WireError, ConnectionError."""
        self.sock.settimeout(0.0)
        try:
            while True:
                while self._done < len(self._into):
                    left = memoryview(self._into)[self._done :]
                    if descriptors is not None and not self._done:
                        got = self._with_descriptors(left, descriptors)
                    else:
                        got = self.sock.recv_into(left)
                    if not got:
                        raise ConnectionResetError("the other side has closed the connection")
                    self._done += got
                whole = self._length()
                if len(self._into) == whole:
                    return self._unpacked()
                self._into = self._into + bytes(whole - len(self._into))
        except BlockingIOError:
            return None

    @property
    def partial(self) -> bool:
        """True where a frame has begun to come."""
        return self._done > 0

    @property
    def unsent(self) -> bool:
        """True where a frame has begun to be sent."""
        return len(self._unsent) > 0

    def _length(self) -> int:
        """Bytes of the frame whose head is here, once it was checked."""
        magic, _, _, _, blob_length, text_length = HEAD.unpack_from(self._into)
        if magic != MAGIC or text_length > MOST_WORDS or blob_length > self.most_blob:
            raise WireError("the bytes received are no frame")
        return HEAD.size + text_length + blob_length

    def _unpacked(self) -> Frame:
        _, number, session, digest, _, length = HEAD.unpack_from(self._into)
        body = memoryview(self._into)[HEAD.size :]
        text, blob = bytes(body[:length]), bytes(body[length:])
        self._into, self._done = bytearray(HEAD.size), 0
        if session != self.session or number != self._received:
            raise WireError(f"frame {number} of session {session:x}; {self._received} of {self.session:x} comes next")
        if digest != _check(number, session, text, blob, self.keys[1]):
            raise WireError("a frame was damaged")
        self._received += 1
        try:
            fields = json.loads(text)
            return Frame(str(fields.pop("kind")), fields, blob)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise WireError(f"a frame that means nothing: {error}") from error

    def fill(self, into: memoryview, until: float) -> None:
        """Reads exactly len(into) bytes before the time `until` of `time.monotonic`."""
        done = 0
        while done < len(into):
            self.sock.settimeout(_positive(until - time.monotonic()))
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
                    if self._buffers and low != (low := min(LOW, len(into) - done)):
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


def _check(number: int, session: int, text: bytes, blob: bytes, key: bytes) -> int:
    head = struct.pack("<IQI", number, session, len(text))
    running = hashlib.blake2b(head, digest_size=8, key=key) if key else hasher()(head)
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


# ------------------------------------------------------------------------------------------------------- authentication


def check_token(token: str | None) -> None:
    """Raises ValueError for a token that is too weak."""
    if token is not None and (len(token) < SECRET or not token.isascii() or not token.isprintable()):
        raise ValueError(f"a token of {len(token)} characters; it is one line of {SECRET} or more ASCII ones")


def welcome(frame: Frame, nonce: str, token: str | None) -> dict[str, Any]:
    """Server's answer to a client's hello, with the session's number. PermissionError for one without the token."""
    theirs = str(frame.fields.get("nonce", ""))
    wanted = _proof(token, "client", nonce, theirs)
    if frame.kind != "hello" or not hmac.compare_digest(wanted, str(frame.fields.get("proof"))):
        raise PermissionError("the token is another one; give both sides the same file")
    session = int.from_bytes(secrets.token_bytes(8), "little") | 1
    return {"session": session, "proof": _proof(token, "server", nonce, theirs)}


def enter(wire: Wire, token: str | None, seconds: float) -> None:
    """Client's handshake; PermissionError where either side has another token."""
    asked = wire.receive(seconds)
    mine, theirs = secrets.token_bytes(16).hex(), str(asked.fields.get("nonce", ""))
    if asked.fields.get("asks") and token is None:
        raise PermissionError("the sender asks for a token; give --token-file")
    wire.send("hello", seconds, {"nonce": mine, "proof": _proof(token, "client", theirs, mine)})
    answer = wire.receive(seconds)
    proof = _proof(token, "server", theirs, mine)
    if answer.kind != "welcome" or not hmac.compare_digest(proof, str(answer.fields.get("proof"))):
        raise PermissionError(
            str(answer.fields.get("why", "the sender does not know the token; give both sides the same file"))
        )
    wire.session, wire.most_blob = int(answer.fields["session"]), MOST_BLOB
    wire.keys = keys(token, theirs, mine)[::-1]


def keys(token: str | None, first: str, second: str) -> tuple[bytes, bytes]:
    """Keys of a session's frames from the server and from the client; empty without a token."""
    if token is None:
        return b"", b""
    from_server, from_client = (_proof(token, f"frames of the {side}", first, second) for side in ("server", "client"))
    return bytes.fromhex(from_server), bytes.fromhex(from_client)


def _proof(token: str | None, side: str, first: str, second: str) -> str:
    return hmac.new((token or "").encode(), f"{side} {first} {second}".encode(), hashlib.sha256).hexdigest()


# ----------------------------------------------------------------------------------------------------------- receiver


class Collection(Protocol):
    """Receiver's part of the transfer of a session's images."""

    def fields(self) -> dict[str, Any]:
        """Fields of the next frame on images that were released."""

    def collect(self, connection: Wire, parcel: Parcel, target: ReceiveTarget, seconds: float) -> np.ndarray:
        """Sends the frame "fetch", and returns the image that comes."""

    def close(self) -> None: ...


class SocketSource:
    """Receiver's end of a connection, a `base.Source`."""

    def __init__(self, sock: socket.socket, token: str | None, name: str, collection: Collection) -> None:
        self.wire, self._name, self._collection = Wire(sock), name, collection
        self._open = True
        self.lease = PATIENCE
        try:
            enter(self.wire, token, PATIENCE)
        except BaseException:
            self.wire.close()
            raise

    def bind(self, held: Held, seconds: float) -> None:
        answer = self._asked("bind", seconds, "bound", fields={"name": self._name, **_held_fields(held)})
        self.lease = float(answer.fields["lease"])

    def ask(self, held: Held, wait: float) -> Parcel | None:
        wait = min(wait, self.lease / 3)
        answer = self._asked("ask", wait + PATIENCE, "offer", "nothing", fields={"wait": wait})
        if answer.kind == "nothing":
            return None
        try:
            offered = manifest.from_bytes(answer.blob)
            base, seconds = int(answer.fields["base"]), float(answer.fields["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"an offer that means nothing: {error}") from error
        return Parcel(Offer(offered.run, offered.epoch, offered.version, base, offered.root, seconds), offered)

    def fetch(self, parcel: Parcel, target: ReceiveTarget, seconds: float) -> np.ndarray:
        return self._collection.collect(self.wire, parcel, target, seconds)

    def ready(self, held: Held, version: int, root: bytes, wait: float) -> Verdict:
        wait = min(wait, self.lease / 3)
        fields = {"version": version, "root": root.hex(), "wait": wait}
        answer = self._asked("ready", wait + PATIENCE, "verdict", fields=fields)
        try:
            return Verdict(answer.fields["verdict"])
        except (ValueError, KeyError) as error:
            raise WireError("a verdict that means nothing") from error

    def failed(self, version: int, why: str) -> None:
        self._asked("failed", PATIENCE, "ok", fields={"version": version, "why": why[:300]})

    def done(self, held: Held) -> None:
        self._asked("done", PATIENCE, "ok", fields=_held_fields(held))

    def status(self) -> dict[str, Any]:
        return bounded_json.parse(self._asked("status", PATIENCE, "status").blob)

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                self.wire.send("bye", 1.0, self._collection.fields())
            self.wire.close()
            self._collection.close()

    def interrupt(self) -> None:
        """Ends a waiting call by ConnectionError at once; called from another thread."""
        with contextlib.suppress(OSError):
            self.wire.sock.shutdown(socket.SHUT_RD)  # the last frame can still be sent

    def _asked(self, kind: str, seconds: float, *answers: str, fields: Mapping[str, Any] | None = None) -> Frame:
        self.wire.send(kind, PATIENCE, {**self._collection.fields(), **(fields or {})})
        return expect(self.wire, seconds, *answers)


def expect(connection: Wire, seconds: float, *answers: str, descriptors: list[int] | None = None) -> Frame:
    """Next frame, which must be one of `answers`. ProtocolError where the sender refused."""
    frame = connection.receive(seconds, descriptors)
    if frame.kind == "error":
        raise ProtocolError(str(frame.fields.get("why", "the sender refused")))
    if frame.kind not in answers:
        raise WireError(f"a frame {frame.kind[:40]!r} where {' or '.join(answers)} was expected")
    return frame


def _held_fields(held: Held) -> dict[str, Any]:
    return {**held._asdict(), "root": held.root.hex()}
