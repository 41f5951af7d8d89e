"""GRPO beside TRL's GRPOTrainer: completions a CPU-second and peak memory, of the same model, prompts and lengths.

    python -m benchmarks.reasoning_peer --model smollm2-135m --side longhaul --json FILE
    python -m benchmarks.reasoning_peer --model smollm2-135m --side trl --python PYTHON --json FILE

A side runs in two processes on one core, one of fewer and one of more updates. The difference of their CPU-seconds is
that of updates alone: imports, loading, compilation and evaluation are in both. Peak memory is the longer process's,
all in. A completion is as long as is allowed, unless the model ends it, as it seldom does here. Both compute in
float32; the kernels that LoRA does not learn are kept in bfloat16 here, in float32 there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = "Question: {question}\\nAnswer: "
SETTINGS = "min_terms=2,max_terms=2,min_digits=1,max_digits=1"
SEED = 0


def asked(sizes: dict[str, int], updates: int, scratch: str) -> dict[str, Any]:
    """Prompts of a run of the recipe, in a dict for JSON."""
    from longhaul.reasoning import problem_sets, tasks
    from longhaul.reasoning.config import Reasoning

    task = Reasoning(task="reasoning-gym:chain_sum", task_settings=SETTINGS, template=TEMPLATE, shots=2)
    problems = tasks.problems(problem_sets.task(task), np.random.default_rng(SEED), sizes["prompts"] * updates)
    return sizes | {"problems": [(each.prompt, each.answer) for each in problems], "scratch": scratch}


def command(side: str, python: str, model: str, sizes: dict[str, int], updates: int, scratch: str) -> list[str]:
    if side == "trl":
        file = Path(scratch) / "asked.json"
        file.write_text(json.dumps(asked(sizes, updates, scratch)))
        return [python, str(Path(__file__).parent / "peers/trl_grpo.py"), str(file), model, str(updates)]
    flags = {
        "model-folder": model, "num-envs": sizes["prompts"], "group": sizes["group"], "num-steps": sizes["length"],
        "total-steps": updates * sizes["prompts"] * sizes["group"] * sizes["length"], "lora": sizes["lora"],
        "model-frozen": "bf16" if sizes["lora"] else "fp32",
        "evaluation-episodes": 2, "stop": "@@@@", "runs-dir": scratch, "save-interval-minutes": 1000, "log-interval": 1,
    }  # fmt: skip
    options = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "longhaul", "train", "reasoning-smollm", *options]


def ran(words: list[str]) -> dict[str, float]:
    """CPU-seconds and peak memory in bytes of a process that must succeed."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(process.pid, 0)
    if code:
        raise SystemExit(f"{words[1]} ended with {os.waitstatus_to_exitcode(code)}")
    return {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--side", choices=("longhaul", "trl"), required=True)
    parser.add_argument("--python", default=sys.executable, help="Python with torch, trl and peft")
    parser.add_argument("--json", type=Path, required=True, help="a line is added")
    parser.add_argument("--updates", type=int, nargs=2, default=(1, 3))
    for name, value in (("prompts", 4), ("group", 16), ("length", 16), ("lora", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("prompts", "group", "length", "lora")}
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    with tempfile.TemporaryDirectory() as scratch:
        runs = [ran(command(args.side, args.python, args.model, sizes, updates, scratch)) for updates in args.updates]
    updates = args.updates[1] - args.updates[0]
    seconds = (runs[1]["cpu_seconds"] - runs[0]["cpu_seconds"]) / updates
    record = {"side": args.side} | sizes | {
        "updates": list(args.updates), "runs": runs, "cpu_seconds_per_update": seconds,
        "completions_per_cpu_second": sizes["prompts"] * sizes["group"] / seconds,
        "peak_bytes": runs[1]["peak_bytes"],
    }  # fmt: skip
    with args.json.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
