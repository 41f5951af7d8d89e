"""Signs of life: what silence is too long, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from longhaul.runtime import heartbeat
from longhaul.runtime.heartbeat import CALL, RESTS, WORKS, Listener


def test_before_the_first_call_is_done_the_deadline_holds() -> None:
    listener = Listener(0.0, 100.0)
    assert listener.verdict(100.0) is None
    listener.hear(WORKS, 60.0)
    assert listener.verdict(160.0) is None
    assert listener.verdict(161.0) == "has not begun to work for 101 s (deadline 100)"


def test_between_calls_fifteen_seconds_of_silence_are_too_many() -> None:
    listener = Listener(0.0, 100.0)
    listener.hear(WORKS + CALL, 10.0)
    for now in (11.0, 12.0, 14.0):
        listener.hear(CALL, now)
    assert listener.bound() == heartbeat.SILENCE == 15.0
    assert listener.verdict(29.0) is None
    assert listener.verdict(29.1) == "was silent for 15 s; its longest work before took 2.0 s"


def test_long_calls_have_a_longer_bound_and_the_first_one_counts() -> None:
    listener = Listener(0.0, 100.0)
    listener.hear(WORKS, 10.0)
    listener.hear(CALL, 20.0)
    assert listener.bound() == heartbeat.TIMES * 10.0
    listener.hear(CALL, 32.0)
    assert listener.bound() == heartbeat.TIMES * 12.0


def test_saving_has_the_deadline_and_makes_no_call_longer() -> None:
    listener = Listener(0.0, 100.0)
    listener.hear(WORKS, 0.0)
    listener.hear(CALL, 1.0)
    listener.hear(RESTS, 1.5)
    assert listener.bound() == 100.0
    assert listener.verdict(90.0) is None
    listener.hear(WORKS, 91.0)
    assert listener.bound() == 15.0
    listener.hear(CALL, 93.0)
    assert listener.bound() == 15.0
    assert listener.verdict(109.0) is not None
    listener.forgive(109.0)
    assert listener.verdict(109.0) is None


def test_a_stopped_process_is_seen_wherever_it_is() -> None:
    listener = Listener(0.0, 100.0)
    listener.see(True, 3.0)
    assert listener.verdict(8.0) is None
    listener.see(True, 9.0)
    assert listener.verdict(9.0) == "was stopped for 6 s"
    listener.see(False, 10.0)
    assert listener.verdict(10.0) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not say")
def test_the_system_says_who_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not heartbeat.stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert heartbeat.stopped(process.pid)
        process.kill()
    assert not heartbeat.stopped(process.pid)


def test_signs_go_through_a_pipe_that_nobody_need_read() -> None:
    reading, writing = os.pipe()
    tell = heartbeat.teller({heartbeat.DESCRIPTOR: str(writing)})
    for sign in (RESTS, WORKS, CALL):
        tell(sign)
    assert os.read(reading, 10) == b"rwc"
    for _ in range(100_000):  # more than a pipe holds
        tell(CALL)
    os.close(reading)
    tell(CALL)
    os.close(writing)
    heartbeat.teller({})(CALL)
