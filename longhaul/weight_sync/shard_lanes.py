"""Bytes of a plan's moves from one rank's shards to another's: through shared memory, as a stream, or as changes.

Each move is cut into pieces that a cache holds. A sender writes a piece straight from its shard to its place in the
receiver's memory (`pwrite` into memory without a name), or into a stream; only a piece whose runs are short is packed
first. So neither side needs memory beyond its own shard and a piece. Both sides digest the pieces of a stream in the
plan's order.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from longhaul.runtime import shared_memory
from longhaul.runtime.shared_memory import Leaf
from longhaul.weight_sync import resharding
from longhaul.weight_sync.delta import tensor_delta
from longhaul.weight_sync.digest import hasher
from longhaul.weight_sync.resharding import Box, Layout, Move, Runs

PIECE = 1 << 18
"""Bytes that are copied and digested together: they fit in the second-level cache."""

CHANGED_PIECE = 1 << 22
"""Bytes of a tensor whose changes are one frame, at most."""

SHORT = 1 << 14
"""Bytes of a run from which it is sent by itself, without being packed with others."""

LENGTH = struct.Struct("<I")

Parts = Mapping[str, np.ndarray]
"""A rank's box of each tensor, uint8 [bytes] each."""


class Piece(NamedTuple):
    """Part of a move, in the order of its bytes."""

    name: str
    dtype: str
    nbytes: int
    taken: Runs
    put: Runs


