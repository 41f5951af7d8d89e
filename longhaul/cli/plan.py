"""The command `plan`: its flags, its tables, and the check of its model against a measurement."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from longhaul.algorithms.config import precision
from longhaul.algorithms.values import OF_AN_ACCELERATOR
from longhaul.cli import run_flags, tables
from longhaul.cli.flags import FLOAT, INT, OUTPUT, Flag, FlagError, choice, optional
from longhaul.config.resolve import resolve
from longhaul.config.run import Run
from longhaul.diagnostics import chips, compiled_run, compute_plan, hlo, profile
from longhaul.diagnostics.chips import CHIPS
from longhaul.diagnostics.compute_plan import Assumptions, Measured
from longhaul.runtime import mesh as meshes

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
        "efficiency", FLOAT, 0.4, "share of the chip's peaks that is reached, on other hardware", least=1e-3, most=1.0
    ),
    Flag("price", optional(FLOAT), None, "dollars an hour a device", shown="of a list", least=0.0),
    Flag("calls", INT, 3, "compiled calls that are measured", least=1),
    Flag("json", OUTPUT, None, "write the plan to this file; - is stdout"),
]


def plan(words: Sequence[str]) -> int:
    """`longhaul plan RECIPE [--steps N] [--hardware NAME] [--on N...] [--flags of longhaul train]`."""
    recipe, parsed = run_flags.of_recipe("plan", ABOUT, FLAGS, words)
    found = planned(resolve(run_flags.chosen(recipe, parsed)), parsed.values)
    tables.report(parsed.values["json"], found, lambda: show(found))
    return 0


def planned(run: Run, values: dict[str, Any]) -> dict[str, Any]:
    """The plan for a resolved run, as JSON can hold it."""
    on = _numbers(values["on"], run.model)
    here = values["hardware"] == "here"
    if not here and getattr(run.algorithm, "chunk", 0) is None:  # the program that they would run
        of_theirs = dataclasses.replace(run.algorithm, chunk=OF_AN_ACCELERATOR)  # type: ignore[arg-type]
        run = dataclasses.replace(run, algorithm=of_theirs)
    what, devices = short_run(run, values["calls"])
    chip = chips.here(devices) if here else CHIPS[values["hardware"]]
    bf16, strong = precision(run.algorithm) == "bf16", values["share"] == "strong"
    assumed = Assumptions(
        values["network"] * 1e9 / 8, values["latency"] * 1e-6, values["efficiency"], run.save_interval_minutes,
        run.keep, values["price"],
    )  # fmt: skip
    steps = float(values["steps"] or run.total_steps)
    rows = [compute_plan.row(what, chip, assumed, n, steps, here=here, bf16=bf16, strong=strong) for n in on]
    modelled = compute_plan.compute_seconds(what, chips.here(devices), assumed._replace(efficiency=1.0), bf16=False)
    return {
        "recipe": run.recipe, "hardware": chip.name, "steps": steps, "share": values["share"],
        "measured": {
            "devices": devices, "steps_per_update": what.steps * devices, "compute_seconds": what.compute_seconds,
            "roofline_seconds": modelled, "memory": what.memory, "state_bytes": what.state_bytes,
            "carry_bytes": what.carry_bytes,
            "collectives": [each._asdict() for each in what.collectives], "model": what.model,
        },
        "assumptions": dict(compute_plan.said(chip, assumed, here=here, bf16=bf16, strong=strong)),
        "plan": [row._asdict() for row in rows],
    }  # fmt: skip


def _numbers(asked: Sequence[int], model: int) -> list[int]:
    """The numbers of devices to plan for. Raises FlagError where `model` devices can't be a shard."""
    if not asked:
        return [n for n in DEVICES if n % model == 0] or [model * n for n in DEVICES]
    for devices in asked:
        if devices % model:
            raise FlagError(
                f"--on is {devices}, and with --mesh model={model} so many devices share the parameters; ask for "
                f"multiples of {model}"
            )
    return list(asked)


def short_run(run: Run, calls: int) -> tuple[Measured, int]:
    """A short measured run of a resolved `run`; -> (what the model needs of it, its devices)."""
    with tempfile.TemporaryDirectory() as folder:
        traced = profile.measure(run, Path(folder), calls)
    program, mesh = traced.program, traced.program.assembly.mesh
    devices, shards, model = mesh.size, mesh.shape[meshes.DATA], mesh.shape[meshes.MODEL]
    shares = profile.reading(traced.events, traced.instructions)["shares"]
    memory = profile.memory(program.executable)
    begun = program.start(run.seed)
    runs = Counter(event.instruction for event in traced.events)
    crossings = hlo.crossings(program.text()) if shards > 1 else compiled_run.two_shards(run)
    what = Measured(
        traced.update_seconds * (1.0 - shares["collectives"]), program.assembly.steps_per_update // shards,
        compute_plan.work(traced.updates, devices, runs, traced.instructions),
        compute_plan.collectives(crossings, model),
        float(memory.get("peak", 0)), _bytes(begun.state), _bytes(begun.carry) / shards, model,
    )  # fmt: skip
    return what, devices


def _bytes(tree: Any) -> float:
    return float(sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)))


def show(found: dict[str, Any]) -> None:
    """Prints what `planned` found."""
    about = found["measured"]
    collectives = sum(each["runs"] for each in about["collectives"])
    moved = sum(each["runs"] * each["bytes"] for each in about["collectives"])
    tables.listing(
        [
            ("recipe", f"{found['recipe']}, {found['steps']:,.0f} agent steps on {found['hardware']}"),
            ("measured", f"{about['compute_seconds']:.4g} s an update on {about['devices']} device(s) here, "
             f"{about['steps_per_update']:,} agent steps, {collectives:,.0f} collectives of {moved / 1e6:,.2f} MB"),
            *found["assumptions"].items(),
        ]
    )  # fmt: skip
    print()
    header = [
        "devices", "batch", "s/update", "in collectives", "efficiency", "steps/s", "hours", "dollars", "memory",
        "checkpoint", "written",
    ]  # fmt: skip
    rows = [
        [
            f"{each['devices']:,}", f"{each['batch']:,}", f"{each['update_seconds']:.3g}",
            f"{each['communication_seconds'] / each['update_seconds']:.1%}", f"{each['efficiency']:.1%}",
            f"{each['steps_per_second']:,.0f}", f"{each['hours']:,.2f}", f"{each['dollars']:,.0f}",
            _size(each["memory"]) + ("" if each["fits"] else " (too much)"), _size(each["checkpoint"]),
            _size(each["written"]),
        ]
        for each in found["plan"]
    ]  # fmt: skip
    tables.table(header, rows)


def _size(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    unit = min(int(math.log10(max(count, 1)) / 3), 4)
    return f"{count:.0f} B" if unit == 0 else f"{count / 1000**unit:.1f} {('kB', 'MB', 'GB', 'TB')[unit - 1]}"
