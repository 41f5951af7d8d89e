"""A terminal of its own for a command, by tmux, and what stands on it from moment to moment."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Picture(NamedTuple):
    """A terminal's screen, first and last seen so many seconds after the watch began."""

    first: float
    last: float
    text: str


class Terminal(NamedTuple):
    socket: Path

    def tmux(self, *words: str) -> str:
        line = ["tmux", "-S", str(self.socket), "-f", os.devnull, *words]
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def watch(self, *, until: str, every: float = 0.2, timeout: float = 600.0) -> list[Picture]:
        """The pictures from now on until `until` stands there, each that differs from the one before."""
        begun, found = time.monotonic(), [Picture(0.0, 0.0, "")]
        while until not in found[-1].text:
            text, seconds = self.tmux("capture-pane", "-p"), time.monotonic() - begun
            assert seconds < timeout, f"no {until!r} within {timeout} s:\n{found[-1].text}"
            if text == found[-1].text:
                found[-1] = found[-1]._replace(last=seconds)
            else:
                found.append(Picture(seconds, seconds, text))
            time.sleep(every)
        return found


@contextmanager
def running(folder: Path, line: str, *, width: int = 100, height: int = 30) -> Iterator[Terminal]:
    """Context of a terminal in which a shell's line runs; "exit CODE" stands there when it is done."""
    terminal = Terminal(folder / "tmux")
    whole = f"trap : INT; cd {shlex.quote(str(folder))}; {line}; echo exit $?; sleep 600"
    size = ("-x", str(width), "-y", str(height))
    terminal.tmux("new-session", "-d", *size, "env", "TERM=xterm-256color", "sh", "-c", whole)
    try:
        yield terminal
    finally:
        terminal.tmux("kill-server")


def silences(pictures: list[Picture]) -> list[tuple[float, str]]:
    """(seconds that a picture was seen to stand, its text) of each picture but the last.

    Where the machine gave this process no time to look, nothing is known of the screen, and nothing is counted.
    """
    return [(each.last - each.first, each.text) for each in pictures[:-1]]
