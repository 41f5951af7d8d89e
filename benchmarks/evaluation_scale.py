"""Evaluation of thousands of packed scenarios: peak memory, time, and the same table on any number of devices.

    python -m benchmarks.evaluation_scale FOLDER [--scenarios 500 5000] [--devices 1 2] [--json FILE]

Shards of generated scenarios that no run trains in are made in FOLDER, unless they are there; each figure is a process
`longhaul evaluate --policy pretrained --data FOLDER --episodes N --devices D`. `table_sha256` is of all that it prints,
and `rows_sha256` of all digits of each episode (`--csv`). One JSON object a line.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import results
from longhaul.driving import scenario_source
from longhaul.driving.shards import shard
from longhaul.driving.sim.config import HELD_OUT
from longhaul.runtime.devices import cores

PER_SHARD = 256


def pack(folder: Path, count: int, agents: int) -> None:
    """Shards of `count` generated scenarios."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, count, PER_SHARD):
        path = folder / f"shard-{first // PER_SHARD:05}.lhs"
        if not path.exists():
            size = min(PER_SHARD, count - first)
            scenarios = scenario_source.generated(HELD_OUT + first, size, agents=agents, horizon=None, workers=cores())
            shard.write(path, scenarios)


def measure(folder: Path, count: int, devices: int, policy: str) -> dict[str, float | int | str]:
    """One evaluation in a process of its own."""
    words = [sys.executable, "-m", "longhaul", "evaluate", "--policy", policy, "--data", str(folder)]
    words += ["--episodes", str(count), "--devices", str(devices)]
    with tempfile.TemporaryFile() as out, tempfile.NamedTemporaryFile(suffix=".csv") as rows:
        began = time.perf_counter()
        process = subprocess.Popen([*words, "--csv", rows.name], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
        out.seek(0)
        table, digits = out.read(), Path(rows.name).read_bytes()
    return {
        "name": "evaluation-scale", "scenarios": count, "devices": devices, "policy": policy,
        "peak_rss_mb": round(usage.ru_maxrss / 1024, 1), "wall_seconds": round(wall, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1), "table_sha256": hashlib.sha256(table).hexdigest(),
        "rows_sha256": hashlib.sha256(digits).hexdigest(),
    }  # fmt: skip


def main() -> None:
    flags = results.parser(__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--scenarios", type=int, nargs="+", default=[500, 5000])
    flags.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    flags.add_argument("--agents", type=int, default=1, help="agents of a scenario that can be controlled")
    flags.add_argument("--policy", default="pretrained")
    args = flags.parse_args()
    began = time.process_time()
    pack(args.folder, max(args.scenarios), args.agents)
    print(f"packed in {time.process_time() - began:.0f} CPU-seconds of this process", file=sys.stderr)
    for count in args.scenarios:
        for devices in args.devices:
            results.emit(measure(args.folder, count, devices, args.policy), args.json)


if __name__ == "__main__":
    main()
