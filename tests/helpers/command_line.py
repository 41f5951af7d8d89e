"""The command in a process of its own, and what a refusal of it must look like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

Result = tuple[int, str, str]


def in_process(folder: Path, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "longhaul", *words], cwd=folder, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_refused(result: Result, *phrases: str) -> None:
    code, out, err = result
    assert code == 2, (out, err)
    assert err.startswith("longhaul: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    for phrase in phrases:
        assert phrase in err
