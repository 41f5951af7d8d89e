"""Who this process is among those that train together, and how they speak to one another.

`find` reads it from the environment: what `longhaul launch` set, SLURM, Open MPI, a Kubernetes job or a TPU pod.
`start` joins the processes: afterwards `jax.devices()` are those of all, and programs run on all at once. Where nothing
is found this process is alone, and `jax.distributed` is never touched.

Process 0 decides: it reads the command line, makes the folder, writes whatever is written once. The others hear of it
through the key-value store of JAX's coordination service, which process 0 runs. Where one process dies, that service
ends the others within about `HEARTBEAT` seconds; whoever started them starts them again.
"""

from __future__ import annotations

import contextlib
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

from longhaul.runtime.launch.process import end_with_parent

T = TypeVar("T")

COORDINATOR, INDEX, COUNT = "LONGHAUL_COORDINATOR", "LONGHAUL_PROCESS_ID", "LONGHAUL_NUM_PROCESSES"
"""Host and port of process 0, the process's number, how many there are: these come before what a cluster says."""

SERVICE = "LONGHAUL_SERVICE"
"""The headless service of a Kubernetes job, by which its pods find one another."""

DEVICES = "LONGHAUL_LOCAL_DEVICES"
"""CPU devices of each process, where --mesh does not say how many there are in all."""

AUTO = "auto"
"""As the coordinator: JAX finds out by itself."""

PORT = 8476
"""Of the coordination service on process 0, where nobody says which."""

PATIENCE = 300
"""Seconds in which all processes must have come."""

HEARTBEAT = 15
"""Seconds without a sign of life after which a process counts as dead."""

PARTING = 30
"""Seconds that a process waits for the others at its end."""

GRACE = 10
"""Seconds that a process has to end after process 0 did."""

ALIKE = 2.0
"""Seconds in which processes fail of the same."""

LISTEN = 0.5
"""Seconds between two looks for signals while a process waits to be told something."""


class HostsError(ValueError):
    """Processes that can't be told or joined; the message is one line."""


@dataclass(frozen=True)
class Hosts:
    """This process among `count`. `count` 0: JAX finds out."""

    index: int = 0
    count: int = 1
    coordinator: str = ""  # host:port of process 0
    told_by: str = ""


ALONE = Hosts()


# ---------------------------------------------------------------------------------------------------- who am I


def find(environment: Mapping[str, str], *, tpu: bool = False) -> Hosts:
    """Who this process is by its environment; `tpu`: whether it runs on a TPU's machine.

    Raises HostsError, one line, where the environment says a part, or what can't be.
    """
    if environment.get(COUNT) == "1":
        return ALONE
    if environment.get(COORDINATOR) == AUTO:
        return Hosts(0, 0, AUTO, COORDINATOR)
    told = _slurm(environment) or _open_mpi(environment) or _kubernetes(environment) or _tpu(environment)
    given = [name for name in (COORDINATOR, INDEX, COUNT) if environment.get(name)]
    if told is None and not given:
        return Hosts(0, 0, AUTO, "TPU") if tpu else ALONE
    told = told or Hosts(-1, 0, "", ", ".join(given))
    index, count = (_number(environment, name, known) for name, known in ((INDEX, told.index), (COUNT, told.count)))
    coordinator = environment.get(COORDINATOR) or told.coordinator
    lacking = [n for n, lacks in ((COORDINATOR, not coordinator), (INDEX, index < 0), (COUNT, count < 1)) if lacks]
    if lacking:
        raise HostsError(
            f"{told.told_by} is set, and {' and '.join(lacking)} not; set all of {COORDINATOR} (HOST:PORT of "
            f"process 0), {INDEX} and {COUNT}, or none"
        )
    if index >= count:
        raise HostsError(f"{INDEX} is {index}, and there are {count} processes; it must lie in 0 to {count - 1}")
    return ALONE if count == 1 else Hosts(index, count, _with_port(coordinator), told.told_by)


def _number(environment: Mapping[str, str], name: str, known: int) -> int:
    word = environment.get(name, "")
    if word and not word.isdecimal():
        raise HostsError(f"{name} is {word!r}; it must be a whole number of at least 0")
    return int(word) if word else known


