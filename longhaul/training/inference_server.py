"""Central inference for a run: server, actors, and updates from their trajectories."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import jax
import numpy as np

from longhaul.config.resolve import agents
from longhaul.config.run import Driving, Named, Run
from longhaul.driving.sim import shared_bank
from longhaul.driving.sim.simulator import Simulator
from longhaul.envs.host import driving_vector, jax_vector, registry
from longhaul.envs.host.registry import is_hosted
from longhaul.envs.host.vector import Description
from longhaul.runtime.credentials import Credentials
from longhaul.runtime.errors import RunError
from longhaul.runtime.launch import ray_cluster
from longhaul.topologies import staleness
from longhaul.topologies.actor_learner import placement
from longhaul.topologies.actor_learner.learner import Entered
from longhaul.topologies.inference_server import actor_pool, learner, wire
from longhaul.topologies.inference_server.actor_pool import ActorPool, Orders, process
from longhaul.topologies.inference_server.config import load
from longhaul.topologies.inference_server.grpc_transport import GrpcTransport
from longhaul.topologies.inference_server.policy import BatchedPolicy
from longhaul.topologies.inference_server.server import Server
from longhaul.topologies.inference_server.shm_transport import ShmTransport
from longhaul.topologies.inference_server.trajectory_buffer import TrajectoryBuffer
from longhaul.topologies.inference_server.wire import NOTHING, Codec, Keeps
from longhaul.topologies.staleness import Book, Rule
from longhaul.training.assemble import Assembly, state_size
from longhaul.types import Key, Metrics, Progress, PyTree

Lane = ShmTransport | GrpcTransport


class Serving(NamedTuple):
    """A run's compiled policy and the buffer of its trajectories."""

    inference: BatchedPolicy
    book: Book
    store: TrajectoryBuffer
    codec: Codec
    scenarios: Scenarios | None = None  # known once a run is under way: others may follow


class Scenarios(NamedTuple):
    """Scenarios that a run's actors drive in."""

    environment: Simulator  # whose tables are NumPy arrays
    digest: str


class CompiledServer(NamedTuple):
    """A run's compiled learner, and the serving of its actors."""

    update: jax.stages.Compiled
    serving: Serving


def description(run: Run) -> Description:
    """Description from which an actor builds the run's environment by itself; generated scenarios are made again, and
    logs read again from the same paths."""
    task = run.environment
    if isinstance(task, Named):
        return registry.describe(task.env if is_hosted(task.env) else f"jax/{task.env}")
    assert isinstance(task, Driving)
    options: dict[str, Any] = {"horizon": task.horizon} if task.horizon is not None else {}
    if task.data:
        name, *more = task.data
        options |= {"objects": task.objects} | ({"more": tuple(more)} if more else {})
        options |= {"skip_bad": True} if task.skip_bad_logs else {}
    else:
        name, options = driving_vector.GENERATED, options | {"scenarios": task.scenarios}
        options |= {"least": task.least} if task.least > 1 else {}
    options |= driving_vector.changes(task.simulator)
    return Description(driving_vector.KIND, name, tuple(sorted(options.items())))


def prepare(run: Run, assembly: Assembly, context: PyTree, progress: Progress) -> CompiledServer:
    """Programs compiled for a run whose state looks like `progress`."""
    serving = serves(run, assembly, context, progress)
    data = serving.store.batch(serving.book.version)[0]
    return CompiledServer(learner.compiled(assembly.algorithm, data, progress, assembly.mesh), serving)


def placed(run: Run, assembly: Assembly) -> jax.Device:
    """Device on which the policy acts for all actors."""
    return placement.devices(assembly.mesh, 1, run.acting.actor_devices)[0]


