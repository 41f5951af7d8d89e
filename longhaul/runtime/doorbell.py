"""Doorbells: how one process or thread wakes another, by a pipe. What rings twice before it is heard is heard once.

A pipe whose other end is gone says so at once, so that who waits for a process that died does not wait on.
"""

from __future__ import annotations

import contextlib
import os
import select


class Bell:
    """One who waits, any number who ring. `heard` and `ring` are the ends of a pipe; -1 where that end is elsewhere."""

    def __init__(self, heard: int, ring: int) -> None:
        self.heard, self.rings = heard, ring
        self._poll = select.poll()
        if heard >= 0:
            os.set_blocking(heard, False)
            self._poll.register(heard, select.POLLIN)
        if ring >= 0:
            os.set_blocking(ring, False)

    def ring(self) -> None:
        """Wakes the one who waits. Where the pipe is full, it has been rung; where nobody is left, nobody hears."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.rings, b"!")

    def wait(self, seconds: float) -> bool:
        """Sleeps until it rings, or for so long; -> False where nobody who could ring is left."""
        if not self._poll.poll(seconds * 1000.0):
            return True
        try:
            return bool(os.read(self.heard, 4096))
        except BlockingIOError:  # another one of us was faster
            return True

    def close(self) -> None:
        for end in (self.heard, self.rings):
            if end >= 0:
                os.close(end)
        self.heard = self.rings = -1


def bell() -> Bell:
    """A new one, with both ends."""
    return Bell(*os.pipe())
