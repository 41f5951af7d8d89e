"""Who holds which part of a tree of tensors: for every tensor its shape, and for every rank the box that it holds.

Pure data, without JAX or torch: a layout is made by hand, by a rule, or from JAX's own shardings, on either side, and
`plan` says what must move from one to another. A rank's part lies in memory as one contiguous array, its last axis the
fastest.
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
"""Begin and end along every axis; () of a tensor without axes."""

Shapes: TypeAlias = Mapping[str, tuple[Sequence[int], Any]]
"""Name -> (shape, dtype), in the order of layers."""

Axis: TypeAlias = "int | Callable[[str, tuple[int, ...]], int | None] | None"
"""Along which axis to split: of all tensors, or by name and shape; None keeps a tensor whole on every rank."""


class Tensor(NamedTuple):
    """One tensor: `boxes` are (rank, what it holds), by rank; a rank that holds nothing is not there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[int, Box], ...]

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class Layout(NamedTuple):
    """Tensors in the order of layers, which is the order they are sent in."""

    tensors: tuple[Tensor, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for tensor in self.tensors for rank, _ in tensor.boxes}))

    @property
    def nbytes(self) -> int:
        """Of the whole tree, once."""
        return sum(tensor.nbytes for tensor in self.tensors)


def make(shapes: Shapes, boxes: Callable[[str, tuple[int, ...]], Iterable[tuple[int, Box]]]) -> Layout:
    """A layout whose boxes are what `boxes(name, shape)` says. Raises ValueError for one that lies outside."""
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
    """(rank, box) of those that hold something, by rank, once for all tensors that lie so; or what is wrong with it."""
    held = sorted((rank, tuple((int(a), int(b)) for a, b in box)) for rank, box in boxes)
    for rank, box in held:
        if len(box) != len(shape) or not all(0 <= a <= b <= size for (a, b), size in zip(box, shape)):
            return f"rank {rank} holds {words(box)}, which is no part of the shape {shape}"
    if len({rank for rank, _ in held}) < len(held):
        return "a rank is named twice; it holds one box of a tensor"
    return tuple(each for each in held if volume(each[1]))


def replicated(shapes: Shapes, ranks: int) -> Layout:
    """All of it on every rank, as in data-parallel training."""
    return sharded(shapes, ranks, None)


def sharded(shapes: Shapes, ranks: int, axis: Axis = 0) -> Layout:
    """Every tensor split along one axis over all ranks, as evenly as it goes, the first ones larger.

    With one axis for all it is fully-sharded training, with a rule (name, shape) -> axis or None it is tensor-parallel
    serving. What has no such axis stays whole on every rank.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks; there must be one at least")

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
    """`count` copies of a layout, rank after rank: 16 replicas of a layout of 16 ranks have 256."""
    if count < 1:
        raise ValueError(f"{count} replicas; there must be one at least")
    size = max(one.ranks, default=-1) + 1
    copied = functools.cache(lambda boxes: tuple((i * size + rank, box) for i in range(count) for rank, box in boxes))
    held = {t.name: t.boxes for t in one.tensors}
    return make({t.name: (t.shape, t.dtype) for t in one.tensors}, lambda name, _: copied(held[name]))


def of_jax(arrays: Mapping[str, Any], rank: Callable[[Any], int] | None = None) -> Layout:
    """The layout of named `jax.Array`s, or of anything with their shape, dtype and sharding.

    `rank` numbers the devices; by default it is their id.
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
    """Equal exactly where layouts are: 32 hexadecimal digits."""
    boxes = functools.cache(_digest)  # once for all tensors that lie so
    return _digest([(*tensor[:3], boxes(tensor.boxes)) for tensor in layout.tensors])


def _digest(what: object) -> str:
    return hashlib.blake2b(json.dumps(what, separators=(",", ":")).encode(), digest_size=16).hexdigest()


# -------------------------------------------------------------------------------------------------------------- boxes


def volume(box: Box) -> int:
    """Elements of a box."""
    return math.prod(end - begin for begin, end in box)


def common(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor share; None for nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
    return shared if all(a < b for a, b in shared) else None


def without(box: Box, hole: Box) -> list[Box]:
    """`box` less `hole`, which lies in it, as boxes that don't overlap."""
    left: list[Box] = []
    rest = list(box)
    for axis, ((begin, end), (a, b)) in enumerate(zip(box, hole)):
        cuts = [cut for cut in ((begin, a), (b, end)) if cut[0] < cut[1]]
        left += [(*rest[:axis], cut, *rest[axis + 1 :]) for cut in cuts]
        rest[axis] = (a, b)
    return left


def words(box: Box) -> str:
    """((0, 4), (2, 8)) -> "[0:4, 2:8]"."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"
