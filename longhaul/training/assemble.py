"""Assembly of a resolved run: environment, algorithm and topology as functions on the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from longhaul.algorithms import batch_scaling, external, registry
from longhaul.algorithms.config import APGConfig, OffPolicy, Reasoner
from longhaul.algorithms.run_context import RunContext
from longhaul.config import population
from longhaul.config.population import Member
from longhaul.config.resolve import agents, members_of, parts
from longhaul.config.run import BEGINNING, Named, Origin, Run
from longhaul.driving.sim.simulator import Simulator
from longhaul.environment import advising, vectorise
from longhaul.envs import classic_control, differentiability
from longhaul.envs.host import jax_vector
from longhaul.envs.host.registry import is_hosted
from longhaul.reasoning import sampler
from longhaul.reasoning.config import Reasoning
from longhaul.reasoning.problem_sets import World
from longhaul.replay import Sizes
from longhaul.rollout import Guide, collector, pathwise
from longhaul.runtime import batch_shards, device_memory, partition
from longhaul.runtime import mesh as meshes
from longhaul.topologies import fused, fused_population
from longhaul.topologies.actor_learner import config as layouts
from longhaul.topologies.actor_learner import host_rollout
from longhaul.topologies.actor_learner import learner as acted
from longhaul.topologies.inference_server import learner as served
from longhaul.training import members, offline_data, reasoning_setup
from longhaul.types import Algorithm, Collector, Environment, Params, Progress, PyTree, Spec

UNROLL = 4
"""Rollout steps compiled as one in populations of classic control, where a step is so small that the loop itself costs.
Elsewhere unrolling only takes longer to compile."""


class Assembly(NamedTuple):
    """A Run as functions, on its mesh."""

    spec: Spec
    algorithm: Algorithm
    collector_in: fused.CollectorIn
    enter: fused.Enter
    mesh: Mesh
    updates: int  # at the run's end
    steps_per_update: int  # agent steps, over all shards
    env_steps_per_update: int
    shards: batch_shards.Shards
    origin: Origin = BEGINNING
    members: tuple[Member, ...] = ()  # of a population; steps are those of each member
    begin: fused_population.Start | None = None  # start of a population
    within: Callable[[PyTree], Any] = lambda context: context  # environment, or problems, in a context

    def start(self, seed: int, context: PyTree) -> Progress:
        if self.begin is not None:
            return self.begin(population.values_of(self.members), members.keys(self.members), context)
        return fused.start(self.algorithm, self.enter, context, jax.random.key(seed), self.mesh)

    def policy(self, state: PyTree) -> Params:
        """Parameters that act; of a population with a leading axis of members."""
        return jax.vmap(self.algorithm.policy)(state).state if self.members else self.algorithm.policy(state)

    def agent_steps(self, updates: int) -> int:
        """Agent steps after `updates` updates; `updates` must not be below the origin's."""
        return self.origin.agent_steps + (updates - self.origin.updates) * self.steps_per_update

    def env_steps(self, updates: int) -> int:
        return self.origin.env_steps + (updates - self.origin.updates) * self.env_steps_per_update


def assemble(
    run: Run, within: Callable[[PyTree], Environment | World], context: PyTree, origin: Origin = BEGINNING,
    mesh: Mesh | None = None,
) -> Assembly:  # fmt: skip
    """Functions of a resolved run from `origin` on.

    A context is the data that environments read and never write; () for most. `within` returns the environment of a
    context, also under tracing. `context` is an example: all have the same shapes and the same spec. `mesh`: default
    one of this process's devices.
    """
    assert run.devices is not None
    mesh = mesh or meshes.make_mesh(*run.mesh)
    parted = _shards(run, mesh)
    count = run.acting.actors if run.topology == "actors" and run.acting.actors else parted.number
    worlds = run.num_envs // count
    spec = within(context).spec
    steps = run.num_envs * agents(run) * run.num_steps
    updates = last_update(run, origin)
    make = functools.partial(_algorithm, run, spec, _context(run, parted, origin, updates))
    siblings = members_of(run) if run.many else ()
    algorithm, init = members.tuned(make, siblings) if siblings else (make({}), None)
    partition.check(jax.eval_shape(algorithm.init, jax.random.key(0)), run.mesh)
    if isinstance(run.algorithm, APGConfig):
        name = run.environment.env if isinstance(run.environment, Named) else run.recipe
        differentiability.check(name, within, context)

    collector_in = _collector_in(run, within, context, algorithm, worlds)
    if run.topology == "actors":
        enter = _entering_actors(run, algorithm, collector_in, mesh, worlds, count, updates)
    elif run.topology == "central":
        enter = _entering_server(run, within, algorithm)
    else:
        enter = fused.entering(collector_in, mesh, parted)
        meshes.check_compiler(lambda: jax.eval_shape(enter, jax.random.key(0), context), mesh)
    begin = fused_population.starting(init, collector_in, mesh, members.within(siblings)) if init is not None else None
    return Assembly(
        spec, algorithm, collector_in, enter, mesh, updates, steps, run.num_envs * run.num_steps, parted, origin,
        siblings, begin, within,
    )  # fmt: skip


