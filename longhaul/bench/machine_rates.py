"""Rates of this machine now, measured with the code that versions go through: the input of `cost_model.local`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from longhaul.weight_sync import packing
from longhaul.weight_sync.buffers import Block
from longhaul.weight_sync.cost_model import Rates
from longhaul.weight_sync.digest import digest
from longhaul.weight_sync.manifest import LINE, Manifest
from longhaul.weight_sync.transports.sockets import Wire
from longhaul.weight_sync.transports.tcp import NEAR

PARTS = 8
"""Tensors of the sample."""

PATIENCE = 120.0
"""Seconds that a stream may take."""


class Sample:
    """Memory to measure with, already touched. Two threads work at once if there are two cores."""

    def __init__(self, nbytes: int = 128 << 20, cores: int = 2) -> None:
        self.together = together = min(2, cores)
        self.pairs = min(float(together), max(1.0, cores / 2))  # pairs of cores that carry streams
        self._given = {str(i): np.ones(nbytes // PARTS, np.uint8) for i in range(PARTS)}
        self._planned, self.size = packing.describe(self._given)
        self._block = Block(self.size, 0)
        assert self._block.map is not None
        self._image = np.frombuffer(self._block.map, np.uint8, self.size)
        self._private = [_aligned(self.size) for _ in range(together)]
        self._form = Manifest("rates", 0, 0, -1, self.size, self._planned)
        self._pool = ThreadPoolExecutor(2 * together, "longhaul-rates")
        self.rates()  # compiles the kernels

    def rates(self, repeats: int = 1) -> Rates:
        """Bytes a second of one thread while all work; the best of the repeats, since other load only slows it down."""
        return Rates(
            self._best(repeats, self._gather) / self.together,
            self._best(repeats, self._streams) * self.together / self.pairs,
            self._best(repeats, self._digest),
        )

    def close(self) -> None:
        """Frees the memory."""
        self._pool.shutdown()
        del self._image
        self._block.free()

    def _best(self, repeats: int, call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        return self.size / min(seconds)

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
        sent = [self._pool.submit(sender.pour, self._image.data, PATIENCE) for _, sender in wires]
        came = [
            self._pool.submit(self._drawn, wire, into) for (wire, _), into in zip(wires, self._private, strict=True)
        ]
        for each in [*sent, *came]:
            each.result()
        for wire in [wire for pair in wires for wire in pair]:
            wire.close()

    def _drawn(self, wire: Wire, into: np.ndarray) -> None:
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR)
        arrival = packing.Arrival(self._form)
        wire.draw(into.data, time.monotonic() + PATIENCE, lambda count: arrival.arrived(into, count))


def _aligned(size: int) -> np.ndarray:
    """Touched memory that begins at a cache line, as an image does."""
    memory = np.ones(size + LINE, np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + size]


def measured(nbytes: int = 128 << 20, cores: int = 2, repeats: int = 5) -> Rates:
    """Rates of this machine now."""
    sample = Sample(nbytes, cores)
    try:
        return sample.rates(repeats)
    finally:
        sample.close()
