"""Group of processes that train together: identification, joining and messages.

`find` reads this process's place from the environment: `longhaul launch`, SLURM, Open MPI, a Kubernetes job or a TPU
pod. `start` joins the processes: afterwards `jax.devices()` are those of all, and programs run on all at once. If the
environment names no group, this process is alone, and `jax.distributed` is never touched.

Process 0 decides: it reads the command line, makes the folder, writes what is written once. The others receive its
messages through the key-value store of JAX's coordination service, which process 0 runs. If one process dies, that
service ends the others within about `HEARTBEAT` seconds, and their launcher restarts them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from longhaul.runtime import descriptors, gloo_listener
from longhaul.runtime.errors import BAD_INPUT, STOPPED, one_line
from longhaul.runtime.launch.process import end_with_parent

T = TypeVar("T")

COORDINATOR, INDEX, COUNT = "LONGHAUL_COORDINATOR", "LONGHAUL_PROCESS_ID", "LONGHAUL_NUM_PROCESSES"
"""Host and port of process 0, number of this process, number of processes; these override a cluster's."""

SERVICE = "LONGHAUL_SERVICE"
"""Headless service of a Kubernetes job, by which its pods find one another."""

DEVICES = "LONGHAUL_LOCAL_DEVICES"
"""CPU devices of each process, if --mesh does not give their number."""

SOCKET = "unix:"
"""Beginning of a coordinator's address that is the path of a socket, on one machine."""

AUTO = "auto"
"""Coordinator's value for detection by JAX itself."""

PORT = 8476
"""Default port of the coordination service on process 0."""

PATIENCE = 300
"""Seconds within which all processes must join."""

HEARTBEAT = 15
"""Seconds without a sign of life after which a process counts as dead."""

PARTING = 30
"""Seconds that a process waits for the others at its end."""

GRACE = 10
"""Seconds that a process has to end after process 0 did."""

ALIKE = 2.0
"""Failures within this many seconds are taken to have one cause."""

LISTEN = 0.5
"""Seconds between two checks for signals while a process waits for a message."""


class HostsError(ValueError):
    """Processes that cannot be identified or joined; the message is one line."""


@dataclass(frozen=True)
class Hosts:
    """Index of this process among `count`. `count` 0: JAX detects both."""

    index: int = 0
    count: int = 1
    coordinator: str = ""  # host:port of process 0, or unix:path
    told_by: str = ""


ALONE = Hosts()


# --------------------------------------------------------------------------------------------------- identification


def find(environment: Mapping[str, str], *, tpu: bool = False) -> Hosts:
    """Place of this process by its environment; `tpu`: True on a TPU's machine.

    Raises HostsError, one line, if the environment is incomplete or impossible.
    """
    if environment.get(COUNT) == "1":
        return ALONE
    if environment.get(COORDINATOR) == AUTO:
        return Hosts(0, 0, AUTO, COORDINATOR)
    hosts = _slurm(environment) or _open_mpi(environment) or _kubernetes(environment) or _tpu(environment)
    present = [name for name in (COORDINATOR, INDEX, COUNT) if environment.get(name)]
    if hosts is None and not present:
        return Hosts(0, 0, AUTO, "TPU") if tpu else ALONE
    hosts = hosts or Hosts(-1, 0, "", ", ".join(present))
    index, count = (_number(environment, name, known) for name, known in ((INDEX, hosts.index), (COUNT, hosts.count)))
    coordinator = environment.get(COORDINATOR) or hosts.coordinator
    lacking = [n for n, lacks in ((COORDINATOR, not coordinator), (INDEX, index < 0), (COUNT, count < 1)) if lacks]
    if lacking:
        raise HostsError(
            f"{hosts.told_by} is set, and {' and '.join(lacking)} not; set all of {COORDINATOR} (HOST:PORT of "
            f"process 0), {INDEX} and {COUNT}, or none"
        )
    if index >= count:
        raise HostsError(f"{INDEX} is {index}, and there are {count} processes; it must lie in 0 to {count - 1}")
    return ALONE if count == 1 else Hosts(index, count, _with_port(coordinator), hosts.told_by)


def _number(environment: Mapping[str, str], name: str, known: int) -> int:
    word = environment.get(name, "")
    if word and not word.isdecimal():
        raise HostsError(f"{name} is {word!r}; it must be a whole number of at least 0")
    return int(word) if word else known


def _with_port(coordinator: str) -> str:
    if coordinator.startswith(SOCKET):
        return coordinator
    host, colon, port = coordinator.rpartition(":")
    if not colon:
        return f"{coordinator}:{PORT}"
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise HostsError(f"{COORDINATOR} is {coordinator!r}; it must be HOST:PORT of process 0, or {AUTO}")
    return coordinator


def _slurm(environment: Mapping[str, str]) -> Hosts | None:
    """Task of `srun`. A batch script outside of `srun` is alone, however many tasks its job has."""
    names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    job, index, count, nodes = (environment.get(name, "") for name in names)
    if not (job.isdecimal() and index.isdecimal() and count.isdecimal() and nodes) or int(count) < 2:
        return None
    port = 61440 + int(job) % 4096  # jobs that share a node keep apart
    return Hosts(int(index), int(count), f"{first_node(nodes)}:{port}", "SLURM")


