"""Staleness: whatever happens in whatever order, the bound holds, and every ticket is learnt from once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from longhaul.topologies import staleness
from longhaul.topologies.actor_learner.config import ActorConfig, decided
from longhaul.topologies.staleness import AHEAD, LATEST, Book, Rule, Ticket

BOUNDS = some.sampled_from([None, 0, 1, 2, 5])
RULES = some.builds(Rule, some.integers(1, 4), BOUNDS, some.just(False), some.integers(1, 12), some.just(0))


def play(rule: Rule, choose: Any, period: int = 2**62) -> list[tuple[Ticket, int, int]]:
    """A whole run in an order that `choose` makes: (ticket, version that acted, update that learnt from it). Every
    `period` updates the actors enter other states."""
    until = min(period, rule.until)
    book, _ = out = staleness.hand_out(staleness.opened(rule._replace(until=until), 0))
    started: dict[Ticket, int] = {}  # and the version that acts
    doing: list[list[Ticket]] = [[] for _ in range(rule.places)]
    learnt = []
    for actor, ticket in out[1]:
        doing[actor].append(ticket)
    while book.version < rule.until:
        idle = [a for a, mine in enumerate(doing) if mine and mine[0] not in started]
        busy = [a for a, mine in enumerate(doing) if mine and mine[0] in started]
        events = [("start", a) for a in idle] + [("finish", a) for a in busy]
        events += [("learn", -1)] * book.whole
        assert events, "nobody can do anything: a deadlock"
        event, actor = events[choose(len(events))]
        if event == "start":
            started[doing[actor][0]] = book.version
        elif event == "finish":
            book, ticket = staleness.finished(book, actor)
            assert ticket == doing[actor].pop(0)
        else:
            batch = sorted(t for mine in book.given for t in mine if t.batch == book.version)
            learnt += [(t, started[t], book.version) for t in batch]
            book = staleness.learnt(book)
        if book.version == book.rule.until < rule.until:
            book = staleness.entered(book, min(book.version + period, rule.until))
        book, new = staleness.hand_out(book)
        for who, ticket in new:
            doing[who].append(ticket)
        check(book)
    return learnt


def check(book: Book) -> None:
    """What memory there is, is enough."""
    rule = book.rule
    rooms: dict[int, set[int]] = {}
    for mine in book.given:
        assert len(mine) <= rule.depth - 1, "the state that the oldest one begins with is written over"
        for ticket in mine:
            rooms.setdefault(ticket.batch % rule.depth, set()).add(ticket.batch)
    assert all(len(batches) == 1 for batches in rooms.values())
    assert (book.version - 1) % rule.depth not in rooms, "the batch whose update may still run is written over"


@settings(max_examples=80, deadline=None)
@given(RULES, some.data())
def test_every_ticket_is_learnt_from_once_in_order_and_none_too_late(rule: Rule, data: some.DataObject) -> None:
    learnt = play(rule, lambda n: data.draw(some.integers(0, n - 1)))
    assert [(t.batch, t.place) for t, _, _ in learnt] == [(b, k) for b in range(rule.until) for k in range(rule.places)]
    for ticket, version, update in learnt:
        assert ticket.batch == update
        assert 0 <= update - version <= (rule.ahead if rule.staleness is None else rule.staleness)
    for place in range(rule.places):
        turns = [t.turn for t, _, _ in learnt if t.place == place]
        assert rule.staleness is None or turns == list(range(rule.until))


@settings(max_examples=40, deadline=None)
@given(RULES, some.integers(1, 5), some.data())
def test_no_rollout_begins_before_the_states_that_it_goes_on_from_are_entered(
    rule: Rule, period: int, data: some.DataObject
) -> None:
    learnt = play(rule, lambda n: data.draw(some.integers(0, n - 1)), period)
    assert [(t.batch, t.place) for t, _, _ in learnt] == [(b, k) for b in range(rule.until) for k in range(rule.places)]
    for ticket, version, update in learnt:
        assert update // period * period <= version <= update == ticket.batch


def test_states_are_not_entered_while_a_rollout_is_under_way() -> None:
    book, _ = staleness.hand_out(staleness.opened(Rule(1, 1, until=1), 0))
    with pytest.raises(ValueError, match="rollouts of before batch 0 under way"):
        staleness.entered(book, 2)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_is_reached_when_actors_are_quick(bound: int) -> None:
    """Who always acts before the learner learns is as stale as the rule allows, but for the beginning."""
    learnt = play(Rule(2, bound, until=10), lambda n: 0)
    assert [update - version for _, version, update in learnt] == [min(bound, u) for u in range(10) for _ in range(2)]


def test_pinned_tickets_name_the_version_that_acts() -> None:
    book, out = staleness.hand_out(staleness.opened(Rule(1, 2, pin=True, until=9), 0))
    assert [t.version for _, t in out] == [0, 0, 0]
    for _ in range(3):
        book, _ = staleness.finished(book, 0)
    for expected in (1, 2, 3):
        book, out = staleness.hand_out(staleness.learnt(book))
        assert [(t.batch, t.version) for _, t in out] == [(expected + 2, expected)]
        book, _ = staleness.finished(book, 0)
    resumed = staleness.hand_out(staleness.opened(Rule(1, 2, pin=True, until=9, oldest=4), 5))[1]
    assert [(t.batch, t.version) for _, t in resumed] == [(5, 4), (6, 4), (7, 5)]
    assert staleness.hand_out(staleness.opened(Rule(1, 2), 0))[1][0][1].version == LATEST


def test_without_a_bound_a_slow_actor_holds_up_its_own_tickets_alone() -> None:
    """Two actors, of which one does nothing for a while: the other does five of six tickets."""
    book, out = staleness.hand_out(staleness.opened(Rule(2, None), 0))
    assert [(actor, t.batch, t.place) for actor, t in out] == [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)]
    assert not book.whole
    for _ in range(3):
        book, _ = staleness.finished(book, 1)
        book, _ = staleness.hand_out(book)
    assert book.done == (0, 3) and not book.whole
    assert sum(book.done) == 3


def test_an_incomplete_batch_and_a_rollout_without_ticket_are_refused() -> None:
    book, _ = staleness.hand_out(staleness.opened(Rule(2, 0), 0))
    with pytest.raises(ValueError, match="before it was whole"):
        staleness.learnt(book)
    book, _ = staleness.finished(book, 0)
    with pytest.raises(ValueError, match="nobody asked for"):
        staleness.finished(book, 0)


@settings(max_examples=60, deadline=None)
@given(
    groups=some.integers(1, 5), bound=some.sampled_from([None, 0, 1, 3]), seed=some.integers(0, 2**32 - 1),
    until=some.integers(1, 9),
)  # fmt: skip
def test_one_ticket_at_a_time_each_is_finished_once_and_none_too_early(
    groups: int, bound: int | None, seed: int, until: int
) -> None:
    """Groups begin, finish and are lost as chance has it; the learner learns when it may."""
    rng = np.random.default_rng(seed)
    book = staleness.opened(Rule(groups, bound, until=until), 0)
    mine: dict[int, Ticket] = {}
    done: list[tuple[int, int]] = []
    for _ in range(4000):
        if book.version == until:
            break
        group = int(rng.integers(groups))
        chance = rng.random()
        if group not in mine:
            book, ticket = staleness.begin(book, group)
            if ticket is not None:
                assert book.version <= ticket.batch <= book.version + (AHEAD if bound is None else bound)
                assert ticket.batch < until
                assert ticket[:2] not in [other[:2] for other in mine.values()], "two fill one place"
                assert bound is None or ticket.place == group
                mine[group] = ticket
        elif chance < 0.2:
            book, lost = staleness.lose(book, group)
            assert lost
            del mine[group]
        elif chance < 0.8:
            book, ticket = staleness.finished(book, group)
            assert ticket == mine.pop(group)
            done.append(ticket[:2])
        if book.whole and rng.random() < 0.5:
            book = staleness.learnt(book)
    assert book.version == until, "it stands still"
    assert sorted(done) == [(b, i) for b in range(until) for i in range(groups)]


def test_without_a_bound_a_group_that_was_lost_holds_up_nobody() -> None:
    book, ticket = staleness.begin(staleness.opened(Rule(3, None, until=100), 0), 2)
    assert ticket is not None
    assert (ticket.batch, ticket.place) == (0, 0)
    book, _ = staleness.lose(book, 2)
    for _ in range(50):
        for group in (0, 1):
            book, ticket = staleness.begin(book, group)
            if ticket is not None:
                book, _ = staleness.finished(book, group)
            while book.whole:
                book = staleness.learnt(book)
    assert book.version > 25


def test_with_a_bound_everybody_is_waited_for() -> None:
    book = staleness.opened(Rule(2, 1, until=100), 0)
    for batch in (0, 1):
        book, ticket = staleness.begin(book, 0)
        assert ticket is not None
        assert (ticket.batch, ticket.place) == (batch, 0)
        book, _ = staleness.finished(book, 0)
    assert staleness.begin(book, 0)[1] is None
    assert not book.whole


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="staleness is -1; it must be at least 0"):
        staleness.opened(Rule(1, -1), 0)


@pytest.mark.parametrize(
    ("acting", "words"),
    [
        (ActorConfig(3), "actors is 3, which can't share 8 worlds evenly"),
        (ActorConfig(1), "the learner's 2 devices"),
        (ActorConfig(0), "actors is 0; it must lie in 1"),
        (ActorConfig(2, "fibre"), "actor_kind is 'fibre'"),
        (ActorConfig(2, staleness=-1), "staleness is -1"),
        (ActorConfig(2, staleness=None, pin=True), "give a --staleness"),
        (
            ActorConfig(2, actor_devices=(0, 1)),
            "actor_devices is 0 1, and --actor-kind process; choose --actor-kind t",
        ),
        (ActorConfig(2, "thread", actor_devices=(-1,)), "actor_devices is -1; it must lie in 0 to 1023"),
    ],
)
def test_settings_that_can_not_be_are_named(acting: ActorConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decided(acting, envs=8, devices=2, cores=4)


def test_actors_are_as_many_as_cores_that_can_share_the_work() -> None:
    assert [decided(ActorConfig(), envs=n, devices=1, cores=4).actors for n in (8, 6, 5)] == [4, 3, 1]
    assert decided(ActorConfig(), envs=8, devices=2, cores=1).actors == 2
