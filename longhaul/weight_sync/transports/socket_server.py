"""Transports over stream sockets: a server with a thread for each receiver, and the receiver's end.

The way of an image is the transport's own: `Delivery` on the server's side, `Collection` on the receiver's.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from longhaul.weight_sync import manifest
from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.protocol import Held, Offer, ProtocolError, Verdict
from longhaul.weight_sync.transports import framing
from longhaul.weight_sync.transports.base import Parcel, PublisherSide, ReceiveTarget
from longhaul.weight_sync.transports.framing import Frame, Wire, WireError

PATIENCE = 10.0
"""Seconds that one side waits for a small frame of the other."""

BACKLOG = 512
"""Connections that wait to be accepted, at most: many receivers may bind at once."""


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
            framing.welcome(connection, self._token, PATIENCE)
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
            framing.enter(self.wire, token, PATIENCE)
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
        return json.loads(self._asked("status", PATIENCE, "status").blob)

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
