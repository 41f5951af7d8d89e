"""The protocol of updates, played without clocks, sockets or memory: every order of events, and what must never be."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise

import pytest

from longhaul.weight_sync import protocol as p
from longhaul.weight_sync.protocol import (
    NOTHING,
    Cohort,
    Held,
    Offer,
    Phase,
    ProtocolError,
    ReceiverSide,
    Settings,
    Verdict,
)


def root(version: int, epoch: int = 1) -> bytes:
    return hashlib.md5(f"{epoch} {version}".encode()).digest()


def opened(names: str = "ab", quorum: p.Quorum = "all", epoch: int = 1) -> Cohort:
    cohort = p.open_cohort("run", epoch, Settings(quorum, lease=10, deadline=20, retries=1))
    for name in names:
        cohort = p.bind(cohort, name, NOTHING, 0.0)
    return cohort


def taken(cohort: Cohort, name: str, now: float = 1.0) -> Cohort:
    """The receiver is offered what there is, and is ready with it."""
    cohort, offer = p.offer(cohort, name, now)
    assert offer is not None
    return p.ready(cohort, name, offer.version, offer.root, now)


def ended(cohort: Cohort, name: str, now: float = 2.0) -> Cohort:
    one = cohort.receivers[name]
    held = Held("run", cohort.epoch, one.target, root(one.target))
    return p.done(cohort, name, held if p.verdict(cohort, one.target) is Verdict.COMMIT else one.held, now)


@pytest.mark.parametrize(("quorum", "after"), [("all", 3), (2, 2), (1, 1), (0, 0)])
def test_a_version_counts_when_its_quorum_is_ready(quorum: p.Quorum, after: int) -> None:
    cohort = p.prepare(opened("abc", quorum), 5, root(5), 0.0)
    for count, name in enumerate("abc"):
        assert (cohort.committed == 5) == (count >= after)
        cohort = taken(cohort, name)
    assert cohort.committed == 5 and cohort.round is None and cohort.root == root(5)
    for name in "abc":
        cohort = ended(cohort, name)
        assert cohort.receivers[name].held.version == 5
        assert p.offer(cohort, name, 3.0)[1] is None  # it has the newest


def test_nobody_to_wait_for_is_a_quorum_of_all() -> None:
    assert p.prepare(opened(""), 0, root(0), 0.0).committed == 0
    late = p.bind(p.prepare(opened(""), 0, root(0), 0.0), "late", NOTHING, 1.0)
    _, offer = p.offer(late, "late", 1.0)
    assert offer == Offer("run", 1, 0, -1, root(0), 20)


def test_the_dead_and_the_silent_are_dropped_and_not_waited_for() -> None:
    cohort = taken(p.prepare(opened("abc"), 1, root(1), 0.0), "a")
    cohort = p.drop(cohort, "b", "killed")
    assert cohort.committed == -1
    cohort, _ = p.offer(cohort, "c", 1.0)  # staging until its deadline
    cohort = p.heard(cohort, "a", 9.0)
    assert p.tick(cohort, 10.5).round is not None
    assert p.tick(p.heard(p.heard(cohort, "a", 19.0), "c", 19.0), 20.5).committed == 1
    silent = p.tick(cohort, 20.5)
    assert silent.committed == 1 or silent.round is None
    assert "c" not in silent.receivers


def test_too_few_by_the_deadline_abort_a_round_of_k() -> None:
    cohort = taken(p.prepare(opened("abc", 2), 1, root(1), 0.0), "a")
    cohort = p.tick(p.heard(cohort, "a", 15.0), 20.1)
    assert cohort.round is None and cohort.committed == -1 and p.verdict(cohort, 1) is Verdict.ABORT
    cohort = ended(cohort, "a", 20.2)
    assert cohort.receivers["a"].held == NOTHING
    assert p.prepare(cohort, 2, root(2), 21.0).prepared == 2  # and goes on


def test_a_version_that_all_find_damaged_is_aborted() -> None:
    cohort = p.prepare(opened("ab"), 1, root(1), 0.0)
    for _ in range(2):
        for name in "ab":
            cohort, offer = p.offer(cohort, name, 1.0)
            assert offer is not None and offer.base == -1
            cohort = p.failed(cohort, name, 1, "damaged", 1.0)
    assert cohort.round is None and cohort.committed == -1 and not cohort.receivers

    cohort = taken(p.prepare(opened("ab"), 1, root(1), 0.0), "a")
    for _ in range(2):
        cohort, _ = p.offer(cohort, "b", 1.0)
        cohort = p.failed(cohort, "b", 1, "damaged", 1.0)
    assert cohort.committed == 1 and set(cohort.receivers) == {"a"}


def test_the_base_is_what_a_receiver_really_holds_and_counts() -> None:
    cohort = p.prepare(opened("ab"), 1, root(1), 0.0)
    cohort = taken(taken(cohort, "a"), "b")
    cohort = ended(cohort, "a")  # b has not said that it serves 1
    cohort = p.prepare(cohort, 2, root(2), 3.0)
    cohort, offer = p.offer(cohort, "a", 3.0)
    assert offer is not None and offer.base == 1
    with pytest.raises(ProtocolError, match="must end that first"):
        p.offer(cohort, "b", 3.0)
    cohort = p.failed(cohort, "a", 2, "wrong base", 3.0)
    cohort, offer = p.offer(cohort, "a", 3.0)
    assert offer is not None and offer.base == -1  # after a failure: whole

    for held in (Held("run", 0, 1, root(1)), Held("run", 1, 1, b"other"), Held("run", 1, 0, root(0)), NOTHING):
        bound = p.bind(cohort, "c", held, 4.0)
        _, offer = p.offer(bound, "c", 4.0)
        assert offer is not None and (offer.version, offer.base) == (2, -1)


def test_a_base_does_not_advance_by_what_was_aborted() -> None:
    cohort = ended(taken(p.prepare(opened("a"), 1, root(1), 0.0), "a"), "a")
    cohort = p.prepare(cohort, 2, root(2), 1.0)
    for _ in range(2):
        cohort, _ = p.offer(cohort, "a", 1.0)
        cohort = p.failed(cohort, "a", 2, "damaged", 1.0)
    cohort = p.bind(cohort, "a again", Held("run", 1, 1, root(1)), 2.0)
    cohort = p.prepare(cohort, 3, root(3), 2.0)
    _, offer = p.offer(cohort, "a again", 2.0)
    assert offer is not None and (offer.version, offer.base) == (3, 1)


@pytest.mark.parametrize(
    ("held", "words"),
    [(Held("other", 1, 1, b""), "run other"), (Held("run", 2, 1, b""), "superseded")],
)
def test_who_belongs_to_another_sender_is_refused(held: Held, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        p.bind(opened(), "c", held, 0.0)


def test_words_out_of_order_are_refused_and_change_nothing() -> None:
    cohort = p.prepare(opened("ab"), 5, root(5), 0.0)
    offered, _ = p.offer(cohort, "a", 1.0)
    refused = [
        (lambda: p.prepare(cohort, 6, root(6), 0.0), "undecided"),
        (lambda: p.prepare(taken(taken(cohort, "a"), "b"), 5, root(5), 0.0), "stale"),
        (lambda: p.ready(cohort, "a", 5, root(5), 0.0), "idle"),
        (lambda: p.ready(offered, "a", 4, root(4), 0.0), "names version 4"),
        (lambda: p.ready(offered, "a", 5, root(4), 0.0), "another version"),
        (lambda: p.done(offered, "a", Held("run", 1, 5, root(5)), 0.0), "not ready"),
        (lambda: p.done(taken(cohort, "a"), "a", Held("run", 1, 5, root(5)), 0.0), "does not count"),
        (lambda: p.heard(cohort, "z", 0.0), "never bound"),
        (lambda: p.heard(p.drop(cohort, "a", "killed"), "a", 0.0), "killed"),
        (lambda: p.bind(cohort, "a", NOTHING, 0.0), "already"),
        (lambda: p.open_cohort("run", 1, Settings(quorum=-1)), "quorum"),
        (lambda: p.open_cohort("run", 1, Settings(lease=0)), "lease"),
    ]
    for step, words in refused:
        with pytest.raises(ValueError, match=words):
            step()
    twice = p.ready(p.ready(offered, "a", 5, root(5), 1.0), "a", 5, root(5), 1.0)  # a word said twice
    assert twice.round is not None and twice.round.ready == {"a"} and twice.committed == -1


OFFER = Offer("run", 3, 7, -1, root(7), 20.0)


def test_a_seat_serves_only_what_was_staged_whole_and_told_to_count() -> None:
    staging = p.accept(ReceiverSide(), OFFER, 0.0)
    staged = p.staged(staging, root(7), 1.0)
    served = p.commit(staged, 7)
    assert served == ReceiverSide(Held("run", 3, 7, root(7)))
    for seat in (staging, staged):
        assert p.lost(seat) == ReceiverSide()
    refused = [
        (lambda: p.accept(served, OFFER, 0.0), "stale"),
        (lambda: p.accept(served, OFFER._replace(version=6), 0.0), "stale"),
        (lambda: p.accept(served, OFFER._replace(epoch=2, version=99), 0.0), "stale"),
        (lambda: p.accept(served, OFFER._replace(run="other", epoch=9), 0.0), "other"),
        (lambda: p.accept(served, OFFER._replace(version=9, base=8), 0.0), "builds upon 8"),
        (lambda: p.accept(served, OFFER._replace(epoch=4, version=9, base=7), 0.0), "builds upon 7"),
        (lambda: p.accept(ReceiverSide(), OFFER._replace(base=6), 0.0), "builds upon 6"),
        (lambda: p.accept(staging, OFFER._replace(version=8), 0.0), "another"),
        (lambda: p.staged(staging, root(8), 1.0), "root differs"),
        (lambda: p.staged(staging, root(7), 21.0), "deadline"),
        (lambda: p.staged(ReceiverSide(), root(7), 1.0), "nothing"),
        (lambda: p.commit(staging, 7), "not staged"),
        (lambda: p.commit(staged, 6), "not staged"),
        (lambda: p.commit(served, 7), "not staged"),  # said twice
    ]
    for step, words in refused:
        with pytest.raises(ProtocolError, match=words):
            step()
    assert p.accept(served, OFFER._replace(version=9, base=7), 0.0).phase is Phase.STAGING
    assert p.accept(served, OFFER._replace(epoch=4, version=1), 0.0).phase is Phase.STAGING


class World:
    """A sender and receivers that do, and fail to do, all that they can, in an order drawn by chance."""

    def __init__(self, seed: int, receivers: int, quorum: p.Quorum) -> None:
        self.random = random.Random(seed)
        self.now, self.epoch, self.version = 0.0, 1, 0
        self.quorum = quorum
        self.cohort = opened("", quorum)
        self.seats = {f"r{i}": ReceiverSide() for i in range(receivers)}
        self.names: dict[str, str] = {}  # receiver -> under which name it is bound
        self.served: dict[str, list[tuple[int, int]]] = {name: [] for name in self.seats}
        self.counted: set[tuple[int, int]] = set()
        self.began: float | None = None
        self.bound = 0

    def step(self) -> None:
        self.now += self.random.random()
        before = self.cohort
        kind = self.random.random()
        if kind < 0.08:
            self._publish()
        elif kind < 0.085:
            self._restart()
        elif kind < 0.12:
            self._kill()
        elif kind < 0.2:
            self.cohort = p.tick(self.cohort, self.now)
        else:
            self._receive()
        self._check(before)

    def _publish(self) -> None:
        if self.cohort.round is None:
            self.version += self.random.choice((1, 1, 3))
            self.cohort = p.prepare(self.cohort, self.version, root(self.version, self.epoch), self.now)
            self.began = self.now

    def _restart(self) -> None:
        self.epoch += 1
        self.version = self.random.randrange(self.version + 1)
        self.cohort = opened("", self.quorum, self.epoch)
        self.names.clear()

    def _kill(self) -> None:
        """A receiver's process dies and comes back empty, or its connection breaks; the sender may hear of it late."""
        name = self.random.choice(list(self.seats))
        if self.random.random() < 0.5:
            self.seats[name] = ReceiverSide()
            self.served[name] = []
        else:
            self.seats[name] = p.lost(self.seats[name])
        bound = self.names.pop(name, None)
        if bound is not None and self.random.random() < 0.7:
            self.cohort = p.drop(self.cohort, bound, "gone")

    def _receive(self) -> None:
        name = self.random.choice(list(self.seats))
        seat, bound = self.seats[name], self.names.get(name)
        if bound is None:
            self.bound += 1
            self.names[name] = f"{name}#{self.bound}"
            self.cohort = p.bind(self.cohort, self.names[name], seat.held, self.now)
            return
        try:
            if seat.phase is Phase.IDLE:
                self.cohort, offer = p.offer(self.cohort, bound, self.now)
                if offer is not None:
                    self.seats[name] = p.accept(seat, offer, self.now)
                return
            offered = seat.offered
            assert offered is not None
            if seat.phase is Phase.STAGING:
                if self.random.random() < 0.1:
                    self.seats[name] = p.lost(seat)
                    self.cohort = p.failed(self.cohort, bound, offered.version, "damaged", self.now)
                    return
                self.seats[name] = seat = p.staged(seat, offered.root, self.now)
            self.cohort = p.ready(self.cohort, bound, offered.version, offered.root, self.now)
            found = p.verdict(self.cohort, offered.version)
            if found is Verdict.WAIT:
                return
            self.seats[name] = p.commit(seat, offered.version) if found is Verdict.COMMIT else p.lost(seat)
            if found is Verdict.COMMIT:
                self.served[name].append((offered.epoch, offered.version))
            self.cohort = p.done(self.cohort, bound, self.seats[name].held, self.now)
        except ProtocolError:  # the connection ends; what is served stays
            self.names.pop(name, None)
            self.cohort = p.drop(self.cohort, bound, "refused")
            self.seats[name] = p.lost(self.seats[name])

    def _check(self, before: Cohort) -> None:
        now = self.cohort
        if now.committed >= 0:
            self.counted.add((now.epoch, now.committed))
        for name, seat in self.seats.items():
            held = seat.held
            if held != NOTHING:
                assert (held.epoch, held.version) in self.counted, "served, but never counted"
                assert held.root == root(held.version, held.epoch), "served under another's root"
            assert all(a < b for a, b in pairwise(self.served[name])), "a version went back"
        if before.epoch == now.epoch:
            assert now.committed >= before.committed and now.prepared >= before.prepared
        assert now.committed not in now.aborted
        for one in now.receivers.values():
            if one.held.epoch == now.epoch:
                assert one.held.version <= now.prepared
        wakes = p.wakes(now)
        if wakes is not None:
            later = p.tick(now, wakes)
            assert later != now, "a deadline that ends nothing"
        assert p.tick(now, self.now + 1e6).round is None, "a round that no time ends"


