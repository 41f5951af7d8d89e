"""What lanes over stream sockets share: a server with a thread a receiver, and a receiver's end that asks.

How an image goes over is the lane's own: `Delivery` on the server's side, `Collection` on the receiver's.
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
from longhaul.weight_sync.transports.base import Hub, Parcel, Staging
from longhaul.weight_sync.transports.framing import Frame, Wire, WireError

PATIENCE = 10.0
"""Seconds that one side waits for a small frame of the other."""

BACKLOG = 512


class Delivery(Protocol):
    """How a session's images go to its receiver."""

    partly: bool  # whether it can begin before an image is whole

    def deliver(self, connection: Wire, hub: Hub, parcel: Parcel, image: Image, words: dict[str, Any]) -> None:
        """Answers "fetch"."""

    def released(self, words: dict[str, Any]) -> None:
        """What a frame says of images that the receiver has let go."""

    def end(self) -> None:
        """The session is over."""


class Collection(Protocol):
    """How an image comes from a session."""

    moves: bool

    def words(self) -> dict[str, Any]:
        """What the next frame should say of images that were let go."""

    def collect(self, connection: Wire, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        """Asks "fetch" and takes what comes."""

    def close(self) -> None: ...


class SocketLane:
    """Serves a hub on a bound socket; `delivery` is made for each session."""

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
        """`admits` looks at who connects, `tidy` is called once when all is closed."""
        self.address, self._admits, self._tidy = address, admits, tidy
        self._listener, self._token, self._delivery = listener, token, delivery
        self._sessions: dict[Wire, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._acceptor: threading.Thread | None = None

    def open(self, hub: Hub) -> None:
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:  # bound by two, it is taken by who listens first
            raise ValueError(f"{self.address} can't be served: {error.strerror}; give another one") from error
        self._acceptor = threading.Thread(target=self._accept, args=(hub,), name="longhaul-lane", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        with self._lock:
            first = not self._closed.is_set()
            self._closed.set()
            sessions = dict(self._sessions)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the one who accepts
        self._listener.close()
        for connection in sessions:
            connection.close()
        for thread in (self._acceptor, *sessions.values()):
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        if first:
            self._tidy()

    def _accept(self, hub: Hub) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._closed.wait(0.05)  # no descriptors left, for the moment
                continue
            if not self._admits(sock):
                sock.close()
                continue
            connection = Wire(sock)
            thread = threading.Thread(target=self._serve, args=(hub, connection), name="longhaul-session", daemon=True)
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                self._sessions[connection] = thread
                thread.start()

    def _serve(self, hub: Hub, connection: Wire) -> None:
        try:
            framing.welcome(connection, self._token, PATIENCE)
            Session(hub, connection, self._delivery()).serve()
        except OSError:
            pass  # it never was a receiver
        finally:
            connection.close()
            with self._lock:
                self._sessions.pop(connection, None)


class Session:
    """One receiver's connection, on the server's side: answers frame by frame until either has enough."""

    def __init__(self, hub: Hub, connection: Wire, delivery: Delivery) -> None:
        self.hub, self.wire, self.delivery = hub, connection, delivery
        self.name = ""
        self._carried: tuple[Parcel, Image] | None = None  # offered, and not yet known to have been taken

    def serve(self) -> None:
        why = "it has gone"
        idle = max(self.hub.settings.lease, self.hub.settings.deadline) + PATIENCE
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
                self.hub.gone(self.name, why)

    def _answer(self, frame: Frame) -> None:
        words = frame.words
        self.delivery.released(words)
        if frame.kind == "status":
            self.wire.send("status", PATIENCE, blob=json.dumps(self.hub.status()).encode())
            return
        if frame.kind == "bind":
            self.name = self.hub.bind(str(words["name"]), _held(words))
            self.hub.watch(self.name, self.wire.close)
            about = {"name": self.name, "run": self.hub.run, "lease": self.hub.settings.lease}
            self.wire.send("bound", PATIENCE, about)
            return
        self.hub.heard(self.name)
        if frame.kind == "ask":
            self._ask(float(words["wait"]))
        elif frame.kind == "fetch":
            if self._carried is None or self._carried[0].offer.version != words["version"]:
                raise ProtocolError(f"version {words['version']} was not offered")
            self.delivery.deliver(self.wire, self.hub, *self._carried, words)
        elif frame.kind == "ready":
            wait = min(float(words["wait"]), self.hub.settings.lease)
            found = self.hub.ready(self.name, int(words["version"]), bytes.fromhex(words["root"]), wait)
            self._carried = None
            self.wire.send("verdict", PATIENCE, {"verdict": found})
        elif frame.kind in ("failed", "done"):
            self._carried = None
            if frame.kind == "failed":
                self.hub.failed(self.name, int(words["version"]), str(words["why"])[:300])
            else:
                self.hub.done(self.name, _held(words))
            self.wire.send("ok", PATIENCE)
        else:
            raise WireError(f"nobody knows a frame {frame.kind[:40]!r}")

    def _ask(self, wait: float) -> None:
        self._carried = self.hub.ask(self.name, min(wait, self.hub.settings.lease / 2), self.delivery.partly)
        if self._carried is None:
            self.wire.send("nothing", PATIENCE)
            return
        parcel = self._carried[0]
        about = {"base": parcel.offer.base, "seconds": parcel.offer.seconds}
        self.wire.send("offer", PATIENCE, about, manifest.to_bytes(parcel.manifest))


class SocketSource:
    """A receiver's end of a connection (`lanes.base.Source`)."""

    def __init__(self, sock: socket.socket, token: str | None, name: str, collection: Collection) -> None:
        self.wire, self._name, self._collection = Wire(sock), name, collection
        self._open = True
        self.moves = collection.moves
        self.lease = PATIENCE
        try:
            framing.enter(self.wire, token, PATIENCE)
        except BaseException:
            self.wire.close()
            raise

    def bind(self, held: Held, seconds: float) -> None:
        answer = self._said("bind", seconds, "bound", words={"name": self._name, **_words(held)})
        self.lease = float(answer.words["lease"])

    def ask(self, held: Held, wait: float) -> Parcel | None:
        wait = min(wait, self.lease / 3)
        answer = self._said("ask", wait + PATIENCE, "offer", "nothing", words={"wait": wait})
        if answer.kind == "nothing":
            return None
        try:
            found = manifest.from_bytes(answer.blob)
            base, seconds = int(answer.words["base"]), float(answer.words["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"an offer that means nothing: {error}") from error
        return Parcel(Offer(found.run, found.epoch, found.version, base, found.root, seconds), found)

    def fetch(self, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        return self._collection.collect(self.wire, parcel, staging, seconds)

    def ready(self, held: Held, version: int, root: bytes, wait: float) -> Verdict:
        wait = min(wait, self.lease / 3)
        words = {"version": version, "root": root.hex(), "wait": wait}
        answer = self._said("ready", wait + PATIENCE, "verdict", words=words)
        try:
            return Verdict(answer.words["verdict"])
        except (ValueError, KeyError) as error:
            raise WireError("a verdict that means nothing") from error

    def failed(self, version: int, why: str) -> None:
        self._said("failed", PATIENCE, "ok", words={"version": version, "why": why[:300]})

    def done(self, held: Held) -> None:
        self._said("done", PATIENCE, "ok", words=_words(held))

    def status(self) -> dict[str, Any]:
        """What the sender tells of itself."""
        return json.loads(self._said("status", PATIENCE, "status").blob)

    def close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                self.wire.send("bye", 1.0, self._collection.words())
            self.wire.close()
            self._collection.close()

    def interrupt(self) -> None:
        """From another thread: whoever waits here gets a ConnectionError at once."""
        with contextlib.suppress(OSError):
            self.wire.sock.shutdown(socket.SHUT_RD)  # a last word can still be said

    def _said(self, kind: str, seconds: float, *answers: str, words: Mapping[str, Any] | None = None) -> Frame:
        self.wire.send(kind, PATIENCE, {**self._collection.words(), **(words or {})})
        return expect(self.wire, seconds, *answers)


def expect(connection: Wire, seconds: float, *answers: str, descriptors: list[int] | None = None) -> Frame:
    """The next frame, which must be one of `answers`. ProtocolError where the sender refused."""
    frame = connection.receive(seconds, descriptors)
    if frame.kind == "error":
        raise ProtocolError(str(frame.words.get("why", "the sender refused")))
    if frame.kind not in answers:
        raise WireError(f"a frame {frame.kind[:40]!r} where {' or '.join(answers)} was due")
    return frame


def _held(words: dict[str, Any]) -> Held:
    return Held(str(words["run"]), int(words["epoch"]), int(words["version"]), bytes.fromhex(words["root"]))


def _words(held: Held) -> dict[str, Any]:
    return {**held._asdict(), "root": held.root.hex()}
