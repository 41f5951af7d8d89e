"""Self-contained HTML pages: assets of the package, and data that is safe inside a script."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any


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
    return f'<div class="card table"><table><thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


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
