"""Worker processes beside a script of the user's. Pools that are killed: driving/test_scenario_source.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from longhaul.runtime.worker_pool import ending, pool

print("the script runs", flush=True)
with ending(pool(2)) as workers:
    print(sorted(workers.map(len, ["four", "by", "length"])), flush=True)
"""


def test_a_script_without_a_guard_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("the script runs\n[2, 4, 6]\n", "", 0)


def test_the_script_is_there_again_once_a_worker_has_started() -> None:
    from longhaul.runtime.worker_pool import ending, pool

    script = sys.modules["__main__"]
    with ending(pool(1)) as workers:
        assert workers.submit(abs, -3).result() == 3
    assert sys.modules["__main__"] is script
