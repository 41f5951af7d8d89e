"""Cache folders of compiled programs and generated scenarios, which can be rebuilt.

    LONGHAUL_CACHE     off, or a folder; else $XDG_CACHE_HOME/longhaul, which is ~/.cache/longhaul

A fault of such a folder stops no run: missing entries are computed again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MOST_BYTES = 2 << 30
"""Default bound of one folder in bytes."""


def setting() -> str | None:
    """The variable LONGHAUL_CACHE: "off", a folder, or None."""
    return os.environ.get("LONGHAUL_CACHE") or None


def folder(name: str) -> Path | None:
    """Folder of the cache `name`; None if caches are off."""
    place = setting()
    if place == "off":
        return None
    if place:
        return Path(place).expanduser().absolute() / name
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "longhaul" / name


def trim(store: Path, pattern: str, most: int = MOST_BYTES) -> None:
    """Removal of the least recently used files like `pattern` until they have at most `most` bytes."""
    files = []
    for path in store.rglob(pattern):
        try:
            about = path.stat()
        except FileNotFoundError:  # another process trims too
            continue
        files.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size


def say(line: str) -> None:
    """Report of a cache fault to the user."""
    print(line, file=sys.stderr, flush=True)
