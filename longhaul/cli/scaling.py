"""The command `longhaul scaling driving`, also `longhaul train driving-scaling`: a grid of runs and its law."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import flags, run_flags, tables
from longhaul.cli.flags import FLOAT, INT, TEXT, Flag, FlagError, Kind, choice
from longhaul.config import recipes
from longhaul.diagnostics import scaling_grid as grids
from longhaul.diagnostics.scaling_grid import METRICS
from longhaul.runtime.errors import RunError
from longhaul.training.run_dir import new_folder

NAMES = {"driving": "driving-scaling"}
"""Grids of `longhaul scaling`, with the recipe of each."""

VARIED = ("model-size", "scenarios", "data", *run_flags.SIDE_BY_SIDE)
"""Flags of a run that a grid sets itself."""

ABOUT = "Trains models of several sizes on several numbers of scenarios, and fits and draws the law of their failures."


def _list_of(kind: Kind) -> Kind:
    """Several of `kind` in one word, by commas."""

    def read(word: str) -> tuple[Any, ...]:
        return tuple(kind.read(part) for part in word.split(","))

    return Kind(f"{kind.metavar},...", f"{kind.allowed}, or several with commas between", read)


GRID = (
    Flag("sizes", _list_of(FLOAT), None, "millions of parameters of the models"),
    Flag("scenarios", _list_of(INT), None, "generated scenarios to train in"),
    Flag("seeds", INT, None, "runs of each size and number of scenarios"),
    Flag("metric", choice(METRICS), None, "what a policy scores where it does not fail"),
    Flag("checks", _list_of(TEXT), None, "points SIZE:SCENARIOS that the law forecasts, trained and left out of it"),
)

AT_ONCE = Flag("at-once", INT, 1, "sizes that are trained at once, each in a process of its own, on the same devices")


def scaling(argv: Sequence[str]) -> int:
    """`longhaul scaling driving [--flags]`."""
    commands = ", ".join(f"longhaul scaling {name}" for name in NAMES)
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: longhaul scaling NAME [--flags]\n\n{ABOUT} There is:\n")
        tables.listing((f"  {name}", recipes.about(recipe)) for name, recipe in NAMES.items())
        return 0
    if not argv or argv[0] not in NAMES:
        problem = f"longhaul scaling has no {argv[0]!r}" if argv else "name what to scale"
        raise FlagError(f"{problem}; there is {commands}")
    return run(NAMES[argv[0]], argv[1:], f"scaling {argv[0]}")


def run(recipe: str, argv: Sequence[str], command: str) -> int:
    """A grid's recipe with flags, from its folder on, or on in its folder."""
    default = recipes.GRIDS[recipe]()
    groups = {"grid: What is run.": [_with_default(flag, getattr(default, flag.name)) for flag in GRID] + [AT_ONCE]}
    for title, group in run_flags.table(default.base).items():
        groups[title] = [flag for flag in group if flag.name not in VARIED]
    parsed = flags.parse(command, ABOUT, groups, argv)
    runs_dir, name = Path(parsed.values["runs-dir"]), parsed.values["resume"]
    at_once = parsed.values["at-once"]
    if at_once < 1:
        raise RunError(f"--at-once is {at_once}; it must be at least 1")
    if at_once > 1:
        grids.share_devices()
    if name is not None:
        odd = sorted(parsed.given - {"resume", "runs-dir", "debug", "at-once"})
        if odd:
            raise FlagError(
                f"--{odd[0]} and --resume are both given; a grid that goes on keeps its flags: leave --{odd[0]} out"
            )
        folders = [folder for folder in (runs_dir / name, Path(name)) if (folder / "grid.json").is_file()]
        if not folders:
            raise RunError(f"no grid {name!r} in {runs_dir}; leave --resume out to begin one")
        folder = folders[0]
        grid = grids.load_grid(folder)
    else:
        from longhaul.config.resolve import replaced

        names = ({flag.name for flag in run_flags.run_flags(default.base)} - set(VARIED)) & parsed.given
        base = replaced(default.base, run_flags.fields({name: parsed.values[name] for name in names}))
        settings = {flag.name: parsed.values[flag.name] for flag in GRID if flag.name in parsed.given}
        grid = dataclasses.replace(default, base=base, **settings)
        try:
            grids.check(grid)
        except ValueError as error:  # of a run, which has one size
            raise FlagError(str(error).replace("--model-size", "--sizes")) from error
        folder = new_folder(runs_dir, grid.base, parsed.values["run-name"])
        grids.save_grid(folder, grid)
    print(folder, flush=True)
    code = grids.run_grid(folder, grid, at_once)
    if not code:
        _print(grids.summary(folder, grid))
        print(f"page: {folder / 'scaling.html'}")
    return code


def _with_default(flag: Flag, value: Any) -> Flag:
    values = value if isinstance(value, tuple) else (value,)
    shown = ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)
    return flag._replace(default=value, shown=shown or "none")


def _print(summary: dict[str, Any]) -> None:
    """The points, and the law."""
    columns = ("parameters", "scenarios", "seeds", "episodes", "failure")
    rows = [[tables.number(point[name]) for name in columns] for point in summary["points"]]
    tables.table(list(columns), rows)
    law = summary["law"]
    if law is None:
        print(f"no law: {summary['why']}")
        return
    intervals = law["intervals"]
    for name in ("e", "a", "alpha", "b", "beta"):
        print(f"{name} {law[name]:.4g} (90 %: {intervals[name][0]:.4g} to {intervals[name][1]:.4g})")
    for each in summary["forecasts"]:
        low, high = each["interval"]
        measured = "not measured" if each["measured"] is None else f"measured {each['measured']:.4g}"
        print(f"forecast of {each['parameters']:,} parameters, {each['scenarios']:,} scenarios: "
              f"{each['forecast']:.4g} (90 %: {low:.4g} to {high:.4g}), {measured}")  # fmt: skip
