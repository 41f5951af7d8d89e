"""The package as a user installs it: no extras, no test tools, a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_without_extras_it_trains_cartpole(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", ROOT]
    subprocess.run(install, check=True, env=variables)
    words = ["train", "cartpole", "--total-steps", "300000", "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        [tmp_path / "venv/bin/longhaul", *words],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1
