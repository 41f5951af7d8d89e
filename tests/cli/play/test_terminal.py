"""Keys, styles, and a terminal that is put back however a program ends; on pseudo-terminals, without JAX."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
"""To an xterm's other screen, and back."""

KEYPAD_OFF = "\x1b>"
"""The last that is sent to put an xterm back."""

PROGRAM = """
import signal, sys
from longhaul.cli.play import terminal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by who runs in the background, and inherited
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # by nohup
with terminal.screen() as there:
    shown = 0
    while True:
        there.draw([((f"frame {shown}", "bold red"), (" text", ""))])
        key = there.key(None)
        shown += 1
        if key == "q":
            break
        if key == terminal.END:
            sys.exit(3)
        if key == "e":
            raise RuntimeError("as asked")
        there.draw([((f"key {key!r}", ""),)])
print("after", flush=True)
"""


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *words: str, session: bool = True, **variables: str):
        self.own, there = pty.openpty()
        self.before = termios.tcgetattr(there)
        self.there = there
        # Python 3.13 colours tracebacks.
        plain = {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", "PYTHON_COLORS": "0"}
        environment = os.environ | plain | variables
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=there, stdout=there, stderr=there, env=environment,
            process_group=None if session else 0, start_new_session=session,
        )  # fmt: skip
        self.text = ""

    def send(self, keys: str) -> None:
        os.write(self.own, keys.encode())

    def read(self, seconds: float) -> None:
        if select.select([self.own], [], [], seconds)[0]:
            self.text += os.read(self.own, 65536).decode("utf-8", "replace")

    def until(self, phrase: str, seconds: float = 60) -> None:
        """Reads until a text came; what came before it is forgotten."""
        end = time.monotonic() + seconds
        while phrase not in self.text:
            assert time.monotonic() < end, self.text[-2000:]
            assert self.process.poll() is None or select.select([self.own], [], [], 0)[0], self.text[-2000:]
            self.read(0.2)
        self.text = self.text[self.text.index(phrase) :]

    def end(self, seconds: float = 60) -> tuple[int, str]:
        """(exit code, the rest of the text)."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text[-2000:]
            self.read(0.05)
        while select.select([self.own], [], [], 0.05)[0]:
            self.read(0)
        return self.process.returncode, self.text

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.there) == self.before

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.own)
        os.close(self.there)


@pytest.fixture
def on_terminal() -> Iterator[Any]:
    with ExitStack() as closed:
        yield lambda *words, **options: closed.enter_context(Terminal(*words, **options))


def test_keys_reach_the_program_and_q_puts_everything_back(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM)
    there.until(ENTER)
    there.until("1m\x1b[31mframe 0")
    assert not there.is_as_before()
    for sent, key in (("\x1bOA", "up"), ("x", "x"), ("é", "é"), ("\x1b[15~", ""), ("\x1b", "")):
        there.send(sent)
        there.until(f"key {key!r}")
    there.send("q")
    code, text = there.end()
    assert code == 0
    assert LEAVE in text and text.endswith("after\r\n")
    assert there.is_as_before()


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTSTP"])
def test_a_signal_that_was_ignored_before_stays_ignored(on_terminal: Any, name: str) -> None:
    there = on_terminal("-c", PROGRAM.replace("with ", f"signal.signal(signal.{name}, signal.SIG_IGN)\nwith ", 1))
    there.until("frame 0")
    there.process.send_signal(signal.Signals[name])
    there.send("x")
    there.until("frame 1")
    assert LEAVE not in there.text
    assert not there.is_as_before()
    there.send("q")
    code, text = there.end()
    assert (code, text.count(LEAVE)) == (0, 1)
    assert there.is_as_before()


CONTROL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
"""Makes the terminal that of the process: its Ctrl-C is then a signal for it."""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
        (signal.SIGHUP, ""),
        ("\x03", "KeyboardInterrupt"),
        ("e", "RuntimeError: as asked"),
    ],
)
def test_whatever_ends_the_program_puts_everything_back(on_terminal: Any, end: Any, said: str) -> None:
    """A signal, the keyboard's own, an error; what it says comes after."""
    there = on_terminal("-c", CONTROL * (end == "\x03") + PROGRAM)
    there.until("frame 0")
    if isinstance(end, str):
        there.send(end)
    else:
        there.process.send_signal(end)
    code, text = there.end()
    assert code == 1 if end == "e" else code != 0
    assert said in text[text.index(LEAVE) :]
    assert there.is_as_before()


def test_a_thread_that_hears_signals_ends_the_program_once_everything_is_back(on_terminal: Any) -> None:
    """As in the command, where that thread does not wait for the main one."""
    listening = [
        "import os",
        "from longhaul.runtime import signals",
        "signal.signal(signal.SIGINT, lambda *_: None)",
        "with signals.watching(lambda number: (os.write(1, b'interrupted'), os._exit(4))), ",
    ]
    there = on_terminal("-c", CONTROL + PROGRAM.replace("with ", "\n".join(listening), 1))
    there.until("frame 0")
    there.send("\x03")
    code, text = there.end()
    assert code == 4
    assert text.index(LEAVE) < text.index("interrupted") and ENTER not in text
    assert there.is_as_before()


def test_a_stopped_process_leaves_the_terminal_and_draws_again_when_it_goes_on(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM, session=False)  # nobody stops the only group of a session
    there.until("frame 0")
    end = time.monotonic() + 60.0
    while LEAVE not in there.text:  # curses ignores the signal while it draws
        assert time.monotonic() < end, there.text[-2000:]
        there.process.send_signal(signal.SIGTSTP)
        for _ in range(10):
            if LEAVE not in there.text:
                there.read(0.2)
    there.until(LEAVE)
    assert os.WIFSTOPPED(os.waitpid(there.process.pid, os.WUNTRACED)[1])
    assert there.is_as_before()
    there.text = ""
    there.process.send_signal(signal.SIGCONT)
    there.until(ENTER)
    there.until("frame 0")
    assert not there.is_as_before()
    there.send("q")
    assert there.end()[0] == 0
    assert there.is_as_before()


def test_an_unknown_terminal_is_refused_with_the_remedy(on_terminal: Any) -> None:
    code, text = on_terminal("-c", PROGRAM, TERM="nonsense").end()
    assert code == 1
    assert "ValueError: TERM is 'nonsense'" in text and "set one that is known: xterm" in text


def test_no_color_is_heeded(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM, NO_COLOR="1")
    there.until("frame 0")
    there.send("q")
    _, text = there.end()
    assert text.startswith("frame 0 text")


def test_a_terminal_that_closes_ends_the_program(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM)
    there.until("frame 0")
    os.close(there.there)
    os.close(there.own)
    try:
        assert there.process.wait(20) == 3
    finally:
        there.own, there.there = pty.openpty()  # for `__exit__`
