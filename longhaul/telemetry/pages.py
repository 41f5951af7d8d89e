"""Self-contained HTML pages, and learning curves as static SVG in them; a small script shows values on hover.

Text and lines take their colours from the page (assets/page.css, assets/curves.css).
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

POINTS = 2000
"""Largest number of points of a line; longer ones keep the minimum and maximum of each stretch."""

SMOOTH_FROM = 80
"""Number of points from which a line is drawn faint under its running mean."""

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34
"""Size of the figure and margins around its axes, in SVG units (pixels at the usual size)."""

PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def asset(name: str, package: str = "longhaul.telemetry") -> str:
    """Text of a file in the `assets` folder of `package`."""
    return resources.files(package).joinpath("assets", name).read_text("utf-8")


def embed(value: Any) -> str:
    """JSON that may stand inside `<script type="application/json">`, whatever its strings hold.

    NaN and infinities have no JSON: replace them by None before. Raises ValueError if one is left.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """Table of rows, `<tr>` each; heads and rows are inserted unescaped."""
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    inner = f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="card table" tabindex="0">{inner}</div>'


def page(title: str, body: str, *, styles: Sequence[str], scripts: Sequence[str] = ()) -> str:
    """Complete HTML document without external resources. `body`, `styles` and `scripts` are inserted unescaped."""
    style = "\n".join(styles)
    script = "\n".join(f"<script>\n{code}</script>" for code in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n{script}\n</body>\n</html>\n"
    )


# ------------------------------------------------------------------------------------------------------------- curves


class Series(NamedTuple):
    """One line. NaN in `y` is a gap; `x` ascends."""

    name: str
    x: np.ndarray  # float64 [P]
    y: np.ndarray  # float64 [P]
    low: np.ndarray | None = None  # float64 [P]: lower edge of a band around the line, up to `high`
    high: np.ndarray | None = None


class Axes(NamedTuple):
    """Map from values to positions in the figure; with `log`, the ends are decimal logarithms."""

    left: float
    right: float
    low: float
    high: float
    log: bool = False

    def x(self, values: np.ndarray | float) -> np.ndarray:
        share = (self._scaled(values) - self.left) / (self.right - self.left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, values: np.ndarray | float) -> np.ndarray:
        share = (self._scaled(values) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def _scaled(self, values: np.ndarray | float) -> np.ndarray:
        return np.log10(values) if self.log else np.asarray(values)


def figure(title: str, series: Sequence[Series], x_label: str, unit: str = "") -> str:
    """A `<figure>` with the curves of `series`; empty if no line has a finite value."""
    drawn = [thin(line) for line in series if np.isfinite(line.y).any()]
    if not drawn:
        return ""
    axes = _axes(drawn)
    names = [line.name for line in drawn]
    entries = "".join(f'<li class="s{i % 5}">{html.escape(name)} <b></b></li>' for i, name in enumerate(names))
    legend = f"<ul>{entries}</ul>" if len(names) > 1 else ""
    heading = html.escape(title) + (f" <small>{html.escape(unit)}</small>" if unit else "")
    lines = "".join(_line(line, axes, i % 5) for i, line in enumerate(drawn))
    bounds = f'data-x="{axes.left:.9g} {axes.right:.9g}" data-y="{axes.low:.9g} {axes.high:.9g}"'
    frame = f'data-frame="{LEFT} {TOP} {WIDTH - RIGHT} {HEIGHT - BOTTOM}"'
    return (
        f'<figure class="curve"><figcaption><span>{heading}</span><output></output></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}" {bounds} {frame}>'
        f"{grid(axes, x_label)}{lines}"
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        f"{legend}</figure>"
    )


def thin(line: Series) -> Series:
    """Line of at most POINTS points, with the minimum and maximum of each stretch, so that no spike is lost."""
    count = len(line.x)
    if count <= POINTS:
        return line
    kept: list[int] = []
    for part in np.array_split(np.arange(count), POINTS // 2):
        values = line.y[part]
        if np.isfinite(values).any():
            kept += sorted({int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])})
        else:
            kept.append(int(part[0]))
    low, high = (None if edge is None else edge[kept] for edge in (line.low, line.high))
    return Series(line.name, line.x[kept], line.y[kept], low, high)


