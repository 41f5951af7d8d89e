"""This process as a member of a Ray cluster: joined for a while, and left without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longhaul.runtime.process_group import HostsError

ACTORS = "--actor-kind ray"
"""The option by which a run has its actors on a cluster."""

ANSWER = 0.5
"""Seconds that a node has to take a connection, when it is asked whether it is there."""


def check(address: str, wants: str) -> str:
    """The cluster that `address` means, where there may be one. HostsError, one line, where there is none; `wants` is
    the option that needs it.

    Ray itself tries for minutes to reach an address at which nobody is.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise HostsError(f"{wants} needs Ray ({error}); install longhaul-rl[cluster]") from error
    named = (os.environ.get("RAY_ADDRESS") or "auto") if address == "auto" else address
    if ":" in named and "://" not in named:
        host, _, port = named.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except (OSError, ValueError) as error:
            raise _nobody(named, error, wants) from error
    return named


def _nobody(address: str, error: Exception, wants: str) -> HostsError:
    flag = "--ray-address" if wants == ACTORS else "--address"
    short = " ".join(str(error).split())[:200]
    return HostsError(
        f"no Ray cluster can be joined at {address} ({short}); start one by `ray start --head`, or give {flag}"
    )


@contextlib.contextmanager
def joined(address: str, wants: str = "--on ray") -> Iterator[None]:
    """Within it this process is a driver of the cluster at `address`; of a new one, on this machine, for "local".

    One that is a driver already stays what it is. HostsError, one line, where no cluster can be joined.
    """
    named = check(address, wants)
    import ray

    if ray.is_initialized():
        yield
        return
    more: dict[str, Any] = {"include_dashboard": False} if named == "local" else {}
    before = _handlers()
    try:
        ray.init(address=named, log_to_driver=False, logging_level=logging.ERROR, **more)
    except (OSError, ValueError, RuntimeError) as error:  # a ConnectionError is an OSError
        raise _nobody(named, error, wants) from error
    finally:
        for number, handler in before.items():  # Ray takes SIGTERM, by which a run saves and stops
            signal.signal(number, handler)
    _quieten()
    try:
        yield
    finally:
        ray.shutdown()


def placement(turn: int) -> Any:
    """Ray's scheduling strategy for the `turn`-th actor that is begun: spread, over nodes that are there.

    Ray takes a node that was killed for alive, and idle, for about 13 s; until then one that answers is chosen here.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1.0]
    answering = _answering(nodes)
    if len(answering) == len(nodes) or not answering:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(answering[turn % len(answering)], soft=True)


class Lost(Exception):
    """A call that gives nothing any more; the message says why."""


def placed(what: type, turn: int) -> Any:
    """The `turn`-th of Ray's actors of this class: alone on a core, on a node that is there, and begun by Ray once."""
    import ray

    alone = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
    made: Any = ray.remote(what)
    return made.options(**alone, scheduling_strategy=placement(turn)).remote()


def fetched(coming: Any) -> Any:
    """What a call gave that is done. Raises Lost where it gave nothing."""
    import ray

    try:
        return ray.get(coming)
    except ray.exceptions.RayTaskError as error:
        raise Lost(f"it failed: {type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise Lost(f"it is lost with its process or node ({type(error).__name__} of Ray)") from error


def _answering(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of those that take a connection, in order."""
    found = []
    for node in nodes:
        with contextlib.suppress(OSError):
            address = node["NodeManagerAddress"], int(node["NodeManagerPort"])
            socket.create_connection(address, timeout=ANSWER).close()
            found.append(str(node["NodeID"]))
    return sorted(found)


def _handlers() -> dict[int, Any]:
    """What this process does on signals to end; nothing that a thread beside the main one could put back."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _quieten() -> None:
    """Keeps what Ray tells of its nodes, which is in its own logs, out of standard output, which is for results."""
    with contextlib.suppress(ImportError):
        from ray._private import worker

        if callable(getattr(worker, "print_to_stdstream", None)):
            worker.print_to_stdstream = lambda *args, **kwargs: None
