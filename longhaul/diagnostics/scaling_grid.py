"""Grid of runs over sizes of model and numbers of scenarios, the law through their failure rates, and its page.

The runs of a size are a population: one program, one folder inside the grid's, one `result.json` when they end. With
`at_once` several sizes are trained at once, each in a process of its own, on the same devices. A stopped grid resumes
the populations it was in; finished ones are not repeated. As each ends `scaling.json` and `scaling.html` are written.

The failure rate of a policy is the share of held-out scenarios without `metric`: with the metric `goal` where every
fault ends an episode, those not finished without fault. Runs of the same cell (seeds) are pooled. Half a failure in one
more episode is added to each, so that a rate of 0 has a logarithm (Jeffreys' prior).

Steps are the same in each run, so compute is proportional to parameters. The law forecasts ten times the largest
model's compute, and the points `checks`, which are trained after the fit's and left out of it.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.algorithms import registry
from longhaul.config.population import SCENARIOS
from longhaul.config.recipes import Grid
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving, Run, from_dict, to_dict
from longhaul.diagnostics import scaling_law
from longhaul.diagnostics.scaling_law import Fitted, Law
from longhaul.driving import scenario_source
from longhaul.driving.sim.config import HELD_OUT
from longhaul.runtime import bounded_json, files
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.devices import cores
from longhaul.runtime.errors import RunError
from longhaul.runtime.process_group import say
from longhaul.runtime.signals import listening
from longhaul.telemetry import pages
from longhaul.telemetry.pages import HEIGHT, WIDTH, Axes, short
from longhaul.training import loop
from longhaul.training.legacy_runs import as_current
from longhaul.training.run_dir import alone, load_run, write_json

FORMAT = 2
"""Version of grid.json; others are refused."""

METRICS = ("goal", "accuracy")
"""Metrics whose absence is a failure."""

LOG = "log.txt"
"""Output of a population that is trained beside others."""

TIMES = 10.0
"""Factor of compute of the standing forecast."""

SAMPLES = 60
"""Points of a drawn law."""

NUMBERS = {
    "e": ("E", "what neither a larger model nor more scenarios reduce"),
    "a": ("A", "share of the model at one parameter"),
    "alpha": ("α", "exponent of the model's size"),
    "b": ("B", "share of the data at one scenario"),
    "beta": ("β", "exponent of the data's size"),
}


class Job(NamedTuple):
    """Runs of one size, on each number of scenarios and with each seed, in one program."""

    size: float  # million parameters
    scenarios: tuple[int, ...]
    checks: bool = False  # left out of the fit

    @property
    def name(self) -> str:
        return f"{self.size:g}M" + f"-{self.scenarios[0]}" * self.checks


def jobs(grid: Grid) -> list[Job]:
    """All jobs, the cheapest first, those that check the forecast last."""
    fitted = [Job(size, tuple(sorted(grid.scenarios))) for size in sorted(grid.sizes)]
    return fitted + sorted(Job(size, (scenarios,), checks=True) for size, scenarios in map(_point, grid.checks))


def _point(word: str) -> tuple[float, int]:
    """Size and scenarios of "SIZE:SCENARIOS". Raises RunError."""
    size, _, scenarios = word.partition(":")
    try:
        return float(size), int(scenarios)
    except ValueError:
        raise RunError(f"--checks is {word!r}; give SIZE:SCENARIOS, 3:4096 say, or several with commas") from None


def run_of(grid: Grid, job: Job) -> Run:
    """Resolved Run of a job. Raises RunError."""
    algorithm = replaced(registry.on_policy(grid.base.algorithm), model_size=job.size)
    sweep = f"{SCENARIOS}={','.join(map(str, job.scenarios))}"
    population = dataclasses.replace(grid.base.population, seeds=grid.seeds, sweep=(sweep,))
    return resolve(dataclasses.replace(grid.base, algorithm=algorithm, population=population))


def check(grid: Grid) -> None:
    """Check of a grid. Raises RunError, one line, if it cannot run."""
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
    every = jobs(grid)
    if len({job.name for job in every}) < len(every):
        raise RunError(f"--checks is {','.join(grid.checks)}; give different points")
    for job in every:
        if job.checks and job.size in grid.sizes and job.scenarios[0] in grid.scenarios:
            raise RunError(f"--checks has {job.size:g}:{job.scenarios[0]}, a point of the fit; give another")
        run_of(grid, job)


def save_grid(folder: Path, grid: Grid) -> None:
    write_json(folder / "grid.json", {"format": FORMAT, "grid": to_dict(grid)})


def load_grid(folder: Path) -> Grid:
    """Grid of a folder. Raises RunError if there is none, or one of another version."""
    try:
        stored = bounded_json.read(folder / "grid.json")
        if stored["format"] != FORMAT:
            raise TypeError(f"format {stored['format']}, and this version reads {FORMAT}")
        grid: Grid = from_dict(Grid, stored["grid"] | {"base": as_current(stored["grid"]["base"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / 'grid.json'} can't be read ({error}); use the version that wrote it") from error
    return grid


def share_devices() -> None:
    """Share of a device's memory for each of several processes, set before JAX starts, which takes three quarters."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def run_grid(folder: Path, grid: Grid, at_once: int = 1) -> int:
    """Training of what is unfinished, `at_once` jobs at a time; results are written as each ends. -> The exit code."""
    with alone(folder):
        todo = [job for job in jobs(grid) if not (folder / job.name / "result.json").exists()]
        code = _run_in_turn(folder, grid, todo) if at_once == 1 else _run_in_processes(folder, grid, todo, at_once)
        write(folder, grid)
    return code