def smooth(y: np.ndarray, window: int) -> np.ndarray:
    """Mean of the finite values within `window` points (odd) around each; NaN if there are none."""
    known = np.isfinite(y)
    kernel = np.ones(window)
    total = np.convolve(np.where(known, y, 0.0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
    return np.where(count > 0.5, total / np.maximum(count, 1.0), np.nan)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values within low .. high, about `count` of them, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.7 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Round values between 10^low and 10^high: 1, 2 and 5 times powers of ten; powers alone over four decades."""
    factors = (1, 2, 5) if high - low < 4 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if low - 1e-9 <= math.log10(value) <= high + 1e-9]


def short(value: float, step: float | None = None) -> str:
    """Number for an axis: 1.5M, 200k, 0.25, 3e-4; with a `step`, just the digits that separate its multiples."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    scale, letter = next(((scale, letter) for scale, letter in PREFIXES if size >= scale), (1.0, ""))
    if step is None:
        return f"{value / scale:.3g}{letter}"
    digits = min(max(0, -math.floor(math.log10(step / scale) + 1e-9)), 6)
    return f"{value / scale:.{digits}f}{letter}"


def _axes(series: Sequence[Series]) -> Axes:
    x = np.concatenate([line.x for line in series])
    ends = [edge for line in series for edge in (line.y, line.low, line.high) if edge is not None]
    y = np.concatenate([edge[np.isfinite(edge)] for edge in ends])
    left, right, low, high = float(x.min()), float(x.max()), float(y.min()), float(y.max())
    if not right > left:
        left, right = left - 0.5 * max(abs(left), 1.0), left + 0.5 * max(abs(left), 1.0)
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-6):
        low, high = low - 0.5 * max(abs(low), 1e-3), high + 0.5 * max(abs(high), 1e-3)
    margin = 0.06 * (high - low)
    # zero stays in view for a quantity that is never negative
    bottom = 0.0 if 0 <= low < 0.25 * high else low - margin
    return Axes(left, right, bottom, high + margin)


def grid(axes: Axes, x_label: str) -> str:
    """Axes with their ticks, lines across, and the name of what is on x."""
    steps: list[float | None] = [None, None]
    if axes.log:
        across, up = decades(axes.left, axes.right), decades(axes.low, axes.high)
    else:
        across, up = ticks(axes.left, axes.right, 4), ticks(axes.low, axes.high, 4)
        steps = [marks[1] - marks[0] if len(marks) > 1 else None for marks in (across, up)]
    base, parts = HEIGHT - BOTTOM, []
    for value in up:
        y = float(axes.y(value))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="up" x="{LEFT - 6}" y="{y + 3.5:.1f}">{short(value, steps[1])}</text>')
    for value in across:
        x = float(axes.x(value))
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text class="across" x="{x:.1f}" y="{base + 15}">{short(value, steps[0])}</text>')
    if axes.log:
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{base}"/>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="across label" x="{middle}" y="{HEIGHT - 4}">{html.escape(x_label)}</text>')
    return "".join(parts)


def _line(line: Series, axes: Axes, colour: int) -> str:
    raw = _path(line.x, line.y, axes)
    if line.low is not None and line.high is not None:
        known = np.isfinite(line.low) & np.isfinite(line.high)
        around = np.concatenate([line.x[known], line.x[known][::-1]])
        edge = _path(around, np.concatenate([line.high[known], line.low[known][::-1]]), axes)
        return f'<path class="band s{colour}" d="{edge}Z"/><path class="line s{colour}" data-line d="{raw}"/>'
    if np.isfinite(line.y).sum() < SMOOTH_FROM:
        return f'<path class="line s{colour}" data-line d="{raw}"/>' + _dots(line, axes, colour)
    window = 2 * (len(line.y) // 60) + 1
    mean = _path(line.x, smooth(line.y, window), axes)
    return f'<path class="faint s{colour}" data-line d="{raw}"/><path class="line s{colour}" d="{mean}"/>'


def _path(x: np.ndarray, y: np.ndarray, axes: Axes) -> str:
    """The `d` of an SVG path through the finite points, with a new start after each gap."""
    parts, pen = [], "M"
    for px, py in zip(axes.x(x).tolist(), axes.y(y).tolist(), strict=True):
        if math.isfinite(py):
            parts.append(f"{pen}{px:.2f} {py:.2f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _dots(line: Series, axes: Axes, colour: int) -> str:
    """Discs at points without neighbours, which a line would not show."""
    known = np.concatenate([[False], np.isfinite(line.y), [False]])
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    xs, ys = axes.x(line.x[alone]).tolist(), axes.y(line.y[alone]).tolist()
    return "".join(
        f'<circle class="s{colour}" cx="{x:.2f}" cy="{y:.2f}" r="2.5"/>' for x, y in zip(xs, ys, strict=True)
    )
