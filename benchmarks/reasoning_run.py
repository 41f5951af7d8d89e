"""A run of a real language model, seen from outside: peak memory beside the announced, and its end after SIGTERM.

    python -m benchmarks.reasoning_run memory --model smollm2-135m --json FILE -- --total-steps 1536 --lora 8
    python -m benchmarks.reasoning_run stop --model smollm2-135m --stages sampling learning --json FILE

Both start `longhaul train reasoning-smollm` with the flags after `--`. Memory is that of all its processes: the sum of
their resident pages, looked at 20 times a second, and of a run in one process the kernel's own peak. It is told for the
start (up to the announcement), the updates, and the evaluation. A stage of `stop` is recognised by the run's lines, by
the first checkpoint, and, for learning, by the memory that sampling gave back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

STAGES = ("import", "problems", "loading", "compiling", "sampling", "learning", "saving", "evaluating")

GIVEN_BACK = 4e8
"""Bytes of memory by which a run has shrunk once its first rollout has ended."""


class Watched:
    """A run under way: its lines with their times, and the memory of its processes."""

    def __init__(self, model: str, scratch: str, flags: list[str]) -> None:
        words = ["--model-folder", model, "--runs-dir", scratch, "--run-name", "a", "--log-interval", "1", *flags]
        self.folder = Path(scratch) / "a"
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "longhaul", "train", "reasoning-smollm", *words], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.began, line.rstrip()))

    def said(self, *words: str) -> bool:
        return any(word in line for _, line in self.lines for word in words)

    def memory(self) -> int:
        """Resident bytes of all processes of the run."""
        total = 0
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            for each in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += each.memory_info().rss
        return total

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.process.poll() is not None:
                self._reader.join()
                raise SystemExit("\n".join(["the run ended early:", *(line for _, line in self.lines[-5:])]))
            time.sleep(0.02)

    def wait(self) -> int:
        code = self.process.wait()
        self._reader.join()
        return code


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Announced and reached memory of a run up to its end."""
    peaks = dict.fromkeys(("start", "updates", "evaluation"), 0)
    with tempfile.TemporaryDirectory() as scratch:
        run = Watched(args.model, scratch, args.flags)
        kernel = 0
        while run.process.poll() is None:
            now = run.memory()
            stage = "evaluation" if run.said("evaluating") else "updates" if run.said("memory a device") else "start"
            peaks[stage] = max(peaks[stage], now)
            with contextlib.suppress(OSError, StopIteration):
                status = Path(f"/proc/{run.process.pid}/status").read_text().splitlines()
                kernel = 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])
            time.sleep(0.05)
        if code := run.wait():
            raise SystemExit("\n".join([f"the run ended with {code}:", *(line for _, line in run.lines[-5:])]))
        announced = json.loads((run.folder / "memory.json").read_text())
        result = json.loads((run.folder / "result.json").read_text())
    reached = max(kernel, *peaks.values())
    return {
        "what": "memory of a run", "flags": args.flags, "announced_bytes": announced["needed"],
        "reached_bytes": reached, "reached_over_announced": reached / announced["needed"], "peaks": peaks,
        "kernel_peak_bytes": kernel, "seconds": time.monotonic() - run.began, "cache": result["cache"],
        "compile_seconds": result["compile_seconds"], "announcement": announced,
    }  # fmt: skip


def stopped(args: argparse.Namespace, stage: str) -> dict[str, Any]:
    """Seconds from SIGTERM in a stage to the end of the run."""
    flags = args.flags + (["--total-steps", "768"] if stage in ("saving", "evaluating") else [])
    with tempfile.TemporaryDirectory() as scratch:
        run, most = Watched(args.model, scratch, flags), 0

        def given_back() -> bool:
            nonlocal most
            most = max(most, now := run.memory())
            return now < most - GIVEN_BACK

        if stage == "import":
            time.sleep(1.5)
        elif stage == "saving":
            checkpoints = run.folder / "checkpoints"
            run.until(lambda: checkpoints.is_dir() and any(checkpoints.iterdir()))
        else:
            words, after = {
                "problems": (run.folder.name, 1.0), "loading": ("each update", 2.0), "compiling": ("compiling", 15.0),
                "sampling": ("memory a device", 4.0), "learning": ("memory a device", 0.0),
                "evaluating": ("evaluating", 3.0),
            }[stage]  # fmt: skip
            run.until(lambda: run.said(words))
            time.sleep(after)
            if stage == "learning":
                run.until(given_back)
                time.sleep(1.0)
        began = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        code, taken = run.wait(), time.monotonic() - began
    return {
        "what": "SIGTERM of a run", "stage": stage, "flags": flags, "seconds_until_signal": began - run.began,
        "seconds": taken, "code": code, "load": os.getloadavg()[0],
        "said": next((line for _, line in reversed(run.lines) if "SIGTERM" in line), ""),
    }  # fmt: skip


def main() -> None:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "stop"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--json", type=Path, required=True, help="lines are added")
    args = parser.parse_args(words[:cut], argparse.Namespace(flags=words[cut + 1 :]))
    stages = [None] if args.what == "memory" else args.stages
    for stage in stages:
        record = memory(args) if stage is None else stopped(args, stage)
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
