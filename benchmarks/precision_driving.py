"""Check that driving learns the same in less memory: seeds as they are, against bf16, accumulation, rematerialisation.

    python -m benchmarks.precision_driving --json FILE [--seeds 0 1] [--runs-dir runs] [-- FLAGS of longhaul train]

Trains each seed of the recipe `driving` twice by `longhaul train`, one run after the other; a run that was stopped goes
on, one that is done is not trained again. `--only` trains nothing. Curves are compared where all of them have come to:
the difference of the two means over the last points, against how far seeds lie apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.hackmatrix_learning import train
from longhaul.runtime import files
from longhaul.telemetry import sinks

LEAN = ("--precision", "bf16", "--accumulate", "4", "--remat", "full")
SIDES: dict[str, tuple[str, ...]] = {"plain": (), "lean": LEAN}

NAMES = {"return": "episode/return", "goal": "episode/goal", "collision": "episode/collision"}

LAST = 3
"""Points whose mean is a run's end."""


def curve(folder: Path) -> list[dict[str, Any]]:
    """A run's records, with what is compared alone."""
    path = folder / "metrics.jsonl"
    records = sinks.read(path) if path.exists() else []
    return [{"agent_steps": r["agent_steps"]} | {name: r.get(key) for name, key in NAMES.items()} for r in records]


def compare(curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """side -> curves of its seeds; -> their ends where all have come to, and the difference of the sides' means.

    `spread` is the widest difference of two seeds of one side, which is meant by noise; of one seed a side, None.
    """
    every = [series for side in curves.values() for series in side]
    reached = min((series[-1]["agent_steps"] if series else 0 for series in every), default=0)
    ends = {
        side: [[point for point in series if point["agent_steps"] <= reached][-LAST:] for series in seeds]
        for side, seeds in curves.items()
    }
    record: dict[str, Any] = {"agent_steps": reached}
    if not reached:
        return record
    for name in NAMES:
        means = {
            side: [statistics.fmean(p[name] for p in series) for series in several] for side, several in ends.items()
        }
        enough = min(map(len, means.values())) > 1
        spread = max(max(each) - min(each) for each in means.values()) if enough else None
        apart = statistics.fmean(means["lean"]) - statistics.fmean(means["plain"])
        record[name] = means | {"difference": apart, "spread": spread}
    return record


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--json", required=True, help="the file to write")
    parser.add_argument("--only", action="store_true", help="compare what is there, and train nothing")
    args = parser.parse_args(words[:split])
    flags, runs_dir = words[split + 1 :], Path(args.runs_dir)
    for seed in args.seeds if not args.only else ():
        for side, more in SIDES.items():
            if code := train("driving", seed, f"{side}-{seed}", runs_dir, [*flags, *more]):
                return code
    present = {side: [s for s in args.seeds if (runs_dir / f"{side}-{s}" / "run.json").exists()] for side in SIDES}
    curves = {side: [curve(runs_dir / f"{side}-{seed}") for seed in seeds] for side, seeds in present.items()}
    abouts = [json.loads((runs_dir / f"{side}-{s}" / "run.json").read_text()) for side in SIDES for s in present[side]]
    keys = ("total_steps", "num_envs", "num_steps", "devices")
    record = {
        "recipe": "driving", "sides": {side: list(more) for side, more in SIDES.items()}, "seeds": present,
        "run": {key: abouts[0]["run"][key] for key in keys} if abouts else {},
        "commits": sorted({str(about.get("commit")) for about in abouts}),
        "versions": abouts[0].get("versions") if abouts else None,
        "summary": compare(curves), "curves": curves,
    }  # fmt: skip
    files.write(args.json, json.dumps(files.finite(record), allow_nan=False) + "\n")
    print(json.dumps(files.finite(record["summary"]), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
