"""Transport within a host: receivers map the sender's images, and no byte is copied for them.

The memory of an image has no name: its descriptor is sent over a Unix socket, read-only, once to each receiver, with
that of a few notes which all receivers may write (`shared_verification`). So nothing remains behind, whichever process
is killed. An image that was mapped by a process which vanished without a message is never written again: its memory is
freed with the last process that maps it, and the sender allocates anew.
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
from typing import Any

import numpy as np

from longhaul.weight_sync import shared_verification
from longhaul.weight_sync.buffers import Block, Image
from longhaul.weight_sync.protocol import ProtocolError
from longhaul.weight_sync.transports.base import Parcel, PublisherSide, ReceiveTarget
from longhaul.weight_sync.transports.socket_server import SocketTransport
from longhaul.weight_sync.transports.sockets import PATIENCE, SocketSource, Wire, WireError, expect


def serve(name: str) -> SocketTransport:
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

    return SocketTransport(listener, f"shm:{name}", None, SharedDelivery, admits=_is_mine, tidy=tidy)


def connect(name: str, receiver: str) -> SocketSource:
    """Receiver's end. ConnectionError where nobody serves there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(PATIENCE)
        sock.connect("\0" + name[1:] if name.startswith("@") else name)
        if not _is_mine(sock):
            raise PermissionError(f"shm:{name} is served by another user; choose another name")
        return SocketSource(sock, None, receiver, SharedCollection())
    except BaseException as error:
        sock.close()
        if isinstance(error, FileNotFoundError):
            raise ConnectionRefusedError(f"nobody serves shm:{name}; start the sender first") from error
        raise


def _clear(path: str) -> None:
    """Removes the socket of a sender that was killed. ValueError where it is another file, or in use."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ValueError("something else is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.0)  # a full queue of a sender that is stopped would hold us for ever
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise ValueError("another sender serves there")


def _is_mine(sock: socket.socket) -> bool:
    """True where the other side's process is of the same user; systems without SO_PEERCRED rely on the file's mode."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


class SharedDelivery:
    """Sender's part: each image is lent until the receiver releases it."""

    def __init__(self) -> None:
        self._known: dict[int, Block] = {}  # blocks that the receiver has mapped
        self._lent: dict[int, Image] = {}

    def deliver(
        self, connection: Wire, publisher: PublisherSide, parcel: Parcel, image: Image, fields: dict[str, Any]
    ) -> None:
        block = image.block
        if block is None:
            raise ProtocolError("this image is mapped from another sender: follow that one")
        stale = [serial for serial, known in self._known.items() if known.spent and serial not in self._lent]
        for serial in stale:
            del self._known[serial]
        turn = block.turn(parcel.manifest.version)
        about = {"serial": block.serial, "size": block.size, "forget": stale, "turn": turn}
        self._lent[block.serial] = image
        if block.serial in self._known:
            connection.send("image", PATIENCE, {**about, "fresh": False})
            return
        self._known[block.serial] = block
        with _read_only(block.descriptor) as descriptor:
            connection.send("image", PATIENCE, {**about, "fresh": True}, descriptors=[descriptor, block.notes])

    def released(self, fields: dict[str, Any]) -> None:
        for serial in fields.get("released", ()):
            self._lent.pop(serial, None)

    def end(self) -> None:
        for image in self._lent.values():
            if image.block is not None:
                image.block.spent = True  # it may still be read
        self._lent.clear()


@contextlib.contextmanager
def _read_only(descriptor: int) -> Any:
    """Read-only descriptor of the same memory, where the system has such; else a duplicate."""
    try:
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        opened = os.dup(descriptor)
    try:
        yield opened
    finally:
        os.close(opened)


class SharedCollection:
    """Receiver's part: the images it has mapped. The sender does not write an image again while it is read."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[mmap.mmap, np.ndarray]] = {}  # images with their notes
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put is safe in a finaliser

    def fields(self) -> dict[str, Any]:
        released = []
        while not self._released.empty():
            released.append(self._released.get())
        return {"released": released} if released else {}

    def collect(self, connection: Wire, parcel: Parcel, target: ReceiveTarget, seconds: float) -> np.ndarray:
        connection.send("fetch", PATIENCE, {"version": parcel.offer.version, **self.fields()})
        descriptors: list[int] = []
        try:
            fields = expect(connection, min(seconds, PATIENCE), "image", descriptors=descriptors).fields
            serial, size, turn = int(fields["serial"]), int(fields["size"]), int(fields["turn"])
            for gone in fields["forget"]:
                self._maps.pop(gone, None)
            if fields["fresh"]:
                sizes = [os.fstat(each).st_size for each in descriptors]
                if len(sizes) != 2 or not 0 < size <= sizes[0] or sizes[1] != shared_verification.SIZE:
                    raise WireError("an image came without its memory")
                notes_map = mmap.mmap(descriptors[1], shared_verification.SIZE)
                image_map = mmap.mmap(descriptors[0], size, mmap.MAP_SHARED, mmap.PROT_READ)
                self._maps[serial] = image_map, np.frombuffer(notes_map, np.uint8)
            mapped, notes = self._maps[serial]
            if len(mapped) < parcel.manifest.size or turn < 0:
                raise WireError("an image came in memory that is too small")
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"an image that means nothing: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        target.share(shared_verification.marks(notes, turn))
        array = np.frombuffer(mapped, np.uint8, parcel.manifest.size)
        weakref.finalize(array.base, self._released.put, serial).atexit = False
        return array

    def close(self) -> None:
        self._maps.clear()  # a map that is read stays until its last reader is gone
