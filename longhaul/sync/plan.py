"""What must move from one layout to another: planned once, from nothing but the two layouts, and tested in NumPy.

As vLLM's sharded transfer and Perplexity's static schedule do, every destination gets each of its bytes exactly once,
from one of the sources that hold it; nobody gathers a tensor. Where sources hold copies, the one whose link would be
done first is taken. Moves stand in the order of layers, in buckets in which no rank sends or receives more than so many
bytes: what a transfer needs of memory for buffers.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longhaul.sync import layout as layouts
from longhaul.sync.layout import Box, Layout, Tensor, common, volume, without, words

BUCKET = 256 * 10**6
"""Bytes that a rank sends or receives in a bucket, at most."""

REMEMBERED = 16
"""Plans that are kept."""

Buffers: TypeAlias = Mapping[int, Mapping[str, NDArray[Any]]]
"""rank -> tensor's name -> the rank's box of it, contiguous."""


class Runs(NamedTuple):
    """Where a box lies in a rank's part of a tensor: runs of `length` bytes from `offset` on, repeated along axes."""

    offset: int
    length: int
    axes: tuple[tuple[int, int], ...]  # (how often, stride in bytes), the last the fastest

    def starts(self) -> NDArray[np.int64]:
        """Where each run begins, in order."""
        found = np.array([self.offset], np.int64)
        for count, stride in self.axes:
            found = (found[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return found


class Move(NamedTuple):
    """One box of a tensor from one rank to another; the runs of both sides hold the same bytes in the same order."""

    name: str
    box: Box  # of the whole tensor
    source: int
    destination: int
    nbytes: int
    taken: Runs  # from the source's part
    put: Runs  # into the destination's


class Plan(NamedTuple):
    """All moves, in buckets, in the order of layers."""

    buckets: tuple[tuple[Move, ...], ...]
    nbytes: int  # that move, those that stay on a rank included
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
    """The moves that make of `source` what `destination` asks for, and no others.

    `links` are the sources' links in bytes a second (only their ratios count; 1 where a rank has none). With
    `together`, equal ranks of both sides are one device: what it has already it takes from itself. Plans are remembered
    by the layouts' digests. Raises ValueError where no source holds what is needed, or shapes or dtypes differ.
    """
    largest = max((tensor.itemsize for tensor in destination.tensors), default=1)
    if bucket < largest:
        raise ValueError(f"a bucket of {bucket} bytes; it must hold one element at least, {largest} bytes")
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
    busy: defaultdict[int, float] = defaultdict(float)  # seconds until a source's link is free
    moves: list[Move] = []
    for needed in destination.tensors:
        held = _matching(there.get(needed.name), needed)
        pieces = _pieces(tuple(box for _, box in held.boxes), tuple(box for _, box in needed.boxes))
        if isinstance(pieces, str):
            raise ValueError(f"{needed.name}: no source holds {pieces}, which a destination needs")
        at = dict(held.boxes)
        for i, box, holders in pieces:
            rank, mine = needed.boxes[i]
            ranks = [held.boxes[j][0] for j in holders]
            for part in _parts(box, bucket // needed.itemsize):
                nbytes = volume(part) * needed.itemsize
                if together and rank in ranks:
                    best = rank
                else:
                    best = min(ranks, key=lambda r: (busy[r] + nbytes / links.get(r, 1.0), r))
                    busy[best] += nbytes / links.get(best, 1.0)
                taken, put = (runs(part, whole, needed.itemsize) for whole in (at[best], mine))
                moves.append(Move(needed.name, part, best, rank, nbytes, taken, put))
    return _counted(_bucketed(moves, bucket), together)


def _matching(held: Tensor | None, needed: Tensor) -> Tensor:
    if held is None:
        raise ValueError(f"{needed.name}: no source holds a tensor of this name")
    for what in ("shape", "dtype"):
        ours, theirs = getattr(held, what), getattr(needed, what)
        if ours != theirs:
            raise ValueError(f"{needed.name}: {what} {ours} at the source, {theirs} at the destination; cast it first")
    return held


@functools.lru_cache(maxsize=256)
def _pieces(held: tuple[Box, ...], needed: tuple[Box, ...]) -> list[tuple[int, Box, tuple[int, ...]]] | str:
    """Cuts every needed box into pieces that one source holds whole; the same for all layers of one shape.

    -> (index of the needed box, piece, indices of all `held` that hold it); or what nobody holds, in words.
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
    """`box` in parts of at most `most` elements, cut along its first axes so that they stay contiguous."""
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
    """Where `box` lies in a contiguous array that holds `whole`, in the fewest runs."""
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
    """In order, each bucket as full as the first rank that would have too much allows."""
    buckets: list[tuple[Move, ...]] = []
    now: list[Move] = []
    load: defaultdict[tuple[str, int], int] = defaultdict(int)
    for move in moves:
        ends = (("source", move.source), ("destination", move.destination))
        if any(load[end] + move.nbytes > bucket for end in ends):
            buckets.append(tuple(now))
            now, load = [], defaultdict(int)
        now.append(move)
        for end in ends:
            load[end] += move.nbytes
    return [*buckets, tuple(now)] if now else buckets


def _counted(buckets: list[tuple[Move, ...]], together: bool) -> Plan:
    sent: defaultdict[int, int] = defaultdict(int)
    received: defaultdict[int, int] = defaultdict(int)
    total = 0
    for move in (move for bucket in buckets for move in bucket):
        total += move.nbytes
        if not (together and move.source == move.destination):
            sent[move.source] += move.nbytes
            received[move.destination] += move.nbytes
    return Plan(tuple(buckets), total, tuple(sorted(sent.items())), tuple(sorted(received.items())))


def execute_numpy(what: Plan, sources: Buffers, destinations: Buffers) -> None:
    """Carries out a plan between arrays, run by run: what every other executor must equal. Destinations are written."""
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
    """The places of all bytes of the runs, in order."""
    return (of.starts()[:, None] + np.arange(of.length)).reshape(-1)