def _run_in_turn(folder: Path, grid: Grid, todo: Sequence[Job]) -> int:
    for i, job in enumerate(todo):
        say(f"{i + 1} of {len(todo)}: {folder / job.name}")
        code = _train(folder, grid, job)
        if code:
            return code
        jax.clear_caches()  # no later job runs an earlier one's programs
        write(folder, grid)
    return 0


def _train(folder: Path, grid: Grid, job: Job, *, sole: bool = False) -> int:
    where = folder / job.name
    resumed = (where / "run.json").exists()
    where.mkdir(exist_ok=True)
    run = load_run(where) if resumed else run_of(grid, job)
    return loop.train(run, where, resumed=resumed, sole=sole).code


def _run_in_processes(folder: Path, grid: Grid, todo: Sequence[Job], at_once: int) -> int:
    """Jobs in processes of their own, the costliest first. A signal is passed on; a job's output is in its folder."""
    if todo:
        _fill_store(grid)
    spawn = multiprocessing.get_context("spawn")
    waiting, running, code = list(todo), dict[Job, BaseProcess](), 0
    with listening(say) as stop:
        stop.ending = "stopping all jobs"
        while (waiting and not stop.requested and not code) or running:
            while waiting and not stop.requested and not code and len(running) < at_once:
                job = waiting.pop()
                (folder / job.name).mkdir(exist_ok=True)
                process: BaseProcess = spawn.Process(target=_job_process, args=(folder, job), name=job.name)
                process.start()
                running[job] = process
                say(f"{job.name} began: {folder / job.name / LOG}")
            connection.wait([process.sentinel for process in running.values()], timeout=0.5)
            for job in [job for job, process in running.items() if not process.is_alive()]:
                ended = running.pop(job).exitcode or 0
                code = code or (ended if ended >= 0 else 1)
                say(
                    f"{job.name} ended"
                    + (f" with code {ended}: {_last_line(folder / job.name / LOG)}" if ended else "")
                )
                write(folder, grid)
            if stop.requested:
                for process in running.values():
                    process.terminate()
                for process in running.values():
                    process.join()
    return loop.STOPPED if stop.requested and (waiting or code) else code


