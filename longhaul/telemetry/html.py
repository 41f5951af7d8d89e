"""Parts of self-contained HTML pages: the package's assets, data that is safe inside a script, atomic writing."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any


def asset(name: str, package: str = "longhaul.telemetry") -> str:
    """Text of a file in the `assets` folder of `package`."""
    return resources.files(package).joinpath("assets", name).read_text("utf-8")


def embed(value: Any) -> str:
    """`value` as JSON that may stand inside `<script type="application/json">`, whatever its strings hold.

    NaN and infinities have no JSON: replace them by None before. Raises ValueError where one is left.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(title: str, body: str, *, styles: Sequence[str], scripts: Sequence[str] = ()) -> str:
    """A whole HTML document that needs nothing from outside. `body`, `styles` and `scripts` are put in as they are."""
    style = "\n".join(styles)
    script = "\n".join(f"<script>\n{code}</script>" for code in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n{script}\n</body>\n</html>\n"
    )


def finite(value: Any) -> Any:
    """A value as JSON can hold it: what is not finite becomes null, since JSON has no word for it."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path | str, content: str | bytes) -> None:
    """Writes a file at once or not at all: a reader sees the old one or the new one. Missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path):
            partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
            os.replace(partial, path)
    finally:
        with suppress(OSError):  # on a disk that takes nothing: the failure to write is the one to tell
            partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Within it an OSError names `path`: a full disk's names nothing, others what is written for the time being."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