@pytest.mark.parametrize("quorum", ["all", 2, 0])
def test_no_order_of_events_serves_what_does_not_count(quorum: p.Quorum) -> None:
    progress = 0
    for seed in range(25):
        world = World(seed, 4, quorum)
        for _ in range(250):
            world.step()
        progress += sum(map(len, world.served.values()))
    assert progress > 200  # or nothing was tried


def test_a_thousand_versions_reach_all_and_their_roots_are_a_chain() -> None:
    cohort = opened("abc")
    chains = dict.fromkeys("abc", b"")
    wanted = b""
    for version in range(1000):
        cohort = p.prepare(cohort, version, root(version), version)
        wanted = hashlib.md5(wanted + root(version)).digest()
        for name in "abc":
            cohort = taken(cohort, name, version)
        for name in "abc":
            cohort = ended(cohort, name, version)
            chains[name] = hashlib.md5(chains[name] + cohort.receivers[name].held.root).digest()
    assert set(chains.values()) == {wanted}


def test_three_hundred_receivers_skip_to_the_newest() -> None:
    cohort = p.open_cohort("run", 1, Settings(quorum=0))
    draw = random.Random(0)
    seats = {f"r{i}": ReceiverSide() for i in range(300)}
    for name in seats:
        cohort = p.bind(cohort, name, NOTHING, 0.0)
    for version in range(40):
        cohort = p.prepare(cohort, version, root(version), 0.0)
        assert cohort.committed == version  # nobody is waited for
        for name in draw.sample(list(seats), 60):
            seat = seats[name]
            if seat.phase is Phase.IDLE:
                cohort, offer = p.offer(cohort, name, 0.0)
                assert offer is not None and offer.version == version
                seats[name] = p.accept(seat, offer, 0.0)
            else:
                assert seat.offered is not None
                seat = p.staged(seat, seat.offered.root, 0.0)
                cohort = p.ready(cohort, name, seat.offered.version, seat.offered.root, 0.0)
                seats[name] = p.commit(seat, seat.offered.version)
                cohort = p.done(cohort, name, seats[name].held, 0.0)
    held = {seat.held.version for seat in seats.values()}
    assert max(held) >= 37 and len(held) > 3
