"""Trains several seeds of the recipe `hackmatrix` by `longhaul train`, and condenses their curves to one small file.

    python -m benchmarks.hackmatrix_learning --seeds 0 1 2 --json FILE [--name NAME] [-- FLAGS of longhaul train]

Seeds are trained one after the other, in runs NAME-SEED of the folder --runs-dir; a run that was stopped goes on, one
that is done is not trained again, so that the same command goes on after an interruption, too. FILE is written after
each seed. `--only` trains nothing and condenses the runs that are there.

The bars are those of the specification: a mean return above -1.5 over the seeds, in each an entropy above 1.0 and, over
the last half of training, an approx_kl below 0.06 and a clip fraction below 0.30 at every point.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longhaul.runtime import files
from longhaul.telemetry import sinks

POINTS = 40
"""Points of a condensed curve, at most."""

OF_EPISODES = {
    "return": "episode/return",
    "length": "episode/length",
    "stage": "episode/stage",
    "score": "episode/score",
    "siphons": "episode/siphon_frac",
    "programs": "episode/program_frac",
}
"""Means over the episodes that ended; `stage` is the highest of an episode."""

OF_UPDATES = {
    "entropy": "ppo/entropy",
    "approx_kl": "ppo/approx_kl",
    "clip_fraction": "ppo/clip_fraction",
    "explained_variance": "ppo/explained_variance",
}

PEAK = "peak/stage"
"""The highest stage of all episodes of a record."""

LAST = 4
"""Points whose mean is a run's end."""

BARS = {
    "return": ("above", -1.5),
    "entropy": ("above", 1.0),
    "approx_kl": ("below", 0.06),
    "clip_fraction": ("below", 0.30),
}


def condense(records: Sequence[Mapping[str, Any]], points: int = POINTS) -> list[dict[str, Any]]:
    """At most `points` points of a run's records, each the mean over as many records as the others, or one more.

    Episodes' means are weighed by the episodes that ended, others by updates. A metric that no record of a point has,
    or that is not finite in any, is None.
    """
    count = min(points, len(records))
    edges = [len(records) * i // count for i in range(count + 1)] if count else []
    found = []
    for first, end in itertools.pairwise(edges):
        rows = records[first:end]
        before = records[first - 1]["update"] if first else 0
        updates = [row["update"] - start for row, start in zip(rows, [before, *(row["update"] for row in rows)])]
        episodes = [row.get("episode/count") or 0.0 for row in rows]
        point: dict[str, Any] = {"agent_steps": rows[-1]["agent_steps"], "update": rows[-1]["update"]}
        for names, weights in ((OF_EPISODES, episodes), (OF_UPDATES, updates)):
            point |= {name: _mean([row.get(key) for row in rows], weights) for name, key in names.items()}
        peaks = [row[PEAK] for row in rows if _finite(row.get(PEAK))]
        found.append(point | {"highest_stage": max(peaks) if peaks else None})
    return found


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _mean(values: Iterable[float | None], weights: Iterable[float]) -> float | None:
    pairs = [(value, weight) for value, weight in zip(values, weights) if value is not None and math.isfinite(value)]
    whole = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / whole if whole else None


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ends of runs with their curves, over the seeds, and whether they pass the bars."""
    ends = [_end(run["curve"]) for run in runs if run["curve"]]
    names = [name for name in (*OF_EPISODES, *OF_UPDATES) if all(end[name] is not None for end in ends)]
    means = {name: statistics.fmean(end[name] for end in ends) for name in names if ends}
    halves = [run["curve"][len(run["curve"]) // 2 :] for run in runs]
    worst = {
        name: max((point[name] for half in halves for point in half if point[name] is not None), default=None)
        for name in ("approx_kl", "clip_fraction")
    }
    least = min((end["entropy"] for end in ends if end["entropy"] is not None), default=None)
    judged = {"return": means.get("return"), "entropy": least, **worst}
    peaks = [point["highest_stage"] for run in runs for point in run["curve"] if point["highest_stage"] is not None]
    return {
        "seeds": len(runs),
        "done": sum(run["done"] for run in runs),
        "agent_steps": min((run["curve"][-1]["agent_steps"] for run in runs if run["curve"]), default=0),
        "end": means,
        "highest_stage": max(peaks, default=None),
        "bars": {name: _bar(judged[name], *BARS[name]) for name in BARS},
        "passed": all(_bar(judged[name], *BARS[name])["passed"] for name in BARS),
    }


def _end(curve: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    last = curve[-LAST:]
    return {name: _mean([point[name] for point in last], [1.0] * len(last)) for name in (*OF_EPISODES, *OF_UPDATES)}


def _bar(value: float | None, side: str, bound: float) -> dict[str, Any]:
    passed = value is not None and (value > bound if side == "above" else value < bound)
    return {"value": value, side: bound, "passed": passed}


def of_run(folder: Path, seed: int) -> dict[str, Any]:
    """The condensed curve of the run in `folder`, and its evaluation where it is done."""
    result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
    metrics = folder / "metrics.jsonl"
    keys = ("train_seconds", "compile_seconds", "sps", "params_sha256", "evaluation")
    return {
        "seed": seed,
        "done": bool(result),
        "curve": condense(sinks.read(metrics)) if metrics.exists() else [],
        **{key: result[key] for key in keys if key in result},
    }


def gather(folders: Mapping[int, Path], recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """Document that is written: which runs these are, their summary, their curves."""
    abouts = [json.loads((folder / "run.json").read_text()) for folder in folders.values()]
    runs = [of_run(folder, seed) for seed, folder in folders.items()]
    first = abouts[0] if abouts else {}
    return {
        "recipe": recipe,
        "flags": list(words),
        "commits": sorted({str(about.get("commit")) for about in abouts}),
        "versions": first.get("versions"),
        "devices": first.get("devices"),
        "summary": summary(runs),
        "runs": runs,
    }


def train(recipe: str, seed: int, name: str, runs_dir: Path, words: Sequence[str]) -> int:
    """Trains one seed to its end, from where it stands; -> the exit code of `longhaul train`."""
    folder = runs_dir / name
    if (folder / "result.json").exists():
        return 0
    command = [sys.executable, "-m", "longhaul", "train", recipe, "--runs-dir", str(runs_dir)]
    if (folder / "run.json").exists():
        command += ["--resume", name]
    else:
        command += ["--run-name", name, "--seed", str(seed), *words]
    return subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}).returncode


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="hackmatrix")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--name", default="learning", help="of the runs, before their seed")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--json", required=True, help="the file to write")
    parser.add_argument("--only", action="store_true", help="condense what is there, and train nothing")
    args = parser.parse_args(words[:split])
    flags, runs_dir = words[split + 1 :], Path(args.runs_dir)
    names = {seed: f"{args.name}-{seed}" for seed in args.seeds}
    code = 0
    for seed, name in names.items():
        if not args.only:
            code = train(args.recipe, seed, name, runs_dir, flags)
        folders = {seed: runs_dir / name for seed, name in names.items() if (runs_dir / name / "run.json").exists()}
        record = gather(folders, args.recipe, flags)
        files.write(args.json, json.dumps(files.finite(record), allow_nan=False) + "\n")
        if code:
            return code
    print(json.dumps(files.finite(record["summary"]), indent=2))
    return 0 if record["summary"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
