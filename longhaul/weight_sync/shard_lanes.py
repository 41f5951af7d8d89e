"""Bytes of a plan's moves from one rank's shards to another's: through shared memory, as a stream, or as changes.

Each move is cut into pieces. Through shared memory a sender maps a span of a few receivers' memories at a time, and
copies each piece from its shard to its place; a compiled loop digests what it copies, so that each byte is read once
and written once (`xxh3_kernels`). It goes through its shard in order, whoever the pieces are for, with parts of a row
and copies for replicas in step: all are then read from memory once. Into a stream it writes batches of pieces; those
that are not contiguous are packed. So neither side needs memory beyond its own shard and the spans or a batch. Both
sides digest the pieces in the plan's order.
"""

from __future__ import annotations

import fcntl
import functools
import heapq
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from longhaul.runtime import shared_memory
from longhaul.runtime.shared_memory import HUGE, LINE, Leaf
from longhaul.weight_sync import digest as digests
from longhaul.weight_sync import resharding
from longhaul.weight_sync.delta import tensor_delta
from longhaul.weight_sync.digest import LEAST_ROW, Row, hasher
from longhaul.weight_sync.resharding import Box, Layout, Move, Runs
from longhaul.weight_sync.transports.tcp import NEAR, is_near

PIECE = 1 << 20
"""Bytes of a piece of a stream, at most: it is digested while a cache of one core has most of it."""

BATCH = 4 << 20
"""Bytes of the pieces of a stream that are sent together, at most: a cache holds them, and calls are few."""

COPIED_PIECE = 1 << 20
"""Bytes that are copied into shared memory under one digest, at most."""

GROUP = 4
"""Receivers that a sender goes through its shard for at once, at most."""

SPANS = 32 << 20
"""Bytes of their memories that it has mapped at once."""

REACH = 4 << 20
"""Bytes of a receiver's memory in which all runs of a piece lie, about."""

RUN = 4096
"""Bytes of the runs of what is contiguous on both sides."""

CHANGED_PIECE = 1 << 22
"""Bytes of a tensor whose changes are one frame, at most."""

MOST_BUFFERS = 512
"""Memories that one call sends or fills, at most; Linux takes 1024."""

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
        return {name: self.part(block, name) for name in self.offsets}

    def part(self, block: np.ndarray, name: str) -> np.ndarray:
        """Bytes of one tensor."""
        at = self.offsets[name]
        return block[at : at + self.sizes[name]]

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


def pieces(moves: Iterator[Move], source: Layout, destination: Layout, most: int, reach: int = 0) -> Iterator[Piece]:
    """Pieces of moves, of at most `most` bytes each, in order.

    With `reach`, the runs of a piece lie within about so many bytes of the destination's part.
    """
    held, needed = ({t.name: (dict(t.boxes), t) for t in layout.tensors} for layout in (source, destination))
    for move in moves:
        boxes, tensor = held[move.name]
        theirs = needed[move.name][0][move.destination]
        size = min(most, reach * move.nbytes // (move.put.end - move.put.offset)) if reach else most
        for nbytes, taken, put in _cut(move.box, boxes[move.source], theirs, tensor.itemsize, size):
            yield Piece(move.name, tensor.dtype, nbytes, taken, put)


def between(plan: resharding.Plan, source: int, destination: int) -> Iterator[Move]:
    """Moves of a plan from one rank to another, in order."""
    return (move for move in plan.moves if move.source == source and move.destination == destination)


def stream(
    plan: resharding.Plan, source: Layout, destination: Layout, sender: int, receiver: int, most: int
) -> tuple[Piece, ...]:
    """Pieces of all moves from one rank to another."""
    return tuple(pieces(between(plan, sender, receiver), source, destination, most))


def _view(part: np.ndarray, runs: Runs) -> np.ndarray:
    """View of runs in a part, uint8 [counts..., length]."""
    counts, strides = (tuple(each) for each in zip(*runs.axes, strict=True)) if runs.axes else ((), ())
    return np.ndarray((*counts, runs.length), np.uint8, part, runs.offset, (*strides, 1))


class Packed:
    """Pieces as contiguous bytes: views where they are contiguous, else packed into one buffer, which is used again."""

    def __init__(self) -> None:
        self._buffer = np.empty(PIECE, np.uint8)

    def of(self, part: np.ndarray, runs: Runs, nbytes: int) -> np.ndarray:
        return packed_into(self.room(nbytes), part, runs)

    def room(self, nbytes: int) -> np.ndarray:
        """Memory of so many bytes, whose content is not needed."""
        if nbytes > self._buffer.size:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]


def packed_into(room: np.ndarray, part: np.ndarray, runs: Runs) -> np.ndarray:
    """Bytes of runs, uint8 [room's size]: a view of the part where they are contiguous, else the room."""
    if not runs.axes:
        return part[runs.offset : runs.offset + room.size]
    view = _view(part, runs)
    np.copyto(room.reshape(view.shape), view)
    return room


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


