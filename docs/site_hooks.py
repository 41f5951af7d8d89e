"""Hooks of the site: links from docs/ to files outside of it lead to copies of these files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./(?!api/)([^)#]+)(?:#[^)]*)?\)")
"""A link to a file above docs/: its text, and the file."""


def copied(name: str) -> bool:
    """True for a file of the repository that the site has a copy of; its pages and folders have none."""
    return (ROOT / name).is_file() and not name.endswith(".md")


def on_files(files: Any, config: Any) -> Any:
    """Copies of all files outside that a page of docs/ links to, under source/."""
    pages = (ROOT / "docs").glob("*.md")
    for name in sorted({name for page in pages for _, name in OUTSIDE.findall(page.read_text())}):
        if copied(name):
            files.append(File.generated(config, f"source/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links led to the copies, or left out where there is none."""
    if "/" in page.file.src_uri:  # the reference links within docs/
        return markdown
    return OUTSIDE.sub(lambda link: f"[{link[1]}](source/{link[2]})" if copied(link[2]) else link[1], markdown)
