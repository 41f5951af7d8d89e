"""Compute planner: cost of a training run on 1 to 1,024 devices, from a short measured run and a cost model.

Each number of the model is a measurement, a data sheet's, or a printed assumption:

- A device's update takes its time here without collectives. On a GPU whose compiler is installed it is the sum over the
  kernels of its own program (`chip_program`) of `KERNEL` and the longer of (operations / peak, bytes / bandwidth), with
  peaks scaled by `REACHED`
  (Williams et al. 2009). On other hardware the instructions are those of a CPU's program, each takes the longest of
  these two, with peaks scaled by `efficiency`, and of a launch.
- An all-reduce of b bytes over N devices takes 2 (N - 1) / N x b / link, the bound of a ring (Patarasuk and Yuan 2009),
  and 2 ceil(log2 N) x latency; gathers and scatters half of both. None of it overlaps with other work. Within a host
  the link is the chip's, beyond it the network's. The collectives are read from the program of two shards, compiled
  also where there is one device.
- Processes of one machine share its cores. Two short runs, of one process and of two, tell how much slower two compute
  and what their collectives cost (`Calibration`). Up to the number of cores the slowdown grows with each further
  process by as much as with the second; beyond it processes take turns, and so do the messages of their rings.
- M neighbouring devices may share the parameters (`--mesh data=N,model=M`) and exchange activations; gradients are
  reduced over the N shards.
- weak: every device keeps its batch, so an update has N times the steps. strong: the batch is shared; compute shrinks
  with it, launches do not. It is assumed that equally many steps teach equally much at larger batches, which fails
  beyond some size (McCandlish et al. 2018).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longhaul.diagnostics.chips import Chip
from longhaul.diagnostics.hlo import COLLECTIVES, CONTROL, Crossing, Instruction

LAUNCH = {"cpu": 0.0, "gpu": 4e-6, "tpu": 1e-6}
"""Least seconds of an instruction of the program that is compiled for a CPU, by kind of chip. The measured time of a
CPU includes its launches."""

KERNEL, REACHED = 2.2e-6, 0.68
"""Seconds of a kernel beside its work, and the share of the data sheet's rates at which that is done, in a program that
is compiled for the GPU itself: the two constants that are fitted, to nine committed figures of an H100
(`benchmarks.plan_check chips`), and the same for each GPU."""

OFF = {("h100", True): 0.29, ("h100", False): 0.77}
"""Largest relative error of steps a second against such figures, by chip and whether the program is its own: with its
own each by the constants that the other eight give; a CPU's is too slow for all three that were compared."""


class Collective(NamedTuple):
    """A collective of the program with its number of runs in an update."""

    operation: str  # "all-reduce"
    runs: float
    bytes: float  # of its result on one device
    within: bool = False  # among the devices that share the parameters


class Measured(NamedTuple):
    """Program of a run: seconds of an update without collectives, and the work of each device in it."""

    compute_seconds: float | None  # None: it was compiled alone
    steps: int  # agent steps of an update on one shard of the data
    work: tuple[tuple[float, float, float], ...]  # (runs, operations of one, bytes of one) of each instruction
    collectives: tuple[Collective, ...]
    memory: float  # bytes a device needs
    state_bytes: float  # needed by a device
    carry_bytes: float  # of a checkpoint, once a shard
    model: int = 1  # devices that share the parameters, and make a shard together
    own: bool = False  # compiled for the chip of the plan, not for a CPU
    why: str = ""  # reason why not


class Calibration(NamedTuple):
    """Two short runs on this machine, of one process and of two with a device each."""

    alone: float  # seconds of an update of one
    pair: float  # of two, each with the batch of one
    spread: float  # of their calls, relative
    small: float  # seconds of an all-reduce of few bytes between two
    byte: float  # seconds of a further byte in it
    cores: int  # that the processes share


class Assumptions(NamedTuple):
    """Assumptions that are not measured."""

    network: float = 50e9  # bytes a second to other hosts, a device: 400 Gb/s
    latency: float = 5e-6  # seconds of a message
    efficiency: float = 0.4  # of the peaks, on other hardware
    save_minutes: float = 10.0
    keep: int = 3
    price: float | None = None  # dollars an hour a device; None: the chip's


class Row(NamedTuple):
    """Plan for one number of devices."""

    devices: int
    batch: int  # agent steps of an update, over all devices
    update_seconds: float
    communication_seconds: float  # of it
    efficiency: float  # against one shard
    steps_per_second: float
    hours: float
    dollars: float
    memory: float  # bytes a device
    checkpoint: float  # bytes of one
    written: float  # bytes of all checkpoints of the run
    fits: bool
    error: float | None = None  # of its time, relative; None where unknown


