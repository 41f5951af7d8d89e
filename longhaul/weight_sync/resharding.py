"""Layouts of a tree of tensors (for every tensor its shape, for every rank its box), and plans of moves between them.

Pure data, without JAX or torch: a layout is made by hand, by a rule, or from JAX's shardings. A rank's part is one
contiguous array in memory, its last axis the fastest.

As in vLLM's sharded transfer and Perplexity's static schedule, every destination gets each of its bytes exactly once,
from one of the sources that hold it; nobody gathers a tensor. Where several sources hold copies, the one whose link
would finish first is chosen. Moves are in the order of layers, in buckets in which no rank sends or receives more than
a bound of bytes: the memory that a transfer needs for buffers.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 and the float8s by name)
import numpy as np
from numpy.typing import NDArray

Box: TypeAlias = tuple[tuple[int, int], ...]
"""(begin, end) along every axis; () for a tensor without axes."""

Shapes: TypeAlias = Mapping[str, tuple[Sequence[int], Any]]
"""Name -> (shape, dtype), in the order of layers."""

Axis: TypeAlias = "int | Callable[[str, tuple[int, ...]], int | None] | None"
"""Axis to split, for all tensors or by name and shape; None keeps a tensor whole on every rank."""


class Tensor(NamedTuple):
    """One tensor of a layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[int, Box], ...]  # (rank, its box), by rank; without the ranks that hold nothing

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Layout(NamedTuple):
    """Tensors in the order of layers, in which they are sent."""

    tensors: tuple[Tensor, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for tensor in self.tensors for rank, _ in tensor.boxes}))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tree, each counted once."""
        return sum(tensor.nbytes for tensor in self.tensors)


def make(shapes: Shapes, boxes: Callable[[str, tuple[int, ...]], Iterable[tuple[int, Box]]]) -> Layout:
    """Layout with the boxes of `boxes(name, shape)`. Raises ValueError for a box outside of its tensor."""
    tensors = []
    for name, (sizes, dtype) in shapes.items():
        shape = tuple(int(size) for size in sizes)
        held = _checked(shape, tuple(boxes(name, shape)))
        if isinstance(held, str):
            raise ValueError(f"{name}: {held}")
        tensors.append(Tensor(name, shape, str(np.dtype(dtype)), held))
    return Layout(tuple(tensors))


@functools.lru_cache(maxsize=256)
def _checked(shape: tuple[int, ...], boxes: tuple[tuple[int, Box], ...]) -> tuple[tuple[int, Box], ...] | str:
    """(rank, box) of the ranks that hold something, by rank, or the error. Cached: most tensors have equal boxes."""
    held = sorted((rank, tuple((int(a), int(b)) for a, b in box)) for rank, box in boxes)
    for rank, box in held:
        if len(box) != len(shape) or not all(0 <= a <= b <= size for (a, b), size in zip(box, shape)):
            return f"rank {rank} holds {format_box(box)}, which is no part of the shape {shape}"
    if len({rank for rank, _ in held}) < len(held):
        return "a rank is named twice; it holds one box of a tensor"
    return tuple((rank, box) for rank, box in held if volume(box))


def replicated(shapes: Shapes, ranks: int) -> Layout:
    """Layout with every tensor on every rank, as in data-parallel training."""
    return sharded(shapes, ranks, None)


def sharded(shapes: Shapes, ranks: int, axis: Axis = 0) -> Layout:
    """Layout with every tensor split along one axis over all ranks, as evenly as possible, the first parts larger.

    One axis for all tensors is fully-sharded training; a rule (name, shape) -> axis or None is tensor-parallel serving.
    A tensor without that axis stays whole on every rank.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; there must be at least one")

    def boxes(name: str, shape: tuple[int, ...]) -> Iterable[tuple[int, Box]]:
        return cut(shape, axis(name, shape) if callable(axis) else axis)

    @functools.cache
    def cut(shape: tuple[int, ...], along: int | None) -> Sequence[tuple[int, Box]]:
        whole = tuple((0, size) for size in shape)
        if along is None or not -len(shape) <= along < len(shape):
            return tuple((rank, whole) for rank in range(ranks))
        along %= len(shape)
        share, larger = divmod(shape[along], ranks)  # the first `larger` ranks have one more
        edges = [rank * share + min(rank, larger) for rank in range(ranks + 1)]
        return tuple((r, (*whole[:along], (edges[r], edges[r + 1]), *whole[along + 1 :])) for r in range(ranks))

    return make(shapes, boxes)


