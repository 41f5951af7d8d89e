"""How long others take to bring a model's parameters from one process to two: what `longhaul bench sync` is beside.

    python benchmarks/sync_baselines.py memcpy torch-file gloo orbax grpc [--model qwen3-0.6b] [--repeats 5]

Each names what must be importable: torch-file and gloo torch, orbax Orbax and JAX, grpc grpcio. The time is from the
start of sending until the last of the two receivers has all tensors in memory of its own; one JSON object a figure.
Receivers are there, and warmed up by one transfer, before it begins. `memcpy` is a private copy in each receiver, of
memory that is mapped in all: the limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
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
        self.rank, name = rank, f"longhaul-{os.path.basename(folder)}"
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


METHODS: dict[str, Any] = {
    "memcpy": MemCopy,
    "torch-file": TorchFile,
    "gloo": Gloo,
    "orbax": OrbaxFile,
    "grpc": Grpc,
}


def receiver(rank: int, method: str, model: str, folder: str, orders: Any) -> None:
    """A receiver's process: one transfer an order."""
    way = METHODS[method](rank, model, folder)
    orders.send(0.0)
    while orders.recv():
        way.receive()
        orders.send(time.monotonic())
    if method != "torch-file":
        way.close()


def measure(method: str, model: str, repeats: int) -> dict[str, Any]:
    """The figure of one method."""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="sync-")
    pipes = []
    if method == "memcpy":
        sender = METHODS[method](0, model, folder)
    for rank in range(1, RECEIVERS + 1):
        mine, theirs = context.Pipe()
        context.Process(target=receiver, args=(rank, method, model, folder, theirs), daemon=True).start()
        pipes.append(mine)
    if method != "memcpy":
        sender = METHODS[method](0, model, folder)
    for pipe in pipes:
        pipe.recv()
    walls = []
    for _ in range(repeats + 1):
        if method in ("torch-file", "orbax"):
            sender.close()
        began = time.monotonic()
        for pipe in pipes:
            pipe.send(True)
        sender.send()
        walls.append(max(pipe.recv() for pipe in pipes) - began)
    for pipe in pipes:
        pipe.send(False)
    sender.close()
    shutil.rmtree(folder, ignore_errors=True)
    return {"name": "sync-baseline", "method": method, "model": model, "receivers": RECEIVERS, "repeats": repeats} | {
        "wall_seconds": statistics.median(walls[1:]),
        "walls": [round(wall, 3) for wall in walls[1:]],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("methods", nargs="+", choices=METHODS)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    for each in given.methods:
        print(json.dumps(measure(each, given.model, given.repeats)), flush=True)
