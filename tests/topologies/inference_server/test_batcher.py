"""When inference begins, and who fills which place: on what waits alone, whoever has died."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from longhaul.topologies.inference_server import episodes
from longhaul.topologies.inference_server.batcher import Rule, bucket, buckets, decide
from longhaul.topologies.places import AHEAD, Place, Places

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


# -------------------------------------------------------------------------------------------------------------- places


@settings(max_examples=60, deadline=None)
@given(
    groups=some.integers(1, 5), staleness=some.sampled_from([None, 0, 1, 3]), seed=some.integers(0, 2**32 - 1),
    until=some.integers(1, 9),
)  # fmt: skip
def test_each_place_is_filled_once_and_never_too_early(
    groups: int, staleness: int | None, seed: int, until: int
) -> None:  # fmt: skip
    """Groups begin, fill and die as chance has it; the learner learns when it may."""
    rng = np.random.default_rng(seed)
    places = Places(groups, staleness, 0, until)
    mine: dict[int, Place] = {}
    filled: list[Place] = []
    bound = AHEAD if staleness is None else staleness
    for _ in range(4000):
        if places.version == until:
            break
        group = int(rng.integers(groups))
        chance = rng.random()
        if group not in mine:
            place = places.begin(group)
            if place is not None:
                assert places.version <= place.batch <= places.version + bound
                assert place.batch < until
                assert place not in mine.values(), "two fill one place"
                if staleness is not None:
                    assert place.number == group
                mine[group] = place
        elif chance < 0.2:
            assert places.lose(group)
            del mine[group]
        elif chance < 0.8:
            filled.append(places.fill(group))
            assert filled[-1] == mine.pop(group)
        if places.whole() and rng.random() < 0.5:
            places.learnt()
    assert places.version == until, "it stands still"
    assert sorted(filled) == [Place(b, i) for b in range(until) for i in range(groups)]


def test_without_a_bound_who_is_away_holds_up_nobody() -> None:
    places = Places(3, None, 0, 100)
    assert places.begin(2) == Place(0, 0)  # and then it is away, with its place
    places.lose(2)
    for _ in range(50):
        for group in (0, 1):
            if places.begin(group) is not None:
                places.fill(group)
            while places.whole():
                places.learnt()
    assert places.version > 25


def test_with_a_bound_everybody_is_waited_for() -> None:
    places = Places(2, 1, 0, 100)
    for batch in (0, 1):
        assert places.begin(0) == Place(batch, 0)
        places.fill(0)
    assert places.begin(0) is None
    assert not places.whole()


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="staleness is -1; it must be at least 0"):
        Places(1, -1, 0, 1)


# ------------------------------------------------------------------------------------------------------------- episodes


def test_what_ended_within_a_trajectory_is_counted_as_step_by_step() -> None:
    rng = np.random.default_rng(0)
    steps, columns, told = 9, 40, [0.0, 0.0, 0.0]
    now, earned, length = episodes.fresh(columns), np.zeros(columns), np.zeros(columns, int)
    for _ in range(6):
        reward = rng.integers(-3, 4, (steps, columns)).astype(np.float32)
        valid = rng.random((steps, columns)) < 0.8
        over = (rng.random((steps, columns)) < 0.1) & valid
        reward[~valid] = np.nan  # means nothing
        wanted = [0.0, 0.0, 0.0]
        for t in range(steps):
            earned[valid[t]] += reward[t, valid[t]]
            length += valid[t]
            wanted = [wanted[0] + over[t].sum(), wanted[1] + earned[over[t]].sum(), wanted[2] + length[over[t]].sum()]
            earned[over[t]], length[over[t]] = 0.0, 0
        found, now = episodes.count(now, reward, over, valid)
        assert list(found) == wanted
        np.testing.assert_array_equal(now.earned, earned)
        np.testing.assert_array_equal(now.length, length)
        told = [a + b for a, b in zip(told, wanted, strict=True)]
    assert told[0] > 50
