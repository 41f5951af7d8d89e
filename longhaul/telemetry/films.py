"""Films of episodes on web pages: pictures that are played, paused and stepped through by mouse or keyboard."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from longhaul.telemetry import pages

PICTURES = 100
"""Largest number of pictures of a film on a page, at even distances: some 300 kB."""

COLOURS = 64
"""Colours of a picture."""


class Film(NamedTuple):
    """Pictures of an episode, of one size; without any, `says` is the reason."""

    label: str  # the policy
    says: str
    images: Sequence[Image.Image] = ()


def section(films: Sequence[Film]) -> str:
    """Markup of the films, for a page that also has `styles()` and `scripts()`; the reason where there is none."""
    drawn = [film for film in films if film.images]
    if not drawn:
        return "".join(f'<p class="muted">{html.escape(film.says)}</p>' for film in films[:1])
    return f'<div class="films">{"".join(map(_figure, drawn))}</div>'


def address(label: str) -> str:
    """Name of a film's place on its page."""
    return f"film-{label}"


def styles() -> list[str]:
    return [pages.asset("films.css")]


def scripts() -> list[str]:
    return [pages.asset("films.js")]


def even(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, at even distances, the first and the last among them."""
    return np.linspace(0, count - 1, min(most, count)).round().astype(int).tolist()


def _figure(film: Film) -> str:
    images = [_png(film.images[i]) for i in even(len(film.images), PICTURES)]
    label, (wide, high) = html.escape(film.label, quote=True), film.images[0].size
    return (
        f'<figure class="film card" id="{address(label)}">'
        f"<figcaption>{f'<b>{label}</b> ' * bool(label)}{html.escape(film.says)}</figcaption>"
        f'<img alt="Episode of {label}" width="{wide}" height="{high}" src="data:image/png;base64,{images[0]}">'
        f'<div><button type="button">Play</button><input type="range" min="0" max="{len(images) - 1}" value="0" '
        f'aria-label="Picture of the episode of {label}"></div>'
        f'<script type="application/json">{pages.embed(images)}</script></figure>'
    )


def _png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    # An octree finds few colours six times faster; of many it makes coarser ones.
    method = Image.Quantize.FASTOCTREE if image.getcolors(COLOURS) else None
    image.quantize(COLOURS, method, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
