"""Layouts of a tree of tensors: for every tensor its shape, and for every rank the box that it holds.

Pure data, without JAX or torch: a layout is made by hand, by a rule, or from JAX's shardings; `plan` finds the moves
from one layout to another. A rank's part is one contiguous array in memory, its last axis the fastest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 and the float8s by name)
import numpy as np

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
            return f"rank {rank} holds {words(box)}, which is no part of the shape {shape}"
    if len({rank for rank, _ in held}) < len(held):
        return "a rank is named twice; it holds one box of a tensor"
    return tuple(each for each in held if volume(each[1]))


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
        each, more = divmod(shape[along], ranks)
        cuts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
        return tuple((r, (*whole[:along], (cuts[r], cuts[r + 1]), *whole[along + 1 :])) for r in range(ranks))

    return make(shapes, boxes)


def replicas(one: Layout, count: int) -> Layout:
    """Layout of `count` copies, rank after rank: 16 replicas of a layout of 16 ranks have 256."""
    if count < 1:
        raise ValueError(f"{count} replicas; there must be at least one")
    size = max(one.ranks, default=-1) + 1
    copied = functools.cache(lambda boxes: tuple((i * size + rank, box) for i in range(count) for rank, box in boxes))
    held = {t.name: t.boxes for t in one.tensors}
    return make({t.name: (t.shape, t.dtype) for t in one.tensors}, lambda name, _: copied(held[name]))


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


def digest(layout: Layout) -> str:
    """Digest of a layout, 32 hexadecimal digits: equal exactly where layouts are equal."""
    boxes = functools.cache(_digest)  # once for all tensors with equal boxes
    return _digest([(*tensor[:3], boxes(tensor.boxes)) for tensor in layout.tensors])


def _digest(what: object) -> str:
    return hashlib.blake2b(json.dumps(what, separators=(",", ":")).encode(), digest_size=16).hexdigest()


# -------------------------------------------------------------------------------------------------------------- boxes


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return math.prod(end - begin for begin, end in box)


def common(one: Box, other: Box) -> Box | None:
    """Intersection of two boxes of one tensor; None where it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
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


def words(box: Box) -> str:
    """Text of a box: ((0, 4), (2, 8)) -> "[0:4, 2:8]"."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"
