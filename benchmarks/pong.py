"""Acting on Pong against the bare environment, and the curve of a run of a Pong recipe, in one small file.

    python -m benchmarks.pong acting --json FILE [--worlds 32] [--steps 20] [--repeats 7] [--nature]
    python -m benchmarks.pong curve RUN --json FILE

`acting` takes turns between the bare environment, stepped by the same random actions, and an actor's collector in the
same process; each turn is so many steps of all worlds, and CPU-seconds of the process count, all threads. A ratio is
the median over pairs of neighbouring turns. `random`: a policy that sees nothing, so that what remains is collecting: a
compiled call a step, writing the rollout, and one copy of it, as into the memory that an actor shares. `nature`: the
network of the paper acts, on the 84x84 frames. FILE is kept but for what is measured anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.algorithms import registry
from longhaul.algorithms.run_context import RunContext
from longhaul.config import recipes
from longhaul.envs.host import registry as host
from longhaul.envs.registry import spec_stub
from longhaul.runtime import mesh as meshes
from longhaul.topologies.actor_learner import host_rollout
from longhaul.topologies.staleness import Ticket
from longhaul.types import Algorithm

PONG = "ale/pong"

POINTS = 40
"""Points of a curve, at most."""


def blind(actions: int) -> Algorithm:
    """Evenly random actions, whatever is seen."""

    def act(params: Any, memory: Any, observation: Any, key: Any) -> Any:
        return jax.random.randint(key, (len(observation),), 0, actions, jnp.int32), memory, ()

    return Algorithm(lambda key: (), lambda state: (), lambda columns: (), act, lambda state, data, key: (state, {}))


def bare(worlds: int, steps: int) -> Callable[[], None]:
    """Steps of the environment alone."""
    vector, rng = host.make(host.describe(PONG), worlds), np.random.default_rng(0)
    vector.reset(0)

    def turn() -> None:
        for action in rng.integers(0, 6, (steps, worlds)).astype(np.int32):
            vector.step(action)

    return turn


def collecting(algorithm: Algorithm, worlds: int, steps: int) -> Callable[[], None]:
    """Rollouts of an actor, each copied once."""
    state = jax.jit(algorithm.init)(jax.random.key(0))
    policy = jax.eval_shape(algorithm.policy, state)
    collect = host_rollout.acting(PONG, algorithm, policy, host_rollout.Sizes(worlds, steps)).collect
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(algorithm.policy(state))]
    enter = host_rollout.entering(PONG, algorithm, host_rollout.Sizes(worlds, steps), 1)
    carry: Any = jax.tree.leaves(jax.tree.map(lambda leaf: leaf[0], enter(jax.random.key(1), ())))
    key, turns, copies = np.asarray(jax.random.key_data(jax.random.key(2))), 0, []

    def turn() -> None:
        nonlocal carry, turns, copies
        carry, data, _ = collect(weights, carry, key, Ticket(turns, 0, 0, turns), 0)
        copies = copies or [np.empty_like(leaf) for leaf in data]
        for to, leaf in zip(copies, data, strict=True):
            np.copyto(to, leaf)
        turns += 1

    return turn


def cpu_seconds(turn: Callable[[], None]) -> float:
    began = time.process_time()
    turn()
    return time.process_time() - began


def measure(worlds: int, steps: int, repeats: int, nature: bool) -> dict[str, Any]:
    """Steps of worlds per CPU-second, and each policy's share of the bare environment's."""
    spec = spec_stub(PONG).spec
    ways = {"bare": bare(worlds, steps), "random": collecting(blind(6), worlds, steps)}
    if nature:
        config = recipes.recipe("impala-pong").algorithm
        ways["nature"] = collecting(registry.make(spec, config, RunContext(1, meshes.identity)), worlds, steps)
    for turn in ways.values():
        turn()
    taken = [{name: cpu_seconds(turn) for name, turn in ways.items()} for _ in range(repeats)]
    record: dict[str, Any] = {"worlds": worlds, "steps": steps, "repeats": repeats, "jax": jax.__version__}
    for name in ways:
        record[f"{name}_per_cpu_second"] = round(worlds * steps / statistics.median(t[name] for t in taken), 1)
        if name != "bare":
            ratios = sorted(t["bare"] / t[name] for t in taken)
            record[f"{name}_of_bare"] = {
                "median": round(statistics.median(ratios), 3), "least": round(ratios[0], 3),
                "most": round(ratios[-1], 3),
            }  # fmt: skip
    return record


def curve(folder: Path) -> dict[str, Any]:
    """(agent steps, mean return, episodes, entropy) over a run, in at most POINTS spans of its records."""
    run = json.loads((folder / "run.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = []
    for part in np.array_split(np.arange(len(rows)), min(POINTS, len(rows))):
        span = [rows[i] for i in part]
        episodes = sum(row["episode/count"] for row in span)
        total = sum(row["episode/count"] * (row["episode/return"] or 0.0) for row in span)
        points.append(
            {
                "agent_steps": span[-1]["agent_steps"], "wall_seconds": round(span[-1]["wall_seconds"], 1),
                "episodes": int(episodes), "return": round(total / episodes, 3) if episodes else None,
                "entropy": round(float(np.mean([row["impala/entropy"] for row in span])), 4),
            }
        )  # fmt: skip
    done = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else None
    return {"run": run.get("run", run), "finished": done is not None, "result": done, "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("acting", "curve"))
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--worlds", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--nature", action="store_true")
    args = parser.parse_args()
    if args.what == "curve" and args.run is None:
        parser.error("curve needs the folder of a RUN")
    record = (
        curve(args.run) if args.what == "curve"
        else measure(args.worlds, args.steps, args.repeats, args.nature)
    )  # fmt: skip
    kept = json.loads(args.json.read_text()) if args.json.exists() else {}
    args.json.write_text(json.dumps(kept | {args.what: record}, indent=1) + "\n")
    print(json.dumps(record if args.what == "acting" else record["points"][-1]))


if __name__ == "__main__":
    main()
