"""Benchmarks: how fast, as one JSON object a figure.

Every figure has a process of its own, because JAX fixes the number of CPU devices and threads when it starts: the
process prepares, compiles, runs once to warm up, and then repeats when asked to. A peer, another library's program for the same work, is
asked in turn with ours, so that both meet the same load of the machine; where that load is high, compare CPU-seconds.
What a repeat computes is returned, so that no compiler leaves it out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from longhaul import mesh as meshes
from longhaul import randomness, recipes, training, worlds
from longhaul.algorithms import ppo
from longhaul.driving import dynamics, geometry, simulator, tables
from longhaul.driving.bank import Bank, stack
from longhaul.driving.dynamics import Motion
from longhaul.driving.tables import Tables
from longhaul.environment import vectorise
from longhaul.provenance import provenance
from longhaul.run import Driving, Named, Run, assemble, cores, prepare_devices, resolve
from longhaul.topologies import fused
from longhaul.types import PyTree

NAMES = {
    "ppo-cartpole": "PPO at PureJaxRL's CartPole settings, with 4, 512 and 2,048 environments",
    "driving-step": "dynamics, collision and off-road of all objects of driving worlds",
    "driving-env": "whole environment steps of driving: observation, reward, ends, metrics, resets",
    "driving-train": "training by the driving recipe",
}

LEAST_REPEATS = 5

REFERENCE = {4: 158_668.0, 512: 208_800.0, 2048: 133_700.0}
"""PureJaxRL's env steps per second by environments, once measured on two idle cores of another machine."""

MARK = "figure "
"""Begins a worker's answers; anything else that a library prints is not one."""


class Prepared(NamedTuple):
    """A figure ready to be measured."""

    config: dict[str, Any]
    steps: int  # of one repeat
    unit: str
    compile_seconds: float  # tracing and compiling everything that a repeat runs, wall
    begin: Callable[[int], Any]  # number of the repeat -> what `work` takes; not measured
    work: Callable[[Any], dict[str, float]]  # waits for all its results


def run(name: str, **options: Any) -> Iterator[dict[str, Any]]:
    """The figures of a benchmark, one after the other, as `longhaul bench` prints them.

    Options are those of the benchmark's sizes (`ppo_cartpole_cases`, `driving_cases`, `train_cases`) and of `figure`.
    Raises ValueError for a name that is not in NAMES or too few repeats.
    """
    if name not in NAMES:
        raise ValueError(f"no benchmark is named {name!r}; there are {', '.join(NAMES)}")
    common = {key: options.pop(key) for key in ("repeats", "peer_python", "peer_path") if key in options}
    for case in CASES[name](**options):
        yield figure(name, case, **common)


def figure(
    name: str,
    case: dict[str, Any],
    *,
    repeats: int = LEAST_REPEATS,
    peer_python: str | None = None,
    peer_path: str | None = None,
) -> dict[str, Any]:
    """One figure: medians over `repeats`.

    With `peer_python` and `peer_path` (the Python and the folder of `ppo.py` of a PureJaxRL) the peer repeats in turn with us;
    `peer_ratio` and `peer_cpu_ratio` are the medians of the repeats' ratios, above 1 where we are faster.
    """
    if repeats < LEAST_REPEATS:
        raise ValueError(f"{repeats} repeats; a median of fewer than {LEAST_REPEATS} says little")
    with ExitStack() as stack_:
        ours = stack_.enter_context(_Worker([sys.executable, "-c", OURS, json.dumps([name, case])], case))
        others = None
        if peer_python is not None and peer_path is not None and name == "ppo-cartpole":
            command = [peer_python, "-c", PEER, str(Path(peer_path).resolve()), json.dumps(ours.about)]
            others = stack_.enter_context(_Worker(command, ours.about["config"]))
        pairs = [(ours.ask(), others.ask() if others else None) for _ in range(repeats)]
    mine, theirs = [one for one, _ in pairs], [other for _, other in pairs if other is not None]
    about = {key: ours.about[key] for key in ("versions", "commit", "device")}
    record = {"name": name, "config": ours.about["config"], **_medians(ours.about, mine), "repeats": repeats, **about}
    reference = REFERENCE.get(case.get("num_envs", 0)) if name == "ppo-cartpole" else None
    if reference is not None:
        record |= {"reference_per_second": reference, "ratio": record["per_second"] / reference}
    if others is not None:
        record["peer"] = _medians(others.about, theirs) | {"versions": others.about["versions"]}
        share = ours.about["steps"] / others.about["steps"]
        for ratio, key in (("peer_ratio", "wall_seconds"), ("peer_cpu_ratio", "cpu_seconds")):
            record[ratio] = statistics.median(share * b[key] / a[key] for a, b in zip(mine, theirs, strict=True))
    return record


