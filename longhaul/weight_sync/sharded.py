"""Sharded transfer: versions of a model from several sending processes to several receiving ones, all or none.

Every process has its own shards (`resharding.Layout`), and none ever has the whole model. A coordinator, in one of
the senders or beside them, runs rounds: receivers prepare memory, senders write each piece to its place
(`shard_lanes`), receivers verify the senders' digests, and the version counts for all of them or for none. That is
two-phase commit (Gray, 1978) with cooperative termination (Skeen, 1981): a receiver that has said ready and hears no
verdict asks the others. A receiver that was asked takes no more verdicts from the coordinator; if none has committed,
all abort.
One process may die at any moment; a receiver that dies gets the next version when it is back.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime import credentials, descriptors
from longhaul.weight_sync import resharding, shard_lanes
from longhaul.weight_sync.buffers import Image, Pool
from longhaul.weight_sync.resharding import Layout, Plan
from longhaul.weight_sync.shard_lanes import Parts, Shard
from longhaul.weight_sync.transports.socket_server import RATE, STRANGERS, Admission
from longhaul.weight_sync.transports.sockets import (
    MOST_BLOB,
    PATIENCE,
    Frame,
    Wire,
    WireError,
    check_token,
    enter,
    keys,
    welcome,
)

LANES = ("shm", "tcp")

SECONDS = 60.0
"""Deadline of a round."""

IMAGES = 3
"""Most blocks of a receiver, of its shards each: served, on its way, and held by readers."""

PAUSE = 0.05
"""Seconds between two attempts to connect, and between two questions to the other receivers."""

HEAD = struct.Struct("<4s1s16sqI")  # magic, kind, secret, version, rank of the connecting process
MAGIC = b"LHR1"

Stage = Callable[[str], None]
"""Called at each stage of a round, for tests and traces."""


class Standing(StrEnum):
    """Decision of a receiver about a version."""

    STAGING = "staging"
    READY = "ready"  # it waits for the coordinator's verdict
    TERMINATING = "terminating"  # it waits for the other receivers
    COMMITTED = "committed"
    ABORTED = "aborted"


def after_inquiry(standing: Standing | None) -> Standing:
    """Standing of a receiver once another one has asked for it. One that was not ready never will be; one that was
    takes no verdict from the coordinator any more."""
    if standing is Standing.READY:
        return Standing.TERMINATING
    return Standing.ABORTED if standing in (None, Standing.STAGING) else standing


def verdict_of(others: Iterable[Standing | None]) -> Standing:
    """Verdict of a receiver that was ready, from the others' standings after it has asked them; None: dead."""
    return Standing.COMMITTED if Standing.COMMITTED in others else Standing.ABORTED


class Outcome(NamedTuple):
    """End of a round."""

    committed: bool
    seconds: float
    nbytes: int  # that were sent
    why: str = ""
    prepared: float = 0.0  # seconds from its beginning until all receivers had memory
    sent: float = 0.0  # until all senders had sent
    ready: float = 0.0  # until all receivers had verified


def fingerprint(source: Layout, destination: Layout) -> str:
    """Digest of both layouts, and of how moves are cut: all ranks must plan alike."""
    cuts = shard_lanes.COPIED_PIECE, shard_lanes.REACH
    return hashlib.sha256(repr((source, destination, cuts)).encode()).hexdigest()


