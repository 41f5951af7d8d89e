"""The made-up log: the kernels of scenarios have work by it, so that numba compiles by it what it must."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from longhaul.driving import scenario
from longhaul.driving.scenario.from_log import cast_of, scenario_of
from longhaul.driving.scenario.made_up_log import made_up_log

CALLED = """
from longhaul.driving import scenario_source
from longhaul.driving.scenario import kernels

scenario_source._compile(1)
print(*(name for name, each in vars(kernels).items() if getattr(each, "signatures", ())))
"""

ELSEWHERE = {"nearest_points", "project", "signed_distances"}
"""Kernels that the generator calls, in the other part, or that take a quarter of a second to compile."""


def test_it_is_a_log_with_drivers_and_a_light() -> None:
    log = made_up_log()
    cast = cast_of(log, agents=2, horizon=None, control="vehicles")
    made = scenario_of(log, cast, agents=2, control="vehicles")
    assert len(cast.driven) == 2 and made.light_state.any()


def test_every_kernel_is_called() -> None:
    folder = Path(scenario.__file__).parent
    named = {name for path in folder.glob("*.py") for name in re.findall(r"\bkernels\.([a-z_]+)\(", path.read_text())}
    assert len(named) > 20
    done = subprocess.run([sys.executable, "-c", CALLED], capture_output=True, text=True, check=True)
    assert named - set(done.stdout.split()) <= ELSEWHERE
