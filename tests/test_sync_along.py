"""Versions that are sent while they are made, their digests behind; nothing counts before it is whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from longhaul.sync import arriving, engine, images
from longhaul.sync import protocol as p
from longhaul.sync.engine import Publisher
from longhaul.sync.lanes import tcp
from longhaul.sync.protocol import NOTHING, ProtocolError, Settings
from longhaul.sync.receiver import Receiver
from longhaul.sync.relay import Relay
from tests.sync_lanes import Way, is_whole, receivers, tensors, until, way

SIZE = 1 << 20
"""Elements of a version: more than sockets hold."""


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version is, in many pieces."""
    for where, name, value in (
        *((engine, "STREAMED", 0), (engine, "MEETING", 5.0), (images, "LARGE", 0), (images, "BUCKET", 1 << 16)),
        (images.digests, "LEAST", 1 << 62),  # nothing need be compiled
    ):
        monkeypatch.setattr(where, name, value)


@pytest.fixture
def there(tmp_path: Path) -> Way:
    return way("tcp", tmp_path)


class Half:
    """Who copies a version stops in the middle, until it may go on; `bend` sees each piece before it goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.go = False, threading.Event()
        self.bend: Callable[[np.ndarray, int], None] = lambda image, at: None
        self.versions: list[int] = []  # that went so
        gather = images.gather_along

        def halved(given, planned, image, passed):  # type: ignore[no-untyped-def]
            at = 0
            self.versions.append(int(given["a"][0]))

            def next_(piece: memoryview) -> None:
                nonlocal at
                if self.on and at <= len(image) // 2 < at + len(piece):
                    assert self.go.wait(30)
                self.bend(image, at)
                passed(image[at : at + len(piece)].data)
                at += len(piece)

            return gather(given, planned, image, next_)

        monkeypatch.setattr(images, "gather_along", halved)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[Half]:
    made = Half(monkeypatch)
    monkeypatch.setattr(images.digests, "LEAST", 64)  # pieces of tensors, not of what is between them
    monkeypatch.setattr(images.digests, "_streams", lambda: None)
    yield made
    made.go.set()


def begun(sender: Publisher, version: int, count: int) -> None:
    """So many receivers hold the version, and wait for the next."""
    until(lambda: sender._asking == count and all(e["version"] == version for e in sender.status()["receivers"]))


def test_bytes_come_before_all_are_there_and_count_when_they_are(there: Way, half: Half) -> None:
    with Publisher("run", lanes=[there.lane()]) as sender, receivers(there, 2) as both:
        until(lambda: sender._asking == 2)
        for version in (1, 2):
            half.on = version == 2
            publishing = threading.Thread(
                target=sender.publish, args=(version, tensors(version, SIZE)), kwargs={"along": True}
            )
            publishing.start()
            if half.on:
                until(lambda: all(each._seat.offered is not None for each in both))
                assert sender.status()["undecided"] == 2 and all(is_whole(*each.latest()) for each in both)
                assert all(each.held.version == 1 for each in both)
                half.go.set()
            publishing.join(30)
            assert sender.wait(version, 30)
            for each in both:
                assert each.wait(version, 30) and is_whole(*each.latest()), each.errors
                assert each.held.root.hex() == sender.status()["root"] and not each.errors
            begun(sender, version, 2)
        assert half.versions == [1, 2]
        assert sender.peak_bytes <= 4 * sender.status()["image_bytes"]


def test_damage_on_the_way_is_found_and_mended_and_in_the_image_aborts(there: Way, half: Half) -> None:
    with (
        Publisher("run", lanes=[there.lane()], settings=Settings(retries=1)) as sender,
        receivers(there) as (receiver,),
    ):
        until(lambda: sender._asking == 1)
        sender.publish(1, tensors(1, SIZE), along=True)
        assert receiver.wait(1, 30)
        begun(sender, 1, 1)

        def bend(image: np.ndarray, at: int) -> None:
            if at == 1 << 18:
                image[at + 77] ^= 8

        half.bend = bend
        sender.publish(2, tensors(2, SIZE), along=True)
        assert not sender.wait(2, 30) and receiver.latest()[0] == 1 and is_whole(*receiver.latest())
        assert sum("damaged: a" in line for line in receiver.errors) == 2  # sent again whole, from the same image
        half.bend = lambda image, at: None
        until(lambda: sender._asking == 1)
        sender.publish(3, tensors(3, SIZE), along=True)
        assert receiver.wait(3, 30) and is_whole(*receiver.latest()), receiver.errors


def test_what_could_not_be_made_is_as_if_it_had_never_been(there: Way, half: Half) -> None:
    with Publisher("run", lanes=[there.lane()]) as sender, receivers(there) as (receiver,):
        until(lambda: sender._asking == 1)
        sender.publish(1, tensors(1, SIZE), along=True)
        assert receiver.wait(1, 30)
        begun(sender, 1, 1)

        def bend(image: np.ndarray, at: int) -> None:
            if at >= 1 << 18:
                raise OSError("the trainer's memory is gone")

        half.bend = bend
        with pytest.raises(OSError, match="memory is gone"):
            sender.publish(2, tensors(2, SIZE), along=True)
        assert sender.status()["undecided"] is None and is_whole(*receiver.latest())
        half.bend = lambda image, at: None
        assert sender.publish(2, tensors(2, SIZE), along=True)  # it may come again
        assert receiver.wait(2, 30) and is_whole(*receiver.latest()), receiver.errors


def test_a_tree_passes_on_what_has_no_digests_yet(there: Way, half: Half) -> None:
    lane, seen = tcp.lane(), list[int]()
    with (
        Publisher("run", lanes=[there.lane()]) as sender,
        Relay(there.connect, lanes=[lane]) as relay,
    ):
        sender.publish(1, tensors(1, SIZE))
        with Receiver(lambda: tcp.connect(lane.address.removeprefix("tcp:"), "b"), on_commit=seen.append) as below:
            assert below.wait(1, 30), below.errors
            until(lambda: relay.publisher is not None and relay.publisher._asking == 1)
            begun(sender, 1, 1)
            half.on = True
            threading.Thread(target=sender.publish, args=(2, tensors(2, SIZE)), kwargs={"along": True}).start()
            until(lambda: below._seat.offered is not None)
            assert relay.publisher is not None and relay.publisher.status()["undecided"] == 2 and seen == [1]
            half.go.set()
            assert below.wait(2, 30), (below.errors, relay.receiver.errors)
            assert is_whole(*below.latest()) and below.held.root == relay.receiver.held.root
            assert not any("damaged" in line for line in (*below.errors, *relay.receiver.errors))


def test_who_is_slow_holds_up_nobody_for_long(there: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes no byte: after its grace it is left behind, and the other has the version. Then it is dropped."""
    monkeypatch.setattr(arriving, "GRACE", 0.1)
    with (
        Publisher("run", lanes=[there.lane()], settings=Settings(1, deadline=1.0, lease=5.0)) as sender,
        receivers(there) as (receiver,),
    ):
        slow = there.connect()
        slow.bind(NOTHING, 5.0)  # type: ignore[attr-defined]
        asks = threading.Thread(target=lambda: (slow.ask(NOTHING, 3.0), slow.wire.send("fetch", 5.0, {"version": 1})))  # type: ignore[attr-defined]
        asks.start()
        until(lambda: sender._asking == 2)
        assert sender.publish(1, tensors(1, 16 * SIZE), along=True)
        assert receiver.wait(1, 30) and is_whole(*receiver.latest()), receiver.errors
        until(lambda: len(sender.status()["receivers"]) == 1)
        asks.join(10)
        slow.close()  # type: ignore[attr-defined]


