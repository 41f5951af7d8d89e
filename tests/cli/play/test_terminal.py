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
from typing import Any

import pytest

from longhaul.cli.play.terminal import ENTER, LEAVE, decode, paint, plain

PROGRAM = """
import signal, sys
from longhaul.cli.play import terminal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by who runs in the background, and inherited
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # by nohup
with terminal.screen(sys.stdin, sys.stdout) as there:
    shown = 0
    while True:
        there.draw([((f"frame {shown}", "bold red"), (" text", ""))])
        key = there.key(None)
        shown += 1
        if key == "q":
            break
        if key == "e":
            raise RuntimeError("as asked")
        there.draw([((f"key {key!r}", ""),)])
print("after", flush=True)
"""


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, command: list[str], session: bool = True, **variables: str):
        self.own, there = pty.openpty()
        self.before = termios.tcgetattr(there)
        self.there = there
        environment = os.environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | variables
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env=environment, process_group=None if session else 0,
            start_new_session=session,
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

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.own)
        os.close(self.there)


@pytest.fixture
def on_terminal() -> Iterator[Any]:
    made: list[Terminal] = []

    def start(*words: str, **options: Any) -> Terminal:
        made.append(Terminal([sys.executable, *words], **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("waiting", "complete", "key", "rest"),
    [
        (b"", True, None, b""),
        (b"ab", False, "a", b"b"),
        (b"\x1b[A", False, "up", b""),
        (b"\x1bOBx", False, "down", b"x"),
        (b"\x1b[C\x1b[D", False, "right", b"\x1b[D"),
        (b"\x1b[D", False, "left", b""),
        (b"\x1b", False, None, b"\x1b"),
        (b"\x1b", True, "", b""),
        (b"\x1b[", False, None, b"\x1b["),
        (b"\x1b[", True, "", b""),
        (b"\x1bq", False, "", b"q"),
        (b"\x1b[15~q", False, "", b"q"),
        (b"\x1b[1;5Aq", False, "", b"q"),
        ("é!".encode(), False, "é", b"!"),
        ("é".encode()[:1], False, None, "é".encode()[:1]),
        (b"\xff\xff\xff\xffq", False, "\ufffd", b"q"),
    ],
)
def test_keys_of_what_a_terminal_sends(waiting: bytes, complete: bool, key: str | None, rest: bytes) -> None:
    assert decode(waiting, complete) == (key, rest)


def test_any_bytes_become_keys_and_nothing_is_left() -> None:
    import random

    chance = random.Random(0)
    for _ in range(300):
        waiting = bytes(chance.choice(b"\x1b[OABq1;~\xc3\xa9\xf0x") for _ in range(chance.randrange(1, 12)))
        for _ in range(len(waiting) + 1):
            key, rest = decode(waiting, complete=True)
            assert (key is None) == (waiting == b"")
            assert len(rest) < len(waiting) or not waiting
            waiting = rest
        assert waiting == b""


def test_styles() -> None:
    line = (("a", "bold red"), ("b", ""), ("", "dim"), ("  ", "dim"))
    assert plain(line) == "ab"
    assert paint(line) == "\x1b[1;31ma\x1b[0mb\x1b[2m  \x1b[0m"


def test_keys_reach_the_program_and_q_puts_everything_back(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM)
    there.until(ENTER)
    there.until("\x1b[1;31mframe 0\x1b[0m text")
    assert not there.is_as_before()
    there.send("\x1b[A")
    there.until("key 'up'")
    there.send("x")
    there.until("key 'x'")
    there.send("q")
    code, text = there.end()
    assert code == 0
    assert text.endswith(LEAVE + "after\r\n")
    assert there.is_as_before()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_puts_everything_back_and_ends_the_process(on_terminal: Any, number: signal.Signals) -> None:
    there = on_terminal("-c", PROGRAM)
    there.until("frame 0")
    there.process.send_signal(number)
    code, text = there.end()
    assert code != 0
    assert LEAVE in text
    assert there.is_as_before()


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTSTP"])
def test_what_was_ignored_changes_nothing(on_terminal: Any, name: str) -> None:
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


def test_ctrl_c_puts_everything_back(on_terminal: Any) -> None:
    """The keyboard's own way: the terminal makes the signal of it, for the process that it controls."""
    program = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + PROGRAM
    there = on_terminal("-c", program)
    there.until("frame 0")
    there.send("\x03")
    code, text = there.end()
    assert code != 0
    assert LEAVE in text
    assert "KeyboardInterrupt" in text
    assert there.is_as_before()


def test_an_error_puts_everything_back_before_it_is_told(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM)
    there.until("frame 0")
    there.send("e")
    code, text = there.end()
    assert code == 1
    assert text.index(LEAVE) < text.index("RuntimeError: as asked")
    assert there.is_as_before()


def test_a_stopped_process_leaves_the_terminal_and_draws_again_when_it_goes_on(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM, session=False)  # nobody stops the only group of a session
    there.until("frame 0")
    there.process.send_signal(signal.SIGTSTP)
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


def test_no_color_is_heeded(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM, NO_COLOR="1")
    there.until("frame 0")
    there.send("q")
    _, text = there.end()
    assert "\x1b[1;31m" not in text
    assert text.startswith("frame 0 text")


def test_a_terminal_that_closes_ends_the_program(on_terminal: Any) -> None:
    there = on_terminal("-c", PROGRAM)
    there.until("frame 0")
    os.close(there.there)
    os.close(there.own)
    try:
        assert there.process.wait(60) != 0
    finally:
        there.own, there.there = pty.openpty()  # for `close`
