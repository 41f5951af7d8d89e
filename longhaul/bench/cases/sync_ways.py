"""Ways to bring a model's parameters from one process to others: what people use, bare sockets, and ours.

Each is one small class with both ends; `sync_peers` measures them. Their libraries are imported where an end is made.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.weight_sync import manifest, model_shapes, transports
from longhaul.weight_sync.manifest import LINE
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import follow
from longhaul.weight_sync.transports.tcp import BUFFER

RECEIVERS = 2

CHUNK = 4 << 20
"""Bytes of a gRPC message."""

PATIENCE = 300.0
"""Seconds that one transfer may take."""


class Memory:
    """A process's own: the sender's tensors are parts of `flat`, which others can map; a receiver's, of private memory.

    `source` is the sender's as it is mapped here. Bit patterns: not every library knows NumPy's bfloat16.
    """

    def __init__(self, rank: int, model: str, folder: str) -> None:
        self.folder, self.forms = Path(folder), [(name, shape) for name, shape, _ in model_shapes.forms(model)]
        counts = [int(np.prod(shape)) for _, shape in self.forms]
        size = 2 * sum(counts)
        name = f"longhaul-{self.folder.name}"
        self._shared = shared_memory.SharedMemory(name, create=rank == 0, size=size if rank == 0 else 0)
        self.source: np.ndarray = np.ndarray(size, np.uint8, self._shared.buf)
        if rank == 0:
            self.source.view(np.uint16)[:] = np.random.default_rng(0).integers(0, 1 << 16, sum(counts), np.uint16)
        self.flat = self.source if rank == 0 else np.ones(size, np.uint8)
        parts = np.split(self.flat.view(np.uint16), np.cumsum(counts)[:-1])
        self.tensors = {name: part.reshape(shape) for (name, shape), part in zip(self.forms, parts, strict=True)}

    def digest(self, tensors: Iterable[np.ndarray]) -> str:
        """Of tensors in the model's order."""
        running = manifest.hasher()()
        for each in tensors:
            running.update(np.asarray(each).reshape(-1).view(np.uint8))
        return running.hexdigest()

    def close(self, mine: bool) -> None:
        """Gives it back; `mine` is whether it was made here."""
        del self.source, self.flat, self.tensors
        self._shared.close()
        if mine:
            self._shared.unlink()


class Way(Protocol):
    """One end: of rank 0, which sends, or of another, which receives into its memory."""

    def clear(self) -> None:
        """At the sender, before a transfer; not timed."""

    def send(self) -> None: ...

    def receive(self) -> Iterable[np.ndarray]:
        """-> all tensors, in the model's order."""

    def close(self) -> None: ...


class Copy:
    """The limit: a private copy of memory that the sender has mapped, too."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self._memory = memory
        self._end: Callable[[], object] = lambda: None

    def clear(self) -> None:
        """Nothing is left."""

    def send(self) -> None:
        """It is there."""

    def receive(self) -> Iterable[np.ndarray]:
        self._memory.flat[:] = self._memory.source
        return self._memory.tensors.values()

    def close(self) -> None:
        self._end()


class Socket(Copy):
    """A bare socket to each, into memory that is there already."""

    def __init__(self, rank: int, memory: Memory) -> None:
        super().__init__(rank, memory)
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0), backlog=RECEIVERS) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                _tell(memory.folder / "port", str(server.getsockname()[1]))
                self._socks = [server.accept()[0] for _ in range(RECEIVERS)]
            return
        self._socks = [socket.create_connection(("127.0.0.1", int(_told(memory.folder / "port"))))]
        self._socks[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)

    def send(self) -> None:
        data = self._memory.flat.data
        threads = [threading.Thread(target=each.sendall, args=(data,)) for each in self._socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def receive(self) -> Iterable[np.ndarray]:
        done, into = 0, self._memory.flat.data
        while done < len(into):
            done += self._socks[0].recv_into(into[done:])
        return self._memory.tensors.values()

    def close(self) -> None:
        for each in self._socks:
            each.close()


class TorchFile(Copy):
    """torch.save to a file, torch.load from it."""

    def __init__(self, rank: int, memory: Memory) -> None:
        import torch

        super().__init__(rank, memory)
        self._torch, self._path = torch, memory.folder / "model.pt"
        self._mine = {name: torch.from_numpy(each.view(np.int16)) for name, each in memory.tensors.items()}

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)

    def send(self) -> None:
        part = self._path.with_suffix(".part")
        self._torch.save(self._mine, part)
        part.rename(self._path)

    def receive(self) -> Iterable[np.ndarray]:
        _until(self._path.exists)
        for name, tensor in self._torch.load(self._path, weights_only=True).items():
            self._mine[name].copy_(tensor)
        return self._memory.tensors.values()


class Gloo(Copy):
    """torch.distributed's broadcast, tensor after tensor."""

    def __init__(self, rank: int, memory: Memory) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(rank, memory)
        self._dist, where = dist, f"file://{memory.folder}/rendezvous"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RECEIVERS + 1)
        self._end = dist.destroy_process_group
        self._mine = [torch.from_numpy(each.view(np.int16)).view(torch.bfloat16) for each in memory.tensors.values()]

    def send(self) -> None:
        for tensor in self._mine:
            self._dist.broadcast(tensor, 0)

    def receive(self) -> Iterable[np.ndarray]:
        self.send()
        return self._memory.tensors.values()


