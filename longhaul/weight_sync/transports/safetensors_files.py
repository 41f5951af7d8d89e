"""Versions as files: safetensors in Hugging Face's naming, sharded with an index, and the manifest beside them.

A version is written into a staging folder, made durable, and renamed; so a folder with a version's name is complete. An
interrupted one continues with the shards that are complete. The format is that of safetensors (a length, a header of
JSON, the bytes); no library is needed, and no memory but the image.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime import bounded_json, files
from longhaul.weight_sync import manifest as manifests
from longhaul.weight_sync.digest import digest, hasher
from longhaul.weight_sync.manifest import Manifest, Tensor

DTYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""Names of dtypes -> those of safetensors."""

SHARD = 5 << 30
"""Bytes of a shard, at most, unless one tensor has more: the size that Hugging Face's hub prefers."""

MANIFEST, INDEX, LATEST = "manifest.longhaul", "model.safetensors.index.json", "LATEST"

LONGEST_HEADER = 100 << 20
"""Bytes of a header, at most: safetensors' own limit."""

LONGEST_MANIFEST = 256 << 20
"""Bytes of a manifest, at most: a million tensors' fits."""

Arrived = Callable[[np.ndarray, int], None]
"""Callback: this many bytes of an image are in place."""


class Damaged(LookupError):
    """Bytes that do not match the manifest."""


class Shard(NamedTuple):
    """A file and its tensors."""

    name: str
    tensors: tuple[Tensor, ...]


def shards(manifest: Manifest, most: int = SHARD) -> list[Shard]:
    """Files of a version, with its tensors in the order of the image."""
    groups: list[list[Tensor]] = [[]]
    taken = 0
    for tensor in sorted(manifest.tensors, key=lambda each: each.offset):
        if groups[-1] and taken + tensor.nbytes > most:
            groups.append([])
            taken = 0
        groups[-1].append(tensor)
        taken += tensor.nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    count = len(groups)
    return [Shard(f"model-{i:05}-of-{count:05}.safetensors", tuple(group)) for i, group in enumerate(groups, 1)]


def header(shard: Shard) -> bytes:
    """Header of a shard: its length, then names, dtypes, shapes and places."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard.tensors:
        ends = [offset, offset + tensor.nbytes]
        table[tensor.name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    body = json.dumps(table, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def folder_name(epoch: int, version: int) -> str:
    """Name of a version's folder."""
    return f"version-{epoch}-{version}"


def staging(folder: Path, manifest: Manifest) -> Path:
    """Folder into which a version is written before it has its name."""
    path = folder / f".staging-{manifest.epoch}-{manifest.version}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def stage(
    manifest: Manifest, image: np.ndarray, folder: Path, most: int = SHARD, durable: bool = True,
    beside: Mapping[str, bytes] = {},
) -> Path:  # fmt: skip
    """Writes a version into its staging folder, and returns that. Damaged where the image does not match the manifest.

    Complete shards of an interrupted attempt stay. After an OSError, only complete files are left. `beside` are further
    files (config.json), name -> content.
    """
    into = staging(folder, manifest)
    planned = shards(manifest, most)
    wanted = {shard.name for shard in planned} | {MANIFEST, INDEX}
    for path in into.iterdir():
        if path.name not in wanted:
            files.remove(path)
    for shard in planned:
        path = into / shard.name
        if not _is_whole(path, shard):
            _written(path, partial(_pour, shard=shard, image=image), durable)
    if len(planned) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in manifest.tensors)},
            "weight_map": {tensor.name: shard.name for shard in planned for tensor in shard.tensors},
        }
        write(into / INDEX, json.dumps(index, indent=1).encode(), durable)
    return closed(into, manifest, durable, beside)


def closed(into: Path, manifest: Manifest, durable: bool, beside: Mapping[str, bytes]) -> Path:
    """Adds the files beside the tensors to a staging folder, the manifest last."""
    for name, content in beside.items():
        write(into / name, content, durable)
    write(into / MANIFEST, manifests.to_bytes(manifest), durable)
    if durable:
        files.sync(into)
    return into


def write(path: Path, content: bytes, durable: bool) -> None:
    """Writes a file completely or not at all."""
    _written(path, lambda file: file.write(content), durable)


