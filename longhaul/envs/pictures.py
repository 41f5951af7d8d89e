"""Pictures of episodes: classic control, HackMatrix, observations that are images (MinAtar, Atari), and Brax by its own
renderer.

Pillow draws all but Brax, whose bodies MuJoCo's renderer draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from longhaul.envs.hackmatrix import screen
from longhaul.spaces import Masked
from longhaul.types import Environment

SIZE = (480, 320)
"""Pixels of a picture of classic control."""

SIDE = 320
"""Least pixels of the longer side of an observation that is drawn."""

Draw = Callable[[Sequence[Any], Sequence[Any]], list[Image.Image]]
"""(states, observations) of an episode, on the host -> its pictures."""

INK, GROUND, BODY, MARK = "#1c1f23", "#fafaf8", "#0072b2", "#d55e00"
TERMINAL = {"red": "#ff7a2e", "yellow": "#ffd23d", "magenta": "#e38dc4", "cyan": "#4cb3f0", "green": "#2fd3a5",
            "blue": "#7aa7ff", "dim": "#7d858e"}  # fmt: skip


def painter(name: str, environment: Environment) -> Draw:
    """Drawing of the environment of that name. Raises ValueError, one line, where it has no picture."""
    if name in CLASSIC:
        return lambda states, seen: [_classic(CLASSIC[name], np.asarray(state.physics)) for state in states]
    if name.startswith("hackmatrix"):
        return hackmatrix(environment)
    if name.startswith("brax/"):
        return brax(name)
    shapes = [leaf.shape for leaf in jax.tree.leaves(environment.spec.observation)]
    if len(shapes) == 1 and len(shapes[0]) == 3:
        return lambda states, seen: [image(jax.tree.leaves(each)[0]) for each in seen]
    raise ValueError(f"{name} has no picture: its observations are no images, and there is no drawing of its states")


# ---------------------------------------------------------------------------------------------------- classic control

Line = tuple[list[tuple[float, float]], float, str]
"""Points in metres, width in metres, colour."""


def _cartpole(physics: np.ndarray) -> list[Line]:
    x, angle = float(physics[0]), float(physics[2])
    pole = [(x, 0.1), (x + math.sin(angle), 0.1 + math.cos(angle))]
    return [([(-2.4, 0.0), (2.4, 0.0)], 0.02, INK), ([(x - 0.25, 0.1), (x + 0.25, 0.1)], 0.3, INK), (pole, 0.1, MARK)]


def _pendulum(physics: np.ndarray) -> list[Line]:
    angle = float(physics[0])
    return [([(0.0, 0.0), (-math.sin(angle), math.cos(angle))], 0.2, MARK), ([(-0.02, 0.0), (0.02, 0.0)], 0.1, INK)]


def _mountaincar(physics: np.ndarray) -> list[Line]:
    def place(x: float) -> tuple[float, float]:
        return x, 0.45 * math.sin(3.0 * x)

    hill, x = [place(x) for x in np.linspace(-1.2, 0.6, 60).tolist()], float(physics[0])
    goal = place(0.5)
    car = [(x - 0.04, place(x)[1] + 0.05), (x + 0.04, place(x)[1] + 0.05)]
    return [(hill, 0.01, INK), ([goal, (goal[0], goal[1] + 0.2)], 0.015, MARK), (car, 0.05, BODY)]


def _acrobot(physics: np.ndarray) -> list[Line]:
    first, second = float(physics[0]), float(physics[0] + physics[1])
    elbow = (math.sin(first), -math.cos(first))
    tip = (elbow[0] + math.sin(second), elbow[1] - math.cos(second))
    return [([(-2.2, 1.0), (2.2, 1.0)], 0.02, INK), ([(0.0, 0.0), elbow], 0.15, BODY), ([elbow, tip], 0.15, MARK)]


Scene = tuple[Callable[[np.ndarray], list[Line]], tuple[float, float], float]
"""Lines of a state, the middle of the picture in metres, and the metres that it shows from left to right."""

CLASSIC: dict[str, Scene] = {
    "cartpole": (_cartpole, (0.0, 0.6), 5.2),
    "pendulum": (_pendulum, (0.0, 0.0), 3.6),
    "mountaincar": (_mountaincar, (-0.3, 0.1), 2.0),
    "mountaincar-continuous": (_mountaincar, (-0.3, 0.1), 2.0),
    "acrobot": (_acrobot, (0.0, 0.0), 6.6),
}


def _classic(scene: Scene, physics: np.ndarray) -> Image.Image:
    lines, (x, y), across = scene
    fine, scale = 2, 2 * SIZE[0] / across
    picture = Image.new("RGB", (SIZE[0] * fine, SIZE[1] * fine), GROUND)
    draw = ImageDraw.Draw(picture)
    for points, width, colour in lines(physics):
        path = [(SIZE[0] + (px - x) * scale, SIZE[1] - (py - y) * scale) for px, py in points]
        draw.line(path, fill=colour, width=max(2, round(width * scale)), joint="curve")
    return picture.reduce(fine)


# --------------------------------------------------------------------------------------------------------- HackMatrix


def hackmatrix(environment: Environment) -> Draw:
    """Screens of the game, as `longhaul play` prints them."""
    expand = environment.spec.expand
    assert expand is not None
    numbers = jax.jit(expand)

    def draw(states: Sequence[Any], seen: Sequence[Masked]) -> list[Image.Image]:
        views = [
            screen.view(state, np.asarray(numbers(each.observation)), np.asarray(each.mask))
            for state, each in zip(states, seen, strict=True)
        ]
        return [terminal(screen.screen(view, title="HackMatrix")) for view in views]

    return draw


def terminal(lines: Sequence[screen.Line]) -> Image.Image:
    """Lines of styled text, a cell of the same size for each letter."""
    wide, high, font = 8, 16, ImageFont.load_default(13)
    picture = Image.new("RGB", (82 * wide, len(lines) * high), "#15181c")
    draw = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        column = 0
        for text, style in line:
            colour = next((TERMINAL[word] for word in style.split() if word in TERMINAL), "#e8eaed")
            for letter in text:
                draw.text((column * wide + wide / 2, row * high + high / 2), letter, colour, font, anchor="mm")
                column += 1
    return picture


# ------------------------------------------------------------------------------------- observations that are images


def image(seen: np.ndarray) -> Image.Image:
    """Picture of an observation [H, W, C]: colours where C is 3, a colour a channel elsewhere; of frames [F, H, W], at
    most four of 0 to 255, the last one."""
    pixels = np.asarray(seen)
    if pixels.shape[0] <= 4 < pixels.shape[2]:
        pixels = np.repeat(pixels[-1][..., None], 3, -1)
    elif pixels.shape[2] != 3:
        hue = np.arange(pixels.shape[2]) / pixels.shape[2]
        shades = 0.55 + 0.45 * np.cos(2 * np.pi * (hue[:, None] + np.array([0.0, 1 / 3, 2 / 3])))
        lit = np.abs(pixels.astype(float))
        pixels = np.max(lit[..., None] * shades, axis=2) / max(float(lit.max()), 1.0)
    if pixels.dtype != np.uint8:
        pixels = np.clip(pixels * (255.0 if pixels.max(initial=0.0) <= 1.0 else 1.0), 0, 255).astype(np.uint8)
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    factor = max(1, SIDE // max(picture.size))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


# --------------------------------------------------------------------------------------------------------------- Brax


def brax(name: str) -> Draw:
    """Bodies by Brax's own renderer. Raises ValueError where MuJoCo's can't open a display of any kind."""
    from brax import envs
    from brax.io import image as own

    whole, _, query = name.partition("?")
    options = dict(part.partition("=")[::2] for part in query.split("&")) if query else {}
    backend = {"backend": options["backend"]} if "backend" in options else {}
    system = envs.get_environment(whole.partition("/")[2], **backend).sys

    def draw(states: Sequence[Any], seen: Sequence[Any]) -> list[Image.Image]:
        bodies = [state.inner.pipeline_state for state in states]
        try:
            drawn = own.render_array(system, bodies, height=SIZE[1], width=SIZE[0])
        except Exception as error:  # OpenGL names no kind of its own
            raise ValueError(f"{name}: MuJoCo can't draw here ({error}); set MUJOCO_GL=egl or osmesa") from error
        return [Image.fromarray(np.asarray(each)) for each in drawn]

    return draw
