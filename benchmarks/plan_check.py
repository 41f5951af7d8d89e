"""Forecasts of `longhaul plan` beside measurements, with a table of errors.

    python -m benchmarks.plan_check processes RECIPE [FLAGS]     1, 2 and 4 processes of this machine
    python -m benchmarks.plan_check chips                        the committed figures of other chips
    python -m benchmarks.plan_check ahead [--only NAME...]       figures of benchmarks/gpu.py that no chip has made yet
    python -m benchmarks.plan_check met                          the kept forecasts beside what came after them

`processes` calibrates as `longhaul plan --calibrate` does, by a run of one process and one of two, and then measures
each number of processes in runs of their own. Rounds follow each other, so that forecasts and measurements meet the
same load. `chips` compiles here what ran there, and measures nothing: the figures are those of
`benchmarks/results/h100.jsonl`. `ahead` writes forecasts down before anything is measured, so that nothing can have
been fitted to it; keep them in `benchmarks/results/h100-forecasts.jsonl`, where `met` finds them.

Prints a JSON object a round or a figure, and the errors of all as a table: forecast / measured - 1 of steps a second.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu, results
from longhaul.cli import plan, run_flags, tables
from longhaul.config.run import Run
from longhaul.diagnostics import calibration

COMMITTED = Path(__file__).resolve().parent / "results" / "h100.jsonl"

KEPT = COMMITTED.with_name("h100-forecasts.jsonl")

RECIPES = {"ppo-cartpole": "cartpole", "driving-train": "driving", "hackmatrix-ppo": "hackmatrix"}
"""Recipe of a committed figure's program, by the name of its benchmark."""

SIZES = (
    "num_envs", "num_steps", "num_minibatches", "update_epochs", "torso", "hidden_dim", "num_layers", "activation",
    "precision",
)  # fmt: skip
"""Settings of a figure on which its program depends."""

SINCE = {
    "driving": (
        "--no-safety", "--no-speed-limit", "--reward-speeding", "0", "--reward-unease", "0", "--reward-near-collision",
        "0", "--scenarios", "8",
    ),
}  # fmt: skip
"""Flags that undo what a recipe has had since its figure; fewer scenarios are the same program on a smaller bank."""

COUNTED = ("forecast", "measured")
"""Steps a second, in the table."""


def main(words: Sequence[str]) -> int:
    parser = results.parser(__doc__)
    parser.add_argument("what", choices=("processes", "chips", "ahead", "met"))
    parser.add_argument("--on", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=1)
    known = [name for name, *_ in gpu.TRAINED]
    parser.add_argument("--only", nargs="+", default=known, choices=known, metavar="NAME", help=", ".join(known))
    asked, recipe = parser.parse_known_args(words)
    if asked.what == "ahead":
        for name, program_of, settings in gpu.TRAINED:
            if name in asked.only:
                results.emit(ahead(name, program_of, settings), asked.json)
        return 0
    records: Iterator[dict[str, Any]]
    if asked.what == "chips":
        records = (each for each in map(figure, rows(COMMITTED)) if each)
    elif asked.what == "met":
        records = met(rows(KEPT), rows(COMMITTED))
    else:
        records = (processes(recipe or ["cartpole"], asked.on) for _ in range(asked.rounds))
    found = []
    for each in records:  # each as soon as it is known: one may take minutes
        results.emit(each, asked.json)
        found.append(each)
    show(found)
    return 0


