"""Actor of the inference server: steps environments, without a policy; `python -m
longhaul.topologies.inference_server.actor`.

It imports JAX only if its environments need it. An actor started by the run reads its orders from standard input, as
JSON, and ends with its parent, even if that is killed. An actor started by hand (`longhaul actor`) reconnects while the
server is away.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longhaul.envs.host.vector import Description, HostVector, LostState, Slot, write
from longhaul.runtime.credentials import NOBODY, Credentials, load
from longhaul.runtime.devices import prepare_devices
from longhaul.runtime.launch.process import end_with_parent
from longhaul.spaces import Tree, leaves, mapped
from longhaul.topologies.inference_server import wire
from longhaul.topologies.inference_server.shm_transport import Ends, ShmActorTransport
from longhaul.topologies.inference_server.wire import NOTHING, ActorBlocks, ActorTransport, Codec, Keeps, WireError

PATIENCE = 600.0
"""Seconds without a server after which an actor gives up."""

FIRST, LONGEST = 0.2, 5.0
"""Seconds between two attempts to connect: first and longest, doubled in between, with random jitter."""


async def play(line: ActorTransport, vectors: Sequence[HostVector]) -> None:
    """Steps of the groups `vectors` by the server's actions over gRPC until an error, which closes the line."""
    try:
        outs = start(line, vectors, await line.open())
        while True:
            slot, action = await line.next()
            line.post(slot, step(line, vectors[slot], slot, action, outs[slot]))
    finally:
        await line.close()


def play_shared(line: ShmActorTransport, vectors: Sequence[HostVector]) -> None:
    """Steps of the groups through shared memory; waiting blocks this thread."""
    outs = start(line, vectors, line.open())
    while True:
        slot, action = line.next()
        line.post(slot, step(line, vectors[slot], slot, action, outs[slot]))


def start(line: ActorBlocks, vectors: Sequence[HostVector], seeds: Sequence[int]) -> list[Slot]:
    """Post the first observations of all groups; -> output slots of their steps."""
    outs = []
    for slot, (vector, block, seed) in enumerate(zip(vectors, line.blocks, seeds, strict=True)):
        block.reward[:] = 0.0
        block.flags[:] = False
        outs.append(Slot(line.codec.layout.tree(block.observation), block.reward, *block.flags))
        vector.reset(seed, out=outs[slot])
        held = line.held(slot)
        if held is not None:
            try:
                restore_state(held, vector, outs[slot].observation)
            except LostState:
                vector.reset(seed, out=outs[slot])
                block.flags[wire.LOST] = True
    for slot in range(len(vectors)):
        line.post(slot, 0)
    return outs


def step(line: ActorBlocks, vector: HostVector, slot: int, action: np.ndarray, out: Slot) -> int:
    """Number of episodes that ended in a group's step, whose result is written to its block."""
    finals = vector.step(action, out=out).finals
    count = len(finals.columns)
    if count:
        block, layout = line.ended(slot, count), line.codec.layout
        block.columns[:] = finals.columns
        write(layout.tree(block.final), finals.observation)
        block.known[:] = False
        for i, name in enumerate(layout.scores):
            if name in finals.scores:
                block.scores[i], block.known[i] = finals.scores[name]
    kept = line.keeps(slot, count)
    if kept is not None:
        write_state(kept, vector, out.observation)
    return count


def state_size(vector: HostVector, observation: Tree) -> int:
    """Bytes of the state of a vector that was reset; 0 if it reports none."""
    state = vector.state()
    return 0 if state is None else sum(np.asarray(leaf).nbytes for leaf in leaves((state, observation)))


def write_state(into: np.ndarray, vector: HostVector, observation: Tree) -> None:
    """Copy of the state and the observation for the next action to memory, uint8 [size]: the reader derives the layout
    from its own worlds. ValueError if the size differs."""
    rows = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves((vector.state(), observation))]
    np.concatenate(rows, out=into)


