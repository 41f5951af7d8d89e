"""Steps per CPU-second of training CartPole by actors, beside RLlib's IMPALA and APPO, in turn in one run.

    python -m benchmarks.actors_peer --python PYTHON [--algorithms impala appo] [--repeats 5] [--json FILE]

PYTHON is one that can import `ray.rllib` and torch. For each algorithm these programs repeat in turn, so that all meet
the same load; one JSON line a program:

- `rllib`: scalar environments, one by one (its default); `rllib-vector`: Gymnasium's own vector of CartPole;
- `longhaul-scalar`, `longhaul-vector`: the same two environments, with the same worlds, steps, batch and network;
- `longhaul-wide`: the vector with so many worlds as `longhaul bench actors` has by default, 512.

A step is one that the environment made and the learner had; the CPU-seconds are those of all processes, on RLlib's side
the driver, which learns, the environment runners and Ray's own (`alone_per_cpu_second` leaves those of Ray out).
`peer_ratio` and `peer_cpu_ratio` are medians of the repeats' ratios to `rllib`, above 1 where we are faster; the ratios
to the better of its two programs are `best_ratio` and `best_cpu_ratio`. Learning rates are each side's own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks import results
from longhaul.bench import harness

RLLIB = """
import json, os, sys, time, warnings
warnings.filterwarnings("ignore")
about = json.loads(sys.argv[1])
import gymnasium, psutil, ray, torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
torch.set_num_threads(1)
actors, worlds, steps = about["actors"], about["num_envs"], about["num_steps"]
ray.init(address="local", num_cpus=actors + 1, include_dashboard=False, log_to_driver=False)
config = {"impala": IMPALAConfig, "appo": APPOConfig}[about["learner"]]().environment("CartPole-v1")
config = config.env_runners(
    num_env_runners=actors, num_envs_per_env_runner=worlds // actors, rollout_fragment_length=steps,
    gym_env_vectorize_mode="vector_entry_point" if about["vector"] else "sync",
).learners(num_learners=0).training(train_batch_size_per_learner=worlds * steps)
network = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False)
config = config.rl_module(model_config=network).reporting(min_time_s_per_iteration=0)
began = time.perf_counter()
algorithm = config.build_algo()
me = psutil.Process()
def cpu():
    alone = others = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        used = sum(times[:4])  # user and system, of itself and of children that ended
        if process == me or "EnvRunner" in command:
            alone += used
        else:
            others += used
    return alone, others
def told():
    found = algorithm.train()
    sampled = found["env_runners"].get("num_env_steps_sampled_lifetime", 0)
    learnt = found.get("learners", {}).get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
    return sampled, learnt, found["env_runners"].get("episode_return_mean", float("nan"))
def work(least):
    first = now = told()
    (alone, others), began = cpu(), time.perf_counter()
    while now[0] - first[0] < least or now[1] <= first[1]:
        now = told()
    wall, (alone_too, others_too) = time.perf_counter() - began, cpu()
    made = now[0] - first[0]
    own = alone_too - alone
    return {"steps": made, "wall_seconds": wall, "cpu_seconds": own + others_too - others, "alone_seconds": own,
            "learnt": (now[1] - first[1]) / made, "mean_return": float(now[2])}
def tell(what):
    print("figure " + json.dumps(what), flush=True)
work(about["steps"])
runners = sum("EnvRunner" in " ".join(process.cmdline()) for process in me.children(recursive=True))
assert runners >= actors, f"{runners} environment runners below this process, not {actors}: too few CPU-seconds"
versions = {"ray": ray.__version__, "torch": torch.__version__, "gymnasium": gymnasium.__version__}
tell({"unit": "env steps", "compile_seconds": time.perf_counter() - began, "versions": versions})
for _ in sys.stdin:
    tell(work(about["steps"]))
"""
"""Trains by RLlib as `bench.serve` trains by ours; runs under its Python. The steps of a repeat are what they were."""

SCALAR, VECTOR = "gymnasium/CartPole-v1?vectorised=False", "gymnasium/CartPole-v1"
LIKE, WIDE = {"num_envs": 32, "num_steps": 50}, {"num_envs": 512, "num_steps": 64}
OURS = {"longhaul-scalar": (SCALAR, LIKE), "longhaul-vector": (VECTOR, LIKE), "longhaul-wide": (VECTOR, WIDE)}
THEIRS = {"rllib": False, "rllib-vector": True}

AHEAD = 40
"""Least updates of a repeat of ours: two batches may have been made before it begins, in the others' turn."""

