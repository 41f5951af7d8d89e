"""Actor-learner training of a run: its actors, its learner and its updates.

Threads share the learner's environment. Processes build their own from the Run as plain data.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.algorithms import registry
from longhaul.algorithms.config import GRPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.config.resolve import named
from longhaul.config.run import Named, Run, from_dict, to_dict
from longhaul.environment import vectorise
from longhaul.envs.host import registry as hosted
from longhaul.envs.host.registry import is_hosted
from longhaul.envs.host.torch_vector import TorchVector
from longhaul.reasoning import sampler
from longhaul.reasoning.config import Reasoning
from longhaul.reasoning.problem_sets import World
from longhaul.rollout import collector, join
from longhaul.runtime import device_memory, files, process_group
from longhaul.runtime import mesh as meshes
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.launch import ray_cluster
from longhaul.topologies import fused
from longhaul.topologies.actor_learner import config, device_rollout, host_rollout, learner, placement
from longhaul.topologies.actor_learner.actor import Collect, Leaves
from longhaul.topologies.actor_learner.actor_pool import ActorPool
from longhaul.topologies.actor_learner.config import LIVE
from longhaul.topologies.staleness import Ticket
from longhaul.training import reasoning_setup, rollout_servers
from longhaul.training.assemble import Assembly, completing
from longhaul.types import Algorithm, Collector, Metrics, Params, Progress, PyTree

EVERY = 1.0
"""Seconds between two writes of `LIVE`."""


class CompiledActorLearner(NamedTuple):
    """A run's compiled learner and the specification of its actors."""

    update: jax.stages.Compiled
    acting: learner.CompiledActor


def prepare(run: Run, assembly: Assembly, context: PyTree, progress: Progress) -> CompiledActorLearner:
    """Learner compiled for a run whose state looks like `progress`."""
    if run.acting.actor_kind == "ray":
        ray_cluster.check(run.acting.ray_address, ray_cluster.ACTORS)
    assert run.acting.actors is not None
    placed(run, assembly)  # a missing device is reported first
    policy = jax.eval_shape(assembly.algorithm.policy, progress.state)
    held = None
    if shares(run, assembly):
        parts = learner.parted(policy, assembly.algorithm, shared=True)
        held = parts, parts.split(assembly.algorithm.policy(progress.state))[1]
    collector_in = assembly.collector_in
    if isinstance(run.environment, Reasoning):  # problems stay the same: they are a part of the program
        collector_in, context = _always(assembly.collector_in(context)), ()
    acting = _compiled_actor(run, assembly.algorithm, policy, collector_in, held, context)
    if run.acting.rollout_servers:
        acting = rollout_servers.specification(acting, policy)
    together = sampler.together if isinstance(run.environment, Reasoning) else join
    update = learner.compiled(assembly.algorithm, acting, together, progress, assembly.mesh, actors=run.acting.actors)
    return CompiledActorLearner(update, acting)


def shares(run: Run, assembly: Assembly) -> bool:
    """True where the actors of a language model hold its fixed arrays together with the learner: in threads beside it,
    on its device, the first. Servers that sample are sent all of them."""
    if run.topology != "actors" or run.acting.actor_kind != "thread" or not isinstance(run.environment, Reasoning):
        return False
    if run.acting.rollout_servers:
        return False
    pinned = config.rule(run.acting, assembly.updates, assembly.origin.updates).pinned
    return not pinned and assembly.mesh.size == 1 and not any(run.acting.actor_devices)


def policy_on_host(run: Run, assembly: Assembly, state: PyTree) -> Params:
    """Policy of a state on the host, where no update overwrites it; arrays that actors share are not copied.

    On a mesh of several processes all of them must call this.
    """
    policy, mesh = assembly.policy(state), assembly.mesh
    if shares(run, assembly):
        parts = learner.parted(policy, assembly.algorithm, shared=True)
        changing, fixed = parts.split(policy)
        return parts.join(_host_copy(changing), fixed)
    # Parts on several devices are joined on the host; those of other processes must be gathered first.
    return _host_copy(meshes.gathered(policy, mesh) if mesh.is_multi_process else policy)