class Step(NamedTuple):
    """Pieces whose places lie in one span of each receiver's memory."""

    spans: tuple[tuple[int, int, int], ...]  # (receiver, begin, end) in bytes, whole huge pages
    lines: tuple[Piece, ...]  # that are whole cache lines at the receiver
    rows: np.ndarray  # int64 [lines, 6], `digest.Row` of each, with offsets in the sender's part and in the block
    bundles: np.ndarray  # int64, ends of those that go in step: their runs lie beside one another in the sender's part
    tensors: np.ndarray  # int64 [lines], whose part: a number in Route.names
    receivers: np.ndarray  # int64 [lines], a number in Route.receivers, as in the spans
    loose: tuple[tuple[int, Piece], ...]  # the others, with their receivers


class Route(NamedTuple):
    """Pieces from one rank to some others, the same for every version, in the order of the sender's bytes."""

    receivers: tuple[int, ...]
    places: tuple[Shard, ...]  # of each receiver
    names: tuple[str, ...]
    steps: tuple[Step, ...]
    nbytes: int


def routes(plan: resharding.Plan, source: Layout, destination: Layout, sender: int) -> tuple[Route, ...]:
    """Routes from one rank to all that it sends something, GROUP of them at a time."""
    receivers = sorted({move.destination for move in plan.moves if move.source == sender})
    groups = [tuple(receivers[i : i + GROUP]) for i in range(0, len(receivers), GROUP)]
    return tuple(route(plan, source, destination, sender, group) for group in groups)


def route(plan: resharding.Plan, source: Layout, destination: Layout, sender: int, receivers: tuple[int, ...]) -> Route:
    """Pieces of all moves from one rank to some others. Those to one rank have one order, whichever the others are."""
    places = tuple(shard(destination, receiver) for receiver in receivers)
    moves = [list(between(plan, sender, receiver)) for receiver in receivers]
    names = tuple(each.name for each in source.tensors)
    numbers = {name: number for number, name in enumerate(names)}
    made, size = _Steps(), SPANS // max(1, len(receivers))

    def cut(number: int) -> Iterator[tuple[int, int, int, Piece]]:
        for piece in pieces(iter(moves[number]), source, destination, COPIED_PIECE, REACH):
            yield numbers[piece.name], piece.taken.offset, number, piece

    for tensor, _, number, piece in heapq.merge(*map(cut, range(len(receivers))), key=lambda each: each[:3]):
        made.add(tensor, number, piece, places[number], size)
    made.end()
    return Route(receivers, places, names, tuple(made.steps), sum(move.nbytes for each in moves for move in each))


