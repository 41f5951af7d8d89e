"""Time profile of a recipe's updates: some calls of its compiled program, traced and read back.

The program is the one that `longhaul train` runs. Instructions are classified by the scopes of `rollout` and `fused`;
collectives and copies count as such anywhere. A gap is a time in which a device ran nothing: between instructions (on a
CPU, the launches of many small ones) and between calls. Products and bytes are counted from the program's text
(hlo.py) times the runs of each instruction.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from longhaul.config.run import Run
from longhaul.diagnostics import chips, hlo
from longhaul.diagnostics.chips import Chip
from longhaul.diagnostics.compiled_run import Program, compiled
from longhaul.diagnostics.hlo import COLLECTIVES, CONTROL, Instruction
from longhaul.runtime import device_memory
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.provenance import provenance
from longhaul.types import ENVIRONMENT, INFERENCE, LEARNING

PARTS = (ENVIRONMENT, INFERENCE, LEARNING, "collectives", "copies", "other", "gaps")
"""Parts of a device's time."""

TOP = 10
"""Instructions in the list of the longest."""

GRAPH = "command_buffer"
"""Prefix of XLA's name of a CUDA graph."""


def part(instruction: Instruction | None) -> str:
    """Part of `PARTS` that an instruction belongs to."""
    if instruction is None:
        return "other"
    if instruction.opcode.startswith(COLLECTIVES):
        return "collectives"
    if instruction.opcode.startswith("copy"):
        return "copies"
    names = instruction.scope.replace("(", "/").replace(")", "/").split("/")
    return next((each for each in (LEARNING, INFERENCE, ENVIRONMENT) if each in names), "other")


class Traced(NamedTuple):
    """Some calls of a run's program, measured and traced."""

    program: Program
    instructions: dict[str, Instruction]
    events: list[Event]
    updates: int  # covered by the events
    update_seconds: float  # seconds of one update, without a trace


def measure(run: Run, folder: Path, calls: int) -> Traced:
    """Trace `calls` compiled calls of a resolved run into `folder`, after equally many without a trace."""
    prepare_devices(run.all_devices, run.threads)
    program, block = compiled(run), run.block
    assert block is not None
    text, seconds = program.text(), []
    # The first call allocates.
    progress = jax.block_until_ready(program.call(program.start(run.seed), block))[0]
    for _ in range(calls):
        began = time.perf_counter()
        progress = jax.block_until_ready(program.call(progress, block))[0]
        seconds.append(time.perf_counter() - began)
    with jax.profiler.trace(str(folder)):
        for _ in range(calls):
            progress = jax.block_until_ready(program.call(progress, block))[0]
    instructions = hlo.read(text)
    traced = attributed(events(folder, text.split(None, 2)[1].rstrip(",")), instructions)
    return Traced(program, instructions, traced, calls * block, statistics.median(seconds) / block)


def profile(run: Run, folder: Path, calls: int) -> dict[str, Any]:
    """Profile of `calls` compiled calls of a resolved run, traced into `folder`; as JSON can hold it."""
    traced = measure(run, folder, calls)
    program, updates = traced.program, traced.updates
    devices, steps = program.assembly.mesh.size, program.assembly.steps_per_update * updates
    seconds, read = traced.update_seconds * updates, reading(traced.events, traced.instructions)
    chip = chips.of_this_process(devices)
    machine = provenance()
    return {
        "recipe": run.recipe, "devices": devices, "chip": chip.name, "updates": updates, "agent_steps": steps,
        "agent_steps_per_second": steps / seconds, "seconds_per_update": traced.update_seconds,
        "compile_seconds": program.trace_seconds + program.compile_seconds, "memory": memory(program.executable),
        "trace": str(folder),
        **read,
        "operations_per_step": read["operations"] / steps, "bytes_per_step": read["bytes"] / steps,
        "roofline": roofline(read["operations"], read["bytes"], seconds, chip, devices),
        **{name: machine[name] for name in ("versions", "commit")},
    }  # fmt: skip


