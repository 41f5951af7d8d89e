"""Central inference in one process, for tests: a server, and actors in threads."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.envs.host import registry
from longhaul.envs.host.vector import HostVector
from longhaul.runtime.credentials import NOBODY
from longhaul.topologies import staleness
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.actor import play, play_shared, state_size
from longhaul.topologies.inference_server.grpc_transport import GrpcActorTransport, GrpcTransport, run
from longhaul.topologies.inference_server.policy import BatchedPolicy
from longhaul.topologies.inference_server.server import Server
from longhaul.topologies.inference_server.shm_transport import ShmActorTransport, ShmTransport
from longhaul.topologies.inference_server.trajectory_buffer import TrajectoryBuffer
from longhaul.topologies.inference_server.wire import NOTHING, Codec, Keeps, Transport
from longhaul.topologies.staleness import Rule
from longhaul.types import Algorithm, Spec

Make = Callable[[int, int], HostVector]
"""(actor, slot) -> the environments of a group."""

UNTIL = 10**6

POLES = registry.describe("numpy/longhaul.envs.host.numpy_cartpole:cartpole")


class Sizes(NamedTuple):
    actors: int = 2
    slots: int = 2
    worlds: int = 3  # of a group
    steps: int = 8
    staleness: int | None = 0

    @property
    def groups(self) -> int:
        return self.actors * self.slots


FEW = Sizes()

jitted = functools.cache(jax.jit)
"""`jax.jit` of a function, the same one for all tests."""


@functools.cache
def _batched(algorithm: Algorithm, spec: Spec, groups: int, columns: int, fixed: bool) -> BatchedPolicy:
    policy = jax.eval_shape(lambda key: algorithm.policy(algorithm.init(key)), jax.random.key(0))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), policy)
    return BatchedPolicy(
        algorithm.act, algorithm.memory, jax.random.key(0), blank, spec.observation,
        groups=groups, columns=columns, fixed=fixed,
    )  # fmt: skip


def batched(algorithm: Algorithm, spec: Spec, key: Any, groups: int, columns: int, fixed: bool) -> BatchedPolicy:
    """A policy with a key and a memory of its own; its program is that of all tests."""
    made = copy.copy(_batched(algorithm, spec, groups, columns, fixed))
    made._key, made._stages = jnp.asarray(jax.random.key_data(key)), copy.deepcopy(made._stages)
    made._memory = algorithm.memory(groups * columns)
    return made


class Site(NamedTuple):
    """A server, what it acts with, and the way to begin an actor in a thread."""

    server: Server
    lane: Transport
    store: TrajectoryBuffer
    begin: Callable[[int], threading.Thread]


def seeds(sizes: Sizes) -> Callable[[int, int], list[int]]:
    """As `serving` has them: without staleness, whoever is begun again begins alike."""
    again = sizes.staleness == 0
    return lambda actor, life: [1000 * (1 if again else life) + 10 * actor + slot for slot in range(sizes.slots)]


@contextmanager
def site(
    algorithm: Algorithm, spec: Spec, make: Make, sizes: Sizes = FEW, *, lane: str = "shm", begun: bool = True,
    key: Any = None, pool: Any = None,
) -> Iterator[Site]:  # fmt: skip
    """Open until the block is left; then all its threads have ended."""
    host = make(0, 0)
    names: tuple[str, ...] = ()
    size, kept = state_size(host, host.reset(0)) if sizes.staleness == 0 else 0, dict[int, np.ndarray]()
    layout = wire.layout(host.spec, host.columns, names)
    codec = Codec(layout, Keeps(size, sizes.steps) if size else NOTHING)
    policy = algorithm.policy(jitted(algorithm.init)(jax.random.key(0)))
    with ExitStack() as closed:
        threads: list[threading.Thread] = []
        closed.callback(lambda: [thread.join(20.0) for thread in threads])
        ways: Transport
        if lane == "shm":
            ways = ShmTransport(codec, sizes.actors, sizes.slots, seeds(sizes), kept)
        else:
            ways = GrpcTransport(codec, sizes.actors, sizes.slots, seeds(sizes), held=kept)
        closed.enter_context(closing(ways))
        rule = Rule(sizes.groups, sizes.staleness, until=UNTIL)
        key = jax.random.key(7) if key is None else key
        inference = batched(algorithm, spec, key, sizes.groups, host.columns, fixed=sizes.staleness == 0)
        store = TrajectoryBuffer(
            inference.shapes, rooms=rule.ahead + 1, steps=sizes.steps, places=sizes.groups, columns=host.columns,
            interval=spec.truncation_interval,
        )  # fmt: skip
        server = Server(
            ways, inference, staleness.opened(rule, 0), store, slots=sizes.slots, scores=names, pool=pool, kept=kept
        )
        server.acts_with(policy)

        def begin(actor: int) -> threading.Thread:
            vectors = [make(actor, slot) for slot in range(sizes.slots)]
            if isinstance(ways, ShmTransport):
                line: Any = ShmActorTransport(codec, sizes.slots, ways.join(actor))
                work: Any = lambda: play_shared(line, vectors)  # noqa: E731
            else:
                assert isinstance(ways, GrpcTransport)
                own_codec = Codec(layout, Keeps(size))  # when it is wanted, the server says
                line = GrpcActorTransport(own_codec, sizes.slots, ways.address, actor=actor, credentials=NOBODY)
                work = lambda: run(play(line, vectors))  # noqa: E731
            thread = threading.Thread(target=_until_gone, args=(work, line), daemon=True)
            thread.start()
            threads.append(thread)
            return thread

        if begun:
            for actor in range(sizes.actors):
                begin(actor)
        yield Site(server, ways, store, begin)


def _until_gone(work: Callable[[], None], line: Any) -> None:
    try:
        work()
    except (ConnectionError, wire.WireError, Gone):
        pass
    finally:
        if isinstance(line, ShmActorTransport):
            line.close()


class Gone(Exception):
    """An environment that ends its actor."""


def by_hand(
    algorithm: Algorithm, make: Make, sizes: Sizes, updates: int, key: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """Result of a synchronous loop, written out: (parameters, all actions)."""
    c = sizes.worlds
    vectors = [make(g // sizes.slots, g % sizes.slots) for g in range(sizes.groups)]
    seen = [
        np.array(v.reset(seeds(sizes)(g // sizes.slots, 1)[g % sizes.slots])) for g, v in enumerate(vectors)
    ]  # fmt: skip
    state = jitted(algorithm.init)(jax.random.key(0))
    learn = jitted(algorithm.learn)

    @jax.jit
    def act(policy: Any, observation: Any, batch: int, t: int) -> Any:
        step = jax.random.fold_in(jax.random.fold_in(key, batch), t)
        keys = jax.vmap(lambda column: jax.random.fold_in(step, column))(jnp.arange(sizes.groups * c))

        def one(row: Any, key: Any) -> Any:
            action, _, extras = algorithm.act(policy, (), row[None], key)
            return jax.tree.map(lambda x: x[0], (action, extras))

        return jax.vmap(one)(observation, keys)

    acted = []
    for batch in range(updates):
        rows: list[Any] = []
        for t in range(sizes.steps):
            observation = np.concatenate(seen)
            action, extras = jax.device_get(act(algorithm.policy(state), observation, batch, t))
            acted.append(action)
            steps = [v.step(action[g * c : (g + 1) * c]) for g, v in enumerate(vectors)]
            seen = [np.array(step.observation) for step in steps]
            flags = [
                np.concatenate([np.array(getattr(s, n)) for s in steps]) for n in ("reward", "terminated", "truncated")
            ]
            rows.append((observation, action, *flags, extras))
        from longhaul.types import Rollout, Successors

        observation, action, reward, terminated, truncated, extras = jax.tree.map(lambda *x: np.stack(x), *rows)
        assert not truncated.any(), "this loop knows no successors"
        last = np.concatenate(seen)
        data = Rollout(
            observation, action, reward, terminated, truncated, np.ones(reward.shape, bool), extras,
            Successors(last, np.zeros((1, *last.shape), last.dtype)), (), np.int32(batch),
        )  # fmt: skip
        state, _ = learn(state, data, jax.random.key(batch))
    return [np.asarray(x) for x in jax.tree.leaves(algorithm.policy(state))], acted


def processes() -> set[int]:
    """The children of this process."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                        found.add(int(name))
            except OSError:
                pass
    return found
