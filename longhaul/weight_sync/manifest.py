"""Manifest of a version: its tensors, their places in one flat image, and the digests by which they are known.

An image holds all tensors in the order of their layers, each at the start of a cache line. The manifest lists every
byte range with its xxh3-128 (Collet, xxHash), and is itself known by the digest of its text, the root: two sides with
equal roots hold the same bits. xxh3 detects damage, not malice: transports beyond one machine ask for a token.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime import bounded_json
from longhaul.weight_sync.digest import digest

LINE = 64
"""Bytes of a cache line, at whose multiples tensors begin."""

ITEMSIZES = {
    name: size
    for size, names in (
        (8, ("float64", "int64", "uint64")),
        (4, ("float32", "int32", "uint32")),
        (2, ("bfloat16", "float16", "int16", "uint16")),
        (1, ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool")),
    )
    for name in names
}
"""Bytes of an element of each dtype that can be sent."""

MAGIC = b"LHMANIF1"
DIGEST = 16
"""Bytes of a digest."""

LONGEST_NAME = 1024

METADATA = "__metadata__"
"""Name that no tensor may have: in a safetensors file it stands for a table of texts."""

MOST_DIMENSIONS = 32
LARGEST = 1 << 62
"""Bytes of an image, at most; a larger number is no honest one."""


class Tensor(NamedTuple):
    """One tensor of an image. `sharding` is a note of its producer ("" for whole), which nothing here reads."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes from the image's beginning, a multiple of LINE
    sharding: str = ""
    digest: bytes = bytes(DIGEST)  # xxh3-128 of its bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Manifest(NamedTuple):
    """A version of a run."""

    run: str
    epoch: int  # a restarted trainer has a later one
    version: int
    base: int  # version upon which it was made, -1: none
    size: int  # bytes of its image
    tensors: tuple[Tensor, ...]

    @property
    def root(self) -> bytes:
        """Digest of the whole: names, shapes, dtypes, places and every tensor's digest."""
        return digest(text(self))


def layout(named: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[tuple[Tensor, ...], int]:
    """(tensors with their places, bytes of the image) for (name, shape, dtype) in the order of layers.

    ValueError for names, shapes or dtypes that can't be.
    """
    tensors, offset = [], 0
    for name, shape, dtype in named:
        tensor = Tensor(name, tuple(shape), dtype, offset)
        _check_tensor(tensor)
        tensors.append(tensor)
        offset += -(-tensor.nbytes // LINE) * LINE
    size = max(offset, LINE)
    check(Manifest("layout", 0, 0, -1, size, tuple(tensors)))
    return tuple(tensors), size


@functools.lru_cache(maxsize=2)  # every receiver checks the same one
def check(manifest: Manifest) -> None:
    """Raises ValueError, one line, for a manifest whose names, bounds, overlaps or numbers can't be."""
    if not _is_text(manifest.run, 256) or not manifest.run:
        raise ValueError(f"manifest: the run is {manifest.run!r:.80}; a run's id has 1 to 256 printable characters")
    numbers = (("epoch", manifest.epoch, 0), ("version", manifest.version, 0), ("base", manifest.base, -1))
    for name, number, least in numbers:
        if not least <= number < LARGEST:
            raise ValueError(f"manifest: {name} is {number}; it must be at least {least} and below 2^62")
    if manifest.base >= manifest.version:
        raise ValueError(f"manifest: version {manifest.version} is made upon {manifest.base}; a base is older")
    if not 0 < manifest.size < LARGEST:
        raise ValueError(f"manifest: an image of {manifest.size} bytes; at least 1")
    names = set()
    for tensor in manifest.tensors:
        _check_tensor(tensor)
        if tensor.name in names:
            raise ValueError(f"manifest: two tensors are named {tensor.name!r}")
        names.add(tensor.name)
    end, before = 0, ""
    for tensor in sorted(manifest.tensors, key=lambda each: (each.offset, each.end)):
        if tensor.offset < end:
            raise ValueError(
                f"manifest: {tensor.name!r} begins at {tensor.offset}, within {before!r}, which ends at {end}"
            )
        end, before = tensor.end, tensor.name
    if end > manifest.size:
        raise ValueError(f"manifest: {before!r} ends at {end}, past the image's {manifest.size} bytes")


@functools.lru_cache(maxsize=2)
def text(manifest: Manifest) -> bytes:
    """Canonical text of a manifest, from which its root is computed."""
    rows = [[*tensor[:-1], tensor.digest.hex()] for tensor in manifest.tensors]
    return json.dumps({**manifest._asdict(), "tensors": rows}, sort_keys=True, separators=(",", ":")).encode()


def to_bytes(manifest: Manifest) -> bytes:
    """Magic, root, length, text: a manifest as it travels. ValueError as `check`."""
    check(manifest)
    body = text(manifest)
    return MAGIC + digest(body) + len(body).to_bytes(8, "little") + body


def from_bytes(data: bytes) -> Manifest:
    """Inverse of `to_bytes`; ValueError, one line, for any other bytes."""
    start = len(MAGIC) + DIGEST + 8
    if len(data) < start or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"no manifest: {len(data)} bytes that begin {bytes(data[:8])!r}")
    root, length = data[len(MAGIC) : len(MAGIC) + DIGEST], int.from_bytes(data[start - 8 : start], "little")
    body = data[start:]
    if len(body) != length:
        raise ValueError(f"a manifest of {length} bytes has {len(body)}: it was cut, or something follows it")
    if digest(body) != root:
        raise ValueError("a manifest whose text is not what its root says: it was damaged")
    try:
        manifest = _parsed(bounded_json.parse(body, max(bounded_json.MOST_BYTES, 16 * len(body))))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"a manifest whose text means nothing: {error}") from error
    check(manifest)
    if text(manifest) != body:
        raise ValueError("a manifest with unknown fields, or not in its canonical text")
    return manifest


