"""Folders of caches: compiled programs and generated scenarios, which cost time to make and can be made again.

    LONGHAUL_CACHE     off, or a folder; else $XDG_CACHE_HOME/longhaul, which is ~/.cache/longhaul

A fault of such a folder stops no run: what it does not hold is computed again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MOST_BYTES = 2 << 30
"""Of one folder, unless it has a bound of its own."""


def named() -> str | None:
    """What the user says of caches: "off", a folder, or nothing."""
    return os.environ.get("LONGHAUL_CACHE") or None


def folder(name: str) -> Path | None:
    """Where what is called `name` is kept; None where that is switched off."""
    given = named()
    if given == "off":
        return None
    if given:
        return Path(given).expanduser().absolute() / name
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "longhaul" / name


def trim(store: Path, pattern: str, most: int = MOST_BYTES) -> None:
    """Removes the files like `pattern` that were not used for longest until they have at most `most` bytes."""
    found = []
    for path in store.rglob(pattern):
        try:
            about = path.stat()
        except FileNotFoundError:  # another process trims, too
            continue
        found.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size


def say(line: str) -> None:
    """To the user, of what a cache could not do."""
    print(line, file=sys.stderr, flush=True)