class _Steps:
    """Steps of a route, to which pieces are added."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._spans: dict[int, tuple[int, int]] = {}
        self._lines: list[tuple[Piece, Row, int, int]] = []
        self._loose: list[tuple[int, Piece]] = []

    def add(self, tensor: int, receiver: int, piece: Piece, place: Shard, size: int) -> None:
        """Adds a piece whose receiver has its parts at `place`; `size` bounds the bytes of a span."""
        base = place.offsets[piece.name]
        first, last = base + piece.put.offset, base + piece.put.end
        begin, end = self._spans.get(receiver, (first // HUGE * HUGE, 0))
        if not begin <= first <= last <= begin + size:
            self.end()
            begin, end = first // HUGE * HUGE, 0
        self._spans[receiver] = begin, max(end, min(-(-last // HUGE) * HUGE, place.size))
        if (row := _row(piece, base)) is None:
            self._loose.append((receiver, piece))
        else:
            self._lines.append((piece, row, tensor, receiver))

    def end(self) -> None:
        """Ends a step."""
        if self._spans:
            lines, rows, tensors, receivers = zip(*self._lines, strict=True) if self._lines else ((), (), (), ())
            table = np.array(rows, np.int64).reshape(-1, len(Row._fields))
            spans = tuple((receiver, begin, end) for receiver, (begin, end) in self._spans.items())
            numbers = np.array(tensors, np.int64), np.array(receivers, np.int64)
            self.steps.append(Step(spans, lines, table, _bundles(rows, tensors), *numbers, tuple(self._loose)))
        self._spans, self._lines, self._loose = {}, [], []


def _bundles(rows: Sequence[Row], tensors: Sequence[int]) -> np.ndarray:
    """Ends of the bundles of rows in the order of their sources.

    Those of one are alike, and begin within one step: halves of rows, or copies for replicas. Run by run the source is
    then read from its beginning to its end, without gaps that no prefetcher foresees.
    """
    ends: list[int] = []
    first = 0
    for at, (row, tensor) in enumerate(zip(rows, tensors, strict=True)):
        head = rows[first]
        alike = (tensor, row.source_step, row.length, row.runs) == (
            tensors[first],
            head.source_step,
            head.length,
            head.runs,
        )
        if not alike or row.source >= head.source + head.source_step or at - first == GROUP:
            ends.append(at)
            first = at
    return np.array([*ends, len(rows)] if rows else [], np.int64)


def _row(piece: Piece, base: int) -> Row | None:
    """Row for a piece whose tensor begins at byte `base` of the block, with offsets for addresses.

    None where a row can't say it: both sides must be runs of one length with one step, in whole lines at the receiver.
    """
    taken, put = piece.taken.merged(), piece.put.merged()
    length = min(taken.length, put.length)
    for runs in (taken, put):
        if len(runs.axes) > 1 or (runs.axes and runs.length != length):
            return None
    source_step, target_step = (runs.axes[0][1] if runs.axes else length for runs in (taken, put))
    if piece.nbytes < LEAST_ROW or any(each % LINE for each in (length, base + put.offset, target_step)):
        return None
    if length == source_step == target_step and length % RUN == 0:  # as runs, so that copies go in step
        return Row(taken.offset, RUN, base + put.offset, RUN, RUN, piece.nbytes // RUN)
    return Row(taken.offset, source_step, base + put.offset, target_step, length, piece.nbytes // length)


def compile_loops() -> None:
    """Compiles, or loads, the loop that `write` uses: that takes longer than a transfer."""
    if (loops := digests.compiled()) is not None:
        loops.pour_rows(np.empty((0, len(Row._fields)), np.int64))


class _Digest:
    """Running digest of a route: that of the digests of its lines, in order, and of the digest of all its loose bytes.

    So a compiled loop may digest many pieces in one call, and a side without it finds the same.
    """

    def __init__(self) -> None:
        self._lines, self._loose = hasher()(), hasher()()

    def lines(self, digests: bytes) -> None:
        self._lines.update(digests)

    def loose(self, data: np.ndarray) -> None:
        self._loose.update(data)

    def end(self) -> bytes:
        self._lines.update(self._loose.digest())
        return bytes(self._lines.digest())


def write(
    way: Route, parts: Parts, descriptors: Sequence[int], until: float, between: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Copies pieces into the memories of a route's receivers; -> the digest of each one's.

    TimeoutError after the time `until`. `between` is called after each step. The parts must have the sizes of the
    sender's shard: addresses are not checked.
    """
    memories = [shared_memory.mapped(each, place.size) for each, place in zip(descriptors, way.places, strict=True)]
    blocks = [np.frombuffer(each, np.uint8, place.size) for each, place in zip(memories, way.places, strict=True)]
    where = np.array([block.ctypes.data for block in blocks], np.int64)
    addresses = np.array([_address(parts[name]) if name in parts else 0 for name in way.names], np.int64)
    packed, running, loops = Packed(), [_Digest() for _ in way.receivers], digests.compiled()
    for step in way.steps:
        if time.monotonic() > until:
            raise TimeoutError("the transfer's deadline has passed")
        for receiver, begin, end in step.spans:
            shared_memory.populate(memories[receiver], begin, end)
        if loops is not None:
            rows = step.rows.copy()
            rows[:, 0] += addresses[step.tensors]
            rows[:, 2] += where[step.receivers]
            found = loops.pour_rows(rows, step.bundles)
            for receiver, each in enumerate(running):
                each.lines(found[step.receivers == receiver].tobytes())
        else:
            for receiver, piece in zip(step.receivers.tolist(), step.lines, strict=True):
                data = packed.of(parts[piece.name], piece.taken, piece.nbytes)
                running[receiver].lines(digests.digest(data))
                unpack(data, way.places[receiver].part(blocks[receiver], piece.name), piece.put)
        for receiver, piece in step.loose:
            data = packed.of(parts[piece.name], piece.taken, piece.nbytes)
            running[receiver].loose(data)
            unpack(data, way.places[receiver].part(blocks[receiver], piece.name), piece.put)
        for receiver, begin, end in step.spans:
            shared_memory.forget(memories[receiver], begin, end)
        between()
    return [each.end() for each in running]


def digest(way: Route, block: np.ndarray) -> bytes:
    """Digest of the pieces of a route to one receiver, which are in place in its block, uint8 [size]."""
    packed, running, (place,) = Packed(), _Digest(), way.places
    for step in way.steps:
        for piece in step.lines:
            running.lines(digests.digest(packed.of(place.part(block, piece.name), piece.put, piece.nbytes)))
        for _, piece in step.loose:
            running.loose(packed.of(place.part(block, piece.name), piece.put, piece.nbytes))
    return running.end()


def _address(data: np.ndarray) -> int:
    return int(data.__array_interface__["data"][0])


# -------------------------------------------------------------------------------------------------------------- streams