def first_node(nodes: str) -> str:
    """First of a list of nodes in SLURM's notation: "a[007-015,020],b" -> "a007"."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if match is None:
        raise HostsError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node; set {COORDINATOR}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _open_mpi(environment: Mapping[str, str]) -> Hosts | None:
    """Process of `mpirun`; its host counts as that of process 0 unless LONGHAUL_COORDINATOR is set."""
    index, count = (environment.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("RANK", "SIZE"))
    if not (index.isdecimal() and count.isdecimal()) or int(count) < 2:
        return None
    launcher = re.match(r"(\d+)\.\d+;tcp://([^,:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    coordinator = f"{launcher[2]}:{61440 + int(launcher[1]) // 4096 % 4096}" if launcher else ""
    return Hosts(int(index), int(count), coordinator, "OMPI_COMM_WORLD_SIZE")


def _kubernetes(environment: Mapping[str, str]) -> Hosts | None:
    """Pod of an indexed job whose manifest gives the number of pods; other indices may mean anything."""
    index, count = environment.get("JOB_COMPLETION_INDEX", ""), environment.get(COUNT, "")
    if not (index.isdecimal() and count):
        return None
    job = environment.get("HOSTNAME", "").removesuffix(f"-{index}")
    service = environment.get(SERVICE, "")
    return Hosts(int(index), 0, f"{job}-0.{service}:{PORT}" if job and service else "", "JOB_COMPLETION_INDEX")


def _tpu(environment: Mapping[str, str]) -> Hosts | None:
    """Worker of a TPU pod that knows the others by name, as under Kubernetes on Google's cloud."""
    index, names = environment.get("TPU_WORKER_ID", ""), environment.get("TPU_WORKER_HOSTNAMES", "")
    workers = [name for name in names.split(",") if name]
    if not index.isdecimal() or len(workers) < 2 or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return None
    return Hosts(int(index), len(workers), f"{workers[0]}:{PORT}", "TPU_WORKER_HOSTNAMES")


def on_tpu(environment: Mapping[str, str]) -> bool:
    """True if this machine has a TPU that JAX will use."""
    present = any(Path(place).exists() for place in ("/dev/accel0", "/dev/vfio/0"))
    allowed = "tpu" in environment.get("JAX_PLATFORMS", "tpu")
    return present and allowed and importlib.util.find_spec("libtpu") is not None


# ------------------------------------------------------------------------------------------------------- joining


def start(hosts: Hosts) -> None:
    """Meeting of the processes, before JAX runs; nothing for a single one. Raises HostsError."""
    end_with_parent()
    if hosts.count == 1:
        return
    import jax

    _keep_stdout_for_results()
    # JAX's own listener would take SIGTERM away from the run, which saves on it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    by_file = hosts.coordinator.startswith(SOCKET)
    local = hosts.coordinator.startswith(("127.0.0.1:", "localhost:", SOCKET))  # reachable from this machine only
    who = f"process {hosts.index} of {hosts.count} (by {hosts.told_by})"
    late = threading.Timer(PATIENCE, _give_up, [f"{who}: not all have met at {hosts.coordinator} in {PATIENCE} s"])
    late.daemon = True
    late.start()
    if hosts.coordinator != AUTO and hosts.index == 0 and not by_file:
        _check_port(hosts.coordinator, local=local)
    _guard_gloo(local=local)
    try:
        _connect(hosts, who, local=local)
    finally:
        late.cancel()
    if by_file and hosts.index == 0:  # all have joined: nobody else is to come
        file = Path(hosts.coordinator.removeprefix(SOCKET))
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            file.parent.rmdir()


def _keep_stdout_for_results() -> None:
    """Turn to stderr of what C++ prints to stdout, such as messages on its connections."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", errors="replace")


def _guard_gloo(*, local: bool) -> None:
    """Guard of the listeners that Gloo is to open; of a `local` coordinator they are on loopback."""
    from jax._src.lib import _jax

    make = gloo_listener.guarded(_jax.make_gloo_tcp_collectives, _groups)
    if local:  # Gloo listens where the machine's name leads otherwise, and JAX has no setting for it
        make = functools.partial(make, hostname="127.0.0.1")
    _jax.make_gloo_tcp_collectives = make


def _connect(hosts: Hosts, who: str, *, local: bool) -> None:
    """Connection to JAX's coordination service. HostsError, except for a TPU without other hosts, which is alone."""
    import jax

    known = hosts.coordinator != AUTO
    try:
        descriptors.raise_limit()  # JAX's coordinator accepts every connection
        jax.distributed.initialize(
            coordinator_address=hosts.coordinator if known else None,
            num_processes=hosts.count if known else None,
            process_id=hosts.index if known else None,
            cluster_detection_method="deactivate" if known else None,
            coordinator_bind_address=hosts.coordinator if local else None,
            initialization_timeout=2 * PATIENCE, heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=PARTING,
        )  # fmt: skip
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        reason = one_line(error)
        if known:
            raise HostsError(
                f"{who} can't join the others at {hosts.coordinator}: {reason}; check that all run, and that "
                f"{COORDINATOR} is reached from each"
            ) from error
        if hosts.told_by != "TPU":
            raise HostsError(
                f"{COORDINATOR} is {AUTO}, and JAX finds no cluster: {reason}; set it to HOST:PORT of process 0"
            ) from error
        print(f"a TPU that does not say its hosts: goes on alone ({reason})", file=sys.stderr)