def _shards(run: Run, mesh: Mesh) -> batch_shards.Shards:
    """Parts in which a run's batch is computed."""
    if run.many:
        return batch_shards.alone()
    return batch_shards.virtual(mesh) if run.deterministic else batch_shards.by_device(mesh)


def _context(run: Run, parted: batch_shards.Shards, origin: Origin, updates: int) -> RunContext:
    """Context of a run's algorithm, whose means are over the shards of a batch."""

    def mean(tree: PyTree) -> PyTree:
        """Mean over shards, in its parameters' layout where they are split over `fsdp`."""
        return partition.laid(parted.mean(tree), run.mesh) if run.fsdp else parted.mean(tree)

    context = RunContext(
        updates, mean, parted.apart, origin.updates, origin.agent_steps / run.total_steps, run.mesh.parts > 1,
        in_buckets=parted.in_buckets,
        sizes=Sizes(parted.number, run.num_envs // parted.number * agents(run), run.num_steps),
    )  # fmt: skip
    return context._replace(spread=meshes.spread) if run.fsdp else context


def _algorithm(run: Run, spec: Spec, context: RunContext, values: Mapping[str, Any]) -> Algorithm:
    """Algorithm of a run, with a member's `values` of its settings."""
    config = dataclasses.replace(run.algorithm, **{n: v for n, v in values.items() if n != population.SCENARIOS})
    scaled = {"lr": scaled_rate(run, config.lr)} if run.lr_rule != "none" else {}
    return registry.make(spec, dataclasses.replace(config, **scaled), context)


def _collector_in(
    run: Run, within: Callable[[PyTree], Environment | World], example: PyTree, algorithm: Algorithm, worlds: int
) -> fused.CollectorIn:
    """Function of a context that returns the collector of a part of the batch, `worlds` worlds or problems."""
    tiny = run.many and isinstance(within(example), classic_control.Classic) and worlds <= 64
    collect = functools.partial(collector, steps=run.num_steps, unroll=UNROLL if tiny else 1)
    share = registry.guidance(run.algorithm)

    def collector_in(context: PyTree) -> Collector:
        if isinstance(context, offline_data.Recorded):
            return offline_data.collector(context, columns=worlds * agents(run), steps=run.num_steps)
        world = within(context)
        if isinstance(world, World):
            return completing(run, world, worlds)
        many = vectorise(world, worlds)
        if isinstance(run.algorithm, APGConfig):
            settings: dict[str, Any] = {"gamma": run.algorithm.gamma, "detach": run.algorithm.detach}
            return pathwise(many, algorithm.act, algorithm.memory, steps=run.num_steps, **settings)
        guide = None
        if share is not None:
            assert isinstance(world, Simulator), "check_expert lets no other pass"
            guide = Guide(advising(world, worlds), share)
        return collect(many, algorithm.act, algorithm.memory, guide=guide)

    return collector_in


def _entering_actors(
    run: Run, algorithm: Algorithm, collector_in: fused.CollectorIn, mesh: Mesh, worlds: int, count: int, updates: int
) -> fused.Enter:
    """Function that begins the `worlds` worlds of each of `count` actors."""
    if isinstance(run.environment, Named) and is_hosted(run.environment.env):
        sizes = host_rollout.Sizes(worlds, run.num_steps)
        enter = host_rollout.entering(run.environment.env, algorithm, sizes, count)
    else:
        enter = acted.entering(collector_in, count)
    own = acted.with_pinned_weights(enter, layouts.rule(run.acting, updates).pinned, algorithm)
    return lambda key, context: acted.joined_carry(own(key, context), mesh)


def _entering_server(run: Run, within: Callable[[PyTree], Any], algorithm: Algorithm) -> fused.Enter:
    """Function that begins nothing where actors hold the environments, and their states where nothing is stale."""
    if run.acting.staleness != 0 or run.acting.actors is None:
        return lambda key, context: ()
    groups = run.acting.actors * run.central.slots
    worlds = run.num_envs // groups

    def size(context: PyTree) -> int:
        return state_size(run, within, context, worlds)

    return served.entering(size, algorithm, groups, worlds * agents(run))


def state_size(run: Run, within: Callable[[PyTree], Any], context: PyTree, worlds: int) -> int:
    """Bytes of the state of `worlds` worlds, as an actor writes it; 0 if they report none."""
    if isinstance(run.environment, Named) and is_hosted(run.environment.env):
        return served.hosted_state_size(run.environment.env, worlds)
    return jax_vector.state_size(within(context), worlds, within, context)


def check_room(assembly: Assembly, context: PyTree, *, fused_too: bool) -> None:
    """Raises RunError if a run's state cannot fit on its devices, by its shapes, before any of it is allocated.

    With `fused_too` the environments' state counts too, which elsewhere is not on the devices.
    """
    enter = assembly.enter if fused_too else lambda key, context: ()
    begun = fused.outline(assembly.algorithm, enter, context, assembly.mesh)
    of_device = max(1, len(assembly.members) // assembly.mesh.size)
    device_memory.check_state(of_device * device_memory.bytes_on_device((begun.state, begun.carry)), assembly.mesh)


def completing(run: Run, world: World, prompts: int) -> Collector:
    """Collector of completions for `prompts` problems of a bank."""
    config, task = run.algorithm, run.environment
    assert isinstance(config, Reasoner) and isinstance(task, Reasoning)
    sampling, tokeniser = reasoning_setup.sampling(run), reasoning_setup.tokeniser(run)
    return sampler.collector(
        config.model, world.bank, sampling, prompts=prompts, tokeniser=tokeniser, exact=task.exact,
        gated=config.gate.threshold > 0.0,
    )  # fmt: skip


def last_update(run: Run, origin: Origin = BEGINNING) -> int:
    """Number of a run's last update: the steps left at `origin` in whole updates."""
    return origin.updates + (run.total_steps - origin.agent_steps) // (run.num_envs * agents(run) * run.num_steps)


def decisions(run: Run) -> list[str]:
    """Lines on settings derived from the batch of a resolved run."""
    config, steps = run.algorithm, run.num_envs * agents(run) * run.num_steps
    if isinstance(config, OffPolicy):
        uses = config.batch_size * config.gradient_steps / steps
        return [f"each update adds {steps} steps to the replay; each step is learnt from {uses:.3g} times on the mean"]
    if isinstance(config, Reasoner):
        return [f"each update learns from {run.num_envs} problems, {config.group} completions of each"]
    if isinstance(config, APGConfig):
        return [f"each update is one step along the gradient of {run.num_steps} steps of {run.num_envs} worlds"]
    if not external.in_minibatches(config):
        return []
    assert run.devices is not None and config.num_minibatches is not None and config.update_epochs is not None
    rows = steps // parts(run, run.devices) // (run.num_steps if external.memory(config) else 1)
    chosen = batch_scaling.Passes(config.num_minibatches, config.update_epochs)
    return batch_scaling.describe(steps, run.base_batch or steps, run.scaling, chosen, rows, run.lr_rule, config.lr)


def learning_rate(run: Run) -> float:
    """Learning rate of a resolved run at its batch, before annealing."""
    return float(scaled_rate(run, run.algorithm.lr))


def scaled_rate(run: Run, lr: Any) -> Any:
    """Learning rate, a number or an array, at the run's batch."""
    steps = run.num_envs * agents(run) * run.num_steps
    factor = batch_scaling.lr_factor(run.lr_rule, steps, run.base_batch or steps)
    return lr if factor == 1.0 else lr * factor
