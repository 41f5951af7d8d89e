"""Queue of a serving engine: requests that wait for its thread, bounded, and what it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Work = TypeVar("Work")


class QueueFull(RuntimeError):
    """Queue with as much waiting work as it may have."""


class Counters:
    """Sums since the start, written by the engine's thread alone."""

    def __init__(self) -> None:
        self.prompt_tokens = self.tokens = self.batches = self.calls = self.swaps = self.failures = 0
        self.active = 0  # rows now
        self.programs = self.compiled = 0  # kept now; made so far


class WorkQueue(Generic[Work]):
    """Requests that wait, and the thread that answers them from `start` to `close`.

    `waiting` is changed while `changed` is held, which is notified of each request and of the end.
    """

    def __init__(self, units: str, most: int, size: Callable[[Work], int]) -> None:
        """`size` is the number of `units` of a request that wait, such as completions; `most` may wait together."""
        self._units, self._most, self._size = units, most, size
        self.waiting: list[Work] = []
        self.changed = threading.Condition()
        self.closing = False
        self._thread: threading.Thread | None = None

    def start(self, answer: Callable[[], None]) -> None:
        """Begin of the thread, whose body returns when the queue is `closing` and empty."""
        self._thread = threading.Thread(target=answer, name="longhaul-serve", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def length(self) -> int:
        """Units that wait."""
        return sum(map(self._size, list(self.waiting)))

    def submit(self, work: Work) -> None:
        """Request for the thread. Raises QueueFull; RuntimeError after `close`."""
        with self.changed:
            if self.closing:
                raise RuntimeError("the server ends")
            if self.length + self._size(work) > self._most:
                raise QueueFull(f"{self.length} {self._units} wait; at most {self._most} may")
            self.waiting.append(work)
            self.changed.notify()

    def close(self) -> None:
        """End, after what was submitted is answered."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        if self._thread is not None:
            self._thread.join()


class Engine(Protocol):
    """Engine of a served run: completions of a language model, or actions of a policy."""

    @property
    def queue(self) -> WorkQueue[Any]: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def version(self) -> str: ...
