"""Event loops for gRPC: no ring of its bell is lost, however many loops hear it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque

from longhaul.topologies.inference_server.grpc_transport import Loop


class _Slow(socket.socket):
    """Who has looked at what was rung hears it a while later, when the other one may have looked, too."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        found = super().recv(size, flags)
        if flags & socket.MSG_PEEK:
            time.sleep(0.02)
        return found


def test_two_loops_that_hear_one_bell_leave_nothing_undone() -> None:
    ends = socket.socketpair()
    heard, rings = _Slow(fileno=ends[0].detach()), ends[1]
    heard.setblocking(False)
    waiting: deque[int] = deque()
    done, over = threading.Semaphore(0), threading.Event()

    def look() -> None:
        """As gRPC does: one ring is heard, and then all that waits is done."""
        heard.recv(1)
        with contextlib.suppress(IndexError):
            while True:
                waiting.popleft()
                done.release()

    def turn() -> None:
        loop = Loop()
        loop.set_exception_handler(lambda loop, context: None)
        loop.add_reader(heard, look)
        while not over.is_set():
            loop.turn(0.02)
        loop.remove_reader(heard)
        loop.close()

    threads = [threading.Thread(target=turn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20):
            waiting.extend([number] * 3)
            rings.send(b"111")  # at once, so that there is something to drain
            for _ in range(3):
                assert done.acquire(timeout=10.0), f"of round {number} something waits for ever"
            time.sleep(0.06)  # until both loops wait again
    finally:
        over.set()
        for thread in threads:
            thread.join()
        heard.close()
        rings.close()
