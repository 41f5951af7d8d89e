"""Signals are heard whatever the main thread is doing: the first by whoever watches, the second ends the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUSY = """
import hashlib, os, signal, sys, threading
from longhaul.cli import main
from longhaul.runtime import signals
signals.MOMENT = 600.0
def later():
    sys.stdin.readline()
    signals.MOMENT = 0.0
    print("later", flush=True)
def work():
    threading.Thread(target=later, daemon=True).start()
    print("works", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)  # minutes in C, as in the compiler
"""


@contextmanager
def busy(program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BUSY + program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "works\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_process_that_is_in_c(number: int) -> None:
    with busy("with signals.listening(lambda line: print(line, flush=True)): work()") as process:
        process.send_signal(number)
        answer = f"{signal.Signals(number).name}: stopping after this stage; again to leave now\n"
        assert process.stdout is not None and process.stdout.readline() == answer
        process.send_signal(number)  # of the same moment
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        assert process.stdin is not None
        print(file=process.stdin, flush=True)  # the moment is over
        assert process.stdout.readline() == "later\n"
        process.send_signal(number)
        assert process.wait(60) == -number


def test_a_signal_ends_a_process_with_nothing_to_save_though_it_is_in_c() -> None:
    program = "with signals.listening() as stop: stop.leave = lambda: os._exit(75); work()"
    with busy(program) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75


def test_ctrl_c_ends_a_command_that_is_in_c_and_does_not_train() -> None:
    with busy("with main._ending_at_once(): work()") as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (1, "longhaul: error: interrupted; nothing was saved\n")


FORKS = """
import os, signal, time
from longhaul.runtime import signals
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: None)
with signals.watching(heard.append):
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not heard:
        time.sleep(0.01)
    time.sleep(0.1)
print(len(heard))
"""


def test_signals_to_a_forked_child_are_not_its_parents() -> None:
    assert subprocess.check_output([sys.executable, "-c", FORKS], text=True, timeout=20) == "1\n"
