"""Benchmark cases: programs with their inputs, ready to be repeated.

What a repeat computes is returned, so that no compiler leaves it out.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from longhaul import prng
from longhaul.algorithms.config import PPOConfig
from longhaul.config import recipes
from longhaul.config.population import Population
from longhaul.config.resolve import agents as columns
from longhaul.config.resolve import changed, resolve
from longhaul.config.run import Driving, Named, Run
from longhaul.driving import scenario_source
from longhaul.driving.datasets import readers
from longhaul.driving.datasets.log import Log
from longhaul.driving.scenario.bank import Bank, stack
from longhaul.driving.scenario.from_log import scenario_from_log
from longhaul.driving.scenario.scenario import CELL, Scenario
from longhaul.driving.sim import device_bank, dynamics, geometry, simulator
from longhaul.driving.sim.config import HELD_OUT
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.dynamics import Motion
from longhaul.environment import Worlds, vectorise
from longhaul.envs import hackmatrix
from longhaul.envs.hackmatrix import state as world
from longhaul.runtime import config_fields, device_memory
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import cores, prepare_devices
from longhaul.spaces import MultiDiscrete
from longhaul.topologies import fused, fused_population
from longhaul.training.assemble import Assembly, assemble
from longhaul.training.data import Feeding, feed
from longhaul.types import PyTree

MARGIN = 25.0
"""Metres that a distance field reaches beyond its routes, by default."""


class Prepared(NamedTuple):
    """A figure ready to be measured."""

    config: dict[str, Any]
    steps: int  # of one repeat
    unit: str
    compile_seconds: float  # tracing and compiling everything that a repeat runs, wall
    begin: Callable[[int], Any]  # number of the repeat -> what `work` takes; not measured
    work: Callable[[Any], dict[str, float]]  # waits for all its results


def ppo_cartpole(num_envs: int, total_steps: int | None, devices: int | None, deterministic: bool = False) -> Prepared:
    total_steps = total_steps or (499_712 if num_envs < 64 else 2_097_152)
    run = Run(
        "bench", Named("cartpole"), PPOConfig(), total_steps=total_steps, num_envs=num_envs, num_steps=128,
        devices=devices, deterministic=deterministic,
    )  # fmt: skip
    return training(run, "env steps", {})


def seeds(
    runs: int, num_envs: int, num_steps: int, total_steps: int, devices: int | None, together: int | None
) -> Prepared:
    """So many runs of CartPole by PPO in one program; steps are those of all."""
    run = Run(
        "bench", Named("cartpole"), PPOConfig(), total_steps=total_steps, num_envs=num_envs, num_steps=num_steps,
        devices=devices, population=Population(seeds=runs, together=together),
    )  # fmt: skip
    return training(run, "env steps", {"runs": runs})


def driving_train(total_steps: int, num_envs: int, scenarios: int, devices: int | None) -> Prepared:
    recipe = recipes.recipe("driving")
    assert isinstance(recipe.environment, Driving)
    task = dataclasses.replace(recipe.environment, scenarios=scenarios)
    run = dataclasses.replace(recipe, environment=task, total_steps=total_steps, num_envs=num_envs, devices=devices)
    return training(run, "agent steps", {"scenarios": scenarios, "agents": task.simulator.agents})


def train(recipe: str, settings: Mapping[str, Any], devices: int | None) -> Prepared:
    """Any recipe with other settings, by name as flags have them; without `total_steps` a repeat is four updates."""
    run = changed(recipes.recipe(recipe), settings)
    batch = run.num_envs * run.num_steps * columns(run)
    run = dataclasses.replace(run, total_steps=settings.get("total_steps", 4 * batch), devices=devices)
    return training(run, "agent steps", {"recipe": recipe, "settings": dict(settings), "agents": columns(run)})


def hackmatrix_ppo(
    num_envs: int, num_steps: int, precision: str, total_steps: int | None, devices: int | None
) -> Prepared:
    """The recipe `hackmatrix`; without `total_steps` a repeat is 131,072 steps, or one update where that is more."""
    recipe = recipes.recipe("hackmatrix")
    batch = num_envs * num_steps
    algorithm = config_fields.replaced(recipe.algorithm, precision=precision)
    run = dataclasses.replace(
        recipe, algorithm=algorithm, num_envs=num_envs,
        num_steps=num_steps, total_steps=total_steps or max(1, 131_072 // batch) * batch, devices=devices,
    )  # fmt: skip
    prepared = training(run, "env steps", {})

    def work(progress: PyTree) -> dict[str, float]:
        return prepared.work(progress) | {"peak_bytes": peak_bytes()}

    return prepared._replace(work=work)


def peak_bytes() -> float:
    """The most memory that this process held so far: of the first device where it has a count, else of the host."""
    counted = jax.devices()[0].memory_stats()
    if counted and "peak_bytes_in_use" in counted:
        return float(counted["peak_bytes_in_use"])
    if (most := device_memory.high_water(os.getpid())) is not None:
        return float(most)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def assembled(run: Run) -> tuple[PyTree, Assembly]:
    """(context, assembly) of a resolved run with the first chunk of its data."""
    source = feed(run)
    context = Feeding(source).now.context
    return context, assemble(run, source.within, context)


def training(run: Run, unit: str, more: dict[str, Any]) -> Prepared:
    """Whole runs of `run`, without files: blocks of updates, whose metrics the host reads one call late.

    Where worlds have several agents, `played` is the share of steps in episodes that ended: the others are of agents
    that had ended before their world, of empty slots, and of episodes that went on.
    """
    run = resolve(run)
    assert run.devices is not None
    assert run.block is not None
    prepare_devices(run.devices)
    context, assembly = assembled(run)
    began = time.perf_counter()
    start = assembly.start(run.seed, context)
    if run.many:
        assert run.population.together is not None
        program = fused_population.compiled(
            assembly.algorithm, assembly.collector_in, start, context, assembly.mesh, block=run.block,
            width=run.population.together,
        )  # fmt: skip
    else:
        program = fused.compiled(
            assembly.algorithm, assembly.collector_in, start, context, assembly.mesh, block=run.block,
            shards=assembly.shards,
        )  # fmt: skip
    compiled = time.perf_counter() - began
    block, updates = run.block, assembly.updates
    steps = updates * assembly.steps_per_update * max(1, len(assembly.members))
    several = columns(run) > 1

    def begin(number: int) -> PyTree:
        key = jax.random.key(number)
        if run.many:
            key = jax.device_put(jax.random.split(key, len(assembly.members)), meshes.sharded(assembly.mesh))
        else:
            key = jax.device_put(key, meshes.replicated(assembly.mesh))
        return jax.tree.map(jnp.copy, start._replace(key=key))  # the program takes it back

    def work(progress: PyTree) -> dict[str, float]:
        rows: list[Any] = []
        for _, n, metrics in fused.fused(program, progress, context, updates=updates, block=block):
            rows.append((n, metrics))
            rows[-2:-1] = [(n, jax.device_get(late)) for n, late in rows[-2:-1]]  # while the device goes on
        rows = [{k: np.asarray(v)[:n] for k, v in jax.device_get(metrics).items()} for n, metrics in rows]
        names = ("episodes", "episode/return", "episode/length")
        scores = {name: np.concatenate([row[name] for row in rows]) for name in names}
        ended, total = (np.sum(scores[name][-max(1, updates // 10) :]) for name in names[:2])
        figures = {"mean_return": float(total / ended) if ended else float("nan")}
        return figures | ({"played": float(np.sum(scores["episode/length"])) / steps} if several else {})

    names = ("num_envs", "num_steps", "total_steps", "devices", "deterministic")
    config = {name: getattr(run, name) for name in names} | more | config_fields.values(run.algorithm)
    config |= {"together": run.population.together} if run.many else {}
    return Prepared(config, steps, unit, compiled, begin, work)


def check_bank(objects: int) -> None:
    """Raises ValueError where no bank has scenarios of this size."""
    if objects < 32 or objects & (objects - 1):
        raise ValueError(f"--objects is {objects}; choose a power of two, at least 32: a bank is padded to one")


def _bank(objects: int, scenarios: int, agents: int = 1, data: Sequence[str] = (), covering: bool = False) -> Bank:
    """The scenarios of the files at `data`, with at most `objects` objects; without any, the first generated ones with
    objects / 2 < N <= objects, so that padding is never most of the work.

    At most `agents` are controlled, and never more than the scenario with most has. With `covering` the distance fields
    of logs reach so far that all objects are within them as long as the log lasts.
    """
    agents = min(agents, objects)
    if data:
        logs = [log for path in readers.expand(list(data)) for log in readers.read(path)]
        scenes = [_log_scenario(log, agents, objects, covering) for log in logs]
    else:
        scenes = _generated(objects, scenarios, agents)
    return stack(scenes, agents=max(int((one.controlled >= 0).sum()) for one in scenes))


def _generated(objects: int, scenarios: int, agents: int) -> list[Scenario]:
    scenes: list[Scenario] = []
    for first in itertools.count(0, 64):
        some = scenario_source.generated(first, 64, agents=agents, horizon=None, workers=cores())
        scenes += [one for one in some if objects // 2 < one.kind.shape[0] <= objects]
        if len(scenes) >= scenarios or (first >= 1024 and not scenes):
            break
    if not scenes:
        raise ValueError(f"no generated scenario has {objects // 2 + 1} to {objects} objects; choose fewer")
    return scenes[:scenarios]


def _log_scenario(log: Log, agents: int, objects: int, covering: bool) -> Scenario:
    scenario = scenario_from_log(log, agents=agents, objects=objects)
    if not (covering and scenario.field.size):
        return scenario
    places = scenario.pose[..., :2][scenario.present]
    top = scenario.field_origin + CELL * np.array(scenario.field.shape[::-1])
    missing = np.maximum(scenario.field_origin - places.min(0), places.max(0) - top).max()
    return scenario_from_log(log, agents=agents, objects=objects, route_margin=MARGIN + max(float(missing) + 5.0, 0.0))


def _bytes(tree: PyTree) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def driving_scenarios(driven: tuple[int, int], scenarios: int) -> Prepared:
    """Generated scenarios made by this process alone, those of `scenarios` seeds that no run trains in: for `driven`,
    how many agents at most are controlled, and the least with which a scenario is kept."""
    agents, least = driven
    config = {"agents": agents, "least": least}
    begin = time.perf_counter()
    for seed in range(HELD_OUT, HELD_OUT + 8):  # compiles, or reads, the kernels
        scenario_source.generated_one(seed, agents=agents)
    compiled = time.perf_counter() - begin

    def work(first: int) -> dict[str, float]:
        candidates = [
            scenario_source.generated_one(seed, agents=agents, least=least) for seed in range(first, first + scenarios)
        ]
        kept = [scenario for scenario in candidates if scenario is not None]
        arrays = (a for s in kept for a in (*s, *s.road) if isinstance(a, np.ndarray))
        return {"kept": len(kept) / scenarios, "scenario_bytes": sum(a.nbytes for a in arrays) / max(len(kept), 1)}

    return Prepared(config, scenarios, "seeds", compiled, lambda number: HELD_OUT + number * scenarios, work)


def driving_step(
    objects: int, batch: int, num_steps: int, scenarios: int, devices: int | None, data: Sequence[str] = ()
) -> Prepared:
    devices = _prepare(batch, devices)
    known = device_bank.tabulate(_bank(objects, scenarios, data=data, covering=True), 1, reactive=False)
    sizes = {
        "objects": objects, "batch": batch, "num_steps": num_steps, "scenarios": known.scenarios, "devices": devices,
        "data": list(data), "scenario_bytes": _bytes(known) // known.scenarios,
    }  # fmt: skip

    def shard(key: jax.Array) -> dict[str, jax.Array]:
        key = jax.random.fold_in(key, meshes.shard_index())
        scenario = jax.random.randint(key, (batch // devices,), 0, known.scenarios)
        logged = jax.vmap(lambda s: device_bank.slice_at(known, s, jnp.int32(0)))(scenario)
        begun = Motion(logged[:, 0], logged[:, 1], logged[:, 2], jnp.hypot(logged[:, 3], logged[:, 4]))
        throttle, steering = (prng.normal(k, begun.x.shape) for k in jax.random.split(key))

        def step(carried: Any, _: None) -> tuple[Any, None]:
            motion, hit, off, sums = carried
            # Who hit something brakes, and who left the road turns round: so nothing of a step can be left out.
            pull = jnp.where(hit, -6.0, throttle)
            turn = jnp.where(off, 0.1, 0.02 * steering)
            motion, hit, off = jax.vmap(lambda *world: _all_objects(known, *world))(scenario, motion, pull, turn)
            return (motion, hit, off, (sums[0] + hit, sums[1] + off)), None

        never = jnp.zeros(begun.x.shape, bool)
        none = jnp.zeros(begun.x.shape, jnp.int32)
        carried = (begun, never, never, (none, none))
        moved, _, _, (hits, offs) = jax.lax.scan(step, carried, None, num_steps)[0]
        slots = num_steps * hits.size
        rates = {"collision": jnp.sum(hits) / slots, "offroad": jnp.sum(offs) / slots, "speed": jnp.mean(moved.speed)}
        return meshes.mean_over_data(rates)

    return _sharded(shard, devices, batch * num_steps, sizes)


def _all_objects(
    known: DeviceBank, scenario: jax.Array, motion: Motion, acceleration: jax.Array, curvature: jax.Array
) -> tuple[Motion, jax.Array, jax.Array]:
    """One step of all [N] objects of one world: their motion, who overlaps another, who left the road."""
    body = known.body[scenario]
    half, present = (body[0], body[1]), body[2] > 0.0
    motion = dynamics.advance(motion, acceleration, curvature, known.dt[scenario])
    cos, sin = jnp.cos(motion.heading), jnp.sin(motion.heading)
    axes = (cos[:, None], sin[:, None])
    dx, dy = motion.x[None, :] - motion.x[:, None], motion.y[None, :] - motion.y[:, None]
    x, y = geometry.into(dx, dy, *axes)
    relative = geometry.into(jnp.broadcast_to(cos[None, :], x.shape), jnp.broadcast_to(sin[None, :], x.shape), *axes)
    own = (jnp.broadcast_to(half[0][:, None], x.shape), jnp.broadcast_to(half[1][:, None], x.shape))
    others = (jnp.broadcast_to(half[0][None, :], x.shape), jnp.broadcast_to(half[1][None, :], x.shape))
    gap = geometry.separation(geometry.Relative(x, y, *relative, own, others))
    pair = present[None, :] & present[:, None] & ~np.eye(x.shape[0], dtype=bool)
    corner_x, corner_y = jax.vmap(geometry.corners)(*half)
    corner_x, corner_y = geometry.out_of(corner_x, corner_y, *axes)
    road = geometry.clearance(
        device_bank.field(known, scenario), corner_x + motion.x[:, None], corner_y + motion.y[:, None]
    )
    return motion, jnp.any(pair & (gap < 0.0), axis=-1), present & jnp.any(road > 0.0, axis=-1)


def driving_env(
    objects: int,
    batch: int,
    num_steps: int,
    scenarios: int,
    devices: int | None,
    data: Sequence[str] = (),
    agents: int = 1,
    road_points: int = 0,
) -> Prepared:
    devices = _prepare(batch, devices)
    bank = _bank(objects, scenarios, agents, data)
    agents = bank.controlled.shape[1]
    world = simulator.driving(bank, simulator.Config(agents=agents, road_points=road_points))
    state = jax.eval_shape(lambda key: world.reset(key)[0], jax.random.key(0))
    sizes = {
        "objects": objects, "batch": batch, "num_steps": num_steps, "scenarios": world.scenarios, "devices": devices,
        "data": list(data), "agents": agents, "road_points": road_points,
        "scenario_bytes": _bytes(world.tables) // world.scenarios, "state_bytes": _bytes(state),
    }  # fmt: skip
    driven = float((bank.controlled >= 0).sum(1).mean())  # slots without an agent count for nothing
    many = vectorise(world, batch // devices)
    assert isinstance(world.spec.action, MultiDiscrete)
    choices = np.array(world.spec.action.sizes, np.uint32)
    length = min(32, num_steps)

    def act(seen: PyTree, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = prng.bits(key, (many.columns, 2)) % jnp.broadcast_to(choices, (many.columns, 2))
        return drawn.astype(jnp.int32), key

    def shard(key: jax.Array) -> dict[str, jax.Array]:
        tally, seen = _rollouts(many, act, key, num_steps // length, length)
        totals = {name: jnp.sum(total) for name, total in tally.sums.items()} | {"episodes": jnp.sum(tally.episodes)}
        counts = {name: jnp.sum(count) for name, count in tally.counts.items()}
        seen = jnp.mean(jnp.stack([jnp.mean(leaf) for leaf in jax.tree.leaves(seen)]))
        totals, counts, seen = meshes.mean_over_data((totals, counts, seen))
        episodes = totals.pop("episodes")
        means = {name: total / jnp.maximum(counts.get(name, episodes), 1.0) for name, total in totals.items()}
        return means | {"episodes": episodes * devices, "observation": seen}

    steps = batch * (num_steps // length) * length
    if agents == 1:
        return _sharded(shard, devices, steps, sizes)
    return _sharded(shard, devices, round(steps * driven), sizes, "agent steps")


def hackmatrix_env(num_envs: int, num_steps: int, rollouts: int, devices: int | None, rules: str) -> Prepared:
    """Whole steps of the game by random legal actions, with observation, mask and reset; `rollouts` times num_steps."""
    devices = _prepare(num_envs, devices)
    many = vectorise(hackmatrix.make(rules=rules), num_envs // devices)

    def act(seen: PyTree, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        key_act, key_step = prng.split(key, 2)
        lot = prng.bits(key_act, (many.columns, world.ACTIONS)) >> 9 | 1
        return jnp.argmax(jnp.where(seen.mask, lot, 0), axis=-1).astype(jnp.int32), key_step

    def shard(key: jax.Array) -> dict[str, jax.Array]:
        tally, seen = _rollouts(many, act, key, rollouts, num_steps)
        totals = {name: jnp.sum(tally.sums[name]) for name in ("return", "length", "stage")}
        read = jnp.mean(jnp.stack([jnp.mean(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(seen)]))
        totals, episodes, read = meshes.mean_over_data((totals, jnp.sum(tally.episodes), read))
        means = {name: total / jnp.maximum(episodes, 1.0) for name, total in totals.items()}
        return means | {"episodes": episodes * devices, "observation": read}

    config = {"num_envs": num_envs, "num_steps": num_steps, "rollouts": rollouts, "devices": devices, "rules": rules}
    return _sharded(shard, devices, num_envs * num_steps * rollouts, config)


def _rollouts(many: Worlds, act: Callable[..., Any], key: jax.Array, rollouts: int, length: int) -> tuple[Any, PyTree]:
    """Tally and last observation of a shard's rollouts by `act`: (observation, key) -> (actions, key of the step).

    Fresh starts are drawn for each as `rollout.collector` does.
    """
    key_reset, key_run = jax.random.split(jax.random.fold_in(key, meshes.shard_index()))

    def rollout(carried: Any, key: jax.Array) -> tuple[Any, None]:
        bank = many.fresh(key, min(16, -(-length // 8)))

        def step(carried: Any, key: jax.Array) -> tuple[Any, None]:
            state, tally, seen = carried
            action, key_step = act(seen, key)
            state, tally, led_to = many.step(state, tally, action, key_step, bank)
            return (state, tally, led_to.observation), None

        return jax.lax.scan(step, carried, prng.split(key, length))[0], None

    state, seen = many.reset(key_reset)
    carried = (state, many.tally(), seen)
    return jax.lax.scan(rollout, carried, jax.random.split(key_run, rollouts))[0][1:]


def _sharded(
    shard: Callable[[jax.Array], dict[str, jax.Array]],
    devices: int,
    steps: int,
    config: dict[str, Any],
    unit: str = "env steps",
) -> Prepared:
    """A program of a key alone, on `devices` shards."""
    mesh = meshes.make_mesh(devices)
    everywhere = PartitionSpec()
    began = time.perf_counter()
    program = jax.jit(meshes.per_shard(shard, mesh, everywhere, everywhere)).lower(_key(mesh, 0)).compile()
    compiled = time.perf_counter() - began

    def work(key: jax.Array) -> dict[str, float]:
        return {name: float(value) for name, value in jax.device_get(program(key)).items()}

    return Prepared(config, steps, unit, compiled, lambda number: _key(mesh, number), work)


def _key(mesh: Any, number: int) -> jax.Array:
    return jax.device_put(jax.random.key(number), meshes.replicated(mesh))


def _prepare(batch: int, devices: int | None) -> int:
    """Number of devices that are prepared: by default those that a training run of so many environments takes."""
    learner = PPOConfig(num_minibatches=1)
    run = Run("bench", Named(), learner, total_steps=batch, num_envs=batch, num_steps=1, devices=devices)
    count = resolve(run).devices
    assert count is not None
    prepare_devices(count)
    return count
