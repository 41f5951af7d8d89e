"""The example of an environment of one's own, as a script: its class is of `__main__`, where no other process looks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_script_trains_loads_and_walks_to_the_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "own_environment.py")], cwd=tmp_path, capture_output=True,
        text=True, timeout=300, check=False, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder, scores, end = done.stdout.splitlines()
    assert ast.literal_eval(scores)["return"] > 0.9
    assert end.startswith("the end after ")
    assert "<svg" in (tmp_path / folder / "curve.html").read_text()
