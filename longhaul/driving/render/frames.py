"""Frames of driving: the scene from above, north up, the camera on the ego.

Drawn by Pillow alone, at twice the size and then reduced: an order of magnitude faster than a plotting library, and
smooth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from longhaul.driving.datasets import log
from longhaul.driving.render.recording import GOOD_EVENTS, LIGHT, Recording, box, camera, clip, dashes, simplify, speeds

VIEW = (80.0, 60.0)
"""Metres that a frame shows, east-west and north-south."""

PIXELS = 8
"""Pixels a metre of a finished frame."""

FINE = 2
"""Factor by which a frame is drawn finer than shown."""

SIZE = (int(VIEW[0] * PIXELS), int(VIEW[1] * PIXELS))
KINDS = {log.VEHICLE: "vehicle", log.PEDESTRIAN: "pedestrian", log.CYCLIST: "cyclist", log.OTHER: "other"}
BROKEN_LINES = (6, 9, 10)
YELLOW_LINES = (9, 10, 11, 12, 13)

Colour = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    role: (int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)) for role, code in LIGHT.items()
}


class Stroke(NamedTuple):
    """One line or area of the map, ready to be drawn."""

    points: np.ndarray  # [P, 2]
    role: str  # of COLOURS
    width: float  # metres; 0 fills the polygon instead
    low: np.ndarray  # [2], its box with the line's width
    high: np.ndarray


class View(NamedTuple):
    """A drawing surface over a part of the world, `FINE` times finer than shown."""

    draw: ImageDraw.ImageDraw
    centre: np.ndarray  # [2], metres


def frames(recording: Recording, chosen: Sequence[int] | np.ndarray) -> Iterator[Image.Image]:
    """RGB images of `SIZE` of the chosen frames."""
    strokes = map_strokes(recording.drawing)
    centre, speed = camera(recording).astype(float), speeds(recording)
    for t in chosen:
        image = Image.new("RGB", (SIZE[0] * FINE, SIZE[1] * FINE), COLOURS["ground"])
        view = View(ImageDraw.Draw(image), centre[t])
        for each in visible(strokes, view.centre - np.array(VIEW) / 2, view.centre + np.array(VIEW) / 2):
            if each.width > 0:
                _line(view, each.points, COLOURS[each.role], each.width)
            else:
                view.draw.polygon(_pixels(view, each.points), fill=COLOURS[each.role])
        near = np.array(VIEW) / 2 + 2.0
        for run in clip(recording.route.astype(float), view.centre - near, view.centre + near):
            if len(run) > 1:
                _line(view, run, COLOURS["route"], 1.0)
        _draw_lights(view, recording, int(t))
        _draw_agents(view, recording, int(t))
        image = image.reduce(FINE)
        _draw_text(image, recording, int(t), float(speed[t]))
        yield image


def map_strokes(drawing: tuple[tuple[int, np.ndarray], ...]) -> list[Stroke]:
    """Strokes of a map, in order: areas and lanes first, lines on them, edges last."""
    order: list[tuple[int, Stroke]] = []
    for kind, points in drawing:
        line = np.asarray(points, float)[:, :2]
        if len(line) > 2:
            line = simplify(line, 0.05)
        if kind in (log.LANE_FREEWAY, log.LANE_STREET) and len(line) > 1:
            order.append((0, stroke(line, "road", 4.0)))
        elif kind == log.LANE_BIKE and len(line) > 1:
            order.append((1, stroke(line, "bike", 1.8)))
        elif kind == log.DRIVEWAY and len(line) > 2:
            order.append((0, stroke(line, "road", 0.0)))
        elif kind in (log.CROSSWALK, log.SPEED_BUMP) and len(line) > 2:
            order.append((2, stroke(line, "crosswalk" if kind == log.CROSSWALK else "bump", 0.0)))
        elif kind in log.ROAD_LINES and len(line) > 1:
            role = "yellow" if kind in YELLOW_LINES else "line"
            pieces = dashes(line, 3.0, 4.5) if kind in BROKEN_LINES else [line]
            order += [(3, stroke(piece, role, 0.22)) for piece in pieces]
        elif kind in (log.EDGE_BOUNDARY, log.EDGE_MEDIAN) and len(line) > 1:
            order.append((4, stroke(line, "edge", 0.3)))
        elif kind == log.STOP_SIGN and len(line):
            angles = np.pi / 8 + np.arange(8) * np.pi / 4
            order.append((5, stroke(line[0] + 0.8 * np.stack([np.cos(angles), np.sin(angles)], -1), "stop", 0.0)))
    return [drawn for _, drawn in sorted(order, key=lambda item: item[0])]


def stroke(points: np.ndarray, role: str, width: float) -> Stroke:
    return Stroke(points, role, width, points.min(0) - width, points.max(0) + width)


def visible(strokes: Sequence[Stroke], low: np.ndarray, high: np.ndarray) -> Iterator[Stroke]:
    """The strokes that reach into a rectangle."""
    return (each for each in strokes if not (np.any(each.low > high) or np.any(each.high < low)))


def _pixels(view: View, points: np.ndarray) -> list[tuple[float, float]]:
    scale = PIXELS * FINE
    x = (points[:, 0] - view.centre[0] + VIEW[0] / 2) * scale
    y = (view.centre[1] - points[:, 1] + VIEW[1] / 2) * scale
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _line(view: View, points: np.ndarray, colour: Colour, width: float) -> None:
    """A line of `width` metres with round joints and ends."""
    path = _pixels(view, points)
    thick = max(round(width * PIXELS * FINE), 1)
    view.draw.line(path, fill=colour, width=thick, joint="curve" if thick > 4 else None)
    if thick > 12:
        for x, y in (path[0], path[-1]):
            view.draw.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=colour)


def _draw_lights(view: View, recording: Recording, t: int) -> None:
    """Lights as shapes that differ without colours: red is a square, yellow a diamond, green a disc."""
    radius = 0.9 * PIXELS * FINE
    ink = COLOURS["ink"]
    known = np.isfinite(recording.light_position).all(-1)
    places = _pixels(view, recording.light_position[known])
    for (x, y), state in zip(places, recording.light_state[known, t].tolist(), strict=True):
        around = (x - radius, y - radius, x + radius, y + radius)
        if state == 1:
            view.draw.rectangle(around, fill=COLOURS["red"], outline=ink, width=FINE)
        elif state == 2:
            wide = 1.3 * radius
            corners = [(x - wide, y), (x, y - wide), (x + wide, y), (x, y + wide)]
            view.draw.polygon(corners, fill=COLOURS["amber"], outline=ink, width=FINE)
        else:
            view.draw.ellipse(around, fill=COLOURS["green" if state == 3 else "unknown"], outline=ink, width=FINE)


def _draw_agents(view: View, recording: Recording, t: int) -> None:
    reach = np.array(VIEW) / 2 + 15.0
    near = np.all(np.abs(recording.pose[t, :, :2] - view.centre) < reach, axis=-1)
    shown = np.flatnonzero(recording.present[t] & (recording.kind > 0) & near)
    for n in sorted(shown.tolist(), key=lambda n: (bool(recording.controlled[n]), n == recording.ego)):
        role = "ego" if recording.controlled[n] else KINDS.get(int(recording.kind[n]), "other")
        pose = recording.pose[t, n].astype(float)
        length, width = (float(side) for side in recording.size[n])
        if recording.kind[n] == log.PEDESTRIAN:
            radius = max(length, width, 1.2) / 2 * PIXELS * FINE
            x, y = _pixels(view, pose[None, :2])[0]
            around = (x - radius, y - radius, x + radius, y + radius)
            view.draw.ellipse(around, fill=COLOURS[role], outline=COLOURS["outline"], width=FINE)
            continue
        body = _pixels(view, box(pose, length, width))
        view.draw.polygon(body, fill=COLOURS[role], outline=COLOURS["outline"], width=FINE)
        if width > 1.0:
            _draw_front(view, pose, length, width)
    if recording.expert is not None and np.all(np.isfinite(recording.expert[t])):
        length, width = (float(side) for side in recording.size[recording.ego])
        outline = box(recording.expert[t].astype(float), length, width)
        _line(view, outline[[0, 1, 2, 3, 0]], COLOURS["ghost"], 0.2)
    _draw_rings(view, recording, t)


def _draw_front(view: View, pose: np.ndarray, length: float, width: float) -> None:
    """An arrowhead towards the front, so that a still picture shows which way an agent faces."""
    cos, sin = np.cos(pose[2]), np.sin(pose[2])
    shape = np.array([[0.36 * length, 0.0], [0.12 * length, 0.3 * width], [0.12 * length, -0.3 * width]])
    tip = pose[:2] + shape @ np.array([[cos, sin], [-sin, cos]])
    view.draw.polygon(_pixels(view, tip), fill=COLOURS["outline"])


def _draw_rings(view: View, recording: Recording, t: int) -> None:
    """A ring around the place of an event, from its frame on."""
    at = camera(recording)
    for name, frame in recording.events.items():
        if frame is not None and frame <= t:
            x, y = _pixels(view, at[None, min(frame, len(at) - 1)].astype(float))[0]
            radius = 4.2 * PIXELS * FINE
            colour = COLOURS["good" if name in GOOD_EVENTS else "fault"]
            view.draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=3 * FINE)


def _draw_text(image: Image.Image, recording: Recording, t: int, speed: float) -> None:
    """Policy, scenario, time and speed; the events so far; scale bar, legend and the place in time."""
    draw = ImageDraw.Draw(image)
    large, small = ImageFont.load_default(16), ImageFont.load_default(12)
    moving = f"{speed:4.1f} m/s" if np.isfinite(speed) else "ended"
    lines = [
        (recording.label[:28], large, "ink"),
        (f"{t * recording.dt:.1f} s    {moving}", small, "ink"),
        (recording.id[:34], small, "muted"),
    ]
    right = 26 + max(draw.textlength(text, font=font) for text, font, _ in lines)
    draw.rounded_rectangle((10, 10, right, 70), 5, fill=COLOURS["panel"])
    for (text, font, role), y in zip(lines, (14, 34, 50), strict=True):
        draw.text((18, y), text, font=font, fill=COLOURS[role])
    y = 10
    for name, frame in sorted(recording.events.items(), key=lambda item: item[1] if item[1] is not None else 0):
        if frame is not None and frame <= t:
            text = f"{name.replace('_', ' ')} at {frame * recording.dt:.1f} s"
            left = SIZE[0] - 26 - draw.textlength(text, font=small)
            role = "good" if name in GOOD_EVENTS else "fault"
            draw.rounded_rectangle((left, y, SIZE[0] - 10, y + 22), 5, fill=COLOURS[role])
            draw.text((left + 8, y + 3), text, font=small, fill=COLOURS["panel"])
            y += 27
    _draw_scale(draw, small)
    _draw_legend(draw, small, recording.expert is not None)
    done = SIZE[0] * (t + 1) / len(recording.present)
    draw.rectangle((0, SIZE[1] - 4, SIZE[0], SIZE[1]), fill=COLOURS["panel"])
    draw.rectangle((0, SIZE[1] - 4, done, SIZE[1]), fill=COLOURS["muted"])


def _draw_scale(draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> None:
    length, bottom = 10 * PIXELS, SIZE[1] - 16
    draw.rounded_rectangle((10, bottom - 24, 26 + length, bottom + 6), 5, fill=COLOURS["panel"])
    draw.line((18, bottom, 18 + length, bottom), fill=COLOURS["ink"], width=2)
    for x in (18, 18 + length):
        draw.line((x, bottom - 4, x, bottom + 1), fill=COLOURS["ink"], width=2)
    draw.text((18 + length / 2, bottom - 12), "10 m", font=font, fill=COLOURS["ink"], anchor="mm")


def _draw_legend(draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, with_log: bool) -> None:
    entries = [("driven", "ego"), ("route", "route"), *([("log", "ghost")] if with_log else [])]
    width = sum(34 + draw.textlength(text, font=font) for text, _ in entries)
    x, y = SIZE[0] - 10 - width, SIZE[1] - 25
    draw.rounded_rectangle((x, y - 15, SIZE[0] - 10, y + 15), 5, fill=COLOURS["panel"])
    for text, role in entries:
        if role == "ghost":
            draw.rectangle((x + 8, y - 4, x + 22, y + 4), outline=COLOURS[role], width=2)
        else:
            draw.rectangle((x + 8, y - 4, x + 22, y + 4), fill=COLOURS[role])
        draw.text((x + 28, y), text, font=font, fill=COLOURS["ink"], anchor="lm")
        x += 34 + draw.textlength(text, font=font)
