"""Start of `longhaul.config`: few files and no JAX."""

from __future__ import annotations

import subprocess
import sys

MOST_FILES = 32


def test_the_description_of_a_run_starts_fast() -> None:
    program = "import sys, longhaul.config\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert not {"jax", "jaxlib", "scipy", "argparse"} & set(modules)
    assert len([name for name in modules if name.split(".")[0] == "longhaul"]) <= MOST_FILES
