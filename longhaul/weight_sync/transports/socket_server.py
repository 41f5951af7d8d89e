"""Server of a publisher on a stream socket: one thread for all connections that wait, one for each image on its way.

Who connects is a stranger until it has bound as a receiver. Strangers can take little: their number, their time and
the rate at which they come are bounded, and a new one takes the place of the oldest. No thread and no memory beyond
a small frame is theirs, and descriptors stay in reserve for the rest of the process, which has to save.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from longhaul.runtime import descriptors
from longhaul.weight_sync import manifest
from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.protocol import Held, ProtocolError, Verdict
from longhaul.weight_sync.transports.base import Parcel, PublisherSide
from longhaul.weight_sync.transports.sockets import PATIENCE, Frame, Wire, WireError, keys, welcome

BACKLOG = 512
"""Connections that wait to be accepted, at most: many receivers may bind at once."""

STRANGERS = 32
"""Connections that have not bound, at most: another one ends the oldest."""

RATE = 100.0
"""Connections accepted in a second, at most, after STRANGERS at once: a flood costs little of a processor's time."""

BATCH = 16
"""Connections that are accepted together once RATE holds them back: a thread that seldom wakes costs training less."""

RECEIVERS = 512
"""Receivers of a server, at most; and at most a quarter of the process's descriptors."""

PAUSE = 0.5
"""Seconds without accepting after the system had no descriptor or no memory for a connection."""


class Admission:
    """Rate at which newcomers are accepted: STRANGERS at once, then `rate` a second, BATCH at a time."""

    def __init__(self, rate: float) -> None:
        self._rate, self._left, self._filled = rate, float(STRANGERS), time.monotonic()

    def pause(self) -> float:
        """Seconds until newcomers may be accepted again; 0: one may be now."""
        now = time.monotonic()
        self._left = min(float(STRANGERS), self._left + self._rate * (now - self._filled))
        self._filled = now
        return 0.0 if self._left >= 1.0 else (BATCH - self._left) / self._rate

    def count(self) -> None:
        """Notes one that was accepted."""
        self._left -= 1.0

    def forget(self) -> None:
        """Notes that one of them was no stranger: many receivers may come at once."""
        self._left += 1.0


def fail(address: str, error: Exception) -> None:
    """Reports that no receiver is served any more, and ends the process: a training run saves, and can be resumed."""
    print(f"longhaul: {address} can't be served: {type(error).__name__} {error}", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)


class Delivery(Protocol):
    """Sender's part of the transfer of a session's images."""

    def deliver(
        self, connection: Wire, publisher: PublisherSide, parcel: Parcel, image: Image, fields: dict[str, Any]
    ) -> None:
        """Answers the frame "fetch"."""

    def released(self, fields: dict[str, Any]) -> None:
        """Takes note of the images that the receiver has released, as a frame says."""

    def end(self) -> None:
        """Ends the session."""