def _medians(about: dict[str, Any], rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    wall, cpu, steps = middle.pop("wall_seconds"), middle.pop("cpu_seconds"), about["steps"]
    return {
        "steps": steps,
        "unit": about["unit"],
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "per_second": steps / wall,
        "per_cpu_second": steps / cpu,
        "compile_seconds": about["compile_seconds"],
        **middle,
    }


# ---------------------------------------------------------------------------------------------------------- workers

OURS = "from longhaul.bench import serve; serve()"

PEER = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
about = json.loads(sys.argv[2])
config = about["config"]
import jax
from ppo import make_train
names = dict(LR="lr", NUM_ENVS="num_envs", NUM_STEPS="num_steps", TOTAL_TIMESTEPS="total_steps",
             UPDATE_EPOCHS="update_epochs", NUM_MINIBATCHES="num_minibatches", GAMMA="gamma", GAE_LAMBDA="gae_lambda",
             CLIP_EPS="clip_eps", ENT_COEF="ent_coef", VF_COEF="vf_coef", MAX_GRAD_NORM="max_grad_norm")
settings = {theirs: config[ours] for theirs, ours in names.items()}
settings |= dict(ACTIVATION="tanh", ENV_NAME="CartPole-v1", ANNEAL_LR=True, DEBUG=False)
began = time.perf_counter()
train = jax.jit(make_train(settings)).lower(jax.random.PRNGKey(0)).compile()
compiled = time.perf_counter() - began
def cpu():
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
def work(seed):
    found = jax.block_until_ready(train(jax.random.PRNGKey(seed)))["metrics"]
    last = -max(1, found["returned_episode"].shape[0] // 10)
    ended, score = found["returned_episode"][last:], found["returned_episode_returns"][last:]
    return {"mean_return": float((score * ended).sum() / ended.sum())}
def tell(what):
    print("figure " + json.dumps(what), flush=True)
work(0)
tell({"steps": about["steps"], "unit": about["unit"], "compile_seconds": compiled, "versions": {"jax": jax.__version__}})
for i, _ in enumerate(sys.stdin):
    used, began = cpu(), time.perf_counter()
    found = work(i)
    tell({"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu() - used} | found)
"""
"""Drives PureJaxRL's `make_train` as `serve` drives our program; runs under its own Python."""


class _Worker:
    """The process of a figure. `about` is what it said when it was ready."""

    def __init__(self, command: list[str], config: dict[str, Any]) -> None:
        environment = dict(os.environ)
        if config.get("devices") == 1:  # as `run.prepare_devices` does; a peer has to be told
            environment.setdefault("NPROC", "1")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            self.about = self._answer()
        except BaseException:
            self.__exit__()
            raise

    def ask(self) -> dict[str, float]:
        """One repeat."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise RuntimeError(f"the benchmark's process ended with code {self.process.wait()}; its message is above")

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


def serve() -> None:
    """What a worker of ours does: prepares the case in its arguments, then repeats it for every line that comes in."""
    name, case = json.loads(sys.argv[1])
    prepared = PREPARE[name](**case)
    prepared.work(prepared.begin(0))
    about = provenance()
    device = ", ".join(f"{count} x {kind}" for kind, count in about["devices"].items())
    ready = {"config": prepared.config, "steps": prepared.steps, "unit": prepared.unit, "device": device}
    _tell(ready | {key: about[key] for key in ("versions", "commit")} | {"compile_seconds": prepared.compile_seconds})
    for i, _ in enumerate(sys.stdin):
        _tell(measure(prepared, i + 1))


def measure(prepared: Prepared, number: int) -> dict[str, float]:
    """One repeat: its wall and CPU seconds (of all threads, and of children that ended), and what it found."""
    given = jax.block_until_ready(prepared.begin(number))
    used, began = _cpu_seconds(), time.perf_counter()
    found = prepared.work(given)
    return {"wall_seconds": time.perf_counter() - began, "cpu_seconds": _cpu_seconds() - used} | found


def _cpu_seconds() -> float:
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def _tell(what: dict[str, Any]) -> None:
    print(MARK + json.dumps(what), flush=True)


# --------------------------------------------------------------------------------------------------------- training


def ppo_cartpole_cases(
    *, num_envs: Sequence[int] = (4, 512, 2048), total_steps: int | None = None, devices: int | None = None
) -> list[dict[str, Any]]:
    """A case a number of environments."""
    usual = {4: 499_712}
    return [
        {"num_envs": n, "total_steps": total_steps or usual.get(n, 2_097_152), "devices": _devices(n, devices)}
        for n in num_envs
    ]


def train_cases(
    *, total_steps: int = 131_072, num_envs: int = 256, scenarios: int = 256, devices: int | None = None
) -> list[dict[str, Any]]:
    sizes = {"total_steps": total_steps, "num_envs": num_envs, "scenarios": scenarios}
    return [sizes | {"devices": _devices(num_envs, devices)}]


def _devices(num_envs: int, devices: int | None) -> int:
    """As many as a training run of so many environments takes."""
    settings = ppo.Config(num_minibatches=1)
    found = resolve(
        Run("bench", Named(), settings, total_steps=num_envs, num_envs=num_envs, num_steps=1, devices=devices)
    )
    assert found.devices is not None
    return found.devices


def _prepare_ppo_cartpole(num_envs: int, total_steps: int, devices: int) -> Prepared:
    made = Run(
        "bench", Named("cartpole"), ppo.Config(), total_steps=total_steps, num_envs=num_envs, num_steps=128,
        devices=devices,
    )  # fmt: skip
    return _training(made, "env steps", {})


def _prepare_driving_train(total_steps: int, num_envs: int, scenarios: int, devices: int) -> Prepared:
    recipe = recipes.recipe("driving")
    assert isinstance(recipe.environment, Driving)
    task = dataclasses.replace(recipe.environment, scenarios=scenarios)
    made = dataclasses.replace(recipe, environment=task, total_steps=total_steps, num_envs=num_envs, devices=devices)
    return _training(made, "agent steps", {"scenarios": scenarios, "agents": task.simulator.agents})


def _training(made: Run, unit: str, more: dict[str, Any]) -> Prepared:
    """Whole runs of `made`, without files: blocks of updates, whose metrics the host reads one call late."""
    made = resolve(made)
    assert made.devices is not None
    assert made.block is not None
    prepare_devices(made.devices)
    assembly = assemble(made, training.make_environment(made))
    began = time.perf_counter()
    start = assembly.start(made.seed)
    program = fused.compiled(assembly.algorithm, assembly.collector, start, assembly.mesh, block=made.block)
    compiled = time.perf_counter() - began
    block, updates = made.block, assembly.updates

    def begin(number: int) -> PyTree:
        key = jax.device_put(jax.random.key(number), meshes.replicated(assembly.mesh))
        return jax.tree.map(jnp.copy, start._replace(key=key))  # the program takes it back

    def work(progress: PyTree) -> dict[str, float]:
        rows: list[Any] = []
        for _, n, metrics in fused.fused(program, progress, updates=updates, block=block):
            rows.append((n, metrics))
            rows[-2:-1] = [(n, jax.device_get(late)) for n, late in rows[-2:-1]]  # while the device goes on
        rows = [{k: np.asarray(v)[:n] for k, v in jax.device_get(metrics).items()} for n, metrics in rows]
        scores = {k: np.concatenate([row[k] for row in rows]) for k in ("episodes", "episode/return")}
        ended, total = (np.sum(scores[k][-max(1, updates // 10) :]) for k in ("episodes", "episode/return"))
        return {"mean_return": float(total / ended) if ended else float("nan")}

    names = ("num_envs", "num_steps", "total_steps", "devices")
    config = {name: getattr(made, name) for name in names} | more | dataclasses.asdict(made.algorithm)
    return Prepared(config, updates * assembly.steps_per_update, unit, compiled, begin, work)


# ---------------------------------------------------------------------------------------------------------- driving


def driving_cases(
    *,
    objects: Sequence[int] = (32, 64),
    batch: int = 256,
    num_steps: int = 256,
    scenarios: int = 64,
    devices: int | None = None,
) -> list[dict[str, Any]]:
    """A case a number of objects (padded) that a world has."""
    sizes = {"batch": batch, "num_steps": num_steps, "scenarios": scenarios, "devices": _devices(batch, devices)}
    return [{"objects": n} | sizes for n in objects]


def _bank(objects: int, scenarios: int) -> Bank:
    """The first generated scenarios with objects / 2 < N <= objects, so that padding is never most of the work."""
    if objects < 32 or objects & (objects - 1):
        raise ValueError(f"objects is {objects}; choose a power of two, at least 32: a bank is padded to one")
    found: list[Any] = []
    for first in itertools.count(0, 64):
        some = worlds.generated(first, 64, agents=1, horizon=None, workers=cores())
        found += [one for one in some if objects // 2 < one.kind.shape[0] <= objects]
        if len(found) >= scenarios or (first >= 1024 and not found):
            break
    if not found:
        raise ValueError(f"no generated scenario has {objects // 2 + 1} to {objects} objects; choose fewer")
    return stack(found[:scenarios], agents=1)


def _prepare_driving_step(objects: int, batch: int, num_steps: int, scenarios: int, devices: int) -> Prepared:
    prepare_devices(devices)
    known = tables.tabulate(_bank(objects, scenarios), 1, False)

    def shard(key: jax.Array) -> dict[str, jax.Array]:
        key = jax.random.fold_in(key, meshes.shard_index())
        scenario = jax.random.randint(key, (batch // devices,), 0, known.scenarios)
        logged = known.motion[scenario, 0]
        begun = Motion(logged[:, 0], logged[:, 1], logged[:, 2], jnp.hypot(logged[:, 3], logged[:, 4]))
        throttle, steering = (randomness.normal(k, begun.x.shape) for k in jax.random.split(key))

        def step(carried: Any, _: None) -> tuple[Any, None]:
            motion, hit, off, sums = carried
            # Who hit something brakes, and who left the road turns round: so nothing of a step can be left out.
            pull = jnp.where(hit, -6.0, throttle)
            turn = jnp.where(off, 0.1, 0.02 * steering)
            motion, hit, off = jax.vmap(lambda *world: _all_objects(known, *world))(scenario, motion, pull, turn)
            return (motion, hit, off, (sums[0] + jnp.sum(hit), sums[1] + jnp.sum(off))), None

        never = jnp.zeros(begun.x.shape, bool)
        carried = (begun, never, never, (jnp.int32(0), jnp.int32(0)))
        moved, _, _, (hits, offs) = jax.lax.scan(step, carried, None, num_steps)[0]
        found = {"collisions": hits, "offroads": offs, "mean_speed": jnp.mean(moved.speed)}
        return meshes.mean_over_data(jax.tree.map(jnp.float32, found))

    return _sharded(shard, devices, batch * num_steps, _sizes(locals()))


def _all_objects(
    known: Tables, scenario: jax.Array, motion: Motion, acceleration: jax.Array, curvature: jax.Array
) -> tuple[Motion, jax.Array, jax.Array]:
    """One step of all [N] objects of one world: their motion, who overlaps another, who left the road."""
    body = known.body[scenario]
    half, present = (body[0], body[1]), body[2] > 0.0
    motion = dynamics.advance(motion, acceleration, curvature, known.dt[scenario])
    cos, sin = jnp.cos(motion.heading), jnp.sin(motion.heading)
    mine = (cos[:, None], sin[:, None])
    dx, dy = motion.x[None, :] - motion.x[:, None], motion.y[None, :] - motion.y[:, None]
    x, y = geometry.into(dx, dy, *mine)
    relative = geometry.into(jnp.broadcast_to(cos[None, :], x.shape), jnp.broadcast_to(sin[None, :], x.shape), *mine)
    wide = [jnp.broadcast_to(h[:, None], x.shape) for h in half], [jnp.broadcast_to(h[None, :], x.shape) for h in half]
    gap = geometry.separation(x, y, *relative, (wide[0][0], wide[0][1]), (wide[1][0], wide[1][1]))
    pair = present[None, :] & present[:, None] & ~np.eye(x.shape[0], dtype=bool)
    corner_x, corner_y = jax.vmap(geometry.corners)(*half)
    corner_x, corner_y = geometry.out_of(corner_x, corner_y, *mine)
    road = geometry.clearance(tables.field(known, scenario), corner_x + motion.x[:, None], corner_y + motion.y[:, None])
    return motion, jnp.any(pair & (gap < 0.0), axis=-1), present & jnp.any(road > 0.0, axis=-1)


def _prepare_driving_env(objects: int, batch: int, num_steps: int, scenarios: int, devices: int) -> Prepared:
    prepare_devices(devices)
    many = vectorise(simulator.driving(_bank(objects, scenarios)), batch // devices)
    sizes = np.array([len(dynamics.ACCELERATIONS), len(dynamics.STEERINGS)], np.uint32)
    length = min(32, num_steps)  # a rollout, for which fresh starts are drawn as `rollout.collector` does

    def shard(key: jax.Array) -> dict[str, jax.Array]:
        key_reset, key_run = jax.random.split(jax.random.fold_in(key, meshes.shard_index()))

        def rollout(carried: Any, key: jax.Array) -> tuple[Any, None]:
            bank = many.fresh(key, min(16, -(-length // 8)))

            def step(carried: Any, key: jax.Array) -> tuple[Any, None]:
                state, tally, _ = carried
                drawn = randomness.bits(key, (many.columns, 2)) % jnp.broadcast_to(sizes, (many.columns, 2))
                state, tally, led_to = many.step(state, tally, drawn.astype(jnp.int32), key, bank)
                return (state, tally, led_to.observation), None

            return jax.lax.scan(step, carried, randomness.split(key, length))[0], None

        state, seen = many.reset(key_reset)
        carried = (state, many.tally(), seen)
        keys = jax.random.split(key_run, num_steps // length)
        _, tally, seen = jax.lax.scan(rollout, carried, keys)[0]
        found = {name: jnp.sum(total) for name, total in tally.sums.items()} | {"episodes": jnp.sum(tally.episodes)}
        seen = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(seen))
        return meshes.mean_over_data(found | {"seen": seen})

    return _sharded(shard, devices, batch * (num_steps // length) * length, _sizes(locals()))


def _sizes(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("objects", "batch", "num_steps", "scenarios", "devices")}


def _sharded(
    shard: Callable[[jax.Array], dict[str, jax.Array]], devices: int, steps: int, config: dict[str, Any]
) -> Prepared:
    """A program of a key alone, on `devices` shards."""
    mesh = meshes.make_mesh(devices)
    everywhere = PartitionSpec()
    began = time.perf_counter()
    program = jax.jit(meshes.per_shard(shard, mesh, everywhere, everywhere)).lower(_key(mesh, 0)).compile()
    compiled = time.perf_counter() - began

    def work(key: jax.Array) -> dict[str, float]:
        return {name: float(value) for name, value in jax.device_get(program(key)).items()}

    return Prepared(config, steps, "env steps", compiled, lambda number: _key(mesh, number), work)


def _key(mesh: Any, number: int) -> jax.Array:
    return jax.device_put(jax.random.key(number), meshes.replicated(mesh))


CASES: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "ppo-cartpole": ppo_cartpole_cases,
    "driving-step": driving_cases,
    "driving-env": driving_cases,
    "driving-train": train_cases,
}

PREPARE: dict[str, Callable[..., Prepared]] = {
    "ppo-cartpole": _prepare_ppo_cartpole,
    "driving-step": _prepare_driving_step,
    "driving-env": _prepare_driving_env,
    "driving-train": _prepare_driving_train,
}
