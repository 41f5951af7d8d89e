"""What the benchmarks of central inference measure: inference for actors without a learner, and frames over gRPC beside
a bare gRPC echo of the same messages."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import jax
import numpy as np

from longhaul import serving
from longhaul.acting_workloads import cpu_of
from longhaul.actors.settings import Acting
from longhaul.actors.worker import end_with_parent
from longhaul.algorithms import ppo
from longhaul.central import wire
from longhaul.central.grpc_lane import GrpcLane
from longhaul.central.lane import Answer, Arrival
from longhaul.central.settings import Central
from longhaul.central.wire import Codec
from longhaul.feed import Feeding, feed
from longhaul.forms import Discrete, Leaf
from longhaul.run import Named, Run, assemble, prepare_devices, resolve
from longhaul.vectors import HostSpec
from longhaul.workloads import Prepared


def central(env: str, actors: int, worlds: int, slots: int, lane: str, num_steps: int, batches: int) -> Prepared:
    """Central inference alone: `batches` of trajectories a repeat, by an MLP of 2 x 64, that nobody learns from.

    `worlds` are those of an actor's group, of which it has `slots`.
    """
    num_envs = actors * slots * worlds
    steps = num_envs * num_steps
    made = resolve(
        Run(
            "bench", Named(env), ppo.Config(), topology="central", acting=Acting(actors, staleness=None),
            central=Central(lane, slots), total_steps=steps * 1_000_000, num_envs=num_envs, num_steps=num_steps,
            devices=1,
        )
    )  # fmt: skip
    prepare_devices(1, made.threads, True)
    source = feed(made)
    context = Feeding(source).now.context
    assembly = assemble(made, source.within, context)
    began = time.perf_counter()
    progress = assembly.start(made.seed, context)
    served = serving.serves(made, assembly, progress)
    policy = serving.central.local(jax.jit(assembly.algorithm.policy)(progress.state))
    compiled = time.perf_counter() - began
    server, processes = serving.opened(made, served, 0, ExitStack(), lambda line: print(line, file=sys.stderr))
    server.acts_with(policy)

    def work(_: Any) -> dict[str, float]:
        before, theirs = server.meter, [p for p in processes() if p is not None]
        own, of_actors = time.process_time(), cpu_of(theirs)
        for _ in range(batches):
            server.gather()
            server.learnt(policy)
        own, of_actors = time.process_time() - own, cpu_of(theirs) - of_actors
        new = server.meter.since(before)
        told = {"batch": new.steps / max(new.batches, 1), "fill": new.steps / max(new.rows, 1)}
        return told | {
            "cpu_seconds": own + of_actors, "server_microseconds": 1e6 * own / (batches * steps),
            "actor_microseconds": 1e6 * of_actors / (batches * steps),
        }  # fmt: skip

    config = {"env": env, "actors": actors, "worlds": worlds, "slots": slots, "lane": lane, "num_steps": num_steps}
    return Prepared(config | {"batches": batches}, batches * steps, "env steps", compiled, lambda number: None, work)


# ----------------------------------------------------------------------------------------------------------- transport

PATH = "/bare.Echo/Play"


def _codec(rows: int, width: int) -> Codec:
    return Codec(wire.layout(HostSpec(Leaf((width,), np.dtype(np.float32)), Discrete(2)), rows))


CLIENT = """
import sys
from longhaul.central_workloads import client
client(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
"""


def client(what: str, address: str, parent: int, rows: int, width: int, streams: int) -> None:
    """So many streams from one process, each with one message on the way, until the server is gone; no longer than the
    process that began it, by which it may be stopped at the time."""
    end_with_parent(parent)
    from longhaul.central.credentials import NOBODY
    from longhaul.central.grpc_lane import GrpcLine

    async def ours(number: int) -> None:
        line = GrpcLine(_codec(rows, width), 1, address, actor=number, credentials=NOBODY)
        await line.open()
        while True:
            await line.post(0, 0)
            await line.next()

    async def bare(channel: Any) -> None:
        call = channel.stream_stream(PATH)()
        memory = bytearray(wire.HEAD_BYTES + _codec(rows, width).block_bytes(0))
        while True:
            await call.write(bytes(memory))
            await call.read()

    async def all_() -> None:
        import grpc

        if what == "bare":
            channels = [grpc.aio.insecure_channel(address) for _ in range(streams)]
            await asyncio.gather(*(bare(channel) for channel in channels))
        else:
            await asyncio.gather(*(ours(number) for number in range(streams)))

    asyncio.run(all_())


PATIENCE, STARTING = 60.0, 300.0
"""Seconds for one turn; for a client to begin, which imports as long as others have the cores."""


class _Echo:
    """A client in a process of its own, and what its server has answered; stopped but for its turns."""

    def __init__(self, what: str, served: tuple[str, list[int]], sizes: Sequence[int], closed: ExitStack) -> None:
        address, self._count = served
        self._most = 64 * sizes[-1]
        words = [what, address, *map(str, (os.getpid(), *sizes))]
        # What it holds of ours it would keep open while it is stopped: our output's reader would wait for its end.
        self._client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        closed.callback(self._client.kill)

    def begin(self) -> None:
        """All its streams are open: none is stopped amid its greeting."""
        self._until(self._most, STARTING)

    def stop(self) -> None:
        os.kill(self._client.pid, signal.SIGSTOP)

    def turn(self, messages: int) -> tuple[float, float]:
        """CPU seconds of the server and of the client for so many messages."""
        process = self._client.pid
        os.kill(process, signal.SIGCONT)
        own, theirs, first = time.process_time(), cpu_of([process]), self._count[0]
        self._until(first + messages, PATIENCE)
        share = messages / (self._count[0] - first)
        own, theirs = time.process_time() - own, cpu_of([process]) - theirs
        self.stop()
        return share * own, share * theirs

    def _until(self, count: int, seconds: float) -> None:
        """Waits for so many answers. RuntimeError where the client ended, or takes too long."""
        patience = time.monotonic() + seconds
        while self._count[0] < count:
            if self._client.poll() is not None:
                raise RuntimeError(f"the client ended with code {self._client.returncode}")
            if time.monotonic() > patience:
                raise RuntimeError(f"the client stands still: {self._count[0]} of {count} answers in {seconds:.0f} s")
            time.sleep(0.02)


def transport(rows: int, width: int, streams: int, messages: int) -> Prepared:
    """Steps [rows, width] of float32 from another process by gRPC, answered by int32 [rows]; and in turn with them
    gRPC's own echo of messages of the same sizes, which looks at nothing and copies nothing.

    `ratio`: how many times as much CPU time our messages take.
    """
    closed, sizes = ExitStack(), (rows, width, streams)
    ours = _Echo("grpc", _ours(rows, width, streams, closed), sizes, closed)
    echo = _Echo("bare", _bare(rows), sizes, closed)
    for client in (ours, echo):
        client.begin()
    for client in (ours, echo):
        client.stop()

    def work(_: Any) -> dict[str, float]:
        parts, most = 4, -(-messages // 4)
        turns = [(ours.turn(most), echo.turn(most)) for _ in range(parts)]  # in turn: they meet the same load
        mine, theirs = (np.sum([pair[i] for pair in turns], axis=0).tolist() for i in range(2))
        done = parts * most
        told = {f"{who}_microseconds": 1e6 * used / done for who, used in zip(("server", "client"), mine, strict=True)}
        bare = 1e6 * sum(theirs) / done
        told |= {"bare_microseconds": bare, "bare_per_cpu_second": 1e6 * rows / bare, "ratio": sum(mine) / sum(theirs)}
        return told | {"cpu_seconds": sum(mine) * messages / done}

    config = {"rows": rows, "width": width, "streams": streams, "messages": messages}
    return Prepared(config, messages * rows, "env steps", 0.0, lambda number: None, work)


def _ours(rows: int, width: int, streams: int, closed: ExitStack) -> tuple[str, list[int]]:
    """A server thread that copies each step and answers it -> (address, messages so far)."""
    lane = closed.enter_context(closing(GrpcLane(_codec(rows, width), streams, 1, lambda actor, life: [0])))
    count, staging = [0], np.empty((streams, rows, width), np.float32)
    action = np.zeros(rows, np.int32)

    def serve() -> None:
        while True:
            lane.wait(1.0)
            answers = []
            for event in lane.take():
                if isinstance(event, Arrival):
                    staging[event.group] = event.step.observation[0]
                    answers.append(Answer(event.group, event.life, action))
            lane.answer(answers)
            count[0] += len(answers)

    threading.Thread(target=serve, daemon=True).start()
    return lane.address, count


def _bare(rows: int) -> tuple[str, list[int]]:
    """grpcio's own server, in one event loop -> (address, messages so far)."""
    count, found, ready = [0], [""], threading.Event()
    answer = bytes(wire.HEAD_BYTES + 4 * rows)

    async def serve() -> None:
        import grpc

        async def play(_: Any, context: Any) -> None:
            while await context.read() is not grpc.aio.EOF:
                await context.write(answer)
                count[0] += 1

        service, _, method = PATH[1:].partition("/")
        handler = grpc.stream_stream_rpc_method_handler(play)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        found[0] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        ready.set()
        await server.wait_for_termination()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    if not ready.wait(PATIENCE):
        raise RuntimeError(f"gRPC's own server has not begun for {PATIENCE:.0f} s")
    return found[0], count
