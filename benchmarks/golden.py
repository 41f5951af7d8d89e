"""Same numbers by two checkouts: `python -m benchmarks.golden OLD_CHECKOUT [--only NAME ...]`.

Each case trains a small run with the code of OLD_CHECKOUT and with this one, in turn, from the same seed, and compares
`params_sha256` of result.json. A case "NAME, resumed" begins a run with the old code, stops it by SIGTERM, and goes on
with this code: it must end with the parameters of the old code's undisturbed run.

The driving cases train on generated scenarios. These were changed on purpose by 26a5996, so a comparison
across that commit differs; abb6b51, before it, has the digest of ea1a2ca.

Prints one JSON line for each case. The exit code is 1 if any digest differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

SECONDS = 600.0
"""Longest time of one training run."""


class Case(NamedTuple):
    words: str  # RECIPE FLAGS of `longhaul train`
    resumed: str = ""  # further flags of the case that is stopped and goes on; "": there is none
    former: str = ""  # flags of this code alone: the old code's defaults where the recipe has others now


DRIVING = "--num-envs 16 --num-steps 16 --scenarios 32 --evaluation-episodes 4 --log-interval 1"
FORMER = (
    "--no-speed-limit --reward-speeding 0 --reward-unease 0 --reward-near-collision 0 --reward-collision -4 "
    "--reward-offroad -4 --reward-red-light -4"
)
"""Flags that give `driving` its former settings."""

CASES = {
    "cartpole": Case("cartpole --total-steps 30000 --evaluation-episodes 4", "--total-steps 3000000"),
    "driving": Case(f"driving {DRIVING} --total-steps 5120", "--total-steps 40960 --block 2", FORMER),
    "driving-selfplay": Case(f"driving-selfplay {DRIVING} --total-steps 20000"),
    "hackmatrix": Case(
        "hackmatrix --num-envs 16 --num-steps 32 --total-steps 5120 --evaluation-episodes 4 --log-interval 1",
        "--total-steps 40960 --block 2",
    ),
    "pendulum-sac": Case("pendulum-sac --total-steps 3000 --evaluation-episodes 4"),
    "cartpole-dqn": Case("cartpole-dqn --total-steps 20000 --evaluation-episodes 4"),
    "impala-actors": Case(
        "impala-cartpole --topology actors --actors 2 --staleness 0 --total-steps 20000 --evaluation-episodes 4"
    ),
    "population": Case("cartpole --seeds 3 --total-steps 20000 --evaluation-episodes 4"),
    "reasoning-arithmetic": Case(
        "reasoning-arithmetic --taught 6 --total-steps 57344 --problems 512 --evaluation-episodes 8"
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), help="these cases alone")
    args = parser.parse_args()
    old, same = args.old.resolve(), True
    with tempfile.TemporaryDirectory() as home:
        for name, case in CASES.items():
            if args.only and name not in args.only:
                continue
            before = trained(old, Path(home, "old", name), case.words)
            after = trained(ROOT, Path(home, "new", name), f"{case.words} {case.former}")
            same &= report(name, before, after)
            if case.resumed:
                words = f"{case.words} {case.resumed}"
                before = trained(old, Path(home, "whole", name), words)
                after = resumed(old, Path(home, "parts", name), words)
                same &= report(f"{name}, resumed", before, after)
    return 0 if same else 1


def report(name: str, before: str, after: str) -> bool:
    """Prints the row of a case; whether its digests are equal."""
    print(json.dumps({"name": name, "old": before, "new": after, "same": before == after}), flush=True)
    return before == after


def trained(checkout: Path, runs: Path, words: str) -> str:
    """Digest of the parameters after training with the code of `checkout`."""
    done = begin(checkout, runs, ["train", *words.split(), "--seed", "5", "--runs-dir", str(runs), "--run-name", "run"])
    wait(done, (0,), runs)
    return digest(runs)


def resumed(old: Path, runs: Path, words: str) -> str:
    """Digest after training that the code of `old` begins and this code ends."""
    first = begin(old, runs, ["train", *words.split(), "--seed", "5", "--runs-dir", str(runs), "--run-name", "run"])
    deadline = time.monotonic() + SECONDS
    while not (files := list(runs.glob("*/metrics.jsonl"))) or not files[0].stat().st_size:
        if first.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run in {runs} ended before its first record:\n{(runs / 'log.txt').read_text()}")
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    wait(first, (75,), runs)
    wait(begin(ROOT, runs, ["train", words.split()[0], "--resume", str(files[0].parent)]), (0,), runs)
    return digest(runs)


def begin(checkout: Path, runs: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """`longhaul WORDS` by the code of `checkout`, its output in `runs`/log.txt."""
    runs.mkdir(parents=True, exist_ok=True)
    variables = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu", "LONGHAUL_CACHE": "off"}
    with open(runs / "log.txt", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "longhaul", *words], cwd=checkout, env=variables, stdout=log, stderr=log
        )


def wait(process: subprocess.Popen[bytes], codes: tuple[int, ...], runs: Path) -> None:
    """Waits for the end of a process. Raises SystemExit with its output if its exit code is not one of `codes`."""
    code = process.wait(SECONDS)
    if code not in codes:
        raise SystemExit(f"exit code {code}, not {codes}:\n{(runs / 'log.txt').read_text()[-2000:]}")


def digest(runs: Path) -> str:
    """`params_sha256` of the one run in a folder."""
    (path,) = runs.glob("*/result.json")
    return str(json.loads(path.read_text())["params_sha256"])


if __name__ == "__main__":
    sys.exit(main())