def memory(executable: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a compiled program on each device: arguments, donated ones, temporaries."""
    need = device_memory.need(executable)
    if need is None:
        return {}
    parts = {"argument": need.arguments, "output": need.outputs, "temp": need.temporaries, "alias": need.donated}
    return parts | {"peak": need.total}


def reading(events: list[Event], program: Mapping[str, Instruction]) -> dict[str, Any]:
    """Shares of a traced program's time by part, its operations and bytes, and its longest instructions.

    Raises ValueError if the trace holds none of its instructions.
    """
    control = {name for name, each in program.items() if each.opcode in CONTROL}
    work = [event for event in events if event.instruction not in control]
    if not work:
        raise ValueError("the trace holds no instruction of the program; more than one program ran, or none")
    taken: defaultdict[str, float] = defaultdict(float)  # seconds by instruction, of all its runs on all devices
    for event in work:
        taken[event.instruction] += event.end - event.start
    runs = Counter(event.instruction for event in work)
    by_device = busy(work)
    whole = sum(span for _, span in by_device.values())
    gaps = whole - sum(ran for ran, _ in by_device.values())
    seconds = dict.fromkeys(PARTS, 0.0)
    for name, each in taken.items():
        seconds[part(program.get(name))] += each
    # Instructions that overlap on a device share the time.
    factor = (whole - gaps) / max(sum(seconds.values()), 1e-12)
    shared = {name: each * factor / whole for name, each in seconds.items()} | {"gaps": gaps / whole}
    known = {name: program[name] for name in taken if name in program}
    longest = sorted(known, key=lambda name: -taken[name])[:TOP]
    return {
        "shares": shared,
        "operations": sum(each.operations * runs[name] for name, each in known.items()),
        "bytes": sum(each.bytes * runs[name] for name, each in known.items()),
        "longest": [
            {
                "instruction": name, "opcode": known[name].opcode, "part": part(known[name]),
                "scope": _short(known[name].scope), "runs": runs[name],
                "share": taken[name] * factor / whole,
            }
            for name in longest
        ],
    }  # fmt: skip


def _short(scope: str) -> str:
    """End of a scope, from its part on."""
    names = scope.split("/")
    starts = [i for i, name in enumerate(names) if name in (LEARNING, INFERENCE, ENVIRONMENT)]
    return "/".join(names[starts[-1] :] if starts else names[-2:])


def roofline(operations: float, moved: float, seconds: float, chip: Chip, devices: int) -> dict[str, float | str]:
    """Shares of the devices' peak operations and bandwidth that were reached (Williams et al. 2009).

    `operations` and `moved` (bytes) are those of all devices, in `seconds` of calls without a trace.
    """
    peak, bandwidth = chip.fp32 * devices, chip.memory_bandwidth * devices
    compute, memory = operations / peak, moved / bandwidth
    return {
        "operations_per_byte": operations / max(moved, 1.0),
        "peak_operations_per_second": peak,
        "peak_bytes_per_second": bandwidth,
        "share_of_peak_operations": compute / seconds,
        "share_of_peak_bytes": memory / seconds,
        "bound_by": "operations" if compute >= memory else "bytes",
    }


# -------------------------------------------------------------------------------------------------------------- trace


class Event(NamedTuple):
    """One run of one instruction."""

    instruction: str
    device: int
    start: float  # seconds on the trace's clock
    end: float


def events(folder: Path, module: str) -> list[Event]:
    """Runs of instructions of programs named `module` ("jit_run") in the newest trace of `folder`.

    Raises FileNotFoundError if there is no trace.
    """
    files = sorted(Path(folder).glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"{folder} has no trace (plugins/profile/*/*.xplane.pb); longhaul profile writes one")
    runs = []
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
                runs.append(Event(str(name), int(device), start, start + event.duration_ns * 1e-9))
    return runs


def attributed(events: Iterable[Event], instructions: Iterable[str]) -> list[Event]:
    """Events with kernels of graphs under the names of their instructions, where known.

    A kernel's name has underscores for characters that C++ does not allow. Equal instructions share one kernel: one of
    them is charged with all of its runs.
    """
    known = set(instructions)
    names = {re.sub(r"\W", "_", name): name for name in known} | {name: name for name in known}
    return [event._replace(instruction=names.get(event.instruction, event.instruction)) for event in events]


def busy(runs: Iterable[Event]) -> dict[int, tuple[float, float]]:
    """Device -> (busy seconds, seconds from its first instruction to the end of its last)."""
    by_device: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in runs:
        by_device[event.device].append((event.start, event.end))
    intervals = {}
    for device, spans in by_device.items():
        covered, first = 0.0, min(spans)[0]
        until = first
        for start, end in sorted(spans):
            covered += max(end - max(start, until), 0.0)
            until = max(until, end)
        intervals[device] = covered, until - first
    return intervals