def work(
    updates: int, devices: int, runs: Mapping[str, float], program: Mapping[str, Instruction]
) -> tuple[tuple[float, float, float], ...]:
    """Work of a device in an update, from the `runs` of each instruction in `updates` updates on `devices` devices,
    without collectives."""
    known = ((program[name], count) for name, count in runs.items() if name in program)
    return tuple(
        (count / updates / devices, each.operations, each.bytes)
        for each, count in known
        if each.opcode not in CONTROL and not each.opcode.startswith(COLLECTIVES)
    )


def collectives(crossings: Sequence[Crossing], model: int) -> tuple[Collective, ...]:
    """Collectives of a program of several shards of `model` devices each; equal ones are counted together."""
    runs: Counter[tuple[str, int, bool]] = Counter()
    for each in crossings:
        runs[each.operation, each.bytes, not each.over_shards(model)] += each.times()
    return tuple(Collective(operation, n, size, within) for (operation, size, within), n in runs.items())


def compute_seconds(program: Measured, chip: Chip, assumed: Assumptions, *, bf16: bool, share: float = 1.0) -> float:
    """Seconds of one update of one device on `chip`, with `share` of its batch: the roofline and the launches."""
    times = _rooflines(program, chip, assumed, bf16=bf16, share=share)
    if program.own:
        return sum(runs * (KERNEL + work) for runs, work in times)
    return sum(runs * max(work, LAUNCH[chip.kind]) for runs, work in times)


def roofline_seconds(program: Measured, chip: Chip, assumed: Assumptions, *, bf16: bool) -> float:
    """Seconds of the work of one update of one device on `chip`, as if launches took none."""
    return sum(runs * work for runs, work in _rooflines(program, chip, assumed, bf16=bf16))


def _rooflines(
    program: Measured, chip: Chip, assumed: Assumptions, *, bf16: bool, share: float = 1.0
) -> list[tuple[float, float]]:
    """(runs, seconds of the work of one) of each instruction."""
    peak, bandwidth = (
        (chip.bf16 if bf16 else chip.fp32) * assumed.efficiency,
        chip.memory_bandwidth * assumed.efficiency,
    )
    return [(runs, share * max(operations / peak, moved / bandwidth)) for runs, operations, moved in program.work]