def _host_copy(tree: PyTree) -> PyTree:
    """Copy on the host: a buffer of `device_get` may be donated next."""
    return jax.tree.map(np.array, jax.device_get(tree))


def placed(run: Run, assembly: Assembly) -> list[jax.Device]:
    """Device of each of this process's actors; [] where they are not threads of it."""
    assert run.acting.actors is not None
    count = len(learner.process_places(run.acting.actors))
    if run.acting.actor_kind != "thread" or run.acting.rollout_servers:
        return []
    return placement.devices(assembly.mesh, count, (0,) if shares(run, assembly) else run.acting.actor_devices)


def acts_on_learner(run: Run, assembly: Assembly) -> bool:
    """True if an actor in a thread acts on a device that learns."""
    return not set(placed(run, assembly)).isdisjoint(assembly.mesh.local_devices)


def beside(run: Run, assembly: Assembly, prepared: CompiledActorLearner, state: PyTree) -> dict[str, int]:
    """Bytes that a language model's run takes beside the learner's program, where actors are threads on the learner's
    CPU: the process as it stands with its tools, the travelling weights, and what sampling needs more than learning.
    Turns come one after the other: the one that needs most counts. Small blocks stay with the thread that took them:
    learning has none of them.

    Of a small model the start takes more than updates, since it compiles: then `the start` is what it took more. An
    evaluation compiles as much, after the updates.
    """
    update, acting = device_memory.need(prepared.update), prepared.acting
    programs = [device_memory.need(each) for each in (acting.program, acting.finishing) if each is not None]
    sampling = [each for each in programs if each is not None]
    if update is None or not sampling or assembly.mesh.local_devices[0].platform != "cpu":
        return {}
    rule, weights = config.rule(run.acting, assembly.updates, assembly.origin.updates), acting.shapes.weight_bytes
    learns = update.temporaries + update.outputs - update.donated
    samples = rule.places * (max(each.temporaries + each.outputs for each in sampling) + weights)
    kept = rule.places * sum(each.temporaries for each in sampling if each.temporaries <= device_memory.KEPT)
    sizes = {
        "the process": max(0, device_memory.resident() - device_memory.bytes_on_device(state)),
        "weights on their way": (rule.depth + rule.places) * weights,
        "sampling": max(samples - learns, kept) if rule.staleness == 0 else samples,  # in turn, or side by side
    }
    more = device_memory.peak() - update.total - sum(sizes.values())
    return sizes | {"the start": more} if more > 0 else sizes


def process(plain: dict[str, Any], first: int, actor: int) -> Collect:
    """Rollout function of an actor, built in its own process from a Run as plain data. `first`: place in the batch of
    its pool's place 0."""
    run: Run = from_dict(Run, plain)
    prepare_devices(1, 1)
    assert isinstance(run.environment, Named | Reasoning) and run.acting.actors is not None
    task, share = run.environment, run.num_envs // run.acting.actors
    environment = reasoning_setup.world(run, reasoning_setup.bank(run)) if isinstance(task, Reasoning) else named(task)
    algorithm = registry.make(environment.spec, run.algorithm, RunContext(updates=1, mean=meshes.identity))
    policy = jax.eval_shape(lambda key: algorithm.policy(algorithm.init(key)), jax.random.key(0))

    if isinstance(environment, World):
        on_device = _always(completing(run, environment, share))
    else:

        def on_device(context: PyTree) -> Collector:
            return collector(vectorise(environment, share), algorithm.act, algorithm.memory, steps=run.num_steps)

    return learner.placed(_compiled_actor(run, algorithm, policy, on_device).collect, first)


def _always(known: Collector) -> fused.CollectorIn:
    """The same collector in every context."""
    return lambda context: known


