"""Time profile of a recipe's updates: some calls of its compiled program, traced and read back.

The program is the one that `longhaul train` runs. Instructions are classified by the scopes of `rollout` and `fused`;
collectives and copies count as such anywhere. A gap is a time in which a device ran nothing: between instructions (on a
CPU, the launches of many small ones) and between calls. Products and bytes are counted from the program's text
(hlo_costs.py) times the runs of each instruction.
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
"""Parts of a device's time."""

TOP = 10
"""Instructions in the list of the longest."""


class Sample(NamedTuple):
    """A resolved run, compiled, with the progress of its first update."""

    run: Run
    assembly: Assembly
    context: PyTree
    progress: Progress
    executable: jax.stages.Compiled
    compile_seconds: float

    def call(self, progress: Progress) -> tuple[Progress, float]:
        """Run one compiled call of `run.block` updates, awaited; -> (progress, seconds)."""
        count = jax.device_put(jnp.int32(self.run.block or 1), meshes.replicated(self.assembly.mesh))
        began = time.perf_counter()
        progress, metrics = self.executable(progress, self.context, count)
        jax.block_until_ready((progress, metrics))
        return progress, time.perf_counter() - began


def sample(run: Run) -> Sample:
    """Sample of `run` (resolved), prepared as `longhaul train` does."""
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

    sample: Sample
    program: dict[str, Instruction]
    events: list[trace.Event]
    updates: int  # covered by the events
    update_seconds: float  # seconds of one update, without a trace


def measure(run: Run, folder: Path, calls: int) -> Traced:
    """Trace `calls` compiled calls of a resolved run into `folder`, after equally many without a trace."""
    ready = sample(run)
    text = ready.executable.as_text()
    assert text is not None and run.block is not None
    progress, _ = ready.call(ready.progress)  # the first call allocates
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
    """Profile of `calls` compiled calls of a resolved run, traced into `folder`; as JSON can hold it."""
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
    """Bytes of a compiled program on each device: arguments, donated ones, temporaries."""
    found = device_memory.need(executable)
    if found is None:
        return {}
    parts = {"argument": found.arguments, "output": found.outputs, "temp": found.temporaries, "alias": found.donated}
    return parts | {"peak": found.total}


def reading(found: list[trace.Event], program: Mapping[str, Instruction]) -> dict[str, Any]:
    """Shares of a traced program's time by part, its operations and bytes, and its longest instructions.

    Raises ValueError if the trace holds none of its instructions.
    """
    work = [event for event in found if _opcode(program.get(event.instruction)) not in CONTROL]
    if not work:
        raise ValueError("the trace holds no instruction of the program; more than one program ran, or none")
    taken = trace.spent(work)
    by_device = trace.busy(work)
    whole = sum(span for _, span in by_device.values())
    gaps = whole - sum(busy for busy, _ in by_device.values())
    seconds = trace.shares(taken, lambda name: part(program.get(name)))
    # Instructions that overlap on a device share the time.
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
