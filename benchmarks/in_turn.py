"""Speed of two checkouts: `python -m benchmarks.in_turn OLD_CHECKOUT [--only NAME ...] [--rounds N]`.

Each case is a `longhaul bench` of the code of OLD_CHECKOUT and of this one, in turn: old first in one round, new first
in the next. A figure's work per CPU-second is compared by its best round, because other load only takes away.
Compilation is outside the figures.

Prints one JSON line for each figure: `ratio` is the new code's work per CPU-second over the old code's. The exit code
is 1 if a ratio is below 0.95. A figure that the new code no longer has is printed with null for `new` and `ratio`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LEAST = 0.95
"""Least ratio that counts as no loss."""

CASES = {
    "ppo-cartpole": "ppo-cartpole",
    "driving-train": "driving-train",
    "hackmatrix-ppo": "hackmatrix-ppo",
    "actors": "actors",
    "central": "central",
    "sync": "sync --lane shm tcp",
    "reasoning": "reasoning",
}
SELECTING = ("num_envs", "lane", "env", "what", "receivers", "verify")
"""Keys of a figure and of its configuration that tell the figures of one case apart."""

RENAMED = {"longhaul.envs.host.numpy_cartpole:cartpole": "longhaul.envs.batched:cartpole"}
"""Environments of this code -> their names in an old checkout."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES), help="these cases alone")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each code (default: 2)")
    args = parser.parse_args()
    roots, lost, origin = {"old": args.old.resolve(), "new": ROOT}, False, {}
    for case in args.only:
        best: dict[str, dict[str, float]] = {"old": {}, "new": {}}
        for turn in range(args.rounds):
            for code in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                for figure in measured(roots[code], CASES[case]):
                    name, work = described(figure), figure["per_cpu_second"]
                    origin |= {code: figure["commit"], "versions": figure["versions"], "device": figure["device"]}
                    best[code][name] = max(work, best[code].get(name, 0.0))
        for name, old in best["old"].items():
            new = best["new"].get(name)
            ratio = None if new is None else new / old
            lost |= ratio is not None and ratio < LEAST
            line = {"case": case, "figure": name, "old": old, "new": new, "ratio": ratio and round(ratio, 3)}
            line |= {"rounds": args.rounds, "commits": {code: origin.get(code) for code in roots}}
            print(json.dumps(line | {key: origin[key] for key in ("versions", "device")}), flush=True)
    return int(lost)


def measured(root: Path, words: str) -> list[dict]:
    """Figures that `longhaul bench WORDS` prints, run with the code of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "longhaul", "bench", *words.split(), "--json", f"{folder}/figures.json"]
        environment = os.environ | {"PYTHONPATH": str(root), "LONGHAUL_CACHE": f"{folder}/cache"}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{root}: {' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(Path(folder, "figures.json").read_text())


def described(figure: dict) -> str:
    """Name of a figure among those of its case, the same in both checkouts."""
    every = figure.get("config", {}) | figure
    name = " ".join([figure["name"], *(f"{key}={every[key]}" for key in SELECTING if key in every)])
    for now, former in RENAMED.items():
        name = name.replace(now, former)
    return name


if __name__ == "__main__":
    sys.exit(main())