def connected(host: str, port: int, seconds: float) -> socket.socket:
    """Stream to another rank; on one machine as much of it stays in a cache as `draw` leaves there."""
    sock = socket.create_connection((host, port), timeout=seconds)
    if is_near(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR)
    return sock


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of at most BATCH bytes, or of one piece."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.nbytes > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.nbytes
    if batch:
        yield batch


def pour(pieces: Iterable[Piece], parts: Parts, sock: socket.socket, until: float) -> bytes:
    """Sends pieces as one stream; -> their digest. TimeoutError, ConnectionError."""
    packed, running = Packed(), hasher()()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for batch in _batches(pieces):
        views = []
        for piece, room in zip(batch, _rooms(batch, packed), strict=True):
            views.append(packed_into(room, parts[piece.name], piece.taken))
            running.update(views[-1])
        _moved(sock, views, until, socket.SO_SNDTIMEO, socket.socket.sendmsg)
    return bytes(running.digest())


def draw(pieces: Iterable[Piece], parts: Parts, sock: socket.socket, until: float) -> bytes:
    """Receives pieces into their places; -> their digest. TimeoutError, ConnectionError."""
    packed, running = Packed(), hasher()()
    if is_near(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR)
    for batch in _batches(pieces):
        views = [
            room if piece.put.axes else parts[piece.name][piece.put.offset : piece.put.end]
            for piece, room in zip(batch, _rooms(batch, packed), strict=True)
        ]
        _moved(sock, views, until, socket.SO_RCVTIMEO, _received)
        for piece, data in zip(batch, views, strict=True):
            running.update(data)
            if piece.put.axes:
                unpack(data, parts[piece.name], piece.put)
    return bytes(running.digest())


def _rooms(batch: Sequence[Piece], packed: Packed) -> list[np.ndarray]:
    """Memory for each piece of a batch."""
    ends = np.cumsum([piece.nbytes for piece in batch]).tolist()
    room = packed.room(ends[-1])
    return [room[end - piece.nbytes : end] for piece, end in zip(batch, ends, strict=True)]


def _received(sock: socket.socket, views: list[memoryview]) -> int:
    count = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
    if not count:
        raise ConnectionResetError("the sender has closed the stream")
    return count


def _moved(
    sock: socket.socket,
    memories: Iterable[np.ndarray],
    until: float,
    timeout: int,
    call: Callable[[socket.socket, list[memoryview]], int],
) -> None:
    """Sends or fills memories by calls for many of them. The kernel waits, not Python: that takes fewer calls."""
    left = [each.data for each in memories if each.size]
    sock.settimeout(None)
    while left:
        seconds = _left(until)
        sock.setsockopt(socket.SOL_SOCKET, timeout, struct.pack("@ll", int(seconds), int(1e6 * (seconds % 1.0)) or 1))
        try:
            count = call(sock, left[:MOST_BUFFERS])
        except BlockingIOError:
            raise TimeoutError("the transfer's deadline has passed") from None
        done = 0
        while done < len(left) and count >= len(left[done]):
            count -= len(left[done])
            done += 1
        left = left[done:]
        if count:
            left[0] = left[0][count:]


def pour_changes(
    pieces: Iterable[Piece], base: Parts, parts: Parts, sock: socket.socket, until: float
) -> tuple[bytes, int]:
    """Sends how pieces differ from those of the version before; -> (digest of the frames, their bytes)."""
    before, after, running, total = Packed(), Packed(), hasher()(), 0
    for piece in pieces:
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


def draw_changes(pieces: Iterable[Piece], base: Parts, parts: Parts, sock: socket.socket, until: float) -> bytes:
    """Receives changes, and writes what they make of the version before; -> the frames' digest.

    ValueError where a frame is damaged, or of another base.
    """
    before, after, running = Packed(), Packed(), hasher()()
    for piece in pieces:
        head = np.empty(LENGTH.size, np.uint8)
        _moved(sock, [head], until, socket.SO_RCVTIMEO, _received)
        (length,) = LENGTH.unpack(head.tobytes())
        if length > piece.nbytes + piece.nbytes // 8 + 4096:
            raise ValueError(f"changes of {length} bytes to {piece.nbytes}")
        frame = np.empty(length, np.uint8)
        _moved(sock, [frame], until, socket.SO_RCVTIMEO, _received)
        running.update(frame)
        old = _aligned(before.of(base[piece.name], piece.put, piece.nbytes))
        new = after.room(piece.nbytes)
        tensor_delta.decode(old, frame, new)
        unpack(new, parts[piece.name], piece.put)
    return bytes(running.digest())


def _aligned(data: np.ndarray) -> np.ndarray:
    """Bytes at an address that any element may have; copied where they are not."""
    return data if data.ctypes.data % 8 == 0 else data.copy()


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0.0:
        raise TimeoutError("the transfer's deadline has passed")
    return left