class Acceptor:
    """Accepts connections in a thread of its own, and serves each in another one. A connection is a stranger's until
    `known`: of these there are STRANGERS at most, and another one ends the oldest."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._listener, self._serve = listener, serve
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._admission = Admission(RATE)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def open(self) -> None:
        self._thread.start()

    def known(self, sock: socket.socket) -> None:
        """Notes that the other side has shown what it must know."""
        with self._lock:
            if sock in self._strangers:
                del self._strangers[sock]
                self._admission.forget()

    def _gone(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(sock, None)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)

    def _work(self) -> None:
        most = descriptors.raise_limit() - descriptors.RESERVE
        while not self._closed.wait(self._admission.pause()):
            try:
                sock, _ = self._listener.accept()
            except (OSError, MemoryError):
                self._closed.wait(PAUSE)
                continue
            self._admission.count()
            if sock.fileno() >= most:  # the lowest free number is given
                sock.close()
                continue
            with self._lock:
                if len(self._strangers) >= STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self._strangers[sock] = None
            try:
                threading.Thread(target=self._serve_and_forget, args=(sock,), daemon=True).start()
            except (RuntimeError, MemoryError):  # no thread can start
                self._gone(sock)
                sock.close()

    def _serve_and_forget(self, sock: socket.socket) -> None:
        try:
            self._serve(sock)
        finally:
            self._gone(sock)


# ---------------------------------------------------------------------------------------------------------- coordinator


class _Member(NamedTuple):
    role: str  # "send" or "receive"
    rank: int
    wire: Wire
    version: int  # that a receiver holds
    host: str
    port: int


@dataclass
class _Transfer:
    """Transfer of a version, and how far it has come."""

    version: int
    began: float
    seconds: float  # that it may take
    nbytes: int = 0  # sent
    reached: list[float] = field(default_factory=list)  # seconds after which its stages ended

    @property
    def until(self) -> float:
        return self.began + self.seconds

    def reach(self) -> None:
        """Notes the end of a stage."""
        self.reached.append(time.monotonic() - self.began)


class Coordinator:
    """Runs the rounds of all ranks of two layouts, in a thread of its own, until `close`."""

    def __init__(
        self, address: str, source: Layout, destination: Layout, *, token: str | None = None, lane: str = "shm",
        seconds: float = SECONDS, at: Stage = lambda stage: None,
    ) -> None:  # fmt: skip
        """`address` is HOST:PORT; beyond loopback a token is required."""
        host, port = credentials.split(address)
        check_token(token)
        if token is None and not credentials.is_loopback(host):
            raise ValueError(f"{address} can be reached by other machines: give a token, or take 127.0.0.1")
        if lane not in LANES:
            raise ValueError(f"there is no lane {lane!r}; there are {' and '.join(LANES)}")
        self._source, self._destination, self._token, self._lane = source, destination, token, lane
        self._seconds, self._at = seconds, at
        self._print = fingerprint(source, destination)
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        named = f"[{host}]" if ":" in host else host
        self.address = f"{named}:{self._listener.getsockname()[1]}"
        self._members: dict[tuple[str, int], _Member] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.outcomes: list[tuple[int, Outcome]] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._acceptor = Acceptor(self._listener, self._admit)
        self._acceptor.open()
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._acceptor.close()
        self._thread.join(PATIENCE)
        for member in list(self._members.values()):
            member.wire.close()

    def _admit(self, sock: socket.socket) -> None:
        """Takes a member whose token and layouts are the right ones."""
        wire = Wire(sock)
        try:
            host = sock.getpeername()[0]
            nonce = secrets.token_bytes(16).hex()
            wire.send("asked", PATIENCE, {"nonce": nonce, "asks": self._token is not None})
            hello = wire.receive(PATIENCE)
            entered = welcome(hello, nonce, self._token)
            wire.send("welcome", PATIENCE, entered)
            wire.session = entered["session"]
            wire.keys = keys(self._token, nonce, str(hello.fields.get("nonce", "")))
            fields = wire.receive(PATIENCE).fields
            member = _Member(
                str(fields["role"]), int(fields["rank"]), wire, int(fields["version"]), host, int(fields["port"])
            )
            layout = {"send": self._source, "receive": self._destination}.get(member.role)
            if layout is None or member.rank not in layout.ranks or fields["layouts"] != self._print:
                wire.send("refused", PATIENCE, {"why": "its role, rank or layouts are others"})
                raise WireError("a member of other layouts")
            with self._lock:
                old = self._members.pop((member.role, member.rank), None)
                if old is not None:  # it has died, or its connection has
                    old.wire.close()
                wire.send("bound", PATIENCE)
                self._members[member.role, member.rank] = member
            self._acceptor.known(sock)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, PermissionError):
                with contextlib.suppress(OSError):
                    wire.send("refused", PATIENCE, {"why": str(error)})
            wire.close()

    def _group(self, role: str) -> list[_Member]:
        with self._lock:
            return [member for (kind, _), member in sorted(self._members.items()) if kind == role]

    def _drop(self, members: Iterable[_Member]) -> None:
        with self._lock:
            for member in members:
                if self._members.get((member.role, member.rank)) is member:
                    del self._members[member.role, member.rank]
                member.wire.close()

    def _work(self) -> None:
        """Runs a round whenever all senders offer the same version and all receivers are there."""
        while not self._closed.wait(PAUSE / 10):
            senders, receivers = self._group("send"), self._group("receive")
            self._drop([member for member in receivers if _gone(member.wire)])
            if len(senders) < len(self._source.ranks) or len(receivers) < len(self._destination.ranks):
                continue
            offers: dict[_Member, Frame] = {}
            version = -1
            try:
                self._gather_frames(senders, "offer", time.monotonic() + self._seconds, offers)
                versions = {int(frame.fields["version"]) for frame in offers.values()}
                version = max(versions)
                if len(versions) > 1:
                    outcome = Outcome(False, 0.0, 0, f"the senders offer versions {sorted(versions)}")
                else:
                    outcome = self._round(version, offers, senders, self._group("receive"))
            except (OSError, ValueError, KeyError, TypeError) as error:
                outcome = Outcome(False, 0.0, 0, str(error) or type(error).__name__)
            self.outcomes = [*self.outcomes, (version, outcome)][-64:]
            for member in offers:
                with contextlib.suppress(OSError):
                    member.wire.send("outcome", PATIENCE, outcome._asdict())

    def _round(
        self, version: int, offers: Mapping[_Member, Frame], senders: list[_Member], receivers: list[_Member]
    ) -> Outcome:
        """Outcome of a version: its transfer, then the verdict, which every receiver that is left is told."""
        transfer = _Transfer(version, time.monotonic(), self._seconds)
        try:
            if len(receivers) < len(self._destination.ranks):
                raise _LostError(receivers[:0], "a receiver has gone")
            self._run(transfer, self._base(offers, receivers), senders, receivers)
            verdict, why = "commit", ""
        except (_LostError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            verdict, why = "abort", str(error) or type(error).__name__
        committed = self._decide(verdict, version, receivers, transfer.until + PATIENCE)
        return Outcome(committed, time.monotonic() - transfer.began, transfer.nbytes, why, *transfer.reached)

    @staticmethod
    def _base(offers: Mapping[_Member, Frame], receivers: list[_Member]) -> int:
        """Version upon which all senders offer changes and that all receivers hold; -1 without one."""
        bases = {int(frame.fields.get("base", -1)) for frame in offers.values()}
        base = bases.pop() if len(bases) == 1 else -1
        return base if all(member.version == base for member in receivers) else -1

    def _run(self, transfer: _Transfer, base: int, senders: list[_Member], receivers: list[_Member]) -> None:
        """Stages of a transfer: receivers prepare, senders send, receivers verify what has come. Raises where one of
        them is lost or late."""
        version, until = transfer.version, transfer.until
        self._at("begin")
        self._say(receivers, "prepare", {"version": version, "base": base, "lane": self._lane})
        prepared = self._gather_frames(receivers, "prepared", until)
        transfer.reach()
        self._at("prepared")
        places = [
            {"rank": member.rank, "host": member.host, "port": member.port, "secret": frame.fields["secret"],
             "place": frame.fields["place"]}
            for member, frame in prepared.items()
        ]  # fmt: skip
        self._say(senders, "send", {"version": version, "base": base, "lane": self._lane, "to": places,
                                    "seconds": self._seconds})  # fmt: skip
        sent = self._gather_frames(senders, "sent", until)
        transfer.reach()
        self._at("sent")
        transfer.nbytes = sum(int(frame.fields["nbytes"]) for frame in sent.values())
        for member in receivers:
            digests = {
                str(sender.rank): frame.fields["digests"].get(str(member.rank), "") for sender, frame in sent.items()
            }
            self._say([member], "verify", {"version": version, "digests": digests, "others": places})
        self._gather_frames(receivers, "ready", until)
        transfer.reach()
        self._at("ready")

    def _decide(self, verdict: str, version: int, receivers: list[_Member], until: float) -> bool:
        """Verdict, sent to all receivers; whether any of them has committed. Who does not confirm it is dropped."""
        for member in receivers:
            with contextlib.suppress(OSError):
                member.wire.send(verdict, PATIENCE, {"version": version})
                self._at("deciding")
        confirmed, committed = [], False
        for member in receivers:
            with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
                frame = member.wire.receive(max(0.1, until - time.monotonic()))
                while frame.kind != "done":
                    frame = member.wire.receive(max(0.1, until - time.monotonic()))
                commits, keeps = bool(frame.fields["committed"]), bool(frame.fields["keeps"])
                confirmed.append(member)
                committed |= commits
                with self._lock:
                    if commits and keeps and self._members.get((member.role, member.rank)) is member:
                        self._members[member.role, member.rank] = member._replace(version=version)
        self._drop([member for member in receivers if member not in confirmed])
        return committed

    def _say(self, members: Iterable[_Member], kind: str, fields: Mapping[str, Any]) -> None:
        for member in members:
            try:
                member.wire.send(kind, PATIENCE, fields)
            except OSError as error:
                self._drop([member])
                raise _LostError([member], f"{member.role}r {member.rank} has gone") from error

    def _gather_frames(
        self, members: list[_Member], kind: str, until: float, frames: dict[_Member, Frame] | None = None
    ) -> dict[_Member, Frame]:
        """The next frame of each member, which goes into `frames`. Raises _LostError as soon as one has gone or failed,
        TimeoutError."""
        frames = {} if frames is None else frames
        with selectors.DefaultSelector() as selector:
            for member in members:
                selector.register(member.wire.sock, selectors.EVENT_READ, member)
            while len(frames) < len(members):
                left = until - time.monotonic()
                if left <= 0.0:
                    late = [f"{member.role}r {member.rank}" for member in members if member not in frames]
                    raise TimeoutError(f"no frame {kind} from {', '.join(late)}")
                if self._closed.is_set():
                    raise _LostError([], "the coordinator ends")
                for key, _ in selector.select(min(left, 0.1)):
                    member = key.data
                    try:
                        frame = member.wire.arrived()
                    except OSError as error:
                        self._drop([member])
                        raise _LostError([member], f"{member.role}r {member.rank} has gone") from error
                    if frame is None:
                        continue
                    if frame.kind != kind:
                        raise _LostError([member], f"{member.role}r {member.rank}: "
                                         f"{str(frame.fields.get('why', frame.kind))[:200]}")  # fmt: skip
                    frames[member] = frame
                    selector.unregister(member.wire.sock)
        return {member: frames[member] for member in members}


class _LostError(ConnectionError):
    """A member that has gone, or has failed."""

    def __init__(self, members: list[_Member], why: str) -> None:
        super().__init__(why)
        self.members = members


def _gone(wire: Wire) -> bool:
    """True where the other side has closed a connection on which nothing is expected."""
    try:
        wire.sock.settimeout(0.0)
        return wire.sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# -------------------------------------------------------------------------------------------------------------- members


def _join(
    address: str, role: str, rank: int, layouts: str, token: str | None, version: int = -1, port: int = 0
) -> Wire:  # fmt: skip
    """Connection to a coordinator as a member. OSError, PermissionError."""
    wire = Wire(socket.create_connection(credentials.split(address), timeout=PATIENCE))
    try:
        enter(wire, token, PATIENCE)
        wire.most_blob = MOST_BLOB
        fields = {"role": role, "rank": rank, "layouts": layouts, "version": version, "port": port}
        wire.send("bind", PATIENCE, fields)
        answer = wire.receive(PATIENCE)
        if answer.kind != "bound":
            raise ValueError(f"the coordinator refused {role}r {rank}: {answer.fields.get('why', answer.kind)}")
    except BaseException:
        wire.close()
        raise
    return wire


class Sender:
    """A rank of the source layout."""

    def __init__(
        self, address: str, rank: int, source: Layout, destination: Layout, *, token: str | None = None,
        at: Stage = lambda stage: None,
    ) -> None:  # fmt: skip
        self._address, self.rank, self._token, self._at = address, rank, token, at
        self._source, self._destination = source, destination
        self._plan: Plan = (plan := resharding.plan(source, destination))
        self._print = fingerprint(source, destination)
        self._shard: Shard = shard_lanes.shard(source, rank)
        self._receivers = {move.destination for move in plan.moves if move.source == rank}
        self._streams = functools.cache(
            lambda receiver, most: shard_lanes.stream(plan, source, destination, rank, receiver, most)
        )
        self._wire: Wire | None = None
        shard_lanes.compile_loops()

    def push(
        self, version: int, shards: Mapping[str, np.ndarray], *,
        base: tuple[int, Mapping[str, np.ndarray]] | None = None, seconds: float = SECONDS,
    ) -> Outcome:  # fmt: skip
        """Outcome of a version whose shards of this rank are `shards`; all ranks push it.

        They must not change until it returns. With `base`, the version before and its shards, receivers that hold it
        get the changes. ConnectionError where the coordinator is gone, TimeoutError.
        """
        if self._wire is None:
            self._wire = _join(self._address, "send", self.rank, self._print, self._token)
        parts = self._checked(shards)
        before = None if base is None else self._checked(base[1])
        wire = self._wire
        try:
            self._at("offer")
            wire.send("offer", PATIENCE, {"version": version, "base": -1 if base is None else base[0]})
            frame = wire.receive(seconds + PATIENCE)
            if frame.kind == "send":
                self._at("send")
                try:
                    fields = self._send_moves(frame.fields, parts, before if frame.fields["base"] >= 0 else None)
                    wire.send("sent", PATIENCE, fields)
                except (ConnectionError, TimeoutError, ValueError) as error:
                    wire.send("failed", PATIENCE, {"why": f"{type(error).__name__}: {error}"[:300]})
                self._at("sent")
                frame = wire.receive(2 * seconds + PATIENCE)
            if frame.kind != "outcome":
                raise WireError(f"a frame {frame.kind[:40]!r} where an outcome was expected")
            return Outcome(**frame.fields)
        except OSError:
            self.close()
            raise

    def _checked(self, shards: Mapping[str, np.ndarray]) -> Parts:
        """Bytes of this rank's shards. ValueError where one is missing, or has another size than the layout says."""
        for name, size in self._shard.sizes.items():
            if name not in shards or shards[name].nbytes != size:
                given = f"{shards[name].nbytes} bytes" if name in shards else "missing"
                raise ValueError(f"{name}: rank {self.rank} must have {size} bytes of it; they are {given}")
        return {name: resharding.raw(array) for name, array in shards.items()}

    def _send_moves(self, fields: Mapping[str, Any], parts: Parts, base: Parts | None) -> dict[str, Any]:
        """Sends this rank's moves to each receiver; -> digests by rank, and the bytes that went."""
        until = time.monotonic() + float(fields["seconds"])
        if base is None and fields["lane"] == "shm":
            return self._write_moves(fields, parts, until)
        digests: dict[str, str] = {}
        total = 0
        first = self.rank % max(1, len(fields["to"]))  # so that not all begin with the same receiver
        for to in (*fields["to"][first:], *fields["to"][:first]):
            rank = int(to["rank"])
            if rank not in self._receivers:
                continue
            with shard_lanes.connected(to["host"], int(to["port"]), PATIENCE) as sock:
                sock.sendall(HEAD.pack(MAGIC, b"s", bytes.fromhex(to["secret"]), int(fields["version"]), self.rank))
                if base is None:
                    pieces = self._streams(rank, shard_lanes.PIECE)
                    digests[str(rank)] = shard_lanes.pour(pieces, parts, sock, until).hex()
                    total += sum(piece.nbytes for piece in pieces)
                else:
                    pieces = self._streams(rank, shard_lanes.CHANGED_PIECE)
                    digest, count = shard_lanes.pour_changes(pieces, base, parts, sock, until)
                    digests[str(rank)] = digest.hex()
                    total += count
            self._at("between")
        return {"digests": digests, "nbytes": total}

    def _write_moves(self, fields: Mapping[str, Any], parts: Parts, until: float) -> dict[str, Any]:
        """Copies this rank's moves into the receivers' memories; -> digests by rank, and the bytes that went."""
        places = {int(to["rank"]): tuple(to["place"]) for to in fields["to"]}
        found: dict[str, str] = {}
        for way in self._routes:
            with contextlib.ExitStack() as opened:
                descriptors = []
                for rank, place in zip(way.receivers, way.places, strict=True):
                    descriptors.append(shard_lanes.opened(places[rank], place.size))
                    opened.callback(os.close, descriptors[-1])
                digests = shard_lanes.write(way, parts, descriptors, until, lambda: self._at("between"))
            found |= {str(rank): digest.hex() for rank, digest in zip(way.receivers, digests, strict=True)}
        return {"digests": found, "nbytes": sum(way.nbytes for way in self._routes)}

    @functools.cached_property
    def _routes(self) -> tuple[shard_lanes.Route, ...]:
        return shard_lanes.routes(self._plan, self._source, self._destination, self.rank)

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


