"""Processes of one training run on the nodes of a Ray cluster (Moritz et al. 2018), supervised by `launch`.

Ray only places processes and lists nodes. Each process is the child of a small actor, which holds its lifeline and its
pipes and forwards their output. The launcher owns the actors, never a training process, so that the end of one takes
nothing else along. Ray restarts none of them (`max_restarts` 0), because all must restart together. Ray notices a hung
node after a minute or more, and a hung method never; here an actor that does not answer for `MUTE` seconds is lost, and
the training loop's signs of life cover the rest.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from longhaul.runtime import process_group
from longhaul.runtime.launch import local
from longhaul.runtime.launch.process import Take
from longhaul.runtime.launch.supervisor import Gang, Look, OutputForwarder
from longhaul.runtime.process_group import HostsError

MUTE = 15.0
"""Seconds without an answer after which an actor counts as lost."""

ANSWER = 20.0
"""Seconds that placing may take; Ray continues to place on a dead node for some time."""

ENDING = 10.0
"""Seconds that actors have to end their processes before they are killed, which ends those too."""

PASSED = ("JAX_", "XLA_", "LONGHAUL_", "NCCL_", "NPROC")
"""Prefixes of the launcher's variables that its processes get; all others are their node's."""


class Wanted(NamedTuple):
    number: int  # of processes
    fewest: int  # of processes, with which a run may go on
    devices: int | None  # of each; None: all of a node's, or its share of them
    place: str  # strict, spread, pack
    patience: float  # seconds that a start waits for nodes


class Node(NamedTuple):
    name: str
    cpus: int
    gpus: int


class Layout(NamedTuple):
    """Request to Ray: `number` bundles, each for a process of `devices` devices."""

    number: int
    devices: int
    bundle: dict[str, float]
    strategy: str  # Ray's name


# --------------------------------------------------------------------------------------------------------- planning


def room(nodes: Sequence[Node], devices: int, *, strict: bool) -> int:
    """Number of processes of `devices` devices that fit: GPUs if there are any, else the cores that Ray counts."""
    capacities = _capacities(nodes)
    return sum(capacity >= devices if strict else capacity // devices for capacity in capacities)


def _capacities(nodes: Sequence[Node]) -> list[int]:
    gpus = any(node.gpus for node in nodes)
    return [node.cpus if not gpus else node.gpus if node.cpus else 0 for node in nodes]


def share(nodes: Sequence[Node], count: int, *, strict: bool) -> int:
    """Largest number of devices a process with which `count` processes fit; 1 if none do."""
    most = max(_capacities(nodes), default=1)
    return next((n for n in range(most, 1, -1) if room(nodes, n, strict=strict) >= count), 1)


def layout(nodes: Sequence[Node], wanted: Wanted, devices: int) -> Layout | None:
    """Layout of as many processes as fit now, at most those wanted; None if too few fit.

    On the CPU a run keeps its number of devices, which fewer processes must be able to share evenly.
    """
    strict = wanted.place == "strict"
    gpus = any(node.gpus for node in nodes)
    count = min(wanted.number, room(nodes, devices, strict=strict))
    while count > 0 and not gpus and wanted.number * devices % count:
        count -= 1
    if count < wanted.fewest:
        return None
    strategy = {"strict": "STRICT_SPREAD", "spread": "SPREAD", "pack": "PACK"}[wanted.place]
    bundle = {"CPU": 1.0, "GPU": float(devices)} if gpus else {"CPU": float(devices)}
    return Layout(count, devices, bundle, strategy)


def variables(count: int, devices: int, address: str, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables of each process beside its node's; `address` is process 0's, `environment` the launcher's."""
    passed = {name: value for name, value in environment.items() if name.startswith(PASSED)}
    about = {process_group.COORDINATOR: address, process_group.COUNT: str(count), process_group.DEVICES: str(devices)}
    return [passed | about | {process_group.INDEX: str(i)} for i in range(count)]


# ------------------------------------------------------------------------------------------------------ on the nodes


class Host:
    """Actor that holds one process."""

    def __init__(self) -> None:
        self._member: local.TrainingProcess | None = None
        self._lines: list[tuple[bool, bytes]] = []
        self._lock = threading.Lock()

    def where(self) -> tuple[str, str, int]:
        """(node's name, its address, a free port there)."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), local.free_port("")

    def begin(self, program: Sequence[str], variables: dict[str, str], folder: str) -> None:
        """Start of `program` with this node's Python in `folder`, if that exists here."""
        environment = {**os.environ, **variables}
        python = local.PROGRAM[0]
        cwd = folder if os.path.isdir(folder) else None
        self._member = local.TrainingProcess(
            [python, *program], environment, out=self._take(out=True), error=self._take(out=False), folder=cwd
        )

    def _take(self, *, out: bool) -> Take:
        def take(line: bytes) -> None:
            with self._lock:
                self._lines.append((out, line))

        return take

    def look(self) -> tuple[Look, list[tuple[bool, bytes]]]:
        """Current look at the process, and the lines printed since the last: (True for standard output, line)."""
        assert self._member is not None
        seen = self._member.look()
        with self._lock:
            lines, self._lines = self._lines, []
        return seen, lines

    def send(self, number: int) -> None:
        if self._member is not None:
            self._member.process.send(number)

    def end(self) -> list[tuple[bool, bytes]]:
        """End the process; -> the remaining lines."""
        if self._member is not None:
            self._member.end()
        return self._lines


# ------------------------------------------------------------------------------------------------------ the launcher


