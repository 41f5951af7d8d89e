"""Batcher: when inference starts, on what waits alone, whoever has died."""

from __future__ import annotations

import pytest

from longhaul.topologies.inference_server.policy import Rule, bucket, buckets, decide

RULE = Rule(slots=2, most=8, deadline=0.002)


def test_nothing_waits_nothing_is_taken() -> None:
    assert decide(RULE, {}, [0, 1, 2], 5.0).take == ()


def test_it_waits_for_who_may_still_send_until_the_deadline() -> None:
    waiting = {0: 1.0, 1: 1.0005}  # actor 1 (groups 2 and 3) owes both
    found = decide(RULE, waiting, [2, 3], 1.001)
    assert found.take == ()
    assert found.wait == pytest.approx(0.001)
    assert decide(RULE, waiting, [2, 3], 1.002).take == (0, 1)


def test_it_does_not_wait_where_each_actor_has_something_waiting() -> None:
    """One slot of an actor waits while it steps the other: so double buffering never waits for the deadline."""
    assert decide(RULE, {0: 1.0, 2: 1.0}, [1, 3], 1.0).take == (0, 2)


def test_who_is_dead_or_waits_for_the_learner_is_waited_for_by_nobody() -> None:
    assert decide(RULE, {0: 1.0}, [1], 1.0).take == (0,)  # of actors 1 to 3 nothing is owed
    assert decide(RULE, {0: 1.0}, [], 1.0).take == (0,)


def test_most_bounds_a_batch_and_the_longest_waiting_come_first() -> None:
    waiting = {g: 1.0 - 0.0001 * g for g in range(12)}
    assert decide(RULE._replace(most=4), waiting, [20], 1.0).take == (11, 10, 9, 8)


def test_buckets_hold_what_comes() -> None:
    assert buckets(4, fixed=False) == (1, 2, 3, 4)
    assert buckets(13, fixed=False) == (1, 2, 3, 4, 6, 8, 12, 13)
    assert buckets(8, fixed=True) == (8,)
    assert buckets(1, fixed=False) == (1,)
    for groups in range(1, 40):
        for count in range(1, groups + 1):
            sizes = buckets(groups, fixed=False)
            found = bucket(sizes, count)
            assert count <= found < 1.5 * count + 0.5
            assert found in sizes
