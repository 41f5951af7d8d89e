"""Other ways to bring a model's parameters from one process to two, in turn with ours: `python -m
benchmarks.peers.sync`.

A repeat is one transfer by the other way, one of ours (shared memory, verified), and a private copy of shared memory in
each receiver, which is the limit. All three meet the same load, so ratios within a repeat compare across ways. The time
is from the start of sending until the last receiver has all tensors in memory that it may read: its own, or, by ours,
mapped and verified. Receivers are warmed up by two transfers of each way, after which both sides' digests must agree.
Prints one JSON object a way; a way whose library is not installed is left out, with a line on stderr.
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
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from longhaul.bench.cases.sync import check
from longhaul.weight_sync import model_shapes, transports
from longhaul.weight_sync.digest import hasher
from longhaul.weight_sync.manifest import LINE
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import follow
from longhaul.weight_sync.transports.tcp import BUFFER

RECEIVERS = 2
"""Processes that receive."""

CHUNK = 4 << 20
"""Bytes of a gRPC message: its usual limit."""

PATIENCE = 300.0
"""Seconds that one transfer may take."""


class Memory:
    """Tensors of one process as bit patterns, since not every library knows NumPy's bfloat16.

    They are parts of `flat`: shared memory at the sender, private memory at a receiver. `source` is the sender's
    memory, mapped here.
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
        """Digest of tensors in the model's order."""
        running = hasher()()
        for each in tensors:
            running.update(np.asarray(each).reshape(-1).view(np.uint8))
        return running.hexdigest()

    def close(self, owned: bool) -> None:
        """Unmaps the memory; `owned`: this process created it, and removes it."""
        del self.source, self.flat, self.tensors
        self._shared.close()
        if owned:
            self._shared.unlink()


class Way(Protocol):
    """One end of a way: rank 0 sends, the others receive into their memory."""

    def clear(self) -> None:
        """Prepares the sender for a transfer; not timed."""

    def send(self) -> None: ...

    def receive(self) -> Iterable[np.ndarray]:
        """All tensors, in the model's order."""

    def close(self) -> None: ...