def _written(path: Path, pour: Callable[[Any], object], durable: bool) -> None:
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            pour(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _pour(file: Any, shard: Shard, image: np.ndarray) -> None:
    file.write(header(shard))
    for tensor in shard.tensors:
        data = image[tensor.offset : tensor.end]
        if digest(data) != tensor.digest:
            raise Damaged(f"tensor {tensor.name} is damaged")
        file.write(data.data if data.size else b"")


def _is_whole(path: Path, shard: Shard) -> bool:
    """True where a file is exactly this shard."""
    head = header(shard)
    try:
        if path.stat().st_size != len(head) + sum(tensor.nbytes for tensor in shard.tensors):
            return False
        with path.open("rb") as file:
            if file.read(len(head)) != head:
                return False
            for tensor in shard.tensors:
                running, left = hasher()(), tensor.nbytes
                while left:
                    data = file.read(min(left, 1 << 22))
                    if not data:
                        return False
                    running.update(data)
                    left -= len(data)
                if running.digest() != tensor.digest:
                    return False
    except OSError:
        return False
    return True


def publish(staging: Path, manifest: Manifest, durable: bool = True) -> Path:
    """Renames a staged version, and makes it the latest; returns its folder."""
    folder = staging.parent / folder_name(manifest.epoch, manifest.version)
    if os.path.lexists(folder):
        files.remove(folder)  # the same version, published before LATEST could be written
    staging.rename(folder)
    write(staging.parent / LATEST, f"{folder.name}\n".encode(), durable)
    if durable:
        files.sync(staging.parent)
    return folder


def tidy(folder: Path) -> None:
    """Removes staging folders of versions that are not newer than the latest."""
    latest = newest(folder)
    for path in folder.glob(".staging-*-*"):
        numbers = _numbers(path.name)
        if numbers and latest and numbers <= latest:
            shutil.rmtree(path, ignore_errors=True)


def versions(folder: Path) -> list[tuple[int, int]]:
    """(epoch, version) of each folder with a version's name."""
    return [numbers for path in folder.glob("version-*-*") if (numbers := _numbers(path.name))]


def newest(folder: Path) -> tuple[int, int] | None:
    """(epoch, version) of the latest version; None where there is none."""
    try:
        return _numbers((folder / LATEST).read_text().strip())
    except (OSError, UnicodeDecodeError):
        return None


def _numbers(name: str) -> tuple[int, int] | None:
    words = name.lstrip(".").split("-")
    if len(words) != 3 or not all(word.isascii() and word.isdigit() for word in words[1:]):
        return None
    return int(words[1]), int(words[2])


def read_manifest(folder: Path) -> Manifest:
    """Manifest in a version's folder. OSError, ValueError."""
    path = folder / MANIFEST
    if (size := path.stat().st_size) > LONGEST_MANIFEST:
        raise ValueError(f"{path} has {size:,} bytes; a manifest has at most {LONGEST_MANIFEST:,}")
    return manifests.from_bytes(path.read_bytes())


def read(folder: Path, manifest: Manifest, image: np.ndarray, arrived: Arrived) -> None:
    """Reads a version's files into an image, and reports progress. Damaged, OSError."""
    for name, tensors in _where(folder, manifest):
        with (folder / name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise Damaged(f"{name} has no header")
            try:
                table = bounded_json.parse(file.read(length))
                places = [table[tensor.name] for tensor in tensors]
                forms = [(place["dtype"], tuple(place["shape"])) for place in places]
                begins = [int(place["data_offsets"][0]) for place in places]
            except (ValueError, LookupError, TypeError, OverflowError) as error:
                raise Damaged(f"{name} has another header: {error}") from error
            for tensor, form, begin in zip(tensors, forms, begins, strict=True):
                if form != (DTYPES[tensor.dtype], tensor.shape) or not 0 <= begin < manifests.LARGEST:
                    raise Damaged(f"{name}: {tensor.name} has another form")
                file.seek(8 + length + begin)
                into = image[tensor.offset : tensor.end]
                if into.size and file.readinto(into.data) != into.size:
                    raise Damaged(f"{name} ends within {tensor.name}")
                arrived(image, tensor.end)
    arrived(image, manifest.size)


def _where(folder: Path, manifest: Manifest) -> Sequence[tuple[str, list[Tensor]]]:
    """Files of a version, each with its tensors in the order of the image."""
    ordered = sorted(manifest.tensors, key=lambda each: each.offset)
    if not (folder / INDEX).exists():
        return [("model.safetensors", ordered)]
    try:
        weights = bounded_json.read(folder / INDEX)["weight_map"]
        of_file: dict[str, list[Tensor]] = {}
        for tensor in ordered:
            of_file.setdefault(Path(weights[tensor.name]).name, []).append(tensor)
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{INDEX} is damaged: {error}") from error
    return list(of_file.items())
