"""Curves of runs of a reasoning recipe, in one small file: reward in training, quality held out at the end.

    longhaul train reasoning-arithmetic --seed 0 --run-name a --save-interval 25 --keep-every 25
    python -m benchmarks.reasoning_curve runs/a [runs/b ...] --json FILE [--checkpoints]

A point is of one record: its update, seconds, reward and soundness of the policy's own completions, or None while
demonstrations are imitated. Where the curve of a run has bent, its ceiling is told, over updates from rewards.
`--checkpoints` evaluates each checkpoint that was kept, too, from the end of the warm start on.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import registry
from longhaul.algorithms.config import Reasoner
from longhaul.algorithms.run_context import RunContext
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.telemetry import forecast, sinks
from longhaul.training import data, evaluate
from longhaul.training.checkpoint import checkpoint
from longhaul.training.checkpoint.checkpoint import Checkpoint, Checkpoints
from longhaul.training.run_dir import load_run
from longhaul.types import Progress


def held_out(folder: Path) -> list[dict[str, Any]]:
    """The quality of each checkpoint that was kept, from the end of the warm start on."""
    run = load_run(folder)
    assert isinstance(run.algorithm, Reasoner)
    prepare_devices(run.all_devices, run.threads)
    algorithm = registry.make(data.spec(run), run.algorithm, RunContext(updates=1, mean=meshes.identity))
    begun = jax.jit(algorithm.init)(jax.random.key(run.seed))
    score = evaluate.reasoner(run, run.evaluation_episodes or 256)
    like = Progress(begun, (), (), jnp.int32(0))  # type: ignore[arg-type]
    points = []
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        for path in sorted((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name.split(".")[0])):
            step = int(path.name.split(".")[0])
            if step < run.algorithm.taught:
                continue
            intact = Checkpoint(path.name, checkpoint._verify(path, step))
            restored = checkpoints.restore(intact, like, part=True)
            scores, _ = score(algorithm.policy(restored.progress.state))
            means = {name: round(value, 4) for name, value in scores.means().items()}
            points.append({"update": int(restored.progress.updates)} | means)
    return points


def curve(folder: Path, checkpoints: bool) -> dict[str, Any]:
    """Records of a run, and the end of its reward."""
    about, records = json.loads((folder / "run.json").read_text()), sinks.read(folder / "metrics.jsonl")
    taught = about["run"]["algorithm"]["taught"]
    points = [
        {
            "update": row["update"], "seconds": round(row["wall_seconds"], 1),
            "reward": None if row["grpo/taught"] > 0 else round(row["episode/return"], 4),
            "soundness": None if row["grpo/taught"] > 0 else round(row["episode/soundness"], 4),
            "steps": round(row["episode/steps"], 3), "imitation_loss": round(row["grpo/imitation_loss"], 4),
            "gate_open": row["grpo/gate_open"],
        }
        for row in records
    ]  # fmt: skip
    rewarded = [point for point in points if point["reward"] is not None]
    fitted: dict[str, Any] = {"ceiling": None}
    try:
        updates = np.array([point["update"] - taught for point in rewarded], float)
        rewards = np.array([point["reward"] for point in rewarded])
        fit = forecast.fit(updates, rewards, start=float(rewards[0]) if len(rewards) else 0.0)
        fitted["ceiling"] = {**fit.law._asdict(), "error": fit.error, "intervals": fit.intervals}
    except ValueError as error:
        fitted["why"] = str(error)
    done = folder / "result.json"
    result = json.loads(done.read_text()) if done.exists() else {}
    shown = ("evaluation", "train_seconds", "compile_seconds", "wall_seconds", "parameters", "params_sha256")
    return {
        "seed": about["run"]["seed"], "commit": about.get("commit"), "devices": about["run"]["devices"],
        "result": {name: result.get(name) for name in shown}, "points": points, **fitted,
        **({"held_out": held_out(folder)} if checkpoints else {}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--note", default="", help="what else to say of how it was measured")
    args = parser.parse_args()
    record = {"note": args.note, "curves": {folder.name: curve(folder, args.checkpoints) for folder in args.runs}}
    args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
