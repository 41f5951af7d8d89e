"""Runs the HackMatrix trainer that the recipe `hackmatrix` follows beside ours: in turn, on the same cores.

    python -m benchmarks.hackmatrix_peer --trainer PATH --python PYTHON [--cores 0] [--json FILE] [--page FILE]

PATH is the `python` folder of a checkout of charleseff/hack-matrix, PYTHON one that can import its `hackmatrix` (jax,
flax, optax, gymnasium). One JSON line a figure, as `longhaul bench` has them, with theirs as `peer`:

- `hackmatrix-env`: whole steps by random legal actions with mask, observation and a reset where an episode ended;
- `hackmatrix`: one update of PPO at the trainer's own settings, ours by the program that `longhaul train` runs.

`peer_ratio` and `peer_cpu_ratio` are medians of the repeats' ratios of seconds and CPU-seconds a step, above 1 where we
are faster. Both compile twice, with an empty cache and with the one just filled: `cold_seconds` and `warm_seconds` from
the start of the process to the end of the first run of its program.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from longhaul.bench import harness
from longhaul.bench.cases import hackmatrix_grid
from longhaul.cli import bench_hackmatrix, tables

THEIRS = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
what, envs, steps, updates = json.loads(sys.argv[2])
import jax, jax.numpy as jnp
from hackmatrix.purejaxrl import HackMatrixGymnax, TrainConfig, init_runner_state, make_train_chunk
env = HackMatrixGymnax()

def environment():
    params = env.default_params
    resets = jax.vmap(lambda key: env.reset(key, params))
    moves = jax.vmap(lambda key, state, action: env.step(key, state, action, params))

    def step(carried, key):
        state, sums = carried
        act, move, begin = jax.random.split(key, 3)
        mask = jax.vmap(env.get_action_mask)(state)
        lot = jax.random.bits(act, mask.shape) >> 9 | 1
        action = jnp.argmax(jnp.where(mask, lot, 0), axis=-1).astype(jnp.int32)
        seen, led, reward, done, _ = moves(jax.random.split(move, envs), state, action)
        first, fresh = resets(jax.random.split(begin, envs))
        def choose(new, old):
            return jnp.where(done.reshape(-1, *[1] * (new.ndim - 1)), new, old)
        state, seen = jax.tree.map(choose, (fresh, first), (led, seen))
        sums = sums[0] + reward.sum(), sums[1] + done.sum(), sums[2] + seen.mean()
        return (state, sums), None

    def run(key):
        _, state = resets(jax.random.split(key, envs))
        return jax.lax.scan(step, (state, (0.0, 0, 0.0)), jax.random.split(key, steps))[0][1]

    return jax.jit(run), jax.random.PRNGKey(0)

def training():
    config = TrainConfig(num_envs=envs, num_steps=steps, total_timesteps=envs * steps * updates)
    state, _ = init_runner_state(config, env, jax.random.PRNGKey(0))
    return make_train_chunk(config, env, updates), state

def cpu():
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)

def tell(found):
    print("figure " + json.dumps(found), flush=True)

function, given = {"env": environment, "ppo": training}[what]()
began = time.perf_counter()
lowered = function.lower(given)
traced = time.perf_counter()
program = lowered.compile()
compiled = time.perf_counter()

def work(i):
    global given
    if what == "env":
        total, ended, seen = jax.device_get(program(jax.random.PRNGKey(i)))
        return {"return_of_all": float(total), "episodes": int(ended), "observation": float(seen)}
    given, metrics = jax.block_until_ready(program(given))
    names = ("mean_episode_return", "entropy", "approx_kl", "clip_frac")
    return {name: float(metrics[name][-1]) for name in names}

work(0)
tell({"steps": envs * steps * updates, "unit": "env steps", "trace_seconds": traced - began,
      "compile_seconds": compiled - began, "versions": {"jax": jax.__version__}})
for i, _ in enumerate(sys.stdin):
    used, began = cpu(), time.perf_counter()
    found = work(i + 1)
    tell({"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu() - used} | found)
"""
"""Drives their environment and their update as `bench.serve` drives ours; runs under their Python."""

WHAT = {"env": "hackmatrix-env", "ppo": "hackmatrix"}

TABLE = "benchmarks/hackmatrix_peer.py"
"""Names the table on a page."""

HEADER = ("program", "cores", "CPU-µs a step: theirs", "ours", "times", "steps/s: theirs", "ours", "times")


