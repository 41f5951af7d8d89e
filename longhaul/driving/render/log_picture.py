"""One still picture of a whole log: the map from above, north up, everybody's way, and who is where at the current
step. PNG by Pillow, SVG as text, and a page with the player of `web_player`.

No JAX here.
"""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from longhaul.driving.datasets.log import Log
from longhaul.driving.render import save as render
from longhaul.driving.render.frames import COLOURS, KINDS, Stroke, map_strokes, stroke, visible
from longhaul.driving.render.recording import LIGHT, box, replay
from longhaul.driving.scenario.from_log import STATES, runs, scenario_from_log
from longhaul.driving.scenario.scenario import Scenario
from longhaul.runtime import files as pages

SUFFIXES = (".png", ".svg", ".html")

SIDE, FINEST, FINE = 1600, 10.0, 2
"""Pixels of a picture's longer side, pixels a metre at most, and how many times finer it is drawn than shown."""

AROUND = 15.0
"""Metres around all ways that are shown."""

WAY, EGO_WAY, LIGHT_RADIUS = 0.4, 0.9, 0.8
"""Metres: widths of ways, and the radius of a light."""

LIGHTS = ("unknown", "red", "amber", "green")


class Sketch(NamedTuple):
    """Shapes in drawing order, and the rectangle that is shown."""

    id: str
    strokes: list[Stroke]
    low: np.ndarray  # [2]
    high: np.ndarray  # [2]


def save(shown: Log | Scenario, path: Path) -> None:
    """Picture of a log, or of a scenario of a shard, in a file; by its suffix a .png, .svg or .html.

    Raises ValueError for another suffix, and `BadData` where a page is asked for of a log that does not compile.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"cannot draw to {str(path)!r}: suffix {suffix!r} is none of {', '.join(SUFFIXES)}")
    if suffix == ".html":
        render.save([replay(scenario_from_log(shown) if isinstance(shown, Log) else shown)], path)
    else:
        drawn = sketch(shown)
        pages.write(path, png(drawn) if suffix == ".png" else svg(drawn))


class _Scene(NamedTuple):
    """Map and motion of N objects in T steps, relative to the ego at the current step."""

    drawing: tuple[tuple[int, np.ndarray], ...]  # (kind, points) of the map
    pose: np.ndarray  # [N, T, 3]: x, y, heading
    valid: np.ndarray  # bool [N, T]
    size: np.ndarray  # [N, T, 2]
    kind: np.ndarray  # [N]
    lights: list[tuple[np.ndarray, int]]  # (position, state) now
    ego: int
    now: int


def _log_scene(log: Log) -> _Scene:
    tracks, ego, now = log.tracks, log.sdc, log.current
    seen = tracks.valid[ego]  # the middle is where the ego is now, or first where it is not known now
    origin = tracks.position[ego, now if seen[now] else int(seen.argmax()), :2]
    drawing = tuple((each.kind, each.points[:, :2] - origin) for each in log.features if len(each.points))
    pose = np.concatenate([tracks.position[..., :2] - origin, tracks.heading[..., None]], -1)
    lights = zip(log.lights.position[:, :2] - origin, log.lights.state[:, now], log.lights.valid[:, now])
    shown = [(position, int(STATES[state])) for position, state, known in lights if known]
    return _Scene(drawing, pose, tracks.valid, tracks.size[..., :2], tracks.kind, shown, ego, now)


def _scenario_scene(scenario: Scenario) -> _Scene:
    pose, valid = scenario.pose.transpose(1, 0, 2).astype(np.float64), scenario.present.T
    size = np.broadcast_to(scenario.size[:, None], (*valid.shape, 2))
    recording = replay(scenario)
    lights = list(zip(recording.light_position, recording.light_state[:, 0].tolist()))
    return _Scene(scenario.drawing, pose, valid, size, scenario.kind, lights, ego=0, now=0)


def sketch(shown: Log | Scenario) -> Sketch:
    """The map, the ways and the bodies of a log or a scenario, relative to the ego at the current step."""
    scene = _log_scene(shown) if isinstance(shown, Log) else _scenario_scene(shown)
    drawing, pose, valid, size, kind, lights, ego, now = scene
    positions = pose[valid][:, :2]
    low, high = (positions.min(0), positions.max(0)) if len(positions) else (np.zeros(2), np.zeros(2))
    strokes = map_strokes(drawing)
    order = sorted(range(len(kind)), key=lambda n: n == ego)
    roles = ["ego" if n == ego else KINDS.get(int(kind[n]), "other") for n in range(len(kind))]
    for n in order:
        ways = (pose[n, run, :2] for run in runs(valid[n]) if run.stop - run.start > 1)
        strokes += [stroke(way, roles[n], EGO_WAY if n == ego else WAY) for way in ways]
    for n in order:
        if valid[n, now]:
            length, across = (float(side) for side in np.maximum(size[n, now], 0.5))
            body = box(pose[n, now], length, across)
            strokes += [stroke(body, roles[n], 0.0), stroke(body[[0, 1, 2, 3, 0]], "outline", 0.15)]
    angle = np.linspace(0.0, 2.0 * np.pi, 12, endpoint=False)
    circle = LIGHT_RADIUS * np.stack([np.cos(angle), np.sin(angle)], -1)
    strokes += [stroke(at + circle, LIGHTS[state], 0.0) for at, state in lights if np.isfinite(at).all()]
    return Sketch(shown.id, strokes, low - AROUND, high + AROUND)


def scale_of(drawn: Sketch) -> float:
    """Pixels a metre."""
    return min(FINEST, SIDE / float((drawn.high - drawn.low).max()))


def png(drawn: Sketch) -> bytes:
    scale = scale_of(drawn) * FINE
    size = np.maximum(np.ceil((drawn.high - drawn.low) * scale / FINE), 1).astype(int) * FINE
    image = Image.new("RGB", (int(size[0]), int(size[1])), COLOURS["ground"])
    draw = ImageDraw.Draw(image)
    for mark in visible(drawn.strokes, drawn.low, drawn.high):
        x = (mark.points[:, 0] - drawn.low[0]) * scale
        y = (drawn.high[1] - mark.points[:, 1]) * scale
        places = list(zip(x.tolist(), y.tolist()))
        if mark.width:
            draw.line(places, fill=COLOURS[mark.role], width=max(round(mark.width * scale), 1), joint="curve")
        elif len(places) > 2:
            draw.polygon(places, fill=COLOURS[mark.role])
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
        f'<rect width="100%" height="100%" fill="{LIGHT["ground"]}"/>',
    ]
    for mark in visible(drawn.strokes, drawn.low, drawn.high):
        x, y = mark.points[:, 0] - drawn.low[0], drawn.high[1] - mark.points[:, 1]
        places = " ".join(f"{a:.2f},{b:.2f}" for a, b in zip(x.tolist(), y.tolist()))
        if mark.width:
            style = f'fill="none" stroke="{LIGHT[mark.role]}" stroke-width="{mark.width:g}"'
            lines.append(f'<polyline points="{places}" {style}/>')
        else:
            lines.append(f'<polygon points="{places}" fill="{LIGHT[mark.role]}"/>')
    return "\n".join([*lines, "</svg>\n"])