def test_a_root_comes_once_and_before_what_lacks_it_counts() -> None:
    cohort = p.bind(p.open_cohort("run", 1), "a", NOTHING, 0.0)
    with pytest.raises(ProtocolError, match="no root"):
        p.prepare(cohort, 1, b"", 0.0)
    cohort = p.prepare(cohort, 1, b"", 0.0, held=True)
    cohort, offer = p.offer(cohort, "a", 0.0)
    assert offer is not None and offer.root == b""
    with pytest.raises(ProtocolError, match="not all there"):
        p.release(cohort, 1, True, 0.0)
    for early in (b"", b"one"):
        with pytest.raises(ProtocolError, match="another version 1"):
            p.ready(cohort, "a", 1, early, 0.0)
    assert p.known(cohort, 2, b"one") == cohort
    cohort = p.known(cohort, 1, b"one")
    with pytest.raises(ProtocolError, match="another root"):
        p.known(cohort, 1, b"two")
    cohort = p.release(p.ready(cohort, "a", 1, b"one", 1.0), 1, True, 1.0)
    assert (cohort.committed, cohort.root) == (1, b"one")
    seat = p.told(p.accept(p.Seat(), offer, 0.0), b"one")
    with pytest.raises(ProtocolError, match="had a root"):
        p.told(seat, b"two")
    assert p.commit(p.staged(seat, b"one", 1.0), 1).held.root == b"one"