class Copy:
    """The limit: a private copy of the sender's memory."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self._memory = memory
        self._end: Callable[[], object] = lambda: None

    def clear(self) -> None:
        """Nothing to prepare."""

    def send(self) -> None:
        """Nothing to send: receivers have mapped it."""

    def receive(self) -> Iterable[np.ndarray]:
        self._memory.flat[:] = self._memory.source
        return self._memory.tensors.values()

    def close(self) -> None:
        self._end()


class Socket(Copy):
    """Bare socket to each receiver, into memory that exists already."""

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
        arrays = self._wait(self._checkpointer.restore(self._path, self._like))
        return [arrays[name] for name, _ in self._memory.forms]


class Grpc(Copy):
    """Server stream of chunks, into memory that exists already."""

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
    """`Publisher` and receivers of the package. `kind`: shm or tcp."""

    def __init__(self, rank: int, memory: Memory, kind: str = "shm") -> None:
        super().__init__(rank, memory)
        self._version, where = -1, memory.folder / f"address-{kind}"
        if rank:
            self._receiver = follow([_told(where)])
            self._end = self._receiver.close
            return
        size = memory.flat.size + LINE * len(memory.forms)
        transport = transports.serve(f"shm:{memory.folder}/lane" if kind == "shm" else "tcp:127.0.0.1:0")
        self._sender = Publisher("peers", transports=[transport], budget=2 * size)
        _tell(where, transport.address)
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
    """A way, and the modules that it needs."""

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
    """Modules that a way needs and that are not installed; "" for none."""
    return ", ".join(each for each in WAYS[name].needs if importlib.util.find_spec(each) is None)


def _tell(path: Path, words: str) -> None:
    """Writes a file for the other side, completely or not at all."""
    part = path.with_suffix(".part")
    part.write_text(words)
    part.rename(path)


def _told(path: Path) -> str:
    _until(path.exists)
    return path.read_text()


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"the other side did not come within {PATIENCE:g} s")
        time.sleep(0.001)


def _ends(rank: int, name: str, memory: Memory) -> dict[str, Way]:
    """Ends of this process, in the order in which both sides connect them."""
    return {"limit": Copy(rank, memory), "theirs": WAYS[name].way(rank, memory), "ours": Ours(rank, memory)}


def serve(rank: int, name: str, model: str, folder: str, orders: Any) -> None:
    """Process of a receiver: one transfer for each order (way, whether to digest the result)."""
    memory = Memory(rank, model, folder)
    ends = _ends(rank, name, memory)
    orders.send(None)
    while order := orders.recv():
        used, began = time.process_time(), time.monotonic()
        came = ends[order[0]].receive()
        at = (began, time.monotonic(), time.process_time() - used)
        orders.send((*at, memory.digest(came) if order[1] else ""))
        del came  # or an image would stay lent
    for each in ends.values():
        each.close()
    orders.send(None)
    memory.close(False)


class Took(NamedTuple):
    """Duration of a transfer."""

    wall: float  # seconds
    cpu: float  # CPU-seconds of all processes


def measure(name: str, model: str, repeats: int) -> dict[str, Any]:
    """Figure of one way: medians of repeats, and of ratios within them. RuntimeError where other bytes came."""
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    folder = tempfile.mkdtemp(prefix="sync-peers-")
    memory = Memory(0, model, folder)
    for rank in range(1, RECEIVERS + 1):
        parent, child = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, name, model, folder, child), daemon=True))
        processes[-1].start()
        child.close()  # so that the pipe closes with its process
        pipes.append(parent)
    ends = _ends(0, name, memory)
    for pipe in pipes:
        pipe.recv()
    right = memory.digest(memory.tensors.values())

    def transfer(which: str, check: bool = False) -> Took:
        ends[which].clear()
        used, began = time.process_time(), time.monotonic()
        for pipe in pipes:
            pipe.send((which, check))
        ends[which].send()
        answers = [pipe.recv() for pipe in pipes]
        used = time.process_time() - used
        if check and {each[-1] for each in answers} != {right}:
            raise RuntimeError(f"{name}: what came by {which} is not what was sent")
        # Nothing is sent for the limit: its time begins with the first copy.
        start = min(each[0] for each in answers) if which == "limit" else began
        return Took(max(each[1] for each in answers) - start, used + sum(each[2] for each in answers))

    try:
        for which in 2 * list(ends):  # twice, so that both images of ours are touched
            transfer(which, check=True)
        rows = [{which: transfer(which) for which in ends} for _ in range(repeats)]
        for pipe in pipes:
            pipe.send(None)
            pipe.recv()
    finally:
        for each in ends.values():
            each.close()
        for process in processes:
            process.join(10)
            process.kill()
        ends.clear()
        memory.close(True)
        shutil.rmtree(folder, ignore_errors=True)
    about = {"name": "sync-peer", "peer": name, "model": model, "receivers": RECEIVERS, "repeats": repeats}
    return about | condensed(rows) | {"load": os.getloadavg()[0]}


def condensed(rows: list[dict[str, Took]]) -> dict[str, float]:
    """Medians; `limit_ratio` is the way's time over the limit's, `times_ours` over ours, each within a repeat."""

    def middle(of: Callable[[dict[str, Took]], float]) -> float:
        return statistics.median(of(row) for row in rows)

    return {
        "wall_seconds": middle(lambda row: row["theirs"].wall),
        "cpu_seconds": middle(lambda row: row["theirs"].cpu),
        "limit_seconds": middle(lambda row: row["limit"].wall),
        "limit_cpu_seconds": middle(lambda row: row["limit"].cpu),
        "ours_seconds": middle(lambda row: row["ours"].wall),
        "ours_cpu_seconds": middle(lambda row: row["ours"].cpu),
        "limit_ratio": middle(lambda row: row["theirs"].wall / row["limit"].wall),
        "ours_limit_ratio": middle(lambda row: row["ours"].wall / row["limit"].wall),
        "times_ours": middle(lambda row: row["theirs"].wall / row["ours"].wall),
        "cpu_times_ours": middle(lambda row: row["theirs"].cpu / row["ours"].cpu),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="model whose parameters are sent")
    parser.add_argument("--repeats", type=int, default=5, help="repeats, of which medians are reported")
    parser.add_argument("--json", help="write the figures as lines to this file, too")
    args = parser.parse_args(words)
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}; it must be at least 1")
    try:
        check(args.model, RECEIVERS)
    except ValueError as error:
        parser.error(str(error))
    lines = []
    for name in WAYS:
        if without := missing(name):
            print(f"{name} is left out: {without} is not installed", file=sys.stderr, flush=True)
            continue
        lines.append(json.dumps(measure(name, args.model, args.repeats)))
        print(lines[-1], flush=True)
    if args.json:
        Path(args.json).write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
