"""The command `plan`: its flags, its tables, and the check of its model against a measurement."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.algorithms.config import precision
from longhaul.algorithms.values import ROWS_OF_AN_ACCELERATOR
from longhaul.cli import run_flags, tables
from longhaul.cli.flags import FLOAT, INT, OUTPUT, SWITCH, Flag, FlagError, Parsed, choice, optional
from longhaul.config.resolve import resolve
from longhaul.config.run import Run
from longhaul.diagnostics import calibration, chip_program, chips, compiled_run, compute_plan, hlo, profile
from longhaul.diagnostics.chips import CHIPS
from longhaul.diagnostics.compiled_run import Program
from longhaul.diagnostics.compute_plan import Assumptions, Calibration, Measured
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import cores, on_cpu, prepare_devices
from longhaul.runtime.errors import RunError

DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

ABOUT = "What a run takes on 1 to 1,024 devices: time, money, memory, checkpoints; from a short run and a model."

FLAGS = [
    Flag("steps", FLOAT, None, "agent steps of the run", shown="the recipe's", least=1.0),
    Flag("hardware", choice(("here", *CHIPS)), "here", "the devices to plan for"),
    Flag("on", INT, (), "numbers of devices", shown="1 2 4 ... 1024", many=True, least=1, most=1_000_000),
    Flag("share", choice(("weak", "strong")), "weak", "weak: every device keeps its batch; strong: they share it"),
    Flag("network", FLOAT, 400.0, "gigabits a second between hosts, a device", least=1e-3),
    Flag("latency", FLOAT, 5.0, "microseconds of a message between devices", least=0.0),
    Flag(
        "efficiency",
        optional(FLOAT),
        None,
        "share of the chip's peaks that is reached, on other hardware",
        shown=f"{compute_plan.REACHED:g} of its own program, 0.4 of a CPU's",
        least=1e-3,
        most=1.0,
    ),
    Flag("price", optional(FLOAT), None, "dollars an hour a device", shown="of a list", least=0.0),
    Flag("calls", INT, 3, "compiled calls that are measured", least=1),
    Flag(
        "calibrate",
        SWITCH,
        False,
        "measure two short runs on this machine first, of one process and of two; --on is "
        "then a number of processes here",
    ),
    Flag("json", OUTPUT, None, "write the plan to this file; - is stdout"),
]


def plan(argv: Sequence[str]) -> int:
    """`longhaul plan RECIPE [--steps N] [--hardware NAME] [--on N...] [--flags of longhaul train]`."""
    recipe, parsed = run_flags.of_recipe("plan", ABOUT, FLAGS, argv)
    figures = planned(chosen(recipe, parsed), parsed.values)
    tables.report(parsed.values["json"], figures, lambda: show(figures))
    return 0


def chosen(recipe: Run, parsed: Parsed) -> Run:
    """Resolved run to plan: of one device where its devices are not this process's, unless --mesh says another number.

    Its batch is that of a device in the plan.
    """
    run, values = run_flags.chosen(recipe, parsed), parsed.values
    elsewhere = values["calibrate"] or values["hardware"] != "here"
    resolved = resolve(dataclasses.replace(run, devices=1) if elsewhere and not run.devices else run)
    compiled_run.check(resolved)
    return resolved


def planned(run: Run, values: dict[str, Any]) -> dict[str, Any]:
    """The plan for a resolved run, as JSON can hold it."""
    here = values["hardware"] == "here"
    if values["calibrate"]:
        _check_calibration(run, values["hardware"])
    usual = [n for n in DEVICES if n <= max(4, 2 * cores()) or not values["calibrate"]]
    assert run.devices is not None
    worlds = run.num_envs // run.devices if values["share"] == "strong" else None
    on = _numbers(values["on"], usual, run.model, worlds)
    if not here and getattr(run.algorithm, "chunk", 0) is None:  # the program that they would run
        of_theirs = dataclasses.replace(run.algorithm, chunk=ROWS_OF_AN_ACCELERATOR)  # type: ignore[arg-type]
        run = dataclasses.replace(run, algorithm=of_theirs)
    steps = float(values["steps"] or run.total_steps)
    machine, shards = None, max(on) // run.model
    if values["calibrate"]:
        program, machine = calibrated(run, values["calls"])
        devices, chip = 1, chips.machine()
    elif here:
        program, devices = short_run(run, values["calls"], shards)
        chip = chips.of_this_process(devices)
    else:
        program, devices = program_of(run, shards, values["hardware"]), run.all_devices
        chip = CHIPS[values["hardware"]]
    bf16, strong = precision(run.algorithm) == "bf16", values["share"] == "strong"
    assumed = Assumptions(
        values["network"] * 1e9 / 8, values["latency"] * 1e-6,
        values["efficiency"] or (compute_plan.REACHED if program.own else 0.4),
        run.save_interval_minutes, run.keep, values["price"],
    )  # fmt: skip
    if machine is not None:
        rows = [compute_plan.calibrated(program, chip, assumed, machine, n, steps, strong=strong) for n in on]
    else:
        rows = [compute_plan.row(program, chip, assumed, n, steps, here=here, bf16=bf16, strong=strong) for n in on]
    measured = {
        "devices": devices, "steps_per_update": program.steps * devices // program.model,
        "compute_seconds": program.compute_seconds, "memory": program.memory, "state_bytes": program.state_bytes,
        "carry_bytes": program.carry_bytes, "collectives": [each._asdict() for each in program.collectives],
        "model": program.model, "calibration": None if machine is None else machine._asdict(), "own": program.own,
    }  # fmt: skip
    if machine is None:
        whole = assumed._replace(efficiency=1.0) if here else assumed
        measured["instructions"] = sum(runs for runs, _, _ in program.work)
        measured["roofline_seconds"] = compute_plan.roofline_seconds(program, chip, whole, bf16=bf16 and not here)
    assumptions = compute_plan.assumptions_in_words(
        program, chip, assumed, here=here, bf16=bf16, strong=strong, machine=machine
    )
    return {
        "recipe": run.recipe, "hardware": chip.name, "steps": steps, "share": values["share"], "measured": measured,
        "assumptions": dict(assumptions),
        "plan": [row._asdict() for row in rows],
    }  # fmt: skip


def _check_calibration(run: Run, hardware: str) -> None:
    """Raises FlagError where two short runs on this machine would tell nothing of a plan."""
    if hardware != "here":
        raise FlagError(f"--calibrate measures this machine, and --hardware is {hardware}; leave one of them out")
    if not on_cpu():
        raise FlagError(
            "--calibrate runs processes that share this machine's cores, and a run here would take an accelerator; set "
            "JAX_PLATFORMS=cpu, or leave it out"
        )
    if run.all_devices > 1:
        raise FlagError(
            f"--calibrate runs processes of one device each, and --mesh is {run.mesh}; leave --mesh out: --on is the "
            "number of processes"
        )


def _numbers(numbers: Sequence[int], usual: Sequence[int], model: int, worlds: int | None) -> list[int]:
    """The numbers of devices to plan for; of the `usual` ones those that can be, where none is given. Raises FlagError
    where `model` devices can't be a shard, or where shards can't share a batch of so many `worlds` (None: each has its
    own)."""

    def even(devices: int) -> bool:
        return worlds is None or worlds % (devices // model) == 0

    if not numbers:
        every = [n for n in usual if n % model == 0] or [model * n for n in usual]
        return [n for n in every if even(n)]
    for devices in numbers:
        if devices % model:
            raise FlagError(
                f"--on is {devices}, and with --mesh model={model} so many devices share the parameters; ask for "
                f"multiples of {model}"
            )
        if not even(devices):
            raise FlagError(
                f"--on is {devices}, and --share strong shares {worlds} worlds, which {devices // model} shards do not "
                "divide; ask for other numbers, or give other --num-envs"
            )
    return list(numbers)


def short_run(run: Run, calls: int, most: int) -> tuple[Measured, int]:
    """A short measured run of a resolved `run`; -> (what the model needs of it for at most so many shards, its
    devices)."""
    with tempfile.TemporaryDirectory() as folder:
        traced = profile.measure(run, Path(folder), calls)
    devices = traced.program.assembly.mesh.size
    shares = profile.reading(traced.events, traced.instructions)["shares"]
    runs = Counter(event.instruction for event in traced.events)
    work = compute_plan.work(traced.updates, devices, runs, traced.instructions)
    seconds = traced.update_seconds * (1.0 - shares["collectives"])
    return _measured(traced.program, seconds, work, most), devices


def program_of(run: Run, most: int, hardware: str) -> Measured:
    """The program of a resolved `run`, not run: compiled for `hardware` if this machine has its compiler, else for the
    CPU; what a plan for at most so many shards needs of it."""
    why = chip_program.missing(hardware)
    if why is None:
        try:
            return chip_program.measured(run, hardware, most)
        except RunError as error:
            why = str(error)
    prepare_devices(run.all_devices, run.threads)
    program = compiled_run.compiled(run)
    text = program.text()
    work = compute_plan.work(1, 1, hlo.runs(text), hlo.read(text))
    return _measured(program, None, work, most)._replace(why=why)


def calibrated(run: Run, calls: int) -> tuple[Measured, Calibration]:
    """Two short runs of a resolved `run` of one device: (what the model needs of its program, their times)."""
    calls = max(calls, calibration.CALLS)
    alone, pair = calibration.measure(run, 1, calls), calibration.measure(run, 2, calls)
    crossings = compiled_run.crossings_of(pair.crossings)
    program = Measured(
        None, alone.steps, (), compute_plan.collectives(crossings, 1), alone.memory, alone.state_bytes,
        alone.carry_bytes,
    )  # fmt: skip
    byte = max(pair.large - pair.small, 0.0) / calibration.LARGE
    spread = max(alone.spread, pair.spread)
    return program, Calibration(alone.update, pair.update, spread, pair.small, byte, cores())


def _measured(
    program: Program, seconds: float | None, work: tuple[tuple[float, float, float], ...], most: int
) -> Measured:
    mesh, run = program.assembly.mesh, program.run
    shards, model = mesh.shape[meshes.DATA], mesh.shape[meshes.MODEL]
    begun, memory = program.start(run.seed), profile.memory(program.executable)
    crossings = hlo.crossings(program.text()) if shards > 1 else compiled_run.two_shards(run) if most > 1 else []
    state, carry = calibration.total_bytes(begun.state), calibration.total_bytes(begun.carry)
    return Measured(
        seconds, program.assembly.steps_per_update // shards, work, compute_plan.collectives(crossings, model),
        float(memory.get("peak", 0)), state, carry / shards, model,
    )  # fmt: skip


def show(figures: dict[str, Any]) -> None:
    """Tables of what `planned` found."""
    about = figures["measured"]
    collectives = sum(each["runs"] for each in about["collectives"])
    moved = sum(each["runs"] * each["bytes"] for each in about["collectives"])
    seconds = about["compute_seconds"]
    calibrated = about["calibration"]
    source = "compiled" if seconds is None and calibrated is None else "measured"
    took = "" if seconds is None else f"{seconds:.4g} s an update on {about['devices']} device(s) here, "
    tables.listing(
        [
            ("recipe", f"{figures['recipe']}, {figures['steps']:,.0f} agent steps on {figures['hardware']}"),
            (source, f"{took}{about['steps_per_update']:,} agent steps an update, "
             f"{collectives:,.0f} collectives of {moved / 1e6:,.2f} MB"),
            *figures["assumptions"].items(),
        ]
    )  # fmt: skip
    print()
    header = [
        "processes" if calibrated else "devices", "batch", "s/update", "in collectives", "efficiency", "steps/s",
        "error", "hours", "dollars", "memory", "checkpoint", "written",
    ]  # fmt: skip
    rows = [
        [
            f"{each['devices']:,}", f"{each['batch']:,}", f"{each['update_seconds']:.3g}",
            f"{each['communication_seconds'] / each['update_seconds']:.1%}", f"{each['efficiency']:.1%}",
            f"{each['steps_per_second']:,.0f}", "unknown" if each["error"] is None else f"{each['error']:.0%}",
            f"{each['hours']:,.2f}", f"{each['dollars']:,.0f}",
            _size(each["memory"]) + ("" if each["fits"] else " (too much)"), _size(each["checkpoint"]),
            _size(each["written"]),
        ]
        for each in figures["plan"]
    ]  # fmt: skip
    tables.table(header, rows)


def _size(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    unit = min(int(math.log10(max(count, 1)) / 3), 4)
    return f"{count:.0f} B" if unit == 0 else f"{count / 1000**unit:.1f} {('kB', 'MB', 'GB', 'TB')[unit - 1]}"