def serves(run: Run, assembly: Assembly, context: PyTree, progress: Progress) -> Serving:
    """Serving without a learner."""
    if run.acting.actor_kind == "ray":
        ray_cluster.check(run.acting.ray_address, ray_cluster.ACTORS)
    assert run.acting.actors is not None
    groups, keeps = run.acting.actors * run.central.slots, NOTHING
    columns, within = run.num_envs // groups * agents(run), assembly.within
    if isinstance(run.environment, Named) and is_hosted(run.environment.env):
        with closing(registry.make(description(run), 1)) as vector:
            layout = wire.layout(vector.spec, columns)
    else:

        def scores(context: PyTree, key: Key) -> PyTree:
            environment = within(context)
            return environment.metrics(environment.reset(key)[0])

        layout = wire.layout(
            jax_vector.host_spec(within(context)), columns, tuple(jax.eval_shape(scores, context, jax.random.key(0)))
        )
    if run.acting.staleness == 0:  # to resume exactly, states of environments are sent, too
        size = state_size(run, within, context, run.num_envs // groups)
        keeps = Keeps(size, run.num_steps if size else 0)
    codec, algorithm = Codec(layout, keeps), assembly.algorithm
    device = placed(run, assembly)
    policy = learner.local(jax.jit(algorithm.policy)(progress.state), device)
    key_data = np.asarray(jax.random.key_data(learner.acting_key(progress)))
    key = jax.random.wrap_key_data(jax.device_put(key_data, device))
    with jax.default_device(device):
        inference = BatchedPolicy(
            algorithm.act, algorithm.memory, key, policy, assembly.spec.observation,
            groups=groups, columns=columns, fixed=run.acting.staleness == 0,
        )  # fmt: skip
    rule = Rule(groups, run.acting.staleness, until=assembly.updates)
    book = staleness.opened(rule, int(progress.updates))
    store = TrajectoryBuffer(
        inference.shapes, rooms=rule.ahead + 1, steps=run.num_steps, places=groups, columns=columns,
        interval=assembly.spec.truncation_interval,
    )  # fmt: skip
    return Serving(inference, book, store, codec)


def entered(serving: Serving, environment: Any, begun: int, until: int) -> Serving:
    """Serving from `begun` updates on to `until`, of actors that step `environment`; no actor is at work."""
    book = staleness.opened(serving.book.rule._replace(until=until), begun)
    if not isinstance(environment, Simulator):
        return serving._replace(book=book)
    digest = shared_bank.digest(environment.tables, environment.config)
    codec = Codec(serving.codec.layout._replace(data=digest), serving.codec.keeps)
    return serving._replace(book=book, codec=codec, scenarios=Scenarios(environment, digest))


def opened(
    run: Run, serving: Serving, begun: int, closed: ExitStack, note: Callable[[str], None]
) -> tuple[Server, Callable[[], list[int | None]]]:
    """Server with its actors, until `closed`; and a function that returns the ids of the actors' processes.

    `begun` updates are finished. Seeds depend on it and on the actor's restarts, so none repeats across a checkpoint.
    """
    on_ray = run.acting.actor_kind == "ray"
    if on_ray:
        closed.enter_context(ray_cluster.joined(run.acting.ray_address, ray_cluster.ACTORS))
    kept: dict[int, np.ndarray] = {}
    try:
        lane, credentials = _lane(run, serving, begun, kept)
    except ValueError as error:
        raise RunError(str(error)) from error
    closed.enter_context(closing(lane))
    pool = None
    if on_ray or run.central.bind is None:
        assert run.acting.actors is not None
        start = actor_pool.starter(credentials) if on_ray else process
        own = (lambda: (description(run), ())) if on_ray else _sharing(run, serving, closed)
        pool = ActorPool(run.acting.actors, _orders(run, serving, lane, own), lane.cut, start)
        closed.enter_context(closing(pool))
    elif isinstance(lane, GrpcTransport):
        note(f"waits for {run.acting.actors} actors: {_actor_command(run, lane)}")
    server = Server(
        lane, serving.inference, serving.book, serving.store, slots=run.central.slots,
        scores=serving.codec.layout.scores, pool=pool, note=note, kept=kept,
    )  # fmt: skip
    return server, lambda: [] if pool is None else pool.ids()


def _lane(run: Run, serving: Serving, begun: int, kept: dict[int, np.ndarray]) -> tuple[Lane, Credentials]:
    """Transport to the actors, and what it asks of them; `kept` gets the states of their environments. ValueError where
    it can't be opened."""
    assert run.acting.actors is not None
    central, slots = run.central, run.central.slots
    again = run.acting.staleness == 0  # a restarted actor repeats its first batch

    def seeds(actor: int, life: int) -> list[int]:
        sequence = np.random.SeedSequence([run.seed, begun, actor, 1 if again else life])
        return [int(seed) >> 1 for seed in sequence.generate_state(slots, np.uint32)]

    bind, credentials = central.bind or "127.0.0.1:0", load(central)
    if run.acting.actor_kind == "ray":
        bind, credentials = actor_pool.reachable(central.bind, credentials)
    which = serving.codec, run.acting.actors, slots, seeds
    if central.lane == "shm":
        return ShmTransport(*which, kept), credentials
    return GrpcTransport(*which, bind=bind, credentials=credentials, held=kept), credentials


def _worlds(run: Run) -> int:
    """Environments of each slot of an actor."""
    assert run.acting.actors is not None
    return run.num_envs // (run.acting.actors * run.central.slots)


Own = Callable[[], tuple[Description, tuple[int, ...]]]
"""-> the environment of an actor's process, and the descriptors that it inherits for that."""


def _sharing(run: Run, serving: Serving, closed: ExitStack) -> Own:
    """Environments of processes on this machine, which read a run's scenarios in memory that they share until
    `closed`."""
    if serving.scenarios is None:
        return lambda: (description(run), ())
    environment, digest = serving.scenarios
    shared = closed.enter_context(shared_bank.sharing(environment.tables))

    def own() -> tuple[Description, tuple[int, ...]]:
        mine = shared._replace(descriptor=os.dup(shared.descriptor))
        return driving_vector.shared(mine, environment, digest), (mine.descriptor,)

    return own


def _orders(run: Run, serving: Serving, lane: Lane, own: Own) -> Callable[[int], Orders]:
    """actor -> orders of its process, which joins the lane by them."""
    central, codec = run.central, serving.codec
    about: dict[str, Any] = {
        "worlds": _worlds(run), "slots": central.slots, "scores": list(codec.layout.scores), "lane": central.lane,
        "every": codec.keeps.every,
    }  # fmt: skip
    if isinstance(lane, GrpcTransport):
        about |= {"address": lane.address, "token_file": central.token_file, "authority": central.tls_cert}

    def orders(actor: int) -> Orders:
        environment, inherited = own()
        now = about | {"environment": list(environment)}
        if isinstance(lane, GrpcTransport):
            return Orders(now, inherited)
        ends = lane.join(actor)
        return Orders(now | {"ends": list(ends)}, (*ends[:3], *inherited))

    return orders


def _actor_command(run: Run, lane: GrpcTransport) -> str:
    """Command of an actor that is started by hand."""
    task = run.environment
    name = task.env if isinstance(task, Named) else shlex.quote(registry.address(description(run)))
    given = f"--env {name} --worlds {_worlds(run)} --slots {run.central.slots}"
    files = " --token-file FILE" * bool(run.central.token_file) + " --tls-ca FILE" * bool(run.central.tls_cert)
    return f"longhaul actor --connect {lane.address} {given}{files}"


def calls(
    run: Run, assembly: Assembly, prepared: CompiledServer, progress: Progress, note: Callable[[str], None],
    context: Callable[[], PyTree], enter: Entered,
) -> Generator[tuple[Progress, int, Metrics]]:  # fmt: skip
    """All remaining updates, as in `fused.fused`, in one `context` after the other, which `enter` changes. Closing it
    stops the server and its actors; new ones begin in each context."""
    device, policy = placed(run, assembly), jax.jit(assembly.algorithm.policy)
    note(f"the policy acts on {placement.name(device)}")
    while int(progress.updates) < assembly.updates:
        progress, until = enter(progress)
        serving = entered(prepared.serving, assembly.within(context()), int(progress.updates), until)
        acting = learner.local(policy(progress.state), device)
        with ExitStack() as closed:
            server, _ = opened(run, serving, int(progress.updates), closed, note)
            del serving  # and with it the context
            updates = learner.central(prepared.update, server, progress, acting, device, updates=until)
            for progress, n, rows in updates:
                yield progress, n, rows
