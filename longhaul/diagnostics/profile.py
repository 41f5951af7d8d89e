"""Where the time of a recipe's updates goes: some calls of its compiled program, traced and read back.

The program is the one that `longhaul train` runs. Instructions are told apart by the scopes that `rollout` and `fused`
give them; collectives and copies count as such wherever they stand. A gap is when a device ran nothing: what comes
between instructions (on a CPU, launching each of many small ones), and the host between two calls. Products and bytes
are counted from the program's text (instructions.py) times how often each instruction ran.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul.config.run import Run
from longhaul.diagnostics import chips, hlo_costs, trace
from longhaul.diagnostics.chips import Chip
from longhaul.diagnostics.hlo_costs import COLLECTIVES, CONTROL, Instruction
from longhaul.runtime import device_memory
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.provenance import provenance
from longhaul.topologies import fused
from longhaul.training.assemble import Assembly, assemble
from longhaul.training.data import Feeding, feed
from longhaul.types import ENVIRONMENT, INFERENCE, LEARNING, Progress, PyTree

PARTS = (ENVIRONMENT, INFERENCE, LEARNING, "collectives", "copies", "other", "gaps")
"""What a device's time is shared among."""

TOP = 10
"""Instructions that are listed."""


class Sample(NamedTuple):
    """A resolved run, compiled, with the progress of its first update."""

    run: Run
    assembly: Assembly
    context: PyTree
    progress: Progress
    executable: jax.stages.Compiled
    compile_seconds: float

    def call(self, progress: Progress) -> tuple[Progress, float]:
        """Runs one compiled call of `run.block` updates, awaited; -> (progress, seconds)."""
        count = jax.device_put(jnp.int32(self.run.block or 1), meshes.replicated(self.assembly.mesh))
        began = time.perf_counter()
        progress, metrics = self.executable(progress, self.context, count)
        jax.block_until_ready((progress, metrics))
        return progress, time.perf_counter() - began


def sample(run: Run) -> Sample:
    """`run` (resolved) made ready as `longhaul train` would make it."""
    assert run.block is not None
    prepare_devices(run.all_devices, run.threads)
    source = feed(run)
    feeding = Feeding(source)
    try:
        context = feeding.now.context
        assembly = assemble(run, source.within, context)
        progress = assembly.start(run.seed, context)
        began = time.perf_counter()
        lowered = fused.lowered(
            assembly.algorithm, assembly.collector_in, progress, context, assembly.mesh, block=run.block,
            shards=assembly.shards,
        )  # fmt: skip
        executable = lowered.compile()
        return Sample(run, assembly, context, progress, executable, time.perf_counter() - began)
    finally:
        feeding.close()


def part(instruction: Instruction | None) -> str:
    """Which of PARTS an instruction belongs to."""
    if instruction is None:
        return "other"
    if instruction.opcode.startswith(COLLECTIVES):
        return "collectives"
    if instruction.opcode.startswith("copy"):
        return "copies"
    names = instruction.scope.replace("(", "/").replace(")", "/").split("/")
    return next((each for each in (LEARNING, INFERENCE, ENVIRONMENT) if each in names), "other")


class Traced(NamedTuple):
    """Some calls of a run's program, as they were measured and traced."""

    sample: Sample
    program: dict[str, Instruction]
    events: list[trace.Event]
    updates: int  # that the events are of
    update_seconds: float  # of one update, without a trace


def measure(run: Run, folder: Path, calls: int) -> Traced:
    """Traces `calls` compiled calls of a resolved run into `folder`, after as many without a trace."""
    ready = sample(run)
    text = ready.executable.as_text()
    assert text is not None and run.block is not None
    progress, _ = ready.call(ready.progress)  # the first one allocates
    plain = []
    for _ in range(calls):
        progress, seconds = ready.call(progress)
        plain.append(seconds)
    with jax.profiler.trace(str(folder)):
        for _ in range(calls):
            progress, _ = ready.call(progress)
    program = hlo_costs.read(text)
    found = trace.attributed(trace.events(folder, text.split(None, 2)[1].rstrip(",")), program)
    return Traced(ready, program, found, calls * run.block, statistics.median(plain) / run.block)


