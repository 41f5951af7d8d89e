"""Trace of a program's run: time of each instruction on each device.

JAX writes it (`jax.profiler.trace`) as an `xplane.pb`, and reads it. An event of an instruction carries the statistic
"hlo_op". Loops and calls contain others and are left out. For a CUDA graph of several instructions the statistic names
the graph, and the event its kernel, named like its instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax

GRAPH = "command_buffer"
"""Prefix of XLA's name of a CUDA graph."""


class Event(NamedTuple):
    """One run of one instruction."""

    instruction: str
    device: int
    start: float  # seconds on the trace's clock
    end: float


class Spent(NamedTuple):
    """Total over all runs of an instruction and all devices."""

    seconds: float
    runs: int


def events(folder: Path, module: str) -> list[Event]:
    """Runs of instructions of programs named `module` ("jit_run") in the newest trace of `folder`.

    Raises FileNotFoundError if there is no trace.
    """
    files = sorted(Path(folder).glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"{folder} has no trace (plugins/profile/*/*.xplane.pb)")
    found = []
    for place, plane in enumerate(jax.profiler.ProfileData.from_file(str(files[-1])).planes):
        for line in plane.lines:
            for event in line.events:
                about = dict(event.stats)
                name = about.get("hlo_op")
                if name is None or not str(about.get("hlo_module", module)).startswith(module):
                    continue
                device = about.get("device_ordinal", place)
                start = event.start_ns * 1e-9
                name = event.name if str(name).startswith(GRAPH) else name
                found.append(Event(str(name), int(device), start, start + event.duration_ns * 1e-9))
    return found


def attributed(found: Iterable[Event], instructions: Iterable[str]) -> list[Event]:
    """Events with kernels of graphs under the names of their instructions, where known.

    A kernel's name has underscores for characters that C++ does not allow. Equal instructions share one kernel: one of
    them is charged with all of its runs.
    """
    known = set(instructions)
    of_kernel = {re.sub(r"\W", "_", name): name for name in known}
    return [
        event
        if event.instruction in known
        else event._replace(instruction=of_kernel.get(event.instruction, event.instruction))
        for event in found
    ]


def spent(found: Iterable[Event]) -> dict[str, Spent]:
    total: dict[str, Spent] = {}
    for event in found:
        before = total.get(event.instruction, Spent(0.0, 0))
        total[event.instruction] = Spent(before.seconds + event.end - event.start, before.runs + 1)
    return total


def busy(found: Iterable[Event]) -> dict[int, tuple[float, float]]:
    """Device -> (busy seconds, seconds from its first instruction to the end of its last)."""
    by_device: dict[int, list[tuple[float, float]]] = {}
    for event in found:
        by_device.setdefault(event.device, []).append((event.start, event.end))
    return {device: _union(sorted(spans)) for device, spans in by_device.items()}


def _union(spans: list[tuple[float, float]]) -> tuple[float, float]:
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered, until - spans[0][0]


def shares(taken: dict[str, Spent], group: Callable[[str], str]) -> dict[str, float]:
    """Group -> seconds of the instructions in it."""
    total: dict[str, float] = {}
    for name, each in taken.items():
        total[group(name)] = total.get(group(name), 0.0) + each.seconds
    return total
