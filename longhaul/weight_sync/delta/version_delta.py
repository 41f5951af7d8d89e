"""Changes from one version to the next as one body: a frame (`tensor_delta`) for each tensor that changed.

A body is made once for all receivers that hold the base. Every frame knows the digests of its base and of its result,
and the manifest knows those of the whole version. Where the body is not much smaller than the image, the image is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import NamedTuple, TypeAlias

import numpy as np

from longhaul.weight_sync.delta import tensor_delta
from longhaul.weight_sync.digest import PIECE, Running
from longhaul.weight_sync.manifest import ITEMSIZES, Manifest, Tensor

WORTH = 0.5
"""Share of the image's bytes above which changes are not worth their encoding."""

HEAD = struct.Struct("<IQ")
"""Number of the tensor in the manifest, bytes of its frame."""

Take: TypeAlias = Callable[[int], memoryview]
"""Reader of a body: the next so many bytes, valid until the next call."""


class Changes(NamedTuple):
    """Changes from version `base` to a later one, as they travel. No frame is longer than `most` bytes."""

    base: int
    body: bytes
    most: int


def fits(base: Manifest, manifest: Manifest) -> bool:
    """True where both have the same tensors in the same places."""
    return base.size == manifest.size and [each[:5] for each in base.tensors] == [each[:5] for each in manifest.tensors]


def make(
    base: Manifest, before: np.ndarray, manifest: Manifest, after: np.ndarray, pool: Executor | None = None
) -> Changes | None:
    """Changes between two images; None where they are not worth their encoding."""
    if not fits(base, manifest):
        return None
    parts: list[bytes] = []
    total, most, longest = 0, WORTH * sum(tensor.nbytes for tensor in manifest.tensors), HEAD.size
    for number, (old, new) in enumerate(zip(base.tensors, manifest.tensors, strict=True)):
        if old.digest == new.digest:
            continue
        place = slice(new.offset, new.end)
        frame = tensor_delta.encode(
            before[place], after[place], f"u{min(ITEMSIZES[new.dtype], 4)}", known=old.digest, pool=pool
        )
        if tensor_delta.HEAD.unpack_from(frame)[-1] != new.digest:
            return None  # the image is damaged: the receiver finds that in the whole image
        parts += [HEAD.pack(number, len(frame)), frame]
        total, longest = total + HEAD.size + len(frame), max(longest, len(frame))
        if total > most:
            return None
    return Changes(base.version, b"".join(parts), longest)


def taken(body: memoryview) -> Take:
    """Reader of a body in memory."""
    at = 0

    def take(count: int) -> memoryview:
        nonlocal at
        at += count
        return body[at - count : at]

    return take


def frames(take: Take, size: int, most: int, manifest: Manifest) -> Iterator[tuple[Tensor, memoryview]]:
    """Tensors that changed with their frames of at most `most` bytes, in the manifest's order, from a body of `size`
    bytes. ValueError where it is damaged."""
    left, last = size, -1
    while left:
        if HEAD.size > left:
            raise ValueError("the changes are cut off")
        number, length = HEAD.unpack(take(HEAD.size))
        left -= HEAD.size
        if not last < number < len(manifest.tensors) or length > min(left, most):
            raise ValueError("the changes are damaged")
        yield manifest.tensors[number], take(length)
        left, last = left - length, number


def apply(
    changed_frames: Iterator[tuple[Tensor, memoryview]],
    base: Manifest,
    before: np.ndarray,
    manifest: Manifest,
    after: np.ndarray,
    pool: Executor | None,
) -> None:
    """Writes the manifest's version to `after`, from the base in `before` and its frames. ValueError where it differs.

    Every tensor of `after` is digested on the way: nothing need be read again to verify it.
    """
    if not fits(base, manifest):
        raise ValueError(f"version {manifest.version} has another form than its base {base.version}")
    old = {tensor.name: tensor.digest for tensor in base.tensors}
    changed = set()
    for tensor, frame in changed_frames:
        place = slice(tensor.offset, tensor.end)
        if tensor_delta.read(frame).target != tensor.digest:
            raise ValueError(f"the changes make another {tensor.name} than the version has")
        tensor_delta.decode(before[place], frame, after[place], known=old[tensor.name], pool=pool)
        changed.add(tensor.name)
    for tensor in manifest.tensors:
        if tensor.name not in changed:
            running = Running(after[tensor.offset : tensor.end])
            for begin in range(tensor.offset, tensor.end, PIECE):
                end = min(begin + PIECE, tensor.end)
                after[begin:end] = before[begin:end]
                running.upto(end - tensor.offset)
            if running.end() != tensor.digest:
                raise ValueError(f"{tensor.name} is not what it was in the version before, and not among the changes")
