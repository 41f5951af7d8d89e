"""Benchmarks of central inference: inference for actors without a learner; its transports alone, through shared memory,
and over gRPC beside a bare gRPC echo of the same messages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import jax
import numpy as np

from longhaul.algorithms.config import PPOConfig
from longhaul.bench.cases.actors import cpu_of
from longhaul.bench.cases.training import Prepared, assembled
from longhaul.config.resolve import resolve
from longhaul.config.run import Named, Run
from longhaul.envs.host.vector import HostSpec
from longhaul.runtime import shared_memory
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.launch.process import DROP, PIPE, Process, end_with_parent
from longhaul.spaces import Discrete, Leaf
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.config import ServerConfig
from longhaul.topologies.inference_server.grpc_transport import GrpcTransport, run
from longhaul.topologies.inference_server.shm_transport import Ends, ShmActorTransport, ShmTransport
from longhaul.topologies.inference_server.wire import Answer, Arrival, Codec, Transport
from longhaul.training import inference_server


def central(env: str, actors: int, worlds: int, slots: int, lane: str, num_steps: int, batches: int) -> Prepared:
    """Central inference alone: `batches` of trajectories a repeat, by an MLP of 2 x 64, that nobody learns from.

    `worlds` are those of an actor's group, of which it has `slots`.
    """
    num_envs = actors * slots * worlds
    steps = num_envs * num_steps
    run = resolve(
        Run(
            "bench", Named(env), PPOConfig(), topology="central", acting=ActorConfig(actors, staleness=None),
            central=ServerConfig(lane, slots), total_steps=steps * 1_000_000, num_envs=num_envs, num_steps=num_steps,
            devices=1, threads=1,  # as each actor has: a second one's waking costs more than it does
        )
    )  # fmt: skip
    prepare_devices(1, run.threads, inline=True)
    context, assembly = assembled(run)
    began = time.perf_counter()
    progress = assembly.start(run.seed, context)
    served = inference_server.serves(run, assembly, context, progress)
    acting = jax.jit(assembly.algorithm.policy)
    policy = inference_server.learner.local(acting(progress.state), inference_server.placed(run, assembly))
    compiled = time.perf_counter() - began
    server, processes = inference_server.opened(run, served, 0, ExitStack(), lambda line: print(line, file=sys.stderr))
    server.acts_with(policy)

    def work(_: Any) -> dict[str, float]:
        before, workers = server.meter, [p for p in processes() if p is not None]
        own, of_actors = time.process_time(), cpu_of(workers)
        for _ in range(batches):
            server.gather()
            server.learnt(policy)
        own, of_actors = time.process_time() - own, cpu_of(workers) - of_actors
        new = server.meter.since(before)
        batching = {"batch": new.steps / max(new.batches, 1), "fill": new.steps / max(new.rows, 1)}
        return batching | {
            "cpu_seconds": own + of_actors, "server_microseconds": 1e6 * own / (batches * steps),
            "actor_microseconds": 1e6 * of_actors / (batches * steps),
        }  # fmt: skip

    config = {"env": env, "actors": actors, "worlds": worlds, "slots": slots, "lane": lane, "num_steps": num_steps}
    config |= {"threads": run.threads}
    return Prepared(config | {"batches": batches}, batches * steps, "env steps", compiled, lambda number: None, work)


# ----------------------------------------------------------------------------------------------------------- transport


def command(call: Callable[..., None], *given: str | int) -> list[str]:
    """Command of a process that calls a function of this module."""
    program = f"import json, sys; from {__name__} import {call.__name__}; {call.__name__}(*json.loads(sys.argv[1]))"
    return [sys.executable, "-c", program, json.dumps(given)]


def shared_client(memory: int, reads: int, writes: int, rows: int, width: int, streams: int) -> None:
    """An actor with so many groups, which posts its next step as soon as it has its actions."""
    end_with_parent()
    line = ShmActorTransport(_codec(rows, width), streams, Ends(memory, reads, writes, (0,) * streams))
    seen = np.ones((rows, width), np.float32)
    with suppress(ConnectionError):
        for slot, block in enumerate(line.blocks):
            block.flags[:] = False
            line.post(slot, 0)
        while True:
            slot, _ = line.next()
            block = line.blocks[slot]
            block.observation[0][:], block.reward[:], block.flags[2] = seen, 0.0, True
            line.post(slot, 0)


def shared_transport(rows: int, width: int, streams: int, messages: int, copies: int) -> Prepared:
    """Steps [rows, width] of float32 from another process by the shared-memory transport, answered by int32 [rows].

    The other process copies them in; with two `copies` this one copies them out, too. A unit is a row: the step of one
    environment.
    """
    lane = ShmTransport(_codec(rows, width), 1, streams, lambda actor, life: [0] * streams)
    ends = lane.join(0)
    client = Process(command(shared_client, *ends[:3], rows, width, streams), descriptors=ends[:3], out=DROP)
    for descriptor in ends[:3]:
        os.close(descriptor)
    staging, action = np.empty((streams, rows, width), np.float32), np.zeros(rows, np.int32)

    def work(_: Any) -> dict[str, float]:
        used, done, batches = time.process_time() + cpu_of([client.id]), 0, 0
        heard = time.monotonic()
        while done < messages:
            count = answered(lane, staging if copies > 1 else None, action)
            done, batches = done + count, batches + (count > 0)
            if count:
                heard = time.monotonic()
            else:
                lane.wait(1.0)
                if client.code is not None or time.monotonic() - heard > PATIENCE:
                    raise RuntimeError(f"the client stands still (code {client.code})")
        used = time.process_time() + cpu_of([client.id]) - used
        return {"cpu_seconds": used * messages / done, "messages_per_batch": done / batches}

    config = {"rows": rows, "width": width, "streams": streams, "messages": messages, "copies": copies}
    return Prepared(config, messages * rows, "env steps", 0.0, lambda number: None, work)


def answered(lane: Transport, staging: np.ndarray | None, action: np.ndarray) -> int:
    """Number of steps that have arrived; each is copied to `staging`, if any, and answered."""
    arrivals = [event for event in lane.take() if isinstance(event, Arrival)]
    if staging is not None:
        for event in arrivals:
            staging[event.group] = event.step.observation[0]
    if arrivals:
        lane.answer([Answer(event.group, event.life, action) for event in arrivals])
    return len(arrivals)


PATH = "/bare.Echo/Play"


def _codec(rows: int, width: int) -> Codec:
    return Codec(wire.layout(HostSpec(Leaf((width,), np.dtype(np.float32)), Discrete(2)), rows))


def client(kind: str, address: str, rows: int, width: int, streams: int) -> None:
    """So many streams from one process, each with one message on the way, until the server is gone; no longer than the
    process that began it, by which it may be stopped at the time."""
    end_with_parent()
    from longhaul.runtime.credentials import NOBODY
    from longhaul.topologies.inference_server.grpc_transport import GrpcActorTransport

    async def ours(number: int) -> None:
        line = GrpcActorTransport(_codec(rows, width), 1, address, actor=number, credentials=NOBODY)
        await line.open()
        while True:
            line.post(0, 0)
            await line.next()

    async def bare(channel: Any) -> None:
        call = channel.stream_stream(PATH)()
        memory = bytearray(wire.HEAD_BYTES + _codec(rows, width).block_bytes(0))
        while True:
            await call.write(bytes(memory))
            await call.read()

    async def all_() -> None:
        import grpc

        if kind == "bare":
            channels = [grpc.aio.insecure_channel(address) for _ in range(streams)]
            await asyncio.gather(*(bare(channel) for channel in channels))
        else:
            await asyncio.gather(*(ours(number) for number in range(streams)))

    (asyncio.run if kind == "bare" else run)(all_())


COUNT = shared_memory.plan([("count", shared_memory.Leaf((1,), "int64"))])
"""Memory in which a server counts its answers."""

PATIENCE, STARTING = 60.0, 300.0
"""Seconds for one turn; for a client to begin, which imports as long as others have the cores."""


class _Echo:
    """A server and a client in processes of their own, and what was answered; the client is stopped but for its turns.

    Each in its own: loops of one process that use gRPC are all woken by what any of them waits for.
    """

    def __init__(self, kind: str, sizes: Sequence[int], closed: ExitStack) -> None:
        self._what, self._sizes, self._most, self._closed = kind, sizes, 64 * sizes[-1], closed
        descriptor = shared_memory.create(COUNT.size)
        self._count = shared_memory.arrays(descriptor, COUNT)["count"]
        self._server = self._begun(serve, kind, descriptor, *sizes, keep=[descriptor])
        os.close(descriptor)

    def _begun(self, call: Callable[..., None], *given: str | int, keep: Sequence[int] = ()) -> Process:
        # It inherits none of our outputs: while it is stopped it would keep them open, and their reader would wait.
        process = Process(command(call, *given), descriptors=keep, out=PIPE, error=DROP)
        self._closed.callback(process.end)
        return process

    def begin(self) -> None:
        """Returns when all its streams are open and the client is stopped: none amid its greeting."""
        assert self._server.out is not None
        address = self._server.out.readline().decode().strip()
        if not address:
            raise RuntimeError(f"the server has not begun: {self._server.ended()}")
        self._client = self._begun(client, self._what, address, *self._sizes)
        self._until(self._most, STARTING)
        self._client.send(signal.SIGSTOP)

    def turn(self, messages: int) -> tuple[float, float]:
        """CPU seconds of the server and of the client for so many messages."""
        processes = [self._server.id], [self._client.id]
        self._client.send(signal.SIGCONT)
        before, first = list(map(cpu_of, processes)), int(self._count[0])
        self._until(first + messages, PATIENCE)
        share = messages / (int(self._count[0]) - first)
        own, theirs = (share * (cpu_of(process) - then) for process, then in zip(processes, before, strict=True))
        self._client.send(signal.SIGSTOP)
        return own, theirs

    def _until(self, count: int, seconds: float) -> None:
        """Waits for so many answers. RuntimeError where one of them ended, or takes too long."""
        patience = time.monotonic() + seconds
        while self._count[0] < count:
            for name, process in (("server", self._server), ("client", self._client)):
                if process.code is not None:
                    raise RuntimeError(f"the {name} ended with code {process.code}")
            if time.monotonic() > patience:
                raise RuntimeError(f"the client stands still: {self._count[0]} of {count} answers in {seconds:.0f} s")
            time.sleep(0.02)


def transport(rows: int, width: int, streams: int, messages: int) -> Prepared:
    """Steps [rows, width] of float32 from another process by gRPC, answered by int32 [rows]; and in turn with them
    gRPC's own echo of messages of the same sizes, which looks at nothing and copies nothing.

    `ratio`: how many times as much CPU time our messages take.
    """
    closed, sizes = ExitStack(), (rows, width, streams)
    ours, echo = _Echo("grpc", sizes, closed), _Echo("bare", sizes, closed)
    for client in (ours, echo):
        client.begin()

    def work(_: Any) -> dict[str, float]:
        parts, most = 4, -(-messages // 4)
        turns = [(ours.turn(most), echo.turn(most)) for _ in range(parts)]  # in turn: they meet the same load
        grpc, echoed = (np.sum([pair[i] for pair in turns], axis=0).tolist() for i in range(2))
        done = parts * most
        costs = {f"{who}_microseconds": 1e6 * used / done for who, used in zip(("server", "client"), grpc, strict=True)}
        bare = 1e6 * sum(echoed) / done
        costs |= {"bare_microseconds": bare, "bare_per_cpu_second": 1e6 * rows / bare, "ratio": sum(grpc) / sum(echoed)}
        return costs | {"cpu_seconds": sum(grpc) * messages / done}

    config = {"rows": rows, "width": width, "streams": streams, "messages": messages}
    return Prepared(config, messages * rows, "env steps", 0.0, lambda number: None, work)


def serve(kind: str, descriptor: int, rows: int, width: int, streams: int) -> None:
    """A server that prints its address, and counts its answers in the memory of a descriptor."""
    end_with_parent()
    count = shared_memory.arrays(descriptor, COUNT)["count"]
    if kind == "bare":
        return asyncio.run(_bare(count, rows))
    lane = GrpcTransport(_codec(rows, width), streams, 1, lambda actor, life: [0])
    staging, action = np.empty((streams, rows, width), np.float32), np.zeros(rows, np.int32)
    print(lane.address, flush=True)
    while True:
        lane.wait(1.0)
        count[0] += answered(lane, staging, action)


async def _bare(count: np.ndarray, rows: int) -> None:
    """grpcio's own server, in one event loop."""
    import grpc

    answer = bytes(wire.HEAD_BYTES + 4 * rows)

    async def play(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(answer)
            count[0] += 1

    service, _, method = PATH[1:].partition("/")
    handler = grpc.stream_stream_rpc_method_handler(play)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(address, flush=True)
    await server.wait_for_termination()
