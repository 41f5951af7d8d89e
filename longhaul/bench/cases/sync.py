"""Cases of `longhaul bench sync`: a model's parameters from one process to others, by each transport, stage by stage.

The limits are measured in the same repeat: as many private copies of shared memory, and bare loopback sockets, to the
same processes. Both then meet the same load of the machine, which `limit_ratio` is relative to.
"""

from __future__ import annotations

import itertools
import json
import math
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from longhaul.bench.cases.training import Prepared
from longhaul.runtime import devices
from longhaul.runtime.devices import cores
from longhaul.runtime.launch.process import PIPE, Process
from longhaul.runtime.provenance import provenance
from longhaul.weight_sync import cost_model, model_shapes, packing
from longhaul.weight_sync.buffers import Block
from longhaul.weight_sync.cost_model import Rates
from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.manifest import LINE, Manifest, layout, numpy_dtype
from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.resharding import (
    Box,
    Layout,
    Plan,
    Shapes,
    execute_numpy,
    plan,
    replicas,
    replicated,
    sharded,
)
from longhaul.weight_sync.transports import serve
from longhaul.weight_sync.transports.sockets import Wire
from longhaul.weight_sync.transports.tcp import NEAR

PLACES = 3
"""Images of the sender: one served, one on its way, one free."""

PART = 1 << 20
"""Elements that are changed at a time, to bound temporary memory."""

LARGEST_SAMPLE = 512 << 20
"""Bytes with which the machine's rates are measured, at most: more than its caches hold."""

SAMPLE_TENSORS = 8

SAMPLE_SECONDS = 120.0
"""Time limit of a stream of the sample."""


class Child:
    """Process of `longhaul.bench.sync_receiver`."""

    def __init__(self, address: str, size: int, descriptor: int, folder: str, images: int = 2) -> None:
        words = [address, size, descriptor, images * size, folder]
        command = [sys.executable, "-m", "longhaul.bench.sync_receiver", *map(str, words)]
        self._process = Process(command, talks=True, out=PIPE, descriptors=[descriptor], tied=False)
        self.answer()

    def tell(self, line: str) -> None:
        self._process.say(f"{line}\n".encode())

    def answer(self) -> dict[str, Any]:
        assert self._process.out is not None
        line = self._process.out.readline()
        if not line:
            self._process.wait()
            raise RuntimeError(f"a receiver's process ended with code {self._process.code}; its message is above")
        return json.loads(line)


def together(children: list[Child], line: str) -> list[dict[str, Any]]:
    """Answers of all children to one line."""
    for child in children:
        child.tell(line)
    return [child.answer() for child in children]


def check(model: str, receivers: int) -> None:
    """Raises ValueError where the machine's memory does not hold the trainer's tensors, the limit's, the sender's
    images, and one image a receiver, the least that any transport takes."""
    size, room = layout(model_shapes.forms(model))[1], devices.machine_memory()
    needed = (2 + PLACES + receivers) * size
    if needed > room:
        raise ValueError(
            f"--model {model} takes {needed / 1e9:,.0f} GB at least with {receivers} receivers, and this machine has "
            f"{room / 1e9:,.0f}; choose a smaller one, or plan it by its shapes: sync bench --layouts, sync plan"
        )


