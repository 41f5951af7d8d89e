"""Signs of life of a process that trains, and what a launcher that hears them makes of its silence.

The training loop itself gives them, at each compiled call that is done: a thread beside it would go on while it hangs.
What takes as long as it takes (starting, compiling, saving, evaluating) is announced, and has a bound of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

DESCRIPTOR = "LONGHAUL_PULSE"
"""A file descriptor that takes signs, one byte each."""

RESTS, WORKS, CALL = b"r", b"w", b"c"
"""Something else than updates begins; updates begin; a call of them is done."""

SILENCE, TIMES = 15.0, 4.0
"""Between updates so many seconds without a sign, and so many times the longest call so far, are too many."""

FROZEN = 5.0
"""Seconds that a process may be stopped (by SIGSTOP, say)."""

Tell = Callable[[bytes], None]


def teller(environment: Mapping[str, str]) -> Tell:
    """What gives signs to the launcher of this process; does nothing where there is none."""
    word = environment.get(DESCRIPTOR, "")
    if not word.isdecimal():
        return lambda sign: None
    descriptor = int(word)

    def tell(sign: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: no matter of ours
            os.write(descriptor, sign)

    with contextlib.suppress(OSError):
        os.set_blocking(descriptor, False)  # a launcher that is stopped holds up nobody
    return tell


class Listener:
    """What one process told so far, and whether it has been silent for too long. Times are seconds by one clock."""

    def __init__(self, now: float, deadline: float):
        """`deadline`: seconds that anything but updates may take."""
        self._deadline = deadline
        self._last, self._at = RESTS, now
        self._longest = 0.0
        self._calls = 0
        self._stopped: float | None = None

    def hear(self, signs: bytes, now: float) -> None:
        for sign in (signs[i : i + 1] for i in range(len(signs))):
            if sign == CALL:
                self._longest = max(self._longest, now - self._at if self._last != RESTS else 0.0)
                self._calls += 1
            self._last, self._at = sign, now

    def see(self, stopped: bool, now: float) -> None:
        """Whether the process is stopped now."""
        self._stopped = None if not stopped else now if self._stopped is None else self._stopped

    def forgive(self, now: float) -> None:
        """The listener itself was away: silence counts from now."""
        self._at = now
        self._stopped = None

    def bound(self) -> float:
        """Seconds of silence that are too many now."""
        if self._last == RESTS or not self._calls:
            return self._deadline
        return max(SILENCE, TIMES * self._longest)

    def verdict(self, now: float) -> str | None:
        """What is wrong with it, in words; None where nothing is."""
        if self._stopped is not None and now - self._stopped > FROZEN:
            return f"was stopped for {now - self._stopped:.0f} s"
        silent, bound = now - self._at, self.bound()
        if silent <= bound:
            return None
        if self._last == RESTS or not self._calls:
            return f"has not begun to train for {silent:.0f} s (--deadline {self._deadline:g})"
        return f"was silent for {silent:.0f} s; the longest call before took {self._longest:.1f} s"


def stopped(process: int) -> bool:
    """Whether the process of this id is stopped; False where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
