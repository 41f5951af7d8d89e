"""The lane of torch.distributed: images by gloo's broadcast, where a fabric or a firewall has room for that alone.

What is said goes over TCP, as on `tcp`; what is heavy goes by collectives of a group of two, the sender and one
receiver, which they form at the first version. One group of all would be fewer steps, and would hang with the first
receiver that dies, or is slow; here who dies ends his own group, and every wait has a deadline. Nothing of the
collectives is encrypted, or proves who it is: for loopback, and networks that are trusted.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from longhaul.runtime import credentials
from longhaul.weight_sync.buffers import Image
from longhaul.weight_sync.torch_arrays import torch_tensor
from longhaul.weight_sync.transports import tcp
from longhaul.weight_sync.transports.base import Hub, Parcel, Staging
from longhaul.weight_sync.transports.framing import Wire, WireError
from longhaul.weight_sync.transports.socket_server import PATIENCE, SocketLane, SocketSource, expect

BUCKET = 16 << 20
"""Bytes of a collective."""


def lane(address: str = "127.0.0.1:0", token: str | None = None) -> SocketLane:
    """Serves at HOST:PORT as `tcp.lane` does. ValueError also where torch is missing, or has no gloo."""
    _torch()
    host, _ = credentials.split(address)
    meeting = _Meeting(host)
    below = tcp.listener(address, token)
    return SocketLane(
        below, tcp.named("gloo", host, below), token, lambda: GroupDelivery(meeting), tidy=meeting.close
    )  # fmt: skip


def connect(address: str, receiver: str, token: str | None = None) -> SocketSource:
    """A receiver's end, as `tcp.connect`."""
    _torch()
    host, _ = credentials.split(address)
    return SocketSource(tcp.connected(address, token), token, receiver, GroupCollection(host))


def _torch() -> Any:
    try:
        import torch.distributed
    except ImportError:
        raise ValueError("gloo: needs torch; install it, or use tcp:HOST:PORT") from None
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ValueError("gloo: this torch has no gloo; use tcp:HOST:PORT")
    return torch


@contextlib.contextmanager
def _gloo() -> Iterator[None]:
    """gloo's errors are RuntimeErrors; for a lane the other side is gone."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"gloo: {str(error).splitlines()[0][:200]}") from error


class _Meeting:
    """Where groups are formed: a lane's store, begun when the first is, on a port that is free."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._store: Any = None
        self._lock = threading.Lock()

    def store(self, seconds: float) -> Any:
        torch = _torch()
        with self._lock, _gloo():
            if self._store is None:
                wait = dt.timedelta(seconds=seconds)
                self._store = torch.distributed.TCPStore(
                    self.host, 0, is_master=True, wait_for_workers=False, timeout=wait
                )  # fmt: skip
            return self._store

    def close(self) -> None:
        with self._lock:
            self._store = None


def _group(store: Any, host: str, key: str, rank: int, seconds: float) -> Any:
    """A group of two, when both are there."""
    distributed = _torch().distributed
    kind = distributed.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = dt.timedelta(seconds=seconds)
    with _gloo():
        return kind(distributed.PrefixStore(key, store), rank, 2, options)


def _broadcast(group: Any, part: np.ndarray, until: float) -> None:
    """One bucket from the sender to the receiver, in both alike. TimeoutError, ConnectionError."""
    distributed = _torch().distributed
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the version's time is over")
    with _gloo():
        work = group.broadcast([torch_tensor(part)], distributed.BroadcastOptions())
        work.wait(dt.timedelta(seconds=left))


class GroupDelivery:
    """A session's images, by a group of its own."""

    partly = False

    def __init__(self, meeting: _Meeting) -> None:
        self._meeting, self._key = meeting, secrets.token_hex(8)
        self._group: Any = None

    def deliver(self, connection: Wire, hub: Hub, parcel: Parcel, image: Image, words: dict[str, Any]) -> None:
        size, until = parcel.manifest.size, time.monotonic() + parcel.offer.seconds
        store = self._meeting.store(PATIENCE)
        connection.send("whole", PATIENCE, {"size": size, "port": store.port, "key": self._key})
        if self._group is None:
            self._group = _group(store, self._meeting.host, self._key, 0, PATIENCE)
        for begin in range(0, size, BUCKET):
            _broadcast(self._group, image.array[begin : min(begin + BUCKET, size)], until)

    def released(self, words: dict[str, Any]) -> None:
        """It lends nothing."""

    def end(self) -> None:
        self._group = None


class GroupCollection:
    """The receiver's half of the group."""

    moves = True

    def __init__(self, host: str) -> None:
        self._host = host
        self._store: Any = None
        self._group: Any = None

    def words(self) -> dict[str, Any]:
        return {}

    def collect(self, connection: Wire, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        until = time.monotonic() + seconds
        size = parcel.manifest.size
        image = staging.take(size)[:size]
        connection.send("fetch", PATIENCE, {"version": parcel.offer.version})
        words = expect(connection, seconds, "whole").words
        try:
            port, key, there = int(words["port"]), str(words["key"]), int(words["size"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a group that means nothing: {error}") from error
        if there != size:
            raise WireError(f"an image of {there} bytes where {size} were due")
        if self._group is None:
            wait = dt.timedelta(seconds=PATIENCE)
            with _gloo():
                self._store = _torch().distributed.TCPStore(self._host, port, is_master=False, timeout=wait)
            self._group = _group(self._store, self._host, key, 1, PATIENCE)
        for begin in range(0, size, BUCKET):
            end = min(begin + BUCKET, size)
            _broadcast(self._group, image[begin:end], until)
            staging.arrived(image, end)
        return image

    def close(self) -> None:
        self._group = self._store = None
