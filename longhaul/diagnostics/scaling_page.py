"""Page of a scaling grid: failure over size and over data on logarithmic axes, the law, and every run."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.diagnostics.scaling_law import Law
from longhaul.runtime import files
from longhaul.telemetry import html as pages
from longhaul.telemetry.charts import HEIGHT, WIDTH, Axes, grid, short

SAMPLES = 60
"""Points of a drawn law."""

NUMBERS = {
    "e": ("E", "what neither a larger model nor more scenarios reduce"),
    "a": ("A", "share of the model at one parameter"),
    "alpha": ("α", "exponent of the model's size"),
    "b": ("B", "share of the data at one scenario"),
    "beta": ("β", "exponent of the data's size"),
}


def write(path: Path, name: str, summary: Mapping[str, Any]) -> None:
    """Write `path`, self-contained, from the content of scaling.json, atomically."""
    points = summary["points"]
    law = None if summary["law"] is None else Law(*(summary["law"][field] for field in Law._fields))
    lines = (
        figure("Failure over size", points, "parameters", "scenarios", "parameters", law),
        figure("Failure over data", points, "scenarios", "parameters", "scenarios trained in", law),
    )
    left = f", {summary['unfinished']} cells to go" if summary["unfinished"] else ""
    head = (
        f"<header><h1>{html.escape(name)}</h1>"
        f'<p class="muted">Failure: 1 − {html.escape(summary["metric"])} in scenarios never trained in{left}</p>'
        "</header>"
    )
    drawn = "".join(lines)
    curves = f'<section><h2>Scaling</h2><div class="curves">{drawn}</div></section>' if drawn else ""
    body = f"<main>{head}{curves}{_law(summary)}{_runs(summary['cells'])}</main>"
    styles = [pages.asset(f"{sheet}.css") for sheet in ("page", "report", "curves")]
    files.write(path, pages.page(f"{name} · Longhaul", body, styles=styles))


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
        f"{grid(axes, label)}{''.join(parts)}</svg><ul>{''.join(entries)}</ul></figure>"
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