Row = Mapping[str, float]


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--python", required=True, help="a Python that can import ray.rllib and torch")
    parser.add_argument("--algorithms", nargs="+", choices=("impala", "appo"), default=["impala", "appo"])
    parser.add_argument("--actors", type=int, default=2, help="processes that act, on both sides")
    parser.add_argument("--steps", type=int, default=16_000, help="least environment steps of a repeat")
    parser.add_argument("--repeats", type=int, default=harness.LEAST_REPEATS)
    args = parser.parse_args()
    if args.repeats < harness.LEAST_REPEATS:
        parser.error(f"--repeats is {args.repeats}; a median of fewer than {harness.LEAST_REPEATS} says little")
    if args.actors < 1 or LIKE["num_envs"] % args.actors:
        parser.error(f"--actors is {args.actors}; choose a divisor of the {LIKE['num_envs']} worlds")
    for learner in args.algorithms:
        for record in figures(learner, args.python, args.actors, args.steps, args.repeats):
            results.emit(record, args.json)
    return 0


def figures(learner: str, python: str, actors: int, least: int, repeats: int) -> list[dict[str, Any]]:
    """A record of each program, all of which trained by `learner` in turn."""
    load = os.getloadavg()[0]
    with ExitStack() as opened:
        workers = {}
        for program, vector in THEIRS.items():
            about = {"learner": learner, "actors": actors, "vector": vector, "steps": least, **LIKE}
            # Ray would kill its environment runners where others fill the machine's memory.
            few = {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "1", "RAY_memory_monitor_refresh_ms": "0"}
            worker = harness.Worker([python, "-W", "ignore", "-c", RLLIB, json.dumps(about)], few)
            worker.about |= {"config": about}
            workers[program] = opened.enter_context(worker)
        for program, (env, sizes) in OURS.items():
            updates = max(-(-least // (sizes["num_envs"] * sizes["num_steps"])), AHEAD)
            case = {"env": env, **sizes, "actors": actors, "actor_kind": "process", "staleness": 1, "updates": updates}
            command = [sys.executable, "-c", harness.OURS, json.dumps(["actors", case | {"learner": learner}])]
            workers[program] = opened.enter_context(harness.Worker(command, {"LONGHAUL_CACHE": "off"}))
        rounds = [{program: worker.ask() for program, worker in workers.items()} for _ in range(repeats)]
        abouts = {program: worker.about for program, worker in workers.items()}
    return [
        {"name": "actors-peer", "program": program, "learner": learner, **record, "load": round(load, 2)}
        for program, record in compared(rounds, abouts).items()
    ]


def compared(rounds: Sequence[Mapping[str, Row]], abouts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Medians of each program's repeats, and of their ratios to the other library's in the same round.

    A round has a repeat of each program; what it has no `steps` of are those that its program is said to make.
    """
    records: dict[str, dict[str, Any]] = {}
    for program, about in abouts.items():
        rows = [{"steps": about.get("steps", 0), **turn[program]} for turn in rounds]
        each = {key: [row["steps"] / row[key] for row in rows] for key in ("wall_seconds", "cpu_seconds")}
        record = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        record |= {"unit": about["unit"], "config": about["config"], "compile_seconds": about["compile_seconds"]}
        record |= {"per_second": statistics.median(each["wall_seconds"])}
        record |= {"per_cpu_second": statistics.median(each["cpu_seconds"])}
        if "alone_seconds" in rows[0]:
            record |= {"alone_per_cpu_second": statistics.median(row["steps"] / row["alone_seconds"] for row in rows)}
        record |= {"repeats": len(rows), "each": each, "versions": about["versions"], "commit": about.get("commit")}
        records[program] = record
    peers = [program for program in records if program in THEIRS]
    for program, record in records.items():
        for ratio, key in (("ratio", "wall_seconds"), ("cpu_ratio", "cpu_seconds")):
            mine, others = record["each"][key], [records[peer]["each"][key] for peer in peers]
            if program not in peers:
                best = [max(turn) for turn in zip(*others)]
                record[f"peer_{ratio}"] = statistics.median(a / b for a, b in zip(mine, others[0]))
                record[f"best_{ratio}"] = statistics.median(a / b for a, b in zip(mine, best))
    return records


if __name__ == "__main__":
    sys.exit(main())