def _with_port(coordinator: str) -> str:
    host, colon, port = coordinator.rpartition(":")
    if not colon:
        return f"{coordinator}:{PORT}"
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise HostsError(f"{COORDINATOR} is {coordinator!r}; it must be HOST:PORT of process 0, or {AUTO}")
    return coordinator


def _slurm(environment: Mapping[str, str]) -> Hosts | None:
    """A task of `srun`. A batch script outside of `srun` is alone, however many tasks its job has."""
    names = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    job, index, count, nodes = (environment.get(name, "") for name in names)
    if not (job.isdecimal() and index.isdecimal() and count.isdecimal() and nodes) or int(count) < 2:
        return None
    port = 61440 + int(job) % 4096  # jobs that share a node keep apart
    return Hosts(int(index), int(count), f"{first_node(nodes)}:{port}", "SLURM")


def first_node(nodes: str) -> str:
    """The first of a list of nodes as SLURM writes it: "a[007-015,020],b" -> "a007"."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if found is None:
        raise HostsError(f"SLURM_STEP_NODELIST is {nodes!r}, which names no node; set {COORDINATOR}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", found[0])


def _open_mpi(environment: Mapping[str, str]) -> Hosts | None:
    """A process of `mpirun`; its host counts as that of process 0 unless LONGHAUL_COORDINATOR says otherwise."""
    index, count = (environment.get(f"OMPI_COMM_WORLD_{name}", "") for name in ("RANK", "SIZE"))
    if not (index.isdecimal() and count.isdecimal()) or int(count) < 2:
        return None
    launcher = re.match(r"(\d+)\.\d+;tcp://([^,:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    coordinator = f"{launcher[2]}:{61440 + int(launcher[1]) // 4096 % 4096}" if launcher else ""
    return Hosts(int(index), int(count), coordinator, "OMPI_COMM_WORLD_SIZE")


def _kubernetes(environment: Mapping[str, str]) -> Hosts | None:
    """A pod of an indexed job whose manifest says the number of pods; else indices may mean anything."""
    index, count = environment.get("JOB_COMPLETION_INDEX", ""), environment.get(COUNT, "")
    if not (index.isdecimal() and count):
        return None
    job = environment.get("HOSTNAME", "").removesuffix(f"-{index}")
    service = environment.get(SERVICE, "")
    return Hosts(int(index), 0, f"{job}-0.{service}:{PORT}" if job and service else "", "JOB_COMPLETION_INDEX")


def _tpu(environment: Mapping[str, str]) -> Hosts | None:
    """A worker of a TPU pod that knows the others by name, as under Kubernetes on Google's cloud."""
    index, names = environment.get("TPU_WORKER_ID", ""), environment.get("TPU_WORKER_HOSTNAMES", "")
    workers = [name for name in names.split(",") if name]
    if not index.isdecimal() or len(workers) < 2 or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return None
    return Hosts(int(index), len(workers), f"{workers[0]}:{PORT}", "TPU_WORKER_HOSTNAMES")


def on_tpu(environment: Mapping[str, str]) -> bool:
    """Whether this machine has a TPU that JAX will use."""
    there = any(Path(place).exists() for place in ("/dev/accel0", "/dev/vfio/0"))
    wanted = "tpu" in environment.get("JAX_PLATFORMS", "tpu")
    return there and wanted and importlib.util.find_spec("libtpu") is not None


# ------------------------------------------------------------------------------------------------------- joining