class Shard(NamedTuple):
    """Places of a rank's parts in one block of memory."""

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    boxes: Mapping[str, Box]
    size: int

    def parts(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Parts of a block, uint8 [size]."""
        return {name: block[at : at + self.sizes[name]] for name, at in self.offsets.items()}

    def tensors(self, block: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
        """Arrays over a block by name, of the layout's dtypes and the boxes' shapes."""
        parts = self.parts(block)
        return {
            each.name: parts[each.name].view(np.dtype(each.dtype)).reshape([b - a for a, b in self.boxes[each.name]])
            for each in layout.tensors
            if each.name in parts
        }


def shard(layout: Layout, rank: int) -> Shard:
    """Places of the parts of a rank, each at the start of a cache line."""
    boxes = {tensor.name: box for tensor in layout.tensors for holder, box in tensor.boxes if holder == rank}
    itemsizes = {tensor.name: tensor.itemsize for tensor in layout.tensors}
    sizes = {name: resharding.volume(box) * itemsizes[name] for name, box in boxes.items()}
    planned = shared_memory.plan((name, Leaf((size,), "uint8")) for name, size in sizes.items())
    return Shard({name: region.offset for name, region in planned.regions.items()}, sizes, boxes, planned.size)


def raw(array: np.ndarray) -> np.ndarray:
    """Bytes of a contiguous array. ValueError for another."""
    if not array.flags.c_contiguous:
        raise ValueError("a rank's part of a tensor must be contiguous")
    return array.reshape(-1).view(np.uint8)


@functools.lru_cache(maxsize=1024)
def _cut(box: Box, held: Box, needed: Box, itemsize: int, most: int) -> tuple[tuple[int, Runs, Runs], ...]:
    return tuple(
        (
            resharding.volume(part) * itemsize,
            resharding.runs(part, held, itemsize),
            resharding.runs(part, needed, itemsize),
        )
        for part in resharding.parts(box, max(1, most // itemsize))
    )


def pieces(moves: Iterator[Move], source: Layout, destination: Layout, most: int = PIECE) -> Iterator[Piece]:
    """Pieces of moves, of at most `most` bytes each, in order."""
    held, needed = ({t.name: (dict(t.boxes), t) for t in layout.tensors} for layout in (source, destination))
    for move in moves:
        boxes, tensor = held[move.name]
        theirs = needed[move.name][0][move.destination]
        for nbytes, taken, put in _cut(move.box, boxes[move.source], theirs, tensor.itemsize, most):
            yield Piece(move.name, tensor.dtype, nbytes, taken, put)


def between(plan: resharding.Plan, source: int, destination: int) -> Iterator[Move]:
    """Moves of a plan from one rank to another, in order."""
    return (move for move in plan.moves if move.source == source and move.destination == destination)


def _view(part: np.ndarray, of: Runs) -> np.ndarray:
    """View of runs in a part, uint8 [counts..., length]."""
    counts, strides = (tuple(each) for each in zip(*of.axes, strict=True)) if of.axes else ((), ())
    return np.ndarray((*counts, of.length), np.uint8, part, of.offset, (*strides, 1))


class Packed:
    """Pieces as contiguous bytes: views where they are contiguous, else packed into one buffer, which is used again."""

    def __init__(self) -> None:
        self._buffer = np.empty(PIECE, np.uint8)

    def of(self, part: np.ndarray, runs: Runs, nbytes: int) -> np.ndarray:
        if not runs.axes:
            return part[runs.offset : runs.offset + nbytes]
        view, out = _view(part, runs), self.room(nbytes)
        np.copyto(out.reshape(view.shape), view)
        return out

    def room(self, nbytes: int) -> np.ndarray:
        """Memory of so many bytes, whose content nobody needs."""
        if nbytes > self._buffer.size:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]


def unpack(data: np.ndarray, part: np.ndarray, runs: Runs) -> None:
    """Writes contiguous bytes to their runs in a part."""
    view = _view(part, runs)
    np.copyto(view, data.reshape(view.shape))


# -------------------------------------------------------------------------------------------------------- shared memory


def opened(place: tuple[int, int], size: int) -> int:
    """Descriptor of memory without a name that `place`, (process, descriptor), is in a process of the same user.

    ConnectionError where there is none of that size."""
    process, number = (int(each) for each in place)
    try:
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    except OSError as error:
        raise ConnectionError(f"the memory of process {process} can't be opened: {error.strerror}") from error
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # only memory without a name has seals: no file is ever written
        if os.fstat(descriptor).st_size != size:
            raise ConnectionError(f"the memory of process {process} has not {size} bytes")
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, ConnectionError):
            raise
        raise ConnectionError(f"what process {process} names is no memory") from error
    return descriptor


def write(found: Iterator[Piece], parts: Parts, descriptor: int, offsets: Mapping[str, int], until: float) -> bytes:
    """Writes pieces into a receiver's memory; -> their digest. TimeoutError after the time `until`."""
    packed, running = Packed(), hasher()()
    for piece in found:
        if time.monotonic() > until:
            raise TimeoutError("the transfer's deadline has passed")
        data = packed.of(parts[piece.name], piece.taken, piece.nbytes)
        running.update(data)
        base = offsets[piece.name]
        if not piece.put.axes:
            _written(descriptor, data, base + piece.put.offset)
        elif piece.put.length >= SHORT:
            length = piece.put.length
            for i, start in enumerate(piece.put.starts().tolist()):
                _written(descriptor, data[i * length : (i + 1) * length], base + start)
        else:
            _scattered(descriptor, data, base, piece.put)
    return bytes(running.digest())


def _written(descriptor: int, data: np.ndarray, at: int) -> None:
    view: memoryview = data.data
    while view:
        done = os.pwrite(descriptor, view, at)
        view, at = view[done:], at + done


def _scattered(descriptor: int, data: np.ndarray, base: int, put: Runs) -> None:
    """Writes short runs through a map of their neighbourhood, which is given back at once."""
    last = put.offset + sum((count - 1) * stride for count, stride in put.axes) + put.length
    first = (base + put.offset) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    window = mmap.mmap(descriptor, base + last - first, offset=first)
    try:
        view = np.frombuffer(window, np.uint8)
        unpack(data, view, put._replace(offset=base + put.offset - first))
        del view
    finally:
        window.close()


def digest(found: Iterator[Piece], parts: Parts) -> bytes:
    """Digest of pieces that are in place."""
    packed, running = Packed(), hasher()()
    for piece in found:
        running.update(packed.of(parts[piece.name], piece.put, piece.nbytes))
    return bytes(running.digest())


# -------------------------------------------------------------------------------------------------------------- streams


def pour(found: Iterator[Piece], parts: Parts, sock: socket.socket, until: float) -> bytes:
    """Sends pieces as one stream; -> their digest. TimeoutError, ConnectionError."""
    packed, running = Packed(), hasher()()
    for piece in found:
        data = packed.of(parts[piece.name], piece.taken, piece.nbytes)
        running.update(data)
        sock.settimeout(_left(until))
        sock.sendall(data.data)
    return bytes(running.digest())


def draw(found: Iterator[Piece], parts: Parts, sock: socket.socket, until: float) -> bytes:
    """Receives pieces into their places; -> their digest. TimeoutError, ConnectionError."""
    packed, running = Packed(), hasher()()
    for piece in found:
        part, contiguous = parts[piece.name], not piece.put.axes
        offset = piece.put.offset
        data = part[offset : offset + piece.nbytes] if contiguous else packed.room(piece.nbytes)
        _filled(sock, data.data, until)
        running.update(data)
        if not contiguous:
            unpack(data, part, piece.put)
    return bytes(running.digest())


def pour_changes(
    found: Iterator[Piece], base: Parts, parts: Parts, sock: socket.socket, until: float
) -> tuple[bytes, int]:
    """Sends how pieces differ from those of the version before; -> (digest of the frames, their bytes)."""
    before, after, running, total = Packed(), Packed(), hasher()(), 0
    for piece in found:
        old, new = (
            packed.of(each[piece.name], piece.taken, piece.nbytes) for packed, each in ((before, base), (after, parts))
        )
        frame = tensor_delta.encode(_aligned(old), _aligned(new), piece.dtype)
        running.update(frame)
        total += len(frame)
        sock.settimeout(_left(until))
        sock.sendall(LENGTH.pack(len(frame)))
        sock.sendall(frame)
    return bytes(running.digest()), total


def draw_changes(found: Iterator[Piece], base: Parts, parts: Parts, sock: socket.socket, until: float) -> bytes:
    """Receives changes, and writes what they make of the version before; -> the frames' digest.

    ValueError where a frame is damaged, or of another base.
    """
    before, after, running = Packed(), Packed(), hasher()()
    for piece in found:
        head = bytearray(LENGTH.size)
        _filled(sock, memoryview(head), until)
        (length,) = LENGTH.unpack(head)
        if length > piece.nbytes + piece.nbytes // 8 + 4096:
            raise ValueError(f"changes of {length} bytes to {piece.nbytes}")
        frame = bytearray(length)
        _filled(sock, memoryview(frame), until)
        running.update(frame)
        old = _aligned(before.of(base[piece.name], piece.put, piece.nbytes))
        new = after.room(piece.nbytes)
        tensor_delta.decode(old, frame, new)
        unpack(new, parts[piece.name], piece.put)
    return bytes(running.digest())


def _aligned(data: np.ndarray) -> np.ndarray:
    """Bytes at an address that any element may have; copied where they are not."""
    return data if data.ctypes.data % 8 == 0 else data.copy()


def _filled(sock: socket.socket, into: memoryview, until: float) -> None:
    while into:
        sock.settimeout(_left(until))
        got = sock.recv_into(into)
        if not got:
            raise ConnectionResetError("the sender has closed the stream")
        into = into[got:]


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0.0:
        raise TimeoutError("the transfer's deadline has passed")
    return left