def _compiled_actor(
    run: Run,
    algorithm: Algorithm,
    policy: PyTree,
    on_device: fused.CollectorIn | None = None,
    held: tuple[learner.Parted, list[jax.Array]] | None = None,
    context: PyTree = (),
) -> learner.CompiledActor:
    """Actor of `run`: on the host for host environments, else around the collector that `on_device` returns in contexts
    like `context`."""
    if not isinstance(run.environment, Named) or not is_hosted(run.environment.env):
        assert on_device is not None
        last = reasoning_setup.finisher(run)
        acting = learner.acting(on_device, policy, None if last is None else last.finish, held, context)
        if last is not None and held is not None:
            acting = acting._replace(finishing=last.ahead(policy, acting.data))
        if not isinstance(run.algorithm, GRPOConfig) or not run.algorithm.resample:
            return acting
        options = acting.data, run.algorithm.group, run.algorithm.resample
        return acting._replace(collect=reasoning_setup.resampling(acting.collect, *options))
    assert run.acting.actors is not None
    sizes = host_rollout.Sizes(run.num_envs // run.acting.actors, run.num_steps)
    return host_rollout.acting(run.environment.env, algorithm, policy, sizes)


class Scenarios(NamedTuple):
    """Scenarios of a driving run, which all actors of a device share."""

    now: Callable[[], PyTree]  # on the devices of the actors, see `data.layout`
    enter: learner.Entered  # changes them; no actor acts then

    def driven(self, acting: learner.CompiledActor, device: jax.Device) -> Collect:
        """Rollout function of an actor on `device`, in the scenarios of its time."""

        def collect(weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int) -> Any:
            return acting.collect(weights, state, key, ticket, version, context=placement.copy_on(device, self.now()))

        return collect


class Opened(NamedTuple):
    """A run's actors at work."""

    pool: ActorPool
    calls: Iterator[tuple[Progress, int, Metrics]]  # all remaining updates, as in `fused.fused`

    def processes(self) -> list[int]:
        return [row["process"] for row in self.pool.report()["actors"] if row["process"] not in (0, os.getpid())]


def opened(
    run: Run,
    folder: Path,
    assembly: Assembly,
    prepared: CompiledActorLearner,
    progress: Progress,
    closed: ExitStack,
    leaving: Callable[[], bool] = lambda: False,
    scenarios: Scenarios | None = None,
) -> Opened:
    """Actors of the run in `folder`, started; closing `closed` stops them. Once `leaving`, calls end instead of
    waiting for actors. `scenarios`: of a driving run."""
    policy = jax.eval_shape(assembly.algorithm.policy, progress.state)
    assert run.acting.actors is not None
    own, where = learner.process_places(run.acting.actors), placed(run, assembly)

    def make(actor: int) -> Collect:
        collect = learner.placed(made(actor), own.start)
        return placement.on(where[actor], collect) if where else collect

    def made(actor: int) -> Collect:
        if isinstance(run.environment, Named) and is_hosted(run.environment.env):  # a vector belongs to one thread
            return _compiled_actor(run, assembly.algorithm, policy).collect
        if scenarios is not None:
            return scenarios.driven(prepared.acting, where[actor])
        return prepared.acting.collect if served is None else served.collecting(lambda: pool.beat(actor))

    kind, rule = run.acting.actor_kind, config.rule(run.acting, assembly.updates, assembly.origin.updates)
    rule = rule._replace(places=len(own))
    making = make if kind == "thread" else functools.partial(process, to_dict(run), own.start)
    if kind == "ray":
        closed.enter_context(ray_cluster.joined(run.acting.ray_address, ray_cluster.ACTORS))
    served = _with_rollout_servers(run, folder, prepared.acting, policy, closed, lambda line: pool.news.append(line))
    pool = closed.enter_context(closing(ActorPool(rule, prepared.acting.shapes, making, kind=kind)))
    if served is not None:
        closed.callback(served.leave)
    shared = prepared.acting.shared
    calls = learner.actors(
        prepared.update, assembly.mesh, pool, progress,
        learner.weights_of(assembly.algorithm, assembly.mesh, shared=shared), updates=assembly.updates, leaving=leaving,
        parts=learner.parted(progress.state, assembly.algorithm, shared=shared),
        enter=None if scenarios is None else scenarios.enter,
    )  # fmt: skip
    return Opened(pool, calls)


class Served(NamedTuple):
    """Servers that sample a run's completions."""

    collecting: Callable[[Callable[[], object]], Collect]  # of an actor's sign of life
    leave: Callable[[], None]  # ends the rollouts that are under way


def _with_rollout_servers(
    run: Run,
    folder: Path,
    acting: learner.CompiledActor,
    policy: PyTree,
    closed: ExitStack,
    note: Callable[[str], None],
) -> Served | None:
    """Servers of a run in `folder`; None for a run that samples itself."""
    if not run.acting.rollout_servers:
        return None
    bank, tokeniser, mark = reasoning_setup.bank(run), reasoning_setup.tokeniser(run), reasoning_setup.marker(run)
    fleet = rollout_servers.opened(run, folder, closed, note, tokeniser)

    def collecting(beat: Callable[[], object]) -> Collect:
        return rollout_servers.collecting(run, bank, tokeniser, mark, fleet, acting, policy, beat)

    return Served(collecting, fleet.servers.close)


def calls(
    run: Run,
    folder: Path,
    assembly: Assembly,
    prepared: CompiledActorLearner,
    progress: Progress,
    note: Callable[[str], None],
    leaving: Callable[[], bool] = lambda: False,
    scenarios: Scenarios | None = None,
) -> Generator[tuple[Progress, int, Metrics]]:
    """All remaining updates, as in `fused.fused`, or those until `leaving`. Notes news of actors and writes `LIVE`.
    Closing it stops them."""
    if run.acting.actor_kind == "device":
        yield from _on_device(run, assembly, prepared, progress, leaving)
        return
    with ExitStack() as closed:
        if process_group.index() == 0:
            closed.callback((folder / LIVE).unlink, missing_ok=True)

        def left() -> bool:
            """Notes news while the learner waits, too."""
            while pool.news:
                note(pool.news.pop(0))
            return leaving()

        where = placed(run, assembly)
        if where:
            note(placement.describe(where))
        pool, updates = opened(run, folder, assembly, prepared, progress, closed, left, scenarios)
        written = 0.0
        for progress, n, rows in updates:
            left()
            if time.monotonic() - written >= EVERY and process_group.index() == 0:
                written = time.monotonic()
                now = {name.partition("/")[2]: float(rows[name][0]) for name in rows if name.startswith("actors/")}
                state = pool.report() | {"kind": run.acting.actor_kind, "staleness": run.acting.staleness}
                for row, device in zip(state["actors"], where):
                    row["device"] = placement.name(device)
                state |= {"steps_per_update": assembly.steps_per_update, "bottleneck": bottleneck(now), "metrics": now}
                with suppress(OSError):  # the run goes on without this file
                    files.write(folder / LIVE, json.dumps(files.finite(state)))
            yield progress, n, rows


def _on_device(
    run: Run, assembly: Assembly, prepared: CompiledActorLearner, progress: Progress, leaving: Callable[[], bool]
) -> Generator[tuple[Progress, int, Metrics]]:
    """All remaining updates of a run whose learner steps the environment on its device by itself."""
    assert isinstance(run.environment, Named) and run.acting.actors is not None
    worlds, place = run.num_envs // run.acting.actors, learner.process_places(run.acting.actors).start
    key_data = np.asarray(jax.random.key_data(progress.key))
    with closing(hosted.make(hosted.describe(run.environment.env), worlds)) as vector:
        assert isinstance(vector, TorchVector)
        collector = device_rollout.Collector(
            assembly.algorithm, prepared.acting.data, vector, run.num_steps, place, key_data
        )
        yield from device_rollout.on_device(
            prepared.update, assembly.algorithm, assembly.mesh, collector, progress, updates=assembly.updates,
            leaving=leaving,
        )  # fmt: skip


def bottleneck(metrics: dict[str, float]) -> str:
    """Bottleneck by an update's metrics (without "actors/"): the learner, or the slowest part of the actors."""
    if metrics["actor_wait"] > metrics["learner_wait"]:
        return "learner"
    inner = {name: metrics.get(f"{name}_seconds", 0.0) for name in ("environment", "inference")}
    return max(inner, key=lambda name: inner[name]) if any(inner.values()) else "actors"
