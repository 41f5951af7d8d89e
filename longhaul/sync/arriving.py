"""An image on its way: how much of it is in place, for who sends it on before all of it is.

Who makes an image may also send it himself, piece by piece, while his cache has them (`carries`): what another thread
reads later it reads from memory, which costs a sender on a busy machine a quarter of its time. So that the cache still
has them, he waits for those whom he sends them to, but not for who is slow: what those lack they are sent from memory.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from longhaul.sync.manifest import Manifest

GRACE = 1.0
"""Seconds that one receiver may hold up who makes an image, beyond what its bytes take at the slowest rate."""

SLOWEST = 500e6
"""Bytes a second: a network of 10 Gb/s does more, and on a slower one it does not matter where bytes come from."""


class Sink:
    """A socket that whoever makes an image sends it to; `ended` when he sends no more, `done` of its bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.done = sock, 0
        self._spent, self._allowed = 0.0, 0.0  # seconds, and those that a call was last allowed
        self.ended = threading.Event()

    def push(self, piece: memoryview) -> bool:
        """Sends what comes next; False where that took too long, or can't be."""
        began, due = time.monotonic(), self.done + len(piece)
        try:
            while self.done < due:
                left = GRACE + due / SLOWEST - self._spent - (time.monotonic() - began)
                if left <= 0:
                    return False
                if not left <= self._allowed <= left + GRACE / 4:  # setting it takes a system call
                    self._allowed = left + GRACE / 4
                    self._sock.settimeout(self._allowed)
                self.done += self._sock.send(piece[len(piece) - (due - self.done) :])
        except OSError:  # whoever serves it will find out what it is
            return False
        finally:
            self._spent += time.monotonic() - began
        return True


class Arriving:
    """How much of an image is in place. `counts` says whether its version does, as soon as that is known; where it was
    offered by its form alone, its `manifest` comes at the end. `carries` is whether who makes it sends it, too."""

    def __init__(self, carries: bool = False) -> None:
        self.counts: bool | None = None
        self.manifest: Manifest | None = None
        self._carries, self._count, self._broken = carries, 0, False
        self._met, self._sinks = 0, list[Sink]()
        self._changed = threading.Condition()

    # -------------------------------------------------------------------------------------------- for who makes it

    def meet(self, count: int, seconds: float) -> None:
        """Waits until so many have come who send it on, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._met >= count, seconds)

    def told(self, count: int) -> None:
        """The first `count` bytes are in place, and will not change."""
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def passed(self, piece: memoryview) -> None:
        """The next bytes are in place; `piece` are the same, and may be in a cache. Those who wait for them are sent
        them."""
        with self._changed:
            self._count += len(piece)
            sinks = list(self._sinks)
            self._changed.notify_all()
        for sink in sinks:
            if not sink.push(piece):
                with self._changed:
                    self._sinks = [each for each in self._sinks if each is not sink]
                sink.ended.set()

    def known(self, manifest: Manifest) -> None:
        """All is in place, and these are its digests."""
        with self._changed:
            self.manifest = manifest
            self._end()

    def broken(self) -> None:
        """No more will come."""
        with self._changed:
            self._broken = True
            self._end()

    def _end(self) -> None:
        for sink in self._sinks:
            sink.ended.set()
        self._sinks = []
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------- for who sends it on

    def carried(self, sock: socket.socket | None, seconds: float) -> int:
        """How many bytes whoever makes the image has sent to `sock`, when he sends no more: none where he had begun
        before, or does not send. TimeoutError; ConnectionError where no more come."""
        with self._changed:
            joins = sock is not None and self._carries and not self._count and self.manifest is None
            sink = Sink(sock) if sock is not None and joins else None
            self._sinks += [] if sink is None else [sink]
            self._met += 1
            self._changed.notify_all()
        if sink is None:
            return 0
        if not sink.ended.wait(max(0.0, seconds)):
            raise TimeoutError("the image that is being made does not come")
        self._check()
        return sink.done

    def beyond(self, count: int, seconds: float) -> int:
        """How many bytes are in place, once they are more than `count`. TimeoutError; ConnectionError where no more
        come."""
        with self._changed:
            self._wait(lambda: self._count > count, seconds)
            return self._count

    def whole(self, seconds: float) -> Manifest:
        """The manifest, once it is known. TimeoutError; ConnectionError where it will not be."""
        with self._changed:
            self._wait(lambda: self.manifest is not None, seconds)
            assert self.manifest is not None
            return self.manifest

    def _wait(self, what: Callable[[], bool], seconds: float) -> None:
        if not self._changed.wait_for(lambda: self._broken or what(), max(0.0, seconds)):
            raise TimeoutError("the image that is passed on does not come")
        self._check()

    def _check(self) -> None:
        if self._broken:
            raise ConnectionAbortedError("the image that is passed on was withdrawn")