def _job_process(folder: Path, job: Job) -> None:
    """Process of one job of the grid in `folder`."""
    os.setsid()  # the parent passes signals on; those of its terminal would come twice
    with open(folder / job.name / LOG, "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        code = _train(folder, load_grid(folder), job, sole=True)
    except RunError as error:
        say(f"error: {error}")
        code = 2
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def _fill_store(grid: Grid) -> None:
    """Make all scenarios once, which are then found on the disk; each job would make its own otherwise."""
    task = grid.base.environment
    assert isinstance(task, Driving)
    args: dict[str, Any] = {"agents": task.simulator.agents, "horizon": task.horizon, "control": task.simulator.control}
    most = max(job.scenarios[-1] for job in jobs(grid))
    scenario_source.generated(0, most, workers=cores(), least=task.least, **args)
    episodes = run_of(grid, jobs(grid)[0]).evaluation_episodes
    assert episodes is not None
    scenario_source.generated(HELD_OUT, episodes, workers=cores(), **args)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def write(folder: Path, grid: Grid) -> dict[str, Any]:
    """Content of scaling.json, which is written with scaling.html."""
    report = summary(folder, grid)
    write_json(folder / "scaling.json", report)
    files.write(folder / "scaling.html", page(folder.name, report))
    return report


def summary(folder: Path, grid: Grid) -> dict[str, Any]:
    """Finished runs, their pooled points, and the law through them (null, with the reason, if there is none)."""
    rows = [row for job in jobs(grid) for row in _rows(folder, grid, job)]
    points = _pooled([row for row in rows if not row["checks"]])
    fit, why = None, None
    try:
        n, d, failure = (np.array([point[name] for point in points]) for name in ("parameters", "scenarios", "failure"))
        fit = scaling_law.fit(n, d, failure)
    except scaling_law.TooFew as error:
        why = str(error)
    law = fit and {**fit.law._asdict(), "error": fit.error, "intervals": fit.intervals}
    runs = grid.seeds * sum(len(job.scenarios) for job in jobs(grid))
    return {
        "format": FORMAT, "metric": grid.metric, "unfinished": runs - len(rows), "cells": rows,
        "points": points, "law": law, "why": why,
        "forecasts": fit and _forecasts(fit, points, _pooled([row for row in rows if row["checks"]])),
    }  # fmt: skip


def _rows(folder: Path, grid: Grid, job: Job) -> Iterator[dict[str, Any]]:
    path = folder / job.name / "result.json"
    if not path.exists():
        return
    result = bounded_json.read(path)
    for member in result["members"]:
        scores = member["evaluation"]["trained"]
        yield {
            "run": job.name, "member": member["member"], "size": job.size, "parameters": result["parameters"],
            "scenarios": int(member["hyperparameters"][SCENARIOS]), "seed": member["seed"], "checks": job.checks,
            "agent_steps": result["agent_steps"], "episodes": scores["episodes"],
            "failed": 1.0 - scores[grid.metric],
        }  # fmt: skip


def _forecasts(
    fit: Fitted, points: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Failure at ten times the compute of the largest model, which is not measured, and at the points that check it."""
    largest = max(points, key=lambda point: (point["parameters"], point["scenarios"]))
    further = {"parameters": round(TIMES * largest["parameters"]), "scenarios": largest["scenarios"]}
    forecasts = []
    for point in (further, *measured):
        value, low, high = fit.forecast(point["parameters"], point["scenarios"])
        forecasts.append(
            {
                "parameters": point["parameters"], "scenarios": point["scenarios"], "forecast": value,
                "interval": (low, high), "measured": point.get("failure"),
            }
        )  # fmt: skip
    return forecasts


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
    left = f", {summary['unfinished']} runs to go" if summary["unfinished"] else ""
    head = (
        f"<header><h1>{html.escape(name)}</h1>"
        f'<p class="muted">Failure: 1 − {html.escape(summary["metric"])} in scenarios never trained in{left}</p>'
        "</header>"
    )
    curves = f'<section><h2>Scaling</h2><div class="curves">{drawn}</div></section>' if drawn else ""
    body = f"<main>{head}{curves}{_law(summary)}{_forecast(summary['forecasts'])}{_runs(summary['cells'])}</main>"
    styles = [pages.asset(f"{sheet}.css") for sheet in ("page", "report", "curves")]
    return pages.page(f"{name} · Longhaul", body, styles=styles)


def figure(title: str, points: Sequence[Mapping[str, Any]], along: str, group: str, label: str, law: Law | None) -> str:
    """A `<figure>` of failure over `along`, a line for each value of `group`; empty if there are no points.

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
    for i, value in enumerate(sorted({point[group] for point in points})):
        own = sorted((point for point in points if point[group] == value), key=lambda point: point[along])
        parts.append(_line(own, along, group, law, axes, i % 5))
        entries.append(f'<li class="s{i % 5}">{short(value)} {html.escape(group)}</li>')
    return (
        f'<figure class="curve"><figcaption><span>{html.escape(title)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{pages.grid(axes, label)}{''.join(parts)}</svg><ul>{''.join(entries)}</ul></figure>"
    )


def _line(own: Sequence[Mapping[str, Any]], along: str, group: str, law: Law | None, axes: Axes, colour: int) -> str:
    """Points of one line, and the law through them."""
    if law is None:
        x, y = (np.array([point[name] for point in own], float) for name in (along, "failure"))
    else:
        x = 10.0 ** np.linspace(axes.left, axes.right, SAMPLES)
        sides = {along: x, group: np.full(SAMPLES, float(own[0][group]))}
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


def _forecast(forecasts: Sequence[Mapping[str, Any]] | None) -> str:
    """Forecasts of the law beside what was measured."""
    if not forecasts:
        return ""
    rows = []
    for each in forecasts:
        low, high = each["interval"]
        measured = "not measured" if each["measured"] is None else f"{each['measured']:.4f}"
        rows.append(
            f"<tr><td>{each['parameters']:,}</td><td>{each['scenarios']:,}</td><td>{each['forecast']:.4f}</td>"
            f"<td>{low:.4f} to {high:.4f}</td><td>{measured}</td></tr>"
        )
    heads = ("parameters", "scenarios", "forecast", "90 % interval", "measured")
    note = (
        "Points left out of the fit. Intervals are of a measurement: the law's draws, each with a residual of the fit."
    )
    return f'<section><h2>Forecast</h2>{pages.table(heads, rows)}<p class="muted note">{note}</p></section>'


def _runs(cells: Sequence[Mapping[str, Any]]) -> str:
    columns: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("parameters", "{:,}".format), ("scenarios", "{:,}".format), ("seed", str), ("agent_steps", "{:,}".format),
        ("episodes", "{:,}".format), ("failed", "{:.4f}".format),
    )  # fmt: skip
    rows = []
    for cell in cells:
        values = "".join(f"<td>{form(cell[name])}</td>" for name, form in columns)
        run = html.escape(str(cell["run"]), quote=True)
        link = f'<a href="{run}/report.html#run-{cell["member"]}">{run}</a>'
        rows.append(f'<tr><th scope="row">{link}</th>{values}</tr>')
    heads = ("run", *(name.replace("_", " ") for name, _ in columns))
    return f"<section><h2>Runs</h2>{pages.table(heads, rows)}</section>" if rows else ""