def communication_seconds(program: Measured, chip: Chip, assumed: Assumptions, devices: int) -> float:
    """Seconds of all collectives of an update over `devices`, a multiple of `program.model`."""
    total = 0.0
    for each in program.collectives:
        meet, reach = (program.model, program.model) if each.within else (devices // program.model, devices)
        if meet == 1:
            continue
        link = chip.link if reach <= chip.per_host else min(chip.link, assumed.network)
        # An all-reduce is a reduce-scatter and an all-gather; a reduce-scatter's result is one of `meet` parts.
        ways = 2.0 if each.operation == "all-reduce" else 1.0
        whole = each.bytes * (meet if each.operation == "reduce-scatter" else 1)
        total += each.runs * ways * ((meet - 1) / meet * whole / link + math.ceil(math.log2(meet)) * assumed.latency)
    return total


def meeting_seconds(program: Measured, machine: Calibration, processes: int, *, hops: int | None = None) -> float:
    """Seconds of all collectives of an update between processes of this machine.

    gloo's all-reduce is a ring of 2 (N - 1) messages in a row, two of them between two processes. `hops` is another
    number of messages. Where processes take turns on a core, so do their messages.
    """
    if processes == 1:
        return 0.0
    count = 2 * (processes - 1) if hops is None else hops
    moved = 2.0 * (processes - 1) / processes  # as a multiple of what two send
    ring = [each.runs * (machine.small * count / 2 + each.bytes * machine.byte * moved) for each in program.collectives]
    return sum(ring) * max(1.0, processes / machine.cores) / max(1.0, 2.0 / machine.cores)


def slowdown(program: Measured, machine: Calibration, processes: int) -> float:
    """Seconds of an update's computation in one of so many processes, as a multiple of those of one alone."""
    if processes == 1:
        return 1.0
    pair = max(1.0, (machine.pair - meeting_seconds(program, machine, 2)) / machine.alone)
    known = min(processes, max(2, machine.cores))
    return (1.0 + (pair - 1.0) * (known - 1)) * processes / known


def calibrated(
    program: Measured, chip: Chip, assumed: Assumptions, machine: Calibration, processes: int, steps: float, *,
    strong: bool,
) -> Row:  # fmt: skip
    """Plan for `steps` agent steps in so many processes of this machine, whose memory they share.

    Its error is the spread of the calibrating calls, as often as the number of processes doubles, and the difference to
    a tree of 2 log2(N) messages.
    """
    share = 1.0 / processes if strong else 1.0
    meeting = meeting_seconds(program, machine, processes)
    seconds = machine.alone * slowdown(program, machine, processes) * share + meeting
    doublings = math.ceil(math.log2(processes))
    tree = meeting_seconds(program, machine, processes, hops=2 * doublings)
    error = machine.spread * max(1, doublings) + abs(meeting - tree) / seconds
    chip, times = chip._replace(memory=chip.memory / processes), (machine.alone, seconds, meeting)
    return _row(program, chip, assumed, processes, steps, times, strong=strong, error=error)


def row(
    program: Measured, chip: Chip, assumed: Assumptions, devices: int, steps: float, *, here: bool, bf16: bool,
    strong: bool,
) -> Row:  # fmt: skip
    """Plan for `steps` agent steps; `here`: on the measured hardware."""
    shards = devices // program.model
    share = 1.0 / shards if strong else 1.0
    if here:
        assert program.compute_seconds is not None
        alone, compute = program.compute_seconds, program.compute_seconds * share
    else:
        alone = compute_seconds(program, chip, assumed, bf16=bf16)
        compute = compute_seconds(program, chip, assumed, bf16=bf16, share=share)
    alone += communication_seconds(program, chip, assumed, program.model)
    communication = communication_seconds(program, chip, assumed, devices)
    times = alone, compute + communication, communication
    known_error = None if here else OFF.get((chip.name, program.own))
    error = None if known_error is None else known_error + communication / (compute + communication)
    return _row(program, chip, assumed, devices, steps, times, strong=strong, error=error)


def _row(
    program: Measured, chip: Chip, assumed: Assumptions, devices: int, steps: float, times: tuple[float, float, float],
    *, strong: bool, error: float | None,
) -> Row:  # fmt: skip
    """Plan from seconds of an update: those of one shard, those of all, those of collectives in it."""
    shards = devices // program.model
    alone, update, communication = times
    batch = program.steps if strong else program.steps * shards
    rate = batch / update
    hours = steps / rate / 3600.0
    price = chip.price if assumed.price is None else assumed.price
    checkpoint = program.state_bytes + program.carry_bytes * (1 if strong else shards)
    saves = max(1, math.ceil(hours * 60.0 / assumed.save_minutes))
    return Row(
        devices, batch, update, communication, rate / (program.steps / alone * shards), rate, hours,
        hours * devices * price, program.memory, checkpoint, checkpoint * saves, program.memory <= chip.memory, error,
    )  # fmt: skip


def assumptions_in_words(
    program: Measured, chip: Chip, assumed: Assumptions, *, here: bool, bf16: bool, strong: bool,
    machine: Calibration | None = None,
) -> list[tuple[str, str]]:  # fmt: skip
    """Assumptions in words."""
    price = chip.price if assumed.price is None else assumed.price
    peak, bandwidth = chip.bf16 if bf16 else chip.fp32, chip.memory_bandwidth
    peaks = f"{assumed.efficiency:.0%} of {peak / 1e12:,.0f} T operations/s and {bandwidth / 1e9:,.0f} GB/s"
    runs = sum(times for times, _, _ in program.work)
    roofline = (
        f"each of {runs:,.0f} kernels of the chip's own program takes {1e6 * KERNEL:g} us and its work, by a roofline "
        f"at {peaks}"
        if program.own
        else f"each of {runs:,.0f} instructions of a CPU's program takes its work, by a roofline at {peaks}, and "
        f"{1e6 * LAUNCH[chip.kind]:g} us at least; the chip's own program was not compiled: {program.why}"
    )
    links = [
        ("compute", "as measured here" if here else roofline),
        ("collectives", "a ring in full, and a latency of "
         f"{assumed.latency * 1e6:g} us each of 2 log2(shards) times; none of it overlaps with other work"),
        ("links", f"{chip.link / 1e9:,.1f} GB/s among {chip.per_host} devices of a host, "
         f"{min(chip.link, assumed.network) / 1e9:,.1f} GB/s a device beyond"),
    ]  # fmt: skip
    if machine is not None:
        links = [
            ("compute", f"processes of this machine, which share {machine.cores} core(s); an update took "
             f"{machine.alone:.4g} s in one process, {machine.pair:.4g} s in two"),
            ("collectives", f"a ring in full of {machine.small * 1e6:,.0f} us between two processes and "
             f"{1e-6 / max(machine.byte, 1e-15):,.0f} MB/s; none of it overlaps with other work"),
        ]  # fmt: skip
    error = "unknown: --calibrate tells it" if here else "unknown: plan on the chip itself"
    if not here and (chip.name, program.own) in OFF:
        error = (
            "the largest against nine measured runs of an H100, each with the constants of the other eight"
            if program.own
            else "the largest against three measured runs of an H100"
        ) + "; and all of the collectives' time, which was never compared"
    if machine is not None:
        error = "the spread of the calibrating calls, and what the number of messages is uncertain by"
    return [
        *links,
        ("batch", "shared by all devices" if strong else "one a device; as many steps teach as much whatever it is"),
        ("price", f"{price:g} dollars an hour a device"),
        ("checkpoints", f"every {assumed.save_minutes:g} minutes, of which {assumed.keep} stay"),
        ("failures", "none; each costs what was done since the last save, and a start"),
        ("error", error),
    ]
