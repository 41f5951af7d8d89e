"""Pictures of driving as files: an animated GIF, an MP4, a page with a player, or a film strip.

`save` chooses by the suffix. The camera follows the ego, north up, over 80 x 60 m. No JAX here.
"""

from __future__ import annotations

import html
import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image

from longhaul.driving.render import web_player
from longhaul.driving.render.frames import COLOURS, SIZE, frames
from longhaul.driving.render.recording import Recording, check
from longhaul.runtime import files as pages
from longhaul.telemetry import films
from longhaul.telemetry import pages as web_pages

STRIP = 5
"""Frames a recording gets in a film strip."""

SPACING = 10.0
"""Least distance between a mixed colour of a GIF's palette and any other, in levels of red, green and blue."""

FILM_FPS = 25
"""Pictures a second of a film that is not of driving."""


def save(recordings: Sequence[Recording], path: Path | str, fps: int = 10) -> None:
    """Picture in a file, as the suffix of `path` asks for: .gif, .mp4, .html or .png (a film strip).

    Raises ValueError where the suffix is another one, there is nothing to draw, or ffmpeg is missing for .mp4.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".gif", ".mp4", ".html", ".png"):
        raise ValueError(f"cannot draw to {str(path)!r}: suffix {suffix!r} is none of .gif, .mp4, .html, .png")
    check(recordings)
    if suffix == ".mp4":
        _encode(_all_frames(recordings), SIZE, path, fps)
    elif suffix == ".html":
        pages.write(path, web_player.document(recordings))
    else:
        pages.write(path, gif(recordings, fps) if suffix == ".gif" else png(recordings))


def film(images: Sequence[Image.Image], path: Path | str, title: str) -> None:
    """File of pictures of one size, of anything: a .gif, .mp4, .png (a film strip) or .html (a page with a player).

    Raises ValueError as `save` does.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".mp4":
        return _encode(iter(images), images[0].size, path, FILM_FPS)
    if suffix == ".html":
        shown = films.section([films.Film("", "", images)])
        body = f"<main><header><h1>{html.escape(title, quote=True)}</h1></header>{shown}</main>"
        style = [web_pages.asset("page.css"), *films.styles()]
        return pages.write(path, web_pages.page(title, body, styles=style, scripts=films.scripts()))
    buffer = io.BytesIO()
    if suffix == ".png":
        strip(images, buffer)
    else:
        first, *rest = (image.quantize(64, dither=Image.Dither.NONE) for image in images)
        first.save(buffer, "GIF", save_all=True, append_images=rest, duration=1000 // FILM_FPS, loop=0)
    return pages.write(path, buffer.getvalue())


def strip(images: Sequence[Image.Image], buffer: io.BytesIO) -> None:
    """A film strip as PNG: pictures evenly spaced from the first to the last."""
    chosen = [images[i] for i in np.linspace(0, len(images) - 1, min(STRIP, len(images))).round().astype(int).tolist()]
    wide, high = images[0].size
    sheet = Image.new("RGB", (len(chosen) * (wide + 8) - 8, high), COLOURS["panel"])
    for column, image in enumerate(chosen):
        sheet.paste(image, (column * (wide + 8), 0))
    sheet.save(buffer, "PNG", optimize=False)


def gif(recordings: Sequence[Recording], fps: int) -> bytes:
    """One animation, recording after recording, every frame shown for 1 / fps seconds (GIF counts hundredths)."""
    if not 1 <= fps <= 50:
        raise ValueError(f"fps is {fps}, a GIF shows 1 .. 50; write a .mp4 for more")
    palette = _palette()
    images = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in _all_frames(recordings))
    buffer = io.BytesIO()
    next(images).save(
        buffer, "GIF", save_all=True, append_images=images, duration=round(100 / fps) * 10, loop=0, optimize=False
    )
    return buffer.getvalue()


def _encode(images: Iterator[Image.Image], size: tuple[int, int], path: Path, fps: int) -> None:
    """A film by ffmpeg. Raises ValueError where there is no ffmpeg, RuntimeError where it fails."""
    program = _ffmpeg()
    if program is None:
        raise ValueError(f"{str(path)!r} needs ffmpeg; install it, or longhaul's extra video, or write a .gif")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial.mp4")
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[0]}x{size[1]}", "-r", str(fps), "-i", "-"]
    target = ["-pix_fmt", "yuv420p", "-movflags", "+faststart", str(partial)]
    try:
        with tempfile.TemporaryFile() as complaints:
            command = [program, "-y", "-loglevel", "error", *source, *target]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=complaints) as process:
                assert process.stdin is not None
                try:
                    for frame in images:
                        process.stdin.write(frame.tobytes())
                    process.stdin.close()
                except BrokenPipeError:
                    pass  # ffmpeg gave up; its exit code and last words say why
            if process.returncode != 0:
                complaints.seek(0)
                words = complaints.read().decode("utf-8", "replace").strip().splitlines()
                raise RuntimeError(
                    f"ffmpeg failed on {str(path)!r}: {words[-1] if words else process.returncode}; write a .gif "
                    "instead"
                )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def png(recordings: Sequence[Recording]) -> bytes:
    """A film strip: a row a recording, its frames evenly spaced from the first to the last."""
    columns = min(STRIP, max(len(r.present) for r in recordings))
    gap = 8
    step = (SIZE[0] + gap, SIZE[1] + gap)
    sheet = Image.new("RGB", (columns * step[0] - gap, len(recordings) * step[1] - gap), COLOURS["panel"])
    for row, recording in enumerate(recordings):
        count = min(columns, len(recording.present))
        chosen = np.linspace(0, len(recording.present) - 1, count).round().astype(int)
        for column, image in enumerate(frames(recording, chosen)):
            sheet.paste(image, (column * step[0], row * step[1]))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=False)
    return buffer.getvalue()


def _all_frames(recordings: Sequence[Recording]) -> Iterator[Image.Image]:
    return chain.from_iterable(frames(recording, range(len(recording.present))) for recording in recordings)


def _palette() -> Image.Image:
    """All roles' colours exactly, and for smooth edges what lies between them and their usual grounds.

    Pillow finds the nearest colour for cells of 4 levels a channel: no mixed colour may be so near to a role's as to be
    taken for it.
    """
    table = [np.array(colour, float) for colour in dict.fromkeys(COLOURS.values())]
    for ground in (np.array(COLOURS[role], float) for role in ("road", "ground", "panel")):
        for share in (0.4, 0.75):
            for colour in map(np.array, COLOURS.values()):
                mixed = share * colour + (1 - share) * ground
                if len(table) < 256 and min(float(np.linalg.norm(mixed - known)) for known in table) > SPACING:
                    table.append(mixed)
    image = Image.new("P", (1, 1))
    image.putpalette(np.array(table).round().astype(np.uint8).tobytes())
    return image


def _ffmpeg() -> str | None:
    """The path of ffmpeg: the machine's, else that of the package imageio-ffmpeg where it is installed."""
    program = shutil.which("ffmpeg")
    if program is not None:
        return program
    try:
        import imageio_ffmpeg
    except ImportError:
        return None
    return str(imageio_ffmpeg.get_ffmpeg_exe())
