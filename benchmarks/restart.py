"""Time from `kill -9` of one process to the next update, under `longhaul launch`: `python -m benchmarks.restart`.

    python -m benchmarks.restart [--hosts 2] [--kills 4] [-- RECIPE FLAGS of longhaul train]

Trains CartPole, or RECIPE, in `--hosts` processes with a cache of its own, which its start and a first new one fill.
Then one process after the other is killed, in turn, each after a new checkpoint, and the seconds to the first record
after the new start are taken. Prints one JSON object. `--base FOLDER` measures another checkout, too, after this one.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import results
from longhaul.runtime.launch.supervisor import newest_step

ROOT = Path(__file__).resolve().parent.parent

TRAIN = ("--num-envs", "8", "--num-steps", "16", "--block", "2", "--log-interval", "2", "--save-interval", "200",
         "--total-steps", str(10**9), "--mesh", "data={hosts}", "--seed", "3")  # fmt: skip


def main() -> None:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = results.parser(__doc__, file=False)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--base", type=Path, help="another checkout, measured after this one")
    args, train = parser.parse_args(words[:split]), words[split + 1 :] or ["cartpole", *TRAIN]
    checkouts = {"this": ROOT} | ({} if args.base is None else {"base": args.base.resolve()})
    with tempfile.TemporaryDirectory() as folder:
        homes = {name: Path(folder) / name for name in checkouts}
        victims = [turn % args.hosts for turn in range(args.kills + 1)]
        seconds_of = {
            name: kills(checkout, homes[name], args.hosts, victims, train)[1:] for name, checkout in checkouts.items()
        }
    rows = {name: {"median": statistics.median(seconds), "seconds": seconds} for name, seconds in seconds_of.items()}
    results.emit({"name": "restart", "hosts": args.hosts, "train": train} | rows)


def kills(checkout: Path, home: Path, hosts: int, victims: list[int], words: list[str]) -> list[float]:
    """Seconds from the kill of each victim to the next record of a run that begins for it."""
    home.mkdir(exist_ok=True)
    name = f"run-{time.time_ns()}"
    folder, variables = home / name, {k: v for k, v in os.environ.items() if k != "NPROC"}
    variables |= {"PYTHONPATH": str(checkout), "LONGHAUL_CACHE": str(home / "cache"), "JAX_PLATFORMS": "cpu"}
    train = [word.format(hosts=hosts) for word in words]
    command = [sys.executable, "-m", "longhaul", "launch", "--hosts", str(hosts), "--restarts", "9", "--"]
    command += ["train", *train, "--runs-dir", str(home), "--run-name", name]
    taken = []
    with open(home / "log", "ab") as log:
        launcher = subprocess.Popen(command, env=variables, cwd=checkout, stdout=log, stderr=log)
    try:
        for victim in victims:
            before = newest_step(folder)
            wait(lambda before=before: newest_step(folder) > before, launcher, log.name)
            process = pids(launcher.pid)[victim]
            os.kill(process, signal.SIGKILL)
            began = time.monotonic()
            wait(lambda: not pids(launcher.pid), launcher, log.name)
            # Records after the newest checkpoint go when the run starts again; then new ones come.
            step, written = newest_step(folder), (folder / "metrics.jsonl").stat().st_mtime_ns
            wait(lambda step=step, written=written: is_past(folder, step, written), launcher, log.name)
            taken.append(round(time.monotonic() - began, 2))
    finally:
        launcher.terminate()
        launcher.wait()
    return taken


def is_past(folder: Path, step: int, written: int) -> bool:
    """True where the records were written since, and the last is of an update after `step`."""
    metrics = folder / "metrics.jsonl"
    if metrics.stat().st_mtime_ns == written:
        return False
    updates = re.findall(rb'^{"update": ?(\d+)', metrics.read_bytes(), re.MULTILINE)
    return bool(updates) and int(updates[-1]) > step


def pids(launcher: int) -> dict[int, int]:
    """The launcher's children that train: number -> process id."""
    children = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            number = next(v for v in variables if v.startswith(b"LONGHAUL_PROCESS_ID="))
            if Path(f"/proc/{child}/cmdline").read_bytes():  # else it has ended
                children[int(number.partition(b"=")[2])] = int(child)
        except (OSError, StopIteration):
            continue
    return children


def wait(ready: Callable[[], bool], launcher: subprocess.Popen[bytes], log: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if launcher.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the run ended, or nothing happened for long:\n{Path(log).read_text()[-2000:]}")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
