"""A Run with all decided and checked, and its assembly into functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from longhaul.algorithms import batch_scaling, registry
from longhaul.algorithms.config import AlgorithmConfig, APGConfig, BCConfig, OffPolicy, Reasoner
from longhaul.config import population
from longhaul.config.population import Member
from longhaul.config.run import BEGINNING as BEGINNING
from longhaul.config.run import MOST as MOST
from longhaul.config.run import TOPOLOGIES as TOPOLOGIES
from longhaul.config.run import Driving as Driving
from longhaul.config.run import Named as Named
from longhaul.config.run import Origin as Origin
from longhaul.config.run import Run as Run
from longhaul.config.run import agents as agents
from longhaul.config.run import from_dict as from_dict
from longhaul.config.run import named as named
from longhaul.config.run import parts as parts
from longhaul.config.run import to_dict as to_dict
from longhaul.config.validate import check_driving, check_expert, check_numbers, check_reasoning, flag
from longhaul.driving.sim.simulator import Simulator
from longhaul.environment import advising, vectorise
from longhaul.envs import classic_control
from longhaul.reasoning import sampler
from longhaul.reasoning.config import Reasoning as Reasoning
from longhaul.reasoning.problem_sets import World
from longhaul.replay import Sizes
from longhaul.rollout import Guide, collector, pathwise
from longhaul.runtime import batch_shards, compile_cache, partition, process_group
from longhaul.runtime import mesh as meshes
from longhaul.runtime.errors import RunError as RunError
from longhaul.runtime.mesh_shape import MeshShape
from longhaul.topologies import fused
from longhaul.topologies import population as populations
from longhaul.topologies.actor_learner import config as layouts
from longhaul.topologies.actor_learner import host_rollout
from longhaul.topologies.actor_learner import learner as acted
from longhaul.topologies.actor_learner.config import Acting
from longhaul.topologies.inference_server import config as lanes
from longhaul.training import offline_data, reasoning_setup
from longhaul.training import population as members
from longhaul.types import Algorithm, Collector, Environment, Params, Progress, PyTree, Spec

MOST_RECORDS = 4096
"""Records of metrics in a run, about, however long it is: a record sums up as many updates as that takes."""


EPISODES = {Driving: 128, Reasoning: 256}
"""Of an evaluation: scenarios, problems; 100 elsewhere."""

VISITS, EPISODE = 8, 80
"""How often a scenario of a bank is driven before others come, taking an episode to have so many steps."""


UNROLL = 4
"""Steps of a rollout that are compiled as one in runs side by side, where a step is as small as classic control's, and
the loop itself costs. Elsewhere compiling would only take longer."""


class Assembly(NamedTuple):
    """A Run as functions, on its mesh."""

    spec: Spec
    algorithm: Algorithm
    collector_in: fused.CollectorIn
    enter: fused.Enter
    mesh: Mesh
    updates: int  # at its end
    steps_per_update: int  # agent steps, over all shards
    env_steps_per_update: int
    shards: batch_shards.Shards
    origin: Origin = BEGINNING
    members: tuple[Member, ...] = ()  # of a population; steps are those of each
    begin: populations.Start | None = None  # how it begins

    def start(self, seed: int, context: PyTree) -> Progress:
        if self.begin is not None:
            return self.begin(population.own(self.members), members.keys(self.members), context)
        return fused.start(self.algorithm, self.enter, context, jax.random.key(seed), self.mesh)

    def policy(self, state: PyTree) -> Params:
        """What acts; of a population with a leading axis of members."""
        return jax.vmap(self.algorithm.policy)(state).state if self.members else self.algorithm.policy(state)

    def agent_steps(self, updates: int) -> int:
        """Of a run that has made `updates`, which are no fewer than its origin's."""
        return self.origin.agent_steps + (updates - self.origin.updates) * self.steps_per_update

    def env_steps(self, updates: int) -> int:
        return self.origin.env_steps + (updates - self.origin.updates) * self.env_steps_per_update


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve(run: Run) -> Run:
    """`run` with every None decided and every size checked. Raises RunError naming value, bound and remedy."""
    check_numbers(run)
    if isinstance(run.environment, Driving):
        check_driving(run.environment)
    check_reasoning(run)
    run = reasoning_setup.fitted(run)
    if run.topology not in TOPOLOGIES:
        raise RunError(f"--topology is {run.topology!r}; it must be one of {', '.join(TOPOLOGIES)}")
    check_expert(run)
    siblings = population.of(run)
    runs = len(siblings)
    devices, processes = run.devices or _default_devices(run, runs), process_group.count()
    if run.many and runs % devices:
        raise RunError(
            f"--mesh is {run.mesh}, whose devices can't share {runs} runs evenly; choose data=N with N a divisor"
        )
    if run.num_envs % devices and not run.many:
        raise RunError(
            f"--num-envs is {run.num_envs}, which {devices} devices can't share evenly; "
            f"choose a multiple of {devices}, or --mesh {MeshShape(1, run.model)}"
        )
    acting = _acting(run, devices)
    if run.deterministic and (odd := batch_shards.refusal(devices, run.num_envs)):
        raise RunError(odd)
    if run.deterministic and run.model > 1:
        raise RunError(
            f"--deterministic with --mesh {MeshShape(devices, run.model)}: sums over the model axis have no fixed "
            "order; choose model=1"
        )
    columns = run.num_envs // parts(run, devices) * agents(run)
    if columns * run.num_steps > MOST:
        raise RunError(
            f"--num-envs x agents x --num-steps is {columns * run.num_steps} on a device; it must be at most {MOST}"
        )
    steps = run.num_envs * agents(run) * run.num_steps
    algorithm = _learning(run, steps, columns)
    try:
        sizes = Sizes(parts(run, devices), columns, run.num_steps)
        for values in ({}, *(member.values for member in siblings if run.population.sweep)):
            registry.check(_valued(algorithm, values), sizes)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise RunError(f"--{flag(name)} {rest}") from error
    updates = run.total_steps // steps
    if not 1 <= updates <= MOST:
        raise RunError(
            f"--total-steps is {run.total_steps}, which is {updates} updates of {steps} "
            f"(num_envs x agents x num_steps); give {steps} to {steps * MOST}"
        )
    log_interval, block = _intervals(run, updates, steps * runs)
    together = run.population.together or (1 if on_cpu() else runs // devices)
    many = dataclasses.replace(run.population, together=together) if run.many else run.population
    task = run.environment
    if files := registry.recorded(algorithm):
        assert isinstance(algorithm, BCConfig)
        algorithm = dataclasses.replace(algorithm, recorded=_absolute(files))
    if isinstance(task, Driving):  # found again from wherever the run is gone on with
        task = dataclasses.replace(
            task, data=_absolute(task.data), bank_updates=_bank_updates(task, run.num_envs * run.num_steps)
        )
    episodes = run.evaluation_episodes or EPISODES.get(type(task), 100)
    return dataclasses.replace(
        run, environment=task, algorithm=algorithm, acting=acting, base_batch=run.base_batch or steps, devices=devices,
        threads=run.threads or _default_threads(-(-devices * run.model // processes)) * processes,
        log_interval=log_interval, block=block, evaluation_episodes=episodes, population=many,
    )  # fmt: skip


def _absolute(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths)


def _acting(run: Run, devices: int) -> Acting:
    """Who acts, where that is no matter of the learner's program."""
    if run.topology == "fused":
        if isinstance(run.environment, Named) and host_rollout.is_hosted(run.environment.env):
            raise RunError(f"--env {run.environment.env} is stepped on the host; choose --topology actors or central")
        return run.acting
    if run.deterministic:
        raise RunError("--deterministic needs --topology fused; actors repeat with --staleness 0, or with --pin")
    if run.model > 1:
        raise RunError(f"--mesh is {run.mesh}, and the learner of {run.topology} has whole parameters: choose model=1")
    if process_group.together():
        raise RunError(f"--topology is {run.topology}, which trains in one process; leave longhaul launch out")
    if run.topology == "central":
        return _served(run, devices)
    if isinstance(run.environment, Driving):
        if run.environment.bank is not None:
            raise RunError("--bank needs --topology fused; leave it out, and all scenarios are held")
        if run.acting.actor_kind != "thread":
            kind = run.acting.actor_kind
            raise RunError(f"--actor-kind is {kind}, and driving's scenarios lie in one; choose --actor-kind thread")
    try:
        return layouts.decided(run.acting, envs=run.num_envs, devices=devices, cores=cores())
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise RunError(f"--{flag(name)} {rest}") from error


def _served(run: Run, devices: int) -> Acting:
    """Who acts by central inference."""
    if isinstance(run.environment, Driving):
        raise RunError("--topology is central, whose actors have no scenarios; choose fused or actors for driving")
    if run.acting.pin:
        raise RunError("--pin is on, and central inference acts with the newest weights; choose --topology actors")
    if not 1 <= run.central.slots <= lanes.MOST_SLOTS:
        raise RunError(f"--slots is {run.central.slots}; it must lie in 1 to {lanes.MOST_SLOTS}")
    groups = run.central.slots * devices  # columns of a batch are cut among devices, and among groups
    acting = run.acting
    if acting.actors is None:
        fit = [n for n in range(1, cores() + 1) if run.num_envs % (n * groups) == 0]
        acting = dataclasses.replace(acting, actors=fit[-1] if fit else 1)
    assert acting.actors is not None
    try:
        if not 1 <= acting.actors <= layouts.MOST:
            raise ValueError(f"actors is {acting.actors}; it must lie in 1 to {layouts.MOST}")
        if acting.staleness is not None and acting.staleness < 0:
            raise ValueError(f"staleness is {acting.staleness}; it must be at least 0, or none")
        lanes.check(run.central, envs=run.num_envs, actors=acting.actors, kind=acting.actor_kind)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise RunError(str(error) if name.startswith("--") else f"--{flag(name)} {rest}") from error
    return acting


def _learning(run: Run, steps: int, columns: int) -> AlgorithmConfig:
    """The algorithm with minibatches and epochs for a batch of `steps` steps, `columns` columns of it on a device."""
    config = run.algorithm
    if isinstance(config, OffPolicy | Reasoner | APGConfig):
        return config
    rows = columns if config.memory else columns * run.num_steps
    given = config.num_minibatches, config.update_epochs
    minibatches, epochs = batch_scaling.decide(steps, rows, run.scaling, *given)
    return dataclasses.replace(config, num_minibatches=minibatches, update_epochs=epochs)


def _bank_updates(task: Driving, steps: int) -> int | None:
    """So many updates of `steps` steps that each scenario of the bank is driven about `VISITS` times."""
    if task.bank is None or task.bank_updates is not None:
        return task.bank_updates
    return -(-VISITS * task.bank * min(EPISODE, task.horizon or EPISODE) // steps)


def _intervals(run: Run, updates: int, steps: int) -> tuple[int, int]:
    """(updates of a record, updates of a compiled call); a record sums up whole calls."""
    # Many small updates a call, so that the host costs nothing; but some calls a second, so that it can stop and save.
    wanted = min(run.log_interval or updates, updates)
    block = max(1, min(run.block or min(64, 32_768 // steps, run.save_interval or updates), wanted))
    if run.log_interval is None:
        return block * -(-updates // (block * MOST_RECORDS)), block
    whole = next(n for n in range(block, 0, -1) if wanted % n == 0)
    if 3 * whole >= block:
        return wanted, whole
    calls = -(-wanted // block)  # a record of a little less, rather than calls that are far too short
    return calls * (wanted // calls), wanted // calls


def _default_devices(run: Run, runs: int) -> int:
    """Shards on all local devices. On a CPU one a core, where batches are large enough to be worth cutting.

    Of a population as many as share its `runs` evenly.
    """
    if run.many:
        there = cores() if on_cpu() else jax.local_device_count()
        return max(n for n in range(1, min(there, runs) + 1) if runs % n == 0)
    processes, model = process_group.count(), run.model
    if on_cpu() and run.topology != "fused":  # actors have the cores
        return 1
    if on_cpu():
        columns = run.num_envs * (agents(run) if isinstance(run.environment, Reasoning) else 1)
        own = int(os.environ.get(process_group.DEVICES, 0)) or (cores() if columns >= 64 else 1)
    else:
        own = jax.local_device_count()

    def odd(all_: int) -> bool:
        shares = max(1, all_ // model)
        return bool(all_ % model or run.num_envs % shares or (run.deterministic and batch_shards.VIRTUAL % shares))

    while own > 1 and odd(processes * own):
        own -= 1
    return max(1, processes * own // model)


def on_cpu() -> bool:
    """Whether a run computes on the CPU, told without starting JAX."""
    return os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not _has_accelerator()


def _has_accelerator() -> bool:
    """Whether a GPU or TPU is there, told without starting JAX (which then could not make several CPU devices)."""
    return any(Path(place).exists() for place in ("/dev/nvidia0", "/dev/kfd", "/dev/accel0", "/dev/vfio/0"))


def _default_threads(devices: int) -> int:
    given = os.environ.get("NPROC", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    # One thread: a pool of them only gets in the way of many small kernels (1.4 times slower at 4 environments).
    # Where kernels are an accelerator's, threads of the host compile them.
    return 1 if devices == 1 and on_cpu() else max(cores(), devices)


def prepare_devices(devices: int, threads: int | None = None, inline: bool = False) -> None:
    """Makes the CPU show `devices` devices, with `threads` in all. Call it before JAX runs; then it changes nothing.

    They are those of both axes of the mesh; of several processes each has an equal part of both. `inline`: the CPU's
    programs run in the thread that calls them: where small ones follow on each other, handing each to a thread of JAX's
    and waiting for it costs as much as what it computes.
    """
    if inline:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    processes, all_devices = process_group.count(), devices
    if devices % processes:
        raise RunError(
            f"--mesh is of {devices} devices, which {processes} processes can't share evenly; choose a multiple of "
            f"{processes}, or another number of processes"
        )
    devices //= processes
    threads = threads or _default_threads(devices) * processes
    os.environ["NPROC"] = str(threads if processes == 1 else max(threads // processes, devices))
    compile_cache.keep(int(os.environ["NPROC"]), on_cpu=on_cpu(), process=process_group.index())
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if len(jax.devices()) < all_devices:
            there = len(jax.devices())
            raise RunError(f"{all_devices} devices are wanted, and JAX already runs with {there}") from None


def assemble(
    run: Run, within: Callable[[PyTree], Environment | World], context: PyTree, origin: Origin = BEGINNING
) -> Assembly:
    """The functions of a resolved run, from `origin` on.

    What environments read and never write is their context, () for most; `within` gives the environment in a context,
    also while a program is traced. `context` is one of them: all have the same shapes and the same spec.
    """
    assert run.devices is not None
    mesh = meshes.make_mesh(*run.mesh)
    parted = (
        batch_shards.alone()
        if run.many
        else batch_shards.virtual(mesh)
        if run.deterministic
        else batch_shards.by_device(mesh)
    )
    count = run.acting.actors if run.topology == "actors" and run.acting.actors else parted.number
    worlds = run.num_envs // count
    spec = within(context).spec
    steps = run.num_envs * agents(run) * run.num_steps
    updates = last_update(run, origin)
    sizes = Sizes(parted.number, run.num_envs // parted.number * agents(run), run.num_steps)

    def make(values: Mapping[str, Any]) -> Algorithm:
        config = _valued(run.algorithm, values)
        return registry.make(
            spec, dataclasses.replace(config, lr=_scaled(run, config.lr)), updates=updates, mean=parted.mean,
            apart=parted.apart, first=origin.updates, done=origin.agent_steps / run.total_steps, split=run.model > 1,
            sizes=sizes,
        )  # fmt: skip

    siblings = population.of(run) if run.many else ()
    algorithm, init = members.tuned(make, siblings) if siblings else (make({}), None)
    partition.check(jax.eval_shape(algorithm.init, jax.random.key(0)), run.mesh)

    tiny = run.many and isinstance(within(context), classic_control.Classic) and worlds <= 64
    unroll = UNROLL if tiny else 1

    def collector_in(context: PyTree) -> Collector:
        if isinstance(context, offline_data.Recorded):
            return offline_data.collector(context, columns=worlds * agents(run), steps=run.num_steps)
        world = within(context)
        if isinstance(world, World):
            return completing(run, world, worlds)
        many, guide = vectorise(world, worlds), _guide(run, world, worlds)
        if through := registry.pathwise(run.algorithm):
            how: dict[str, Any] = {"gamma": through.gamma, "detach": through.detach}
            return pathwise(many, algorithm.act, algorithm.memory, steps=run.num_steps, **how)
        return collector(many, algorithm.act, algorithm.memory, steps=run.num_steps, unroll=unroll, guide=guide)

    enter, env_steps = fused.entering(collector_in, mesh, parted), run.num_envs * run.num_steps
    if run.topology == "actors":
        if isinstance(run.environment, Named) and host_rollout.is_hosted(run.environment.env):
            enter = host_rollout.entering(
                run.environment.env, algorithm, host_rollout.Sizes(worlds, run.num_steps), count
            )
        else:
            enter = acted.entering(collector_in, count)
        enter = acted.kept(enter, layouts.rule(run.acting, updates).pinned, algorithm)
    if run.topology == "central":
        enter = lambda key, context: ()  # noqa: E731  environments are the actors'
        if run.acting.staleness == 0 and isinstance(run.environment, Named) and run.acting.actors is not None:
            groups = run.acting.actors * run.central.slots
            enter = host_rollout.standing(
                run.environment.env, named(run.environment), algorithm, groups, run.num_envs // groups
            )
    begin = populations.starting(init, collector_in, mesh) if init is not None else None
    return Assembly(
        spec, algorithm, collector_in, enter, mesh, updates, steps, env_steps, parted, origin, siblings, begin
    )


def completing(run: Run, world: World, prompts: int) -> Collector:
    """Completions of so many problems of a bank."""
    config, task = run.algorithm, run.environment
    assert isinstance(config, Reasoner) and isinstance(task, Reasoning)
    how = sampler.Sampling(run.num_steps, config.group, config.temperature, task.wave)
    words = reasoning_setup.words(run)
    return sampler.collector(config.model, world.bank, how, prompts=prompts, words=words, exact=task.exact)


def _guide(run: Run, environment: Environment, worlds: int) -> Guide | None:
    """The expert of `worlds` worlds, where the algorithm asks one."""
    share = registry.guidance(run.algorithm)
    if share is None:
        return None
    assert isinstance(environment, Simulator), "check_expert lets no other pass"
    return Guide(advising(environment, worlds), share)


def last_update(run: Run, origin: Origin = BEGINNING) -> int:
    """The number of a run's last update: what is left of its steps from `origin` on, in whole updates."""
    return origin.updates + (run.total_steps - origin.agent_steps) // (run.num_envs * agents(run) * run.num_steps)


def decisions(run: Run) -> list[str]:
    """Lines on what followed from the batch of a resolved run."""
    config, steps = run.algorithm, run.num_envs * agents(run) * run.num_steps
    if isinstance(config, OffPolicy):
        each = config.batch_size * config.gradient_steps / steps
        return [f"each update adds {steps} steps to the replay; each step is learnt from {each:.3g} times on the mean"]
    if isinstance(config, Reasoner):
        return [f"each update learns from {run.num_envs} problems, {config.group} completions of each"]
    if isinstance(config, APGConfig):
        return [f"each update is one step along the gradient of {run.num_steps} steps of {run.num_envs} worlds"]
    assert run.devices is not None and config.num_minibatches is not None and config.update_epochs is not None
    rows = steps // parts(run, run.devices) // (run.num_steps if config.memory else 1)
    chosen = batch_scaling.Passes(config.num_minibatches, config.update_epochs)
    return batch_scaling.describe(steps, run.base_batch or steps, run.scaling, chosen, rows, run.lr_rule, config.lr)


def learning_rate(run: Run) -> float:
    """The learning rate of a resolved run at its batch, before it is annealed."""
    return float(_scaled(run, run.algorithm.lr))


def _valued(config: AlgorithmConfig, values: Mapping[str, Any]) -> AlgorithmConfig:
    return dataclasses.replace(config, **values)


def _scaled(run: Run, lr: Any) -> Any:
    """A learning rate, be it a number or an array, at the run's batch."""
    steps = run.num_envs * agents(run) * run.num_steps
    factor = batch_scaling.lr_factor(run.lr_rule, steps, run.base_batch or steps)
    return lr if factor == 1.0 else lr * factor
