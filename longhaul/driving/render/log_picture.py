"""One still picture of a whole log: the map from above, north up, everybody's way, and who is where at the current
step. PNG by Pillow, SVG as text, and a page with the player of `render`.

No JAX here.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from longhaul.driving.datasets.log import Log
from longhaul.driving.render import polylines
from longhaul.driving.render import save as render
from longhaul.driving.render.frames import COLOURS, KINDS, Colour, map_strokes
from longhaul.driving.render.recording import replay
from longhaul.driving.scenario.compile import STATES, compile_log
from longhaul.driving.scenario.scenario import Scenario
from longhaul.runtime import files as pages

SUFFIXES = (".png", ".svg", ".html")

SIDE, FINEST, FINE = 1600, 10.0, 2
"""Pixels of a picture's longer side, pixels a metre at most, and how many times finer it is drawn than shown."""

AROUND = 15.0
"""Metres around all ways that are shown."""

WAY, EGO_WAY, LIGHT = 0.4, 0.9, 0.8
"""Metres: widths of ways, and the radius of a light."""

LIGHTS = ("unknown", "red", "amber", "green")


class Mark(NamedTuple):
    """One line, or with a width of 0 one area."""

    points: np.ndarray  # float64 [P, 2], metres
    colour: Colour
    width: float  # m


class Sketch(NamedTuple):
    """Shapes in drawing order, and the rectangle that is shown."""

    id: str
    marks: tuple[Mark, ...]
    low: np.ndarray  # [2]
    high: np.ndarray  # [2]


def save(shown: Log | Scenario, path: Path) -> None:
    """Draws a log, or a scenario of a shard, to a file; by its suffix a .png, .svg or .html.

    Raises ValueError for another suffix, and `BadData` where a page is asked for of a log that does not compile.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"cannot draw to {str(path)!r}: suffix {suffix!r} is none of {', '.join(SUFFIXES)}")
    if suffix == ".html":
        render.save([replay(compile_log(shown) if isinstance(shown, Log) else shown)], path)
    else:
        drawn = sketch(shown)
        pages.write(path, png(drawn) if suffix == ".png" else svg(drawn))


def sketch(shown: Log | Scenario) -> Sketch:
    """The map, the ways and the bodies of a log or a scenario, relative to the ego at the current step."""
    if isinstance(shown, Log):
        tracks, origin = shown.tracks, middle(shown)
        drawing = tuple((each.kind, each.points[:, :2] - origin) for each in shown.features if len(each.points))
        pose = np.concatenate([tracks.position[..., :2] - origin, tracks.heading[..., None]], -1)
        valid, size, kind, ego, now = tracks.valid, tracks.size[..., :2], tracks.kind, shown.sdc, shown.current
        lights = [
            (place, int(STATES[state]))
            for place, state, known in zip(
                shown.lights.position[:, :2] - origin, shown.lights.state[:, now], shown.lights.valid[:, now]
            )
            if known
        ]
    else:
        drawing, pose = shown.drawing, shown.pose.transpose(1, 0, 2).astype(np.float64)
        valid, kind, ego, now = shown.present.T, shown.kind, 0, 0
        size = np.broadcast_to(shown.size[:, None], (*valid.shape, 2))
        recording = replay(shown)
        lights = list(zip(recording.light_position, recording.light_state[:, 0].tolist()))
    ways = pose[valid][:, :2]
    low, high = (ways.min(0), ways.max(0)) if len(ways) else (np.zeros(2), np.zeros(2))
    marks = [Mark(stroke.points, stroke.colour, stroke.width) for stroke in map_strokes(drawing)]
    order = sorted(range(len(kind)), key=lambda n: n == ego)
    for n in order:
        role = "ego" if n == ego else KINDS.get(int(kind[n]), "other")
        width = EGO_WAY if n == ego else WAY
        marks += [Mark(pose[n, run, :2], COLOURS[role], width) for run in stretches(valid[n])]
    for n in order:
        if valid[n, now]:
            role = "ego" if n == ego else KINDS.get(int(kind[n]), "other")
            length, across = (float(side) for side in np.maximum(size[n, now], 0.5))
            body = polylines.box(pose[n, now], length, across)
            marks += [Mark(body, COLOURS[role], 0.0), Mark(body[[0, 1, 2, 3, 0]], COLOURS["outline"], 0.15)]
    marks += [Mark(circle(place), COLOURS[LIGHTS[state]], 0.0) for place, state in lights if np.isfinite(place).all()]
    return Sketch(shown.id, tuple(marks), low - AROUND, high + AROUND)


def middle(log: Log) -> np.ndarray:
    """Position of the ego at the current step, float64 [2], or first where it is not known then."""
    known = log.tracks.valid[log.sdc]
    return log.tracks.position[log.sdc, log.current if known[log.current] else int(known.argmax()), :2]


def stretches(valid: np.ndarray) -> Iterator[slice]:
    """The runs of two valid steps and more."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[False], valid, [False]]).astype(np.int8)))
    return (slice(a, b) for a, b in zip(bounds[::2], bounds[1::2]) if b - a > 1)


