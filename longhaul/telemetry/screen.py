"""Screen of a run: the stage of work that is under way, then a dashboard of its records.

On a terminal one place at its bottom lives, drawn by rich: work that lasts has a line with the seconds that passed and,
where its size is known, a bar; training has a dashboard. Elsewhere there are plain lines without control characters. A
notebook's cell keeps a bar.
"""

from __future__ import annotations

import functools
import html
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import parent_process
from typing import TYPE_CHECKING, TextIO

from longhaul.runtime import process_group
from longhaul.telemetry import machine_use
from longhaul.telemetry.health import of_learning
from longhaul.telemetry.sinks import Record, Sink, as_plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SOON, PLAIN_SOON, PLAIN_EVERY = 0.3, 10.0, 10.0
"""Seconds after which a stage is shown on a terminal; elsewhere the first, and from then on those between two lines."""

REFRESH = 0.25
"""Seconds between two pictures of a terminal."""


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@functools.cache
def _terminal(stream: TextIO) -> Console:
    from rich.console import Console

    terminal = Console(file=stream, no_color="NO_COLOR" in os.environ, highlight=False, markup=False)
    # A process that is killed cannot give a hidden cursor back.
    terminal.show_cursor = lambda show=True: False
    return terminal


def _stderr() -> TextIO:
    """The stream itself, where rich stands before it."""
    stream: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    return stream


# ------------------------------------------------------------------------------------------------------------- stages

PLACE = threading.Lock()
"""Lock of what draws at the bottom of the screen: a stage within another, or beside a dashboard, is a part of it."""


@contextmanager
def stage(
    title: str, total: int | None = None, *, before: float | None = None, plain: bool = True
) -> Iterator[Callable[[int], None]]:
    """Context of work that is shown if it lasts; yields a function that takes how much of `total` is done.

    `before` are the seconds that the same work took before. With `plain` off there are no lines where no terminal is.
    """
    work = _Work(title, total, "" if before is None else f"{before:.0f} s the last time")
    lives = is_terminal(_stderr())
    if not (lives or plain) or parent_process() or process_group.index() or not PLACE.acquire(blocking=False):
        yield work.advance
        return
    drawing = threading.Thread(target=work.draw_bar if lives else work.print_lines, name="stage", daemon=True)
    drawing.start()
    try:
        yield work.advance
    finally:
        work.ended.set()
        drawing.join()
        PLACE.release()


class _Work:
    """Work under way, which a thread shows until it has `ended`."""

    def __init__(self, title: str, total: int | None, remark: str) -> None:
        self._title, self._total, self._remark = title, total, remark
        self._done, self._begun = 0, time.monotonic()
        self.ended = threading.Event()

    def advance(self, to: int) -> None:
        self._done = to

    def print_lines(self) -> None:
        """Lines where no terminal is; one alone without a total."""
        while not self.ended.wait(PLAIN_EVERY if self._done else PLAIN_SOON):
            # Without the seconds, lines of work that compiles first would all be the same.
            seconds = time.monotonic() - self._begun
            size = f"{self._done:,} of {self._total:,} after {seconds:.0f} s" if self._total else ""
            print(": ".join(filter(None, (self._title, size, self._remark))), file=sys.stderr, flush=True)
            if not self._total:
                return

    def draw_bar(self) -> None:
        """Bar at the bottom of a terminal."""
        if self.ended.wait(SOON):
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}", markup=False)
        size = TextColumn("{task.completed:,.0f} of {task.total:,.0f}" if self._total else "", markup=False)
        columns = (text, BarColumn(bar_width=24), size, TimeElapsedColumn(), TextColumn(self._remark, markup=False))
        bar = Progress(
            *columns,
            console=_terminal(_stderr()),
            transient=True,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
        )
        with bar:
            task = bar.add_task(self._title, total=self._total)
            while not self.ended.wait(REFRESH):
                bar.update(task, completed=self._done, refresh=True)


# ------------------------------------------------------------------------------------------------------------ records


class Rate:
    """Steps per second over the last `window` reports."""

    def __init__(self, window: int = 16):
        self._reports: deque[tuple[float, float]] = deque(maxlen=window + 1)

    def update(self, steps: float, seconds: float) -> float:
        """Rate after `steps` steps at `seconds` by any clock; 0 until two reports differ in time."""
        self._reports.append((steps, seconds))
        (first_steps, first_seconds), (last_steps, last_seconds) = self._reports[0], self._reports[-1]
        passed = last_seconds - first_seconds
        return (last_steps - first_steps) / passed if passed > 0 else 0.0