class Held(NamedTuple):
    """A version of a receiver's shards."""

    version: int
    tensors: Mapping[str, np.ndarray]
    image: Image


class _Round(NamedTuple):
    version: int
    base: int
    lane: str
    secret: bytes
    image: Image
    digests: dict[int, bytes]  # of the streams that came
    failed: list[str]
    arrived: threading.Condition


def _came(made: _Round, sender: int) -> bool:
    return sender in made.digests or bool(made.failed)


class Receiver:
    """A rank of the destination layout, which follows a coordinator in a thread of its own."""

    def __init__(
        self, address: str, rank: int, source: Layout, destination: Layout, *, token: str | None = None,
        seconds: float = SECONDS, host: str = "127.0.0.1", hands_over: bool = False, at: Stage = lambda stage: None,
    ) -> None:  # fmt: skip
        """`host` is where other ranks reach it. With `hands_over` it has one block, for readers that copy a version to
        a device: `take` gives it away, and the next round begins when its arrays are gone."""
        self._address, self.rank, self._token, self._at, self._seconds = address, rank, token, at, seconds
        self._source, self._destination = source, destination
        plan = resharding.plan(source, destination)
        self._print = fingerprint(source, destination)
        self._shard: Shard = shard_lanes.shard(destination, rank)
        self._senders = sorted({move.source for move in plan.moves if move.destination == rank})
        # Without `self`: else the memory of a receiver that nobody has any more would wait for a garbage collection.
        self._routes = functools.cache(lambda sender: shard_lanes.route(plan, source, destination, sender, (rank,)))
        self._streams = functools.cache(
            lambda sender, most: shard_lanes.stream(plan, source, destination, sender, rank, most)
        )
        self._held: Held | None = None
        self._hands_over = hands_over
        blocks = 1 if hands_over else IMAGES
        self._pool = Pool(self._shard.size, blocks * self._shard.size, least=blocks)
        self._pool.take()  # allocates the first block, which returns at once: no round waits for it
        self._reserving: threading.Thread | None = None
        self._standings: dict[int, Standing] = {}
        self._secrets: dict[int, bytes] = {}  # of rounds, which who asks or sends must know
        self._others: list[dict[str, Any]] = []  # places of the other receivers of a round
        self._round: _Round | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._wire: Wire | None = None
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.errors: list[str] = []
        self._acceptor = Acceptor(self._listener, self._visit)
        self._acceptor.open()
        threading.Thread(target=self._follow, daemon=True).start()

    # ----------------------------------------------------------------------------------------------- for readers

    def latest(self) -> tuple[int, Mapping[str, np.ndarray]]:
        """(version, this rank's shards by name). LookupError before the first."""
        held = self._held
        if held is None:
            raise LookupError("no version has come yet; wait until a sender has pushed one")
        return held.version, held.tensors

    def take(self, seconds: float) -> tuple[int, Mapping[str, np.ndarray]]:
        """(version, this rank's shards by name), which the receiver no longer holds. TimeoutError where none has come
        since the last call, nor does within `seconds`; ValueError for a receiver that does not `hands_over`."""
        if not self._hands_over:
            raise ValueError("this receiver serves its versions; read `latest`, or make it with hands_over=True")
        with self._changed:
            if not self._changed.wait_for(lambda: self._held is not None, seconds):
                raise TimeoutError(f"no version came within {seconds:g} s")
            held, self._held = self._held, None
        assert held is not None
        return held.version, held.tensors

    def wait(self, version: int, seconds: float) -> bool:
        """True if that version or a newer one is held within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held is not None and self._held.version >= version, seconds)

    def close(self) -> None:
        """Ends it; arrays of versions stay valid."""
        self._closed.set()
        self._acceptor.close()
        if self._wire is not None:
            self._wire.close()
        with self._changed:
            reserving = self._reserving
        if reserving is not None:
            reserving.join(PATIENCE)
        self._pool.close()

    # ----------------------------------------------------------------------------------------------- its own thread

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                version = -1 if self._held is None or self._hands_over else self._held.version
                port = self._listener.getsockname()[1]
                self._wire = _join(self._address, "receive", self.rank, self._print, self._token, version, port)
                while not self._closed.is_set():
                    if (frame := self._next()) is not None:
                        self._handle(frame)
            except Exception as error:  # the held version stays, and the next attempt may succeed
                if not self._closed.is_set():
                    self.errors = [*self.errors, f"{type(error).__name__}: {error}"][-32:]
            finally:
                if self._wire is not None:
                    self._wire.close()
                self._terminate_round()
            self._closed.wait(PAUSE)

    def _next(self) -> Frame | None:
        """The coordinator's next frame; None where it is silent, which only a round's deadline ends."""
        assert self._wire is not None
        made, until = self._round, time.monotonic() + self._seconds
        while True:
            try:
                return self._wire.receive(0.2)
            except TimeoutError:
                if self._closed.is_set():
                    return None
                with self._changed:
                    doubted = made is not None and self._standings.get(made.version) is Standing.TERMINATING
                if made is not None and (doubted or time.monotonic() > until + PATIENCE):
                    raise

    def _handle(self, frame: Frame) -> None:
        assert self._wire is not None
        fields = frame.fields
        if frame.kind == "prepare":
            self._at("prepare")
            made = self._prepare(fields)
            assert made.image.block is not None
            place = [os.getpid(), made.image.block.descriptor]
            self._at("prepared")
            self._wire.send("prepared", PATIENCE, {"secret": made.secret.hex(), "place": place})
        elif frame.kind == "verify" and self._round is not None:
            self._others = [each for each in fields["others"] if int(each["rank"]) != self.rank]
            self._at("verify")
            wrong = self._verify({int(rank): digest for rank, digest in fields["digests"].items()})
            if wrong:
                self._decide(self._round.version, Standing.ABORTED)
                self._wire.send("failed", PATIENCE, {"why": wrong})
                return
            with self._changed:
                if self._standings.get(self._round.version) is not Standing.STAGING:
                    raise ConnectionAbortedError("another receiver asked, so that this version is never ready here")
                self._standings[self._round.version] = Standing.READY
            self._at("ready")
            self._wire.send("ready", PATIENCE)
        elif frame.kind in ("commit", "abort"):
            version = int(fields["version"])
            self._at("verdict")
            with self._changed:
                standing = self._standings.get(version)
            if standing is Standing.TERMINATING:
                raise ConnectionAbortedError("another receiver asked before the coordinator's verdict came")
            if standing in (Standing.READY, Standing.STAGING):
                commits = frame.kind == "commit" and standing is Standing.READY
                self._decide(version, Standing.COMMITTED if commits else Standing.ABORTED)
            self._at("decided")
            committed = self._standings.get(version) is Standing.COMMITTED
            keeps = not self._hands_over  # else it is no base for changes
            self._wire.send("done", PATIENCE, {"version": version, "committed": committed, "keeps": keeps})
            with self._changed:  # `close` sees no thread, or one that runs
                if committed and keeps and self._reserving is None and not self._closed.is_set():
                    self._reserving = threading.Thread(target=self._reserve, daemon=True)
                    self._reserving.start()
        elif frame.kind == "refused":
            raise ConnectionAbortedError(str(fields.get("why", "refused")))

    def _reserve(self) -> None:
        """Allocates a second block while the first version is served, so that the next round need not."""
        with contextlib.suppress(OSError, MemoryError):  # the next round tries again, and reports it
            self._pool.take()

    def _prepare(self, fields: Mapping[str, Any]) -> _Round:
        version = int(fields["version"])
        if self._reserving is not None:
            self._reserving.join(self._seconds)
        image = self._pool.take(self._seconds)
        if image is None:
            raise ConnectionAbortedError("readers hold all blocks; let old versions go")
        base, lane, secret = int(fields["base"]), str(fields["lane"]), secrets.token_bytes(16)
        made = _Round(version, base, lane, secret, image, {}, [], threading.Condition())
        with self._changed:
            self._secrets = {v: s for v, s in self._secrets.items() if v > version - 64} | {version: secret}
            self._standings = {v: s for v, s in self._standings.items() if v > version - 64}
            self._standings[version] = Standing.STAGING
            self._round = made
        return made

    def _verify(self, digests: Mapping[int, str]) -> str:
        """Reason for which what came is not what was sent; "" where it is."""
        made = self._round
        assert made is not None
        for sender in self._senders:
            wanted = bytes.fromhex(digests.get(sender, ""))
            if made.base < 0 and made.lane == "shm":
                digest = shard_lanes.digest(self._routes(sender), made.image.array)
            else:
                with made.arrived:
                    made.arrived.wait_for(functools.partial(_came, made, sender), self._seconds)
                if sender not in made.digests:
                    return f"the stream of sender {sender} did not arrive: {'; '.join(made.failed)[:200]}"
                digest = made.digests[sender]
            if not hmac.compare_digest(digest, wanted):
                return f"what came from sender {sender} is damaged"
        return ""

    def _decide(self, version: int, standing: Standing) -> None:
        """Ends a version; the swap is one assignment."""
        with self._changed:
            made = self._round
            self._standings[version] = standing
            if made is None or made.version != version:
                return
            if standing is Standing.COMMITTED:
                block = made.image.array[:]
                block.flags.writeable = False
                self._held = Held(version, self._shard.tensors(block, self._destination), made.image)
            elif made.image.block is not None:
                made.image.block.spent = True  # a sender may still write into it
            self._round = None  # last: who sees no round sees what it left
            self._changed.notify_all()

    def _terminate_round(self) -> None:
        """Ends a round without the coordinator: by the other receivers where this one was ready."""
        with self._changed:
            made = self._round
            standing = None if made is None else self._standings.get(made.version)
            if made is None:
                return
            if standing is Standing.READY:
                self._standings[made.version] = standing = Standing.TERMINATING
        if standing is not Standing.TERMINATING:
            self._decide(made.version, Standing.ABORTED)
            return
        self._at("doubt")
        answers = [self._ask_standing(each, made.version) for each in self._others]
        self._decide(made.version, verdict_of(answers))

    def _ask_standing(self, peer: Mapping[str, Any], version: int) -> Standing | None:
        """Another receiver's standing; None where it is dead."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                with socket.create_connection((peer["host"], int(peer["port"])), timeout=PATIENCE) as sock:
                    sock.sendall(HEAD.pack(MAGIC, b"?", bytes.fromhex(peer["secret"]), version, self.rank))
                    answer = sock.recv(16).decode("ascii", "replace")
                    if answer:
                        return Standing(answer)
            except ConnectionRefusedError:
                return None
            except (OSError, ValueError):
                pass
            time.sleep(PAUSE)
        return None

    # ------------------------------------------------------------------------------------------------------ visitors

    def _visit(self, sock: socket.socket) -> None:
        """Answers a question, or takes a stream."""
        with contextlib.suppress(OSError), sock:
            head, until = bytearray(), time.monotonic() + PATIENCE
            while len(head) < HEAD.size:
                sock.settimeout(max(0.001, until - time.monotonic()))
                got = sock.recv(HEAD.size - len(head))
                if not got:
                    return
                head += got
            magic, kind, secret, version, rank = HEAD.unpack(head)
            if magic != MAGIC or not hmac.compare_digest(secret, self._secrets.get(version, b"")):
                return
            self._acceptor.known(sock)
            sock.settimeout(PATIENCE)
            if kind == b"?":
                with self._changed:
                    standing = after_inquiry(self._standings.get(version))
                    self._standings[version] = standing
                sock.sendall(standing.value.encode())
            elif kind == b"s":
                self._draw_stream(sock, version, rank)

    def _draw_stream(self, sock: socket.socket, version: int, sender: int) -> None:
        """Takes the stream of a sender."""
        with self._changed:
            made, held = self._round, self._held
        if made is None or made.version != version or sender not in self._senders:
            return
        parts, until = self._shard.parts(made.image.array), time.monotonic() + self._seconds
        try:
            if made.base < 0:
                digest = shard_lanes.draw(self._streams(sender, shard_lanes.PIECE), parts, sock, until)
            else:
                if held is None or held.version != made.base:
                    raise ValueError(f"the changes are to version {made.base}, which is not held")
                pieces = self._streams(sender, shard_lanes.CHANGED_PIECE)
                base = self._shard.parts(held.image.array)
                digest = shard_lanes.draw_changes(pieces, base, parts, sock, until)
            with made.arrived:
                made.digests[sender] = digest
                made.arrived.notify_all()
        except (OSError, ValueError) as error:
            with made.arrived:
                made.failed.append(f"{type(error).__name__}: {error}")
                made.arrived.notify_all()


def of_jax(arrays: Mapping[str, Any], rank: int, number: Callable[[Any], int] | None = None) -> dict[str, np.ndarray]:
    """Shards of one rank of named `jax.Array`s: on a CPU views of JAX's own memory.

    `number` is the `rank` of `resharding.of_jax`.
    """
    count = number or (lambda device: int(device.id))
    shards = {}
    for name, array in arrays.items():
        for each in array.addressable_shards:
            if count(each.device) == rank:
                shards[name] = np.asarray(each.data)
    return shards