def profile(run: Run, folder: Path, calls: int) -> dict[str, Any]:
    """What `calls` compiled calls of a resolved run took, traced into `folder`; as JSON can hold it."""
    traced = measure(run, folder, calls)
    devices, updates = traced.sample.assembly.mesh.size, traced.updates
    steps, seconds = traced.sample.assembly.steps_per_update * updates, traced.update_seconds * updates
    read = reading(traced.events, traced.program)
    chip = chips.here(devices)
    machine = provenance()
    return {
        "recipe": run.recipe, "devices": devices, "chip": chip.name, "updates": updates, "agent_steps": steps,
        "agent_steps_per_second": steps / seconds, "seconds_per_update": traced.update_seconds,
        "compile_seconds": traced.sample.compile_seconds, "memory": memory(traced.sample.executable),
        "trace": str(folder),
        **read,
        "operations_per_step": read["operations"] / steps, "bytes_per_step": read["bytes"] / steps,
        "roofline": roofline(read["operations"], read["bytes"], seconds, chip, devices),
        **{name: machine[name] for name in ("versions", "commit")},
    }  # fmt: skip


def memory(executable: jax.stages.Compiled) -> dict[str, int]:
    """Bytes that a compiled program takes on each device: what goes in, what is donated, what it needs meanwhile."""
    found = device_memory.need(executable)
    if found is None:
        return {}
    parts = {"argument": found.arguments, "output": found.outputs, "temp": found.temporaries, "alias": found.donated}
    return parts | {"peak": found.total}


def reading(found: list[trace.Event], program: Mapping[str, Instruction]) -> dict[str, Any]:
    """The trace of a program -> shares of its time by part, what it computed and moved, and its longest instructions.

    Raises ValueError where the trace holds none of its instructions.
    """
    work = [event for event in found if _opcode(program.get(event.instruction)) not in CONTROL]
    if not work:
        raise ValueError("the trace holds no instruction of the program; more than one program ran, or none")
    taken = trace.spent(work)
    by_device = trace.busy(work)
    whole = sum(span for _, span in by_device.values())
    gaps = whole - sum(busy for busy, _ in by_device.values())
    seconds = trace.shares(taken, lambda name: part(program.get(name)))
    # Where instructions of a device overlap in time, they share it.
    factor = (whole - gaps) / max(sum(seconds.values()), 1e-12)
    shared = {name: seconds.get(name, 0.0) * factor / whole for name in PARTS} | {"gaps": gaps / whole}
    known = {name: program[name] for name in taken if name in program}
    longest = sorted(known, key=lambda name: -taken[name].seconds)[:TOP]
    return {
        "shares": shared,
        "operations": sum(each.operations * taken[name].runs for name, each in known.items()),
        "bytes": sum(each.bytes * taken[name].runs for name, each in known.items()),
        "longest": [
            {
                "instruction": name, "opcode": known[name].opcode, "part": part(known[name]),
                "scope": _short(known[name].scope), "runs": taken[name].runs,
                "share": taken[name].seconds * factor / whole,
            }
            for name in longest
        ],
    }  # fmt: skip


def _opcode(instruction: Instruction | None) -> str:
    return instruction.opcode if instruction is not None else "?"


def _short(scope: str) -> str:
    """The end of a scope, from the part that it belongs to on."""
    names = scope.split("/")
    starts = [i for i, name in enumerate(names) if name in (LEARNING, INFERENCE, ENVIRONMENT)]
    return "/".join(names[starts[-1] :] if starts else names[-2:])


def roofline(operations: float, moved: float, seconds: float, chip: Chip, devices: int) -> dict[str, float | str]:
    """What was computed and moved against what the devices could (Williams et al. 2009): the shares of both peaks.

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