def console(
    total_steps: int,
    stream: TextIO | None = None,
    *,
    start: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Sink:
    """Progress towards `total_steps` agent steps on `stream` (stderr), from `start` on: rate, time left and return.

    On a terminal: a dashboard, in colours unless NO_COLOR is set. In a notebook: a bar, which its cell keeps. Else: one
    plain line a record, without control characters, with `SHOWN` too, so that a log alone shows the state of a run.
    """
    stream = _stderr() if stream is None else stream
    rate = Rate()

    def words(record: Record) -> tuple[int, str]:
        """-> (agent steps, text on them)."""
        values = as_plain(record)
        steps = values["agent_steps"]
        speed = rate.update(steps, clock()) or values.get("sps") or 0.0
        left = duration((total_steps - steps) / speed) if speed > 0 else "?"
        value = values.get("episode/return")
        returned = f"  return {value:.4g}" if isinstance(value, (int, float)) else ""
        return steps, f"{speed:,.0f}/s  {left} left{returned}"

    def share(steps: int) -> str:
        return f"{steps / max(total_steps, 1):.1%}"

    def note(text: str) -> None:
        print("".join(c if c.isprintable() else " " for c in text), file=stream, flush=True)

    if type(stream).__module__.startswith("ipykernel"):
        show = _cell()

        def write_cell(record: Record) -> None:
            steps, text = words(record)
            show(steps / max(total_steps, 1), f"{share(steps)} of {total_steps:,} agent steps  {text}")

        return Sink(write_cell, lambda: show(None, ""), note=note)

    if is_terminal(stream):
        return _dashboard(_terminal(stream), total_steps, start, words)

    def write_line(record: Record) -> None:
        steps, text = words(record)
        more = "".join(f"  {label} {value:.3g}" for label, value in _shown(record) if label in SHOWN.values())
        note(f"{steps:,} of {total_steps:,} agent steps ({share(steps)})  {text}{more}")

    return Sink(write_line, note=note)


CELL_SECONDS = 0.2
"""Seconds between two pictures of a notebook's bar."""


def _cell() -> Callable[[float | None, str], None]:
    """Bar in the output of a notebook's cell: takes the share that is done, and a text; None shows the last ones."""
    from IPython.display import display

    shown, last, waiting = 0.0, (0.0, "begins"), True

    def picture() -> dict[str, str]:
        done, text = last
        bar = f'<progress max="1" value="{done:.4f}" aria-label="training"></progress> <code>{html.escape(text)}</code>'
        return {"text/html": bar, "text/plain": text}

    handle = display(picture(), raw=True, display_id=True)

    def show(done: float | None, text: str) -> None:
        nonlocal shown, last, waiting
        if done is not None:
            last, waiting = (done, text), True
        if waiting and (done is None or time.monotonic() - shown >= CELL_SECONDS):
            shown, waiting = time.monotonic(), False
            handle.update(picture(), raw=True)

    return show


SHOWN = {"episode/length": "length", "entropy": "entropy", "approx_kl": "kl", "clip_fraction": "clip"}
"""Metrics on a plain line with their labels; learning metrics go without the algorithm's name."""

FIRST = {"episode/return": "return", **SHOWN, "explained_variance": "explained variance"}
"""Metrics of the dashboard's first rows; scores of episodes and of evaluations follow."""


def _shown(record: Record) -> Iterator[tuple[str, float]]:
    """Labels and values of a record's metrics in the dashboard's order."""
    values = {of_learning(name) or name: value for name, value in as_plain(record).items()}
    others = {
        name: name.removeprefix("episode/")
        for name in values
        if name.startswith(("episode/", "eval/")) and name not in (*FIRST, "episode/count")
    }
    for name, label in {**FIRST, **others, "sps": "steps/s"}.items():
        if isinstance(value := values.get(name), int | float):
            yield label, value


LEVELS = {True: "▁▂▃▄▅▆▇█", False: "_.-:=+*#"}
"""Levels of a small curve, where the terminal has Unicode and where not."""

MOST = 256
"""Values of a small curve; where there are more, two become one."""


def sparkline(values: Sequence[float], width: int, levels: str = LEVELS[True]) -> str:
    """Small curve of at most `width` letters: means of stretches of `values`, from their least to their greatest."""
    count = min(width, len(values))
    edges = [i * len(values) // max(count, 1) for i in range(count + 1)]
    means = [sum(values[i:j]) / (j - i) for i, j in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(levels) - 1
    return "".join(levels[round((mean - low) / (high - low) * top) if high > low else top // 2] for mean in means)


def _dashboard(terminal: Console, total: int, start: int, describe: Callable[[Record], tuple[int, str]]) -> Sink:
    """Sink with a bar, a row with a curve for each of the metrics that there is room for, and the machine's use."""
    from rich.console import Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    begun, steps, text = time.monotonic(), start, "the first call is under way"
    curves: dict[str, list[float]] = {}
    levels = LEVELS["utf" in (terminal.encoding or "").lower()]
    use = machine_use.meter()

    def picture() -> RenderableType:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(total, 1), completed=steps, width=16),
            Text(f"{steps / max(total, 1):.1%} of {total:,} agent steps  {text}", no_wrap=True),
            Text(duration(time.monotonic() - begun), style="dim"),
        )
        rows = Table.grid(padding=(0, 2))
        rows.add_column(justify="left", style="dim", no_wrap=True)
        rows.add_column(justify="right", no_wrap=True)
        rows.add_column(style="cyan", no_wrap=True)
        names = [name for name in curves if name != "steps/s"][: max(1, terminal.height - 6)]
        for name in (*names, *(["steps/s"] if "steps/s" in curves else [])):
            value = curves[name][-1]
            shown = f"{value:,.0f}" if name == "steps/s" else f"{value:.4g}"
            rows.add_row(name, shown, sparkline(curves[name], max(8, min(60, terminal.width - 40)), levels))
        return Group(head, rows, Text(use(), style="dim", no_wrap=True))

    live = Live(
        console=terminal,
        get_renderable=picture,
        refresh_per_second=1 / REFRESH,
        redirect_stdout=sys.stdout.isatty(),  # else a pipe, which gets its own
    )
    alone = PLACE.acquire(blocking=False)
    live.start()

    def write(record: Record) -> None:
        nonlocal steps, text
        steps, text = describe(record)
        for name, value in _shown(record):
            curve = curves.setdefault(name, [])
            curve.append(float(value))
            if len(curve) > MOST:
                curves[name] = [(left + right) / 2 for left, right in zip(curve[::2], curve[1::2])]

    def close() -> None:
        live.stop()
        if alone:
            PLACE.release()

    return Sink(write, close, note=terminal.print)


def duration(seconds: float) -> str:
    """42 -> "42 s", 200 -> "3:20 min", 3723 -> "1:02:03 h", 200000 -> "2 d 7 h"."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02} h"
    return f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