def replicas(layout: Layout, count: int) -> Layout:
    """Layout of `count` copies, rank after rank: 16 replicas of a layout of 16 ranks have 256."""
    if count < 1:
        raise ValueError(f"{count} replicas; there must be at least one")
    size = max(layout.ranks, default=-1) + 1
    copied = functools.cache(lambda boxes: tuple((i * size + rank, box) for i in range(count) for rank, box in boxes))
    held = {t.name: t.boxes for t in layout.tensors}
    return make({t.name: (t.shape, t.dtype) for t in layout.tensors}, lambda name, _: copied(held[name]))


def sample(source: Layout, destination: Layout, share: float) -> tuple[Layout, Layout]:
    """Both layouts of about a `share` of the bytes, with runs of the same lengths between the same ranks.

    Of tensors that lie alike some are kept, and of what is still too large the first rows of every box (`rows`).
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share:g}; it must lie from 0 to 1")
    there = {tensor.name: tensor for tensor in source.tensors}
    alike: defaultdict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for needed in destination.tensors:
        held = there[needed.name]
        alike[held[1:], needed[1:]].append((held, needed))
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    for pairs in alike.values():
        wanted = share * len(pairs)
        count = max(1, round(wanted))
        divisor = 1 if wanted >= 1.0 else _divisor(pairs[0], 1.0 / wanted if wanted else math.inf)
        for i in range(count):
            held, needed = pairs[i * len(pairs) // count]
            kept[needed.name] = _shorter(held, divisor), _shorter(needed, divisor)
    names = [tensor.name for tensor in destination.tensors if tensor.name in kept]
    return Layout(tuple(kept[name][0] for name in names)), Layout(tuple(kept[name][1] for name in names))


def rows(layout: Layout, rank: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's arrays of a layout that `sample` has returned, from those of the layout that was sampled."""
    found = {}
    for tensor in layout.tensors:
        box = dict(tensor.boxes).get(rank)
        if box is not None:
            found[tensor.name] = arrays[tensor.name][: box[0][1] - box[0][0]] if box else arrays[tensor.name]
    return found


def _divisor(pair: tuple[Tensor, Tensor], most: float) -> int:
    """Largest number, up to `most`, by which all edges of the boxes along the first axis can be divided."""
    edges = math.gcd(*(edge for tensor in pair for _, box in tensor.boxes for span in box[:1] for edge in span))
    return max((d for d in range(1, edges + 1) if edges % d == 0 and d <= most), default=1)


