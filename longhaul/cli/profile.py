"""The command `profile`: its flags and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import flags, run_flags, tables
from longhaul.cli.flags import INT, PATH, Flag, FlagError
from longhaul.config import recipes
from longhaul.config.resolve import resolve

ABOUT = "Traces some updates of a recipe and says where their time goes."

OUT = Flag("out", PATH, "profile", "folder of the trace, for TensorBoard and Perfetto")
CALLS = Flag("calls", INT, 3, "compiled calls that are traced, each of --block updates")
JSON = Flag("json", PATH, None, "write what was found to this file; - is stdout", shown="")


def profile(words: Sequence[str]) -> int:
    """`longhaul profile RECIPE [--out FOLDER] [--calls N] [--json FILE] [--flags of longhaul train]`."""
    if not words or words[0].startswith("-"):
        if words and words[0] in ("-h", "--help"):
            about = f"{ABOUT} All flags of longhaul train count, too."
            flags.parse("profile RECIPE", about, {"": [OUT, CALLS, JSON]}, words)
        raise FlagError(f"name a recipe first: longhaul profile RECIPE; there are {', '.join(recipes.RECIPES)}")
    recipe = recipes.recipe(words[0])
    groups = run_flags.table(recipe)
    groups[""] = [OUT, CALLS, JSON, *groups[""]]
    parsed = flags.parse(f"profile {recipe.recipe}", ABOUT, groups, words[1:])
    if parsed.values["calls"] < 1:
        raise FlagError(f"--calls is {parsed.values['calls']}; it must be at least 1")
    tables.check_json(parsed.values["json"])
    run = resolve(run_flags.chosen(recipe, parsed))

    from longhaul.diagnostics import profile as profiles

    found = profiles.profile(run, Path(parsed.values["out"]), parsed.values["calls"])
    if parsed.values["json"] != "-":
        show(found)
    if parsed.values["json"] is not None:
        tables.write_json(parsed.values["json"], found)
    return 0


def show(found: dict[str, Any]) -> None:
    """Prints what `profile.profile` found."""
    roof, operations, moved = found["roofline"], found["operations_per_step"], found["bytes_per_step"]
    speed, update = found["agent_steps_per_second"], found["seconds_per_update"]
    shares = [f"{roof[f'share_of_peak_{name}']:.1%} of the {name}" for name in ("operations", "bytes")]
    tables.listing(
        [
            ("recipe", f"{found['recipe']} on {found['devices']} x {found['chip']}"),
            ("speed", f"{speed:,.0f} agent steps/s, {update:.4g} s an update"),
            ("compiled in", f"{found['compile_seconds']:.1f} s"),
            ("memory", ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in found["memory"].items())),
            ("products", f"{operations / 1e6:.3g} million operations an agent step"),
            ("bytes", f"{moved / 1e3:.3g} kB an agent step, {roof['operations_per_byte']:.3g} operations a byte"),
            ("roofline", f"{' and '.join(shares)} that the devices could; bound by {roof['bound_by']}"),
        ]
    )
    print()
    tables.table(["part", "share"], [[name, f"{share:.1%}"] for name, share in found["shares"].items()])
    print()
    header = ["instruction", "part", "runs", "share", "scope"]
    rows = [
        [each["instruction"], each["part"], f"{each['runs']:,}", f"{each['share']:.1%}", each["scope"][-60:]]
        for each in found["longest"]
    ]
    tables.table(header, rows)
    print(f"\ntrace: {found['trace']}; tensorboard --logdir {found['trace']} shows it, and ui.perfetto.dev")
