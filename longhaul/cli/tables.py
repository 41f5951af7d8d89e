"""Results on stdout: tables for people, JSON for machines. Progress and errors go to stderr, elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from longhaul.runtime import files
from longhaul.telemetry.screen import is_terminal

FIRST = (
    *("accuracy", "progress", "collision", "offroad", "red_light", "goal", "comfort", "vmax_score", "nuplan_score"),
    *("realism", "return", "length"),
)
"""Metrics in the order of a table's columns; others follow by name."""

MOST = len(FIRST)
"""Columns of metrics that a table can have; where there are more, those of FIRST are shown."""


def progress(line: str) -> None:
    """Line beside a command's results."""
    print(line, file=sys.stderr, flush=True)


def say(line: str, code: int) -> int:
    """Exit code of an error, whose line is printed without what could control a terminal."""
    progress(f"longhaul: error: {clean(line)}")
    return code


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, footer: Sequence[str] | None = None) -> None:
    """Table of rows of text; the first column to the left, the others to the right. `footer` is a last row set apart.

    On a terminal that is wide enough by rich, in bold unless NO_COLOR is set; elsewhere as plain lines of any width.
    """
    lines = [[clean(cell) for cell in row] for row in (header, *rows, *([footer] if footer else []))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    if is_terminal(sys.stdout) and sum(widths) + 3 * len(widths) <= shutil.get_terminal_size().columns:
        _rich(lines, footer is not None)
        return
    for line in lines:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip())


def _rich(lines: Sequence[Sequence[str]], has_footer: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    plain = bool(os.environ.get("NO_COLOR"))
    table = Table(box=box.SIMPLE, pad_edge=False, header_style="" if plain else "bold")
    for i, name in enumerate(lines[0]):
        table.add_column(Text(name), justify="left" if i == 0 else "right", overflow="fold")
    for i, line in enumerate(lines[1:], 2):
        last = has_footer and i == len(lines)
        if last:
            table.add_section()
        table.add_row(*(Text(cell, style="bold" if last and not plain else "") for cell in line))
    Console(file=sys.stdout, no_color=plain, highlight=False).print(table)


def listing(rows: Iterable[tuple[str, str]]) -> None:
    """List of names, each with one line about it."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, line in rows:
        print(f"{clean(name).ljust(width)}  {clean(line)}")


def scores(means: dict[str, dict[str, Any]]) -> None:
    """Table of an evaluation: policy -> means by metric and `episodes`."""
    names = columns((name for scored in means.values() for name in scored if name != "episodes"), most=MOST)
    header = ["policy", *names, "episodes"]
    table(header, [[policy, *(number(scored.get(name)) for name in header[1:])] for policy, scored in means.items()])


def columns(names: Iterable[str], most: int | None = None) -> list[str]:
    """The distinct names in the order of a table's columns; where there are more than `most`, only those of FIRST."""
    ordered = sorted(set(names), key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return ordered if most is None or len(ordered) <= most else [name for name in ordered if name in FIRST]


def number(value: Any) -> str:
    """A value in a table: three decimals; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def span(value: Any) -> str:
    """A range [least, greatest], or one number, in a table; "-" where there is none."""
    if not isinstance(value, list | tuple):
        return "-" if value is None else f"{value:g}"
    low, high = (f"{each:.6g}" if isinstance(each, float) else str(each) for each in value)
    return low if low == high else f"{low} .. {high}"


def clean(text: str) -> str:
    """`text` without what could control a terminal: names in files may hold anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def report(path: str | None, value: Any, show: Callable[[], None]) -> None:
    """Report of a result to people, unless stdout is for JSON, and to `path` where that is given."""
    if path != "-":
        show()
    if path is not None:
        write_json(path, value)


def write_json(path: str, value: Any) -> None:
    """File of a JSON value, written at once or not at all; "-" is stdout. What is not finite becomes null."""
    write_text(path, json.dumps(files.finite(value), indent=2, allow_nan=False) + "\n")


def write_text(path: str, text: str) -> None:
    """File of a text, written at once or not at all; "-" is stdout."""
    if path == "-":
        sys.stdout.write(text)
        return
    files.write(path, text)


def write_line(value: Any) -> None:
    """One line of stdout for a JSON object."""
    print(json.dumps(files.finite(value), allow_nan=False), flush=True)