def _groups() -> list[str]:
    """Keys of the processes that have said that they meet as a group of devices."""
    return [key for key, _ in _state().client.key_value_dir_get_bytes(gloo_listener.KEYS)]


def _check_port(coordinator: str, *, local: bool) -> None:
    """Raise HostsError if another process listens at our port, on which JAX would crash."""
    host, _, port = coordinator.rpartition(":")
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host if local else "", int(port)))
        except OSError as error:
            raise HostsError(
                f"port {port} can't be had on process 0 ({error.strerror}); name another one in {COORDINATOR}"
            ) from error


def _give_up(line: str) -> None:
    """End this process with one line, before JAX does with many."""
    print(f"longhaul: error: {line}; see to the others, and to the address", file=sys.stderr, flush=True)
    os._exit(1)


def together() -> bool:
    """True if this process was joined with others, by JAX: a process that has not imported it was not."""
    if "jax" not in sys.modules:
        return False
    import jax

    return bool(jax.distributed.is_initialized())


def index() -> int:
    """Number of this process; 0 if alone. Does not start JAX's devices, as `jax.process_index` would."""
    return int(_state().process_id) if together() else 0


def say(line: str) -> None:
    """Line on stderr, printed by the first process alone."""
    if index() == 0:
        print(line, file=sys.stderr, flush=True)


def count() -> int:
    """Number of joined processes; 1 if alone."""
    return int(_state().num_processes) if together() else 1


def _state() -> Any:
    """JAX's private state: there is no public way to the key-value store."""
    from jax._src import distributed

    return distributed.global_state


# ------------------------------------------------------------------------------------------------------- speaking


def share(name: str, make: Callable[[], T]) -> T:
    """Result of `make` in process 0, returned in all processes; it must fit JSON. Each name is used once.

    An error of `make` is raised in process 0, and HostsError in the others.
    """
    if not together():
        return make()
    if index() > 0:
        return cast(T, hear(name))
    try:
        value = make()
    except BaseException as error:
        _tell(name, {"error": one_line(error)})
        raise
    tell(name, value)
    return value


def tell(name: str, value: Any) -> None:
    """Message from process 0 to the others' `hear`; each name is used once. Elsewhere, or alone: nothing."""
    if together() and index() == 0:
        _tell(name, {"value": value})


def _tell(name: str, message: dict[str, Any]) -> None:
    _state().client.key_value_set(f"longhaul/{name}", json.dumps(message))


def hear(name: str) -> Any:
    """Message of process 0, awaited in another process. Raises HostsError if process 0 failed."""
    while True:
        try:
            message = json.loads(_state().client.blocking_key_value_get(f"longhaul/{name}", int(1000 * LISTEN)))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise HostsError(f"process 0 is gone: {one_line(error)}; its own output says why") from error
            continue  # Python has handled signals meanwhile
        if "error" in message:
            raise HostsError(f"process 0 failed: {message['error']}")
        return message["value"]


END = "end"
"""Name of the message with the exit code of process 0."""


def lead(work: Callable[[], int]) -> int:
    """Exit code of `work` in process 0, which is sent to the others in any case. Alone: just `work`."""
    code = 1
    try:
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        raise
    except (ValueError, OSError):
        code = BAD_INPUT
        raise
    finally:
        tell(END, code)
    return code


def follow(work: Callable[[], object]) -> int:
    """Exit code of process 0, once it has ended, after `work` in another process.

    If process 0 ends first, for which `work` may wait in vain, this process ends too: at once if process 0 failed, else
    `GRACE` seconds later.
    """
    heard: list[int] = []

    def listen() -> None:
        try:
            heard.append(hear(END))
        except HostsError as error:  # JAX ends this process too, at greater length
            print(f"longhaul: error: process {index()}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(GRACE if heard[0] in (0, STOPPED) else 0.0)
        with contextlib.suppress(Exception):  # process 0 waits for this farewell
            _state().shutdown()
        os._exit(heard[0])

    listener = threading.Thread(target=listen, name="follower", daemon=True)
    listener.start()
    try:
        work()
        while not heard:
            listener.join(LISTEN)
        return heard[0]
    except BaseException as error:
        listener.join(ALIKE)  # it ends this process if process 0 failed too: most likely one cause
        if not heard:  # no farewell: process 0 may not answer
            print(f"longhaul: error: process {index()}: {one_line(error)}", file=sys.stderr, flush=True)
        os._exit(heard[0] if heard else 1)