def restore_state(data: np.ndarray, vector: HostVector, observation: Tree) -> None:
    """Inverse of `write_state`, for a vector that was reset; overwrites the leaves of `observation`."""
    at = 0

    def read(like: np.ndarray) -> np.ndarray:
        nonlocal at
        begin, at = at, at + np.asarray(like).nbytes
        return np.frombuffer(data[begin:at].tobytes(), np.asarray(like).dtype).reshape(np.shape(like)).copy()

    vector.restore(mapped(read, vector.state()))
    mapped(lambda to: np.copyto(to, read(to)), observation)


async def stay(connect: Callable[[], ActorTransport], vectors: Sequence[HostVector], patience: float) -> None:
    """Play with new connections after the server went away. ConnectionError once it was away for `patience` seconds.

    WireError if the server refuses the actor: another attempt would be refused too.
    """
    wait, last = FIRST, time.monotonic()
    while True:
        began = time.monotonic()
        try:
            await play(connect(), vectors)
        except ConnectionError as error:
            now = time.monotonic()
            if now - began > 10.0:  # it was connected
                wait, last = FIRST, now
            if now - last > patience:
                raise ConnectionError(
                    f"{error}; nobody was there for {patience:.0f} s: start the run first, or raise --patience"
                ) from error
        await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # not all at once
        wait = min(2.0 * wait, LONGEST)


def make(
    description: Description, worlds: int, slots: int, scores: Sequence[str] = (), every: int | None = None
) -> tuple[list[HostVector], Codec]:
    """Environments of an actor: `slots` groups of `worlds`. `every`: as in `Keeps`; None: the server will send it."""
    from longhaul.envs.host import registry

    vectors = [registry.make(description, worlds) for _ in range(slots)]
    keeps = NOTHING if every == 0 else Keeps(state_size(vectors[0], vectors[0].reset(0)), every or 0)
    return vectors, Codec(wire.layout(vectors[0].spec, vectors[0].columns, tuple(scores)), keeps)


def prepare(description: Description) -> None:
    """Preparation of an actor's own process, which has one thread: programs that were compiled before are found
    again."""
    from longhaul.envs.host import registry

    if description.kind in registry.COMPILED:
        prepare_devices(1, 1)


def remote(
    address: str, description: Description, worlds: int, slots: int, *, actor: int = wire.ANY,
    credentials: Credentials = NOBODY, patience: float = PATIENCE,
) -> None:  # fmt: skip
    """Actor of a remote server, until its end. Raises WireError, ConnectionError, ValueError."""
    from longhaul.topologies.inference_server.grpc_transport import GrpcActorTransport, run

    vectors, codec = make(description, worlds, slots)

    def connect() -> ActorTransport:
        return GrpcActorTransport(codec, slots, address, actor=actor, credentials=credentials)

    run(stay(connect, vectors, patience))


def main() -> int:
    """Main function of an actor process started by a run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's, which ends us
    end_with_parent()
    about = json.load(sys.stdin)
    kind, name, options = about["environment"]
    description = Description(kind, name, tuple((key, _plain(value)) for key, value in options))
    worlds, slots, lane = about["worlds"], about["slots"], about["lane"]
    try:
        prepare(description)
        if lane == "shm":
            vectors, codec = make(description, worlds, slots, about["scores"], about["every"])
            play_shared(ShmActorTransport(codec, slots, Ends(*about["ends"])), vectors)
        else:
            authority = None if about["authority"] is None else Path(about["authority"]).read_bytes()
            credentials = load(about["token_file"])._replace(authority=authority)
            remote(about["address"], description, worlds, slots, actor=about["actor"], credentials=credentials)
    except (WireError, ConnectionError, ValueError) as error:
        print(f"actor {about['actor']}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _plain(value: Any) -> Any:
    """Value with JSON lists as tuples."""
    return tuple(_plain(v) for v in value) if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
