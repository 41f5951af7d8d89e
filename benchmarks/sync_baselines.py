"""How long others take to bring a model's parameters from one process to two, beside us and the limits, in one run.

    python -m benchmarks.sync_baselines [memcpy socket longhaul-shm longhaul-tcp torch-file gloo orbax grpc ...]
        [--model qwen3-0.6b] [--repeats 5] [--json FILE]

Each names what must be importable: torch-file and gloo torch, orbax Orbax and JAX, grpc grpcio; those that are not are
left out. The time is from the start of sending until the last of the two receivers has all tensors in memory that it
may read: of its own, or, by longhaul-shm, mapped and verified. Receivers are there, and warmed up by one transfer,
before it begins. After each transfer the same receivers make a private copy of memory that all of them have mapped:
the limit (`memcpy`), which meets the same load, so that ratios to it (`limit_ratio`) compare across methods. One JSON
object a method, then a table. Over TCP the limit is `socket`: a bare loopback socket to each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import shared_memory
from typing import Any

import numpy as np

from longhaul.sync import geometry

RECEIVERS = 2
CHUNK = 4 << 20


def tensors(model: str) -> dict[str, np.ndarray]:
    """The model's tensors as bit patterns: not every library knows bfloat16 in NumPy."""
    draw = np.random.default_rng(0)
    return {
        name: draw.integers(0, 1 << 16, int(np.prod(shape)), np.uint16).reshape(shape)
        for name, shape, _ in geometry.forms(model)
    }


class MemCopy:
    """A private copy each."""

    def __init__(self, rank: int, model: str, folder: str) -> None:
        size = sum(int(np.prod(shape)) * 2 for _, shape, _ in geometry.forms(model))
        self.rank, name = rank, f"longhaul-{folder.strip('/').replace('/', '-')}"
        self.shared = shared_memory.SharedMemory(name, create=rank == 0, size=size if rank == 0 else 0)
        self.source = np.frombuffer(self.shared.buf, np.uint8, size)
        if rank == 0:
            self.source[:] = 1
        else:
            self.private = np.ones(size, np.uint8)

    def send(self) -> None:
        """Nothing: it is there."""

    def receive(self) -> None:
        self.private[:] = self.source

    def close(self) -> None:
        del self.source
        self.shared.close()
        if self.rank == 0:
            self.shared.unlink()


class TorchFile:
    """torch.save to a file, torch.load from it."""

    def __init__(self, rank: int, model: str, folder: str) -> None:
        import torch

        self.torch, self.path = torch, f"{folder}/model.pt"
        if rank == 0:
            self.state = {name: torch.from_numpy(a.view(np.int16)) for name, a in tensors(model).items()}
        else:
            forms = geometry.forms(model)
            self.mine = {name: torch.ones(shape, dtype=torch.int16) for name, shape, _ in forms}

    def send(self) -> None:
        self.torch.save(self.state, f"{self.path}.part")
        os.replace(f"{self.path}.part", self.path)

    def receive(self) -> None:
        while not os.path.exists(self.path):
            time.sleep(0.001)
        for name, tensor in self.torch.load(self.path, weights_only=True).items():
            self.mine[name].copy_(tensor)

    def close(self) -> None:
        if os.path.exists(self.path):
            os.remove(self.path)


class Gloo:
    """torch.distributed's broadcast, tensor after tensor."""

    def __init__(self, rank: int, model: str, folder: str) -> None:
        import torch
        import torch.distributed as dist

        self.dist = dist
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RECEIVERS + 1)
        self.state = [torch.ones(shape, dtype=torch.bfloat16) for _, shape, _ in geometry.forms(model)]

    def send(self) -> None:
        for tensor in self.state:
            self.dist.broadcast(tensor, 0)

    receive = send

    def close(self) -> None:
        self.dist.destroy_process_group()


