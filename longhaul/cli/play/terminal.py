"""The terminal as a game needs it: styled lines, single keys, a screen of its own, all put back whatever happens."""

from __future__ import annotations

import curses
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from longhaul.envs.hackmatrix.screen import Line

STYLES = {"bold": curses.A_BOLD, "dim": curses.A_DIM, "reverse": curses.A_REVERSE}

COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan")
"""Colours in the order of their numbers in ECMA-48, from 1 on."""

KEYS = {curses.KEY_UP: "up", curses.KEY_DOWN: "down", curses.KEY_RIGHT: "right", curses.KEY_LEFT: "left"}

END = "end of input"

ESCAPE_DELAY = 50
"""Milliseconds in which the rest of an arrow key's sequence comes."""

SLICE = 250
"""Milliseconds of one wait for a key: a signal that comes just before the wait is heard at its end."""

WHILE_IT_ENDS = 1.0
"""Seconds in which a thread that hears a signal ends the process."""


def plain(line: Line) -> str:
    """The text of a line, without spaces at its end."""
    return "".join(text for text, _ in line).rstrip()


def is_unicode(stream: TextIO) -> bool:
    """True if a stream can show what lies beyond ASCII."""
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


class Screen(NamedTuple):
    """A terminal that is drawn on and gives keys; made by `screen`."""

    draw: Callable[[Sequence[Line]], None]
    key: Callable[[float | None], str | None]
    """(seconds to wait; None: for ever) -> a key, None where none came; `END` where none will come any more. A key is
    its character, or "up", "down", "left", "right"; "" is one that we do not know."""


@contextmanager
def screen() -> Iterator[Screen]:
    """Within it the terminal gives single keys and shows lines; after it all is as it was.

    Also after an exception, and after SIGINT, SIGTERM and SIGHUP, which then do what they did before. curses itself
    heeds SIGTSTP. A signal that was ignored (SIGHUP under nohup) stays so. Raises ValueError for an unknown terminal.
    """
    try:
        window = curses.initscr()
    except curses.error as error:
        raise ValueError(f"TERM is {os.environ.get('TERM', '')!r} ({error}); set one that is known: xterm") from error

    def draw(lines: Sequence[Line]) -> None:
        window.erase()
        for row, line in enumerate(lines[: window.getmaxyx()[0]]):
            window.move(row, 0)
            with suppress(curses.error):  # of a line that is too long
                for text, style in line:
                    window.addstr(text, sum(styles.get(word, 0) for word in style.split()))
        window.redrawwin()
        window.refresh()

    def wait(milliseconds: float) -> str | None:
        window.timeout(max(0, math.ceil(milliseconds)))
        try:
            key = window.get_wch()
        except curses.error:
            return None
        return KEYS.get(key, "") if isinstance(key, int) else key if key.isprintable() else ""

    def key(seconds: float | None) -> str | None:
        until = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            pressed = wait(min(SLICE, 1000 * (until - time.monotonic())))
            if pressed is None and select.select([sys.stdin], [], [], 0)[0]:
                pressed = wait(0)
                return END if pressed is None else pressed  # what is ready and gives nothing is at its end
            if pressed is not None or time.monotonic() >= until:
                return pressed

    with _signals():
        try:
            styles = {} if os.environ.get("NO_COLOR") else STYLES | _colours()
            curses.cbreak()
            curses.noecho()
            curses.set_escdelay(ESCAPE_DELAY)
            window.keypad(True)
            with suppress(curses.error):  # of a terminal that always shows its cursor
                curses.curs_set(0)
            yield Screen(draw, key)
        finally:
            _leave()


def _colours() -> dict[str, int]:
    curses.start_color()
    if not curses.has_colors():
        return {}
    curses.use_default_colors()
    for number in range(1, len(COLOURS) + 1):
        curses.init_pair(number, number, -1)
    return {name: curses.color_pair(number) for number, name in enumerate(COLOURS, start=1)}


def _leave() -> None:
    if not curses.isendwin():
        with suppress(curses.error):  # of a terminal that is gone
            curses.endwin()


@contextmanager
def _signals() -> Iterator[None]:
    """Within it the terminal is put back before a signal ends the process.

    A thread that hears signals (`longhaul.runtime.signals`) is not told of one until then: it ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return

    def end(number: int, frame: Any) -> None:
        _leave()
        signal.signal(number, before[number])
        signal.set_wakeup_fd(listener, warn_on_full_buffer=False)
        signal.raise_signal(number)
        if listener != -1:
            time.sleep(WHILE_IT_ENDS)  # a key's wait would draw again

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before: dict[int, Any] = {
        number: was for number in numbers if (was := signal.getsignal(number)) is not signal.SIG_IGN
    }
    listener = signal.set_wakeup_fd(-1)
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        signal.set_wakeup_fd(listener, warn_on_full_buffer=False)
        for number, was in before.items():
            signal.signal(number, was)
