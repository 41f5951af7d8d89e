"""What this machine does a second, now, by the code that versions go through: what `cost.local` asks for."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from longhaul.sync import images
from longhaul.sync.buffers import Block
from longhaul.sync.cost import Rates
from longhaul.sync.lanes.tcp import BUCKET, BUFFER
from longhaul.sync.manifest import hasher

PARTS = 8
"""Tensors of what is copied."""


class Sample:
    """Memory to measure with, whose pages are there; `together` threads work at once, as in a run."""

    def __init__(self, nbytes: int = 128 << 20, together: int = 2) -> None:
        self.together = together
        self._given = {str(i): np.ones(nbytes // PARTS, np.uint8) for i in range(PARTS)}
        self._planned, self.size = images.describe(self._given)
        self._block = Block(self.size, 0)
        assert self._block.map is not None
        self._image = np.frombuffer(self._block.map, np.uint8, self.size)
        self._private = np.ones(self.size, np.uint8)
        self._pool = ThreadPoolExecutor(together, "longhaul-rates")
        self.rates()  # whatever must be compiled, is

    def rates(self, repeats: int = 1) -> Rates:
        """Bytes a second of one thread while all work: the best of some repeats, since others can only slow it down."""
        return Rates(
            self._best(repeats, self._gather) / self.together,
            self._best(repeats, self._stream),
            self._best(repeats, self._digest),
        )

    def close(self) -> None:
        """Gives all of it back."""
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
        images.gather(self._given, self._planned, self._image, self._pool, self.together)

    def _digest(self) -> None:
        list(self._pool.map(lambda _: hasher()(self._image).digest(), range(self.together)))

    def _stream(self) -> None:
        """All of it through a TCP socket of this machine, digested as it comes."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            with socket.create_connection(server.getsockname(), timeout=60.0) as receiver:
                receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
                sender, _ = server.accept()
                thread = threading.Thread(target=self._pour, args=(sender,), daemon=True)
                thread.start()
                self._fill(receiver)
                thread.join()

    def _pour(self, sender: socket.socket) -> None:
        with sender:
            sent = 0
            while sent < self.size:
                sent += os.sendfile(sender.fileno(), self._block.descriptor, sent, self.size - sent)

    def _fill(self, receiver: socket.socket) -> None:
        running, done = hasher()(), 0
        while done < self.size:
            piece = self._private[done : done + BUCKET]
            got = receiver.recv_into(piece.data)
            if not got:
                raise OSError("the loopback connection ended early")
            running.update(piece[:got])
            done += got


def measured(nbytes: int = 128 << 20, together: int = 2, repeats: int = 5) -> Rates:
    """The rates of this machine now."""
    sample = Sample(nbytes, together)
    try:
        return sample.rates(repeats)
    finally:
        sample.close()
