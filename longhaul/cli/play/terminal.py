"""The terminal as a game needs it: styled lines, single keys, a screen of its own, all put back whatever happens.

Only the standard library: `termios` for single keys, and the escape sequences that every terminal of today knows
(ECMA-48; the other screen, the cursor and the wrapping of lines by DEC's private modes).
"""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from longhaul.envs.hackmatrix.screen import Line

STYLES = {
    "bold": "1", "dim": "2", "reverse": "7", "red": "31", "green": "32", "yellow": "33", "blue": "34",
    "magenta": "35", "cyan": "36",
}  # fmt: skip
"""The numbers of ECMA-48's select graphic rendition."""


ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""To the other screen without a cursor and without wrapped lines, and back."""


ESCAPE = 0x1B


ARROWS = {ord("A"): "up", ord("B"): "down", ord("C"): "right", ord("D"): "left"}


END = "end of input"


ROWS = 24
"""Rows to assume where the terminal's size is unknown."""


PATIENCE = 0.05
"""Seconds in which the rest of an arrow key's sequence comes."""


SLICE = 0.25


def plain(line: Line) -> str:
    """The text of a line, without spaces at its end."""
    return "".join(text for text, _ in line).rstrip()


def paint(line: Line) -> str:
    """A line with its styles as escape sequences."""
    painted = []
    for text, style in line:
        codes = ";".join(STYLES[word] for word in style.split())
        painted.append(f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text)
    return "".join(painted)


def has_colour() -> bool:
    """True if styles are wanted: NO_COLOR is not set."""
    return not os.environ.get("NO_COLOR")


def is_unicode(stream: TextIO) -> bool:
    """True if a stream can show what lies beyond ASCII."""
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


def decode(waiting: bytes, complete: bool) -> tuple[str | None, bytes]:
    """The next key of the bytes that a terminal sent, and the bytes after it; None where there is none yet.

    A key is its character, or "up", "down", "left", "right"; "" is one that we do not know. With `complete` nothing
    more belongs to what is there: a lone escape is then the key of that name.
    """
    if not waiting:
        return None, waiting
    if waiting[0] != ESCAPE:
        size = 1 + sum(waiting[0] >= least for least in (0xC0, 0xE0, 0xF0))  # of a character in UTF-8
        if len(waiting) < size and not complete:
            return None, waiting
        return waiting[:size].decode("utf-8", "replace")[:1], waiting[size:]
    if len(waiting) == 1 or waiting[1] not in b"[O":
        return ("", waiting[1:]) if complete or len(waiting) > 1 else (None, waiting)
    for i, byte in enumerate(waiting[2:], start=2):
        if 0x40 <= byte <= 0x7E:  # the last byte of a sequence
            return ARROWS.get(byte, "") if i == 2 else "", waiting[i + 1 :]
    return ("", b"") if complete else (None, waiting)


def _ready(descriptor: int, seconds: float | None) -> bool:
    """True if there is something to read, after so many seconds at most; None: for ever.

    In slices: a signal that comes just before the wait begins is heard at its end.
    """
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        left = SLICE if until is None else max(0.0, min(SLICE, until - time.monotonic()))
        if select.select([descriptor], [], [], left)[0]:
            return True
        if until is not None and time.monotonic() >= until:
            return False


class Screen(NamedTuple):
    """A terminal that is drawn on and asked for keys; from `screen`."""

    draw: Callable[[Sequence[Line]], None]
    key: Callable[[float | None], str | None]
    """(seconds to wait; None: for ever) -> a key, None where none came; `END` where none will come any more."""


@contextmanager
def screen(keyboard: TextIO, picture: TextIO) -> Iterator[Screen]:
    """Within it the terminal gives single keys and shows lines; after it all is as it was.

    Also after an exception, and after SIGINT, SIGTERM and SIGHUP, which then do what they did before; SIGTSTP stops
    the process with the terminal as it was, and draws again when it goes on. A signal that was ignored (SIGHUP under
    nohup) stays so.
    """
    descriptor, output = keyboard.fileno(), picture.fileno()
    before = termios.tcgetattr(descriptor)
    shown: list[Line] = []
    waiting = b""
    inside = False

    def write(text: str) -> None:
        # Not by the stream: a signal's handler must not enter its buffer while something is being written to it.
        rest = text.encode(picture.encoding or "ascii", "replace")
        while rest:
            rest = rest[os.write(output, rest) :]

    def enter() -> None:
        nonlocal inside
        inside = True
        tty.setcbreak(descriptor)
        write(ENTER)

    def leave() -> None:
        nonlocal inside
        if inside:
            inside = False
            with suppress(OSError, termios.error):  # a terminal that is gone needs nothing
                termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
                write(LEAVE)

    def draw(lines: Sequence[Line]) -> None:
        shown[:] = lines
        styled = paint if has_colour() else plain
        rows = os.get_terminal_size(output).lines or ROWS
        write("\x1b[H" + "\r\n".join(styled(line) + "\x1b[K" for line in lines[:rows]) + "\x1b[J")

    def key(seconds: float | None) -> str | None:
        nonlocal waiting
        while True:
            found, waiting = decode(waiting, complete=False)
            if found is not None:
                return found
            if not _ready(descriptor, PATIENCE if waiting else seconds):
                if not waiting:
                    return None
                found, waiting = decode(waiting, complete=True)
                return found
            more = b""
            with suppress(OSError):  # of a terminal that is gone
                more = os.read(descriptor, 1024)
            if not more:
                return END
            waiting += more

    def again() -> None:
        enter()
        draw(list(shown))

    with _signals(leave, again):
        enter()
        try:
            yield Screen(draw, key)
        finally:
            leave()


@contextmanager
def _signals(leave: Callable[[], None], again: Callable[[], None]) -> Iterator[None]:
    """Within it `leave` is called before a signal ends or stops the process, and `again` where it goes on."""
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    before: dict[int, Any] = {}

    def end(number: int, frame: Any) -> None:
        leave()
        signal.signal(number, before[number])
        signal.raise_signal(number)

    def stop(number: int, frame: Any) -> None:
        leave()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # stops here, and goes on here
        signal.signal(number, stop)
        again()

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number, handler in (*((each, end) for each in ends), (signal.SIGTSTP, stop)):
        was = signal.getsignal(number)
        if was is not signal.SIG_IGN:
            before[number] = was
            signal.signal(number, handler)
    try:
        yield
    finally:
        for changed, was in before.items():
            signal.signal(changed, was)
