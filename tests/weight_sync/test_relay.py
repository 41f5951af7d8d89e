"""Relays: a tree of servers, in which nothing counts below that does not count above."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from longhaul.weight_sync import packing
from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.relay import Relay
from longhaul.weight_sync.transports import connect, tcp
from tests.helpers.weight_sync_transports import is_whole, tensors, until, way


def test_a_relay_tells_how_large_what_it_serves_is(tmp_path: Path) -> None:
    above, below = way("tcp", tmp_path), tcp.serve()
    with Publisher("run", epoch=1, transports=[above.serve()]) as sender:
        sender.publish(1, tensors(1))
        with Relay(above.connect, transports=[below]) as relay:
            until(lambda: relay.publisher is not None and relay.publisher.status()["version"] == 1)
            assert relay.publisher is not None
            assert relay.publisher.status()["image_bytes"] == sender.status()["image_bytes"] > 0


def test_a_tree_of_relays_feeds_who_the_sender_does_not_know(tmp_path: Path) -> None:
    above = way("tcp", tmp_path)
    lanes = [tcp.serve() for _ in range(2)]
    addresses = [lane.address.removeprefix("tcp:") for lane in lanes]
    with Publisher("run", epoch=1, transports=[above.serve()]) as sender:
        sender.publish(1, tensors(1))
        with (
            Relay(above.connect, transports=lanes[:1]) as first,
            Relay(lambda: tcp.connect(addresses[0], "second"), transports=lanes[1:]) as second,
        ):
            for version in (2, 3, 9):
                sender.publish(version, tensors(version))
                until(lambda: second.receiver.served and second.receiver.served.version == version)  # noqa: B023
                assert is_whole(*second.receiver.latest())
                assert second.receiver.held.root == first.receiver.held.root
            assert len(sender.status()["receivers"]) == 1
            sender.close()
            with Publisher("run", epoch=2, transports=[above.serve()]) as again:
                again.publish(4, tensors(4))
                until(lambda: second.receiver.held.epoch == 2)
                assert is_whole(*second.receiver.latest())


@pytest.mark.parametrize("kind", ["tcp", "shared"])
def test_a_relay_serves_no_version_that_arrived_damaged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is gone in between, and comes again; then it sends a damaged version, and a good one after it."""
    above, below, seen = way("tcp", tmp_path), way(kind, tmp_path).serve(), list[int]()
    gather, spoilt = packing.gather, threading.Event()

    def spoiling(given, planned, image, *rest):  # type: ignore[no-untyped-def]
        gathered = gather(given, planned, image, *rest)
        if spoilt.is_set():
            image[planned[0].offset + 300] ^= 0x10
        return gathered

    monkeypatch.setattr(packing, "gather", spoiling)
    with (
        Relay(above.connect, transports=[below]) as relay,
        Receiver(lambda: connect(below.address), on_commit=seen.append) as receiver,
    ):
        with Publisher("run", epoch=1, transports=[above.serve()]) as sender:
            sender.publish(1, tensors(1))
            assert receiver.wait(1, 30), receiver.errors
        spoilt.set()
        with Publisher("run", epoch=2, transports=[above.serve()], settings=Settings(retries=1)) as sender:
            until(lambda: sender.status()["receivers"])
            sender.publish(3, tensors(3))
            assert not sender.wait(3, 30)
            spoilt.clear()
            sender.publish(4, tensors(4))
            assert receiver.wait(4, 30), receiver.errors
            assert seen == [1, 4] and is_whole(*receiver.latest())
            assert receiver.held.root == relay.receiver.held.root
