"""Ring of weights: versions of a policy in shared memory, one flat buffer each; one writer, any number of readers.

Version v lies in place v % H, so the H newest versions can be read. The writer never waits: it makes the mark of the
place odd, copies, and makes it even again (a sequence lock; Lameter, "Effective synchronization on Linux/NUMA systems",
2005). A reader copies, and repeats the copy if the mark changed meanwhile. A copy whose checksum (CRC-32C) differs from
the published one is refused, so no actor uses damaged weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import google_crc32c
import numpy as np

from longhaul.runtime.shared_memory import Leaf

PATIENCE = 1000
"""Number of copies a reader tries before it reports that the weights change too fast."""


def regions(size: int, places: int) -> Iterator[tuple[str, Leaf]]:
    """Shared arrays of a ring for policies of `size` bytes."""
    yield "weights/newest", Leaf((8,), "int64")
    yield "weights/marks", Leaf((places, 8), "int64")
    yield "weights/bytes", Leaf((places, size), "uint8")


class WeightRing:
    """`types.Weights` of flat policies, uint8 [size], between processes of one machine. Only one process publishes."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._newest, self._marks = arrays["weights/newest"], arrays["weights/marks"]
        self._weights = arrays["weights/bytes"]
        self._buffer, self._read = np.empty(0, np.uint8), -1

    def reader(self) -> WeightRing:
        """Reader of the same ring for another thread, with its own buffer."""
        return WeightRing(self._arrays)

    def publish(self, version: int, params: np.ndarray) -> None:
        """Publish `params`, uint8 [size], as `version`. Versions ascend, or restart before the first read."""
        place = version % len(self._weights)
        mark = self._marks[place]
        mark[0] |= 1  # being written
        mark[1] = version
        self._weights[place] = params
        mark[2] = _checksum(params)
        mark[0] += 1
        self._newest[0] = version + 1

    @property
    def newest(self) -> int:
        """Newest version; -1 if there is none."""
        return int(self._newest[0]) - 1

    def latest(self) -> tuple[int, np.ndarray]:
        """(version, bytes) of the newest version, in the reader's buffer; copied only if the version is new."""
        return self.at(-1)

    def at(self, version: int) -> tuple[int, np.ndarray]:
        """(version, bytes) of a version, or of the newest if it is negative."""
        wanted = self.newest if version < 0 else version
        if wanted < 0 or wanted != self._read:
            if not len(self._buffer):
                self._buffer = np.empty(self._weights.shape[1], np.uint8)
            self._read = -1  # invalid until the read is complete
            self._read = self.read(version, self._buffer)
        return self._read, self._buffer

    def held(self, version: int) -> np.ndarray:
        """View of a version's bytes, for the publisher; valid until its place is overwritten. Zeros if the version is
        absent."""
        place = version % len(self._weights)
        if version < 0 or int(self._marks[place, 1]) != version:
            return np.zeros_like(self._weights[0])
        return self._weights[place]

    def read(self, version: int, out: np.ndarray) -> int:
        """Copy a version, or the newest if it is negative, to `out`; -> the version.

        LookupError if it was never published, has been overwritten, or is damaged.
        """
        for _ in range(PATIENCE):
            wanted = self.newest if version < 0 else version
            if wanted < 0:
                raise LookupError("no weights were published yet")
            place = wanted % len(self._weights)
            before, held, checksum = (int(word) for word in self._marks[place, :3])
            if not before & 1 and held == wanted:
                out[...] = self._weights[place]
                if int(self._marks[place, 0]) == before:
                    if _checksum(out) != checksum:
                        raise LookupError(f"version {wanted} of the weights is damaged: its checksum is another")
                    return wanted
            elif not before & 1 and version >= 0:
                raise LookupError(f"version {version} of the weights is not there; the newest is {self.newest}")
        raise LookupError("the weights change faster than they can be read")


def _checksum(weights: np.ndarray) -> int:
    return int(google_crc32c.value(np.ascontiguousarray(weights)))
