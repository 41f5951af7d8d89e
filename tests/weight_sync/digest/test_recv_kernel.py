"""Bare bytes of an image on a stream: whoever receives or sends them is done, or told so, by the deadline."""

from __future__ import annotations

import mmap
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from longhaul.weight_sync import image
from longhaul.weight_sync.manifest import Manifest, layout
from longhaul.weight_sync.transports import framing


def pair() -> tuple[framing.Wire, framing.Wire]:
    """Two ends of one connection."""
    near, far = socket.socketpair()
    return framing.Wire(near), framing.Wire(far)


def intake(into: np.ndarray) -> Callable[[framing.Wire, float], None]:
    """The compiled loop that receives an image."""
    tensors, size = layout([("all", (into.size,), "uint8")])
    arrival, buffer = image.Arrival(Manifest("run", 0, 0, -1, size, tensors)), np.empty(1 << 16, np.uint8)
    return lambda mine, until: mine.pull(until, lambda fd, stop: arrival.pull(into, buffer, fd, stop, False))


def by_python(into: np.ndarray) -> Callable[[framing.Wire, float], None]:
    """The same without one."""
    return lambda mine, until: mine.draw_by(memoryview(bytearray(1 << 16)), into.size, until, lambda held: held)


@pytest.mark.parametrize("way", [intake, by_python])
def test_an_image_is_awaited_until_the_deadline_however_it_trickles_in(way: Callable) -> None:
    """Silence, a byte now and then, an end, and a connection that another thread closes: none is a hang."""
    into = np.zeros(1 << 20, np.uint8)
    if way is intake and not image.pulls(into := np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)):
        pytest.skip("numba, of the extra sync, is not installed, or the system is not Linux")
    way(into)
    mine, other = pair()
    with closing(mine), closing(other):
        with pytest.raises(TimeoutError):
            way(into)(mine, time.monotonic() + 0.05)
        ended = threading.Event()
        drip = threading.Thread(target=lambda: [other.sock.send(b"a") for _ in range(300) if not ended.wait(0.02)])
        drip.start()
        with pytest.raises(TimeoutError):
            way(into)(mine, time.monotonic() + 0.3)
        assert drip.is_alive()
        ended.set()
        drip.join()
        closer = threading.Timer(0.1, mine.close)
        closer.start()
        with pytest.raises(OSError, match=r"closed|Bad file"):
            way(into)(mine, time.monotonic() + 30)
        closer.join()
    mine, other = pair()
    with closing(mine), closing(other):
        other.close()
        with pytest.raises(ConnectionError):
            way(into)(mine, time.monotonic() + 30)


def test_who_sends_an_image_is_freed_when_another_thread_closes() -> None:
    mine, other = pair()
    with closing(mine), closing(other):
        closer = threading.Timer(0.1, mine.close)
        closer.start()
        with pytest.raises(OSError, match=r"Broken pipe|Bad file"):
            mine.pour(memoryview(bytes(1 << 24)), 30)  # nobody reads
        closer.join()