def _shorter(tensor: Tensor, divisor: int) -> Tensor:
    """Tensor whose first axis, and its boxes along it, are divided."""
    if divisor == 1:
        return tensor
    shape = tensor.shape[0] // divisor, *tensor.shape[1:]
    boxes = tuple((rank, ((a // divisor, b // divisor), *box)) for rank, ((a, b), *box) in tensor.boxes)
    return tensor._replace(shape=shape, boxes=boxes)


def of_jax(arrays: Mapping[str, Any], rank: Callable[[Any], int] | None = None) -> Layout:
    """Layout of named `jax.Array`s, or of objects with their shape, dtype and sharding.

    `rank` numbers the devices, by default by their id.
    """
    number = rank or (lambda device: int(device.id))

    def boxes(name: str, shape: tuple[int, ...]) -> Iterable[tuple[int, Box]]:
        placed = arrays[name].sharding.devices_indices_map(shape)
        return [
            (number(device), tuple(cut.indices(size)[:2] for cut, size in zip(index, shape)))
            for device, index in placed.items()
        ]

    return make({name: (array.shape, array.dtype) for name, array in arrays.items()}, boxes)


# ---------------------------------------------------------------------------------------------------------------- boxes


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return math.prod(end - begin for begin, end in box)


def intersection(first: Box, second: Box) -> Box | None:
    """Intersection of two boxes of one tensor; None where it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second))
    return shared if all(a < b for a, b in shared) else None


def without(box: Box, hole: Box) -> list[Box]:
    """`box` minus `hole`, which lies in it, as boxes that don't overlap."""
    left: list[Box] = []
    rest = list(box)
    for axis, ((begin, end), (a, b)) in enumerate(zip(box, hole)):
        cuts = [cut for cut in ((begin, a), (b, end)) if cut[0] < cut[1]]
        left += [(*rest[:axis], cut, *rest[axis + 1 :]) for cut in cuts]
        rest[axis] = (a, b)
    return left


def format_box(box: Box) -> str:
    """Text of a box for a message: ((0, 4), (2, 8)) -> "[0:4, 2:8]"."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"


# ---------------------------------------------------------------------------------------------------------------- plans

BUCKET = 256 * 10**6
"""Bytes that a rank sends or receives in a bucket, at most."""

REMEMBERED = 16
"""Plans that are cached."""

Buffers: TypeAlias = Mapping[int, Mapping[str, NDArray[Any]]]
"""rank -> name of a tensor -> the rank's box of it, contiguous."""


class Runs(NamedTuple):
    """Place of a box in a rank's part of a tensor: runs of `length` bytes from `offset` on, repeated along axes."""

    offset: int
    length: int
    axes: tuple[tuple[int, int], ...]  # (count, stride in bytes), the last the fastest

    @property
    def end(self) -> int:
        """Offset of the byte after the last run."""
        return self.offset + sum((count - 1) * stride for count, stride in self.axes) + self.length

    def merged(self) -> Runs:
        """Same runs with as few axes as possible: one that goes on where its inner one ends is none of its own."""
        axes: list[tuple[int, int]] = []
        for count, stride in self.axes:
            if axes and axes[-1][1] == count * stride:
                axes[-1] = (axes[-1][0] * count, stride)
            else:
                axes.append((count, stride))
        return self._replace(axes=tuple(axes))

    def starts(self) -> NDArray[np.int64]:
        """Offset of each run, in order."""
        offsets = np.array([self.offset], np.int64)
        for count, stride in self.axes:
            offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return offsets


class Move(NamedTuple):
    """One box of a tensor from one rank to another; the runs of both sides hold the same bytes in the same order."""

    name: str
    box: Box  # in the whole tensor
    source: int
    destination: int
    nbytes: int
    taken: Runs  # from the source's part
    put: Runs  # into the destination's


class Plan(NamedTuple):
    """All moves, in buckets, in the order of layers."""

    buckets: tuple[tuple[Move, ...], ...]
    nbytes: int  # that move, including those that stay on a rank
    sent: tuple[tuple[int, int], ...]  # (rank, bytes over its link)
    received: tuple[tuple[int, int], ...]

    @property
    def moves(self) -> Iterator[Move]:
        return (move for bucket in self.buckets for move in bucket)


def plan(
    source: Layout,
    destination: Layout,
    links: Mapping[int, float] | None = None,
    *,
    bucket: int = BUCKET,
    together: bool = False,
) -> Plan:
    """Plan of the moves from `source` to `destination`.

    `links` are the sources' links in bytes a second (only their ratios matter; 1 for a rank without an entry). With
    `together`, equal ranks of both sides are one device, which takes what it has from itself. Plans are cached. Raises
    ValueError where no source holds what is needed, or shapes or dtypes differ.
    """
    largest = max((tensor.itemsize for tensor in destination.tensors), default=1)
    if bucket < largest:
        raise ValueError(f"a bucket of {bucket} bytes; it must hold at least one element, {largest} bytes")
    if links is not None and min(links.values(), default=1.0) <= 0.0:
        raise ValueError(f"a link has {min(links.values())} bytes a second; leave out ranks that can't send")
    return _planned(source, destination, tuple(sorted((links or {}).items())), bucket, together)


@functools.lru_cache(maxsize=REMEMBERED)
def _planned(
    source: Layout, destination: Layout, links: tuple[tuple[int, float], ...], bucket: int, together: bool
) -> Plan:
    there = {tensor.name: tensor for tensor in source.tensors}
    choose = _Chooser(dict(links))
    moves: list[Move] = []
    for needed in destination.tensors:
        held = there.get(needed.name)
        if held is None:
            raise ValueError(f"{needed.name}: no source holds a tensor of this name")
        for what, ours, theirs in (("shape", held.shape, needed.shape), ("dtype", held.dtype, needed.dtype)):
            if ours != theirs:
                raise ValueError(
                    f"{needed.name}: {what} {ours} at the source, {theirs} at the destination; cast it first"
                )
        routes = _routes(held.boxes, needed.boxes, needed.itemsize, bucket)
        if isinstance(routes, str):
            raise ValueError(f"{needed.name}: no source holds {routes}, which a destination needs")
        name = needed.name
        for rank, box, nbytes, holders, taken, put in routes:
            best = rank if together and rank in holders else choose(holders, nbytes)
            moves.append(Move(name, box, best, rank, nbytes, taken, put))
    return _counted(_bucketed(moves, bucket), together)


class _Chooser:
    """Choice, among ranks that hold the same, of the one whose link would finish first; of equals the lowest.

    It has one heap of the links' work for each set of ranks and speed of links. A rank's work only grows, so an
    outdated entry is corrected when it comes to the top.
    """

    def __init__(self, links: Mapping[int, float]) -> None:
        self._links = links
        self._busy: defaultdict[int, float] = defaultdict(float)  # seconds until a source's link is free
        self._heaps: dict[tuple[int, ...], list[tuple[float, list[tuple[float, int]]]]] = {}

    def __call__(self, ranks: tuple[int, ...], nbytes: int) -> int:
        busy, links = self._busy, self._links
        if len(ranks) == 1:
            best = ranks[0]
        else:
            best, least = -1, math.inf
            for speed, heap in self._heaps.get(ranks) or self._new_heaps(ranks):
                while (now := busy[heap[0][1]]) > heap[0][0]:
                    heapq.heapreplace(heap, (now, heap[0][1]))
                done = heap[0][0] + nbytes / speed
                if (done, heap[0][1]) < (least, best):
                    best, least = heap[0][1], done
        busy[best] += nbytes / links.get(best, 1.0)
        return best

    def _new_heaps(self, ranks: tuple[int, ...]) -> list[tuple[float, list[tuple[float, int]]]]:
        by_speed: defaultdict[float, list[tuple[float, int]]] = defaultdict(list)
        for rank in ranks:
            by_speed[self._links.get(rank, 1.0)].append((self._busy[rank], rank))
        for heap in by_speed.values():
            heapq.heapify(heap)
        self._heaps[ranks] = list(by_speed.items())
        return self._heaps[ranks]


class _Route(NamedTuple):
    """Move of any tensor with certain boxes, before its source is chosen among `holders`."""

    rank: int  # the destination
    box: Box
    nbytes: int
    holders: tuple[int, ...]  # ranks of the source that hold the box
    taken: Runs
    put: Runs


@functools.lru_cache(maxsize=256)
def _routes(
    held: tuple[tuple[int, Box], ...], needed: tuple[tuple[int, Box], ...], itemsize: int, bucket: int
) -> tuple[_Route, ...] | str:
    """Routes of all tensors with these boxes on both sides, computed once; or the box that nobody holds, as text."""
    pieces = _pieces(tuple(box for _, box in held), tuple(box for _, box in needed))
    if isinstance(pieces, str):
        return pieces
    # cached: replicas have the same boxes
    runs_in = functools.cache(lambda part, whole: runs(part, whole, itemsize))
    parts_of = functools.cache(lambda box: [(part, volume(part) * itemsize) for part in parts(box, bucket // itemsize)])
    ranks_of = functools.cache(lambda holders: tuple(held[j][0] for j in holders))
    routes = []
    for i, piece, holders in pieces:
        rank, target = needed[i]
        source, ranks = held[holders[0]][1], ranks_of(holders)
        routes += [
            _Route(rank, part, nbytes, ranks, runs_in(part, source), runs_in(part, target))
            for part, nbytes in parts_of(piece)
        ]
    return tuple(routes)


def _pieces(held: tuple[Box, ...], needed: tuple[Box, ...]) -> list[tuple[int, Box, tuple[int, ...]]] | str:
    """(index of the needed box, piece, indices of all `held` that hold the piece whole), for all pieces of all boxes.

    Or the box that nobody holds, as text.
    """
    groups: dict[Box, list[int]] = {}
    for j, box in enumerate(held):
        groups.setdefault(box, []).append(j)
    cut: dict[Box, list[tuple[Box, tuple[int, ...]]]] = {}
    for box in dict.fromkeys(needed):
        left, pieces = [box], []
        for other, holders in groups.items():
            if intersection(box, other) is None:
                continue
            rest = []
            for piece in left:
                shared = intersection(piece, other)
                rest += [piece] if shared is None else without(piece, shared)
                if shared is not None:
                    pieces.append((shared, tuple(holders)))
            left = rest
            if not left:
                break
        if left:
            return format_box(left[0])
        cut[box] = sorted(pieces)
    return [(i, piece, holders) for i, box in enumerate(needed) for piece, holders in cut[box]]


def parts(box: Box, most: int) -> Iterator[Box]:
    """Parts of `box` of at most `most` elements, cut along its first axes so that they stay contiguous."""
    if volume(box) <= most:
        yield box
        return
    axis = next(i for i, (begin, end) in enumerate(box) if end - begin > 1)
    begin, end = box[axis]
    inner = volume(box) // (end - begin)
    step = max(1, most // inner)
    for at in range(begin, end, step):
        yield from parts((*box[:axis], (at, min(at + step, end)), *box[axis + 1 :]), most)


def runs(box: Box, whole: Box, itemsize: int) -> Runs:
    """Runs of `box` in a contiguous array that holds `whole`, as few as possible."""
    length, stride, offset, axes, contiguous = itemsize, itemsize, 0, [], True
    for (begin, end), (first, last) in zip(reversed(box), reversed(whole)):
        offset += (begin - first) * stride
        if contiguous:
            length *= end - begin
            contiguous = end - begin == last - first
        elif end - begin > 1:
            axes.append((end - begin, stride))
        stride *= last - first
    return Runs(offset, length, tuple(reversed(axes)))


def _bucketed(moves: list[Move], bucket: int) -> list[tuple[Move, ...]]:
    """Moves in buckets, in order; a bucket ends where a rank would exceed its bound."""
    buckets: list[tuple[Move, ...]] = []
    begin = 0
    out: defaultdict[int, int] = defaultdict(int)
    into: defaultdict[int, int] = defaultdict(int)
    for at, (_, _, source, destination, nbytes, _, _) in enumerate(moves):
        if out[source] + nbytes > bucket or into[destination] + nbytes > bucket:
            buckets.append(tuple(moves[begin:at]))
            begin = at
            out.clear()
            into.clear()
        out[source] += nbytes
        into[destination] += nbytes
    return [*buckets, tuple(moves[begin:])] if moves else buckets


def _counted(buckets: list[tuple[Move, ...]], together: bool) -> Plan:
    sent: defaultdict[int, int] = defaultdict(int)
    received: defaultdict[int, int] = defaultdict(int)
    total = 0
    for bucket in buckets:
        for _, _, source, destination, nbytes, _, _ in bucket:
            total += nbytes
            if not (together and source == destination):
                sent[source] += nbytes
                received[destination] += nbytes
    return Plan(tuple(buckets), total, tuple(sorted(sent.items())), tuple(sorted(received.items())))


def execute_numpy(plan: Plan, sources: Buffers, destinations: Buffers) -> None:
    """Executes a plan between arrays, run by run, into `destinations`. The reference for every other executor."""
    for move in plan.moves:
        source = raw(sources[move.source][move.name])
        destination = raw(destinations[move.destination][move.name])
        destination[_offsets(move.put)] = source[_offsets(move.taken)]


def raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Bytes of a contiguous array. ValueError for another."""
    if not array.flags.c_contiguous:
        raise ValueError("a rank's part of a tensor must be contiguous; take numpy.ascontiguousarray")
    return array.reshape(-1).view(np.uint8)


def _offsets(runs: Runs) -> NDArray[np.int64]:
    """Offsets of all bytes of the runs, in order."""
    return (runs.starts()[:, None] + np.arange(runs.length)).reshape(-1)
