"""Ways to open each transport for the tests of weight synchronisation, and what every receiver must hold."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.manifest import Manifest
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import connect, shared_memory, tcp
from longhaul.weight_sync.transports.base import Source, Transport
from longhaul.weight_sync.transports.folder import FolderTransport

ROOT = Path(__file__).resolve().parents[2]

_number = itertools.count()


class Way(NamedTuple):
    """`serve()` opens the sender's end at the same place each time; `connect()` is a receiver's."""

    serve: Callable[[], Transport]
    connect: Callable[[], Source]
    answers: bool = True  # receivers speak with the sender: it knows them, and quorums count them


def way(kind: str, folder: Path) -> Way:
    if kind == "tcp":
        address = free_address()
        return Way(lambda: tcp.serve(address), lambda: connect(f"tcp:{address}", name="test"))
    if kind in ("folder", "chain"):
        anchor = 4 if kind == "chain" else 1
        return Way(
            lambda: FolderTransport(folder / "versions", shard=3000, durable=False, anchor=anchor),
            lambda: connect(f"folder:{folder / 'versions'}"),
            False,
        )
    name = f"@longhaul-test-{os.getpid()}-{next(_number)}"
    return Way(lambda: shared_memory.serve(name), lambda: connect(f"shm:{name}", name="test"))


def free_address() -> str:
    """An address that is free now, and that a lane may take again and again.

    Its port is below those that systems hand out (from 32,768 on), which another test may get meanwhile.
    """
    while True:
        address = "127.0.0.1", 20_000 + (64 * os.getpid() + next(_number)) % 12_000
        with suppress(OSError), socket.create_server(address):
            return f"127.0.0.1:{address[1]}"


CODEC = pytest.mark.skipif(
    find_spec("zstandard") is None or find_spec("numba") is None,
    reason="zstandard or numba, of the extra sync, is not installed",
)
"""Mark of tests in which changes are sent or written."""

KINDS = ("shared", "tcp", "folder", pytest.param("chain", marks=CODEC))


def tensors(version: int, size: int = 1000) -> dict[str, np.ndarray]:
    """Tensors of a version in the tests: every element tells the version."""
    return {
        "a": np.full((size,), version, np.int32),
        "b": np.full((7, 3), version, np.float32),
        "c": np.array(version % 251, np.uint8),
    }


def is_whole(version: int, held: object) -> bool:
    """True where the arrays are exactly those of `tensors(version)`."""
    assert isinstance(held, dict)
    wanted = tensors(version, len(held["a"]))
    return list(held) == list(wanted) and all(np.array_equal(held[name], wanted[name]) for name in wanted)


def damaged(version: Manifest, image: np.ndarray) -> list[str]:
    """Names of the tensors whose bytes do not match the manifest."""
    return [each.name for each in version.tensors if digest(image[each.offset : each.end]) != each.digest]


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for what must come; AssertionError where it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes, which does not outlive the block, nor 90 seconds: so that no silence of it hangs a test."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*command], stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as started:
        guard = threading.Timer(90, started.kill)
        guard.start()
        try:
            yield started
        finally:
            guard.cancel()
            started.kill()


@contextmanager
def receivers(way: Way, count: int = 1, **options: Any) -> Iterator[list[Receiver]]:
    made = [Receiver(way.connect, **options) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()
