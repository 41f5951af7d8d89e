"""Processes that train together, looked at from outside: who died or hangs, what that means for all, what they print.

Wherever they run, on this machine (`processes`) or a cluster (`cluster`), they are looked after by the same `watch`.
Where one dies the others abort or hang, so that a failure of one ends all.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from longhaul.runtime import heartbeat

STOPPED = 75

LINGER, HANGING, LOST = 15.0, 3.0, 0.3
"""Seconds that processes have to end after one of them did; after one failed, which the others may wait for in vain;
after one was killed, of which they can have nothing to say."""

KILLED = (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)

AWAY = 5.0
"""Seconds between two looks after which whoever looks was away itself: a laptop that slept, say."""


class Look(NamedTuple):
    """What is to be seen of one process."""

    code: int | None = None  # how it ended; negative: the signal that killed it; None: it runs, or nobody knows
    signs: bytes = b""  # of life, since the look before
    stopped: bool = False
    lost: str = ""  # what is wrong where nothing can be seen any more: it counts as dead


class Gang(Protocol):
    """The processes of one start."""

    pause: float
    """Seconds between two looks."""

    def look(self) -> list[Look]:
        """At each; what they printed is passed on meanwhile."""

    def send(self, number: int) -> None:
        """A signal to all that run."""

    def end(self) -> None:
        """No process is left after this, nor any that they started; all that they printed was passed on."""


class Death(NamedTuple):
    """How a process ended that should have gone on."""

    process: int
    code: int  # of the process; negative: the signal that killed it
    why: str = ""  # it lived, or was out of reach, and was killed for that

    def words(self) -> str:
        if self.why:
            return f"process {self.process} {self.why}"
        if self.code >= 0:
            return f"process {self.process} ended with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"process {self.process} was ended by {name}"


class Ended(NamedTuple):
    """How all processes ended."""

    codes: tuple[int | None, ...]  # None: it had to be killed
    first: Death | None  # the first that failed


class Printed:
    """Passes on what processes print: standard error with their numbers, standard output of process 0.

    The first line of the latter is the run's folder, which whoever reads all starts needs once.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._first = True

    def begin(self) -> None:
        """Before each start."""
        self._first = True

    def out(self, line: bytes) -> None:
        """A line of process 0."""
        text = line.decode(errors="replace")
        folder, first, self._first = Path(text.strip()), self._first, False
        if first and self.folder == folder:
            return
        if first:
            self.folder = folder
        print(text, end="", flush=True)

    def error(self, process: int) -> Callable[[bytes], None]:
        """What takes the lines that `process` writes to standard error."""

        def take(line: bytes) -> None:
            text = line.decode(errors="replace").rstrip("\r\n")
            sys.stderr.write(f"[{process}] {text}\n")
            sys.stderr.flush()

        return take


def watch(gang: Gang, asked: Sequence[int], deadline: float) -> Ended:
    """Waits for the end of all; passes on the signals that come to `asked`, and ends what is left when one has ended.

    `deadline`: seconds that anything but updates may take.
    """
    passed, first, until = 0, None, None  # what came during the start is passed on, too
    vigil: Vigil | None = None
    try:
        while True:
            looks = gang.look()
            codes = [look.code for look in looks]
            vigil = vigil or Vigil(len(looks), deadline, time.monotonic())
            first = first or first_to_fail(codes)
            lost = [Death(i, -signal.SIGKILL, look.lost) for i, look in enumerate(looks) if look.lost]
            if lost and (first is None or first.code == -signal.SIGABRT):  # the others abort for its sake
                first = lost[0]
                break
            if None not in codes:
                break
            if first is None:
                first = vigil.hung(looks, time.monotonic())
                if first is not None:
                    break
            if until is None and any(code is not None for code in codes):
                wait = LINGER if first is None else LOST if first.code in KILLED else HANGING
                until = time.monotonic() + wait
            if until is not None and time.monotonic() > until:
                break
            for number in asked[passed:]:
                gang.send(number)
            passed = len(asked)
            time.sleep(gang.pause)
        codes = [look.code for look in gang.look()]
    finally:
        gang.end()
    return Ended(tuple(codes), first)


class Vigil:
    """What the signs of life of some processes say."""

    def __init__(self, count: int, deadline: float, now: float):
        self._looked = now
        self._listeners = [heartbeat.Listener(now, deadline) for _ in range(count)]

    def hung(self, looks: Sequence[Look], now: float) -> Death | None:
        """A process that lives and does not go on; one that is stopped before those that wait for it."""
        away, self._looked = now - self._looked > AWAY, now
        for listener, look in zip(self._listeners, looks, strict=True):
            if look.signs:
                listener.hear(look.signs, now)
            listener.see(look.stopped, now)
            if away:
                listener.forgive(now)
        verdicts = [
            listener.verdict(now) if look.code is None else None for listener, look in zip(self._listeners, looks)
        ]
        hung = [Death(i, -signal.SIGKILL, f"{why}, and was killed") for i, why in enumerate(verdicts) if why]
        return min(hung, key=lambda death: "stopped" not in death.why, default=None)


def first_to_fail(codes: Sequence[int | None]) -> Death | None:
    """Who failed, of those that have ended; one that was killed before one that aborts because of it."""
    failed = [Death(i, code) for i, code in enumerate(codes) if code not in (None, 0, STOPPED)]
    return min(failed, key=lambda death: (death.code == -signal.SIGABRT, death.code > 0), default=None)