class Session:
    """A connection on the server's side: a stranger's, then perhaps a receiver's."""

    def __init__(self, connection: Wire, delivery: Delivery) -> None:
        self.wire, self.delivery = connection, delivery
        self.nonce = secrets.token_bytes(16).hex()
        self.name = ""  # of the receiver that has bound
        self.due = time.monotonic() + PATIENCE  # when it ends, or what it waits for is answered all the same
        self.carried: tuple[Parcel, Image] | None = None  # offered, and not yet reported as taken
        self.waits: Callable[[float], bool] | None = None  # answers the last frame, if it can within these seconds
        self.courier: threading.Thread | None = None  # thread that sends it an image, and has the wire until then
        self.ended = False


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
        """`admits` checks a connection; `tidy` is called once after everything is closed."""
        self.address, self._admits, self._tidy = address, admits, tidy
        self._listener, self._token, self._delivery = listener, token, delivery
        self._sessions: dict[Session, None] = {}  # in the order in which they came
        self._returned: deque[tuple[Session, Exception | None]] = deque()  # whose image was sent
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, publisher: PublisherSide) -> None:
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:  # an address may be bound twice: the first to listen has it
            raise ValueError(f"{self.address} can't be served: {error.strerror}; give another one") from error
        self._publisher = publisher
        self._limit = descriptors.raise_limit()
        self._most = min(RECEIVERS, self._limit // 4)
        self._admission = Admission(RATE)
        self._resumes = 0.0  # when connections are accepted again; 0: they are
        self._hears, self._bell = socket.socketpair()
        for sock in (self._listener, self._hears, self._bell):
            sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._hears, selectors.EVENT_READ, self._on_wakeup)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        publisher.alert(self._wake)
        self._thread = threading.Thread(target=self._work, name="longhaul-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        first = not self._closed.is_set()
        self._closed.set()
        if self._thread is not None:
            self._wake()
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._listener.close()
        if first:
            self._tidy()

    def _wake(self) -> None:
        """Wakes the server's thread: versions have changed, an image was sent, or it shall end."""
        with contextlib.suppress(OSError):  # it is full, so that it wakes anyway; or closed
            self._bell.send(b"1")

    # ------------------------------------------------------------------------------------------------ its own thread

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                self._turn()
        except Exception as error:
            fail(self.address, error)
        finally:
            self._listener.close()
            for session in list(self._sessions):
                self._end(session, "the server ends")
            self._selector.close()
            self._hears.close()
            self._bell.close()

    def _turn(self) -> None:
        """Waits for what is due next, and does it."""
        now = time.monotonic()
        for session in [each for each in self._sessions if each.due <= now and each.courier is None]:
            self._guard(session, self._expire)
        if self._resumes and self._resumes <= now:
            self._resumes = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        times = [each.due for each in self._sessions if each.courier is None]
        times += [self._resumes] if self._resumes else []
        for key, _ in self._selector.select(max(0.0, min(times) - now) if times else None):
            if isinstance(key.data, Session):
                if not key.data.ended:
                    self._guard(key.data, self._go_on)
            else:
                key.data()

    def _on_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._hears.recv(4096):
                pass
        while self._returned:
            session, error = self._returned.popleft()
            session.courier = None
            self._guard(session, functools.partial(self._reclaim, error=error))
        for session in [each for each in self._sessions if each.waits is not None]:
            self._guard(session, lambda session: self._settle(session, session.due - time.monotonic()))

    def _accept(self) -> None:
        """Accepts waiting connections, as many as the rate allows."""
        while not (seconds := self._admission.pause()):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it has gone already
                continue
            except (OSError, MemoryError):  # no descriptor is left, or no memory
                self._pause(PAUSE)
                return
            self._admission.count()
            try:
                self._greet(sock)
            except Exception:
                sock.close()
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        self._selector.unregister(self._listener)
        self._resumes = time.monotonic() + seconds

    def _greet(self, sock: socket.socket) -> None:
        """Begins a session, in place of the oldest stranger's if there are too many."""
        few = sock.fileno() >= self._limit - descriptors.RESERVE  # the lowest free number is given
        if few or not self._admits(sock):
            sock.close()
            return
        strangers = [each for each in self._sessions if not each.name]
        if len(strangers) >= STRANGERS:
            self._end(strangers[0], "others came")
        session = Session(Wire(sock), self._delivery())
        self._selector.register(sock, selectors.EVENT_READ, session)
        self._sessions[session] = None
        hello = {"nonce": session.nonce, "asks": self._token is not None}
        self._guard(session, lambda session: self._send_answer(session, "hello", hello))

    def _guard(self, session: Session, work: Callable[[Session], None]) -> None:
        """Does work for one session, whose errors end that one alone."""
        try:
            if not session.ended:
                work(session)
        except (ProtocolError, PermissionError) as error:
            with contextlib.suppress(Exception):
                session.wire.begin("error", {"why": str(error)[:1000]})
            self._end(session, str(error))
        except Exception as error:
            self._end(session, f"its connection failed: {type(error).__name__} {error}")

    def _end(self, session: Session, why: str) -> None:
        """Ends a session. One whose image is being sent ends when that thread has noticed."""
        if session.courier is not None:
            _shut(session.wire.sock)
            if not self._closed.is_set():
                return
            session.courier.join()
        session.ended, session.carried, session.waits = True, None, None
        self._sessions.pop(session, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(session.wire.sock)
        session.wire.close()
        session.delivery.end()
        if session.name:
            self._publisher.gone(session.name, why)

    def _expire(self, session: Session) -> None:
        if session.waits is None:
            raise TimeoutError("it was silent")
        self._settle(session, 0.0)

    def _go_on(self, session: Session) -> None:
        """Sends what is left of an answer, then takes the frames that have come."""
        if session.wire.unsent:
            session.wire.flush()
            self._await_next(session)
        while not session.ended and session.courier is None and not session.wire.unsent:
            frame = session.wire.arrived()
            if frame is None:
                if session.wire.partial:
                    session.due = min(session.due, time.monotonic() + PATIENCE)
                return
            self._answer(session, frame)

    def _send_answer(
        self, session: Session, kind: str, fields: dict[str, Any] | None = None, blob: bytes = b""
    ) -> None:
        """Answers a frame."""
        session.wire.begin(kind, fields, blob)
        self._await_next(session)

    def _await_next(self, session: Session) -> None:
        """Waits until the rest of an answer can be sent, or else for the next frame."""
        unsent, settings = session.wire.unsent, self._publisher.settings
        if not (unsent and session.due < time.monotonic() + PATIENCE):
            idle = 0.0 if unsent or not session.name else max(settings.lease, settings.deadline)
            session.due = time.monotonic() + PATIENCE + idle
        self._selector.modify(session.wire.sock, selectors.EVENT_WRITE if unsent else selectors.EVENT_READ, session)

    # ------------------------------------------------------------------------------------------------------ frames

    def _answer(self, session: Session, frame: Frame) -> None:
        fields, publisher = frame.fields, self._publisher
        if not session.wire.session:
            entered = welcome(frame, session.nonce, self._token)
            self._send_answer(session, "welcome", entered)
            session.wire.session = entered["session"]
            session.wire.keys = keys(self._token, session.nonce, str(fields.get("nonce", "")))
            return
        session.delivery.released(fields)
        if frame.kind == "bye":
            self._end(session, "it has gone")
            return
        if session.waits is not None:
            raise WireError(f"a frame {frame.kind[:40]!r} came before the last one was answered")
        if frame.kind == "status":
            self._send_answer(session, "status", blob=json.dumps(publisher.status()).encode())
            return
        if frame.kind == "bind":
            self._bind(session, fields)
            return
        publisher.heard(session.name)
        if frame.kind == "ask":
            self._wait(session, fields, publisher.settings.lease / 2, lambda left: self._ask(session))
        elif frame.kind == "fetch":
            if session.carried is None or session.carried[0].offer.version != fields["version"]:
                raise ProtocolError(f"version {fields['version']} was not offered")
            self._deliver(session, fields)
        elif frame.kind == "ready":
            version, root = int(fields["version"]), bytes.fromhex(fields["root"])
            self._wait(
                session, fields, publisher.settings.lease, lambda left: self._ready(session, version, root, left)
            )
        elif frame.kind in ("failed", "done"):
            session.carried = None
            if frame.kind == "failed":
                publisher.failed(session.name, int(fields["version"]), str(fields["why"])[:300])
            else:
                publisher.done(session.name, _held(fields))
            self._send_answer(session, "ok")
        else:
            raise WireError(f"unknown frame {frame.kind[:40]!r}")

    def _bind(self, session: Session, fields: dict[str, Any]) -> None:
        if sum(bool(each.name) for each in self._sessions) >= self._most:
            raise ProtocolError(f"{self._most} receivers are here, which is the most; take the versions from a relay")
        if session.name:
            raise WireError("it has bound already")
        session.name = self._publisher.bind(str(fields["name"]), _held(fields))
        if self._token is not None:
            self._admission.forget()
        self._publisher.watch(session.name, lambda: _shut(session.wire.sock))
        about = {"name": session.name, "run": self._publisher.run, "lease": self._publisher.settings.lease}
        self._send_answer(session, "bound", about)

    def _wait(self, session: Session, fields: dict[str, Any], most: float, answer: Callable[[float], bool]) -> None:
        """Answers now if it can, else when versions change or the time is over."""
        seconds = min(float(fields["wait"]), most)
        if not seconds >= 0.0:  # nor a number at all
            raise WireError(f"a wait of {seconds} seconds")
        session.due, session.waits = time.monotonic() + seconds, answer
        self._settle(session, seconds)

    def _settle(self, session: Session, left: float) -> None:
        assert session.waits is not None
        if session.waits(left):
            session.waits = None
        elif left <= 0.0:
            session.waits = None
            self._send_answer(session, "nothing")

    def _ask(self, session: Session) -> bool:
        session.carried = self._publisher.ask(session.name, 0.0)
        if session.carried is None:
            return False
        parcel = session.carried[0]
        about = {"base": parcel.offer.base, "seconds": parcel.offer.seconds}
        self._send_answer(session, "offer", about, manifest.to_bytes(parcel.manifest))
        return True

    def _ready(self, session: Session, version: int, root: bytes, left: float) -> bool:
        verdict = self._publisher.ready(session.name, version, root, 0.0)
        if verdict is Verdict.WAIT and left > 0.0:
            return False
        session.carried = None
        self._send_answer(session, "verdict", {"verdict": verdict})
        return True

    def _deliver(self, session: Session, fields: dict[str, Any]) -> None:
        """Sends an image from a thread of its own, which has the connection until then."""

        def deliver(parcel: Parcel, image: Image) -> None:
            failed: Exception | None = None
            try:
                session.delivery.deliver(session.wire, self._publisher, parcel, image, fields)
            except ProtocolError as error:
                failed = ProtocolError(str(error))  # a new one: the frames of this one's traceback hold the image
            except Exception as error:
                failed = ConnectionError(f"{type(error).__name__} {error}")
            self._returned.append((session, failed))
            self._wake()

        assert session.carried is not None
        courier = threading.Thread(target=deliver, args=session.carried, name="longhaul-courier", daemon=True)
        courier.start()  # RuntimeError where the system has no thread left: this session ends
        session.courier = courier
        self._selector.unregister(session.wire.sock)

    def _reclaim(self, session: Session, *, error: Exception | None) -> None:
        """Takes a connection back from the thread that has sent an image."""
        if error is not None:
            raise error
        self._selector.register(session.wire.sock, selectors.EVENT_READ, session)
        self._await_next(session)


def _shut(sock: socket.socket) -> None:
    """Ends a connection from any thread; its own one notices, and closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _held(fields: dict[str, Any]) -> Held:
    return Held(str(fields["run"]), int(fields["epoch"]), int(fields["version"]), bytes.fromhex(fields["root"]))