class OrbaxFile:
    """Orbax's StandardCheckpointer, saved and restored."""

    def __init__(self, rank: int, model: str, folder: str) -> None:
        import jax
        import orbax.checkpoint as ocp

        self.path, self.checkpointer = f"{folder}/orbax", ocp.StandardCheckpointer()
        if rank == 0:
            self.state = tensors(model)
        else:
            forms = geometry.forms(model)
            self.like = {name: np.zeros(shape, np.uint16) for name, shape, _ in forms}
        self.jax = jax

    def send(self) -> None:
        self.checkpointer.save(self.path, self.state, force=True)
        self.checkpointer.wait_until_finished()

    def receive(self) -> None:
        while not os.path.exists(self.path):
            time.sleep(0.001)
        self.jax.block_until_ready(self.checkpointer.restore(self.path, self.like))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class Grpc:
    """A server stream of chunks, into memory that is there already."""

    def __init__(self, rank: int, model: str, folder: str) -> None:
        import grpc

        size = sum(int(np.prod(shape)) * 2 for _, shape, _ in geometry.forms(model))
        self.state = np.ones(size, np.uint8)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        if rank == 0:
            from concurrent.futures import ThreadPoolExecutor

            def stream(request: bytes, context: Any) -> Any:
                for begin in range(0, size, CHUNK):
                    yield self.state[begin : begin + CHUNK].tobytes()

            self.server = grpc.server(ThreadPoolExecutor(RECEIVERS), options=options)
            handler = grpc.unary_stream_rpc_method_handler(stream)
            self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("weights", {"get": handler})])
            port = self.server.add_insecure_port("127.0.0.1:0")
            self.server.start()
            with open(f"{folder}/port.part", "w") as file:
                file.write(str(port))
            os.replace(f"{folder}/port.part", f"{folder}/port")
        else:
            while not os.path.exists(f"{folder}/port"):
                time.sleep(0.01)
            with open(f"{folder}/port") as file:
                self.channel = grpc.insecure_channel(f"127.0.0.1:{file.read()}", options=options)
            self.call = self.channel.unary_stream("/weights/get")

    def send(self) -> None:
        """Receivers ask."""

    def receive(self) -> None:
        done = 0
        for data in self.call(b""):
            self.state[done : done + len(data)] = np.frombuffer(data, np.uint8)
            done += len(data)

    def close(self) -> None:
        """Ends with the process."""


