"""Training in a torch environment, its actors in processes, in a thread and on the learner's device:

    python -m benchmarks.torch_environment --json FILE

PPO in CartPole of 4,096 torch worlds, in turn with `--actor-kind process` (the default), `thread` and `device`, where
tensors and arrays share their memory. Taken are the agent steps a second of each (the median of the records after the
first) and those a second of CPU of all its processes. Needs torch and gymnasium.
"""  # fmt: skip

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import results

ENV = "torch/benchmarks.peers.torch_cartpole:make?final_observations=True&truncation_interval=500"
KINDS = {"process": [], "thread": ["--actors", "1"], "device": []}


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--num-steps", type=int, default=32)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    turns = [turn(kind, args.num_envs, args.num_steps, args.updates) for _ in range(args.repeats) for kind in KINDS]
    for kind in KINDS:
        mine = [each for each in turns if each["kind"] == kind]
        figure = {"name": "torch-environment", "actor_kind": kind, "num_envs": args.num_envs}
        figure |= {"num_steps": args.num_steps, "updates": args.updates, "repeats": args.repeats}
        for rate in ("per_second", "per_cpu_second"):
            figure[rate] = statistics.median(each[rate] for each in mine)
        results.emit(figure, args.json)
    return 0


def turn(kind: str, envs: int, steps: int, updates: int) -> dict[str, Any]:
    """One run; -> its rates."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--env", ENV, "--topology", "actors", "--actor-kind", kind, *KINDS[kind], "--num-envs", str(envs)]
        words += ["--num-steps", str(steps), "--total-steps", str(envs * steps * updates), "--mesh", "data=1"]
        words += ["--log-interval", "4", "--evaluation-episodes", "1", "--runs-dir", folder, "--run-name", "a"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "longhaul", "train", "ppo", *words], check=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = Path(folder) / "a"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "kind": kind, "per_second": statistics.median(each["sps"] for each in records[1:]),
        "per_cpu_second": envs * steps * updates / spent,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