def starter(wanted: Wanted, say: Callable[[str], None]) -> Callable[[Sequence[str], OutputForwarder], Gang]:
    """Function that starts `longhaul WORDS` on the joined cluster; `say` takes a line if fewer processes fit than
    wanted."""
    devices = wanted.devices

    def start(command: Sequence[str], output: OutputForwarder) -> Gang:
        nonlocal devices
        until, waits = time.monotonic() + wanted.patience, False
        while True:
            nodes, late = _nodes(), time.monotonic() > until
            each = devices or share(nodes, wanted.number, strict=wanted.place == "strict")
            planned = layout(nodes, wanted, each)
            full = planned is not None and planned.number == wanted.number
            placed = _place(planned) if planned is not None and (full or late) else None
            if planned is not None and placed is not None:
                devices = each
                if not full:
                    say(f"goes on with {planned.number} of {wanted.number} processes: there are no nodes for more")
                each_variables = variables(planned.number, planned.devices, placed.address, os.environ)
                for actor, own in zip(placed.actors, each_variables, strict=True):
                    actor.begin.remote([*local.PROGRAM[1:], *command], own, os.getcwd())  # `look` reports a failure
                return OnRay(placed, output)
            if late:
                raise HostsError(_too_small(nodes, wanted, each))
            if not waits:
                say(f"waits for nodes, {wanted.patience:g} s at most: {_nodes_text(nodes)}")
            waits = True
            time.sleep(0.5)

    return start


def _nodes() -> list[Node]:
    import ray

    alive = [(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return sorted(Node(name, int(has.get("CPU", 0)), int(has.get("GPU", 0))) for name, has in alive)


def _nodes_text(nodes: Sequence[Node]) -> str:
    kind = "GPUs" if any(node.gpus for node in nodes) else "cores"
    return f"{len(nodes)} are there, with {', '.join(map(str, _capacities(nodes))) or 'no'} {kind}"


def _too_small(nodes: Sequence[Node], wanted: Wanted, devices: int) -> str:
    remedy = "" if wanted.place != "strict" else ", or let processes share nodes (--place spread)"
    return (
        f"{wanted.fewest} processes of {devices} device(s) each have no room: {_nodes_text(nodes)}, less what "
        f"others use; give fewer --hosts or --devices-per-host{remedy}"
    )


class Placed(NamedTuple):
    actors: list[Any]  # by the number of their process
    nodes: list[str]  # addresses
    address: str  # of process 0: HOST:PORT
    group: Any


def _place(planned: Layout) -> Placed | None:
    """Actors on their nodes; None if Ray cannot place them in time."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([planned.bundle] * planned.number, strategy=planned.strategy)
    actors: list[Any] = []
    try:
        if not group.wait(ANSWER):
            raise TimeoutError
        for i in range(planned.number):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            has = {"num_cpus": planned.bundle["CPU"], "num_gpus": planned.bundle.get("GPU", 0.0)}
            actors.append(ray.remote(Host).options(scheduling_strategy=strategy, max_restarts=0, **has).remote())
        where = ray.get([actor.where.remote() for actor in actors], timeout=ANSWER)
    except (TimeoutError, ray.exceptions.RayError):
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
        return None
    # Processes of a node have neighbouring numbers: most of their communication stays there.
    order = sorted(range(planned.number), key=lambda i: (where[i][0], i))
    _, host, port = where[order[0]]
    return Placed([actors[i] for i in order], [where[i][1] for i in order], f"{host}:{port}", group)


class OnRay:
    """Processes on a cluster, as a `supervisor.Gang`."""

    pause = 0.1

    def __init__(self, placed: Placed, output: OutputForwarder):
        self._placed, self._output = placed, output
        self._seen = [Look() for _ in placed.actors]
        self._asked: dict[int, tuple[Any, float]] = {}  # process -> (pending answer, time of the request)
        self._errors = [output.error(i) for i in range(len(placed.actors))]

    def look(self) -> list[Look]:
        """State of all processes: actors without an answer yet keep their last one."""
        import ray

        now = time.monotonic()
        self._seen = [look._replace(signs=b"") for look in self._seen]
        for i, look in enumerate(self._seen):
            if i not in self._asked and look.code is None and not look.lost:
                self._asked[i] = self._placed.actors[i].look.remote(), now
        answers = [answer for answer, _ in self._asked.values()]
        ready = ray.wait(answers, num_returns=len(answers), timeout=self.pause / 2)[0] if answers else []
        for i, (answer, since) in list(self._asked.items()):
            if answer in ready:
                del self._asked[i]
                self._seen[i] = self._answer(i, answer)
            elif now - since > MUTE:
                del self._asked[i]
                lost = f"on {self._placed.nodes[i]} is lost: no answer for {now - since:.0f} s"
                self._seen[i] = Look(lost=lost)
        return list(self._seen)

    def _answer(self, i: int, answer: Any) -> Look:
        import ray

        try:
            look, lines = ray.get(answer)
        except ray.exceptions.RayError as error:
            return Look(lost=f"on {self._placed.nodes[i]} is lost: {type(error).__name__} of Ray")
        self._forward_lines(i, lines)
        seen: Look = look
        return seen

    def _forward_lines(self, i: int, lines: Sequence[tuple[bool, bytes]]) -> None:
        for out, line in lines:
            if not out:
                self._errors[i](line)
            elif i == 0:
                self._output.out(line)

    def send(self, number: int) -> None:
        for i, look in enumerate(self._seen):
            if look.code is None and not look.lost:
                self._placed.actors[i].send.remote(number)

    def end(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        left = {actor.end.remote(): i for i, actor in enumerate(self._placed.actors) if not self._seen[i].lost}
        ready = ray.wait(list(left), num_returns=len(left), timeout=ENDING)[0] if left else []
        for answer in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                self._forward_lines(left[answer], ray.get(answer))
        for actor in self._placed.actors:
            ray.kill(actor)
        remove_placement_group(self._placed.group)