class Orbax(Copy):
    """Orbax's StandardCheckpointer, saved and restored."""

    def __init__(self, rank: int, memory: Memory) -> None:
        import jax
        import orbax.checkpoint as ocp

        super().__init__(rank, memory)
        self._wait, self._checkpointer = jax.block_until_ready, ocp.StandardCheckpointer()
        self._end = self._checkpointer.close
        self._path = memory.folder / "orbax"
        self._like = {name: np.zeros(shape, np.uint16) for name, shape in memory.forms} if rank else None

    def clear(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    def send(self) -> None:
        self._checkpointer.save(self._path, self._memory.tensors, force=True)
        self._checkpointer.wait_until_finished()

    def receive(self) -> Iterable[np.ndarray]:
        _until(self._path.exists)
        found = self._wait(self._checkpointer.restore(self._path, self._like))
        return [found[name] for name, _ in self._memory.forms]


class Grpc(Copy):
    """A server stream of chunks, into memory that is there already."""

    def __init__(self, rank: int, memory: Memory) -> None:
        import grpc

        super().__init__(rank, memory)
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        where = memory.folder / "port"
        if rank:
            self._channel = grpc.insecure_channel(f"127.0.0.1:{_told(where)}", options=options)
            self._call = self._channel.unary_stream("/weights/get")
            self._end = self._channel.close
            return
        from concurrent.futures import ThreadPoolExecutor

        def stream(request: bytes, context: Any) -> Any:
            flat = self._memory.flat
            for begin in range(0, flat.size, CHUNK):
                yield flat[begin : begin + CHUNK].tobytes()

        server = grpc.server(ThreadPoolExecutor(RECEIVERS), options=options)
        handler = grpc.unary_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("weights", {"get": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        _tell(where, str(port))
        self._end = lambda: server.stop(None).wait()

    def receive(self) -> Iterable[np.ndarray]:
        done, flat = 0, self._memory.flat
        for data in self._call(b""):
            flat[done : done + len(data)] = np.frombuffer(data, np.uint8)
            done += len(data)
        return self._memory.tensors.values()


class Ours(Copy):
    """A `Publisher` and receivers, verified as they are by default. `kind` is the lane."""

    def __init__(self, rank: int, memory: Memory, kind: str = "shm") -> None:
        super().__init__(rank, memory)
        self._version, where = -1, memory.folder / f"address-{kind}"
        if rank:
            self._receiver = follow([_told(where)])
            self._end = self._receiver.close
            return
        size = memory.flat.size + LINE * len(memory.forms)
        lane = transports.serve(f"shm:{memory.folder}/lane" if kind == "shm" else "tcp:127.0.0.1:0")
        self._sender = Publisher("peers", transports=[lane], budget=2 * size)
        _tell(where, lane.address)
        _until(lambda: len(self._sender.status()["receivers"]) == RECEIVERS)
        self._end = self._sender.close

    def send(self) -> None:
        self._version += 1
        if not self._sender.publish(self._version, self._memory.tensors, patience=PATIENCE):
            raise RuntimeError("no image was free")

    def receive(self) -> Iterable[np.ndarray]:
        self._version += 1
        if not self._receiver.wait(self._version, PATIENCE):
            raise RuntimeError(f"version {self._version} did not come: {self._receiver.errors}")
        return self._receiver.latest()[1].values()


def _tcp(rank: int, memory: Memory) -> Ours:
    return Ours(rank, memory, "tcp")


class Known(NamedTuple):
    """Another way, and what must be importable for it."""

    way: Callable[[int, Memory], Way]
    needs: tuple[str, ...] = ()


WAYS = {
    "socket": Known(Socket),
    "longhaul-tcp": Known(_tcp),
    "torch-file": Known(TorchFile, ("torch",)),
    "gloo": Known(Gloo, ("torch",)),
    "orbax": Known(Orbax, ("orbax", "jax")),
    "grpc": Known(Grpc, ("grpc",)),
}


def missing(name: str) -> str:
    """What a way needs that is not installed; "" where all is."""
    return ", ".join(each for each in WAYS[name].needs if importlib.util.find_spec(each) is None)


def _tell(path: Path, words: str) -> None:
    """Where the other side finds it, all at once."""
    part = path.with_suffix(".part")
    part.write_text(words)
    part.rename(path)


def _told(path: Path) -> str:
    _until(path.exists)
    return path.read_text()


def _until(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(f"the other side did not come within {PATIENCE:g} s")
        time.sleep(0.001)
