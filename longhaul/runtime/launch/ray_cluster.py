"""Temporary membership of this process in a Ray cluster, left without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from longhaul.runtime.errors import one_line
from longhaul.runtime.process_group import HostsError

ACTORS = "--actor-kind ray"
"""Option by which a run has its actors on a cluster."""

ANSWER = 0.5
"""Seconds within which a node must accept a connection to count as alive."""


def check(address: str, wants: str) -> str:
    """Address of the cluster that `address` means. HostsError, one line, if none can be there; `wants` is the option
    that needs it.

    Ray itself tries for minutes to reach an address without a cluster.
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
    return HostsError(
        f"no Ray cluster can be joined at {address} ({one_line(error)}); start one by `ray start --head`, or give "
        f"{flag}"
    )


@contextlib.contextmanager
def joined(address: str, wants: str = "--on ray") -> Iterator[None]:
    """Context in which this process is a driver of the cluster at `address`; of a new local one for "local".

    A process that is already a driver stays one. HostsError, one line, if no cluster can be joined.
    """
    named = check(address, wants)
    import ray

    if ray.is_initialized():
        yield
        return
    more: dict[str, Any] = {"include_dashboard": False} if named == "local" else {}
    ours = threading.current_thread() is threading.main_thread()  # which alone can restore its handlers
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if ours}
    try:
        ray.init(address=named, log_to_driver=False, logging_level=logging.ERROR, **more)
    except (OSError, ValueError, RuntimeError) as error:  # a ConnectionError is an OSError
        raise _nobody(named, error, wants) from error
    finally:
        for number, handler in before.items():  # Ray takes over SIGTERM, by which a run saves and stops
            signal.signal(number, handler)
    _quieten()
    try:
        yield
    finally:
        ray.shutdown()


def placement(turn: int) -> Any:
    """Ray's scheduling strategy for the `turn`-th started actor: spread over live nodes.

    Ray takes a killed node for alive and idle for about 13 s; until then one that answers is chosen here.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1.0]
    answering = []
    for node in nodes:
        with contextlib.suppress(OSError):
            address = node["NodeManagerAddress"], int(node["NodeManagerPort"])
            socket.create_connection(address, timeout=ANSWER).close()
            answering.append(str(node["NodeID"]))
    if len(answering) == len(nodes) or not answering:
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(sorted(answering)[turn % len(answering)], soft=True)


class Lost(Exception):
    """A call that will return nothing; the message has the reason."""


def placed(kind: type, turn: int) -> Any:
    """The `turn`-th Ray actor of this class: alone on a core, on a live node, and started by Ray once."""
    import ray

    alone = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
    remote: Any = ray.remote(kind)
    return remote.options(**alone, scheduling_strategy=placement(turn)).remote()


def fetched(coming: Any) -> Any:
    """Result of a finished call. Raises Lost if it has none."""
    import ray

    try:
        return ray.get(coming)
    except ray.exceptions.RayTaskError as error:
        raise Lost(f"it failed: {type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise Lost(f"it is lost with its process or node ({type(error).__name__} of Ray)") from error


def _quieten() -> None:
    """Keep Ray's reports on its nodes, which are in its own logs, out of standard output, which is for results."""
    with contextlib.suppress(ImportError):
        from ray._private import worker

        if callable(getattr(worker, "print_to_stdstream", None)):
            worker.print_to_stdstream = lambda *args, **kwargs: None