def start(hosts: Hosts) -> None:
    """Joins the processes, before JAX runs; does nothing where this one is alone. Raises HostsError."""
    end_with_parent()
    if hosts.count == 1:
        return
    import jax

    _redirect()
    # JAX's own listener would take SIGTERM away from the run, which saves when it hears it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    known = hosts.coordinator != AUTO
    here = hosts.coordinator.startswith(("127.0.0.1:", "localhost:"))  # then nobody else's business
    who = f"process {hosts.index} of {hosts.count} (by {hosts.told_by})"
    late = threading.Timer(PATIENCE, _give_up, [f"{who}: not all have met at {hosts.coordinator} in {PATIENCE} s"])
    late.daemon = True
    late.start()
    if known and hosts.index == 0:
        _check_port(hosts.coordinator, here=here)
    try:
        jax.distributed.initialize(
            coordinator_address=hosts.coordinator if known else None,
            num_processes=hosts.count if known else None,
            process_id=hosts.index if known else None,
            cluster_detection_method="deactivate" if known else None,
            coordinator_bind_address=hosts.coordinator if here else None,
            initialization_timeout=2 * PATIENCE, heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=PARTING,
        )  # fmt: skip
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if known:
            raise HostsError(f"{who} can't join the others at {hosts.coordinator}: {_short(error)}") from error
        if hosts.told_by != "TPU":
            raise HostsError(f"{COORDINATOR} is {AUTO}, and JAX finds no cluster: {_short(error)}") from error
        print(f"a TPU that does not say its hosts: goes on alone ({_short(error)})", file=sys.stderr)
    finally:
        late.cancel()


def _check_port(coordinator: str, *, here: bool) -> None:
    """Raises HostsError where another process listens at our port, on which JAX would crash."""
    host, _, port = coordinator.rpartition(":")
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host if here else "", int(port)))
        except OSError as error:
            raise HostsError(
                f"port {port} can't be had on process 0 ({error.strerror}); name another one in {COORDINATOR}"
            ) from error


def _give_up(line: str) -> None:
    """Ends this process with one line, before JAX does with many."""
    print(f"longhaul: error: {line}; see to the others, and to the address", file=sys.stderr, flush=True)
    os._exit(1)


def _redirect() -> None:
    """What C++ prints of its connections goes to stderr: stdout is for results."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", errors="replace")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def together() -> bool:
    """Whether this process was joined with others."""
    import jax

    return bool(jax.distributed.is_initialized())


def index() -> int:
    """Of this process; 0 where it is alone. Does not start JAX's devices, as `jax.process_index` would."""
    return int(_state().process_id) if together() else 0


def count() -> int:
    """Processes that were joined; 1 where this one is alone."""
    return int(_state().num_processes) if together() else 1


def _state() -> Any:
    """JAX's own: there is no public way to the key-value store."""
    from jax._src import distributed

    return distributed.global_state


# ------------------------------------------------------------------------------------------------------- speaking


def share(name: str, make: Callable[[], T]) -> T:
    """What `make` returns in process 0, in all processes; it must be what JSON can hold. Each name once.

    Where it raises, it raises in process 0, and HostsError in the others.
    """
    if not together():
        return make()
    if index() > 0:
        return cast(T, hear(name))
    try:
        value = make()
    except BaseException as error:
        _tell(name, {"error": _short(error)})
        raise
    tell(name, value)
    return value


def tell(name: str, value: Any) -> None:
    """What the others `hear` of process 0 under this name, which is used once; elsewhere, or alone, nothing."""
    if together() and index() == 0:
        _tell(name, {"value": value})


def _tell(name: str, message: dict[str, Any]) -> None:
    _state().client.key_value_set(f"longhaul/{name}", json.dumps(message))


def hear(name: str) -> Any:
    """In another process: waits for what process 0 tells, as long as that lives. Raises HostsError where it failed."""
    while True:
        try:
            message = json.loads(_state().client.blocking_key_value_get(f"longhaul/{name}", int(1000 * LISTEN)))
        except RuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise HostsError(f"process 0 is gone: {_short(error)}") from error
            continue  # Python has looked for signals meanwhile
        if "error" in message:
            raise HostsError(f"process 0 failed: {message['error']}")
        return message["value"]


END, BAD_INPUT, STOPPED = "end", 2, 75


def lead(work: Callable[[], int]) -> int:
    """`work` in process 0; -> its exit code, which the others hear, whatever happens. Alone: just `work`."""
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
    """`work` in another process; -> the exit code of process 0, when that has ended.

    Where process 0 ends before `work` does, which may wait for it in vain, this process ends too: at once where process
    0 failed, else `GRACE` seconds later.
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
        listener.join(ALIKE)  # which ends this process if process 0 failed, too: most likely of the same
        if not heard:  # without a farewell, for which process 0 may not come
            print(f"longhaul: error: process {index()}: {_short(error)}", file=sys.stderr, flush=True)
        os._exit(heard[0] if heard else 1)