def circle(place: np.ndarray) -> np.ndarray:
    angle = np.linspace(0.0, 2.0 * np.pi, 12, endpoint=False)
    return place + LIGHT * np.stack([np.cos(angle), np.sin(angle)], -1)


def scale_of(drawn: Sketch) -> float:
    """Pixels a metre."""
    return min(FINEST, SIDE / float((drawn.high - drawn.low).max()))


def png(drawn: Sketch) -> bytes:
    scale = scale_of(drawn) * FINE
    size = np.maximum(np.ceil((drawn.high - drawn.low) * scale / FINE), 1).astype(int) * FINE
    image = Image.new("RGB", (int(size[0]), int(size[1])), COLOURS["ground"])
    draw = ImageDraw.Draw(image)
    for mark in visible(drawn):
        x = (mark.points[:, 0] - drawn.low[0]) * scale
        y = (drawn.high[1] - mark.points[:, 1]) * scale
        places = list(zip(x.tolist(), y.tolist()))
        if mark.width:
            draw.line(places, fill=mark.colour, width=max(round(mark.width * scale), 1), joint="curve")
        elif len(places) > 2:
            draw.polygon(places, fill=mark.colour)
    buffer = io.BytesIO()
    image.reduce(FINE).save(buffer, "PNG")
    return buffer.getvalue()


def svg(drawn: Sketch) -> str:
    width, height = drawn.high - drawn.low
    scale = scale_of(drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.2f} {height:.2f}" '
        f'width="{width * scale:.0f}" height="{height * scale:.0f}" stroke-linecap="round" stroke-linejoin="round">',
        f"<title>{html.escape(drawn.id)}</title>",
        f'<rect width="100%" height="100%" fill="{code(COLOURS["ground"])}"/>',
    ]
    for mark in visible(drawn):
        x, y = mark.points[:, 0] - drawn.low[0], drawn.high[1] - mark.points[:, 1]
        places = " ".join(f"{a:.2f},{b:.2f}" for a, b in zip(x.tolist(), y.tolist()))
        if mark.width:
            style = f'fill="none" stroke="{code(mark.colour)}" stroke-width="{mark.width:g}"'
            lines.append(f'<polyline points="{places}" {style}/>')
        else:
            lines.append(f'<polygon points="{places}" fill="{code(mark.colour)}"/>')
    return "\n".join([*lines, "</svg>\n"])


def visible(drawn: Sketch) -> Iterator[Mark]:
    """The marks that reach into the rectangle."""
    for mark in drawn.marks:
        if not ((mark.points.min(0) > drawn.high + mark.width) | (mark.points.max(0) < drawn.low - mark.width)).any():
            yield mark


def code(colour: Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