class Trained:
    """Parameters as bfloat16 that take steps of Adam at `rate`, simulated; `benchmarks.sync_delta` measures a training.

    Adam moves each parameter by about the rate, up or down. The fp32 master of a bfloat16 lies anywhere between its
    neighbours, so the bfloat16 moves to the next one with the probability rate / distance.
    """

    def __init__(self, tensors: dict[str, np.ndarray], rate: float) -> None:
        self._tensors, self._rate = tensors, np.float32(rate)
        self._random = np.random.default_rng(0)
        for array in tensors.values():
            for part in self._parts(array):
                drawn = self._random.standard_normal(part.size, np.float32) * np.float32(0.02)
                part[:] = (drawn.view(np.uint32) >> 16).astype(np.uint16)

    @staticmethod
    def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
        flat = array.reshape(-1).view(np.uint16)
        return (flat[at : at + PART] for at in range(0, flat.size, PART))

    def step(self) -> float:
        """Takes one step; returns the share of all elements that changed."""
        changed = total = 0
        for array in self._tensors.values():
            for part in self._parts(array):
                drawn = self._random.integers(0, 1 << 16, part.size, np.uint16)
                up = np.where(drawn & 1, self._rate, -self._rate)
                wide = (part.astype(np.uint32) << 16).view(np.float32) + up
                new = ((wide.view(np.uint32) + drawn) >> 16).astype(np.uint16)
                changed, total = changed + int(np.count_nonzero(new != part)), total + part.size
                part[:] = new
        return changed / total


def sync(model: str, receivers: int, lane: str, learning_rate: float | None = None) -> Prepared:
    """Case: a version of `model` to `receivers` processes by `lane`, from the call of `publish` until all serve it.

    The trainer's tensors are in its own memory, and are copied once. With `learning_rate` only the changes that
    `Trained` makes are sent, where they are worth it.
    """
    transfer = Transfer(model, receivers, lane, learning_rate)
    transfer.warm_up()
    config = {"model": model, "tensors": len(transfer.tensors), "image_bytes": transfer.size, "receivers": receivers}
    config |= {"lane": lane, "verify": "once" if lane == "shm" else "always"}
    config |= {} if learning_rate is None else {"learning_rate": learning_rate}
    return Prepared(config, receivers * transfer.size, "bytes", 0.0, lambda number: np.zeros(0), transfer.repeat)


