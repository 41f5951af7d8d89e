"""Processes that have not ended."""

from __future__ import annotations

from pathlib import Path


def lives(process: int) -> bool:
    """True if a process of this number runs; one that has ended, and is not waited for, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