class Socket:
    """A bare socket to each, into memory that is there already."""

    def __init__(self, rank: int, model: str, folder: str) -> None:
        size = sum(int(np.prod(shape)) * 2 for _, shape, _ in geometry.forms(model))
        self.rank, self.state = rank, np.ones(size, np.uint8)
        with socket.socket(socket.AF_UNIX) as meeting:  # where the port is told
            if rank == 0:
                server = socket.create_server(("127.0.0.1", 0), backlog=RECEIVERS)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK)
                meeting.bind(f"{folder}/port")
                meeting.listen()
                for _ in range(RECEIVERS):
                    with meeting.accept()[0] as one:
                        one.sendall(str(server.getsockname()[1]).encode())
                self.socks = [server.accept()[0] for _ in range(RECEIVERS)]
                server.close()
                return
            _until(lambda: os.path.exists(f"{folder}/port"))
            time.sleep(0.1)  # until it listens
            meeting.connect(f"{folder}/port")
            self.sock = socket.create_connection(("127.0.0.1", int(meeting.recv(16))))
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)

    def send(self) -> None:
        threads = [threading.Thread(target=each.sendall, args=(self.state.data,)) for each in self.socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def receive(self) -> None:
        done = 0
        while done < self.state.size:
            done += self.sock.recv_into(self.state.data[done:])

    def close(self) -> None:
        for each in self.socks if self.rank == 0 else [self.sock]:
            each.close()


class Ours:
    """A `Publisher` and receivers, verified as they are by default."""

    kind = ""

    def __init__(self, rank: int, model: str, folder: str) -> None:
        from longhaul.sync import lanes
        from longhaul.sync.engine import Publisher
        from longhaul.sync.receiver import follow

        self.rank, self.version = rank, -1
        if rank == 0:
            self.state = tensors(model)
            size = sum(array.nbytes for array in self.state.values()) + 64 * len(self.state)
            lane = lanes.serve(f"shm:{folder}/lane" if self.kind == "shm" else "tcp:127.0.0.1:0")
            self.sender = Publisher("baselines", lanes=[lane], budget=3 * size)
            for _ in range(2):  # with the one that warms up, every image's pages are touched
                self.send()
            with open(f"{folder}/address.part", "w") as file:
                file.write(lane.address)
            os.replace(f"{folder}/address.part", f"{folder}/address")
            _until(lambda: len(self.sender.status()["receivers"]) == RECEIVERS)
            return
        _until(lambda: os.path.exists(f"{folder}/address"))
        with open(f"{folder}/address") as file:
            self.receiver = follow([file.read()])
        self.version = 1
        self.receiver.wait(self.version, 120)

    def send(self) -> None:
        self.version += 1
        if not self.sender.publish(self.version, self.state, patience=60.0):
            raise RuntimeError("no image was free")

    def receive(self) -> None:
        self.version += 1
        if not self.receiver.wait(self.version, 120):
            raise RuntimeError(f"version {self.version} did not come: {self.receiver.errors}")

    def close(self) -> None:
        (self.sender if self.rank == 0 else self.receiver).close()


class OursShared(Ours):
    kind = "shm"


class OursTcp(Ours):
    kind = "tcp"


def _until(what: Any) -> None:
    while not what():
        time.sleep(0.005)


METHODS: dict[str, Any] = {
    "memcpy": MemCopy,
    "socket": Socket,
    "longhaul-shm": OursShared,
    "longhaul-tcp": OursTcp,
    "torch-file": TorchFile,
    "gloo": Gloo,
    "orbax": OrbaxFile,
    "grpc": Grpc,
}

NEEDS = {"torch-file": "torch", "gloo": "torch", "orbax": "orbax", "grpc": "grpc"}


def receiver(rank: int, method: str, model: str, folder: str, orders: Any) -> None:
    """A receiver's process: one transfer an order, or one private copy."""
    limit = MemCopy(rank, model, f"{folder}/limit")
    way = METHODS[method](rank, model, folder)
    orders.send(None)
    while order := orders.recv():
        used, began = time.process_time(), time.monotonic()
        (way if order == "go" else limit).receive()
        orders.send((began, time.monotonic(), time.process_time() - used))
    limit.close()
    if method != "torch-file":
        way.close()
    orders.send(None)


def measure(method: str, model: str, repeats: int) -> dict[str, Any]:
    """The figure of one method."""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="sync-")
    limit = MemCopy(0, model, f"{folder}/limit")
    pipes, processes = [], []
    first = method == "memcpy"
    sender = METHODS[method](0, model, folder) if first else None
    for rank in range(1, RECEIVERS + 1):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=receiver, args=(rank, method, model, folder, theirs), daemon=True))
        processes[-1].start()
        pipes.append(mine)
    sender = sender or METHODS[method](0, model, folder)
    for pipe in pipes:
        pipe.recv()
    rows: list[tuple[float, float, float, float]] = []
    for _ in range(repeats + 1):
        if method in ("torch-file", "orbax"):
            sender.close()
        used, began = time.process_time(), time.monotonic()
        for pipe in pipes:
            pipe.send("go")
        sender.send()
        took = [pipe.recv() for pipe in pipes]
        used = time.process_time() - used
        for pipe in pipes:
            pipe.send("limit")
        copied = [pipe.recv() for pipe in pipes]
        wall = max(each[1] for each in took) - began
        bound = max(each[1] for each in copied) - min(each[0] for each in copied)
        rows.append((wall, bound, used + sum(each[2] for each in took), sum(each[2] for each in copied)))
    for pipe in pipes:
        pipe.send(None)
        pipe.recv()
    sender.close()
    limit.close()
    for process in processes:
        process.join(10)
    shutil.rmtree(folder, ignore_errors=True)
    walls, limits, cpus, copies = zip(*rows[1:])
    about = {"name": "sync-baseline", "method": method, "model": model, "receivers": RECEIVERS, "repeats": repeats}
    return about | {
        "wall_seconds": statistics.median(walls),
        "limit_seconds": statistics.median(limits),
        "limit_ratio": statistics.median(wall / bound for wall, bound in zip(walls, limits, strict=True)),
        "cpu_seconds": statistics.median(cpus),
        "limit_cpu_seconds": statistics.median(copies),
        "walls": [round(wall, 3) for wall in walls],
        "load": os.getloadavg()[0],
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help=f"of {', '.join(METHODS)}; by default all that can be had")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the figures as lines to this file, too")
    given = parser.parse_args(words)
    if unknown := set(given.methods) - set(METHODS):
        parser.error(f"no method is {sorted(unknown)[0]!r}; there are {', '.join(METHODS)}")
    there = [name for name in METHODS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    found = []
    for name in given.methods or there:
        found.append(measure(name, given.model, given.repeats))
        print(json.dumps(found[-1]), flush=True)
    if given.json:
        with open(given.json, "w") as file:
            file.writelines(f"{json.dumps(each)}\n" for each in found)
    print(f"\n{'method':14} {'seconds':>8} {'limit':>8} {'ratio':>6} {'CPU s':>6}")
    for each in found:
        row = f"{each['wall_seconds']:8.3f} {each['limit_seconds']:8.3f} {each['limit_ratio']:6.2f}"
        print(f"{each['method']:14} {row} {each['cpu_seconds']:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
