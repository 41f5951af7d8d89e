"""The lane of NIXL: receivers read the sender's image themselves, one-sided, by RDMA, UCX or what NIXL has below.

What is said goes over TCP, as on `tcp`; then the sender's processor has no part in it. A receiver that dies or is slow
costs nobody anything; what it reads of an image that has been written over meanwhile, because it was too late, is found
out as damage is. NVIDIA's NIXL (docs: github.com/ai-dynamo/nixl) is imported where it is used. Tested between CPUs'
memories over UCX; accelerators' memory is not offered yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from longhaul.runtime import credentials
from longhaul.weight_sync.buffers import Block, Image
from longhaul.weight_sync.transports import tcp
from longhaul.weight_sync.transports.base import Hub, Parcel, Staging
from longhaul.weight_sync.transports.framing import Wire, WireError
from longhaul.weight_sync.transports.socket_server import PATIENCE, SocketLane, SocketSource, expect

BUCKET = 64 << 20
"""Bytes of a read; what has come is digested while the next is on its way."""

POLL = 5e-5
"""Seconds between two looks at a read."""


def lane(address: str = "127.0.0.1:0", token: str | None = None) -> SocketLane:
    """Serves at HOST:PORT as `tcp.lane` does. ValueError also where NIXL is missing."""
    _nixl()
    offered = _Offered()
    below = tcp.listener(address, token)
    name = tcp.named("nixl", credentials.split(address)[0], below)
    return SocketLane(below, name, token, lambda: NixlDelivery(offered), tidy=offered.close)


def connect(address: str, receiver: str, token: str | None = None) -> SocketSource:
    """A receiver's end, as `tcp.connect`."""
    _nixl()
    return SocketSource(tcp.connected(address, token), token, receiver, NixlCollection())


def _nixl() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl import _api
    except ImportError as error:
        raise ValueError(f"nixl: needs NIXL ({error}): pip install nixl, or use tcp:HOST:PORT") from None
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


def _agent() -> Any:
    api = _nixl()
    with _errors():
        return api.nixl_agent(f"longhaul-{secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """NIXL's errors are of its own; for a lane the other side is gone."""
    try:
        yield
    except (OSError, LookupError):
        raise
    except Exception as error:
        raise ConnectionError(f"nixl: {type(error).__name__}: {str(error)[:200]}") from error


class _Memory:
    """Memory that an agent may read or write, known to it once. `key` tells it from what lay there before."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._known: dict[Any, Any] = {}

    def add(self, key: Any, array: np.ndarray) -> None:
        if key not in self._known:
            place = [(array.ctypes.data, array.nbytes, 0, "")]
            self._known[key] = self._agent.register_memory(place, "DRAM")

    def keep(self, keys: set[Any]) -> None:
        for key in self._known.keys() - keys:
            with contextlib.suppress(Exception):  # it is gone either way
                self._agent.deregister_memory(self._known.pop(key))


class _Offered:
    """A lane's agent, and the images that it offers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: Any = None
        self._memory: _Memory | None = None
        self._blocks: dict[int, Block] = {}

    def offer(self, image: Image) -> bytes:
        """Makes an image readable; -> what a receiver must know of the agent."""
        with self._lock, _errors():
            if self._agent is None:
                self._agent = _agent()
                self._memory = _Memory(self._agent)
            assert self._memory is not None
            key: Any = image.array.ctypes.data
            if image.block is not None:
                key = image.block.serial
                self._blocks[key] = image.block
            self._blocks = {serial: block for serial, block in self._blocks.items() if not block.spent}
            self._memory.keep({*self._blocks, key})
            self._memory.add(key, image.array)
            found: bytes = self._agent.get_agent_metadata()
            return found

    def close(self) -> None:
        with self._lock:
            if self._memory is not None:
                self._memory.keep(set())
            self._agent = self._memory = None
            self._blocks.clear()


class NixlDelivery:
    """A session's images: told of, and read from afar. `Session` keeps an image until its reader has verified it."""

    partly = False

    def __init__(self, offered: _Offered) -> None:
        self._offered = offered

    def deliver(self, connection: Wire, hub: Hub, parcel: Parcel, image: Image, words: dict[str, Any]) -> None:
        about = self._offered.offer(image)
        place = {"size": parcel.manifest.size, "address": int(image.array.ctypes.data)}
        connection.send("readable", PATIENCE, place, about)

    def released(self, words: dict[str, Any]) -> None:
        """It lends nothing that comes back."""

    def end(self) -> None:
        """It keeps nothing."""


class NixlCollection:
    """A receiver's agent, which reads."""

    moves = True

    def __init__(self) -> None:
        self._agent: Any = None
        self._memory: _Memory | None = None
        self._about, self._peer = b"", ""

    def words(self) -> dict[str, Any]:
        return {}

    def collect(self, connection: Wire, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        until = time.monotonic() + seconds
        size = parcel.manifest.size
        image = staging.take(size)[:size]
        connection.send("fetch", PATIENCE, {"version": parcel.offer.version})
        frame = expect(connection, min(seconds, PATIENCE), "readable")
        try:
            there, place = int(frame.words["size"]), int(frame.words["address"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"an image that means nothing: {error}") from error
        if there != size:
            raise WireError(f"an image of {there} bytes where {size} were due")
        with _errors():
            self._met(frame.blob, image)
            for begin in range(0, size, BUCKET):
                end = min(begin + BUCKET, size)
                self._read(image[begin:end], place + begin, until)
                staging.arrived(image, end)
        return image

    def _met(self, about: bytes, image: np.ndarray) -> None:
        """Both agents know each other, and each its memory."""
        if self._agent is None:
            self._agent = _agent()
            self._memory = _Memory(self._agent)
        assert self._memory is not None
        self._memory.add((image.ctypes.data, image.nbytes), image)
        if about != self._about:
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
            peer = self._agent.add_remote_agent(about)
            self._peer = peer.decode() if isinstance(peer, bytes) else peer
            self._about = about

    def _read(self, into: np.ndarray, place: int, until: float) -> None:
        agent = self._agent
        here = agent.get_xfer_descs([(into.ctypes.data, into.nbytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(place, into.nbytes, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, self._peer)
        try:
            state = agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                if time.monotonic() > until:
                    raise TimeoutError("the version's time is over")
                time.sleep(POLL)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state == "ERR":
            raise ConnectionError("nixl: a read failed; the sender is gone")

    def close(self) -> None:
        if self._memory is not None:
            self._memory.keep(set())
        self._agent = self._memory = None
