"""The command `profile`: its flags and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import run_flags, tables
from longhaul.cli.flags import INT, OUTPUT, PATH, Flag
from longhaul.config.resolve import resolve

ABOUT = "Traces some updates of a recipe and says where their time goes."

FLAGS = (
    Flag("out", PATH, "profile", "folder of the trace, for TensorBoard and Perfetto"),
    Flag("calls", INT, 3, "compiled calls that are traced, each of --block updates", least=1),
    Flag("json", OUTPUT, None, "write what was found to this file; - is stdout"),
)


def profile(argv: Sequence[str]) -> int:
    """`longhaul profile RECIPE [--out FOLDER] [--calls N] [--json FILE] [--flags of longhaul train]`."""
    recipe, parsed = run_flags.of_recipe("profile", ABOUT, FLAGS, argv)
    run = resolve(run_flags.chosen(recipe, parsed))

    from longhaul.diagnostics import profile as profiles

    figures = profiles.profile(run, Path(parsed.values["out"]), parsed.values["calls"])
    tables.report(parsed.values["json"], figures, lambda: show(figures))
    return 0


def show(figures: dict[str, Any]) -> None:
    """Tables of what `profile.profile` found."""
    roof, operations, moved = figures["roofline"], figures["operations_per_step"], figures["bytes_per_step"]
    speed, update = figures["agent_steps_per_second"], figures["seconds_per_update"]
    shares = [f"{roof[f'share_of_peak_{name}']:.1%} of the {name}" for name in ("operations", "bytes")]
    tables.listing(
        [
            ("recipe", f"{figures['recipe']} on {figures['devices']} x {figures['chip']}"),
            ("speed", f"{speed:,.0f} agent steps/s, {update:.4g} s an update"),
            ("compiled in", f"{figures['compile_seconds']:.1f} s"),
            ("memory", ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in figures["memory"].items())),
            ("products", f"{operations / 1e6:.3g} million operations an agent step"),
            ("bytes", f"{moved / 1e3:.3g} kB an agent step, {roof['operations_per_byte']:.3g} operations a byte"),
            ("roofline", f"{' and '.join(shares)} that the devices could; bound by {roof['bound_by']}"),
        ]
    )
    print()
    tables.table(["part", "share"], [[name, f"{share:.1%}"] for name, share in figures["shares"].items()])
    print()
    header = ["instruction", "part", "runs", "share", "scope"]
    rows = [
        [each["instruction"], each["part"], f"{each['runs']:,}", f"{each['share']:.1%}", each["scope"][-60:]]
        for each in figures["longest"]
    ]
    tables.table(header, rows)
    print(f"\ntrace: {figures['trace']}; tensorboard --logdir {figures['trace']} shows it, and ui.perfetto.dev")
