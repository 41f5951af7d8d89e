"""What streams of gRPC need in Python to cost little: an event loop of their own, a reader and a writer that no task
waits for."""

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
"""Held while gRPC's bell is heard, of which a process has one for all its loops."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop for gRPC alone. gRPC rings a bell for each thing that is done, a byte into a socket, and in a turn
    of the loop it hears one ring and looks at all that is done: turns for the other rings find nothing. Here rings are
    heard together.

    Other loops of a process that uses gRPC must be of this kind, too (`run`): gRPC gives up looking where a plain one
    that it has news for is closed, and the rings for the rest have been heard."""

    def __init__(self) -> None:
        super().__init__()
        self._turning = False
        self._alarm: asyncio.TimerHandle | None = None

    def turn(self, seconds: float) -> None:
        """Runs until gRPC was heard, or for so long; 0: what is there to do, once. It may be over earlier."""
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
        """A turn that is under way ends when what is due now is done."""
        if self._turning:
            self.stop()

    def _wake(self, when: float) -> None:
        """One alarm serves many turns: setting one for each costs as much as the rest of it."""
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
            # One loop at a time: two that drain at once leave no ring for either, and what is done is not looked at.
            with _HEARING:
                try:
                    rings = len(fd.recv(4096, socket.MSG_PEEK))
                    if rings > 1:
                        fd.recv(rings - 1)
                except BlockingIOError:  # another loop of this process was faster, and looks
                    return
                callback(*args)
            self.rest()

        super().add_reader(fd, hear if isinstance(fd, socket.socket) else callback)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """Loops of one process hear each other's bell, and hand on what is another's. What is for one that is closed is
        for nobody: an error would keep gRPC from looking at the rest, for which the bell has been rung already."""

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
    """As `asyncio.run`, in a `Loop`."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work)


class Reader:
    """What a server hears in a stream: frame after frame, taken by who looks whether one is there. A task that is woken
    for each costs as much as what it does."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.until: asyncio.Future[Any] | None = None  # there is something to take when this is done, or none
        self.begin()

    def begin(self) -> None:
        """Listens for the next one. Raises where the stream is gone."""
        self._work = self._read()
        try:
            self.until = self._work.send(None)
        except StopIteration as done:
            self.until, self._found = None, done.value

    def take(self) -> Any:
        """What came; then begin again. None: nothing after all. Raises where the stream is gone."""
        if self.until is None:
            return self._found
        try:
            self.until = self._work.send(None)
        except StopIteration as done:
            return done.value
        return None

    def stop(self) -> None:
        """Nobody listens any more. The read that is under way comes to its end: gRPC writes to what it holds."""
        if self.until is not None:
            self.until.add_done_callback(self._stopped)

    def _stopped(self, until: asyncio.Future[Any]) -> None:
        if not until.cancelled():
            until.exception()  # which is no news


class Writer:
    """What is said in a stream: frame after frame, one at a time as gRPC wants it. Who says one does not wait.

    A write that is done is looked at when there is more to say: a task for each costs as much as what it does. What
    waits is bounded by the protocol: a frame for each group.
    """

    def __init__(self, write: Write, failed: Callable[[BaseException], None]) -> None:
        """`failed`: the stream is gone, which who reads may not notice."""
        self._write, self._failed = write, failed
        self._later: deque[bytes] = deque()
        self._work: Coroutine[Any, Any, None] | None = None  # the write that is under way
        self._until: asyncio.Future[Any] | None = None  # it goes on when this is done

    def say(self, frame: bytes) -> None:
        self._later.append(frame)
        self._go_on()

    def stop(self) -> None:
        """Drops what waits; the write that is under way comes to its end."""
        self._later.clear()
        self._go_on()
        if self._until is not None:
            self._until.add_done_callback(self._go_on)

    async def stopped(self) -> None:
        """The same, and waits for that end."""
        self.stop()
        while self._until is not None:
            await asyncio.wait((self._until,))
            self._go_on()

    def _go_on(self, _: Any = None) -> None:
        """Writes up to where it must wait: in a loop, for this is done for each frame."""
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
