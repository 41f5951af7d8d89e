from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from longhaul.runtime import descriptors
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
most = descriptors.MOST if hard == resource.RLIM_INFINITY else min(hard, descriptors.MOST)
assert descriptors.raise_limit() == most == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
assert descriptors.raise_limit() == 100, "the hard limit stays"
before = descriptors.room()
with open("/dev/null"), open("/dev/null"):
    assert descriptors.room() == before - 2 < 100 - descriptors.RESERVE
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