class Transfer:
    """Trainer with a sender, and receivers in processes of their own."""

    def __init__(self, model: str, receivers: int, lane: str, learning_rate: float | None) -> None:
        forms = model_shapes.forms(model)
        self.lane, self.receivers, self.size = lane, receivers, layout(forms)[1]
        self.tensors = {name: np.zeros(shape, numpy_dtype(dtype)) for name, shape, dtype in forms}
        self.trained = None if learning_rate is None else Trained(self.tensors, learning_rate)
        random = np.random.default_rng(0)
        for array in () if self.trained else self.tensors.values():
            array.reshape(-1).view(np.uint16)[:] = random.integers(0, 1 << 16, array.size, np.uint16)
        self.limit = Block(self.size, 0)
        assert self.limit.map is not None
        self.source = np.frombuffer(self.limit.map, np.uint8)
        self.source[:] = 1
        folder = tempfile.mkdtemp(prefix="longhaul-sync-")
        where = {"shm": f"shm:{folder}/socket", "tcp": "tcp:127.0.0.1:0", "folder": f"folder:{folder}/versions"}
        opened = serve(where[lane])
        changes = self.trained is not None
        self.places = PLACES + (2 if changes else 0)  # the version before stays; and room for changes
        self.sender = Publisher(
            "bench", transports=[opened], settings=Settings(lease=60.0), budget=self.places * self.size,
            send_changes=changes,
        )  # fmt: skip
        self.images = 3 if changes else 2  # of a receiver, and room for changes
        self.children = [
            Child(opened.address, self.size, self.limit.descriptor, folder, self.images) for _ in range(receivers)
        ]
        self._versions = itertools.count()
        self.sample = Sample(min(self.size, LARGEST_SAMPLE), cores())
        self.rates = [self.sample.rates()]

    def warm_up(self) -> None:
        """First versions, which touch every image's pages."""
        if self.trained:  # the first has no base
            self.sender.publish(next(self._versions), self.tensors)
            together(self.children, "wait 0")
        for _ in range(PLACES):
            self.publish()

    def publish(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(seconds of a new version by stage, with the share and the ratio of changes; answers of the receivers)."""
        version, sender = next(self._versions), self.sender
        share = self.trained.step() if self.trained else None
        for array in () if self.trained else self.tensors.values():
            array.reshape(-1).view(np.uint16)[0] = version
        began = time.monotonic()
        if not sender.publish(version, self.tensors):
            raise RuntimeError("no image was free")
        returned = time.monotonic() - began
        acks = together(self.children, f"wait {version}")
        if not sender.wait(version, 60) or {each["root"] for each in acks} != {sender.status()["root"]}:
            raise RuntimeError(f"version {version} is not what was sent")
        stages = {stage: max(each.get(stage, 0.0) for each in acks) for stage in ("fetch", "verify", "decide", "swap")}
        if share is not None:
            sent = sender.sent_changes(version) or self.size  # all of it, where changes are not worth it
            stages |= {"encode": sender.seconds["encode"], "changed": share, "ratio": self.size / sent}
        return {"wall": max(each["at"] for each in acks) - began, "publish": returned, **stages}, acks

    def repeat(self, _: Any) -> dict[str, float]:
        """Figures of a version, beside the machine's limits right after it."""
        before = [each["cpu"] for each in together(self.children, "cpu")]
        used = time.process_time()
        timings, acks = self.publish()
        about = {name: timings.pop(name) for name in ("changed", "ratio") if name in timings}
        used = time.process_time() - used
        after = [each["cpu"] for each in together(self.children, "cpu")]
        copied = together(self.children, "copy")
        copies = max(each["at"] for each in copied) - min(each["began"] for each in copied)
        bare, bare_cpu = _streamed(self.children, self.source) if self.lane == "tcp" else (0.0, 0.0)
        bound = bare or copies
        own = 0 if self.lane == "shm" else self.images * self.receivers  # images that receivers have for themselves
        return {
            "wall_seconds": timings["wall"],
            "cpu_seconds": used + sum(b - a for a, b in zip(before, after, strict=True)),
            "gather_seconds": self.sender.seconds["gather"],
            **{f"{stage}_seconds": seconds for stage, seconds in timings.items() if stage != "wall"},
            **{name: float(value) for name, value in about.items()},
            "peak_bytes": float(self.sender.peak_bytes + sum(each["peak"] for each in acks)),
            "budget_bytes": float(self.size * (self.places + own)),
            "memcpy_seconds": copies,
            "memcpy_cpu_seconds": sum(each["used"] for each in copied),
            **({"socket_seconds": bare, "socket_cpu_seconds": bare_cpu} if bare else {}),
            "limit_seconds": bound,
            **self._forecast(timings["wall"]),
            "limit_ratio": timings["wall"] / bound,
        }

    def _forecast(self, wall: float) -> dict[str, float]:
        """The cost model's seconds, by the rates right before and after a repeat; nothing where it has none."""
        self.rates.append(self.sample.rates())
        if self.lane == "folder" or self.trained:
            return {}
        around = [cost_model.local(self.size, self.receivers, cores(), each, self.lane).pipelined
                  for each in self.rates[-2:]]  # fmt: skip
        seconds = statistics.fmean(around)
        return {"model_seconds": seconds, "model_error": seconds / wall - 1.0}


class Sample:
    """Memory to measure this machine's rates with, by the code that versions go through: the input of
    `cost_model.local`. It is already touched. Two threads work at once if there are two cores."""

    def __init__(self, nbytes: int, cores: int) -> None:
        self.together = together = min(2, cores)
        self.pairs = min(float(together), max(1.0, cores / 2))  # pairs of cores that carry streams
        self._given = {str(i): np.ones(nbytes // SAMPLE_TENSORS, np.uint8) for i in range(SAMPLE_TENSORS)}
        self._planned, self.size = packing.describe(self._given)
        self._block = Block(self.size, 0)
        assert self._block.map is not None
        self._image = np.frombuffer(self._block.map, np.uint8, self.size)
        self._private = [_aligned(self.size) for _ in range(together)]
        self._form = Manifest("rates", 0, 0, -1, self.size, self._planned)
        self._pool = ThreadPoolExecutor(2 * together, "longhaul-rates")
        self.rates()  # compiles the kernels

    def rates(self) -> Rates:
        """Bytes a second of one thread while all work."""
        return Rates(
            self._rate(self._gather) / self.together,
            self._rate(self._streams) * self.together / self.pairs,
            self._rate(self._digest),
        )

    def close(self) -> None:
        """Frees the memory."""
        self._pool.shutdown()
        del self._image
        self._block.free()

    def _rate(self, call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return self.size / (time.perf_counter() - began)

    def _gather(self) -> None:
        packing.gather(self._given, self._planned, self._image, self._pool, self.together)

    def _digest(self) -> None:
        list(self._pool.map(lambda _: digest(self._image), range(self.together)))

    def _streams(self) -> None:
        """Sends the sample through TCP sockets of this machine, one a thread, digested as it arrives."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR)
            pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in self._private]
        wires = [(Wire(receiver), Wire(sender)) for receiver, sender in pairs]
        sent = [self._pool.submit(sender.pour, self._image.data, SAMPLE_SECONDS) for _, sender in wires]
        came = [
            self._pool.submit(self._drawn, wire, into) for (wire, _), into in zip(wires, self._private, strict=True)
        ]
        for each in [*sent, *came]:
            each.result()
        for receiver, sender in wires:
            receiver.close()
            sender.close()

    def _drawn(self, wire: Wire, into: np.ndarray) -> None:
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR)
        arrival = packing.Arrival(self._form)
        wire.draw(into.data, time.monotonic() + SAMPLE_SECONDS, lambda count: arrival.arrived(into, count))


def _aligned(size: int) -> np.ndarray:
    """Touched memory that begins at a cache line, as an image does."""
    memory = np.ones(size + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + size]


def _streamed(children: list[Child], data: np.ndarray) -> tuple[float, float]:
    """(seconds, CPU-seconds of all processes) of bare sockets that send the bytes to each receiver."""
    with socket.create_server(("127.0.0.1", 0), backlog=len(children)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        for child in children:
            child.tell(f"stream {server.getsockname()[1]}")
        socks = [server.accept()[0] for _ in children]
        began, used = time.monotonic(), time.process_time()
        with ThreadPoolExecutor(len(socks)) as pool:
            list(pool.map(lambda sock: sock.sendall(data.data), socks))
        answers = [child.answer() for child in children]
        used = time.process_time() - used + sum(each["used"] for each in answers)
        for sock in socks:
            sock.close()
        return max(each["at"] for each in answers) - began, used


# ------------------------------------------------------------------------------------------------------------ layouts

SMALL = 256 << 20
"""Bytes of both layouts on all ranks, up to which the moves are made."""

BY_ROWS = ("o_proj", "down_proj")
"""Kernels that tensor-parallel serving splits along their input; all other matrices along their output."""


def parsed(word: str) -> tuple[str, int, int]:
    """(kind, replicas, ranks of each) of a layout: `tp:16x8` -> ("tp", 16, 8). ValueError for a wrong one."""
    kind, _, sizes = word.partition(":")
    count, _, each = sizes.rpartition("x")
    numbers = [count or "1", each]
    if kind not in KINDS or not all(each.isascii() and each.isdigit() and 0 < int(each) <= 4096 for each in numbers):
        raise ValueError(
            f"{word!r} is no layout; write {', '.join(f'{kind}:N' for kind in KINDS)} (N ranks, 1 to 4096) or "
            "tp:MxN (M replicas of it)"
        )
    return kind, int(numbers[0]), int(numbers[1])


def _tensor_parallel(name: str, shape: tuple[int, ...]) -> int | None:
    if len(shape) < 2:
        return None
    return 1 if any(part in name for part in BY_ROWS) else 0


KINDS: dict[str, Callable[[Shapes, int], Layout]] = {
    "replicated": replicated,
    "fsdp": sharded,
    "tp": lambda shapes, ranks: sharded(shapes, ranks, _tensor_parallel),
}
"""Kinds of layouts: every tensor on each rank; split along its first axis; split as tensor-parallel serving does."""


def layout_of(word: str, shapes: Shapes) -> Layout:
    """Layout of these tensors by its word."""
    kind, count, ranks = parsed(word)
    single = KINDS[kind](shapes, ranks)
    return replicas(single, count) if count > 1 else single


def layouts(model: str, source: str, destination: str) -> Iterator[dict[str, Any]]:
    """Figure of planning the moves from one layout of a model to another: `longhaul sync bench --layouts`.

    It works by shapes alone, so a model of any size is planned; its layers are alike, so one of them is. Where both
    layouts of that layer are small, the moves are also made between arrays, and the result is compared with the layout.
    Raises ValueError for words that are no layouts, or an unknown model.
    """
    (_, m, n), (kind, count, each) = parsed(source), parsed(destination)
    count, each = (each, count) if kind == "replicated" else (count, each)  # each rank has all of it
    forms = model_shapes.forms(model)
    params = sum(math.prod(shape) for _, shape, _ in forms)
    shapes = {name: (shape, dtype) for name, shape, dtype in model_shapes.forms(model, layers=1) if ".layers." in name}
    held, needed = layout_of(source, shapes), layout_of(destination, shapes)
    used, began = time.process_time(), time.perf_counter()
    moves = plan(held, needed)
    planned = {"plan_seconds": time.perf_counter() - began, "plan_cpu_seconds": time.process_time() - used}
    setting = cost_model.Setting(float(params), 2.0, m * n, count, each)
    about = provenance()
    yield {
        "name": "sync-layouts",
        "config": {
            "model": model, "params": params, "layers": model_shapes.DECODERS[model].layers, "tensors": len(forms),
            "image_bytes": 2 * params, "source": source, "destination": destination, "planned_layers": 1,
            "delta_ratio": setting.delta_ratio,
        },
        "layer_bytes": held.nbytes,
        **planned,
        "moves": sum(len(bucket) for bucket in moves.buckets),
        "buckets": len(moves.buckets),
        "moved_bytes": moves.nbytes,
        "most_sent_bytes": max((size for _, size in moves.sent), default=0),
        "most_received_bytes": max((size for _, size in moves.received), default=0),
        "verified": _size(held) + _size(needed) <= SMALL and _execute_verified(moves, held, needed),
        "model_seconds": {each.name: each.pipelined for each in cost_model.costs(setting)},
        **{key: about[key] for key in ("versions", "commit")},
    }  # fmt: skip


def _size(of: Layout) -> int:
    """Bytes of all parts on all ranks."""
    boxes = [(tensor.itemsize, box) for tensor in of.tensors for _, box in tensor.boxes]
    return sum(size * math.prod(end - begin for begin, end in box) for size, box in boxes)


def _execute_verified(planned: Plan, held: Layout, needed: Layout) -> bool:
    """Makes the moves between arrays; returns True. RuntimeError where a part differs from its layout."""
    random = np.random.default_rng(0)
    whole = {
        tensor.name: random.integers(0, 1 << 16, tensor.shape, np.uint16).view(numpy_dtype(tensor.dtype))
        for tensor in held.tensors
    }
    parts: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in held.ranks}
    into: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in needed.ranks}
    for tensor in held.tensors:
        for rank, box in tensor.boxes:
            parts[rank][tensor.name] = np.ascontiguousarray(_part(whole[tensor.name], box))
    for tensor in needed.tensors:
        for rank, box in tensor.boxes:
            into[rank][tensor.name] = np.zeros([end - begin for begin, end in box], whole[tensor.name].dtype)
    execute_numpy(planned, parts, into)
    for tensor in needed.tensors:
        for rank, box in tensor.boxes:
            came, expected = into[rank][tensor.name], _part(whole[tensor.name], box)
            if not np.array_equal(came.view(np.uint16), np.ascontiguousarray(expected).view(np.uint16)):
                raise RuntimeError(f"rank {rank} has another {tensor.name} than it should")
    return True


def _part(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(begin, end) for begin, end in box)]
