"""Transports over stream sockets: frames, a handshake, a server with a thread for each receiver, the receiver's end.

Frames are small messages, each checked, in order and in time. A frame carries the session's number, which the server
draws for each connection, and its own number: a frame that was cut, repeated, reordered or taken from another
connection is refused, and ends the connection. Images follow a frame as bare bytes: their digests are in the manifest.
The way of an image is the transport's own: `Delivery` on the server's side, `Collection` on the receiver's.
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.runtime import bounded_json
from longhaul.weight_sync import manifest
from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.digest import hasher
from longhaul.weight_sync.protocol import Held, Offer, ProtocolError, Verdict
from longhaul.weight_sync.transports.base import Parcel, PublisherSide, ReceiveTarget

PATIENCE = 10.0
"""Seconds that one side waits for a small frame of the other."""

BACKLOG = 512
"""Connections that wait to be accepted, at most: many receivers may bind at once."""

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
    running = hasher()(struct.pack("<IQI", number, session, len(text)))
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


# -------------------------------------------------------------------------------------------------- server and receiver


class Delivery(Protocol):
    """Sender's part of the transfer of a session's images."""

    def deliver(
        self, connection: Wire, publisher: PublisherSide, parcel: Parcel, image: Image, words: dict[str, Any]
    ) -> None:
        """Answers the frame "fetch"."""

    def released(self, words: dict[str, Any]) -> None:
        """Takes note of the images that the receiver has released, as a frame says."""

    def end(self) -> None:
        """Ends the session."""


class Collection(Protocol):
    """Receiver's part of the transfer of a session's images."""

    def words(self) -> dict[str, Any]:
        """Words of the next frame about images that were released."""

    def collect(self, connection: Wire, parcel: Parcel, target: ReceiveTarget, seconds: float) -> np.ndarray:
        """Sends the frame "fetch", and returns the image that comes."""

    def close(self) -> None: ...


class SocketTransport:
    """Serves a publisher on a bound socket; `delivery` is called for each session."""

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        token: str | None,
        delivery: Callable[[], Delivery],
        *,
        admits: Callable[[socket.socket], bool] = lambda sock: True,
        tidy: Callable[[], None] = lambda: None,
    ) -> None:
        """`admits` checks who connects; `tidy` is called once after everything is closed."""
        self.address, self._admits, self._tidy = address, admits, tidy
        self._listener, self._token, self._delivery = listener, token, delivery
        self._sessions: dict[Wire, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._acceptor: threading.Thread | None = None

    def open(self, publisher: PublisherSide) -> None:
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:  # an address may be bound twice: the first to listen has it
            raise ValueError(f"{self.address} can't be served: {error.strerror}; give another one") from error
        self._acceptor = threading.Thread(target=self._accept, args=(publisher,), name="longhaul-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        with self._lock:
            first = not self._closed.is_set()
            self._closed.set()
            sessions = dict(self._sessions)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        for connection in sessions:
            connection.close()
        for thread in (self._acceptor, *sessions.values()):
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        if first:
            self._tidy()

    def _accept(self, publisher: PublisherSide) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._closed.wait(0.05)  # no descriptors are left for the moment
                continue
            if not self._admits(sock):
                sock.close()
                continue
            connection = Wire(sock)
            thread = threading.Thread(
                target=self._serve, args=(publisher, connection), name="longhaul-session", daemon=True
            )
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                self._sessions[connection] = thread
                thread.start()

    def _serve(self, publisher: PublisherSide, connection: Wire) -> None:
        try:
            welcome(connection, self._token, PATIENCE)
            Session(publisher, connection, self._delivery()).serve()
        except OSError:
            pass  # not a receiver
        finally:
            connection.close()
            with self._lock:
                self._sessions.pop(connection, None)


class Session:
    """One receiver's connection, on the server's side: answers each frame until either side ends it."""

    def __init__(self, publisher: PublisherSide, connection: Wire, delivery: Delivery) -> None:
        self.publisher, self.wire, self.delivery = publisher, connection, delivery
        self.name = ""
        self._carried: tuple[Parcel, Image] | None = None  # offered, and not yet reported as taken

    def serve(self) -> None:
        why = "it has gone"
        idle = max(self.publisher.settings.lease, self.publisher.settings.deadline) + PATIENCE
        try:
            while True:
                frame = self.wire.receive(idle)
                if frame.kind == "bye":
                    self.delivery.released(frame.words)
                    return
                self._answer(frame)
        except ProtocolError as error:
            why = str(error)
            with contextlib.suppress(OSError):
                self.wire.send("error", PATIENCE, {"why": why[:1000]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"its connection failed: {type(error).__name__} {error}"
        finally:
            self._carried = None
            self.delivery.end()
            if self.name:
                self.publisher.gone(self.name, why)

    def _answer(self, frame: Frame) -> None:
        words = frame.words
        self.delivery.released(words)
        if frame.kind == "status":
            self.wire.send("status", PATIENCE, blob=json.dumps(self.publisher.status()).encode())
            return
        if frame.kind == "bind":
            self.name = self.publisher.bind(str(words["name"]), _held(words))
            self.publisher.watch(self.name, self.wire.close)
            about = {"name": self.name, "run": self.publisher.run, "lease": self.publisher.settings.lease}
            self.wire.send("bound", PATIENCE, about)
            return
        self.publisher.heard(self.name)
        if frame.kind == "ask":
            self._ask(float(words["wait"]))
        elif frame.kind == "fetch":
            if self._carried is None or self._carried[0].offer.version != words["version"]:
                raise ProtocolError(f"version {words['version']} was not offered")
            self.delivery.deliver(self.wire, self.publisher, *self._carried, words)
        elif frame.kind == "ready":
            wait = min(float(words["wait"]), self.publisher.settings.lease)
            verdict = self.publisher.ready(self.name, int(words["version"]), bytes.fromhex(words["root"]), wait)
            self._carried = None
            self.wire.send("verdict", PATIENCE, {"verdict": verdict})
        elif frame.kind in ("failed", "done"):
            self._carried = None
            if frame.kind == "failed":
                self.publisher.failed(self.name, int(words["version"]), str(words["why"])[:300])
            else:
                self.publisher.done(self.name, _held(words))
            self.wire.send("ok", PATIENCE)
        else:
            raise WireError(f"unknown frame {frame.kind[:40]!r}")

    def _ask(self, wait: float) -> None:
        self._carried = self.publisher.ask(self.name, min(wait, self.publisher.settings.lease / 2))
        if self._carried is None:
            self.wire.send("nothing", PATIENCE)
            return
        parcel = self._carried[0]
        about = {"base": parcel.offer.base, "seconds": parcel.offer.seconds}
        self.wire.send("offer", PATIENCE, about, manifest.to_bytes(parcel.manifest))


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
        answer = self._asked("bind", seconds, "bound", words={"name": self._name, **_words(held)})
        self.lease = float(answer.words["lease"])

    def ask(self, held: Held, wait: float) -> Parcel | None:
        wait = min(wait, self.lease / 3)
        answer = self._asked("ask", wait + PATIENCE, "offer", "nothing", words={"wait": wait})
        if answer.kind == "nothing":
            return None
        try:
            offered = manifest.from_bytes(answer.blob)
            base, seconds = int(answer.words["base"]), float(answer.words["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"an offer that means nothing: {error}") from error
        return Parcel(Offer(offered.run, offered.epoch, offered.version, base, offered.root, seconds), offered)

    def fetch(self, parcel: Parcel, target: ReceiveTarget, seconds: float) -> np.ndarray:
        return self._collection.collect(self.wire, parcel, target, seconds)

    def ready(self, held: Held, version: int, root: bytes, wait: float) -> Verdict:
        wait = min(wait, self.lease / 3)
        words = {"version": version, "root": root.hex(), "wait": wait}
        answer = self._asked("ready", wait + PATIENCE, "verdict", words=words)
        try:
            return Verdict(answer.words["verdict"])
        except (ValueError, KeyError) as error:
            raise WireError("a verdict that means nothing") from error

    def failed(self, version: int, why: str) -> None:
        self._asked("failed", PATIENCE, "ok", words={"version": version, "why": why[:300]})

    def done(self, held: Held) -> None:
        self._asked("done", PATIENCE, "ok", words=_words(held))

    def status(self) -> dict[str, Any]:
        return bounded_json.parse(self._asked("status", PATIENCE, "status").blob)

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                self.wire.send("bye", 1.0, self._collection.words())
            self.wire.close()
            self._collection.close()

    def interrupt(self) -> None:
        """Ends a waiting call by ConnectionError at once; called from another thread."""
        with contextlib.suppress(OSError):
            self.wire.sock.shutdown(socket.SHUT_RD)  # the last frame can still be sent

    def _asked(self, kind: str, seconds: float, *answers: str, words: Mapping[str, Any] | None = None) -> Frame:
        self.wire.send(kind, PATIENCE, {**self._collection.words(), **(words or {})})
        return expect(self.wire, seconds, *answers)


def expect(connection: Wire, seconds: float, *answers: str, descriptors: list[int] | None = None) -> Frame:
    """Next frame, which must be one of `answers`. ProtocolError where the sender refused."""
    frame = connection.receive(seconds, descriptors)
    if frame.kind == "error":
        raise ProtocolError(str(frame.words.get("why", "the sender refused")))
    if frame.kind not in answers:
        raise WireError(f"a frame {frame.kind[:40]!r} where {' or '.join(answers)} was expected")
    return frame


def _held(words: dict[str, Any]) -> Held:
    return Held(str(words["run"]), int(words["epoch"]), int(words["version"]), bytes.fromhex(words["root"]))


def _words(held: Held) -> dict[str, Any]:
    return {**held._asdict(), "root": held.root.hex()}