def _parsed(values: Any) -> Manifest:
    if not isinstance(values, dict) or set(values) != set(Manifest._fields):
        raise ValueError("its fields are others")
    numbers = {name: _whole(values[name]) for name in ("epoch", "version", "base", "size")}
    if not isinstance(values["run"], str) or not isinstance(values["tensors"], list):
        raise ValueError("run is no text, or tensors no list")
    tensors = []
    for row in values["tensors"]:
        name, shape, dtype, offset, sharding, hexed = row
        if not all(isinstance(each, str) for each in (name, dtype, sharding, hexed)):
            raise ValueError("a name, dtype, sharding or digest is no text")
        sizes = tuple(_whole(each) for each in shape)
        tensors.append(Tensor(name, sizes, dtype, _whole(offset), sharding, bytes.fromhex(hexed)))
    return Manifest(run=values["run"], tensors=tuple(tensors), **numbers)


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise ValueError(f"{number!r:.40} is no whole number")
    return number


def _check_tensor(tensor: Tensor) -> None:
    where = f"tensor {tensor.name!r:.120}"
    if tensor.name == METADATA:
        raise ValueError(f"{where}: safetensors keeps that name for a file's own notes; give it another")
    if not _is_text(tensor.name, LONGEST_NAME) or not tensor.name:
        raise ValueError(f"{where}: a name has 1 to {LONGEST_NAME} printable characters")
    if tensor.dtype not in ITEMSIZES:
        raise ValueError(f"{where}: dtype {tensor.dtype!r:.40}; there are {', '.join(ITEMSIZES)}")
    if len(tensor.shape) > MOST_DIMENSIONS or any(not 0 <= each < LARGEST for each in tensor.shape):
        raise ValueError(f"{where}: shape {tensor.shape!s:.80}; at most {MOST_DIMENSIONS} sizes, none negative")
    if not 0 <= tensor.offset < LARGEST or tensor.offset % LINE or tensor.nbytes >= LARGEST:
        raise ValueError(f"{where}: {tensor.nbytes} bytes from {tensor.offset}; it begins at a multiple of {LINE}")
    if not _is_text(tensor.sharding, 4096):
        raise ValueError(f"{where}: its sharding is no text of at most 4096 characters")
    if len(tensor.digest) != DIGEST:
        raise ValueError(f"{where}: a digest of {len(tensor.digest)} bytes; xxh3-128 has {DIGEST}")


def _is_text(text: str, most: int) -> bool:
    return len(text) <= most and text.isprintable()


def numpy_dtype(name: str) -> np.dtype:
    """NumPy dtype of a tensor's dtype; bfloat16 and float8 are those of ml_dtypes."""
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def views(manifest: Manifest, image: np.ndarray) -> dict[str, np.ndarray]:
    """Tensors of an image by name, without a copy. `image` is uint8 [size]."""
    return {
        tensor.name: image[tensor.offset : tensor.end].view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        for tensor in manifest.tensors
    }
