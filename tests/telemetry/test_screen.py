"""Stages with their bars, the dashboard, plain lines."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TextIO

import numpy as np
import pytest

from longhaul.telemetry import screen


def record(update: int, **metrics: Any) -> dict[str, Any]:
    counts = {"update": update, "env_steps": 10 * update, "agent_steps": 20 * update, "wall_seconds": 0.5 * update}
    return {**counts, "sps": 40.0, **metrics}


def test_without_a_terminal_a_record_is_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    shown = screen.console(120_000, stream, clock=itertools.count(0.0, 2.0).__next__)
    for update in range(3):
        steps = 20_000 * (update + 1)
        shown.write({**record(update, **{"episode/return": np.float32(12.345678)}), "agent_steps": steps, "sps": 999.6})
    shown.note("saved\x1b[1m checkpoint\r\n3")
    shown.close()
    assert stream.getvalue().split("\n") == [
        "20,000 of 120,000 agent steps (16.7%)  1,000/s  1:40 min left  return 12.35",
        "40,000 of 120,000 agent steps (33.3%)  10,000/s  8 s left  return 12.35",
        "60,000 of 120,000 agent steps (50.0%)  10,000/s  6 s left  return 12.35",
        "saved [1m checkpoint  3",
        "",
    ]


def test_a_missing_or_undefined_return_is_not_shown() -> None:
    stream = io.StringIO()
    shown = screen.console(100, stream, clock=lambda: 0.0)
    shown.write(record(1))
    shown.write(record(2, **{"episode/return": float("nan")}))
    shown.write({**record(3), "sps": 0.0})
    shown.write(record(4, **{"ppo/entropy": 1.2345, "ppo/approx_kl": 0.00123456, "ppo/clip_fraction": float("nan")}))
    assert stream.getvalue().split("\n") == [
        "20 of 100 agent steps (20.0%)  40/s  2 s left",
        "40 of 100 agent steps (40.0%)  40/s  2 s left",
        "60 of 100 agent steps (60.0%)  0/s  ? left",
        "80 of 100 agent steps (80.0%)  40/s  0 s left  entropy 1.23  kl 0.00123",
        "",
    ]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A stream on a terminal of 100 columns, and what was written to it up to its end."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    stream = open(slave, "w")  # noqa: SIM115

    def read() -> str:
        stream.close()
        text = ""
        with suppress(OSError):  # what Linux says at the end of a terminal's output
            while chunk := os.read(master, 1 << 16).decode():
                text += chunk
        return text

    yield stream, read
    stream.close()
    os.close(master)


@pytest.mark.parametrize("colours", [True, False])
def test_on_a_terminal_a_dashboard_shows_the_same_with_and_without_colours(
    colours: bool, terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    stream, read = terminal
    shown = screen.console(120, stream, clock=itertools.count(2.0, 2.0).__next__)
    for update in (1, 2, 3):
        values = {"episode/return": 7.5 * update, "ppo/entropy": 1.0, "episode/[bold]": 3.0, "other/x": 1.0}
        shown.write(record(update, **values))
    shown.note("saved [bold]3")
    shown.close()
    text = read()
    assert "50.0% of 120 agent steps  10/s  6 s left  return 22.5" in text
    assert "saved [bold]3" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert re.search(r"return +22.5  ▁[▄▅]█", plain)
    assert re.search(r"\[bold\] +3  ", plain), "a metric's name is text"
    assert "memory " in plain
    assert "other/x" not in plain
    assert ("\x1b[36m" in text) == colours


def test_a_small_curve_goes_from_the_least_to_the_greatest_mean() -> None:
    assert screen.sparkline([], 8) == ""
    assert screen.sparkline([5.0], 8) == "▄"
    assert screen.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert screen.sparkline([0, 0, 7, 7, 0, 14], 3) == "▁██"
    assert screen.sparkline([0.0, 7.0], 8, "01234567") == "07"


def test_a_stage_that_lasts_has_its_bar_on_a_terminal_and_lines_elsewhere(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "SOON", 0.0)
    monkeypatch.setattr(screen, "PLAIN_SOON", 0.05)
    monkeypatch.setattr(screen, "PLAIN_EVERY", 0.05)
    stream, read = terminal
    lines = io.StringIO()
    for to in (stream, lines):
        monkeypatch.setattr(sys, "stderr", to)
        seen = threading.Event()
        monkeypatch.setattr(to, "write", _noticing(to.write, "1,024 of 4,096", seen))
        with screen.stage("making", 4096, before=12.3) as advance:
            advance(1024)
            with screen.stage("a part of it"):
                assert seen.wait(60)
    shown = read()
    assert "making" in shown
    assert "0:00:0" in shown
    assert "a part of it" not in shown
    assert "12 s the last time" in shown
    assert re.search(r"^making: 1,024 of 4,096 after \d+ s: 12 s the last time$", lines.getvalue(), re.MULTILINE)
    assert "\x1b" not in lines.getvalue()


def _noticing(write: Callable[[str], int], text: str, seen: threading.Event) -> Callable[[str], int]:
    def watched(chunk: str) -> int:
        if text in chunk:
            seen.set()
        return write(chunk)

    return watched


def test_a_short_stage_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.StringIO()
    monkeypatch.setattr(sys, "stderr", lines)
    with screen.stage("short"):
        pass
    assert lines.getvalue() == ""


def test_the_rate_is_that_of_the_last_reports() -> None:
    rate = screen.Rate(window=2)
    reports = [(0, 0), (10, 0), (30, 2), (50, 3), (50, 5)]
    assert [rate.update(steps, seconds) for steps, seconds in reports] == [0, 0, 15, 40 / 3, 20 / 3]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (200, "3:20 min"), (3723, "1:02:03 h"), (200_000, "2 d 7 h")]
    + [(-1, "0 s")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert screen.duration(seconds) == text
