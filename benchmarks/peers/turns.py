"""Turns of another library's program with ours, as `longhaul bench` asks for them: a repeat for each line on stdin.

It runs under that library's Python, so it imports nothing of Longhaul.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any


def about() -> dict[str, Any]:
    """Our record of the figure, by which the program sets its sizes."""
    return json.loads(sys.argv[1])


def cpu_seconds() -> float:
    """CPU-seconds of all threads, and of children that ended."""
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def tell(record: dict[str, Any]) -> None:
    print("figure " + json.dumps(record), flush=True)


def ready(compile_seconds: float, packages: Sequence[str]) -> None:
    """Tell that the program can be asked."""
    versions = {name: metadata.version(name) for name in packages}
    tell({**{name: about()[name] for name in ("steps", "unit")}, "compile_seconds": compile_seconds,
          "versions": versions})  # fmt: skip


def serve(work: Callable[[int], dict[str, float]]) -> None:
    """Repeat `work`, given the repeat's number, for every line."""
    for i, _ in enumerate(sys.stdin):
        used, began = cpu_seconds(), time.perf_counter()
        figures = work(i + 1)
        tell({"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu_seconds() - used} | figures)
