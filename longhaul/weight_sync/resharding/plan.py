"""Plan of the moves from one layout to another, from the two layouts alone, and its execution in NumPy.

As in vLLM's sharded transfer and Perplexity's static schedule, every destination gets each of its bytes exactly once,
from one of the sources that hold it; nobody gathers a tensor. Where several sources hold copies, the one whose link
would finish first is chosen. Moves are in the order of layers, in buckets in which no rank sends or receives more than
a bound of bytes: the memory that a transfer needs for buffers.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longhaul.weight_sync.resharding import layout as layouts
from longhaul.weight_sync.resharding.layout import Box, Layout, Tensor, common, volume, without, words

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


_PLANS: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()


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
    `together`, equal ranks of both sides are one device, which takes what it has from itself. Plans are cached by the
    layouts' digests. Raises ValueError where no source holds what is needed, or shapes or dtypes differ.
    """
    largest = max((tensor.itemsize for tensor in destination.tensors), default=1)
    if bucket < largest:
        raise ValueError(f"a bucket of {bucket} bytes; it must hold at least one element, {largest} bytes")
    if links is not None and min(links.values(), default=1.0) <= 0.0:
        raise ValueError(f"a link has {min(links.values())} bytes a second; leave out ranks that can't send")
    key = (layouts.digest(source), layouts.digest(destination), *sorted((links or {}).items()), bucket, together)
    if key not in _PLANS:
        _PLANS[key] = _planned(source, destination, dict(links or {}), bucket, together)
        while len(_PLANS) > REMEMBERED:
            _PLANS.popitem(last=False)
    _PLANS.move_to_end(key)
    return _PLANS[key]


def _planned(source: Layout, destination: Layout, links: dict[int, float], bucket: int, together: bool) -> Plan:
    there = {tensor.name: tensor for tensor in source.tensors}
    choose = _Chooser(links)
    moves: list[Move] = []
    for needed in destination.tensors:
        held = _matching(there.get(needed.name), needed)
        parts = _class(held.boxes, needed.boxes, needed.itemsize, bucket)
        if isinstance(parts, str):
            raise ValueError(f"{needed.name}: no source holds {parts}, which a destination needs")
        name = needed.name
        for rank, box, nbytes, holders, taken, put in parts:
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


class _Part(NamedTuple):
    """Move of any tensor of a class, without its source."""

    rank: int  # the destination
    box: Box
    nbytes: int
    holders: tuple[int, ...]
    taken: Runs
    put: Runs


@functools.lru_cache(maxsize=256)
def _class(
    held: tuple[tuple[int, Box], ...], needed: tuple[tuple[int, Box], ...], itemsize: int, bucket: int
) -> tuple[_Part, ...] | str:
    """Parts of all tensors with these boxes on both sides, computed once; or the box that nobody holds, as text."""
    pieces = _pieces(tuple(box for _, box in held), tuple(box for _, box in needed))
    if isinstance(pieces, str):
        return pieces
    places = functools.cache(lambda part, whole: runs(part, whole, itemsize))  # replicas have the same ones
    cuts = functools.cache(lambda box: [(part, volume(part) * itemsize) for part in _parts(box, bucket // itemsize)])
    ranks = functools.cache(lambda holders: tuple(held[j][0] for j in holders))
    parts = []
    for i, box, holders in pieces:
        rank, mine = needed[i]
        theirs, whose = held[holders[0]][1], ranks(holders)
        parts += [
            _Part(rank, part, nbytes, whose, places(part, theirs), places(part, mine)) for part, nbytes in cuts(box)
        ]
    return tuple(parts)


def _matching(held: Tensor | None, needed: Tensor) -> Tensor:
    if held is None:
        raise ValueError(f"{needed.name}: no source holds a tensor of this name")
    for what in ("shape", "dtype"):
        ours, theirs = getattr(held, what), getattr(needed, what)
        if ours != theirs:
            raise ValueError(f"{needed.name}: {what} {ours} at the source, {theirs} at the destination; cast it first")
    return held


def _pieces(held: tuple[Box, ...], needed: tuple[Box, ...]) -> list[tuple[int, Box, tuple[int, ...]]] | str:
    """(index of the needed box, piece, indices of all `held` that hold the piece whole), for all pieces of all boxes.

    Or the box that nobody holds, as text.
    """
    groups: dict[Box, list[int]] = {}
    for j, box in enumerate(held):
        groups.setdefault(box, []).append(j)
    cut: dict[Box, list[tuple[Box, tuple[int, ...]]]] = {}
    for box in dict.fromkeys(needed):
        left, found = [box], []
        for other, holders in groups.items():
            if common(box, other) is None:
                continue
            rest = []
            for piece in left:
                shared = common(piece, other)
                rest += [piece] if shared is None else without(piece, shared)
                if shared is not None:
                    found.append((shared, tuple(holders)))
            left = rest
            if not left:
                break
        if left:
            return words(left[0])
        cut[box] = sorted(found)
    return [(i, piece, holders) for i, box in enumerate(needed) for piece, holders in cut[box]]


def _parts(box: Box, most: int) -> Iterator[Box]:
    """Parts of `box` of at most `most` elements, cut along its first axes so that they stay contiguous."""
    if volume(box) <= most:
        yield box
        return
    axis = next(i for i, (begin, end) in enumerate(box) if end - begin > 1)
    begin, end = box[axis]
    inner = volume(box) // (end - begin)
    step = max(1, most // inner)
    for at in range(begin, end, step):
        yield from _parts((*box[:axis], (at, min(at + step, end)), *box[axis + 1 :]), most)


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


def execute_numpy(what: Plan, sources: Buffers, destinations: Buffers) -> None:
    """Executes a plan between arrays, run by run, into `destinations`. The reference for every other executor."""
    for move in what.moves:
        taken = _raw(sources[move.source][move.name])
        put = _raw(destinations[move.destination][move.name])
        packed = taken[_places(move.taken)]
        put[_places(move.put)] = packed


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not array.flags.c_contiguous:
        raise ValueError("a rank's part of a tensor must be contiguous")
    return array.reshape(-1).view(np.uint8)


def _places(of: Runs) -> NDArray[np.int64]:
    """Offsets of all bytes of the runs, in order."""
    return (of.starts()[:, None] + np.arange(of.length)).reshape(-1)
