"""Grid of runs over sizes of model and numbers of scenarios, the law through their failure rates, and its page.

Every cell is the folder of an ordinary run inside the grid's. A stopped grid resumes the run it was in; finished runs
are not repeated. After each cell `scaling.json` and `scaling.html` are written.

The failure rate of a policy is the share of held-out scenarios without `metric`: with the metric `goal` where every
fault ends an episode, those not finished without fault. Runs of the same cell (seeds) are pooled. Half a failure in one
more episode is added to each, so that a rate of 0 has a logarithm (Jeffreys' prior).
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.algorithms import registry
from longhaul.config.recipes import Grid
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving, Run, from_dict, to_dict
from longhaul.diagnostics import scaling_law
from longhaul.diagnostics.scaling_law import Law
from longhaul.runtime import bounded_json, files
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import RunError
from longhaul.telemetry import pages
from longhaul.telemetry.pages import HEIGHT, WIDTH, Axes, short
from longhaul.training import loop
from longhaul.training.run_dir import alone, as_now, load_run, write_json

FORMAT = 1
"""Version of grid.json; others are refused."""


METRICS = ("goal", "accuracy")
"""Metrics whose absence is a failure."""

SAMPLES = 60
"""Points of a drawn law."""

NUMBERS = {
    "e": ("E", "what neither a larger model nor more scenarios reduce"),
    "a": ("A", "share of the model at one parameter"),
    "alpha": ("α", "exponent of the model's size"),
    "b": ("B", "share of the data at one scenario"),
    "beta": ("β", "exponent of the data's size"),
}


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
        stored = bounded_json.read(folder / "grid.json")
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
    files.write(folder / "scaling.html", page(folder.name, found))
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
            result = bounded_json.read(path)
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


# ------------------------------------------------------------------------------------------------------------ page


def page(name: str, summary: Mapping[str, Any]) -> str:
    """Self-contained page of the content of scaling.json: both figures, the law, and every run."""
    points = summary["points"]
    law = None if summary["law"] is None else Law(*(summary["law"][field] for field in Law._fields))
    drawn = figure("Failure over size", points, "parameters", "scenarios", "parameters", law)
    drawn += figure("Failure over data", points, "scenarios", "parameters", "scenarios trained in", law)
    left = f", {summary['unfinished']} cells to go" if summary["unfinished"] else ""
    head = (
        f"<header><h1>{html.escape(name)}</h1>"
        f'<p class="muted">Failure: 1 − {html.escape(summary["metric"])} in scenarios never trained in{left}</p>'
        "</header>"
    )
    curves = f'<section><h2>Scaling</h2><div class="curves">{drawn}</div></section>' if drawn else ""
    body = f"<main>{head}{curves}{_law(summary)}{_runs(summary['cells'])}</main>"
    styles = [pages.asset(f"{sheet}.css") for sheet in ("page", "report", "curves")]
    return pages.page(f"{name} · Longhaul", body, styles=styles)


def figure(title: str, points: Sequence[Mapping[str, Any]], along: str, by: str, label: str, law: Law | None) -> str:
    """A `<figure>` of failure over `along`, a line for each value of `by`; empty if there are no points.

    Discs are measured, whiskers reach from the least to the greatest of the seeds, lines are the law (without one they
    join the points).
    """
    if not points:
        return ""
    x = np.log10([point[along] for point in points])
    ends = [point[name] for point in points for name in ("failure", "least", "greatest") if point[name] > 0]
    y = np.log10([*ends, *([law.e] if law is not None and law.e > min(ends) / 10 else [])])
    axes = Axes(x.min() - 0.1, x.max() + 0.1, y.min() - 0.08, y.max() + 0.08, log=True)
    parts, entries = [], []
    for i, value in enumerate(sorted({point[by] for point in points})):
        own = sorted((point for point in points if point[by] == value), key=lambda point: point[along])
        parts.append(_line(own, along, by, law, axes, i % 5))
        entries.append(f'<li class="s{i % 5}">{short(value)} {html.escape(by)}</li>')
    return (
        f'<figure class="curve"><figcaption><span>{html.escape(title)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{pages.grid(axes, label)}{''.join(parts)}</svg><ul>{''.join(entries)}</ul></figure>"
    )


def _line(own: Sequence[Mapping[str, Any]], along: str, by: str, law: Law | None, axes: Axes, colour: int) -> str:
    """Points of one line, and the law through them."""
    if law is None:
        x, y = (np.array([point[name] for point in own], float) for name in (along, "failure"))
    else:
        x = 10.0 ** np.linspace(axes.left, axes.right, SAMPLES)
        sides = {along: x, by: np.full(SAMPLES, float(own[0][by]))}
        y = law.at(sides["parameters"], sides["scenarios"])
    inside = np.log10(y) <= axes.high
    places = zip(axes.x(x[inside]).tolist(), axes.y(y[inside]).tolist(), strict=True)
    path = "L".join(f"{px:.2f} {py:.2f}" for px, py in places)
    marks = [f'<path class="line s{colour}" d="M{path}"/>' if path else ""]
    for point in own:
        px, py = float(axes.x(point[along])), float(axes.y(point["failure"]))
        marks.append(f'<circle class="s{colour}" cx="{px:.2f}" cy="{py:.2f}" r="3"/>')
        if 0 < point["least"] < point["greatest"]:
            low, high = (float(axes.y(point[name])) for name in ("least", "greatest"))
            marks.append(f'<path class="faint s{colour}" d="M{px:.2f} {low:.2f}L{px:.2f} {high:.2f}"/>')
    return "".join(marks)


def _law(summary: Mapping[str, Any]) -> str:
    """Fitted numbers with their intervals, or the reason why there are none."""
    law = summary["law"]
    if law is None:
        note = f'<p class="muted note">No law yet: {html.escape(str(summary["why"]))}.</p>'
        return f"<section><h2>Law</h2>{note}</section>"
    rows = []
    for field, (letter, about) in NUMBERS.items():
        low, high = law["intervals"][field]
        rows.append(
            f'<tr><th scope="row">{letter}</th><td>{law[field]:.3g}</td><td>{low:.3g} to {high:.3g}</td>'
            f"<td>{about}</td></tr>"
        )
    return (
        "<section><h2>Law</h2><p>failure = E + A · parameters<sup>−α</sup> + B · scenarios<sup>−β</sup></p>"
        f"{pages.table(('', 'value', '90 % interval', ''), rows)}"
        f'<p class="muted note">Root mean square of the residuals of log failure: {law["error"]:.3g}. Intervals: '
        "residuals resampled onto the fit and fitted again.</p></section>"
    )


def _runs(cells: Sequence[Mapping[str, Any]]) -> str:
    columns: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("parameters", "{:,}".format), ("scenarios", "{:,}".format), ("seed", str), ("agent_steps", "{:,}".format),
        ("episodes", "{:,}".format), ("failed", "{:.4f}".format),
    )  # fmt: skip
    rows = []
    for cell in cells:
        values = "".join(f"<td>{form(cell[name])}</td>" for name, form in columns)
        run = html.escape(str(cell["run"]), quote=True)
        rows.append(f'<tr><th scope="row"><a href="{run}/report.html">{run}</a></th>{values}</tr>')
    heads = ("run", *(name.replace("_", " ") for name, _ in columns))
    return f"<section><h2>Runs</h2>{pages.table(heads, rows)}</section>" if rows else ""
