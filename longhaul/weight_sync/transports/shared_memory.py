"""The lane on a host: receivers map the sender's own images, and no byte is copied for them.

An image's memory has no name: its descriptor goes over a Unix socket, read-only, once for each receiver. With it goes
that of a few notes, which all of them may write: what one has verified, the others need not (`ledger`). So whatever
is killed, nothing stays behind. An image that was mapped by someone who vanished without a word is never written
again: its memory goes back to the system with the last process that has it, and the sender takes fresh one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import stat
import struct
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from longhaul.weight_sync import shared_verification
from longhaul.weight_sync.buffers import Block, Image
from longhaul.weight_sync.protocol import ProtocolError
from longhaul.weight_sync.transports.base import Hub, Parcel, Staging
from longhaul.weight_sync.transports.framing import Wire, WireError
from longhaul.weight_sync.transports.socket_server import PATIENCE, SocketLane, SocketSource, expect


def lane(name: str) -> SocketLane:
    """Serves the processes of this user at `name`: a socket's path, or @NAME, which needs no file (Linux).

    ValueError where something else is there, or another sender.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if name.startswith("@"):
            listener.bind("\0" + name[1:])
        else:
            _clear(name)
            listener.bind(name)
            os.chmod(name, 0o600)  # before anyone can connect
    except (OSError, ValueError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"shm:{name} can't be served: {why}; give another name") from error

    def tidy() -> None:
        if not name.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(name)

    return SocketLane(listener, f"shm:{name}", None, SharedDelivery, admits=_is_mine, tidy=tidy)


def connect(name: str, receiver: str) -> SocketSource:
    """A receiver's end. ConnectionError where nobody serves there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(PATIENCE)
        sock.connect("\0" + name[1:] if name.startswith("@") else name)
        if not _is_mine(sock):
            raise PermissionError(f"shm:{name} is served by another user")
        return SocketSource(sock, None, receiver, SharedCollection())
    except BaseException as error:
        sock.close()
        if isinstance(error, FileNotFoundError):
            raise ConnectionRefusedError(f"nobody serves shm:{name}") from error
        raise


def _clear(path: str) -> None:
    """Removes the socket of a sender that was killed. ValueError where it is something else, or alive."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ValueError("something else is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ValueError("another sender serves there")


def _is_mine(sock: socket.socket) -> bool:
    """Whether the other side's process is of the same user; where the system can't tell, the file's rights do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


class SharedDelivery:
    """A session's images, each lent until the receiver says that it has let go."""

    partly = False

    def __init__(self) -> None:
        self._known: dict[int, Block] = {}  # the receiver has these mapped
        self._lent: dict[int, Image] = {}

    def deliver(self, connection: Wire, hub: Hub, parcel: Parcel, image: Image, words: dict[str, Any]) -> None:
        block = image.block
        if block is None:
            raise ProtocolError("this image is mapped from another sender: follow that one")
        stale = [serial for serial, known in self._known.items() if known.spent and serial not in self._lent]
        for serial in stale:
            del self._known[serial]
        turn = block.turn(parcel.manifest.version)
        told = {"serial": block.serial, "size": block.size, "forget": stale, "turn": turn}
        self._lent[block.serial] = image
        if block.serial in self._known:
            connection.send("image", PATIENCE, {**told, "fresh": False})
            return
        self._known[block.serial] = block
        with _read_only(block.descriptor) as descriptor:
            connection.send("image", PATIENCE, {**told, "fresh": True}, descriptors=[descriptor, block.notes])

    def released(self, words: dict[str, Any]) -> None:
        for serial in words.get("released", ()):
            self._lent.pop(serial, None)

    def end(self) -> None:
        for image in self._lent.values():
            if image.block is not None:
                image.block.spent = True  # someone may still read it
        self._lent.clear()


@contextlib.contextmanager
def _read_only(descriptor: int) -> Any:
    """The same memory under a descriptor that can't write it, where the system has such; else a copy of this one."""
    try:
        found = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        found = os.dup(descriptor)
    try:
        yield found
    finally:
        os.close(found)


class SharedCollection:
    """The images that a receiver has mapped; whoever reads one keeps it from being written again."""

    moves = False

    def __init__(self) -> None:
        self._maps: dict[int, tuple[mmap.mmap, np.ndarray]] = {}  # images, and the notes of those who map them
        self._let_go: queue.SimpleQueue[int] = queue.SimpleQueue()  # whose put a finaliser may call at any moment

    def words(self) -> dict[str, Any]:
        released = []
        while not self._let_go.empty():
            released.append(self._let_go.get())
        return {"released": released} if released else {}

    def collect(self, connection: Wire, parcel: Parcel, staging: Staging, seconds: float) -> np.ndarray:
        connection.send("fetch", PATIENCE, {"version": parcel.offer.version, **self.words()})
        descriptors: list[int] = []
        try:
            words = expect(connection, min(seconds, PATIENCE), "image", descriptors=descriptors).words
            serial, size, turn = int(words["serial"]), int(words["size"]), int(words["turn"])
            for gone in words["forget"]:
                self._maps.pop(gone, None)
            if words["fresh"]:
                self._maps[serial] = _mapped(descriptors, size)
            mapped, notes = self._maps[serial]
            if len(mapped) < parcel.manifest.size or turn < 0:
                raise WireError("an image came in memory that is too small")
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"an image that means nothing: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        staging.shared(shared_verification.ledger(notes, turn))
        array = np.frombuffer(mapped, np.uint8, parcel.manifest.size)
        weakref.finalize(array.base, self._let_go.put, serial).atexit = False
        return array

    def close(self) -> None:
        self._maps.clear()  # each stays mapped as long as it is read


def _mapped(descriptors: Sequence[int], size: int) -> tuple[mmap.mmap, np.ndarray]:
    """An image's memory, which we can't write, and that of its notes. WireError where they did not come."""
    sizes = [os.fstat(each).st_size for each in descriptors]
    if len(sizes) != 2 or not 0 < size <= sizes[0] or sizes[1] != shared_verification.SIZE:
        raise WireError("an image came without its memory")
    image = mmap.mmap(descriptors[0], size, mmap.MAP_SHARED, mmap.PROT_READ)
    return image, np.frombuffer(mmap.mmap(descriptors[1], shared_verification.SIZE), np.uint8)