def show(records: Sequence[dict[str, Any]]) -> None:
    """Prints the table: the median over the rounds of each program."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        for each in record["forecasts"]:
            lines.setdefault((record["program"], each["on"]), []).append(each)
    cells = [
        [
            program, on, *(f"{statistics.median(each[name] for each in group):,.0f}" for name in COUNTED),
            f"{statistics.median(error(each) for each in group):+.1%}", said(group[0]["said"]),
        ]
        for (program, on), group in lines.items()
    ]  # fmt: skip
    tables.table(["program", "on", "forecast", "measured", "error", "said"], cells)


def said(error: float | None) -> str:
    """Error that the forecast came with."""
    return "unknown" if error is None else f"{error:.0%}"


def error(each: dict[str, Any]) -> float:
    return float(each["forecast"] / each["measured"] - 1.0)


def chosen(recipe: Sequence[str], more: Sequence[str] = ()) -> tuple[Run, dict[str, Any]]:
    """(resolved run, values of the flags) of `longhaul plan RECIPE [FLAGS]`."""
    known, parsed = run_flags.of_recipe("plan", plan.ABOUT, plan.FLAGS, [*recipe, *more])
    return plan.chosen(known, parsed), parsed.values


def processes(recipe: Sequence[str], on: Sequence[int]) -> dict[str, Any]:
    """A round: forecasts for so many processes, and what they did."""
    run, values = chosen(recipe, ["--calibrate", "--on", *map(str, on)])
    planned = plan.planned(run, values)
    forecasts = []
    for row in planned["plan"]:
        did = calibration.measure(run, row["devices"])
        forecasts.append({
            "on": f"{row['devices']} process(es)", "forecast": row["steps_per_second"],
            "measured": did.steps / did.update, "said": row["error"], "seconds": did.seconds,
            "all_reduce_seconds": [did.small, did.large],
        })  # fmt: skip
    return {
        "name": "plan-check", "program": " ".join(recipe), "calibration": planned["measured"]["calibration"],
        "collectives": planned["measured"]["collectives"], "forecasts": forecasts,
    }  # fmt: skip


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def ahead(name: str, recipe: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Forecast for a figure of `benchmarks/gpu.py`, by its name there."""
    figures = forecast(flags(recipe, settings))
    return {"name": "forecast", "program": name, "recipe": recipe, "settings": dict(settings), **figures}


def flags(recipe: str, settings: Mapping[str, Any]) -> list[str]:
    """Words of `longhaul plan` for a recipe with other settings, in few scenarios: the same program on a small bank."""
    few = {"scenarios": 8} if "scenarios" in settings else {}
    words = [recipe]
    for name, value in {**settings, **few}.items():
        words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def forecast(words: Sequence[str]) -> dict[str, Any]:
    """Forecast of a training run on an H100, by the words of `longhaul train`."""
    run, values = chosen(words, ["--hardware", "h100", "--on", "1"])
    began = time.monotonic()
    planned = plan.planned(run, values)
    (row,), measured = planned["plan"], planned["measured"]
    return {
        "on": "1 x H100", "forecast": row["steps_per_second"], "said": row["error"], "own": measured["own"],
        "instructions": measured["instructions"], "roofline_seconds": measured["roofline_seconds"],
        "steps": measured["steps_per_update"], "memory": measured["memory"], "seconds": time.monotonic() - began,
    }  # fmt: skip


def met(kept: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Kept forecasts with the later figures of the same recipe and settings."""
    for row in measured:
        for record in kept:
            if row["name"] == "train" and all(row["config"][name] == record[name] for name in ("recipe", "settings")):
                both = {name: record[name] for name in ("on", "forecast", "said")} | {"measured": row["per_second"]}
                yield {"name": "plan-check", "program": record["program"], "of": row["commit"], "forecasts": [both]}


def figure(row: dict[str, Any]) -> dict[str, Any]:
    """Forecast for a committed figure of a training run; {} for another."""
    words = program(row)
    if not words:
        return {}
    figures = forecast(words) | {"measured": row["per_second"]}
    return {"name": "plan-check", "program": " ".join(words), "of": row["commit"], "forecasts": [figures]}


def program(row: Mapping[str, Any]) -> list[str]:
    """Words of `longhaul plan` for a committed figure; [] where it is not of a training run."""
    config = row.get("config", {})
    if row["name"] in ("train", "run"):
        return flags(config["recipe"], config["settings"])
    if row["name"] not in RECIPES:
        return []
    recipe = RECIPES[row["name"]]
    words = [word for name in SIZES for word in (f"--{name.replace('_', '-')}", str(config[name]))]
    return [recipe, *words, *SINCE.get(recipe, ())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