def main() -> int:
    parser = results.parser(__doc__)
    parser.add_argument("--trainer", required=True, help="the folder that holds their package hackmatrix")
    parser.add_argument("--python", required=True, help="a Python that can import it")
    parser.add_argument("--commit", help="of the checkout; asked of git without")
    parser.add_argument("--cores", default="", help="cores to run on, separated by commas; all without")
    parser.add_argument("--what", nargs="+", choices=tuple(WHAT), default=list(WHAT))
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=harness.LEAST_REPEATS)
    parser.add_argument("--page", help="write the table of all lines of --json into this Markdown file, at its marks")
    args = parser.parse_args()
    trainer = Path(args.trainer).resolve()
    if not (trainer / "hackmatrix").is_dir():
        parser.error(f"--trainer {args.trainer} holds no folder hackmatrix")
    if args.repeats < harness.LEAST_REPEATS:
        parser.error(f"--repeats is {args.repeats}; a median of fewer than {harness.LEAST_REPEATS} says little")
    if args.page and not args.json:
        parser.error("--page needs --json, the file of the lines that it shows")
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})  # its children keep to them
    peer_commit, cores = args.commit or commit(trainer), len(os.sched_getaffinity(0))
    for subject in args.what:
        record = figure(subject, args.python, trainer, args.num_envs, args.repeats)
        record["peer"] |= {"commit": peer_commit}
        record["config"] |= {"cores": cores}
        results.emit(record, args.json)
    if args.page:
        records = [json.loads(line) for line in Path(args.json).read_text().splitlines()]
        tables.write_text(args.page, bench_hackmatrix.placed(args.page, TABLE, page(records)))
    return 0


def commit(folder: Path) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def figure(subject: str, python: str, trainer: Path, envs: int, repeats: int) -> dict[str, Any]:
    """One figure of ours with theirs, repeated in turn."""
    name = WHAT[subject]
    if subject == "env":
        sizes = (envs, 32, 1)
        own = harness.OURS, [name, harness.cases(name, num_envs=envs)[0]]
    else:
        sizes = (envs, 128, 1)
        own = hackmatrix_grid.OURS, hackmatrix_grid.Cell(name, envs, 128, "fp32")
    commands = {
        "ours": [sys.executable, "-c", own[0], json.dumps(own[1])],
        "theirs": [python, "-c", THEIRS, str(trainer), json.dumps([subject, *sizes])],
    }
    with tempfile.TemporaryDirectory() as cache:
        started = {whose: start(command, Path(cache) / whose) for whose, command in commands.items()}
    workers, figures = {whose: worker for whose, (worker, _) in started.items()}, {}
    try:
        pairs = [(workers["ours"].ask(), workers["theirs"].ask()) for _ in range(repeats)]
    finally:
        for worker in workers.values():
            worker.__exit__()
    for i, (whose, (worker, begun)) in enumerate(started.items()):
        figures[whose] = harness.medians(worker.about, [pair[i] for pair in pairs]) | begun
    ours, peer = workers["ours"].about, workers["theirs"].about
    share = ours["steps"] / peer["steps"]
    about = {key: ours[key] for key in ("versions", "commit", "device")}
    record = {"name": name, "config": ours["config"], **figures["ours"], "repeats": repeats, **about}
    record["peer"] = figures["theirs"] | {"versions": peer["versions"]}
    for ratio, key in (("peer_ratio", "wall_seconds"), ("peer_cpu_ratio", "cpu_seconds")):
        record[ratio] = statistics.median(share * other[key] / own[key] for own, other in pairs)
    return record


def start(command: list[str], cache: Path) -> tuple[harness.Worker, dict[str, float]]:
    """A worker with a filled cache, and how long it took to begin without and with it."""
    variables = {"JAX_COMPILATION_CACHE_DIR": str(cache), "LONGHAUL_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    began = time.perf_counter()
    first = harness.Worker(command, {}, variables)
    cold = time.perf_counter() - began
    first.__exit__()
    began = time.perf_counter()
    worker = harness.Worker(command, {}, variables)
    warm = {"cold_seconds": cold, "warm_seconds": time.perf_counter() - began}
    return worker, warm | {"compile_seconds": first.about["compile_seconds"]}


def page(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a program and number of cores, of its newest line; then commits and versions."""
    newest = {(record["name"], record["config"]["cores"]): record for record in records}
    rows = []
    for (name, cores), record in sorted(newest.items()):
        other = record["peer"]
        both = [f"{1e6 / row['per_cpu_second']:.1f}" for row in (other, record)]
        walls = [f"{row['per_second']:,.0f}" for row in (other, record)]
        ratios = [f"{record[key]:.1f}" for key in ("peer_cpu_ratio", "peer_ratio")]
        rows.append([f"`{name}`", str(cores), *both, ratios[0], *walls, ratios[1]])
    last = list(newest.values())[-1]
    commits = dict.fromkeys(bench_hackmatrix.short(record["commit"]) for record in newest.values())
    loads = [record["load"] for record in newest.values()]
    return (
        f"{bench_hackmatrix.markdown(HEADER, rows)}\nTheirs: commit {last['peer']['commit'][:7]}, JAX "
        f"{last['peer']['versions']['jax']}. Ours: commit {', '.join(commits)}, JAX {last['versions']['jax']}. Load of "
        f"the machine: {min(loads):g} to {max(loads):g}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
