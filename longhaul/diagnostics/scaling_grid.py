"""Grid of runs over sizes of model and numbers of scenarios, and the scaling law through their failure rates.

Every cell is the folder of an ordinary run inside the grid's. A stopped grid resumes the run it was in; finished runs
are not repeated. After each cell `scaling.json` and `scaling.html` are written.

The failure rate of a policy is the share of held-out scenarios without `metric`: with the metric `goal` where every
fault ends an episode, those not finished without fault. Runs of the same cell (seeds) are pooled. Half a failure in one
more episode is added to each, so that a rate of 0 has a logarithm (Jeffreys' prior).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.algorithms import registry
from longhaul.config.recipes import Grid
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving, Run, from_dict, to_dict
from longhaul.diagnostics import scaling_law, scaling_page
from longhaul.runtime.errors import RunError
from longhaul.runtime.settings import replaced
from longhaul.training import loop
from longhaul.training.run_dir import alone, as_now, load_run, write_json

FORMAT = 1
"""Version of grid.json; others are refused."""


METRICS = ("goal", "accuracy")
"""Metrics whose absence is a failure."""


class Cell(NamedTuple):
    size: float
    scenarios: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size:g}M-{self.scenarios}-seed{self.seed}"


def cells(grid: Grid) -> list[Cell]:
    """All cells, the cheapest first."""
    seeds = range(grid.base.seed, grid.base.seed + grid.seeds)
    return [Cell(*each) for each in itertools.product(sorted(grid.sizes), sorted(grid.scenarios), seeds)]


def run_of(grid: Grid, cell: Cell) -> Run:
    """Resolved Run of a cell. Raises RunError."""
    task = grid.base.environment
    assert isinstance(task, Driving)
    algorithm = replaced(registry.on_policy(grid.base.algorithm), model_size=cell.size)
    environment = dataclasses.replace(task, scenarios=cell.scenarios)
    return resolve(dataclasses.replace(grid.base, algorithm=algorithm, environment=environment, seed=cell.seed))


def check(grid: Grid) -> None:
    """Raise RunError, one line, if the grid cannot run."""
    task = grid.base.environment
    if not isinstance(task, Driving) or task.data:
        raise RunError("a grid over numbers of scenarios is of generated driving; leave --data out")
    for name, values in (("sizes", grid.sizes), ("scenarios", grid.scenarios)):
        if not values or len(set(values)) != len(values):
            raise RunError(f"--{name} is {','.join(map(str, values)) or 'empty'}; give different values, at least one")
    if grid.seeds < 1:
        raise RunError(f"--seeds is {grid.seeds}; it must be at least 1")
    if grid.metric not in METRICS:
        raise RunError(f"--metric is {grid.metric!r}; it must be one of {', '.join(METRICS)}")
    for cell in cells(grid):
        run_of(grid, cell)


def save_grid(folder: Path, grid: Grid) -> None:
    write_json(folder / "grid.json", {"format": FORMAT, "grid": to_dict(grid)})


def load_grid(folder: Path) -> Grid:
    """Grid of a folder. Raises RunError if there is none, or one of another version."""
    try:
        stored = json.loads((folder / "grid.json").read_text())
        if stored["format"] != FORMAT:
            raise TypeError(f"format {stored['format']}, and this version reads {FORMAT}")
        grid: Grid = from_dict(Grid, stored["grid"] | {"base": as_now(stored["grid"]["base"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / 'grid.json'} can't be read ({error}); use the version that wrote it") from error
    return grid


def run_grid(folder: Path, grid: Grid) -> int:
    """Run unfinished cells, and write the results after each; -> the exit code."""
    todo = cells(grid)
    with alone(folder):
        for i, cell in enumerate(todo):
            where = folder / cell.name
            if not (where / "result.json").exists():
                print(f"cell {i + 1} of {len(todo)}: {where}", file=sys.stderr, flush=True)
                resumed = (where / "run.json").exists()
                where.mkdir(exist_ok=True)
                run = load_run(where) if resumed else run_of(grid, cell)
                code = loop.train(run, where, resumed=resumed).code
                if code:
                    return code
                jax.clear_caches()  # no later cell runs an earlier one's programs
            write(folder, grid)
    return 0


def write(folder: Path, grid: Grid) -> dict[str, Any]:
    """Write scaling.json and scaling.html; -> the content of scaling.json."""
    found = summary(folder, grid)
    write_json(folder / "scaling.json", found)
    scaling_page.write(folder / "scaling.html", folder.name, found)
    return found


def summary(folder: Path, grid: Grid) -> dict[str, Any]:
    """Finished cells, their pooled points, and the law through them (null, with the reason, if there is none)."""
    rows = list(_rows(folder, grid))
    points = _pooled(rows)
    fitted, why = None, None
    try:
        n, d, failure = (np.array([point[name] for point in points]) for name in ("parameters", "scenarios", "failure"))
        fit = scaling_law.fit(n, d, failure)
        fitted = {**fit.law._asdict(), "error": fit.error, "intervals": fit.intervals}
    except scaling_law.TooFew as error:
        why = str(error)
    return {
        "format": FORMAT, "metric": grid.metric, "unfinished": len(cells(grid)) - len(rows), "cells": rows,
        "points": points, "law": fitted, "why": why,
    }  # fmt: skip


def _rows(folder: Path, grid: Grid) -> Iterator[dict[str, Any]]:
    for cell in cells(grid):
        path = folder / cell.name / "result.json"
        if path.exists():
            result = json.loads(path.read_text())
            scores = result["evaluation"]["trained"]
            yield {
                "run": cell.name, "size": cell.size, "parameters": result["parameters"], "scenarios": cell.scenarios,
                "seed": cell.seed, "agent_steps": result["agent_steps"], "episodes": scores["episodes"],
                "failed": 1.0 - scores[grid.metric],
            }  # fmt: skip


def _pooled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One point for all seeds of a size and a number of scenarios."""
    points = []
    for (parameters, scenarios), group in itertools.groupby(rows, lambda row: (row["parameters"], row["scenarios"])):
        same = list(group)
        episodes = sum(row["episodes"] for row in same)
        failures = sum(row["failed"] * row["episodes"] for row in same)
        rates = [row["failed"] for row in same]
        points.append(
            {
                "parameters": parameters, "scenarios": scenarios, "seeds": len(same), "episodes": episodes,
                "failure": (failures + 0.5) / (episodes + 1), "least": min(rates), "greatest": max(rates),
            }
        )  # fmt: skip
    return points
