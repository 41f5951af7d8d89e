"""Pool of actors that a run starts for its inference server, watches and restarts, here or on a Ray cluster.

Ray (Moritz et al. 2018) places actors on its nodes, reports their loss, and sends them the address, a token of the run,
and the server's certificate.
Steps never go through Ray. An actor ends with its stream, and the pool starts another, on another node if the first
one died.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from longhaul.envs.host.vector import Description
from longhaul.runtime.credentials import Credentials, is_loopback, self_signed, split
from longhaul.runtime.launch import ray_cluster
from longhaul.runtime.launch.process import Process
from longhaul.topologies import actor_process
from longhaul.topologies.actor_process import FEW, STARTING, ActorHandle, Actors
from longhaul.topologies.inference_server import actor as client
from longhaul.topologies.inference_server.grpc_transport import GrpcActorTransport, run
from longhaul.topologies.inference_server.wire import WireError

SOON = 60.0
"""Seconds after its start during which a failure counts against an actor; a later failure restarts the count at one."""


class Orders(NamedTuple):
    """Orders for an actor process: JSON data, and the descriptors it inherits."""

    about: dict[str, Any]
    descriptors: tuple[int, ...] = ()  # closed here once it has them


def process(actor: int, orders: Orders) -> Process:
    """Actor in a process of this machine."""
    try:
        payload = json.dumps(orders.about | {"actor": actor}).encode()
        return actor_process.process("longhaul.topologies.inference_server.actor", payload, orders.descriptors)
    finally:
        for descriptor in orders.descriptors:
            os.close(descriptor)


class ActorPool:
    """Pool of `actors` actors, local processes by default; a `server.ActorPool`. Call `close` at the end."""

    def __init__(
        self, actors: int, orders: Callable[[int], Orders], lost: Callable[[int, str], None],
        start: Callable[[int, Orders], ActorHandle] = process,
    ) -> None:  # fmt: skip
        """`orders(a)`: orders for a new actor a. `lost(a, why)` is called after actor a ended."""
        self._actors = Actors(
            actors, lambda actor: start(actor, orders(actor)), f"within {SOON:.0f} s of its beginning"
        )  # fmt: skip
        self._lost = lost

    @property
    def restarts(self) -> int:
        return self._actors.restarts

    def ids(self) -> list[int | None]:
        """Process ids of the actors; None for one that has not started or runs on another machine."""
        return [handle.id if isinstance(handle, Process) else None for handle in self._actors.handles()]

    def look(self, now: float) -> None:
        for actor, reason in self._actors.look(now):
            self._failed(actor, reason)
            self._lost(actor, reason)

    def end(self, actor: int, why: str) -> None:
        if self._actors.end(actor):
            self._failed(actor, why)

    def _failed(self, actor: int, why: str) -> None:
        worked = time.monotonic() - self._actors.started(actor) >= SOON
        self._actors.failed(actor, why, progress=worked)

    def close(self) -> None:
        """End all actors."""
        self._actors.close()


# ----------------------------------------------------------------------------------------------------- on a Ray cluster


class Remote:
    """Actor on a node."""

    def begin(self) -> int:
        """Process id."""
        os.environ |= FEW  # before anything imports JAX
        return os.getpid()

    def play(self, about: dict[str, Any], credentials: Credentials) -> str:
        """Reason for which the stream ended; environments are stepped until then."""
        slots, address = about["slots"], about["address"]
        try:
            description = Description(*about["environment"])
            client.prepare(description)
            vectors, codec = client.make(description, about["worlds"], slots)
            line = GrpcActorTransport(codec, slots, address, actor=about["actor"], credentials=credentials)
            run(client.play(line, vectors))
        except (WireError, ConnectionError, ValueError) as error:
            return str(error)
        return "it ended"


class RayActor:
    """Incarnation of an actor on a node; an `ActorHandle`."""

    def __init__(self, about: dict[str, Any], credentials: Credentials, turn: int) -> None:
        """`turn`: number of actors started before."""
        self._remote = ray_cluster.placed(Remote, turn)
        self._begun: Any = self._remote.begin.remote()
        self._since = time.monotonic()
        self._why = self._remote.play.remote(about, credentials)
        self._ended: str | None = None

    def ended(self) -> str | None:
        import ray

        if self._begun is not None:
            if ray.wait([self._begun], timeout=0.0)[0]:
                self._begun = None
            elif time.monotonic() - self._since > STARTING:
                self._ended = f"no node of the cluster had a core free for it for {STARTING:.0f} s"
                self.kill()
        if self._ended is None and ray.wait([self._why], timeout=0.0)[0]:
            try:
                self._ended = ray_cluster.fetched(self._why)
            except ray_cluster.Lost as error:
                self._ended = str(error)
            self.kill()  # it would keep its core
        return self._ended

    def kill(self) -> None:
        import ray

        ray.kill(self._remote)

    def end(self, within: float = 0.0) -> None:
        """No wait: the server has closed the stream and reads no more of it."""
        self.kill()


def starter(credentials: Credentials) -> Callable[[int, Orders], RayActor]:
    """(actor, orders) -> new actor, with the run's token and the server's certificate."""
    shown = Credentials(credentials.token, authority=credentials.certificate)
    turns = itertools.count()
    return lambda actor, orders: RayActor(orders.about | {"actor": actor}, shown, next(turns))


def reachable(bind: str | None, credentials: Credentials) -> tuple[str, Credentials]:
    """(address, credentials) at which all nodes of the joined cluster reach the server.

    A cluster of one machine uses loopback without TLS. Otherwise this node's address is used with TLS, and a
    certificate is created if none is given. A token is always required. ValueError if no certificate can be created.
    """
    import ray

    address = ray.util.get_node_ip_address()
    if bind is None:
        others = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} - {address}
        bind = f"{address if others else '127.0.0.1'}:0"
    host, _ = split(bind)
    held = credentials if credentials.certificate or is_loopback(host) else self_signed(host)
    return bind, held._replace(token=credentials.token or secrets.token_urlsafe(32))
