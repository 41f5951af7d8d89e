"""Relays: bytes go on before all of them have come, and nothing counts below that does not count above."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from longhaul.weight_sync import image as images
from longhaul.weight_sync import receiver
from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.relay import Relay
from longhaul.weight_sync.transports import connect, framing, shared_memory, tcp
from longhaul.weight_sync.transports.base import Lane
from longhaul.weight_sync.transports.framing import Wire
from tests.helpers.weight_sync_transports import Way, is_whole, tensors, until, way

SIZE = 1 << 18
"""Elements of a version: many pieces of a stream."""


class Tree(NamedTuple):
    above: Way
    relay: Relay
    below: Receiver
    seen: list[int]  # versions that were served below


@contextmanager
def tree(folder: Path, lane: Lane) -> Iterator[Tree]:
    above, seen = way("tcp", folder), list[int]()
    with (
        Relay(above.connect, lanes=[lane], budget=4 * 4 * SIZE + 4096) as relay,
        Receiver(lambda: connect(lane.address), on_commit=seen.append) as below,
    ):
        yield Tree(above, relay, below, seen)


class Half:
    """The sender's streams stop in the middle until they may go on; relays pass on what comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.go = threading.Event(), threading.Event()
        self.staged: dict[int, int] = {}  # bytes that arrived at each receiver of a version, by who it is
        pour, arrived = Wire.pour_memory, images.Arrival.__call__
        draw, pull = images.Arrival.draw, images.Arrival.pull

        def halved(wire: Wire, data: memoryview, seconds: float, beyond: object = None) -> None:
            size = len(data)

            def middle(count: int, seconds: float) -> int:
                assert count < size // 2 or self.go.wait(30)
                return size if count >= size // 2 else size // 2

            pour(wire, data, seconds, beyond or (middle if self.on.is_set() else None))  # type: ignore[arg-type]

        def noted(arrival: images.Arrival, image: np.ndarray, count: int) -> None:
            self.staged[id(arrival)] = count
            arrived(arrival, image, count)

        def drawn(arrival: images.Arrival, image: np.ndarray, buffer: np.ndarray, held: int) -> int:
            used = draw(arrival, image, buffer, held)
            self.staged[id(arrival)] = arrival.at
            return used

        def pulled(arrival: images.Arrival, *given: Any) -> int:
            left = pull(arrival, *given)
            self.staged[id(arrival)] = arrival.at
            return left

        monkeypatch.setattr(Wire, "pour_memory", halved)
        monkeypatch.setattr(images.Arrival, "pull", pulled)
        monkeypatch.setattr(images.Arrival, "__call__", noted)
        monkeypatch.setattr(images.Arrival, "draw", drawn)

    def begin(self) -> None:
        self.on.set()
        self.go.clear()
        self.staged.clear()


@pytest.fixture(params=["straight", "buffered", "compiled"])
def buffered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions come straight to their place, or, as large ones do, by way of a buffer, by Python or a compiled loop."""
    if request.param != "straight":
        if request.param == "buffered":
            monkeypatch.setattr(images, "pulls", lambda image: False)
        monkeypatch.setattr(framing, "TURN", 0.1)  # as often the compiled loop says how far it is
        monkeypatch.setattr(images, "LARGE", 0)
        monkeypatch.setattr(receiver, "BUFFER", 5000)
        monkeypatch.setattr(images.digest, "LEAST", 1 << 62)  # nothing need be compiled


@pytest.mark.usefixtures("buffered")
def test_bytes_go_on_as_they_come_and_count_below_when_they_do_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = Half(monkeypatch)
    with tree(tmp_path, tcp.lane()) as (above, relay, below, seen), Publisher("run", lanes=[above.lane()]) as sender:
        sender.publish(1, tensors(1, SIZE))
        assert below.wait(1, 30), below.errors
        until(lambda: relay.publisher is not None and relay.publisher.status()["undecided"] is None)
        half.begin()
        sender.publish(2, tensors(2, SIZE))
        until(lambda: len(half.staged) == 2 and min(half.staged.values()) >= SIZE)
        assert relay.publisher is not None and relay.publisher.status()["undecided"] == 2
        assert seen == [1] and is_whole(*below.latest())
        half.go.set()
        assert below.wait(2, 30), below.errors
        assert is_whole(*below.latest()) and below.held.root == relay.receiver.held.root
        assert relay.receiver.peak_bytes <= 4 * 4 * SIZE + 4096


@pytest.mark.usefixtures("buffered")
def test_what_comes_to_nothing_above_is_not_served_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender is gone in the middle, and comes again; then it sends what is damaged, and mends that."""
    half = Half(monkeypatch)
    with tree(tmp_path, tcp.lane()) as (above, relay, below, seen):
        with Publisher("run", epoch=1, lanes=[above.lane()]) as sender:
            sender.publish(1, tensors(1, SIZE))
            assert below.wait(1, 30), below.errors
            until(lambda: relay.publisher is not None and relay.publisher.status()["undecided"] is None)
            half.begin()
            sender.publish(2, tensors(2, SIZE))
            until(lambda: len(half.staged) == 2)
            relay.receiver._current.interrupt()  # as if the line were cut
            until(lambda: relay.publisher is not None and relay.publisher.status()["undecided"] is None)
            assert is_whole(*below.latest()) and seen == [1]
            half.on.clear()
            half.go.set()
            assert below.wait(2, 30), below.errors  # the same version, sent anew
        gather, spoilt = images.gather, threading.Event()

        def spoiling(given, planned, image, *rest):  # type: ignore[no-untyped-def]
            found = gather(given, planned, image, *rest)
            if spoilt.is_set():
                image[planned[0].offset + 3 * SIZE] ^= 0x10
            return found

        monkeypatch.setattr(images, "gather", spoiling)
        spoilt.set()
        with Publisher("run", epoch=2, lanes=[above.lane()], settings=Settings(retries=1)) as sender:
            until(lambda: sender.status()["receivers"])
            sender.publish(3, tensors(3, SIZE))
            assert not sender.wait(3, 30)
            spoilt.clear()
            sender.publish(4, tensors(4, SIZE))
            assert below.wait(4, 30), below.errors
            assert seen == [1, 2, 4] and is_whole(*below.latest())


def test_who_maps_an_image_gets_it_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Half(monkeypatch)
    lane = shared_memory.lane(str(tmp_path / "socket"))
    with tree(tmp_path, lane) as (above, relay, below, seen), Publisher("run", lanes=[above.lane()]) as sender:
        sender.publish(1, tensors(1, SIZE))
        assert below.wait(1, 30), below.errors
        until(lambda: relay.publisher is not None and relay.publisher.status()["undecided"] is None)
        half.begin()
        sender.publish(2, tensors(2, SIZE))
        until(lambda: relay.publisher is not None and relay.publisher.status()["undecided"] == 2)
        assert seen == [1] and is_whole(*below.latest())
        half.go.set()
        assert below.wait(2, 30), below.errors
        assert is_whole(*below.latest())
