"""The weights' lane: versions of a policy in shared memory, one flat buffer each; written once, read by any number.

Version v lies in place v % H, so that the H newest ones can be read. Who writes never waits: it makes the place's mark
odd, copies, and makes it even again (a sequence lock; Lameter, "Effective synchronization on Linux/NUMA systems",
2005). Who reads copies, and looks at the mark before and after; where it changed, the copy counts not. A copy that
has not the checksum it was published with (CRC-32C) is refused: nobody acts by weights that no learner made.
"""

from __future__ import annotations

from collections.abc import Iterator

import google_crc32c
import numpy as np

from longhaul.runtime.shared_memory import Leaf

PATIENCE = 1000
"""Times that a reader tries before it says that the lane is broken."""


def regions(size: int, places: int) -> Iterator[tuple[str, Leaf]]:
    """What a lane for policies of `size` bytes needs in memory."""
    yield "lane/latest", Leaf((8,), "int64")
    yield "lane/marks", Leaf((places, 8), "int64")
    yield "lane/weights", Leaf((places, size), "uint8")


class Lane:
    """`publish` belongs to one process. Bytes come out as they went in: what they mean is the caller's matter."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._latest, self._marks = arrays["lane/latest"], arrays["lane/marks"]
        self._weights = arrays["lane/weights"]

    def publish(self, version: int, weights: np.ndarray) -> None:
        """`weights` are bytes, as many as the lane is wide. Versions grow, or begin anew before anyone reads."""
        place = version % len(self._weights)
        mark = self._marks[place]
        mark[0] |= 1  # being written
        mark[1] = version
        self._weights[place] = weights
        mark[2] = _checksum(weights)
        mark[0] += 1
        self._latest[0] = version + 1

    @property
    def latest(self) -> int:
        """The newest version; -1 where there is none."""
        return int(self._latest[0]) - 1

    def held(self, version: int) -> np.ndarray:
        """A view of a version's bytes, for the one who publishes: good until it publishes as many as there are places.
        Zeros where there was no such version."""
        place = version % len(self._weights)
        if version < 0 or int(self._marks[place, 1]) != version:
            return np.zeros_like(self._weights[0])
        return self._weights[place]

    def read(self, version: int, out: np.ndarray) -> int:
        """Copies a version, or the newest where it is negative, to `out`; -> which one.

        LookupError where it is not there: it never was, has been written over, or is damaged.
        """
        for _ in range(PATIENCE):
            wanted = self.latest if version < 0 else version
            if wanted < 0:
                raise LookupError("no weights were published yet")
            place = wanted % len(self._weights)
            before, found, told = (int(word) for word in self._marks[place, :3])
            if not before & 1 and found == wanted:
                out[...] = self._weights[place]
                if int(self._marks[place, 0]) == before:
                    if _checksum(out) != told:
                        raise LookupError(f"version {wanted} of the weights is damaged: its checksum is another")
                    return wanted
            elif not before & 1 and version >= 0:
                raise LookupError(f"version {version} of the weights is not there; the newest is {self.latest}")
        raise LookupError("the weights change faster than they can be read")


def _checksum(weights: np.ndarray) -> int:
    return int(google_crc32c.value(np.ascontiguousarray(weights)))
