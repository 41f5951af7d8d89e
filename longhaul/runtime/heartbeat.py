"""Heartbeat of a process that trains, and the rule that separates a hang from silence.

The training loop itself sends a sign of life after each compiled call: a separate thread would go on while the loop
hangs. Starting, compiling, saving and evaluating are announced, and have a limit of their own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

DESCRIPTOR = "LONGHAUL_PULSE"
"""Environment variable: file descriptor that takes signs of life, one byte each."""

RESTS, WORKS, CALL = b"r", b"w", b"c"
"""Signs: a phase other than updates starts; updates start; one call of them is done."""

SILENCE, TIMES = 15.0, 4.0
"""Seconds of silence, and multiple of the longest work so far, after both of which a working process counts as hung.
Launched processes, actors and the inference server's actors use the same numbers."""

FROZEN = 5.0
"""Seconds that a process may be stopped, for example by SIGSTOP."""

Tell = Callable[[bytes], None]


def teller(environment: Mapping[str, str]) -> Tell:
    """Function that sends signs to the launcher of this process; without a launcher it does nothing."""
    word = environment.get(DESCRIPTOR, "")
    if not word.isdecimal():
        return lambda sign: None
    descriptor = int(word)

    def tell(sign: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            os.write(descriptor, sign)

    with contextlib.suppress(OSError):
        os.set_blocking(descriptor, False)  # a stopped launcher delays nobody
    return tell


class Silence(NamedTuple):
    """Hang rule of one process, after its signs of life so far. Times are seconds of one clock."""

    at: float  # of the last sign
    longest: float = 0.0  # seconds of its longest work so far
    resting: bool = True  # it starts, compiles or saves, without a time limit of its own
    frozen: float | None = None  # time since which it is stopped

    def bound(self, starting: float) -> float:
        """Limit of silence in seconds; `starting` applies to a resting process."""
        return starting if self.resting else max(SILENCE, TIMES * self.longest)

    def stopped(self, stopped: bool, now: float) -> Silence:
        """State after a check for a stopped process."""
        return self._replace(frozen=None if not stopped else now if self.frozen is None else self.frozen)

    def hang(self, now: float, starting: float) -> str | None:
        """Reason why the process counts as hung, else None."""
        if self.frozen is not None and now - self.frozen > FROZEN:
            return f"was stopped for {now - self.frozen:.0f} s"
        silent = now - self.at
        if silent <= self.bound(starting):
            return None
        if self.resting:
            return f"has not begun to work for {silent:.0f} s (deadline {starting:g})"
        return f"was silent for {silent:.0f} s; its longest work before took {self.longest:.1f} s"


class Listener:
    """Signs of life of one training process, and its hang rule."""

    def __init__(self, now: float, deadline: float):
        """`deadline` is the limit in seconds of phases other than updates."""
        self._deadline = deadline
        self._silence = Silence(now)
        self._rests, self._calls = True, 0

    def hear(self, signs: bytes, now: float) -> None:
        for sign in (signs[i : i + 1] for i in range(len(signs))):
            duration = now - self._silence.at if sign == CALL and not self._rests else 0.0
            self._rests, self._calls = sign == RESTS, self._calls + (sign == CALL)
            longest, resting = max(self._silence.longest, duration), self._rests or not self._calls
            self._silence = self._silence._replace(at=now, longest=longest, resting=resting)

    def see(self, stopped: bool, now: float) -> None:
        """Note of whether the process is stopped now."""
        self._silence = self._silence.stopped(stopped, now)

    def forgive(self, now: float) -> None:
        """Restart the silence after the listener itself was away."""
        self._silence = self._silence._replace(at=now, frozen=None)

    def bound(self) -> float:
        """Current limit of silence in seconds."""
        return self._silence.bound(self._deadline)

    def verdict(self, now: float) -> str | None:
        """Reason why the process counts as hung, else None."""
        return self._silence.hang(now, self._deadline)


def stopped(process: int) -> bool:
    """True if the process of this id is stopped; False if the system does not report it."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
