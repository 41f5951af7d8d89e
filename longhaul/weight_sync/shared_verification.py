"""One verification for all processes that map one image: each notes what it has digested, and the others believe it.

Sound, because they have the same pages of memory, which the kernel lets none of them write: what one process read
there is what all of them serve. A note is made of the digest that was *found* and of the version's root, so that there
is none for what is damaged, none that was meant for another version believed, and none that was torn. Notes are
believed for as long as a version may take to be staged: who comes later reads for himself. Who dies holds up nobody
for long, since whoever waits for a note does the work himself in the end. The notes are in memory that all of them
write; they are processes of one user, which could do one another anything as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from longhaul.weight_sync.digest import digest as digests
from longhaul.weight_sync.manifest import Manifest, Tensor, digest

ROWS = 1024
ROW = np.dtype([("claim", "u8"), ("at", "u8"), ("note", "u1", 16)])
SIZE = ROWS * ROW.itemsize
"""Bytes of the notes of an image."""

PORTION = 4 << 20
"""Bytes, at least, that are verified for one note."""

POLL = 0.0005
"""Seconds between two looks at what others do."""

PATIENCE, SLOWER = 0.02, 4.0
"""Seconds, and times what it would take us, until we do what another has begun: where cores are few he may have none
for a while, and then reading it twice would only take what he waits for."""


class Ledger(NamedTuple):
    """The notes of an image. `turn` tells receivers apart: from it follows where each begins."""

    rows: np.ndarray  # ROW [ROWS]
    turn: int


def ledger(memory: np.ndarray, turn: int) -> Ledger:
    """Over shared memory, uint8 [SIZE], of zeros at first."""
    return Ledger(memory.view(ROW), turn)


def portions(manifest: Manifest) -> list[list[Tensor]]:
    """The tensors in the order in which they lie, in groups of a note each."""
    least = max(PORTION, 2 * manifest.size // ROWS)
    found: list[list[Tensor]] = []
    size = least
    for tensor in sorted(manifest.tensors, key=lambda each: each.offset):
        if size >= least:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.nbytes
    return found


def verify(
    manifest: Manifest, image: np.ndarray, shared: Ledger, seconds: float, pool: ThreadPoolExecutor, parts: int
) -> list[str]:
    """The names of tensors whose bytes are not what the manifest says, as `images.verify`, each read by one of those
    who share the image. `seconds` is how old a note may be; in `parts` threads."""
    root, groups = manifest.root, portions(manifest)
    turns = range(shared.turn * parts, (shared.turn + 1) * parts)
    walks = [_Walk(image, shared.rows, root, groups, turn, seconds) for turn in turns]
    found = [walks[0]()] if parts == 1 else list(pool.map(lambda walk: walk(), walks))
    return sorted({name for names in found for name in names})


class _Walk:
    """One thread's way over an image: what nobody has begun, then what nobody has ended."""

    def __init__(
        self, image: np.ndarray, rows: np.ndarray, root: bytes, groups: list[list[Tensor]], turn: int, seconds: float
    ) -> None:
        self._image, self._rows, self._root, self._portions = image, rows, root, groups
        self._claim = int.from_bytes(digest(root)[:8], "little")
        self._life = int(seconds * 1e9)
        self._order = order(len(groups), turn)
        self._read, self._took = 0, 0.0
        self._damaged: list[str] = []

    def __call__(self) -> list[str]:
        begun = [at for at in self._order if not self._done(at) and not self._first(at)]
        left = sorted(begun, key=self._bytes)
        until = time.monotonic() + PATIENCE + SLOWER * self._expected(left)
        while left and time.monotonic() < until:
            time.sleep(POLL)
            left = [at for at in left if not self._done(at)]
        for at in left:
            if not self._done(at):
                self._verify(at)
        return self._damaged

    def _first(self, at: int) -> bool:
        """Verifies a portion unless somebody has begun it."""
        row = self._rows[at]
        if row["claim"] == self._claim:
            return False
        row["claim"] = self._claim
        self._verify(at)
        return True

    def _verify(self, at: int) -> None:
        began = time.perf_counter()
        found = [digests.digest(self._image[each.offset : each.end]) for each in self._portions[at]]
        self._took += time.perf_counter() - began
        self._read += self._bytes(at)
        row, now = self._rows[at], time.monotonic_ns()
        row["at"], row["note"] = now, np.frombuffer(self._note(now, found), np.uint8)
        self._damaged += [each.name for each, got in zip(self._portions[at], found, strict=True) if got != each.digest]

    def _done(self, at: int) -> bool:
        """Whether somebody has found the digests of a portion that it should have."""
        row = self._rows[at]
        now = int(row["at"])
        if not 0 <= time.monotonic_ns() - now <= self._life:
            return False
        return row["note"].tobytes() == self._note(now, [each.digest for each in self._portions[at]])

    def _note(self, now: int, found: Sequence[bytes]) -> bytes:
        return digest(b"".join([self._root, now.to_bytes(8, "little"), *found]))

    def _bytes(self, at: int) -> int:
        return sum(each.nbytes for each in self._portions[at])

    def _expected(self, left: Sequence[int]) -> float:
        """Seconds in which others should end what they have begun, if they are as fast as we were."""
        pace = self._took / self._read if self._read else 1e-9
        return pace * max(map(self._bytes, left), default=0)


def order(count: int, turn: int) -> list[int]:
    """The order in which the receiver with a turn goes over portions: the first from the beginning on, the second from
    the end, the others so from places between, so that they meet late."""
    begin = int(count * (turn // 2 * 0.618 % 1.0))
    row = [*range(begin, count), *range(begin)]
    return row[::-1] if turn % 2 else row
