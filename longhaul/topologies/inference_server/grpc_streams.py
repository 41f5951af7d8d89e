"""Cheap gRPC streams in Python: an event loop of their own, and a reader and a writer without a task."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

Read = Callable[[], Coroutine[Any, Any, Any]]

Write = Callable[[bytes], Coroutine[Any, Any, None]]

_HEARING = threading.Lock()
"""Lock around reads of gRPC's wake-up socket, which all loops of a process share."""


class Loop(asyncio.SelectorEventLoop):
    """Event loop for gRPC alone. gRPC writes one byte to a socket per event; a turn of the loop reads one byte and
    handles all events, so the turns for the other bytes find nothing. This loop reads all bytes at once.

    All loops of a process that uses gRPC must be of this class (`run`). With a plain closed loop, gRPC stops handling
    events at the first one for that loop, and the bytes for the rest have been read."""

    def __init__(self) -> None:
        super().__init__()
        self._turning = False
        self._alarm: asyncio.TimerHandle | None = None

    def turn(self, seconds: float) -> None:
        """Run until a gRPC event or for `seconds`; 0: one pass over the work that is due. It may return earlier."""
        if seconds <= 0.0:
            self.call_soon(self.stop)
        else:
            self._wake(self.time() + seconds)
        self._turning = True
        try:
            self.run_forever()
        finally:
            self._turning = False

    def rest(self) -> None:
        """End the current turn after the work that is due."""
        if self._turning:
            self.stop()

    def _wake(self, when: float) -> None:
        """Set the timer, which serves many turns: a new timer each turn would double the cost of a turn."""
        if self._alarm is not None:
            if self._alarm.when() <= when:
                return
            self._alarm.cancel()
        self._alarm = self.call_at(when, self._woken)

    def _woken(self) -> None:
        self._alarm = None
        self.rest()

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        def hear() -> None:
            # One loop at a time: two that read at once would leave no byte, and the events would not be handled.
            with _HEARING:
                try:
                    rings = len(fd.recv(4096, socket.MSG_PEEK))
                    if rings > 1:
                        fd.recv(rings - 1)
                except BlockingIOError:  # another loop of this process reads the events
                    return
                callback(*args)
            self.rest()

        super().add_reader(fd, hear if isinstance(fd, socket.socket) else callback)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Callbacks for a closed loop are dropped: loops of a process read each other's events, and an error here would
        keep gRPC from handling the rest, whose bytes have been read."""

        def heard() -> None:
            callback(*args)
            self.rest()

        try:
            return super().call_soon_threadsafe(heard, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in a `Loop`."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work)


class Reader:
    """Frames received in a stream, polled by the server: waking a task for each frame would double its cost."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.until: asyncio.Future[Any] | None = None  # when done or None, `take` may return a frame
        self.begin()

    def begin(self) -> None:
        """Start to read the next frame. Raises if the stream is gone."""
        self._work = self._read()
        try:
            self.until = self._work.send(None)
        except StopIteration as done:
            self.until, self._found = None, done.value

    def take(self) -> Any:
        """Received frame, after which `begin` follows; None: no frame yet. Raises if the stream is gone."""
        if self.until is None:
            return self._found
        try:
            self.until = self._work.send(None)
        except StopIteration as done:
            return done.value
        return None

    def stop(self) -> None:
        """Stop reading. A pending read still completes, because gRPC writes to its memory."""
        if self.until is not None:
            self.until.add_done_callback(self._stopped)

    def _stopped(self, until: asyncio.Future[Any]) -> None:
        if not until.cancelled():
            until.exception()  # the end of the stream is known


class Writer:
    """Frames to send in a stream, one at a time as gRPC requires; `say` does not wait.

    A finished write is noticed at the next one: a task for each would double the cost. The protocol bounds the queue:
    one frame per group.
    """

    def __init__(self, write: Write, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called if the stream is gone: the reader may not notice."""
        self._write, self._failed = write, failed
        self._later: deque[bytes] = deque()
        self._work: Coroutine[Any, Any, None] | None = None  # the pending write
        self._until: asyncio.Future[Any] | None = None  # `_work` continues when this is done

    def say(self, frame: bytes) -> None:
        self._later.append(frame)
        self._go_on()

    def stop(self) -> None:
        """Drop the queue; a pending write still completes."""
        self._later.clear()
        self._go_on()
        if self._until is not None:
            self._until.add_done_callback(self._go_on)

    async def stopped(self) -> None:
        """Stop, and wait for the pending write."""
        self.stop()
        while self._until is not None:
            await asyncio.wait((self._until,))
            self._go_on()

    def _go_on(self, _: Any = None) -> None:
        """Write until it must wait; a loop, because this runs once per frame."""
        while (until := self._until) is None or until.done():
            if until is None:
                if not self._later:
                    return
                self._work = self._write(self._later.popleft())
            assert self._work is not None
            try:
                self._until = self._work.send(None)
            except StopIteration:
                self._work = self._until = None
            except (Exception, asyncio.CancelledError) as error:
                self._work = self._until = None
                self._later.clear()
                self._failed(error)
        if self._later:
            until.add_done_callback(self._go_on)
